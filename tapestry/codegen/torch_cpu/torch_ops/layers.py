"""Operations computed in layers: inner reductions first, then states of rows, then what is weighted by them.

The general way runs inner reductions as matrix products, and an exp-weighted sum as one more, over blocks of the reduced
dimension so that weights stay in cache. Where the projections are those of batched attention it is torch's own streaming
kernel, whose (log-sum-exp, 1, output) is a state of the same monoid as (max, sum, weighted sum).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base import contract, state_merges
from tapestry.codegen.torch_cpu.base.contract import points
from tapestry.codegen.torch_cpu.base.point_values import Expressions, product
from tapestry.codegen.torch_cpu.base.strided_reads import Frame
from tapestry.codegen.torch_cpu.c import conv_c
from tapestry.ir.expr import Expr, call
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, cut, size
from tapestry.ir.monoid import number
from tapestry.ir.recognition.attention_roles import Attention, attention, linear_score
from tapestry.ir.recognition.contraction import dims_read
from tapestry.ir.recognition.exponential import exponential
from tapestry.ir.recognition.state import state_box, varies

Tensor = torch.Tensor


# Attention by our own kernel (`native`): states of the softmax of scaled and biased scores, head by head.


def states_by_our_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(maximum, sum of weights, weighted values) of every row, the first two (outer, inner, rows); ``None`` without kernels.

    Args:
        q: (outer, inner, rows, depth), the last dimension adjacent; k and v with keys for rows.
        mask: added to the scores; (outer, inner, rows, keys), 1 where it is the same throughout.
        scale: of the products of queries and keys.
    """
    lib = conv_c.available()
    if lib is None or q.dtype != torch.float32 or max(k.shape[2], q.shape[3]) > conv_c.DEEPEST:
        return None
    outer, inner, rows, depth = q.shape
    out = torch.empty(outer, rows, inner, depth).transpose(1, 2)  # heads side by side, as who reads it wants them
    top, total = torch.empty(outer, inner, rows), torch.empty(outer, inner, rows)
    bias = (0, 0, 0, 0) if mask is None else tuple(0 if n == 1 else s for s, n in zip(mask.stride(), mask.shape, strict=True))
    sizes = native.Attention(
        outer,
        inner,
        1,
        rows,
        k.shape[2],
        depth,
        *map(_strides, (q, k, v)),
        (ctypes.c_int64 * 4)(*bias),
        _strides(out),
        (ctypes.c_int64 * 3)(),
        0,
        scale,
    )
    at = (None if x is None else x.data_ptr() for x in (q, k, v, mask, out, top, total))
    lib.tapestry_attention(ctypes.byref(sizes), ctypes.byref(native.Heads(*at)))
    return top, total, out


def _strides(x: Tensor) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * 3)(*x.stride()[:3])


# Attention by our kernel or torch's streaming one, where projections allow: one query set, key set, bias, scale.


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class Match:
    """An attention of f32 whose scores are ``scale * product + bias``; names of dimensions, for they are cut.

    Weights are ``exp(rate * (score - centre))``. The kernels know a rate of 1, so scale and bias are multiplied by it here,
    and the centre that they give is divided by it.
    """

    attention: Attention
    batch: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    key: str
    depth: tuple[str, ...]
    scale: float
    bias: Expr | None


def streaming(op: Block, graph: Graph, kernel: Kernel) -> Callable[[Sequence[Tensor | None]], list[Tensor] | None] | None:
    """A function that gives states, or ``None`` for data that the kernel does not treat as the operation says."""
    roles = match(op)
    if roles is None or any(hi <= lo for lo, hi in kernel.block):
        return None
    a, rate, scale, bias = roles.attention, roles.attention.weights.rate, roles.scale, roles.bias
    box = {d.name: b for d, b in zip(op.space, kernel.block, strict=True)}
    extent = {n: hi - lo for n, (lo, hi) in box.items()}
    if points(roles.depth, extent) != points(roles.columns, extent):
        return None
    space = Frame(op.space, kernel.block)
    score = Frame((*op.dims, *op.reduce), kernel.block[: len(op.dims) + 1])
    heads = Expressions(op, graph, kernel, (a.query, a.keys), space)
    others = Expressions(op, graph, kernel, (a.value, *([bias] if bias else [])), score)
    lay = _Layout(op, roles, box)

    def run(ins: Sequence[Tensor | None]) -> list[Tensor] | None:
        q, k = heads.values(ins, [])
        v, *added = others.values(ins, [])
        q, k = lay.matrix(q, roles.rows, roles.depth), lay.matrix(k, (roles.key,), roles.depth)
        v = lay.matrix(v.reshape(*v.shape, *(1 for _ in op.inner_dims)), (roles.key,), roles.columns)
        mask = lay.mask(_ranked(added[0], len(op.space), len(op.inner_dims))) if added else None
        ours = states_by_our_kernel(q, k, v, mask, scale)
        if ours:
            return [lay.rows(ours[0] if rate == 1 else ours[0] / rate), lay.rows(ours[1]), lay.out(ours[2])]
        out, lse = _FLASH(q, k, v, attn_mask=mask, scale=scale)
        if bool((lse == 0).any()):  # so it marks a row without keys, and rarely a row that is fine
            return None
        lse = lse.to(out.dtype) if rate == 1 else lse.to(out.dtype) / rate
        return [lay.rows(lse), torch.ones((1,) * len(op.dims), dtype=out.dtype), lay.out(out)]

    return run


