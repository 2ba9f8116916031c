"""Rows of ``tapestry kernels``: what a compiled kernel takes and must do, from machine code, limits and exact footprints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from tapestry.codegen.blocks.lowered import points
from tapestry.codegen.triton.emit.source import Pass, TritonKernel
from tapestry.codegen.triton.kernel_work import predicted, roofline, work_of
from tapestry.codegen.triton.run.compile_ahead import Compiled
from tapestry.codegen.triton.run.machine_code import MATRIX, Resources
from tapestry.codegen.triton.task.chips import Chip, chip_of, on_chip
from tapestry.codegen.triton.task.kernel_choice import kernel_form
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel
from tapestry.ir.types import itemsize


def occupancy(found: Resources, warps: int, chip: Chip) -> float:
    """Resident warps of a multiprocessor over the most that it holds: what registers, shared memory and programs leave.

    Source: CUDA Occupancy Calculator; registers are allocated per warp in units of ``chip.grain``.
    """
    each = -(-max(1, found.registers) * chip.warp // chip.grain) * chip.grain
    by_registers = chip.registers // each // warps
    by_shared = chip.shared_unit // (found.shared + 1024) if found.shared else chip.programs
    programs = min(chip.programs, chip.warps // warps, by_registers, by_shared)
    return programs * warps / chip.warps


def matrix_instruction(found: Resources) -> str:
    """The opcode that products run on; ``""`` for none."""
    return next((m for m in MATRIX if found.instructions.get(m)), "")


def rows_of(
    graph: Graph,
    kernel: Kernel,
    made: TritonKernel,
    stem: str,
    compiled: Sequence[Compiled],
    launches: int,
    refused: Sequence[Mapping[str, Any]] = (),
    gpu: str = "",
) -> list[dict[str, Any]]:
    """A row for each pass of a kernel; work and times are those of the whole kernel and stand in its last row.

    Args:
        refused: candidates that were passed over before this one.
        gpu: the card that the plan is for.
    """
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    chip = chip_of(compiled[0].target, gpu)
    found = on_chip(kernel_form(graph, kernel, made.precision), chip)
    work = work_of(graph, kernel, found)
    config = asdict(made.config)
    out: list[dict[str, Any]] = []
    copies = len(made.passes) - 1 - merges_parts(made)
    for k, (one, each) in enumerate(zip(made.passes, compiled, strict=True)):
        last = one is made.passes[-1]
        kind = "copy" if k < copies else f"{made.kind} in parts" if not last else "merge" if merges_parts(made) else made.kind
        row = {"kernel": stem if last else f"{stem}.{k}", **_machine(made, one, each.resources, chip), "kind": kind}
        row |= {
            "mode": kernel.mode,
            "nodes": list(op.source),
            "launches": launches,
            "precision": made.precision,
            "knobs": config,
        }
        if (c := found.product) is not None and kind.startswith("dot"):
            row["extents"] = [points(c.batch), points(c.m), points(c.n), points((*c.k, *c.taps))]
            row["operand"] = c.operand
        row |= {"flops": work.flops, "matrix_flops": work.matrix_flops, "bytes": work.bytes} if last else {}
        row |= {"scratch_bytes": scratch_bytes(made), "roofline_s": roofline(work, found, chip)} if last else {}
        out.append(row)
    main = out[-2 if merges_parts(made) else -1]  # what the merge of parts reads is little
    out[-1] |= {"predicted_s": predicted(work, found, chip, prod(main["grid"]), main["in_flight"]), "refused": list(refused)}
    return out


def merges_parts(made: TritonKernel) -> bool:
    """Whether the last pass merges the states that the one before it wrote."""
    return len(made.passes) > 1 and made.passes[-2].function.startswith(f"{made.name}_parts")


def _machine(made: TritonKernel, one: Pass, found: Resources, chip: Chip) -> dict[str, Any]:
    """What the machine code says."""
    wide = found.wide_bytes / found.global_bytes if found.global_bytes else 1.0
    return {
        "grid": list(one.grid),
        "num_warps": one.num_warps,
        **asdict(found),
        "shared_limit": chip.shared,
        "occupancy": round(occupancy(found, one.num_warps, chip), 4),
        "matrix": matrix_instruction(found),
        "wide_share": round(wide, 4),
        "descriptors": len(one.descriptors),
        "in_flight": in_flight(made, one, found, chip),
    }


def in_flight(made: TritonKernel, one: Pass, found: Resources, chip: Chip) -> int:
    """Bytes that all resident programs load at once: by threads, and by descriptors a stage less than there are."""
    resident = int(occupancy(found, one.num_warps, chip) * chip.warps) // one.num_warps
    names = dict(re.findall(r"^ +(\w+) = (\w+)$", made.source, re.MULTILINE))  # of what a program chose among several
    loaded = {p: one.descriptors.get(names.get(p, p)) for p in re.findall(r"\b(\w+)\.load\(", made.source)}
    boxes = sum(prod(d.block) * itemsize(d.dtype) for d in loaded.values() if d) * max(1, one.num_stages - 1)
    each = found.thread_loads * chip.warp * one.num_warps + boxes
    return min(prod(one.grid), chip.units * resident) * each


def scratch_bytes(made: TritonKernel) -> int:
    """Bytes written and read again between two passes."""
    return 2 * sum(n * itemsize(d) for d, n in made.scratch)


def summary(rows: Sequence[Mapping[str, Any]], opaque: Sequence[str], unfused: Mapping[str, Any]) -> dict[str, Any]:
    """Over one run of the model on one device: launches, bytes and roofline time, against a kernel for each ONNX node."""
    ends = [r for r in rows if "bytes" in r]
    out: dict[str, Any] = {
        "kernels": len(rows), "launches": sum(r["launches"] for r in rows),
        "bytes": sum(r["launches"] * (r["bytes"] + r["scratch_bytes"]) for r in ends),
        "flops": sum(r["launches"] * r["flops"] for r in ends),
        "roofline_s": sum(r["launches"] * r["roofline_s"] for r in ends),
        "predicted_s": sum(r["launches"] * r["predicted_s"] for r in ends),
        "spilling": [r["kernel"] for r in rows if r["spills"]],
        "serialized": [r["kernel"] for r in rows if any("serialized" in m for m in r["messages"])], "opaque": list(opaque),
    }  # fmt: skip
    if unfused:
        out |= {"unfused_kernels": unfused["kernels"], "unfused_bytes": unfused["bytes"]}
    return out
