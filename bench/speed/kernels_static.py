"""Every kernel of real models at real sizes, as the assembler sees it: registers, spills, serialised wgmma; no GPU.

    python -m bench kernels_static [--only NAME …] [--dtypes f16 bf16] [--targets sm80 sm90 sm100] [--seconds 150]

Models are the shared exports with every float32 in 16 bits (`support/half_models.py`), without weights, fused for one GPU; and
one layer of Llama-7B in ONNX's own `Attention` (`gpu_models.llama_layer`). Equal kernels are compiled once. A kernel is the
first of its candidates without a fault (`run.tune.sound`), else the least bad: ``refused`` says what was passed over. What a
kernel takes is kept in Tapestry's cache by the hash of its source, so that a run that ends at ``--seconds`` is
gone on with by the next; rows with kernels that are still ``missing`` say so. Launches are those of one run, copies and merges
of split-K included; copies of weights, which are made once, are not. ``programs`` are those that share a multiprocessor. Rows
that are not asked for stay in bench/results/kernels_static.json. Exits 1 where a kernel does not run.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from math import prod
from typing import Any

import onnx
from rich.console import Console
from rich.table import Table

from bench.speed.gpu_models import Size, llama_layer
from bench.support import record
from bench.support.record import Row
from bench.support.whole_kernels import distinct, export, fused_graph
from tapestry.codegen.blocks.lowered import unavailable
from tapestry.codegen.triton.kernel_work import predicted, roofline, work_of
from tapestry.codegen.triton.run.compile_ahead import measured
from tapestry.codegen.triton.run.launcher import done_once
from tapestry.codegen.triton.run.report import in_flight, matrix_instruction, merges_parts, occupancy
from tapestry.codegen.triton.run.sound_choice import Sound, sound
from tapestry.codegen.triton.task.chips import CHIPS, chip_of, on_chip
from tapestry.codegen.triton.task.kernel_choice import kernel_form
from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel

# model -> sizes of its symbols
SIZES: dict[str, dict[str, int]] = {
    "bert_base": {"s18": 8, "s41": 512, "s43": 8},
    "gpt2": {"s72": 4, "s70": 1024, "s43": 4, "s53": 1024},
    "llama_7b 2048": {"s72": 1, "s53": 2048, "s43": 1},
    "llama_7b 8192": {"s72": 1, "s53": 8192, "s43": 1},
    "vit_base": {"s99": 32},
    "unet": {"s77": 8},
    "resnet50": {"s31": 32},
}
LAYERS = {"llama_layer 2048": 2048, "llama_layer 8192": 8192}  # tokens
KEYS = ("model", "dtype", "target")
TARGETS = ("sm80", "sm90", "sm100")
DTYPES = ("f16", "bf16")
TILED = ("dot", "folded", "stream")  # kinds of products


def models(name: str, dtype: str) -> Callable[[], onnx.ModelProto] | None:
    """How to make a model; ``None`` where it is not written in this type."""
    if name in LAYERS:
        size = Size(batch=1, s=LAYERS[name], n=4096, h=32, inner=11008, layers=1, vocab=0)
        return (lambda: llama_layer("llama_layer", size).model) if dtype == "f16" else None
    return lambda: export(name.split(maxsplit=1)[0], dtype)


def kernel_row(graph: Graph, kernel: Kernel, found: Sound, ops: int, target: str) -> Row:
    """What one distinct kernel takes, over its passes, and its time by the model of the chip beside the roofline's."""
    (taken,) = measured([found.made], target, listing=True)
    if isinstance(taken, Exception):
        raise taken
    chip, made, passes = chip_of(target), found.made, list(zip(found.made.passes, taken, strict=True))
    form, main = on_chip(kernel_form(graph, kernel), chip), passes[-2 if merges_parts(made) else -1]
    work = work_of(graph, kernel, form)
    weights = {k for k, at in enumerate(made.reads) if _block(graph, kernel).reads[at].tensor in graph.weights}
    each_run = len(made.launches) - len(done_once(made, weights)[0])
    times = {"roofline_us": roofline(work, form, chip), "predicted_us": predicted(
        work, form, chip, prod(main[0].grid), in_flight(made, main[0], main[1], chip))}  # fmt: skip
    k = found.made.config
    tile = {
        n: getattr(k, n) for n in (("bm", "bn", "bk") if found.made.kind in ("dot", "folded", "stream") else ("rows", "cols"))
    }
    more = {n: v for n in ("split_k", "persistent", "packed", "descriptors") if (v := getattr(k, n)) not in (1, False)}
    return {
        "kernel": found.made.name, "kind": found.made.kind, "ops": ops, "launches": each_run,
        "once": len(made.launches) - each_run, **{k: round(v * 1e6, 2) for k, v in times.items()}, **tile, **more,
        "num_warps": k.num_warps, "num_stages": k.num_stages, "registers": max(r.registers for _, r in passes),
        "spills": max(r.spills for _, r in passes), "shared": max(r.shared for _, r in passes),
        "programs": min(int(occupancy(r, p.num_warps, chip) * chip.warps) // p.num_warps for p, r in passes),
        "occupancy": round(min(occupancy(r, p.num_warps, chip) for p, r in passes), 3),
        "matrix": next((m for _, r in passes if (m := matrix_instruction(r))), ""),
        "messages": sorted({m for _, r in passes for m in r.messages}), "faults": [f.why for f in found.faults],
        "refused": [why for _, why in found.refused],
    }  # fmt: skip


def measure(graph: Graph, target: str, until: float) -> Row:
    """A model's row: its kernels one by one until the time is over, and what they come to."""
    kernels: list[Row] = []
    missing, failing = list[str](), dict[str, str]()
    for kernel, *others in distinct(graph):
        if time.monotonic() > until:
            missing.append(graph.ops[kernel.op].outs[0])
            continue
        _one(graph, kernel, 1 + len(others), target, kernels, failing)
    counted = sum(r["ops"] * r["launches"] for r in kernels)
    return {
        "operations": len(graph.ops), "distinct": len(kernels) + len(missing) + len(failing), "launches": counted,
        "spilling": [r["kernel"] for r in kernels if r["spills"]],
        "serialized": [r["kernel"] for r in kernels if any("serialized" in m for m in r["messages"])],
        "faults": sum(bool(r["faults"]) for r in kernels), "refused": sum(len(r["refused"]) for r in kernels),
        "worst_shared": max((r["shared"] for r in kernels), default=0), "shared_limit": CHIPS[target].shared,
        "opaque": sum(bool(unavailable(graph, i)) for i in range(len(graph.ops))), "failing": failing, "missing": missing,
        "kernels": kernels,
    }  # fmt: skip


def _block(graph: Graph, kernel: Kernel) -> Block:
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    return op


def _one(graph: Graph, kernel: Kernel, ops: int, target: str, kernels: list[Row], failing: dict[str, str]) -> None:
    try:
        kernels.append(kernel_row(graph, kernel, sound(graph, kernel, target), ops, target))
    except TapestryError as e:
        failing[e.where] = e.why


def not_measured(rows: list[Row]) -> list[list[str]]:
    """What there is no row of."""
    there = {tuple(r[k] for k in KEYS) for r in rows}
    every = itertools.product((*SIZES, *LAYERS), DTYPES, TARGETS)
    return [[*key] for key in every if key not in there and models(key[0], key[1]) is not None]


def table(rows: list[dict[str, Any]]) -> Table:
    """A line for each row."""
    out = Table("model", "dtype", "target", "launches", "distinct", "spill", "serial", "refused", "shared", "fail", "missing")
    for r in rows:
        worst = f"{r['worst_shared'] / r['shared_limit']:.0%}"
        numbers = (r["launches"], r["distinct"], len(r["spilling"]), len(r["serialized"]), r["refused"])
        left = (worst, len(r["failing"]), len(r["missing"]))
        out.add_row(r["model"], r["dtype"], r["target"], *map(str, (*numbers, *left)))
    return out


def main() -> int:
    """Measure what is asked for; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[*SIZES, *LAYERS], choices=[*SIZES, *LAYERS])
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--seconds", type=float, default=150.0, help="no kernel is begun after this time")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    rows: list[Row] = []
    for name in args.only:
        for dtype in args.dtypes:
            if time.monotonic() > until or (make := models(name, dtype)) is None:
                continue
            graph = fused_graph(make(), SIZES.get(name, {}))
            for target in args.targets:
                rows.append({"model": name, "dtype": dtype, "target": target, **measure(graph, target, until)})
                kept = record.merged("kernels_static", rows, KEYS)
                record.write("kernels_static", kept, not_measured=not_measured(kept))
    Console(width=140).print(table(rows))
    return 1 if any(r["failing"] for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
