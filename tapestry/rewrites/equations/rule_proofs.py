"""What the rules of a user's file were shown to keep before they are ever applied: `tapestry rules --check`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tapestry.errors import TapestryError
from tapestry.ir.graph import changes
from tapestry.ir.syntax.parser import parse
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.rule import parse_move, rule_table
from tapestry.rewrites.core.rule_check import documented
from tapestry.rewrites.equations.equation import Equation
from tapestry.rewrites.equations.rounding import rounding
from tapestry.rewrites.equations.rule_texts import load_rules
from tapestry.verify.rewriting.proofs import prove_steps


@dataclass(frozen=True, slots=True)
class Checked:
    """One rule: on how many graphs (``of`` says what they are) how many moves were proved, and by what how many results;
    ``proof`` is the kind of proof of the rule itself, ``rounding`` by how much its two sides may differ."""

    rule: str
    file: str
    of: str
    instances: int
    moves: int
    shown: Mapping[str, int]
    proof: str = "examples only"
    rounding: str = ""


def checked(path: Path) -> list[Checked]:
    """The rules of a file: equations on random instances of their left-hand sides, classes on their documented examples.

    Raises:
        LawError: a rule does not say the same before and after, with a witness; TapestryError: as `load_rules`.
    """
    out = list[Checked]()
    for name, proof in load_rules(path).items():
        if proof is not None:
            rule = rule_table()[name]
            assert isinstance(rule, Equation)
            shown, bound = dict(proof.shown), rounding(rule.rule)
            out.append(Checked(name, str(path), "random instances", proof.instances, proof.moves, shown, proof.kind, bound))
            continue
        try:
            before, move, _ = documented(rule_table()[name])
        except TapestryError:
            out.append(Checked(name, str(path), "examples", 0, 0, {}))
            continue
        after = apply_moves(parse(before), [parse_move(move)])
        out.append(Checked(name, str(path), "examples", 1, 1, dict(prove_steps(changes(after)))))
    return out
