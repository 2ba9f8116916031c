"""Models with less memory than one device needs: 60, 40, 25 and 10 % of the unsharded peak, on one and on two devices.

    .venv/bin/python -m bench memory [--only NAME …] [--devices N …] [--share S …] [--time-limit S] [--models FOLDER]

Where no plan in space fits, `tapestry compile` splits in time, computes again and streams weights. Every case is compiled,
verified from its files, run and compared with onnxruntime; the measured peak must be the planned one and within the limit.
`time x` is the objective beside that of the plan without a limit on as many devices. Models are made as for `bench models`, or
taken from a folder; rows of models that are not there say so. Writes bench/results/memory.json; exits 1 if a case fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.correctness.models import materialize
from bench.support import record
from bench.support.record import ROOT, WORK, Row

TIMEOUT = 900
MODELS: dict[str, dict[str, str]] = {
    "resnet50": {"input": "8x3x224x224"},
    "bert_base": dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), "4x64"),
    "gpt2": {"input_ids": "2x64", "attention_mask": "2x64"},
    "unet": {"x": "4x3x128x128"},
    "llama_tiny": {"input_ids": "2x32", "attention_mask": "2x32"},
    "light_vgg19": {},
}
SHARES = (0.6, 0.4, 0.25, 0.1)


def tapestry(*argv: object) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON and errors of a command."""
    command = [sys.executable, "-m", "tapestry", *map(str, argv), "--json", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else {}, done.stderr.strip()


def case(model: Path, shapes: list[object], name: str, devices: int, limit: int | None, args: argparse.Namespace) -> Row:
    """One model with one limit."""
    folder = WORK / "memory" / f"{name}-{devices}"
    more = ["--memory", limit, "--time-limit", args.time_limit] if limit else ["--memory", "1000GiB"]
    start = time.perf_counter()
    status, made, error = tapestry("compile", model, "-o", folder, "--devices", devices, *shapes, *more)
    row: Row = {"model": name, "devices": devices, "limit": limit, "seconds": round(time.perf_counter() - start, 1)}
    if status:
        return {**row, "ok": status == 2 and "too many" in error, "note": error.splitlines()[0]}
    fit = made.get("fit", {})
    row |= {
        "objective_s": made["objective_s"], "lower_bound_s": made["lower_bound_s"], "planned_peak": max(made["peak_bytes"]),
        "unsharded_peak": made["unsharded_peak_bytes"], "moves": made["moves"], "streamed_bytes": fit.get("streamed_bytes", 0),
        "host_load_bytes": made["host_load_bytes"],
    }  # fmt: skip
    if limit is None:
        return {**row, "ok": True}
    verified = tapestry("verify", folder)[0] == 0
    status, ran, error = tapestry("run", folder, "--check")
    shutil.rmtree(folder, ignore_errors=True)
    error = error if not ran else ""
    peak = max(ran.get("peak_bytes", [0]))
    worst = max((o["rel_err"] for o in ran.get("outputs", {}).values()), default=float("nan"))
    ok = verified and status == 0 and ran.get("peak_bytes") == made["peak_bytes"] and peak <= limit
    return {**row, "ok": ok, "measured_peak": peak, "rel_err": worst, "note": error}


def model_rows(name: str, args: argparse.Namespace) -> list[Row]:
    """All cases of one model."""
    given = args.models / f"{name}.onnx" if args.models else None
    model = given or materialize(name, WORK / "models")
    if model is None or not model.is_file():
        return [{"model": name, "skipped": "no folder of exported models beside the checkout", "ok": True}]
    shapes: list[object] = [x for k, v in MODELS[name].items() for x in ("--shape", f"{k}={v}")]
    rows: list[Row] = []
    alone = case(model, shapes, name, 1, None, args)
    for devices in args.devices:
        free = alone if devices == 1 else case(model, shapes, name, devices, None, args)
        rows.append(free)
        for share in args.share:
            row = case(model, shapes, name, devices, int(share * alone["unsharded_peak"]), args)
            rows.append({**row, "share": share, "slower": row.get("objective_s", 0.0) / free["objective_s"]})
            print(f"{name} {devices} {share}: {rows[-1]}", file=sys.stderr)
    return rows


def show(rows: list[Row]) -> None:
    """The table."""
    table = Table(title="Less memory than one device needs")
    for c in ("model", "devices", "share", "limit", "peak", "streamed", "moves", "time x", "rel err", "s", ""):
        table.add_column(c, justify="left" if c in ("model", "") else "right")
    for r in rows:
        if "objective_s" not in r or r["limit"] is None:
            if r.get("limit") or "skipped" in r:
                note = str(r.get("note", r.get("skipped")))
                table.add_row(r["model"], str(r.get("devices", "")), str(r.get("share", "")), *[""] * 7, note)
            continue
        table.add_row(
            r["model"], str(r["devices"]), f"{r['share']:.0%}", f"{r['limit']:,}", f"{r['measured_peak']:,}",
            f"{r['streamed_bytes']:,}", str(len(r["moves"])), f"{r['slower']:.3f}", f"{r['rel_err']:.1e}", f"{r['seconds']}",
            "" if r["ok"] else "FAILED",
        )  # fmt: skip
    Console(width=160).print(table)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--devices", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--share", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--models", type=Path, help="a folder of NAME.onnx")
    args = parser.parse_args()
    rows = [r for name in args.only for r in model_rows(name, args)]
    show(rows)
    record.write("memory", rows)
    return 0 if all(r["ok"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
