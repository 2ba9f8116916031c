"""The torch-cpu target beside onnxruntime's CPU provider: batch 1, one process per model, runs in turns.

    .venv/bin/python -m bench cpu [--only NAME …] [--runs N] [--threads N|all]
    .venv/bin/python -m bench cpu --folder FOLDER [--unopened] [--runs N] [--threads N|all]

The models are in the folder of exports beside the checkout; or all that are in FOLDER, as `bench/exporters/corpus_exports.py`
writes them: of these a third, by a hash of the name, is left alone without --unopened, and is reported apart. Stretches of runs
of ours and of onnxruntime (all its graph optimisations) follow each other with a pause between them, since the threads of both
go on looking for work for a while after a run. With ``--threads all`` neither is told a number. What counts is wall time, and
processor time is recorded beside it; the ratio is that of the medians, its spread that of the stretches. Rows of earlier runs
stay, each with when it was measured. Writes bench/results/cpu.json, or cpu_corpus.json of a folder; exits 1 if a result is
further than 1e-5 from onnxruntime's or a peak is not the plan's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.correctness.models import materialize
from bench.exporters.corpus_exports import kept_unopened
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
TURNS, LEAST, PAUSE = 3, 0.5, 0.3  # stretches of each; seconds of one at least, and before the next
ALL = 0  # threads: as many as each tool takes by itself


@dataclass(frozen=True)
class Case:
    """One model's file, its sizes, and how it is run."""

    name: str
    path: str
    shapes: dict[str, str]
    runs: int
    threads: int
    tolerance: float = TOLERANCE

    @property
    def part(self) -> str:
        """Of a corpus: what may be looked at while something is improved, and what may not."""
        return "unopened" if kept_unopened(self.name) else "opened"


def worker(case: Case) -> Row:
    """One model, in this process."""
    import numpy as np
    import onnxruntime
    import torch

    import tapestry

    if case.threads != ALL:
        torch.set_num_threads(case.threads)
    ours = tapestry.compile(case.path, shapes=case.shapes, mesh="1")
    feeds = ours.random_feeds(0)
    options = onnxruntime.SessionOptions()
    if case.threads != ALL:
        options.intra_op_num_threads, options.inter_op_num_threads = case.threads, 1
    theirs = onnxruntime.InferenceSession(case.path, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in theirs.get_outputs()]
    outs, expected = ours.run(feeds), {t: np.asarray(a) for t, a in zip(names, theirs.run(None, feeds), strict=True)}
    error = max(difference(outs[t], expected[t]) for t in names)
    mine, other = list[tuple[float, float]](), list[tuple[float, float]]()
    turns = list[float]()
    for _ in range(TURNS):
        one, two = stretch(lambda: ours.run(feeds), case.runs), stretch(lambda: theirs.run(None, feeds), case.runs)
        mine, other = mine + one, other + two
        turns.append(statistics.median(x[1] for x in one) / statistics.median(x[1] for x in two))
    cpu, wall = ([statistics.median(x[k] for x in side) for side in (mine, other)] for k in (0, 1))
    used = ours.session.run(feeds).measured
    return {
        "wall_ms": wall[0] * 1e3, "ort_wall_ms": wall[1] * 1e3, "ratio": wall[0] / wall[1], "spread": [min(turns), max(turns)],
        "cpu_ms": cpu[0] * 1e3, "ort_cpu_ms": cpu[1] * 1e3, "cpu_ratio": cpu[0] / cpu[1], "rel_err": error,
        "peak_bytes": used.peak, "packed_bytes": used.packed, "load": os.getloadavg()[0],
        "passed": error <= case.tolerance and used.peak == list(ours.build.peak_bytes),
    }  # fmt: skip


