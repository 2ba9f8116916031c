"""The same plan from every compilation of the same command, whatever else the machine does.

    .venv/bin/python -m bench plan_hash [--runs N] [--first N] [--only NAME …]

Models that take little to plan: a language model and a network for images (graphs of shared/models without weights), and four
that are made here: a recurrent one, and with layouts a transformer block, convolutions in a row, linear layers. N processes
compile them all, each in another order: in turns as the machine is, beside a busy process, stopped for moments, and stopped for
moments beside a busy process; each time with another seed of Python's hashes, on one, two and four threads. Every model must
give one `plan_sha256`. Writes bench/results/plan_hash.json after every process; ``--first N`` goes on after N that are there.
Exits 1 where a model gives two plans.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper, save

import tapestry
from bench.planning.partitioner_cases import all_cases
from bench.support import record
from bench.support.record import Row

FOLDER = record.WORK / "plan_hash"
MADE = {"block": "block, data × tensor 2×4", "convolutions": "convs 56 → 28 → 28", "perceptron": "MLP, FSDP weights"}
CASES: dict[str, tuple[str, dict[str, str]]] = {  # model: mesh, sizes of symbols
    "block": ("2x4", {}),
    "convolutions": ("8", {}),
    "llama_tiny": ("2", {"s72": "1", "s53": "32", "s43": "1"}),
    "lstm": ("2", {}),
    "mobilenet_v2": ("2", {"s31": "4"}),
    "perceptron": ("8", {}),
}
LOADS = ("as it is", "busy", "stopped now and then", "busy and stopped now and then")
THREADS = (1, 2, 4)
BUSY = "while True: pass"
PAUSE = 0.2  # seconds


def write(name: str) -> None:
    """The model's file."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.onnx"
    if name in MADE or name == "lstm":
        save(_lstm() if name == "lstm" else all_cases()[MADE[name]].model(), path)
    else:
        path.write_bytes(gzip.decompress((record.SHARED / f"{name}.onnx.gz").read_bytes()))


def _lstm(steps: int = 12, batch: int = 8, width: int = 64) -> ModelProto:
    """Two layers of an LSTM and a linear one."""
    rng = np.random.default_rng(0)
    shapes = dict.fromkeys(("w0", "r0", "w1", "r1"), (1, 4 * width, width)) | {"v": (width, 8)}
    weights = [
        numpy_helper.from_array(rng.normal(scale=width**-0.5, size=n).astype(np.float32), name) for name, n in shapes.items()
    ]
    axis = numpy_helper.from_array(np.array([1]), "axis")
    nodes = [
        helper.make_node("LSTM", ["x", "w0", "r0"], ["a"], "first", hidden_size=width),
        helper.make_node("Squeeze", ["a", "axis"], ["b"], "squeeze"),
        helper.make_node("LSTM", ["b", "w1", "r1"], ["", "c"], "second", hidden_size=width),
        helper.make_node("MatMul", ["c", "v"], ["y"], "linear"),
    ]
    sizes = {"x": (steps, batch, width), "y": (1, batch, 8)}
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, n) for name, n in sizes.items()]
    graph = helper.make_graph(nodes, "lstm", ends[:1], ends[1:], [*weights, axis])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def once(names: list[str]) -> dict[str, Row]:
    """Hash, objective and wall seconds of one compilation of each model, one after another in this process."""
    out: dict[str, Row] = {}
    for name in names:
        options: dict[str, Any] = {"layouts": all_cases()[MADE[name]].texts()} if name in MADE else {}
        mesh, shapes = CASES[name]
        path = FOLDER / f"{name}.onnx"
        made = tapestry.compile(path, mesh=mesh, topology="cpu", weights=False, shapes=shapes, **options)
        out[name] = {k: made.report[k] for k in ("plan_sha256", "objective_s")} | {"seconds": made.report["seconds"]["total"]}
    return out


def loaded(run: int, names: list[str]) -> dict[str, Row]:
    """What a process of its own finds for the models, in an order of its own, under the load of a run."""
    load, threads = LOADS[run % len(LOADS)], THREADS[run % len(THREADS)]
    order = random.Random(run).sample(names, len(names))
    other = subprocess.Popen([sys.executable, "-c", BUSY]) if "busy" in load else None
    try:
        environment = {**os.environ, "PYTHONHASHSEED": str(run), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "bench", "plan_hash", "--once", "--only", *order]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        while "stopped" in load and process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            time.sleep(PAUSE)
            process.send_signal(signal.SIGCONT)
            time.sleep(2 * PAUSE)
        text, _ = process.communicate()
    finally:
        if other:
            other.kill()
            other.wait()
    if process.returncode:
        raise SystemExit(process.returncode)
    return json.loads(text)


def row(name: str, runs: list[dict[str, Row]]) -> Row:
    """One model in all runs."""
    found = [r[name] for r in runs]
    seconds = [f["seconds"] for f in found]
    return {
        "model": name, "mesh": CASES[name][0], "runs": len(runs), "hashes": sorted({f["plan_sha256"] for f in found}),
        "objectives_s": sorted({f["objective_s"] for f in found}), "least_seconds": min(seconds), "most_seconds": max(seconds),
    }  # fmt: skip


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--first", type=int, default=0, help="runs that were done before, which are not done again")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(once(args.only)))
        return 0
    for name in args.only:
        write(name)
    runs = [r for r in record.read_more("plan_hash", "each", []) if set(args.only) <= r.keys()][: args.first]
    for k in range(len(runs), args.runs):
        runs.append(loaded(k, args.only))
        rows = [row(name, runs) for name in args.only]
        record.write("plan_hash", rows, loads=list(LOADS), threads=list(THREADS), load=os.getloadavg()[0], each=runs)
        print(k, " ".join(f"{r['model']} {len(r['hashes'])}" for r in rows), flush=True)
    for r in rows:
        span = f"{r['least_seconds']:.1f} to {r['most_seconds']:.1f} s"
        print(
            f"{r['model']:18} {r['mesh']:4} {r['runs']:3} runs {span:16} {len(r['hashes'])} plan(s): {', '.join(r['hashes'])}"
        )
    return int(any(len(r["hashes"]) > 1 for r in rows))


if __name__ == "__main__":
    sys.exit(main())
