"""Several sums side by side, each by its own operator: what they share is read once for all, and `then` sees all of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base.point_values import Expressions, Run
from tapestry.codegen.torch_cpu.base.strided_reads import Frame, Tensor
from tapestry.codegen.torch_cpu.base.torch_unary import added_first
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.codegen.torch_cpu.c import generated_c
from tapestry.codegen.torch_cpu.c.blocks_c import How
from tapestry.codegen.torch_cpu.c.c_calls import Calls, CCall, CpuKernel, Ins, recorded, together
from tapestry.codegen.torch_cpu.c.print_c import Writer, written
from tapestry.codegen.torch_cpu.torch_ops import dense
from tapestry.codegen.torch_cpu.torch_ops.viewed import viewed
from tapestry.codegen.torch_cpu.views import Seen, seen
from tapestry.ir.expr import Acc, Arg, Expr, Index, arg_positions, call, walk
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel
from tapestry.ir.recognition.contraction import dims_read, factors, only_sums, part


def packable(
    op: Block, graph: Graph, kernel: Kernel, plain: Run, whole: Callable[[Block, Graph, Kernel], Run], how: How
) -> CpuKernel | Refusal:
    """Several sums of which each is a linear layer or a convolution on a packed weight.

    Args:
        whole: the kernel of one sum on buffers as they are, for a weight that there was no room to pack.
    """
    if not only_sums(op.monoid) or len(op.body) == 1 or op.inner:
        return Refusal("there is one sum, or none")
    then, runs, added, as_is = op.then, list[CpuKernel](), list[int](), True
    for k, e in enumerate(op.body):
        bias = added_first(then, lambda _: True, k)
        own = Acc(0, e.dtype)
        then, added = (bias[1], [*added, bias[0]]) if bias else (then, added)
        alone = replace(part(op, k), then=(call("add", own, Arg(bias[0], e.dtype)) if bias else own,))
        view = seen(alone, graph, replace(kernel, outs=kernel.outs[:1]))
        own_of, place, block = (view.op, view.graph, view.kernel) if view else (alone, graph, kernel)
        run = dense.packable(own_of, place, block, whole(own_of, place, block))
        if isinstance(run, Refusal):
            return Refusal(f"sum {k}: {run.why}")
        run, as_is = (viewed(run, _of_its_own(view)), False) if view else (run, as_is)
        runs.append(run)
    packs = {k: p for r in runs for k, p in r.packs.items()}
    weights = [op.reads[k].tensor for k in packs]
    if len(packs) < len(runs) or len({*weights}) < len(runs) or any(k in packs for k in arg_positions(then)):
        return Refusal("two sums read one weight, or what follows them reads a weight")
    tail = Expressions(op, graph, kernel, then, Frame(op.dims, kernel.block[: len(op.dims)]))

    def packed(ins: Sequence[Tensor | None], states: Sequence[Tensor]) -> list[Tensor]:
        return tail(ins, [(r.packed if _is_packed(r, ins) else r)(ins, states)[0] for r in runs])

    joined = as_is and _of_one(op, [k for r in runs for k in r.packs]) and all(len(op.reads[k].index) == 1 for k in added)
    return CpuKernel(plain=plain, packs=packs, on_packed=_recorded(runs, then, packed, joined))


def _of_its_own(view: Seen) -> Seen:
    """The views of what a sum reads: weights of the others may be packed."""
    own = arg_positions((*view.op.body, *view.op.then))
    return replace(view, views=tuple(v if k in own else None for k, v in enumerate(view.views)))


def _of_one(op: Block, weights: Sequence[int]) -> bool:
    """Whether the sums differ in their weights alone: one other factor, and weights along the same dimensions."""
    found: set[object] = set()
    for k, w in enumerate(weights):
        others = [e for e in factors(part(op, k)) or () if not isinstance(e, Arg) or e.pos != w]
        found.add((*(op.reads[e.pos] if isinstance(e, Arg) else e for e in others), dims_read(op, Arg(w, op.body[k].dtype))))
    return len(found) == 1


def _recorded(runs: Sequence[CpuKernel], then: tuple[Expr, ...], packed: Run, joined: bool) -> CpuKernel:
    """The packed form as one that writes where it is told, where every sum is by our kernel.

    Args:
        joined: whether the sums are of the same rows and add a bias at most, so that one kernel may do all of them.
    """
    ours = tuple(r.packed for r in runs if r.packed.bind and not r.packed.functions)
    if len(ours) < len(runs):
        return CpuKernel(plain=packed)
    if then == tuple(Acc(k, "f32") for k in range(len(runs))):
        return together(ours)
    lib = native.library() if joined else None
    linear = all(p.key[0] == "panels" and len(p.key) > 1 for r in runs for p in r.packs.values())
    if lib is None or not linear or len(then) != 1 or len(runs) > native.MOST_SUMS or arg_positions(then) or not written(then):
        return CpuKernel(plain=packed)
    if then[0].dtype != "f32" or any(isinstance(x, Index) for x in walk(then[0])):
        return CpuKernel(plain=packed)
    name = generated_c.register(Writer((), {}, ()).cells(then[0], len(runs)))

    def record(ins: Ins, memory: Tensor) -> CCall:
        calls = [Calls.of(r.bind(ins, [memory])).parts[-1] for r in ours if r.bind]
        first, then_at = calls[0], ctypes.cast(generated_c.function(name), ctypes.c_void_p).value
        sizes = native.Several(first.sizes, len(calls), then_at)
        pointers = ctypes.c_void_p * native.MOST_SUMS
        buffers = native.Products(
            first.buffers.x,
            pointers(*(c.buffers.w for c in calls)),
            pointers(*(c.buffers.bias for c in calls)),
            memory.data_ptr(),
        )
        kept = tuple(x for c in calls for x in c.kept)
        return CCall(lib.tapestry_several, sizes, buffers, kept)

    return recorded(ours[0].arrays[0], record, ours[0].memory[0][0], plain=packed, functions=(name,))


def _is_packed(run: CpuKernel, ins: Sequence[Tensor | None]) -> bool:
    """What is packed is flat."""
    return all((x := ins[k]) is not None and x.dim() == 1 for k in run.packs)
