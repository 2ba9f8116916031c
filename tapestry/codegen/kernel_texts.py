"""Generated kernels as a proof takes them: source, launches, and which buffer is behind each parameter."""

from __future__ import annotations

from tapestry.codegen.triton.emit.source import Pass, TritonKernel
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, size
from tapestry.ir.state import state_box
from tapestry.verify.kernels import kernel_text
from tapestry.verify.kernels.kernel_text import Buffer, KernelText, Launch


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
    params: dict[str, str | kernel_text.Box] = {}
    for parameter, k in zip(one.params, one.takes, strict=True):
        d = one.descriptors.get(parameter)
        params[parameter] = names[k] if d is None else kernel_text.Box(names[k], d.shape, d.strides, d.block)
    return Launch(function=one.function, grid=one.grid, params=params)
