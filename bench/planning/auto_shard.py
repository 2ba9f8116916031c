"""``tapestry auto-shard``: PopRT's heuristic against the dynamic program, in seconds to find it and in balance.

    .venv/bin/python -m bench auto_shard [--only NAME …] [--devices N …]

Light models of the onnx package and, where the folder of exports lies beside the checkout, exported models (graphs only:
nothing here needs weights). Times of stages are the cost model's (preset ``cpu``; ``h100`` for the Llamas), seconds are
measured. *Balance* is the mean stage's time over the slowest one's: 1 is a pipeline that nothing could make faster without
splitting a node. Writes bench/results/auto_shard.json; exits 1 if the dynamic program is worse anywhere.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.support import record
from bench.support.record import SHARED, WORK, Row
from examples import light
from tapestry.errors import TapestryError
from tapestry.tools.auto_shard.auto_shard import Options, auto_shard

DEVICES = (2, 4, 8)
LIGHT = ("resnet50", "densenet121", "inception_v2", "squeezenet")
TEXT = {"input_ids": "1x128", "attention_mask": "1x128"}
LONG = {"input_ids": "1x1024", "attention_mask": "1x1024"}
EXPORTS: dict[str, tuple[str, dict[str, str]]] = {
    "bert_base": ("cpu", {**TEXT, "token_type_ids": "1x128"}),
    "gpt2": ("cpu", TEXT),
    "t5_small": ("cpu", {**TEXT, "decoder_input_ids": "1x64"}),
    "unet": ("cpu", {"x": "1x3x128x128"}),
    "llama_7b": ("h100", LONG),
    "llama_70b": ("h100", LONG),
}


def models(only: list[str]) -> list[tuple[str, Path, str, dict[str, str]]]:
    """(name, file, preset, shapes) of the models there are."""
    folder = WORK / "auto_shard"
    folder.mkdir(parents=True, exist_ok=True)
    found = [(f"light_{n}", light.write(n, folder), "cpu", {}) for n in LIGHT if not only or f"light_{n}" in only]
    for name, (preset, shapes) in EXPORTS.items():
        if (only and name not in only) or not (SHARED / f"{name}.onnx.gz").is_file():
            continue
        command = [sys.executable, str(SHARED / "materialize.py"), name, str(folder), "--no-weights"]
        subprocess.run(command, check=True)
        found.append((name, folder / f"{name}.onnx", preset, shapes))
    return found


def case(name: str, path: Path, preset: str, shapes: dict[str, str], devices: int) -> Row:
    """One model on so many devices."""
    row: Row = {"model": name, "devices": devices, "topology": preset}
    try:
        d = auto_shard(Options(model=path, devices=devices, optimal=True, topology=preset, shapes=shapes))
    except TapestryError as e:
        return {**row, "refused": str(e)}
    Path(d["output"]).unlink()
    keys = ("proportion", "schemes", "interval_s", "latency_s", "throughput_per_s", "balance", "flops_balance", "peak_bytes")
    both = {k: {key: d[k].get(key) for key in keys} for k in ("heuristic", "dynamic")}
    stages = {"nodes": d["nodes"], "subgraphs": d["subgraphs"], "complete": d["dynamic"]["complete"], "seconds": d["seconds"]}
    return {**row, **stages, **both, "chosen": d["chosen"]}


def ratio(row: Row) -> float | None:
    """Interval of the dynamic program over the heuristic's; nothing where only one of them fits."""
    a, b = row["dynamic"], row["heuristic"]
    return a["interval_s"] / b["interval_s"] if b["interval_s"] and a["proportion"] == b["proportion"] else None


def show(rows: list[Row]) -> None:
    """The table."""
    table = Table(title="auto-shard: PopRT-like heuristic (H) and dynamic program (D)", title_justify="left", box=None)
    for c in ("model", "devices", "nodes", "cuts", "H ms", "D ms", "D/H", "balance H", "balance D", "search s", "total s"):
        table.add_column(c, justify="left" if c == "model" else "right", no_wrap=True)
    for r in rows:
        if "refused" in r:
            continue
        h, d, s, q = r["heuristic"], r["dynamic"], r["seconds"], ratio(r)
        table.add_row(
            r["model"], str(r["devices"]), str(r["nodes"]), f"{d['schemes']}{'' if r['complete'] else '*'}",
            f"{h['interval_s'] * 1e3:.2f}" if h["interval_s"] else "–", f"{d['interval_s'] * 1e3:.2f}",
            f"{q:.3f}" if q else "–", f"{h['balance']:.1%}" if h["balance"] else "–", f"{d['balance']:.1%}",
            f"{s['heuristic'] + s['dynamic']:.2f}", f"{s['total']:.2f}",
        )  # fmt: skip
    Console(width=140).print(table)
    for r in rows:
        if "refused" in r:
            print(f"{r['model']} on {r['devices']}: refused, {r['refused'].splitlines()[0]}")
    print("* too many cuts to take all: prefixes of several orders and the cuts between merged subgraphs")


def main() -> int:
    """Run, show, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--devices", nargs="+", type=int, default=DEVICES, metavar="N")
    args = parser.parse_args()
    rows = [case(*model, n) for model in models(args.only) for n in args.devices]
    show(rows)
    record.write("auto_shard", rows if not args.only else record.merged("auto_shard", rows, ("model", "devices")))
    return 1 if any("refused" not in r and (ratio(r) or 0) > 1 for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
