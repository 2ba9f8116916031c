"""The torch-cpu target beside onnxruntime's CPU provider: one thread, batch 1, one process per model, runs in turns.

    .venv/bin/python -m bench cpu [--only NAME …] [--runs N]

The models are in the folder of exports beside the checkout. A run of ours and one of onnxruntime (all its graph
optimisations, one thread) follow each other, so that both see the same machine; what counts is processor time, and wall time
is recorded beside it. The ratio is that of the medians, its spread the quartiles of the ratios of neighbouring runs.
Writes bench/results/cpu.json; exits 1 if a result is further than 1e-5 from onnxruntime's or a peak is not the plan's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.correctness.models import materialize
from bench.support import record
from bench.support.record import WORK, Row

TOKENS = "1x128"
MODELS: dict[str, dict[str, str]] = {
    "resnet50": {"input": "1x3x224x224"},
    "mobilenet_v2": {"input": "1x3x224x224"},
    "bert_base": dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), TOKENS),
    "gpt2": dict.fromkeys(("input_ids", "attention_mask"), TOKENS),
    "vit_base": {"pixel_values": "1x3x224x224"},
    "llama_tiny": dict.fromkeys(("input_ids", "attention_mask"), TOKENS),
    "unet": {"x": "1x3x128x128"},
}
TOLERANCE = 1e-5
TIMEOUT = 900  # seconds for one model


def worker(name: str, path: Path, runs: int) -> Row:
    """One model, in this process."""
    import numpy as np
    import onnxruntime
    import torch

    import tapestry

    torch.set_num_threads(1)
    ours = tapestry.compile(path, shapes=MODELS[name], mesh="1")
    feeds = ours.random_feeds(0)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    theirs = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in theirs.get_outputs()]
    outs, expected = ours.run(feeds), {t: np.asarray(a) for t, a in zip(names, theirs.run(None, feeds), strict=True)}
    error = max(float(np.abs(outs[t] - expected[t]).max() / np.abs(expected[t]).max()) for t in names)
    mine, other = list[tuple[float, float]](), list[tuple[float, float]]()
    for _ in range(runs):
        mine.append(timed(lambda: ours.run(feeds)))
        other.append(timed(lambda: theirs.run(None, feeds)))
    cpu, wall = ([statistics.median(x[k] for x in side) for side in (mine, other)] for k in (0, 1))
    pairs = statistics.quantiles([a[0] / b[0] for a, b in zip(mine, other, strict=True)], n=4)
    used = ours.session.run(feeds).measured
    return {
        "cpu_ms": cpu[0] * 1e3, "ort_cpu_ms": cpu[1] * 1e3, "ratio": cpu[0] / cpu[1], "spread": [pairs[0], pairs[2]],
        "wall_ms": wall[0] * 1e3, "ort_wall_ms": wall[1] * 1e3, "wall_ratio": wall[0] / wall[1], "rel_err": error,
        "peak_bytes": used.peak, "packed_bytes": used.packed, "load": os.getloadavg()[0],
        "passed": error <= TOLERANCE and used.peak == list(ours.build.peak_bytes),
    }  # fmt: skip


def timed(run: object) -> tuple[float, float]:
    """(processor seconds, wall seconds) of a call."""
    assert callable(run)
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.process_time() - cpu, time.perf_counter() - wall


def measure(name: str, runs: int) -> Row:
    """One model, in a process of its own with one OpenMP thread."""
    row: Row = {"model": name}
    path = materialize(name, WORK / name)
    if path is None:
        return {**row, "skipped": "the folder of exported models is not beside the checkout"}
    command = [sys.executable, "-m", "bench", "cpu", "--worker", json.dumps([name, str(path), runs])]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=env)
    except subprocess.TimeoutExpired:
        return {**row, "passed": False, "error": f"not done after {TIMEOUT} s"}
    if done.returncode:
        return {**row, "passed": False, "error": done.stderr.strip()[-2000:]}
    return {**row, **json.loads(done.stdout.splitlines()[-1])}


def table(rows: list[Row]) -> Table:
    """All rows for a person."""
    out = Table(title="torch-cpu beside onnxruntime, one thread", title_justify="left")
    for c in ("model", "ms", "onnxruntime", "ratio", "quartiles", "wall ratio", "rel err", "packed beyond the plan", ""):
        out.add_column(c, justify="left" if c in ("model", "") else "right")
    for r in rows:
        if "ratio" not in r:
            out.add_row(r["model"], *[""] * 7, r.get("skipped") or r["error"].splitlines()[-1])
            continue
        times = f"{r['cpu_ms']:.1f}", f"{r['ort_cpu_ms']:.1f}", f"{r['ratio']:.2f}", "{:.2f}–{:.2f}".format(*r["spread"])
        more = f"{r['wall_ratio']:.2f}", f"{r['rel_err']:.0e}", f"{max(r['packed_bytes']) / 2**20:.0f} MiB"
        out.add_row(r["model"], *times, *more, "" if r["passed"] else "FAILED")
    return out


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), metavar="NAME")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, path, runs = json.loads(args.worker)
        print(json.dumps(worker(name, Path(path), runs)))
        return 0

    found = {r["model"]: r for r in record.read("cpu")} if args.only else {}
    new: list[Row] = []
    for name in args.only or MODELS:
        row = measure(name, args.runs)
        new.append(row)
        found[name] = row
        record.write("cpu", [found[m] for m in MODELS if m in found], clock="processor time of the process (time.process_time)")
    Console(width=None if sys.stdout.isatty() else 160).print(table(new))
    return 1 if any(not r.get("passed", "skipped" in r) for r in new) else 0


if __name__ == "__main__":
    sys.exit(main())
