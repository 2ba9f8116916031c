"""Our kernels on one NVIDIA GPU, each beside its peer in the same run: right first, then medians on random data.

    python -m bench gpu --output $OUT/gpu.json          # everything, within --budget seconds (520)
    python -m bench gpu --tiny                          # tiny sizes in Triton's interpreter, no GPU: what is computed, no times

Needs torch (2.11 or newer), triton (3.6 or 3.9), numpy and what Tapestry imports besides: wheels of onnx, onnx-ir>=1.1,
onnxscript, msgspec, islpy, highspy, sympy, rich and ml_dtypes where they are missing. Neither torchvision, transformers nor
onnxruntime.

Sections, each in processes of its own that are ended when their time is over; every row is on disk as soon as it is
measured, and the document is written anew after each section: ``gemm`` (cuBLAS), ``attention`` (flash and cuDNN by torch's
SDPA), ``rows`` (torch.compile max-autotune, and the bandwidth of a copy), ``conv`` (cuDNN, channels last), ``models``
(torch.compile max-autotune with CUDA graphs, or reduce-overhead where that takes too long: the row says which). Times are
medians with the L2 cache flushed; ``ratio`` is the time of the best peer over ours. A row is only timed if its result is
right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.support.record import ROOT, stamp

SECTIONS = {"gemm": 90.0, "attention": 90.0, "rows": 110.0, "conv": 50.0, "models": 200.0}  # seconds, of the budget of 540
MODELS = ("resnet50 b32", "bert_base b8 s512", "gpt2 b4 s1024", "llama7b_layer b1 s2048")
TINY_MODELS = ("resnet", "bert", "gpt2", "llama layer")
TINY = "interpreter, no GPU; times are meaningless and left out"
Row = dict[str, Any]


def jobs(args: argparse.Namespace) -> list[tuple[str, str, float]]:
    """(section, model or "", seconds) of each process."""
    scale = args.budget / sum(SECTIONS[s] for s in args.sections)
    out: list[tuple[str, str, float]] = []
    for s in args.sections:
        if s == "models":
            names = TINY_MODELS if args.tiny else MODELS
            out += [(s, n, scale * SECTIONS[s] / len(names)) for n in names]
        else:
            out.append((s, "", scale * SECTIONS[s]))
    return out


def child(args: argparse.Namespace, job: tuple[str, str, float], rows: Path, seconds: float, mode: str) -> int:
    """Run one process of a section; its exit status, or 124 when its time was over."""
    section, name, _ = job
    command = [
        sys.executable,
        "-m",
        "bench.speed.gpu_section",
        section,
        name,
        str(rows),
        str(seconds),
        mode,
        str(args.tune),
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if args.tiny:
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, env=env)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return 124


def collected(rows: Path) -> list[Row]:
    """The rows written so far: the last word on each case, those that were begun and never ended included."""
    found: dict[tuple[str, str], Row] = {}
    for line in rows.read_text().splitlines() if rows.exists() else ():
        row = json.loads(line)
        found[row["section"], row["case"]] = row
    return list(found.values())


def document(args: argparse.Namespace, rows: list[Row], state: str, seconds: float) -> Row:
    """What is written after every section."""
    versions: Row = {"python": sys.version.split()[0]}
    for package in ("torch", "triton", "numpy", "onnx"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    mark = {**stamp("gpu_tiny" if args.tiny else "gpu"), "state": state} | ({"note": TINY} if args.tiny else {})
    return {**mark, "versions": versions, "seconds": None if args.tiny else round(seconds, 1), "rows": rows}


def write(path: Path, found: Row) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n")
    partial.replace(path)


def run(args: argparse.Namespace) -> list[Row]:
    """Every section in turn; a process that died is started again behind the case that killed it."""
    begun = time.monotonic()
    rows = Path(tempfile.mkdtemp(prefix="tapestry-gpu-")) / "rows.jsonl"
    for job in jobs(args):
        mode, until = "max-autotune", min(time.monotonic() + job[2], begun + args.budget)
        while (left := until - time.monotonic()) > 1:
            before = len(collected(rows))
            status = child(
                args, job, rows, left if mode != "max-autotune" or job[0] != "models" or args.tiny else left * 0.65, mode
            )
            if status == 124 and job[0] == "models" and mode == "max-autotune":
                mode = "reduce-overhead"
                continue
            if status in (0, 124) or len(collected(rows)) == before:
                break
        write(args.output, document(args, collected(rows), f"up to {job[0]} {job[1]}".rstrip(), time.monotonic() - begun))
    found = collected(rows)
    write(args.output, document(args, found, "complete", time.monotonic() - begun))
    return found


def shown(row: Row) -> str:
    """A row as a line."""
    ours, times = row.get("ours") or {}, []
    for name, peer in (row.get("peers") or {}).items():
        times.append(f"{name} {peer['ms']:.4g}" if peer.get("ms") is not None else f"{name} {peer.get('failed', '')}")
    rate = f" {ours['tflops']:.0f} TFLOP/s" if ours.get("tflops") else f" {ours['gbs']:.0f} GB/s" if ours.get("gbs") else ""
    verdict = "ok" if row.get("passed") else row.get("failed", "WRONG")
    time_ = f"{ours['ms']:.4g} ms{rate}, {', '.join(times)}; ratio {row.get('ratio')}" if ours.get("ms") is not None else ""
    return f"{row['section']:9} {row['case']:52} {verdict} {time_}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--budget", type=float, default=520.0, metavar="S", help="for everything")
    parser.add_argument(
        "--tune", type=float, default=5.0, metavar="S", help="for trying knobs, per product or attention; 0 for none"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes in Triton's interpreter")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.output = args.output or ROOT / "bench" / "results" / ("gpu_tiny.json" if args.tiny else "gpu.json")
    rows = run(args)
    for row in rows:
        print(shown(row))
    print(f"{args.output}: {sum(bool(r.get('passed')) for r in rows)} of {len(rows)} rows right")
    return 0 if rows and all(r.get("passed") for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
