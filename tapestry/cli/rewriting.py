"""Commands about rewrite rules."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapestry.arguments import shapes
from tapestry.cli.outcome import Command, Outcome
from tapestry.errors import TapestryError, similar, some
from tapestry.plugins import tool

if TYPE_CHECKING:
    from tapestry.ir.graph import Graph


def opt(args: argparse.Namespace) -> Outcome:
    """``tapestry opt``: apply moves to IR text, and prove each."""
    from tapestry.ir import laws
    from tapestry.ir.graph import changes
    from tapestry.ir.syntax.ir_document import to_document
    from tapestry.ir.syntax.printer import to_text
    from tapestry.rewrites.core.applied import apply_moves
    from tapestry.rewrites.core.driver import SIMPLIFIED, simplify
    from tapestry.rewrites.core.rule import parse_move
    from tapestry.rewrites.equations.rule_texts import load_rules
    from tapestry.verify.rewriting.proofs import prove_steps, shown_text

    if args.replay is not None:
        return _replayed(args)
    for path in args.rules:
        load_rules(path)
    graph = _graph(args.graph)
    checks = laws.check(graph)
    between: list[dict[str, str]] = []
    proved: list[dict[str, Any]] = []
    for text in args.rule:
        move, before = parse_move(text), graph
        graph = simplify(graph) if move.rule == SIMPLIFIED else apply_moves(graph, [move])
        checks = laws.check(graph)
        between.append({"move": text, "graph": to_text(graph)})
        shown = prove_steps(changes(graph)[len(changes(before)) :])
        proved.append({"move": text, "shown": dict(shown)})
    texts = [f"# after {b['move']}\n{b['graph']}" for b in between] if args.print_between and between else [to_text(graph)]
    document = {"graph": to_text(graph), "document": to_document(graph), "laws": checks, "proved": proved}
    document |= {"between": between} if args.print_between else {}

    def show() -> None:
        print("\n".join(texts), end="")
        for p in () if args.quiet else proved:
            print(f"{p['move']}: {shown_text(p['shown'])}", file=sys.stderr)

    return Outcome(document, show, insist=True)


def _graph(path: Path | None) -> Graph:
    """The graph of a file of IR text, of an IR document, or of standard input."""
    from tapestry.ir.syntax.ir_document import from_document
    from tapestry.ir.syntax.parser import parse

    if path is None:
        raise TapestryError("no graph is given", hint="a file of IR text, an IR document, - or --replay HISTORY.json")
    if path.suffix == ".json":
        return from_document(path.read_bytes(), str(path))
    try:
        return parse(sys.stdin.read(), "-") if str(path) == "-" else parse(path.read_text(), str(path))
    except UnicodeDecodeError as e:
        raise TapestryError(f"not text: {e}", where=str(path)) from None


def _replayed(args: argparse.Namespace) -> Outcome:
    """``tapestry opt --replay``: a history of rewrites, applied and proved once more."""
    from tapestry.ir.syntax.printer import to_text
    from tapestry.verify.rewriting.history import from_document
    from tapestry.verify.rewriting.proofs import shown_text

    if args.graph is not None or args.rule:
        raise TapestryError("a history has its own graph and moves", where="--replay", hint="leave GRAPH and -r out")
    done = from_document(args.replay.read_bytes(), str(args.replay))
    text = to_text(done.graph)
    document = {"graph": text, "end_sha256": done.end_sha256, "steps": done.steps, "shown": dict(done.shown)}

    def show() -> None:
        print(text, end="")
        if not args.quiet:
            print(f"{some(done.steps, 'rewrite')}, {shown_text(done.shown)}", file=sys.stderr)
            print(f"SHA-256 of the operations: {done.end_sha256}", file=sys.stderr)

    return Outcome(document, show, insist=True)


def rules(args: argparse.Namespace) -> Outcome:
    """``tapestry rules``: the rules, or where they do not apply to a model."""
    from tapestry.rewrites.core.rule import Refusal, rule_table
    from tapestry.rewrites.equations.rule_texts import load_rules

    if args.check:
        return _checked(args.check)
    for path in args.rules:
        load_rules(path)
    if args.derive or args.ablate or args.discover is not None:
        return tool(Command, "rule laboratory")(args)
    if args.rule is not None and args.rule not in rule_table():
        hint = similar(args.rule, sorted(rule_table())) or "`tapestry rules` lists them"
        raise TapestryError(f"there is no rule '{args.rule}'", hint=hint)
    chosen = [rule_table()[args.rule]] if args.rule else list(rule_table().values())
    if args.refused:
        from tapestry.ir.provenance import tensor_names
        from tapestry.lift import lift
        from tapestry.rewrites.core.driver import simplify
        from tapestry.viz import format

        graph = simplify(lift(args.refused, shapes(args.shapes), weights=False).graph)
        refused = [m for r in chosen for m in r.find(graph) if isinstance(m, Refusal)]
        document = {"refused": [str(m) for m in refused]}
        return Outcome(document, lambda: print(format.refusals_text(refused, tensor_names(graph))), insist=True)
    rows = [{"name": r.name, "kind": r.kind, "phase": r.phase, "doc": r.doc} for r in chosen]

    def text() -> None:
        for r in rows:
            print(f"{r['name']} ({r['phase']})\n    {r['doc'] if args.rule else r['doc'].splitlines()[0]}\n")

    return Outcome({"rules": rows}, text, insist=True)


def _checked(paths: Sequence[Path]) -> Outcome:
    """``tapestry rules --check``: what every rule of some files was shown to keep, and by what."""
    from tapestry.rewrites.equations.rule_proofs import checked
    from tapestry.verify.rewriting.proofs import shown_text

    rows = [asdict(c) for path in paths for c in checked(path)]

    def text() -> None:
        for r in rows:
            of = r["of"].removesuffix("s")
            on = some(r["instances"], of) if r["instances"] > 1 else f"its one {of} only"
            what = f"{some(r['moves'], 'move')} on {on}, {shown_text(r['shown'])}"
            print(f"{r['rule']}: {what if r['moves'] else 'not proved: no example in its docstring'}")
            if r["rounding"]:
                print(f"  the rule itself: {r['proof']}; rounding: {r['rounding']}")

    return Outcome({"checked": rows}, text, status=0 if all(r["moves"] for r in rows) else 1, insist=True)
