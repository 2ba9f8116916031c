"""The same plan from every compilation of the same command, whatever else the machine does.

    .venv/bin/python -m bench plan_hash [--runs N] [--only NAME …]

Six models of shared/models (graphs without weights), compiled N times each in processes of their own: in turns on an idle
machine, beside busy processes, at a low priority, and each time with another seed of Python's hashes. Every model must give one
`plan_sha256`. Writes bench/results/plan_hash.json; exits 1 where one gives two.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

from bench.support import record
from bench.support.record import Row

FOLDER = record.WORK / "plan_hash"
CASES = {  # model: mesh, sizes of symbols
    "bert_base": ("2x2", {"s18": "4", "s41": "128", "s43": "4"}),
    "gpt2": ("2", {"s72": "1", "s70": "64", "s53": "64", "s43": "1"}),
    "llama_tiny": ("2", {"s72": "1", "s53": "32", "s43": "1"}),
    "mobilenet_v2": ("2", {"s31": "4"}),
    "vit_base": ("2x2", {"s99": "4"}),
    "whisper_encoder": ("2", {"s6": "2"}),
}
LOADS = ("idle", "busy", "low priority", "busy and low priority")
BUSY = "while True: pass"


def compiled(path: Path, mesh: str, shapes: dict[str, str], load: str, seed: int) -> tuple[str, float, float]:
    """Hash, objective and seconds of one compilation under some load."""
    bound = [a for item in shapes.items() for a in ("--shape", "=".join(item))]
    command = [
        sys.executable,
        "-m",
        "tapestry",
        "compile",
        str(path),
        "-o",
        str(FOLDER / "build"),
        "--mesh",
        mesh,
        "--topology",
        "cpu",
        *bound,
    ]
    low = ["nice", "-n", "15"] if "low" in load else []
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1) if "busy" in load]
    try:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        done = subprocess.run([*low, *command, "--no-weights", "--json"], capture_output=True, text=True, env=environment)
    finally:
        for p in others:
            p.kill()
            p.wait()
    if done.returncode:
        raise SystemExit(f"{path.name}: {done.stderr}")
    found = json.loads(done.stdout)
    return found["plan_sha256"], found["objective_s"], found["seconds"]["total"]


def measure(name: str, runs: int) -> Row:
    """One model under all loads."""
    mesh, shapes = CASES[name]
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.onnx"
    path.write_bytes(gzip.decompress((record.SHARED / f"{name}.onnx.gz").read_bytes()))
    found = [compiled(path, mesh, shapes, LOADS[k % len(LOADS)], k) for k in range(runs)]
    hashes = sorted({h for h, _, _ in found})
    seconds = [s for _, _, s in found]
    return {
        "model": name, "mesh": mesh, "runs": runs, "hashes": hashes, "objectives_s": sorted({o for _, o, _ in found}),
        "least_seconds": min(seconds), "most_seconds": max(seconds),
    }  # fmt: skip


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    args = parser.parse_args()
    rows = [measure(name, args.runs) for name in args.only]
    for r in rows:
        span = f"{r['least_seconds']:.1f} to {r['most_seconds']:.1f} s"
        print(
            f"{r['model']:18} {r['mesh']:4} {r['runs']:3} runs {span:16} {len(r['hashes'])} plan(s): {', '.join(r['hashes'])}"
        )
    record.write("plan_hash", rows, loads=list(LOADS))
    return int(any(len(r["hashes"]) > 1 for r in rows))


if __name__ == "__main__":
    sys.exit(main())
