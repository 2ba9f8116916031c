"""Our kernels on one NVIDIA GPU, each beside its peer in the same run: right first, then medians on random data.

    python -m bench gpu --output $OUT/gpu.json          # everything, within --budget seconds (520)
    python -m bench gpu --tiny                          # tiny sizes in Triton's interpreter, no GPU: what is computed, no times

Needs torch (2.11 or newer), triton (3.6 or 3.9), numpy and what Tapestry imports besides: wheels of onnx, onnx-ir>=1.1,
onnxscript, msgspec, islpy, highspy, sympy, rich and ml_dtypes where they are missing. Neither torchvision, transformers nor
onnxruntime.

Sections, each in processes of its own that are ended when their time is over, or when a row says nothing for a minute: the
next process goes on behind it. Every row is on disk as soon as it is measured, and the document is written anew after each
section: ``gemm`` (cuBLAS), ``attention`` (flash and cuDNN by torch's SDPA), ``rows`` (torch.compile max-autotune, and the
bandwidth of a copy), ``conv`` (cuDNN, channels last), ``models`` (torch.compile reduce-overhead, then max-autotune, in rows of
their own, as long as there is time). Times are medians with the L2 cache flushed; ``ratio`` is the time of the best peer over
ours. A row is only timed if its result is right.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.support.record import ROOT, stamp

SECTIONS = {"gemm": 80.0, "attention": 70.0, "rows": 80.0, "conv": 40.0, "models": 270.0}  # seconds, of the budget of 540
IDLE = 60.0  # seconds after which a row hangs: Triton's and Inductor's slowest compile in less; models have their own time
SECTION = "bench.speed.gpu_section"
MODES = ("reduce-overhead", "max-autotune")  # of torch.compile, for models: what is sooner there first
MODELS = ("resnet50 b32", "bert_base b8 s512", "gpt2 b4 s1024", "llama7b_layer b1 s2048")
TINY_MODELS = ("resnet", "bert", "gpt2", "llama layer")
TINY = "interpreter, no GPU; times are meaningless and left out"
Row = dict[str, Any]


class Rows:
    """The file of rows, and when to stop."""

    def __init__(self, section: str, path: Path, seconds: float) -> None:
        self.section, self.path, self.until = section, path, time.monotonic() + seconds
        lines = path.read_text().splitlines() if path.exists() else []
        self.known = {r["case"] for r in map(json.loads, lines) if r["section"] == section}

    def add(self, case: str, row: Row) -> None:
        """One line; a case's last line counts."""
        with self.path.open("a") as f:
            f.write(json.dumps({"section": self.section, "case": case, **row}) + "\n")

    def each(self, case: str, work: Callable[[], Row]) -> None:
        """Do a case that no process before has begun, as long as there is time."""
        if case in self.known or time.monotonic() > self.until:
            return
        self.add(case, {"passed": False, "failed": "ended its process, or the time was over"})
        try:
            row = work()
        except Exception as e:
            traceback.print_exc()
            row = {"passed": False, "failed": f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:300]}"}
            if "CUDA error" in str(e) or "illegal memory" in str(e):  # nothing works in this process any more
                self.add(case, row)
                sys.exit(3)
        self.add(case, row)


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


def child(command: list[str], tiny: bool, rows: Path, seconds: float, idle: float) -> int:
    """Run one process of a section; its exit status, 124 when its time was over, or 125 when it added no row for too long.

    It is ended with all that it has started: compilers of others would go on beside the next rows.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if tiny else {}
    process, size, until = subprocess.Popen(command, env=env, start_new_session=True), -1, time.monotonic() + seconds
    quiet_since, status = time.monotonic(), None
    while status is None:
        now, grown = time.monotonic(), rows.stat().st_size if rows.exists() else 0
        if grown != size:
            size, quiet_since = grown, now
        if now > until or now - quiet_since > idle:
            status = 124 if now > until else 125
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(timeout=0.2) if status is None else status
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return status


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
    mark = {**stamp(), "state": state} | ({"note": TINY} if args.tiny else {})
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
        section, name, seconds = job
        modes = list(MODES if section == "models" and not args.tiny else MODES[:1])
        until = min(time.monotonic() + seconds, begun + args.budget)
        while modes and (left := until - time.monotonic()) > 1:
            before = len(collected(rows))
            words = (section, name, rows, left, modes[0], args.tune)
            command = [sys.executable, "-m", SECTION, *map(str, words)]
            status = child(command, args.tiny, rows, left, left if section == "models" else IDLE)
            if status in (0, 124) or len(collected(rows)) == before:
                modes.pop(0)
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
