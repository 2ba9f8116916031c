"""Kernel sources of a Program: one Triton file for each distinct kernel, however many layers and devices use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tapestry.codegen.blocks.lowered import unavailable
from tapestry.codegen.triton.emit.source import TritonKernel, generate, kernel_key
from tapestry.codegen.triton.run.tuned import config_from
from tapestry.codegen.triton.task.chips import DEFAULT
from tapestry.errors import BuildError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel
from tapestry.ir.program import Launch, Program
from tapestry.ir.recognition.route_groups import unread
from tapestry.ir.syntax.printer import signature

if TYPE_CHECKING:
    from tapestry.codegen.torch_cpu.c.blocks_c import How


Configs = Mapping[str, Mapping[str, Any]]
"""KernelConfig as data, by `kernel_key` of the kernel that they are for."""
_NONE: Configs = {}


def distinct_kernels(graph: Graph, program: Program) -> dict[str, tuple[Kernel, int]]:
    """Every distinct kernel that the program launches and that Triton can express, in order of first use.

    By `kernel_key`; with each, how often it is the launch of a step's first device.
    """
    found, of_step = kernels_of_steps(graph, program)
    counts = Counter(of_step.values())
    return {key: (kernel, counts[key]) for key, kernel in found.items()}


def kernels_of_steps(graph: Graph, program: Program, every: bool = False) -> tuple[dict[str, Kernel], dict[int, str]]:
    """(distinct kernels by `kernel_key`, in order of first use; for each step that launches one, its first device's key).

    Args:
        every: those of operations, too, that Triton has no kernel for.
    """
    kinds = [(signature(op, graph), isinstance(op, Block) and unread(graph, op) is not None) for op in graph.ops]
    alike: dict[tuple[object, ...], str] = {}  # to the key of its first device's kernel
    keys: dict[tuple[object, ...], str] = {}
    found: dict[str, Kernel] = {}
    of_step: dict[int, str] = {}
    for at, step in enumerate(program.steps):
        if not isinstance(step, Launch) or (not every and unavailable(graph, step.op)):
            continue
        ins = [program.buffers[b].boxes if b else None for b in step.ins]
        outs = [program.buffers[b].boxes for b in step.outs]
        same = (kinds[step.op], step.mode, id(step.blocks), *map(id, (*ins, *outs)))  # the program keeps the lists
        if same not in alike:
            made: list[str] = []
            for d, block in enumerate(step.blocks):
                if block is None:
                    continue
                boxes = tuple(b[d] if b is not None else None for b in ins)
                kernel = Kernel(op=step.op, mode=step.mode, block=block, ins=boxes, outs=tuple(_box(b[d]) for b in outs))
                exact = (kinds[step.op], replace(kernel, op=0))
                if exact not in keys:
                    # an opaque node has no text to name it by: it is itself, over these blocks
                    text = isinstance(graph.ops[step.op], Block)
                    keys[exact] = kernel_key(graph, kernel) if text else repr(exact)
                    found.setdefault(keys[exact], kernel)
                made.append(keys[exact])
            alike[same] = made[0] if made else ""
        of_step[at] = alike[same]
    return found, of_step


def named_kernels(
    graph: Graph, program: Program, target: str = DEFAULT, precision: str = "ieee", knobs: Configs = _NONE
) -> dict[str, tuple[Kernel, TritonKernel]]:
    """Kernels and what is generated for them, by file name.

    Args:
        knobs: those of a build, by `kernel_key`; the model chooses the others for the target.

    Raises:
        BuildError: there are no such knobs.
    """
    out: dict[str, tuple[Kernel, TritonKernel]] = {}
    for key, (kernel, _) in distinct_kernels(graph, program).items():
        own = knobs.get(key)
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


def without_kernel(graph: Graph) -> dict[str, str]:
    """Operations that no generated kernel computes: ONNX node (or first output) to the reason."""
    found = ((op, unavailable(graph, i)) for i, op in enumerate(graph.ops))
    return {op.source[-1] if op.source else op.outs[0]: why for op, why in found if why}


def triton_sources(
    graph: Graph, program: Program, target: str = DEFAULT, precision: str = "ieee", knobs: Configs = _NONE
) -> dict[str, str]:
    """File name to Triton source."""
    return {name: made.source for name, (_, made) in named_kernels(graph, program, target, precision, knobs).items()}


def chosen_kernels(graph: Graph, program: Program, target: str, how: How | None = None) -> list[dict[str, Any]]:
    """What computes each distinct kernel on this machine: ``kernel`` (its first output), ``launches``, ``way``, and what was
    ``tried`` before that, each with ``why`` it refused."""
    from tapestry.codegen.torch_cpu import kernels
    from tapestry.codegen.torch_cpu.c.blocks_c import PLAIN

    rows: list[dict[str, Any]] = []
    found, of_step = kernels_of_steps(graph, program, every=True)
    counts = Counter(of_step.values())
    for key, kernel in found.items():
        row: dict[str, Any] = {
            "kernel": graph.ops[kernel.op].outs[0],
            "mode": kernel.mode,
            "launches": counts[key],
            "tried": [],
        }
        why = unavailable(graph, kernel.op) if target.startswith("triton") else ""
        if target.startswith("triton") and not why:
            rows.append({**row, "way": "a Triton kernel"})
            continue
        made = kernels.build(graph, kernel, how or PLAIN)
        refusals = ((("a Triton kernel", why),) if why else ()) + made.tried
        tried = [{"way": way, "why": because} for way, because in refusals]
        rows.append({**row, "way": made.way, "tried": tried})
    return rows


def _box(box: Box | None) -> Box:
    assert box is not None
    return box