def difference(mine: Any, other: Any) -> float:
    """The largest difference of two arrays over the largest value; NaN or infinity on one side only is infinite."""
    import numpy as np

    a, b = np.asarray(mine, np.float64), np.asarray(other, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    if not (np.isfinite(a) | same).all() or not (np.isfinite(b) | same).all():
        return float("inf")
    return float(np.abs(a - b)[~same].max() / np.abs(b[np.isfinite(b)]).max(initial=0.0))


def stretch(run: object, runs: int) -> list[tuple[float, float]]:
    """(processor seconds, wall seconds) of runs in a row after a pause and one that does not count."""
    assert callable(run)
    time.sleep(PAUSE)
    run()
    out, end = list[tuple[float, float]](), time.perf_counter() + LEAST
    while len(out) < runs // TURNS or time.perf_counter() < end:
        out.append(timed(run))
    return out


def timed(run: object) -> tuple[float, float]:
    """(processor seconds, wall seconds) of a call."""
    assert callable(run)
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.process_time() - cpu, time.perf_counter() - wall


def measure(case: Case) -> Row:
    """One model, in a process of its own."""
    row: Row = {"model": case.name, "threads": case.threads, "date": datetime.datetime.now().isoformat(timespec="minutes")}
    command = [sys.executable, "-m", "bench", "cpu", "--worker", json.dumps(asdict(case))]
    env = {**os.environ} | ({} if case.threads == ALL else {"OMP_NUM_THREADS": str(case.threads)})
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=env)
    except subprocess.TimeoutExpired:
        return {**row, "passed": False, "error": f"not done after {TIMEOUT} s"}
    if done.returncode:
        return {**row, "passed": False, "error": done.stderr.strip()[-2000:]}
    return {**row, **json.loads(done.stdout.splitlines()[-1])}


def threads(text: str) -> int:
    """A number of threads, or all."""
    return ALL if text == "all" else int(text)


def listed(args: argparse.Namespace) -> list[Case]:
    """What is to be measured."""
    if args.folder:
        paths = sorted(args.folder.glob("*.onnx"))
        found = [Case(p.stem, str(p), {}, args.runs, args.threads) for p in paths if not args.only or p.stem in args.only]
        return [c for c in found if args.unopened or c.part == "opened"]
    exports = {n: materialize(n, WORK / n) for n in args.only or MODELS}
    return [Case(n, str(p), MODELS[n], args.runs, args.threads) for n, p in exports.items() if p is not None]


def summary(rows: Sequence[Row]) -> Row:
    """Per part and number of threads: how many models, how many ran, geometric mean and worst of the ratios."""
    out: Row = {}
    for key in sorted({(r.get("part", "models"), r["threads"]) for r in rows}):
        of = [r for r in rows if (r.get("part", "models"), r["threads"]) == key]
        ratios = [r["ratio"] for r in of if "ratio" in r]
        out[f"{key[0]}, threads {key[1] or 'all'}"] = {
            "models": len(of), "ran": len(ratios), "passed": sum(r["passed"] for r in of),
            "geometric_mean": statistics.geometric_mean(ratios) if ratios else None, "worst": max(ratios, default=None),
        }  # fmt: skip
    return out


def table(rows: list[Row]) -> Table:
    """All rows for a person."""
    out = Table(title="torch-cpu beside onnxruntime", title_justify="left")
    for c in ("model", "ms", "onnxruntime", "ratio", "stretches", "cpu ratio", "rel err", "packed beyond the plan", ""):
        out.add_column(c, justify="left" if c in ("model", "") else "right")
    for r in rows:
        if "ratio" not in r:
            out.add_row(r["model"], *[""] * 7, r["error"].splitlines()[-1][:60])
            continue
        times = f"{r['wall_ms']:.1f}", f"{r['ort_wall_ms']:.1f}", f"{r['ratio']:.2f}", "{:.2f}–{:.2f}".format(*r["spread"])
        more = f"{r['cpu_ratio']:.2f}", f"{r['rel_err']:.0e}", f"{max(r['packed_bytes']) / 2**20:.0f} MiB"
        out.add_row(r["model"], *times, *more, "" if r["passed"] else "FAILED")
    return out


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--folder", type=Path, help="any models instead of the listed ones")
    parser.add_argument("--unopened", action="store_true", help="the third that is kept unopened as well")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--threads", type=threads, default=1, metavar="N|all")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(worker(Case(**json.loads(args.worker)))))
        return 0

    file = "cpu_corpus" if args.folder else "cpu"
    found = {(r["model"], r["threads"]): r for r in ({"threads": 1} | r for r in record.read(file))}
    new: list[Row] = []
    for case in listed(args):
        row = measure(case) | ({"part": case.part} if args.folder else {})
        new.append(row)
        found[case.name, case.threads] = row
        rows = [found[k] for k in sorted(found)]
        record.write(file, rows, clock="wall time (time.perf_counter)", summary=summary(rows))
    Console(width=None if sys.stdout.isatty() else 160).print(table(new))
    print(json.dumps(summary(new), indent=1))
    return 1 if any(not r["passed"] for r in new) else 0


if __name__ == "__main__":
    sys.exit(main())
