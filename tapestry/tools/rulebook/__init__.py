"""The laboratory of rules: forms that they make of a small graph, equations nobody wrote yet, what each is worth."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapestry.arguments import shapes
from tapestry.cli.outcome import Outcome
from tapestry.errors import TapestryError

if TYPE_CHECKING:
    from tapestry.tools.rulebook.production_space import ProductionSpace

Row = dict[str, Any]
ROUNDS = 15  # runs of a build, of which the median counts


def laboratory(args: argparse.Namespace) -> Outcome:
    """``tapestry rules --derive``, ``--ablate`` or ``--discover``."""
    if args.derive:
        return derived(args.derive, mesh=args.mesh, most=args.forms, dot=args.dot)
    if args.ablate:
        return ablated(args.ablate, shapes(args.shapes))
    return discovered(args.discover, shapes(args.shapes), args.terms)


def derived(what: str, *, mesh: str, most: int, dot: bool) -> Outcome:
    """``tapestry rules --derive``: the forms that productions make of a graph, by which of which, with what each costs."""
    from tapestry.ir.syntax.parser import parse
    from tapestry.plan.algebra import Book
    from tapestry.plan.solver.budget import Meter
    from tapestry.plan.topology import parse_mesh, topology
    from tapestry.tools.rulebook.production_space import ProductionSpace
    from tapestry.tools.rulebook.small_graphs import GRAPHS

    if what not in GRAPHS and not Path(what).is_file():
        hint = f"a file of IR text, or one of {', '.join(GRAPHS)}"
        raise TapestryError(f"there is no graph '{what}'", where="--derive", hint=hint)
    graph = parse(GRAPHS.get(what) or Path(what).read_text(encoding="utf-8"), what)
    one = topology(parse_mesh("1"), "cpu")
    space = ProductionSpace(
        topology=topology(parse_mesh(mesh), "cpu"), most=most, book=Book(topology=one, meter=Meter(), units=0.0)
    )
    space.derive(graph)
    document = _space(space)

    def text() -> None:
        print("\n".join(_dot(document) if dot else _listed(document)))

    return Outcome(document, text, insist=True)


def _space(space: ProductionSpace) -> Row:
    """A space of forms as data."""
    from tapestry.ir.syntax.printer import to_text

    rows: list[Row] = [
        {
            "form": f.number,
            "of": f.parent,
            "by": None if f.by is None else str(f.by),
            "moves": [str(m) for m in f.moves],
            "depth": f.depth,
            "seconds": f.seconds,
            "peak_bytes": f.nbytes,
            "graph": to_text(f.graph),
        }
        for f in space.forms
    ]
    again = [{"of": a, "form": b, "by": str(m)} for a, b, m in space.again]
    mesh = {a.name: a.size for a in space.topology.mesh}
    return {"mesh": mesh, "deepest": max(r["depth"] for r in rows), "pruned": dict(space.pruned), "again": again, "forms": rows}


def _dot(document: Row) -> Iterator[str]:
    rows = document["forms"]
    best = min(rows, key=lambda r: r["seconds"])["form"]
    yield "digraph derivations {"
    for r in rows:
        label = f"{r['seconds'] * 1e6:.4g} µs, {r['peak_bytes']:,} B"
        yield f'  f{r["form"]} [label="{label}"{" style=bold" if r["form"] == best else ""}];'
    made = [(r, "") for r in rows if r["of"] is not None] + [(r, " style=dashed") for r in document["again"]]
    yield from (f'  f{r["of"]} -> f{r["form"]} [label="{r["by"].partition("@")[0]}"{style}];' for r, style in made)
    yield "}"


def _listed(document: Row) -> Iterator[str]:
    rows, pruned = document["forms"], document["pruned"]
    for r in rows:
        made = "as written" if r["of"] is None else f"of {r['of']} by {r['by']}"
        yield f"{r['form']:>4}  {r['seconds'] * 1e6:10.4g} µs {r['peak_bytes']:>12,} B  {made}"
    yield f"{len(rows)} forms, by at most {document['deepest']} moves; {len(document['again'])} ways more lead to one of them"
    yield "not followed: " + (", ".join(f"{n} {why}" for why, n in sorted(pruned.items())) or "nothing")
    smallest, best = (min(rows, key=lambda r: (r[a], r[b])) for a, b in (("peak_bytes", "seconds"), ("seconds", "peak_bytes")))
    yield f"smallest: {smallest['form']}"
    yield f"cheapest: {best['form']}" + (f", by -r {' -r '.join(map(repr, best['moves']))}" if best["moves"] else "")
    yield best["graph"].rstrip()


def ablated(models: Sequence[Path], sizes: Mapping[str, Any]) -> Outcome:
    """``tapestry rules --ablate``: objective and processor time with the book, without it, and by equation."""
    from tapestry import api
    from tapestry.rewrites.core.driver import rules_of
    from tapestry.rewrites.core.rule import BOOK

    book = [r.name for r in rules_of("algebra")]
    rows: list[Row] = []
    for model in models:
        whole = api.compile(model, devices=1, shapes=sizes, rules=BOOK)
        used = [n for n in dict.fromkeys(m.partition("@")[0] for m in map(str, whole.build.moves)) if n in book]
        cases = [("all", ()), ("none", ("algebra",))]
        cases += [(f"without {n}", (n,)) for n in used]
        cases += [(f"{n} alone", tuple(m for m in book if m != n)) for n in used]
        for name, without in cases:
            done = whole if name == "all" else api.compile(model, devices=1, shapes=sizes, rules=BOOK, without=without)
            moves = [str(m) for m in done.build.moves]
            times = {"objective_s": done.report["objective_s"], "cpu_s": _timed(done)}
            rows.append({"model": str(model), "equations": name, **times, "moves": moves})

    def text() -> None:
        from tapestry.viz.format import duration

        for r in rows:
            times = f"{duration(r['objective_s']):>8} planned {duration(r['cpu_s']):>8} CPU"
            print(f"{Path(r['model']).name}  {r['equations']:<30} {times}")

    return Outcome({"ablations": rows}, text, insist=True)


def discovered(models: Sequence[Path], sizes: Mapping[str, Any], terms: int) -> Outcome:
    """``tapestry rules --discover``: proved equations that the book does not derive, as texts for it, most saved first."""
    from tapestry.lift import lift
    from tapestry.plan.topology import parse_mesh, topology
    from tapestry.rewrites.core.driver import simplify
    from tapestry.tools.rulebook.discovery import Discovery

    corpus = {str(m): simplify(lift(m, sizes, weights=False).graph) for m in models}
    search = Discovery(corpus=corpus, topology=topology(parse_mesh("1"), "cpu"), terms=terms)
    rows: list[Row] = [
        {
            "equation": f.title,
            "family": f.family,
            "proof": f.proof,
            "rounding": f.rounding,
            "shown": dict(f.shown),
            "saves": [asdict(s) for s in f.savings],
            "text": f.rule.text,
        }
        for f in search.found()
    ]

    def text() -> None:
        for r in rows:
            best = next(iter(r["saves"]), None)
            where = f"saves most on {best['model']}: {best['before'] * 1e6:.4g} to {best['after'] * 1e6:.4g} µs" if best else ""
            print(f"# {r['proof']}; {r['rounding']}" + (f"; {where}" if best else "") + f"\n{r['text']}\n")
        print(f"# {len(rows)} equations; " + ", ".join(f"{n} {what}" for what, n in sorted(search.counts.items())))

    return Outcome({"discovered": rows, "counts": dict(search.counts)}, text, insist=True)


def _timed(done: Any) -> float:
    """Median processor seconds of a run."""
    feeds, seconds = done.random_feeds(0), list[float]()
    done.session.run(feeds)
    for _ in range(ROUNDS):
        start = time.process_time()
        done.session.run(feeds)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)
