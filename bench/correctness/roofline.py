"""The planner's time of every kernel beside its roofline: ResNet-50, BERT and a layer of Llama-3-8B on one H100.

    .venv/bin/python -m bench roofline [--only MODEL …] [--all]

A row is a group of equal kernels of a plan (one for all launches with one name in `tapestry kernels`), in float32 with
each precision of products and in bf16. `planned` is what the planner's clock gives them, without the time to launch, which
a roofline does not have; what has no kernel of ours is left out. Rows of less than a thousandth of their plan are in the
results and not in the table. Exported models are in a folder beside the checkout; rows of models that are not there say so.
Writes bench/results/roofline.json; exits 1 if a row is further than 1.3 from its roofline.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import onnx
from rich.console import Console
from rich.table import Table

import tapestry
from bench.support import llama_layers, record
from bench.support.half_models import in_half
from bench.support.record import SHARED, WORK, Row
from bench.support.whole_kernels import export
from tapestry.codegen.blocks.lowered import unavailable
from tapestry.codegen.triton.emit.source import kernel_key
from tapestry.codegen.triton.kernel_work import roofline, work_of
from tapestry.codegen.triton.task.chips import PRECISIONS, chip_of, on_chip
from tapestry.codegen.triton.task.kernel_choice import kernel_form
from tapestry.ir.program import Launch
from tapestry.plan.topology import from_data
from tapestry.runtime.executor import kernel_of
from tapestry.viz.explain import schedule

MOST, SMALL = 1.3, 1e-3
TARGET, GPU = "triton:sm90", "h100"
SIZES = {"resnet50": {"s31": 128}, "bert_base": {"s18": 8, "s41": 512, "s43": 8}, "llama_layer": {}}
KINDS = (*((p, "f32") for p in PRECISIONS), ("ieee", "bf16"))


def model(name: str, dtype: str) -> Path:
    """A model without its weights, in a dtype."""
    folder = WORK / "roofline" / dtype
    folder.mkdir(parents=True, exist_ok=True)
    if name != "llama_layer":
        onnx.save(export(name, dtype), folder / f"{name}.onnx")
        return folder / f"{name}.onnx"
    path = llama_layers.write(1, folder, llama_layers.Size(sequence=2048))
    if dtype == "bf16":
        onnx.save(in_half(onnx.load(path, load_external_data=False), dtype), path)
    return path


def rows(name: str, precision: str, dtype: str) -> list[Row]:
    """A row for each group of equal kernels."""
    case: Row = {"model": name, "dtype": dtype, "precision": precision if dtype == "f32" else ""}
    if name != "llama_layer" and not (SHARED / f"{name}.onnx.gz").is_file():
        return [{**case, "kernel": "", "skipped": "no folder of exported models beside the checkout"}]
    build = tapestry.compile(
        model(name, dtype), topology=GPU, target=TARGET, precision=precision, shapes=SIZES[name], weights=False,
    ).build  # fmt: skip
    graph, program, chip = build.plan.graph, build.program, chip_of(TARGET, GPU)
    launch, total, found = from_data(build.topology).device.launch, 0.0, dict[str, Row]()
    for t in schedule(build).timed:
        step = program.steps[t.step]
        if not isinstance(step, Launch) or unavailable(graph, step.op):
            continue
        kernel = kernel_of(step, 0, program)
        form = on_chip(kernel_form(graph, kernel, precision), chip)
        op, planned = graph.ops[step.op], float(t.took[0]) - launch
        first = {**case, "kernel": f"{form.kind} {op.outs[0]}", "launches": 0, "planned_s": 0.0, "roofline_s": 0.0}
        row = found.setdefault(kernel_key(graph, kernel), first)
        row["launches"] += 1
        row["planned_s"] += planned
        row["roofline_s"] += roofline(work_of(graph, kernel, form), form, chip)
        total += planned
    done = sorted(found.values(), key=lambda r: -r["planned_s"])
    return [{**r, "ratio": r["planned_s"] / r["roofline_s"], "share": r["planned_s"] / total} for r in done]


def shown(found: list[Row], every: bool) -> Table:
    """The rows that take time, or all of them."""
    table = Table("model", "type", "kernel", "×", "share", "planned µs", "roofline µs", "ratio")
    for r in found:
        kind = f"{r['dtype']} {r['precision']}"
        if "skipped" in r:
            table.add_row(r["model"], kind, r["skipped"], "", "", "", "", "")
        elif every or r["share"] >= SMALL:
            times = (f"{r[k] * 1e6:,.1f}" for k in ("planned_s", "roofline_s"))
            table.add_row(r["model"], kind, r["kernel"], str(r["launches"]), f"{r['share']:.1%}", *times, f"{r['ratio']:.2f}")
    return table


def main() -> None:
    """Plan, compare, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SIZES, default=list(SIZES), metavar="MODEL")
    parser.add_argument("--all", action="store_true", help="also rows that take next to no time")
    args = parser.parse_args()
    found = [r for name in args.only for precision, dtype in KINDS for r in rows(name, precision, dtype)]
    Console(width=150).print(shown(found, args.all))
    far = [r for r in found if "ratio" in r and not 1 / MOST <= r["ratio"] <= MOST]
    worst = max((r["ratio"] for r in found if "ratio" in r), default=1.0)
    print(f"{len(found)} rows, {len(far)} further than {MOST} from the roofline; the largest ratio is {worst:.2f}")
    print("written", record.write("roofline", record.merged("roofline", found, ("model", "dtype", "precision", "kernel"))))
    sys.exit(1 if far else 0)


if __name__ == "__main__":
    main()
