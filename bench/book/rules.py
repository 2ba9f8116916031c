"""What the book of equations is worth: small graphs as people write them, planned and run without it and with it.

    .venv/bin/python -m bench rules [--graph NAME]

Every row is one graph of `bench.book.rule_graphs`: FLOPs, bytes that operations read and write, kernels and the plan's
objective on one device, bytes on the wire on eight, and processor time of a run (the median of rounds of both builds in turn,
on one thread). Both results are held to the reference evaluator, and to each other. Writes bench/results/rules.json, where rows
that are not measured anew stay; exits 1 if a result is wrong, or if a graph became slower by more than a tenth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from rich.console import Console
from rich.table import Table

from bench.book.rule_graphs import SEEN, UNOPENED
from bench.support import record
from bench.support.record import Row
from tapestry import api
from tapestry.ir.plan import MeshAxis
from tapestry.ir.program import Launch, Reduce, Transfer, transfer_bytes
from tapestry.plan.cost.compute import quantities
from tapestry.plan.strategy import footprints, op_boxes, strategies, tensor_boxes

FOLDER = record.WORK / "rules"
SPENT, ROUNDS, FEWEST = 1.0, 60, 5  # seconds of processor time for a graph's rounds, and how many rounds
SLOWER = 1.1
ONE = (MeshAxis("d0", 1),)


def compiled(path: Path, devices: int, book: bool) -> api.Compiled:
    """The model compiled, with the book of equations or without."""
    return api.compile(path, devices=devices, topology="cpu", rules="algebra" if book else ())


def counted(build: api.Compiled) -> Row:
    """FLOPs, bytes that operations touch, kernels, objective and moves of a build of one device."""
    graph, flops, nbytes = build.build.plan.graph, 0, 0
    for op in graph.ops:
        (s,) = strategies(op, ONE)
        block, final = op_boxes(op, s.dims, ONE), tensor_boxes(tuple(d.size for d in op.dims), s.out, ONE)
        reads = {(t, b.tobytes()): b for _, t, b in footprints(op, graph, s, ONE)}
        heavy, light, moved = quantities(op, graph, block, final, reads)
        flops, nbytes = flops + int(heavy[0] + light[0]), nbytes + int(moved[0])
    kernels = sum(isinstance(step, Launch) for step in build.build.program.steps)
    return {"flops": flops, "bytes": nbytes, "kernels": kernels, "objective_s": build.report["objective_s"]}


def wire(build: api.Compiled) -> int:
    """Bytes that all devices put on the wire."""
    program = build.build.program
    return sum(transfer_bytes(step, program) for step in program.steps if isinstance(step, Transfer | Reduce))


def raced(builds: list[api.Compiled], feeds: dict[str, Any]) -> list[float]:
    """Processor seconds of a run of each, the median of rounds in turn."""
    for b in builds:
        b.session.run(feeds)
    times: list[list[float]] = [[] for _ in builds]
    begin = time.process_time()
    while len(times[0]) < FEWEST or (len(times[0]) < ROUNDS and time.process_time() - begin < SPENT):
        for b, seconds in zip(builds, times, strict=True):
            start = time.process_time()
            b.session.run(feeds)
            seconds.append(time.process_time() - start)
    return [statistics.median(t) for t in times]


def measure(name: str, model: onnx.ModelProto, unopened: bool) -> Row:
    """One graph."""
    path = FOLDER / f"{name}.onnx"
    onnx.save(model, path)
    builds = [compiled(path, 1, book) for book in (False, True)]
    feeds = builds[0].random_feeds(0)
    before, after = (api.run_checked(b, feeds, check=True) for b in builds)
    (a,), (b,) = (list(r.outputs.values()) for r, _ in (before, after))
    difference = float(np.abs(a - b).max() / max(1e-30, float(np.abs(a).max())))
    same = builds[0].report["plan_sha256"] == builds[1].report["plan_sha256"]  # one program is not raced with itself
    seconds = raced(builds[:1], feeds) * 2 if same else raced(builds, feeds)
    many = [compiled(path, 8, book) for book in (False, True)]
    sides = [counted(b) | {"cpu_s": s, "wire_bytes_8": wire(m), "objective_8_s": m.report["objective_s"]}
             for b, s, m in zip(builds, seconds, many, strict=True)]  # fmt: skip
    return {
        "graph": name, "unopened": unopened, "before": sides[0], "after": sides[1], "moves": list(builds[1].build.moves),
        "passed": before[1]["passed"] and after[1]["passed"], "difference": difference,
        "rewrites": builds[1].report["rewrites"],
        "faster": seconds[0] / seconds[1],
    }  # fmt: skip


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", action="append", default=[], help="only these")
    parser.add_argument("--seen", action="store_true", help="only those that were looked at while the rules were written")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    cases = [(n, make, of is UNOPENED) for of in (SEEN, *(() if args.seen else (UNOPENED,))) for n, make in of.items()]
    rows = [measure(n, make(), new) for n, make, new in cases if not args.graph or n in args.graph]
    table = Table(title="Without the book of equations, and with it", title_justify="left")
    for c in (
        "graph",
        "MFLOP",
        "MB",
        "kernels",
        "objective ms",
        "CPU ms",
        "faster",
        "8 devices: MB",
        "difference",
        "equations",
    ):
        table.add_column(c, justify="left" if c in ("graph", "equations") else "right")
    for r in rows:
        pairs = [f"{r['before'][k] * u:.3g} → {r['after'][k] * u:.3g}" for k, u in
                 (("flops", 1e-6), ("bytes", 1e-6), ("kernels", 1), ("objective_s", 1e3), ("cpu_s", 1e3))]  # fmt: skip
        wires = f"{r['before']['wire_bytes_8'] / 1e6:.3g} → {r['after']['wire_bytes_8'] / 1e6:.3g}"
        used = " ".join(dict.fromkeys(m.partition("@")[0] for m in r["moves"] if not m.startswith("simplified")))
        name = r["graph"] + (" *" if r["unopened"] else "")
        mark = "" if r["passed"] else " WRONG"
        table.add_row(name, *pairs, f"{r['faster']:.2f}", wires, f"{r['difference']:.1e}{mark}", used)
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)
    won, slower = sum(r["faster"] >= 1.2 for r in rows), [r["graph"] for r in rows if r["faster"] < 1 / SLOWER]
    print(f"{won} of {len(rows)} are 1.2 times faster or more; slower: {', '.join(slower) or 'none'}; * unopened")
    record.write("rules", record.merged("rules", rows, ("graph",)))
    return 0 if all(r["passed"] for r in rows) and not slower else 1


if __name__ == "__main__":
    sys.exit(main())
