"""Generated kernels as a proof takes them: source, launches, and which buffer is behind each parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tapestry.codegen.torch_cpu import kernels
from tapestry.codegen.torch_cpu.base.point_values import Run
from tapestry.codegen.torch_cpu.c import generated_c
from tapestry.codegen.torch_cpu.c.c_calls import Recorded, Together
from tapestry.codegen.torch_cpu.c.contract_texts import contract_texts_of, sums_text_of
from tapestry.codegen.torch_cpu.c.maps_c import Mapped
from tapestry.codegen.torch_cpu.torch_ops import dense
from tapestry.codegen.torch_cpu.views.image_view import View
from tapestry.codegen.triton.emit.source import Pass, TritonKernel
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, size
from tapestry.ir.state import state_box
from tapestry.verify.kernels import kernel_text
from tapestry.verify.kernels.kernel_text import Argument, At, Buffer, KernelText, Launch
from tapestry.verify.kernels.terms import Unsupported


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


def _launch(one: Pass, names: list[str]) -> Launch:
    params: dict[str, Argument] = {}
    for parameter, k in zip(one.params, one.takes, strict=True):
        d = one.descriptors.get(parameter)
        params[parameter] = names[k] if d is None else kernel_text.Box(names[k], d.shape, d.strides, d.block)
    return Launch(function=one.function, grid=one.grid, params=params)


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
        name=name, source=generated_c.source(run.names[0]), launches=(Launch(function=run.names[0], params=given),),
        buffers=buffers, reads=names, outs=tuple(outs), language="c",
    )  # fmt: skip
