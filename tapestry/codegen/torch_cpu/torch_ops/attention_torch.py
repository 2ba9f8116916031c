"""Attention by our kernel or torch's streaming one, where projections allow: one query set, key set, bias, scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tapestry.codegen.torch_cpu.base.contract import points
from tapestry.codegen.torch_cpu.base.point_values import Expressions
from tapestry.codegen.torch_cpu.base.strided_reads import Frame, Tensor
from tapestry.codegen.torch_cpu.c.attention_c_states import states as our_states
from tapestry.ir.expr import Call, Const, Expr, Let, call, walk
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel
from tapestry.ir.monoid import lowest, number
from tapestry.ir.recognise.contraction import dims_read
from tapestry.ir.state import counts_ones

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class Roles:
    """Dimensions by what they are: batch (of keys and values), rows (of queries), column (of values), key, and depth."""

    batch: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    key: str
    depth: tuple[str, ...]


def streaming(op: Block, graph: Graph, kernel: Kernel) -> Callable[[Sequence[Tensor | None]], list[Tensor] | None] | None:
    """A function that gives states, or ``None`` for data that the kernel does not treat as the operation says."""
    found = match(op)
    if found is None or any(hi <= lo for lo, hi in kernel.block):
        return None
    roles, query, key, scale, bias = found
    box = {d.name: b for d, b in zip(op.space, kernel.block, strict=True)}
    extent = {n: hi - lo for n, (lo, hi) in box.items()}
    if points(roles.depth, extent) != points(roles.columns, extent):
        return None
    space = Frame(op.space, kernel.block)
    score = Frame((*op.dims, *op.reduce), kernel.block[: len(op.dims) + 1])
    heads = Expressions(op, graph, kernel, (query, key), space)
    others = Expressions(op, graph, kernel, (op.body[2], *([bias] if bias else [])), score)
    lay = _Layout(op, roles, box)

    def run(ins: Sequence[Tensor | None]) -> list[Tensor] | None:
        q, k = heads.values(ins, [])
        v, *added = others.values(ins, [])
        q, k = lay.matrix(q, roles.rows, roles.depth), lay.matrix(k, (roles.key,), roles.depth)
        v = lay.matrix(v.reshape(*v.shape, *(1 for _ in op.inner_dims)), (roles.key,), roles.columns)
        mask = lay.mask(_ranked(added[0], len(op.space), len(op.inner_dims))) if added else None
        ours = our_states(q, k, v, mask, scale)
        if ours:
            return [lay.rows(ours[0]), lay.rows(ours[1]), lay.out(ours[2])]
        out, lse = _FLASH(q, k, v, attn_mask=mask, scale=scale)
        if bool((lse == 0).any()):  # so it marks a row without keys, and rarely a row that is fine
            return None
        return [lay.rows(lse.to(out.dtype)), torch.ones((1,) * len(op.dims), dtype=out.dtype), lay.out(out)]

    return run


def _ranked(x: Tensor, rank: int, inner: int) -> Tensor:
    """A bias over the whole index space; one that is a number everywhere has no axes yet."""
    return x.reshape(*(x.shape or (1,) * (rank - inner)), *(1,) * inner)


def match(op: Block) -> tuple[Roles, Expr, Expr, float, Expr | None] | None:
    """(roles, query, key, scale, bias) of an attention; ``None`` when the operation is something else."""
    if op.monoid != "softsum" or len(op.reduce) != 1 or len(op.inner) != 1 or op.inner[0].monoid != "sum":
        return None
    s, dtype = op.inner[0], op.body[0].dtype
    if dtype != "f32" or not (isinstance(s.body, Call) and s.body.fn == "mul") or not counts_ones(op.body):
        return None
    linear = _linear(op.body[0])
    if linear is None:
        return None
    key = op.reduce[0].name
    for q, k in (s.body.args, s.body.args[::-1]):
        roles = _roles(op, q, k, key)
        if roles is not None:
            return roles, q, k, *linear
    return None


def _roles(op: Block, query: Expr, keys: Expr, key: str) -> Roles | None:
    of_q, of_k, of_v = dims_read(op, query), dims_read(op, keys), dims_read(op, op.body[2])
    depth = tuple(d.name for d in op.inner_dims)
    if key in of_q or key not in of_k or key not in of_v or not {*depth} <= of_q & of_k or of_v & {*depth}:
        return None
    names = [d.name for d in op.dims]
    columns = tuple(n for n in names if n in of_v and n not in of_q and n not in of_k)
    rows = tuple(n for n in names if n in of_q and n not in of_k and n not in of_v)
    score = dims_read(op, op.body[0])
    if not columns or score & {*columns}:
        return None
    return Roles(tuple(n for n in names if n not in rows and n not in columns), rows, columns, key, depth)


def _linear(e: Expr) -> tuple[float, Expr | None] | None:
    """(scale, bias) with e = scale * let0 + bias, where a choice of minus infinity is a bias too."""
    if isinstance(e, Let):
        return 1.0, None
    if not isinstance(e, Call):
        return None
    if e.fn in ("mul", "div"):
        inner, factor = e.args if isinstance(e.args[1], Const) else e.args[::-1]
        found = _linear(inner)
        if found is None or found[1] is not None or not isinstance(factor, Const) or (e.fn == "div" and factor is e.args[0]):
            return None
        value = float(factor.value)
        return (found[0] * value if e.fn == "mul" else found[0] / value), None
    if e.fn == "add":
        inner, bias = e.args if _has_score(e.args[0]) else e.args[::-1]
        found = None if _has_score(bias) else _linear(inner)
        return None if found is None else (found[0], bias if found[1] is None else call("add", found[1], bias))
    if e.fn == "where" and e.args[2] == lowest(e.dtype) and not _has_score(e.args[0]):
        found = _linear(e.args[1])
        zero: Expr = number(0, e.dtype)
        return None if found is None else (found[0], call("where", e.args[0], found[1] or zero, e.args[2]))
    return None


def _has_score(e: Expr) -> bool:
    return any(isinstance(x, Let) for x in walk(e))


class _Layout:
    """From values over the index space to (outer batch, inner batch, rows, columns), and back."""

    def __init__(self, op: Block, roles: Roles, box: dict[str, tuple[int, int]]) -> None:
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
        order = [self.names.index(n) for g in groups for n in g]
        x = x.permute(order + [i for i in range(len(self.names)) if i not in order])
        sizes, flat, at = list[int](), list[int](), 0
        for g in groups:
            full = [self.extent[n] for n in g]
            own = list(x.shape[at : at + len(g)])
            at += len(g)
            own = full if whole or any(o > 1 for o in own) else own
            sizes += own
            total = 1
            for n in own:
                total *= n
            flat.append(total)
        return x.reshape(x.shape[: len(order)]).expand(sizes).reshape(flat)

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
