"""The laboratory of the book of equations: the space that it spans for a graph, and what each equation is worth for a model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tapestry.cli.outcome import Outcome

Row = dict[str, Any]
ROUNDS = 15  # runs of a build, of which the median counts


def derived(path: Path, *, dot: bool) -> Outcome:
    """``tapestry rules --derive``: every form of a graph that was looked at, by which equation of which, with its price."""
    from tapestry.ir.syntax.parser import parse
    from tapestry.ir.syntax.printer import to_text
    from tapestry.plan.book.algebra import Book
    from tapestry.plan.solver.budget import Meter
    from tapestry.plan.topology import parse_mesh, topology
    from tapestry.rewrites.core.driver import SIMPLIFIED, simplify

    graph = simplify(parse(path.read_text(encoding="utf-8"), str(path)))
    book = Book(topology=topology(parse_mesh("1"), "cpu"), meter=Meter(), units=0.0)
    rows: list[Row] = []
    for f in book.forms(graph):
        moves = [str(m) for m in f.moves]
        steps = [s for m in moves for s in (f'{SIMPLIFIED}@"graph"', m)][1:]
        rows.append({"form": f.number, "of": f.parent, "by": moves[-1] if moves else None, "moves": steps, "seconds": f.price,
                     "graph": to_text(f.graph)})  # fmt: skip

    def text() -> None:
        print("\n".join(_dot(rows) if dot else _listed(rows)))

    return Outcome({"forms": rows}, text, insist=True)


def _dot(rows: Sequence[Row]) -> Iterator[str]:
    best = min(rows, key=lambda r: r["seconds"])["form"]
    yield "digraph derivations {"
    for r in rows:
        yield f'  f{r["form"]} [label="{r["seconds"] * 1e6:.4g} µs"{" style=bold" if r["form"] == best else ""}];'
    yield from (f'  f{r["of"]} -> f{r["form"]} [label="{r["by"].partition("@")[0]}"];' for r in rows if r["of"] is not None)
    yield "}"


def _listed(rows: Sequence[Row]) -> Iterator[str]:
    for r in rows:
        made = "as written" if r["of"] is None else f"of {r['of']} by {r['by']}"
        yield f"{r['form']:>4}  {r['seconds'] * 1e6:10.4g} µs  {made}"
    best = min(rows, key=lambda r: r["seconds"])
    yield f"cheapest: {best['form']}" + (f", by -r {' -r '.join(map(repr, best['moves']))}" if best["moves"] else "")
    yield best["graph"].rstrip()


def ablated(models: Sequence[Path], shapes: Mapping[str, Any]) -> Outcome:
    """``tapestry rules --ablate``: objective and processor time with the book, without it, and by equation."""
    from tapestry import api
    from tapestry.rewrites.core.driver import rules_of

    book = [r.name for r in rules_of("algebra")]
    rows: list[Row] = []
    for model in models:
        whole = api.compile(model, devices=1, shapes=shapes)
        used = [n for n in dict.fromkeys(m.partition("@")[0] for m in map(str, whole.build.moves)) if n in book]
        cases = [("all", ()), ("none", ("algebra",))]
        cases += [(f"without {n}", (n,)) for n in used]
        cases += [(f"{n} alone", tuple(m for m in book if m != n)) for n in used]
        for name, without in cases:
            done = whole if name == "all" else api.compile(model, devices=1, shapes=shapes, without=without)
            moves = [str(m) for m in done.build.moves]
            times = {"objective_s": done.report["objective_s"], "cpu_s": _timed(done)}
            rows.append({"model": str(model), "equations": name, **times, "moves": moves})

    def text() -> None:
        from tapestry.viz.format import duration

        for r in rows:
            times = f"{duration(r['objective_s']):>8} planned {duration(r['cpu_s']):>8} CPU"
            print(f"{Path(r['model']).name}  {r['equations']:<30} {times}")

    return Outcome({"ablations": rows}, text, insist=True)


def discovered(models: Sequence[Path], shapes: Mapping[str, Any], terms: int) -> Outcome:
    """``tapestry rules --discover``: proved equations that the book does not derive, as texts for it, most saved first."""
    from tapestry.lift import lift
    from tapestry.plan.book.discovery import Discovery
    from tapestry.plan.topology import parse_mesh, topology
    from tapestry.rewrites.core.driver import simplify

    corpus = {str(m): simplify(lift(m, shapes, weights=False).graph) for m in models}
    search = Discovery(corpus=corpus, topology=topology(parse_mesh("1"), "cpu"), terms=terms)
    rows: list[Row] = [
        {"equation": f.title, "family": f.family, "proof": f.proof, "rounding": f.rounding, "shown": dict(f.shown),
         "saves": [asdict(s) for s in f.savings], "text": f.rule.text}
        for f in search.found()
    ]  # fmt: skip

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
