"""onnx's own test-suite: ours beside onnxruntime's and the ONNX reference evaluator's, in the same run.

    .venv/bin/python -m bench conformance [--sharded | --lifting] [--only REGEX] [--backends NAME …] [--processes N]

Plain: every case of ``onnx.backend.test`` on the CPU (node, simple, pytorch-converted, pytorch-operator, light models), and
what every operator lifts to. What does not pass here is listed, each with its reason, in tests/support/conformance_table.json;
a new failure and a new pass alike make this command (and the slow tests) fail until the table is edited.
``--sharded``: every node case that passes, under random legal splits on 2 and 3 logical devices, against itself unsplit.
``--lifting``: only what every operator lifts to.
All write bench/results/conformance.json; exit status 1 when something is not as the table says.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import re
import time
from collections import Counter
from typing import Any

from bench.support import onnx_suite as suite
from bench.support import record
from bench.support.record import ROOT, Row

TABLE = ROOT / "tests" / "support" / "conformance_table.json"
PEERS = ("tapestry", "onnxruntime", "reference")


def expected() -> dict[str, str]:
    """Cases that do not pass, with the reason; without Pillow installed, also those that need it."""
    table = json.loads(TABLE.read_text())
    try:
        import PIL  # noqa: F401
    except ImportError:
        return {**table["fails"], **table["needs_pillow"]}
    return table["fails"]


def backend(name: str) -> Any:
    """The backend of a name."""
    from bench.support.onnx_backend import TapestryBackend

    return {"tapestry": TapestryBackend, "onnxruntime": suite.OnnxRuntime, "reference": suite.Reference}[name]


def plain(job: tuple[str, str, int, int]) -> tuple[str, dict[str, tuple[str, str, str]], float]:
    """Every n-th case on one backend; seconds are processor time of this share."""
    name, pattern, share, shares = job
    logging.disable(logging.WARNING)
    cases = {k: v for k, v in suite.tests(backend(name)).items() if re.search(pattern, k)}
    start = time.process_time()
    mine = sorted(cases)[share::shares]
    found = {k: (cases[k][0], *suite.attempt(cases[k][1])) for k in mine}
    return name, found, time.process_time() - start


def sharded(job: tuple[str, int, int]) -> tuple[dict[str, tuple[str, str, int]], float]:
    """Every n-th node case that passes, under random splits; and processor seconds."""
    pattern, share, shares = job
    logging.disable(logging.WARNING)
    skipped, start = set(expected()), time.process_time()
    out: dict[str, tuple[str, str, int]] = {}
    for case in [c for c in suite.node_cases() if re.search(pattern, c.name)][share::shares]:
        if case.name not in skipped:
            (result, why), cut = suite.sharded(case)
            out[case.name] = (result, why, cut)
    return out, time.process_time() - start


def differences(found: dict[str, tuple[str, str, str]]) -> list[str]:
    """Where the suite and the table disagree."""
    table = expected()
    lines = [f"new failure: {n}: {r[1]}: {r[2]}" for n, r in found.items() if r[1] != "pass" and n not in table]
    return lines + [f"new pass, edit {TABLE.name}: {n}" for n, r in found.items() if r[1] == "pass" and n in table]


def run_plain(pool: Any, pattern: str, shares: int, backends: list[str]) -> tuple[list[Row], dict[str, Any], list[str]]:
    """Every backend asked for, ours first; rows are categories by backend."""
    jobs = [(name, pattern, k, shares) for name in backends for k in range(shares)]
    results: dict[str, dict[str, tuple[str, str, str]]] = {n: {} for n in backends}
    seconds: Counter[str] = Counter()
    for name, found, took in pool.imap(plain, jobs):
        results[name].update(found)
        seconds[name] += took
    rows: list[Row] = []
    for name in backends:
        counts = Counter((c, r) for c, r, _ in results[name].values())
        total = {r: sum(n for (_, q), n in counts.items() if q == r) for r in ("pass", "fail", "skip")}
        by = {c: {r: n for (d, r), n in sorted(counts.items()) if d == c} for c, _ in sorted(counts)}
        rows.append({"backend": name, **total, "cpu_seconds": round(seconds[name], 1), "categories": by})
    ours = results["tapestry"]
    return rows, {"not_passing": {n: [r[1], r[2]] for n, r in sorted(ours.items()) if r[1] != "pass"}}, differences(ours)


def operators() -> dict[str, Any]:
    """Operator to class and counts, and how many operators are in each class."""
    table = suite.classes(suite.node_cases())
    kinds = {op: suite.overall(row) for op, row in table.items()}
    return {"counts": dict(Counter(kinds.values())), "operators": {op: {"class": kinds[op], **table[op]} for op in table}}


def run_sharded(pool: Any, pattern: str, shares: int) -> tuple[dict[str, Any], list[str]]:
    """Counts over all node cases, and what went wrong."""
    found, seconds = dict[str, tuple[str, str, int]](), 0.0
    for part, took in pool.imap(sharded, [(pattern, k, shares) for k in range(shares)]):
        found.update(part)
        seconds += took
    counts = Counter(r for r, _, _ in found.values())
    row = {
        "devices": [2, 3], "cases": len(found), **counts, "cases_with_a_cut": sum(c > 0 for _, _, c in found.values()),
        "operations_cut": sum(c for _, _, c in found.values()), "cpu_seconds": round(seconds, 1),
    }  # fmt: skip
    return row, [f"{n}: {r}: {why}" for n, (r, why, _) in found.items() if r != "pass"]


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--lifting", action="store_true")
    parser.add_argument("--only", default=".", metavar="REGEX")
    parser.add_argument("--backends", nargs="+", default=list(PEERS), choices=PEERS, help="ours is always among them")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    document: dict[str, Any] = {k: record.read_more("conformance", k, {}) for k in ("not_passing", "lifting", "sharded")}
    rows = record.read("conformance")
    wrong: list[str] = []
    if args.lifting:
        document["lifting"] = operators()
        print("operators:", document["lifting"]["counts"])
        args.processes = 1
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        if args.sharded:
            document["sharded"], wrong = run_sharded(pool, args.only, args.processes)
            document["sharded"] |= record.stamp()
            print(json.dumps(document["sharded"], indent=1))
        elif not args.lifting:
            backends = list(dict.fromkeys(["tapestry", *args.backends]))
            rows, more, wrong = run_plain(pool, args.only, args.processes, backends)
            document |= more
            document["lifting"] = operators()
            for row in rows:
                counts = ", ".join(f"{row[r]:5} {r}" for r in ("pass", "fail", "skip"))
                print(f"{row['backend']:12} {counts}, {row['cpu_seconds']} s of processor time")
            print("operators:", document["lifting"]["counts"])
    if not args.lifting:
        print("\n".join(wrong) or "all as the table says")
    if args.only == ".":
        record.write("conformance", rows, **document)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
