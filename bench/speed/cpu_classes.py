"""Classes of operations beside onnxruntime's CPU provider, in small networks whose sizes a seed draws.

    .venv/bin/python -m bench cpu_classes [--only CLASS …] [--seeds N …] [--runs N] [--threads N]

What is slow on a class is slow on any model that has it; no size is listed, so that none is one that kernels were made for.
Each network is exported and measured as `bench cpu` measures a model. Rows of earlier runs stay, each with its date.
Writes bench/results/cpu_classes.json; exits 1 if a result is further than 1e-5 from onnxruntime's or a peak is not the plan's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from rich.console import Console

from bench.exporters.class_nets import CLASSES, net
from bench.speed.cpu import Case, measure, table, threads
from bench.support import record
from bench.support.record import Row


def export(name: str, seed: int, path: Path) -> str:
    """Write a network; what its inputs are."""
    module, inputs = net(name, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module, inputs, dynamo=True, verbose=False)
    assert program is not None
    program.save(path)
    return ", ".join("x".join(map(str, x.shape)) for x in inputs)


def summary(rows: list[Row]) -> Row:
    """Geometric mean and worst over the classes, for each number of threads."""
    out: Row = {}
    for count in sorted({r["threads"] for r in rows}):
        ratios = [r["ratio"] for r in rows if r["threads"] == count and "ratio" in r]
        mean = statistics.geometric_mean(ratios) if ratios else None
        out[f"threads {count or 'all'}"] = {"networks": len(ratios), "geometric_mean": mean, "worst": max(ratios, default=None)}
    return out


def main() -> int:
    """Export, measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CLASS", choices=sorted(CLASSES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--threads", type=threads, default=1, metavar="N|all")
    args = parser.parse_args()
    found = {(r["model"], r["seed"], r["threads"]): r for r in record.read("cpu_classes")}
    new: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only or CLASSES:
            for seed in args.seeds:
                path = Path(folder) / "net.onnx"
                sizes = export(name, seed, path)
                new.append({**measure(Case(name, str(path), {}, args.runs, args.threads)), "seed": seed, "inputs": sizes})
                found[name, seed, args.threads] = new[-1]
                record.write("cpu_classes", [found[k] for k in sorted(found)], summary=summary(list(found.values())))
    Console(width=None if sys.stdout.isatty() else 160).print(table(new))
    print(json.dumps(summary(new), indent=1))
    return 1 if any(not r["passed"] for r in new) else 0


if __name__ == "__main__":
    sys.exit(main())
