"""Real models on several processes: the same results as in one, and the bytes and peaks that were planned.

    .venv/bin/python bench/distributed.py [--only NAME …] [--meshes 2 3 4 2x2] [--models FOLDER] [--batches 3]

Every build runs in one process and on one process per device, with the same inputs. A case passes when all outputs have the
same bits, the bytes that the ranks hand to torch.distributed are the plan's, and the peak of every device's buffers is the
plan's. `anonymous` is what a rank's process has in private memory, weights included. Time: the median of the batches.
Writes bench/results/distributed.json; exits 1 if a case fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import record
from models import materialize
from record import ROOT, WORK, Row

from tapestry import api

MODELS: dict[str, dict[str, str]] = {
    "resnet50": {"input": "4x3x224x224"},
    "bert_base": dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), "8x64"),
    "gpt2": {"input_ids": "4x64", "attention_mask": "4x64"},
    "llama_tiny": {"input_ids": "4x32", "attention_mask": "4x32"},
    "t5_small": {"input_ids": "4x8", "attention_mask": "4x8", "decoder_input_ids": "4x4"},
    "unet": {"x": "4x3x128x128"},
}
FOLDER = WORK / "distributed"


def tapestry(*argv: object) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON and errors of a command."""
    command = [sys.executable, "-m", "tapestry.cli", *map(str, argv), "--json", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else {}, done.stderr.strip()


def run(build: Path, processes: int, tag: str, threads: int) -> tuple[dict[str, Any], str]:
    """The batches of ``FOLDER/in`` on so many processes."""
    out = FOLDER / tag
    shutil.rmtree(out, ignore_errors=True)
    more = ["--inputs", FOLDER / "in", "--output", out, "--threads", threads, "--timeout", 120]
    status, found, error = tapestry("run", build, "--processes", processes, *more)
    return found, error if status else ""


def same(batches: int) -> tuple[bool, float]:
    """Whether both runs wrote the same bits, and the largest relative difference otherwise."""
    worst, equal = 0.0, True
    for k in range(batches):
        for p in sorted((FOLDER / "one" / f"b{k}").glob("*.npy")):
            a, b = np.load(p), np.load(FOLDER / "many" / f"b{k}" / p.name)
            equal = equal and a.shape == b.shape and a.tobytes() == b.tobytes()
            worst = max(worst, float(np.linalg.norm((a - b).ravel()) / max(float(np.linalg.norm(a.ravel())), 1e-30)))
    return equal, worst


def case(name: str, model: Path, shapes: list[object], mesh: str, batches: int) -> Row:
    """One model on one mesh."""
    build = FOLDER / "build"
    status, made, error = tapestry("compile", model, "-o", build, "--mesh", mesh, "--time-limit", 20, *shapes)
    if status:
        return {"model": name, "mesh": mesh, "ok": False, "note": error[:300]}
    compiled = api.load(build)
    shutil.rmtree(FOLDER / "in", ignore_errors=True)
    (FOLDER / "in").mkdir(parents=True)
    for k in range(batches):
        np.savez(FOLDER / "in" / f"b{k}.npz", **compiled.random_feeds(k))
    devices = compiled.build.program.devices
    one, first = run(build, 1, "one", 1)
    many, second = run(build, devices, "many", 1)
    if first or second:
        return {"model": name, "mesh": mesh, "ok": False, "note": (first or second)[:300]}
    equal, worst = same(batches)
    planned = sum(t["bytes"] for t in made["transfers"])
    sent = sum(r["payload_bytes"] for r in many["ranks"]) / batches
    peaks = many["peak_bytes"] == made["peak_bytes"] == one["peak_bytes"]
    return {
        "model": name, "mesh": mesh, "ok": equal and sent == planned and peaks, "same_bits": equal, "rel_diff": worst,
        "planned_bytes": planned, "sent_bytes": sent, "peaks_as_planned": peaks, "peak_bytes": max(made["peak_bytes"]),
        "unsharded_peak": made["unsharded_peak_bytes"], "anonymous_bytes": max(r["private_bytes"] for r in many["ranks"]),
        "seconds_one": statistics.median(one["batch_seconds"][1:]), "seconds": statistics.median(many["batch_seconds"][1:]),
        "simulated_s": made["simulated_s"],
    }  # fmt: skip


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--meshes", nargs="*", default=["2", "3", "4", "2x2"])
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--models", type=Path, help="a folder of NAME.onnx")
    args = parser.parse_args()
    rows: list[Row] = []
    for name in args.only:
        given = args.models / f"{name}.onnx" if args.models else None
        model = given or materialize(name, WORK / "models")
        if model is None or not model.is_file():
            rows.append({"model": name, "skipped": "no folder of exported models beside the checkout", "ok": True})
            continue
        shapes: list[object] = [x for k, v in MODELS[name].items() for x in ("--shape", f"{k}={v}")]
        for mesh in args.meshes:
            rows.append(case(name, model, shapes, mesh, args.batches))
            print(json.dumps(rows[-1]), flush=True)
        record.write("distributed", rows)
    return 0 if all(r["ok"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