def _ranked(x: Tensor, rank: int, inner: int) -> Tensor:
    """A bias over the whole index space; one that is a number everywhere has no axes yet."""
    return x.reshape(*(x.shape or (1,) * (rank - inner)), *(1,) * inner)


def match(op: Block) -> Match | None:
    """The attention that an operation is; ``None`` when it is something else."""
    a = attention(op)
    linear = linear_score(a.score, a.weights.hidden("f32")) if a and a.score.dtype == "f32" else None
    if a is None or linear is None:
        return None
    rows, columns, batch, depth = (tuple(d.name for d in dims) for dims in (a.rows, a.columns, a.batch, a.depth))
    scale, bias = linear
    if bias is not None and a.weights.rate != 1:
        bias = call("mul", bias, number(a.weights.rate, "f32"))
    return Match(a, batch, rows, columns, a.key.name, depth, scale * a.weights.rate, bias)


class _Layout:
    """From values over the index space to (outer batch, inner batch, rows, columns), and back."""

    def __init__(self, op: Block, roles: Match, box: dict[str, tuple[int, int]]) -> None:
        self.names = [d.name for d in op.space]
        self.maps = [d.name for d in op.dims]
        self.roles, self.extent = roles, {n: hi - lo for n, (lo, hi) in box.items()}
        self.batch = (roles.batch[:-1], roles.batch[-1:])
        self.known: dict[object, tuple[list[int], ...]] = {}

    def matrix(self, x: Tensor, rows: tuple[str, ...], columns: tuple[str, ...]) -> Tensor:
        """A value as matrices, one for each batch point, with rows contiguous (torch's kernel takes it for granted)."""
        out = self.groups(x, (*self.batch, rows, columns), whole=True)
        return out if out.stride(-1) == 1 else out.contiguous()

    def mask(self, x: Tensor) -> Tensor:
        """A bias, of extent 1 where it is the same throughout a group of dimensions."""
        out = self.groups(x, (*self.batch, self.roles.rows, (self.roles.key,)), whole=False).to(torch.float32)
        return out if out.stride(-1) == 1 else out.contiguous()

    def groups(self, x: Tensor, groups: tuple[tuple[str, ...], ...], *, whole: bool) -> Tensor:
        """Axes permuted and flattened group by group; the others have extent 1 and are dropped."""
        known = (groups, whole, x.shape)
        if known not in self.known:
            self.known[known] = self._grouped(x.shape, groups, whole)
        order, own, sizes, flat = self.known[known]
        return x.permute(order).reshape(own).expand(sizes).reshape(flat)

    def _grouped(self, shape: torch.Size, groups: tuple[tuple[str, ...], ...], whole: bool) -> tuple[list[int], ...]:
        """What depends on shapes alone: the order of axes, their sizes without the others, expanded, and flattened."""
        order = [self.names.index(n) for g in groups for n in g]
        permuted = order + [i for i in range(len(self.names)) if i not in order]
        sizes, flat = list[int](), list[int]()
        for g in groups:
            own = [shape[self.names.index(n)] for n in g]
            own = [self.extent[n] for n in g] if whole or any(o > 1 for o in own) else own
            sizes += own
            flat.append(prod(own))
        return permuted, [shape[i] for i in order], sizes, flat

    def rows(self, x: Tensor) -> Tensor:
        """One number for each row, over the map dimensions, once along columns."""
        return self.back(x, (*self.roles.batch, *self.roles.rows), self.roles.columns)

    def out(self, x: Tensor) -> Tensor:
        """Rows of values, over the map dimensions."""
        return self.back(x, (*self.roles.batch, *self.roles.rows, *self.roles.columns), ())

    def back(self, x: Tensor, order: tuple[str, ...], missing: tuple[str, ...]) -> Tensor:
        """A flat result over named dimensions, in the order of the map dimensions."""
        x = x.reshape([self.extent[n] for n in order] + [1] * len(missing))
        return x.permute([(*order, *missing).index(n) for n in self.maps])


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
