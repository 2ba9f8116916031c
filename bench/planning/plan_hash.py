"""The same plan from every compilation of the same command, whatever else the machine does.

    .venv/bin/python -m bench plan_hash [--runs N] [--only NAME …]

Six models that take little to plan: of text, images, speech, and a recurrent one (graphs of shared/models without weights, and
an LSTM that is made here), compiled N times each in processes of their own: in turns as the machine is, beside a busy process,
at a low priority, and at a low priority beside a busy process; each time with another seed of Python's hashes, on one, two
and four threads. Every model must give one `plan_sha256`. Writes bench/results/plan_hash.json, where rows of models that are
left out stay; exits 1 where one gives two.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper, save

from bench.support import record
from bench.support.record import Row

FOLDER = record.WORK / "plan_hash"
CASES = {  # model: mesh, sizes of symbols
    "bert_base": ("2", {"s18": "4", "s41": "128", "s43": "4"}),
    "llama_tiny": ("2", {"s72": "1", "s53": "32", "s43": "1"}),
    "lstm": ("2", {}),
    "mobilenet_v2": ("2", {"s31": "4"}),
    "vit_base": ("2x2", {"s99": "4"}),
    "whisper_encoder": ("2", {"s6": "2"}),
}
LOADS = ("as it is", "busy", "low priority", "busy and low priority")
THREADS = (1, 2, 4)
BUSY = "while True: pass"


def written(name: str) -> Path:
    """The model's file."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.onnx"
    if name == "lstm":
        save(_lstm(steps=12, batch=8, width=64), path)
    else:
        path.write_bytes(gzip.decompress((record.SHARED / f"{name}.onnx.gz").read_bytes()))
    return path


def _lstm(steps: int, batch: int, width: int) -> ModelProto:
    """Two layers of an LSTM and a linear one."""
    rng = np.random.default_rng(0)
    shapes = dict.fromkeys(("w0", "r0", "w1", "r1"), (1, 4 * width, width)) | {"v": (width, 8)}
    weights = [numpy_helper.from_array(rng.normal(size=n).astype(np.float32), name) for name, n in shapes.items()]
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


def compiled(path: Path, name: str, run: int) -> tuple[str, float, float]:
    """Hash, objective and wall seconds of one compilation under the load of a run."""
    mesh, shapes = CASES[name]
    load, threads = LOADS[run % len(LOADS)], THREADS[run % len(THREADS)]
    bound = [a for item in shapes.items() for a in ("--shape", "=".join(item))]
    options = ["--mesh", mesh, "--topology", "cpu", "--no-weights", "--json", *bound]
    command = [sys.executable, "-m", "tapestry", "compile", str(path), "-o", str(FOLDER / "build"), *options]
    low = ["nice", "-n", "10"] if "low" in load else []
    other = subprocess.Popen([sys.executable, "-c", BUSY]) if "busy" in load else None
    try:
        environment = {**os.environ, "PYTHONHASHSEED": str(run), "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run([*low, *command], capture_output=True, text=True, env=environment)
    finally:
        if other:
            other.kill()
            other.wait()
    if done.returncode:
        raise SystemExit(f"{path.name}: {done.stderr}")
    found = json.loads(done.stdout)
    return found["plan_sha256"], found["objective_s"], found["seconds"]["total"]


def measure(name: str, runs: int) -> Row:
    """One model under all loads."""
    path, before = written(name), _used()
    found = [compiled(path, name, k) for k in range(runs)]
    hashes = sorted({h for h, _, _ in found})
    seconds = [s for _, _, s in found]
    return {
        "model": name, "mesh": CASES[name][0], "runs": runs, "hashes": hashes, "objectives_s": sorted({o for _, o, _ in found}),
        "least_seconds": min(seconds), "most_seconds": max(seconds), "cpu_s": _used() - before, "load": os.getloadavg()[0],
    }  # fmt: skip


def _used() -> float:
    """Processor seconds of all processes that ended, busy ones too."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    args = parser.parse_args()
    rows: list[Row] = []
    for name in args.only:
        r = measure(name, args.runs)
        span = f"{r['least_seconds']:.1f} to {r['most_seconds']:.1f} s"
        many = f"{len(r['hashes'])} plan(s): {', '.join(r['hashes'])}"
        print(f"{r['model']:18} {r['mesh']:4} {r['runs']:3} runs {span:16} {many}", flush=True)
        rows.append(r)
        record.write("plan_hash", record.merged("plan_hash", rows, ["model"]), loads=list(LOADS), threads=list(THREADS))
    return int(any(len(r["hashes"]) > 1 for r in rows))


if __name__ == "__main__":
    sys.exit(main())
