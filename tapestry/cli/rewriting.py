"""Commands about rewrite rules."""

from __future__ import annotations

import argparse
import sys
from difflib import get_close_matches

from tapestry.cli.outcome import Outcome, shapes
from tapestry.errors import TapestryError


def opt(args: argparse.Namespace) -> Outcome:
    """``tapestry opt``: apply moves to IR text."""
    from tapestry.ir import laws
    from tapestry.ir.syntax.parser import parse
    from tapestry.ir.syntax.printer import to_text
    from tapestry.rewrites import load_rules
    from tapestry.rewrites.core.applied import apply_moves
    from tapestry.rewrites.core.rule import parse_move

    for path in args.rules:
        load_rules(path)
    try:
        graph = parse(sys.stdin.read(), "-") if str(args.graph) == "-" else parse(args.graph.read_text(), str(args.graph))
    except UnicodeDecodeError as e:
        raise TapestryError(f"not text: {e}", where=str(args.graph)) from None
    checks = laws.check(graph)
    between: list[dict[str, str]] = []
    for text in args.rule:
        graph = apply_moves(graph, [parse_move(text)])
        checks = laws.check(graph)
        between.append({"move": text, "graph": to_text(graph)})
    texts = [f"# after {b['move']}\n{b['graph']}" for b in between] if args.print_between and between else [to_text(graph)]
    document = {"graph": to_text(graph), "laws": checks, **({"between": between} if args.print_between else {})}
    return Outcome(document, lambda: print("\n".join(texts), end=""), insist=True)


def rules(args: argparse.Namespace) -> Outcome:
    """``tapestry rules``: the rules, or where they do not apply to a model."""
    from tapestry.rewrites import RULES, load_rules
    from tapestry.rewrites.core.rule import Refusal

    for path in args.rules:
        load_rules(path)
    if args.rule is not None and args.rule not in RULES:
        close = get_close_matches(str(args.rule), RULES, 1)
        tip = f"'{close[0]}' is similar; " if close else ""
        raise TapestryError(f"there is no rule '{args.rule}'", hint=f"{tip}one of {', '.join(sorted(RULES))}")
    chosen = [RULES[args.rule]] if args.rule else list(RULES.values())
    if args.refused:
        from tapestry.lift import lift
        from tapestry.rewrites.core.driver import simplify

        graph = simplify(lift(args.refused, shapes(args.shape), weights=False).graph)
        refused = [str(m) for r in chosen for m in r.find(graph) if isinstance(m, Refusal)]
        return Outcome({"refused": refused}, lambda: print("\n".join(refused or ["no rule was refused"])), insist=True)
    rows = [{"name": r.name, "kind": r.kind, "phase": r.phase, "doc": r.doc} for r in chosen]

    def text() -> None:
        for r in rows:
            print(f"{r['name']} ({r['phase']})\n    {r['doc'] if args.rule else r['doc'].splitlines()[0]}\n")

    return Outcome({"rules": rows}, text, insist=True)
