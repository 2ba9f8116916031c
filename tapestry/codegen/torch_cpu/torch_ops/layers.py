"""Operations computed in layers: inner reductions first, then states of rows, then what is weighted by them.

The general way runs inner reductions as matrix products, and an exp-weighted sum as one more, over blocks of the reduced
dimension so that weights stay in cache. Where the projections are those of batched attention it is torch's own streaming
kernel, whose (log-sum-exp, 1, output) is a state of the same monoid as (max, sum, weighted sum).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tapestry.codegen.torch_cpu.base import contract, state_merges
from tapestry.codegen.torch_cpu.base.point_values import Expressions, product
from tapestry.codegen.torch_cpu.base.strided_reads import Frame
from tapestry.codegen.torch_cpu.torch_ops.attention_torch import streaming
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, cut, size
from tapestry.ir.recognition.contraction import dims_read
from tapestry.ir.recognition.exponential import exponential
from tapestry.ir.recognition.state import state_box, varies

States = Callable[[Sequence[Tensor | None]], list[Tensor]]
MOST_WEIGHTS = 1 << 22  # weights of one block of the reduced dimension, in elements


def states(op: Block, graph: Graph, kernel: Kernel) -> States:
    """Monoid states of the block, each field once along the map dimensions that it does not vary along."""
    fast = streaming(op, graph, kernel)
    slow = _blocked(op, graph, kernel)
    if fast is None:
        return slow

    def run(ins: Sequence[Tensor | None]) -> list[Tensor]:
        found = fast(ins)
        return slow(ins) if found is None else found

    return run


def _blocked(op: Block, graph: Graph, kernel: Kernel) -> States:
    """Blocks of the first reduced dimension, one after another, merged as they come."""
    n = len(op.dims)
    lo, hi = kernel.block[n]
    along = varies(op)
    rows = [b for i, b in enumerate(kernel.block[:n]) if along[0][i]]
    points = size(tuple(rows)) * size(kernel.block[n : n + len(op.reduce)])
    parts = max(1, min(hi - lo, -(-points // MOST_WEIGHTS)))
    runs: list[States] = []
    for k in range(parts):
        a, b = cut(hi - lo, parts, k)
        box: Box = (*kernel.block[:n], (lo + a, lo + b), *kernel.block[n + 1 :])
        runs.append(_Layers(op, graph, replace(kernel, block=box)))
    if parts == 1:
        return runs[0]
    dtypes = tuple(e.dtype for e in op.body)

    def run(ins: Sequence[Tensor | None]) -> list[Tensor]:
        assert op.monoid
        total = runs[0](ins)
        for r in runs[1:]:
            total = state_merges.combine(op.monoid, total, r(ins), dtypes)
        return total

    return run


@dataclass(frozen=True, slots=True)
class _Inner:
    """An inner reduction: how to compute it, and its shape over the outer space."""

    run: States
    shape: tuple[int, ...]


class _Layers:
    """States of one block, all at once."""

    def __init__(self, op: Block, graph: Graph, kernel: Kernel) -> None:
        outer = len(op.dims) + len(op.reduce)
        self.op, self.keep = op, len(op.dims)
        self.frame = Frame((*op.dims, *op.reduce), kernel.block[:outer])
        self.inner = [_inner(op, k, graph, kernel) for k in range(len(op.inner))]
        self.body = Expressions(op, graph, kernel, op.body, self.frame)
        self.weights = exponential(op.monoid, sums=2)
        self.product = _weighted(op, self.frame) if self.weights else None
        score = dims_read(op, op.body[0])
        self.score = [n if d.name in score else 1 for d, n in zip(self.frame.dims, self.frame.extents, strict=True)]
        self.score[self.keep :] = self.frame.extents[self.keep :]
        reduced = [hi - lo for lo, hi in kernel.block[self.keep : outer]]
        self.shapes = [
            [*(hi - lo for lo, hi in state_box(op, k, kernel.block[: self.keep])), *reduced] for k in range(len(op.body))
        ]

    def __call__(self, ins: Sequence[Tensor | None]) -> list[Tensor]:
        lets = [s.run(ins)[0].reshape(s.shape) for s in self.inner]
        values = self.body.values(ins, lets)
        assert self.op.monoid
        if self.product is None or 0 in self.score[self.keep :]:
            full = [v.expand(shape) for v, shape in zip(values, self.shapes, strict=True)]
            return state_merges.reduce(self.op.monoid, full, self.keep)
        m, s, value = values
        m = m.expand(self.score)
        dims = tuple(range(self.keep, m.dim()))
        assert self.weights is not None
        top, weights = state_merges.weigh(self.weights, m, dims)
        total = torch.sum(weights * s, dim=dims)
        return [top.flatten(self.keep)[..., 0], total, self.product(weights, value)]


def _weighted(op: Block, frame: Frame) -> Callable[[Tensor, Tensor], Tensor]:
    """The last field as a matrix product of weights and values, for an exp-weighted sum of values by columns."""
    flat = replace(op, inner=(), monoid="sum")
    weights = dims_read(op, op.body[0]) | {d.name for d in op.reduce}  # they are there for every point of the reduced ones
    return contract.matmul(flat, frame, weights, dims_read(op, op.body[2]))


def _inner(op: Block, k: int, graph: Graph, kernel: Kernel) -> _Inner:
    """Inner reduction k as an operation of its own over the dimensions that it depends on."""
    s = op.inner[k]
    used = dims_read(op, s.body)
    box = {d.name: b for d, b in zip(op.space, kernel.block, strict=True)}
    outer = (*op.dims, *op.reduce)
    dims = tuple(d for d in outer if d.name in used)
    alone = Block(outs=("let",), dims=dims, reduce=s.dims, monoid=s.monoid, reads=op.reads, body=(s.body,))
    part = replace(kernel, block=tuple(box[d.name] for d in alone.space))
    frame = Frame(alone.space, part.block)
    run = product(alone, graph, part, frame) or _reduced(alone, graph, part, frame)
    return _Inner(run, tuple(box[d.name][1] - box[d.name][0] if d.name in used else 1 for d in outer))


def _reduced(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> States:
    body = Expressions(op, graph, kernel, op.body, frame)
    monoid = op.monoid
    assert monoid is not None
    return lambda ins: state_merges.reduce(monoid, [v.expand(frame.extents) for v in body.values(ins, [])], len(op.dims))
