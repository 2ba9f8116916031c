"""Kernel sources of a Program: one Triton file for each distinct kernel, however many layers and devices use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tapestry.codegen.torch_cpu import kernels
from tapestry.codegen.torch_cpu.base.point_values import Run
from tapestry.codegen.torch_cpu.c import print_c
from tapestry.codegen.torch_cpu.c.blocks_c import Mapped
from tapestry.codegen.torch_cpu.c.c_calls import Recorded, Together
from tapestry.codegen.torch_cpu.c.contract_trials import contract_texts_of, sums_text_of
from tapestry.codegen.torch_cpu.torch_ops import dense
from tapestry.codegen.torch_cpu.views import View
from tapestry.codegen.triton import generate, kernel_key, unavailable
from tapestry.codegen.triton.emit.source import Pass, TritonKernel
from tapestry.codegen.triton.run.tuned import config_from
from tapestry.codegen.triton.task.primitives import DEFAULT
from tapestry.errors import BuildError
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.kernel import Box, Kernel, size
from tapestry.ir.program import Launch, Program
from tapestry.ir.states import state_box
from tapestry.ir.syntax.printer import signature
from tapestry.rewrites.core.edit import is_view
from tapestry.verify.kernels import kernel_text
from tapestry.verify.kernels.kernel_text import Argument, At, Buffer, KernelLaunch, KernelText
from tapestry.verify.kernels.terms import Unsupported

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
    kinds = [signature(op, graph) for op in graph.ops]
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
                    keys[exact] = kernel_key(graph, kernel)
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


def _box(box: Box | None) -> Box:
    assert box is not None
    return box


# Generated kernels as a proof takes them: source, launches, and which buffer is behind each parameter.


def kernel_text_of(graph: Graph, kernel: Kernel, made: TritonKernel, name: str, source: str) -> KernelText:
    """A kernel as a run launches it, with a source of its name: what is generated, or what a build has."""
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    first = len(made.args) - len(kernel.outs)
    names = [f"buffer {k}" for k in range(len(made.args) + len(made.scratch))]
    same: dict[tuple[str, Box | None], str] = {}
    for k, p in enumerate(made.reads):  # equal parts of one tensor: one buffer, through whichever parameter
        names[k] = same.setdefault((op.reads[p].tensor, kernel.ins[p]), names[k])
    states, outs = names[len(made.reads) : first], names[first : len(made.args)]
    types = [e.dtype for e in op.body] if kernel.mode == "partial" else [graph.tensors[t].dtype for t in op.outs]
    buffers = {names[k]: _read(graph, op, kernel, p) for k, p in enumerate(made.reads)}
    for k, n in enumerate(states):
        buffers[n] = Buffer(op.body[k].dtype, size(state_box(op, k, kernel.outs[0])))
    buffers |= {n: Buffer(dtype, size(box)) for n, dtype, box in zip(outs, types, kernel.outs, strict=True)}
    buffers |= {names[len(made.args) + k]: Buffer(dtype, n, True) for k, (dtype, n) in enumerate(made.scratch)}
    return KernelText(
        name=name, source=source, launches=tuple(_launch(p, names) for p in made.launches), buffers=buffers,
        reads={p: names[k] for k, p in enumerate(made.reads)}, outs=tuple(outs), states=tuple(states),
    )  # fmt: skip


def _read(graph: Graph, op: Block, kernel: Kernel, p: int) -> Buffer:
    box = kernel.ins[p]
    assert box is not None
    return Buffer(graph.tensors[op.reads[p].tensor].dtype, size(box))


def _launch(one: Pass, names: list[str]) -> KernelLaunch:
    params: dict[str, Argument] = {}
    for parameter, k in zip(one.params, one.takes, strict=True):
        d = one.descriptors.get(parameter)
        params[parameter] = names[k] if d is None else kernel_text.Box(names[k], d.shape, d.strides, d.block)
    return KernelLaunch(function=one.function, grid=one.grid, params=params)


@dataclass(frozen=True, slots=True)
class CpuKernel:
    """What the CPU target runs for a kernel: ``form`` is what it is, ``texts`` what of it can be proved, all of them.

    Attributes:
        ours: kernels in `codegen.torch_cpu.native` whose contracts ``texts`` have; none where it is all of the source.
        why: why there is none.
    """

    form: str
    texts: tuple[KernelText, ...] = ()
    ours: tuple[str, ...] = ()
    why: str = ""


def cpu_kernel_of(graph: Graph, kernel: Kernel, name: str) -> CpuKernel:
    """A kernel as the CPU target runs it in one thread: a function in C, a call of one of ours, or operators of torch."""
    if not isinstance(graph.ops[kernel.op], Block):
        return CpuKernel("ONNX node", why="the node runs as the model has it")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _cpu_kernel(graph, kernel, kernels.build(graph, kernel), name)
    except Unsupported as e:
        return CpuKernel("kernel in C", why=str(e))
    finally:
        torch.set_num_threads(threads)


def _cpu_kernel(graph: Graph, kernel: Kernel, run: Run, name: str) -> CpuKernel:
    packs = run.packs if isinstance(run, dense.Packable) else dict[int, dense.Pack]()
    run = run.packed if isinstance(run, dense.Packable) else run
    merged = isinstance(run, dense.Merged)
    run = run.part if isinstance(run, dense.Merged) else run
    if any(isinstance(x, View) for p in packs.values() for x in p.key):
        return CpuKernel("kernel in C", why="a convolution on views of its buffers")
    if isinstance(run, Recorded | Together):
        texts, ours = contract_texts_of(graph, kernel, run.parts if isinstance(run, Together) else [run], name, packs)
        return CpuKernel(", ".join(ours) + ", added by torch to what is given" * merged, texts, ours)
    if isinstance(run, Mapped) and len(packs) > 1 and isinstance(run.recorded, Recorded):
        text = sums_text_of(graph, kernel, run.recorded, run.names[0], name, packs)
        return CpuKernel("tapestry_several", (text,), ("tapestry_conv", "tapestry_several"))
    if isinstance(run, Mapped) and run.reads:
        return CpuKernel("generated C", (generated_text_of(graph, kernel, run, name),))
    if isinstance(run, Mapped):
        return CpuKernel("generated C", why="several functions, or one on views of the buffers, which are not read together")
    return CpuKernel("torch operators", why="operators of torch are not read")


def generated_text_of(graph: Graph, kernel: Kernel, run: Mapped, name: str) -> KernelText:
    """A function in C as the CPU target calls it: rows of numbers in, and the output's, row-major."""
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    names = {p: f"buffer {k}" for k, p in enumerate(run.reads)}
    buffers = {n: _read(graph, op, kernel, p) for p, n in names.items()}
    outs = {"y" if len(op.outs) == 1 else f"y{k}": t for k, t in enumerate(op.outs)}
    buffers |= {y: Buffer(graph.tensors[t].dtype, size(kernel.outs[0])) for y, t in outs.items()}
    given: dict[str, Argument] = {"sizes": run.sizes or (0,), "p": tuple(At(n) for n in buffers)}
    return KernelText(
        name=name, source=print_c.source(run.names[0]), launches=(KernelLaunch(function=run.names[0], params=given),),
        buffers=buffers, reads=names, outs=tuple(outs), language="c",
    )  # fmt: skip


# What eager execution would launch and move: one kernel for each ONNX node, its inputs read and its results written once.


def unfused(graph: Graph) -> dict[str, int]:
    """``{kernels, bytes}`` of a graph as it was lifted; nodes that only view their input are free."""
    groups: dict[str, list[Op]] = {}
    for i, op in enumerate(graph.ops):
        groups.setdefault(op.source[0] if op.source else f"#{i}", []).append(op)
    kernels = [ops for ops in groups.values() if not all(is_view(op) for op in ops)]
    readers = graph.consumers()
    views = {op.outs[0]: op.inputs[0] for op in graph.ops if is_view(op)}
    total = 0
    for ops in kernels:
        made = {t for op in ops for t in op.outs}
        inside = {id(op) for op in ops}
        total += sum(graph.tensors[t].nbytes for t in {_behind(t, views) for op in ops for t in op.inputs} - made)
        for t in made:
            if t in graph.outputs or any(id(graph.ops[i]) not in inside for i in readers.get(t, [])):
                total += graph.tensors[t].nbytes
    return {"kernels": len(kernels), "bytes": total}


def _behind(tensor: str, views: dict[str, str]) -> str:
    while tensor in views:
        tensor = views[tensor]
    return tensor
