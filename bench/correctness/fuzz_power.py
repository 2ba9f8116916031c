"""How well bugs are found: each of `seeded_bugs` is put in alone, and cases are tried until one fails.

    .venv/bin/python -m bench fuzz_power [--seed S] [--most N] [--only NAME …] [--resume]

Prints for each bug after how many cases it was found and by what: a law of the verifier, values that differ from the reference,
bytes that were not planned, an assertion. Without any bug the same cases pass. A third of the bugs are new for every seed:
small faults (`bench.support.mutants`) drawn from the modules in `DRAWN_FROM`, of which some cannot be seen. Writes
bench/results/fuzz_power.json; exits 1 if a bug of the fixed two thirds was not found, or something was found without one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.correctness.seeded_kernel_bugs import BUGS, seeded
from bench.support import record
from bench.support.mutants import Mutant, functions, install, mutants, sample
from bench.support.record import ROOT
from tests.fuzz.campaign import fuzz

DRAWN_FROM = ("lift/operators", "rewrites", "plan/lower.py", "plan/strategy.py", "ir/monoid.py", "ir/index.py")


def drawn(seed: int) -> dict[str, Mutant]:
    """The new bugs of a seed: half as many as there are fixed ones."""
    paths = [ROOT / "tapestry" / p for p in DRAWN_FROM]
    files = [f for p in paths for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    found = [m for f in files for m in mutants(f, ROOT)]
    return {m.key: m for m in sample(found, len(BUGS) // 2, random.Random(f"bugs {seed}"))}


@contextlib.contextmanager
def planted(name: str, seed: int) -> Iterator[None]:
    """The compiler with one bug in it, fixed or drawn; as it is, where there is no name."""
    if name in BUGS or not name:
        with seeded(name) if name else contextlib.nullcontext():
            yield
        return
    undo = install(drawn(seed)[name], ROOT, functions())
    try:
        yield
    finally:
        for f, code in undo:
            f.__code__ = code


def hunt(name: str, seed: int, most: int) -> dict[str, Any]:
    """Cases until a bug is found (``cases`` 0: it was not), in a process of its own, so that nothing is cached yet."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as out, planted(name, seed):
            json.dump(_first(seed, most), out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    assert text, f"the process of '{name}' died"
    return {"bug": name, **json.loads(text)}


def _first(seed: int, most: int) -> dict[str, Any]:
    """The first case that fails; where it ends in an exception, the first that gives a wrong answer or breaks a law, if any."""
    found, first, seconds = {"kind": "", "what": "", "case": -1}, 0, 0.0
    while first < most:
        tally = fuzz(seed, most - first, first=first, stop=1, shrinking=0)
        seconds += tally.seconds
        if not tally.failures:
            break
        found = tally.failures[0]
        first = found["case"] + 1
        if found["kind"] != "crash":
            break
    how = found["what"] if found["kind"] == "law" else found["kind"]
    row = {"cases": found["case"] + 1, "kind": found["kind"], "found_by": how, "what": found["what"]}
    return {**row, "seconds": round(seconds, 2)}


def hunts(names: list[str], seed: int, most: int) -> Iterator[dict[str, Any]]:
    """One row per bug, and a last one without any."""
    for name in names:
        says = (BUGS[name].__doc__ or "").strip().splitlines()[0] if name in BUGS else "drawn"
        yield {**hunt(name, seed, most), "says": says}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--most", type=int, default=3000, help="cases per bug")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--resume", action="store_true", help="keep the rows of a run that was ended")
    args = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    import torch

    torch.set_num_threads(1)
    names = args.only or [*BUGS, *drawn(args.seed)]
    table = Table("bug", "says", "found by", "cases", "seconds")
    rows = [r for r in record.read("fuzz_power") if r["bug"] in names] if args.resume else []
    for row in hunts([n for n in names if n not in {r["bug"] for r in rows}], args.seed, args.most):
        rows.append(row)
        print(row["bug"], row["found_by"] or "NOT FOUND", row["cases"], file=sys.stderr, flush=True)
        if not args.only:
            record.write("fuzz_power", rows, seed=args.seed, most=args.most, without_a_bug="not asked yet")
    for row in rows:
        table.add_row(row["bug"], row["says"], row["found_by"] or "NOT FOUND", str(row["cases"]), f"{row['seconds']:.1f}")
    healthy = hunt("", args.seed, max(200, max(r["cases"] for r in rows)))
    Console(width=150).print(table)
    missed = [r["bug"] for r in rows if not r["found_by"] and r["bug"] in BUGS]
    new = [r for r in rows if r["bug"] not in BUGS]
    print(f"{sum(bool(r['found_by']) for r in new)} of {len(new)} drawn bugs found")
    rows = [r for r in rows if r["bug"] in BUGS]
    print(f"{len(rows) - len(missed)} of {len(rows)} bugs found; without a bug: {healthy['found_by'] or 'nothing found'}")
    if not args.only:
        found = healthy["found_by"] or "nothing"
        record.write("fuzz_power", [*rows, *new], seed=args.seed, most=args.most, without_a_bug=found)
    return 1 if missed or healthy["found_by"] else 0


if __name__ == "__main__":
    sys.exit(main())
