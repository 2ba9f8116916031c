"""Several sums side by side, each by its own operator: what they share is read once for all, and `then` sees all of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tapestry.codegen.torch_cpu.base.added_first import added_first
from tapestry.codegen.torch_cpu.base.point_values import Expressions, Run
from tapestry.codegen.torch_cpu.base.strided_reads import Frame, Tensor
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.codegen.torch_cpu.c import generated_c
from tapestry.codegen.torch_cpu.c.blocks_c import How
from tapestry.codegen.torch_cpu.c.c_calls import Calls, CCall, CpuKernel, Ins, recorded, together
from tapestry.codegen.torch_cpu.c.print_c import Writer, written
from tapestry.codegen.torch_cpu.c.thread_parts import CELLS, Work
from tapestry.codegen.torch_cpu.torch_ops import dense
from tapestry.codegen.torch_cpu.torch_ops.viewed import viewed
from tapestry.codegen.torch_cpu.views import Seen, seen
from tapestry.ir.expr import Acc, Arg, Expr, Index, arg_positions, call, walk
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel
from tapestry.ir.recognition.contraction import only_sums, part


def packable(
    op: Block, graph: Graph, kernel: Kernel, plain: Run, whole: Callable[[Block, Graph, Kernel], Run], how: How
) -> CpuKernel | Refusal:
    """Several sums of which each is a linear layer or a convolution on a packed weight.

    Args:
        whole: the kernel of one sum on buffers as they are, for a weight that there was no room to pack.
    """
    if not only_sums(op.monoid) or len(op.body) == 1 or op.inner:
        return Refusal("there is one sum, or none")
    then, runs = op.then, list[CpuKernel]()
    for k, e in enumerate(op.body):
        bias = added_first(then, lambda _: True, k)
        own = Acc(0, e.dtype)
        then = bias[1] if bias else then
        alone = replace(part(op, k), then=(call("add", own, Arg(bias[0], e.dtype)) if bias else own,))
        view = seen(alone, graph, replace(kernel, outs=kernel.outs[:1]))
        own_of, place, block = (view.op, view.graph, view.kernel) if view else (alone, graph, kernel)
        run = dense.packable(own_of, place, block, whole(own_of, place, block))
        if isinstance(run, Refusal):
            return Refusal(f"sum {k}: {run.why}")
        runs.append(viewed(run, _of_its_own(view)) if view else run)
    packs = {k: p for r in runs for k, p in r.packs.items()}
    weights = [op.reads[k].tensor for k in packs]
    if len(packs) < len(runs) or len({*weights}) < len(runs) or any(k in packs for k in arg_positions(then)):
        return Refusal("two sums read one weight, or what follows them reads a weight")
    tail = Expressions(op, graph, kernel, then, Frame(op.dims, kernel.block[: len(op.dims)]))

    def packed(ins: Sequence[Tensor | None], states: Sequence[Tensor]) -> list[Tensor]:
        return tail(ins, [r.packed(ins, states)[0] for r in runs])

    return CpuKernel(plain=plain, packs=packs, on_packed=_recorded(runs, then, packed))


def _of_its_own(view: Seen) -> Seen:
    """The views of what a sum reads: weights of the others may be packed."""
    own = arg_positions((*view.op.body, *view.op.then))
    return replace(view, views=tuple(v if k in own else None for k, v in enumerate(view.views)))


def _recorded(runs: Sequence[CpuKernel], then: tuple[Expr, ...], packed: Run) -> CpuKernel:
    """The packed form as one that writes where it is told, where every sum is by our kernel and all lie alike."""
    ours = tuple(r.packed for r in runs if r.packed.bind and not r.packed.functions)
    if len(ours) < len(runs):
        return CpuKernel(plain=packed)
    if then == tuple(Acc(k, "f32") for k in range(len(runs))):
        return together(ours)
    steps = {r.arrays[0](torch.empty(r.memory[0][0], device="meta")).stride() for r in ours}
    able = len(then) == 1 and then[0].dtype == "f32" and not arg_positions(then) and written(then)
    if len(steps) > 1 or not able or any(isinstance(x, Index) for x in walk(then[0])):
        return CpuKernel(plain=packed)
    name = generated_c.register(Writer().cells(then[0], len(runs)))

    def record(ins: Ins, memory: Tensor) -> Calls:
        results = [torch.empty(r.memory[0][0]) for r in ours]
        sums = [r.bind(ins, [x]) for r, x in zip(ours, results, strict=True) if r.bind]
        given, cells = (*results, memory), memory.numel()
        places = (ctypes.c_void_p * len(given))(*(x.data_ptr() for x in given))
        work = Work(cells, cells * len(given) / CELLS)
        return Calls.of(*sums, CCall(generated_c.function(name), ctypes.c_int64(cells), places, given, work))

    return recorded(ours[0].arrays[0], record, ours[0].memory[0][0], plain=packed, functions=(name,))
