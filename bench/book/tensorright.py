"""TensorRight's 118 rules of XLA's algebraic simplifier: how many of them are laws of index spaces that are proved here.

    .venv/bin/python -m bench tensorright

The laws are `bench/book/tensorright.tap`. Each is proved for all sizes and ranks, by normal form or by cases, and tried on
draws of sizes by an evaluation of its own; ``only tried`` are those that no prover proves. Writes
bench/results/tensorright.json; exits 1 if a law is refuted.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from bench.book.law_values import differs
from bench.support import record
from bench.support.record import Row
from tapestry.rewrites.equations import all_sizes, by_cases
from tapestry.rewrites.equations.pattern import RuleText, parse_rules
from tapestry.rewrites.equations.rule_texts import WORDS

LAWS = Path(__file__).parent / "tensorright.tap"
THEIRS = {"rules": 118, "proved": 115}  # their README, at the commit that the laws name
DRAWS = 12
NOTES = {
    "conv_01": "a sum over every Q-th point is no sum that the normal form knows",
    "dot_01": "the sum over a concat of two single cells is written as their sum",
    "dot_03": "in their file the right-hand side is the left one again: `rewrite … lhs lhs`",
    "reduce_02": "the sum over a concat of two single cells is written as their sum",
    "divmod_05": "with the remainder that has the divisor's sign, as ONNX's Mod",
    "divmod_08": "with the remainder that has the divisor's sign: theirs needs a condition on signs",
    "slice_05": "two laws here: the slice lies below what was padded, or above",
}


def laws() -> tuple[RuleText, ...]:
    """All laws."""
    return parse_rules(LAWS.read_text(encoding="utf-8"), LAWS.name, WORDS, laws=True)


def kind(rule: RuleText) -> str:
    """By what a law is proved; nothing where it is not."""
    return "cases" if by_cases.proved(rule) else "normal form" if all_sizes.proved(rule) else ""


def tried(rule: RuleText) -> tuple[int, str]:
    """On how many draws a law holds, and where it does not."""
    held = 0
    for seed in range(10 * DRAWS):
        try:
            witness = differs(rule, seed)
        except LookupError:
            continue
        if witness:
            return held, witness
        held += 1
        if held == DRAWS:
            break
    return held, ""


def measure(rule: RuleText) -> Row:
    """One law."""
    start = time.process_time()
    proof = kind(rule)
    seconds = time.process_time() - start
    held, witness = tried(rule)
    return {"rule": rule.name, "law": rule.summary, "proof": proof or "only tried", "draws": held, "refuted": witness,
            "cpu_s": seconds, "note": NOTES.get(rule.name, "")}  # fmt: skip


def main() -> int:
    """Prove, try, print and record."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [measure(r) for r in laws()]
    names = {r["rule"].removesuffix("_above") for r in rows}
    open_ = {r["rule"].removesuffix("_above") for r in rows if r["proof"] == "only tried"}
    for r in rows:
        if r["refuted"] or r["proof"] == "only tried" or not r["draws"]:
            print(f"{r['rule']}: {r['proof']}, {r['draws']} draws {r['refuted']}")
    refuted = [r["rule"] for r in rows if r["refuted"]]
    counts = {"rules": len(names), "proved": len(names - open_), "by_cases": sum(r["proof"] == "cases" for r in rows)}
    Console().print(
        f"{counts['proved']} of {counts['rules']} proved (theirs: {THEIRS['proved']}); refuted: {refuted or 'none'}"
    )
    record.write("tensorright", rows, counts=counts, theirs=THEIRS)
    return 1 if refuted else 0


if __name__ == "__main__":
    sys.exit(main())
