"""Several sums side by side, each by its own operator: what they share is read once for all, and `then` sees all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tapestry.codegen.torch_cpu import dense
from tapestry.codegen.torch_cpu.natives import added_first
from tapestry.codegen.torch_cpu.points import Expressions, Run
from tapestry.codegen.torch_cpu.reads import Frame, Tensor
from tapestry.ir.contraction import part
from tapestry.ir.expr import Acc, Arg, arg_positions, call
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel
from tapestry.ir.monoid import SUMS


def packable(op: Block, graph: Graph, kernel: Kernel, plain: Run, whole: Callable[[Block, Graph, Kernel], Run]) -> Run:
    """The kernel with a packed form in which every sum is a linear layer or convolution on a packed weight, if each is one.

    Args:
        whole: the kernel of one sum on buffers as they are, for a weight that there was no room to pack.
    """
    if kernel.mode != "full" or op.monoid not in SUMS or len(op.body) == 1 or op.inner:
        return dense.packable(op, graph, kernel, plain)
    then, runs = op.then, list[dense.Packable]()
    for k, e in enumerate(op.body):
        bias = added_first(then, lambda _: True, k)
        own = Acc(0, e.dtype)
        then = bias[1] if bias else then
        alone = replace(part(op, k), then=(call("add", own, Arg(bias[0], e.dtype)) if bias else own,))
        run = dense.packable(alone, graph, kernel, whole(alone, graph, kernel))
        if not isinstance(run, dense.Packable):
            return plain
        runs.append(run)
    packs = {k: p for r in runs for k, p in r.packs.items()}
    weights = [op.reads[k].tensor for k in packs]
    if len(packs) < len(runs) or len({*weights}) < len(runs) or any(k in packs for k in arg_positions(then)):
        return plain
    tail = Expressions(op, graph, kernel, then, Frame(op.dims, kernel.block[: len(op.dims)]))

    def packed(ins: Sequence[Tensor | None], states: Sequence[Tensor]) -> list[Tensor]:
        return tail(ins, [(r.packed if _is_packed(r, ins) else r.plain)(ins, states)[0] for r in runs])

    return dense.Packable(plain, packs, packed)


def _is_packed(run: dense.Packable, ins: Sequence[Tensor | None]) -> bool:
    """oneDNN's layouts say so; ours are flat."""
    return all((x := ins[k]) is not None and (x.is_mkldnn or x.dim() == 1) for k in run.packs)
