"""Kernel sources of a Program: one Triton file for each distinct kernel, however many layers and devices use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapestry.codegen.triton import generate, kernel_key, unavailable
from tapestry.codegen.triton.emit.source import TritonKernel
from tapestry.codegen.triton.run.tuned import config_from
from tapestry.codegen.triton.task.chips import DEFAULT
from tapestry.errors import BuildError
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, Kernel
from tapestry.ir.program import Launch, Program
from tapestry.ir.syntax.printer import signature

Configs = Mapping[str, Mapping[str, Any]]
"""KernelConfig as data, by `key_of` of the kernel that they are for."""
_NONE: Configs = {}


def kernels(graph: Graph, program: Program) -> list[Kernel]:
    """Every distinct kernel that the program launches and that Triton can express, in order of first use."""
    seen: set[str] = set()
    exact: set[tuple[object, ...]] = set()
    whole: set[tuple[object, ...]] = set()
    kinds = [signature(op, graph) for op in graph.ops]
    out: list[Kernel] = []
    for step in program.steps:
        if not isinstance(step, Launch) or unavailable(graph, step.op):
            continue
        lists = [program.buffers[b].boxes if b else None for b in step.ins]
        same = (kinds[step.op], step.mode, id(step.blocks), *map(id, lists))  # the program keeps the lists
        if same in whole:
            continue
        whole.add(same)
        results = [program.buffers[b].boxes for b in step.outs]
        for d, block in enumerate(step.blocks):
            if block is None:
                continue
            ins = tuple(boxes[d] if boxes is not None else None for boxes in lists)
            if (kinds[step.op], step.mode, block, ins) in exact:
                continue
            exact.add((kinds[step.op], step.mode, block, ins))
            kernel = Kernel(op=step.op, mode=step.mode, block=block, ins=ins, outs=tuple(_box(r[d]) for r in results))
            key = kernel_key(graph, kernel)
            if key not in seen:
                seen.add(key)
                out.append(kernel)
    return out


def named_kernels(
    graph: Graph, program: Program, target: str = DEFAULT, precision: str = "ieee", knobs: Configs = _NONE
) -> dict[str, tuple[Kernel, TritonKernel]]:
    """Kernels and what is generated for them, by file name.

    Args:
        knobs: those of a build, by `key_of`; the model chooses the others for the target.

    Raises:
        BuildError: there are no such knobs.
    """
    out: dict[str, tuple[Kernel, TritonKernel]] = {}
    for kernel in kernels(graph, program):
        own = knobs.get(kernel_key(graph, kernel)) if knobs else None
        try:
            chosen = None if own is None else config_from(own)
        except ValueError as e:
            raise BuildError(f"not a plan: {e}", hint="compile the model again") from None
        made = generate(graph, kernel, chosen, target=target, precision=precision)
        name, k = made.name, 1
        while f"{name}.py" in out:
            name, k = f"{made.name}_{k}", k + 1
        out[f"{name}.py"] = (kernel, made)
    return out


def triton_kernels(
    graph: Graph, program: Program, target: str = DEFAULT, precision: str = "ieee", knobs: Configs = _NONE
) -> dict[str, TritonKernel]:
    """Generated kernels by file name."""
    return {name: made for name, (_, made) in named_kernels(graph, program, target, precision, knobs).items()}


def launches(graph: Graph, program: Program) -> dict[str, int]:
    """How often the first device that has any launches each kernel in one run, by `key_of`."""
    kinds = [signature(op, graph) for op in graph.ops]
    keys: dict[tuple[object, ...], str] = {}
    out: dict[str, int] = {}
    for step in program.steps:
        if not isinstance(step, Launch) or unavailable(graph, step.op):
            continue
        found = next(((d, b) for d, b in enumerate(step.blocks) if b is not None), None)
        if found is None:
            continue
        d, block = found
        ins = tuple(program.buffers[b].boxes[d] if b else None for b in step.ins)
        outs = tuple(_box(program.buffers[b].boxes[d]) for b in step.outs)
        same = (kinds[step.op], step.mode, block, ins, outs)
        if same not in keys:
            keys[same] = kernel_key(graph, Kernel(op=step.op, mode=step.mode, block=block, ins=ins, outs=outs))
        out[keys[same]] = out.get(keys[same], 0) + 1
    return out


def key_of(graph: Graph, kernel: Kernel) -> str:
    """Equal for kernels that are launched from one source."""
    return kernel_key(graph, kernel)


def without_kernel(graph: Graph) -> dict[str, str]:
    """Operations that no generated kernel computes: ONNX node (or first output) to the reason."""
    found = ((op, unavailable(graph, i)) for i, op in enumerate(graph.ops))
    return {op.source[-1] if op.source else op.outs[0]: why for op, why in found if why}


def triton_sources(
    graph: Graph, program: Program, target: str = DEFAULT, precision: str = "ieee", knobs: Configs = _NONE
) -> dict[str, str]:
    """File name to Triton source."""
    return {name: k.source for name, k in triton_kernels(graph, program, target, precision, knobs).items()}


def _box(box: Box | None) -> Box:
    assert box is not None
    return box
