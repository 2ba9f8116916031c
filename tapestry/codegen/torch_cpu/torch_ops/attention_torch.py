"""States of attention by torch's streaming kernel, where projections allow: one query set, key set, bias, scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tapestry.codegen.torch_cpu.base.contract import points
from tapestry.codegen.torch_cpu.base.point_values import Expressions
from tapestry.codegen.torch_cpu.base.strided_reads import Frame
from tapestry.ir.expr import Expr, call, number
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel
from tapestry.ir.recognition.attention_roles import Attention, attention, linear_score

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
        order, own, sizes, flat = self._grouped(x.shape, groups, whole)
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
