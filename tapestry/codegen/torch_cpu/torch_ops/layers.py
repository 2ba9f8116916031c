"""Operations computed in layers: inner reductions first, then states of rows, then what is weighted by them.

The general way runs inner reductions as matrix products, and an exp-weighted sum as one more, over blocks of the reduced
dimension so that weights stay in cache. Where the projections are those of batched attention it is torch's own streaming
kernel, whose (log-sum-exp, 1, output) is a state of the same monoid as (max, sum, weighted sum).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base import closures, contract, scalars
from tapestry.codegen.torch_cpu.base.contract import points
from tapestry.codegen.torch_cpu.base.point_values import Expressions, Run, held, product
from tapestry.codegen.torch_cpu.base.scalars import tensor_of
from tapestry.codegen.torch_cpu.base.strided_reads import Frame
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.codegen.torch_cpu.c import conv_c
from tapestry.codegen.torch_cpu.c.c_calls import Calls, CCall, CpuKernel, Ins, Pack, hold, moved
from tapestry.codegen.torch_cpu.views import Seen, View
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, arg_positions, call
from tapestry.ir.graph import Block, Dim, Graph
from tapestry.ir.index import dim, substitute
from tapestry.ir.kernel import Box, Kernel, cut, shape, size, whole
from tapestry.ir.monoid import MONOIDS, Moments, number
from tapestry.ir.recognise import Attention, attention, dims_read, exponential, linear_score, only_sums
from tapestry.ir.states import Scan, state_box, unguarded, varies
from tapestry.rewrites.core.edit import reindex

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
        outer, inner, 1, rows, k.shape[2], depth, *map(_strides, (q, k, v)), (ctypes.c_int64 * 4)(*bias), _strides(out),
        (ctypes.c_int64 * 3)(), 0, scale,
    )  # fmt: skip
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
            total = closures.combine(op.monoid, total, r(ins), dtypes)
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
            return closures.reduce(self.op.monoid, full, self.keep)
        m, s, value = values
        m = m.expand(self.score)
        dims = tuple(range(self.keep, m.dim()))
        assert self.weights is not None
        top, weights = closures.weigh(self.weights, m, dims)
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
    return lambda ins: closures.reduce(monoid, [v.expand(frame.extents) for v in body.values(ins, [])], len(op.dims))


# Layer normalisation by torch's own operator: moments of a row, and the row scaled by them, in one operation.


def layer_norm(op: Block, kernel: Kernel) -> Run | Refusal:
    """``(x - mean) / sqrt(M2 / n + eps) * scale + shift`` over the last dimension, on blocks of whole rows."""
    moments = op.monoid is not None and isinstance(MONOIDS[op.monoid].structure, Moments)
    if not moments or len(op.reduce) != 1 or len(op.then) != 1 or op.inner or not op.dims:
        return Refusal("no mean and variance of a row are taken")
    n, x, m2 = op.body
    if not isinstance(x, Arg) or x.dtype != "f32" or (n, m2) != (Const(1.0, "f32"), Const(0.0, "f32")):
        return Refusal("the moments are not of a row of f32 as it is")
    found = _normalised_row(op.then[0])
    last, row = op.dims[-1], op.reduce[0]
    if found is None or last.size != row.size or kernel.block[-2:] != ((0, row.size), (0, row.size)) or not row.size:
        return Refusal("what follows is not (x - mean) / sqrt(variance + eps) * scale + shift on whole rows")
    value, scale, shift, eps = found
    r, v = op.reads[x.pos], op.reads[value]
    names = [d.name for d in op.dims]
    moved = tuple(substitute(e, {row.name: dim(last.name)}) for e in r.index)
    if replace(r, index=moved) != v or r.when or r.other is not None or [str(e) for e in v.index] != names:
        return Refusal("moments and result are not of the same rows, read as they lie")
    for k in (scale, shift):
        q = op.reads[k]
        if [str(e) for e in q.index] != [last.name] or q.when or q.other is not None or kernel.ins[k] != whole((row.size,)):
            return Refusal("scale or shift is no vector along the row")
    box = kernel.ins[value]
    if box is None or box != kernel.ins[x.pos]:
        return Refusal("moments and result are of other parts of the rows")
    take = tuple(slice(lo - b[0], hi - b[0]) for (lo, hi), b in zip(kernel.block, box, strict=False))
    wanted, width = shape(kernel.block[: len(op.dims)]), [row.size]

    def run(ins: Sequence[Tensor | None], _: Sequence[Tensor]) -> list[Tensor]:
        rows = held(ins[value])[take].contiguous()
        return [_normalised(rows, width, held(ins[scale]), held(ins[shift]), eps).reshape(wanted)]

    return run


def _normalised(rows: Tensor, width: Sequence[int], scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """torch's operator, and in double precision where it makes a NaN, as it does of numbers whose squares overflow."""
    out = torch.layer_norm(rows, width, scale, shift, eps)
    if out.sum().isnan():
        out = torch.layer_norm(rows.double(), width, scale.double(), shift.double(), eps).to(rows.dtype)
    return out


def _normalised_row(e: Expr) -> tuple[int, int, int, float] | None:
    """(the row's read, the scale's, the shift's, epsilon) of a normalised row."""
    outer = _split(e, "add", lambda x: isinstance(x, Arg))
    scaled = _split(outer[1], "mul", lambda x: isinstance(x, Arg)) if outer else None
    core = _split(scaled[1], "mul", lambda x: isinstance(x, Call) and x.fn == "sub") if scaled else None
    if outer is None or scaled is None or core is None:
        return None
    shift, scale, (centred, inverse) = outer[0], scaled[0], core
    eps = _epsilon(inverse)
    assert isinstance(centred, Call) and isinstance(shift, Arg) and isinstance(scale, Arg)
    value, mean = centred.args
    if not isinstance(value, Arg) or mean != Acc(1, "f32") or eps is None:
        return None
    return value.pos, scale.pos, shift.pos, eps


def by_rows(op: Block) -> bool:
    """Whether rows of one tensor are summed, and then every cell of a row follows from that, as in norms."""
    sums = only_sums(op.monoid) or (op.monoid is not None and isinstance(MONOIDS[op.monoid].structure, Moments))
    if not sums or op.inner or len({op.reads[k].tensor for k in arg_positions(op.body)}) != 1:
        return False
    shared = [d for k, d in enumerate(op.dims) if d.size > 1 and not any(field[k] for field in varies(op))]
    return bool(shared)


def _split(e: Expr, fn: str, first: Callable[[Expr], bool]) -> tuple[Expr, Expr] | None:
    """The two operands of a commutative call, that of a kind first."""
    if not isinstance(e, Call) or e.fn != fn:
        return None
    return next(((a, b) for a, b in (e.args, e.args[::-1]) if first(a)), None)


def _epsilon(e: Expr) -> float | None:
    """eps in ``1 / sqrt(M2 / n + eps)``."""
    if not (isinstance(e, Call) and e.fn == "div" and e.args[0] == Const(1.0, "f32")):
        return None
    root = e.args[1]
    inner = (
        _split(root.args[0], "add", lambda x: isinstance(x, Const)) if isinstance(root, Call) and root.fn == "sqrt" else None
    )
    if inner is None or inner[1] != Call("div", (Acc(2, "f32"), Acc(0, "f32")), "f32"):
        return None
    return float(inner[0].value) if isinstance(inner[0], Const) else None


# Running states (`ir.recognise`) in linear time: one prefix along the scanned axis, read at every place.


_DENSE: dict[str, Callable[..., Tensor]] = {"sum": torch.cumsum, "prod": torch.cumprod}


@dataclass(frozen=True, slots=True)
class Runs:
    """What is merged, as an operation over segments in place of the scanned dimension, and where every state is taken.

    Attributes:
        op: its body over ``frame``: the other map dimensions, the segments that the block meets, and the reduced one.
        segment: for each place of the block along the scanned dimension, its segment (from the first one met).
        taken: how many elements of the segment's block, in order of merging, the state at that place has merged.
    """

    op: Block
    frame: Frame
    segment: Tensor
    taken: Tensor


def runs(op: Block, scan: Scan, block: Box) -> Runs:
    """The prefixes that a block needs."""
    at = {d.name: b for d, b in zip(op.space, block, strict=True)}
    (i0, i1), (j0, j1), q = at[scan.dim], at[scan.over], scan.segment
    first, last = i0 // q, (max(i1, i0 + 1) - 1) // q
    axis = next(k for k, d in enumerate(op.dims) if d.name == scan.dim)
    segments = Dim(scan.dim, -(-op.dims[axis].size // q))
    dims = (*op.dims[:axis], segments, *op.dims[axis + 1 :])
    body = reindex(unguarded(op, scan), {scan.dim: dim(scan.dim) * q}, dims + op.reduce)
    box = (*block[:axis], (first, last + 1), *block[axis + 1 :])
    places = np.arange(i0, i1)
    inner = places % q
    taken = inner - scan.shift + 1 - j0 if scan.sign > 0 else j1 - (inner + scan.shift)
    return Runs(
        Block(outs=op.outs, dims=dims, reduce=op.reduce, monoid=op.monoid, reads=body.reads, body=body.body),
        Frame(dims + op.reduce, box),
        tensor_of(places // q - first),
        tensor_of(np.clip(taken, 0, j1 - j0)),
    )  # fmt: skip


def scan_states(op: Block, scan: Scan, found: Runs, fields: list[Tensor]) -> list[Tensor]:
    """The state at every point of the block, from the values merged over ``found.frame``."""
    assert op.monoid
    axis = next(k for k, d in enumerate(op.dims) if d.name == scan.dim)
    flat = [f.movedim(axis, -2) for f in fields]  # [other map dimensions, segment, reduced]
    if scan.sign < 0:
        flat = [f.flip(-1) for f in flat]
    running = prefixes(op.monoid, flat, reverse=scan.sign < 0)
    zero = MONOIDS[op.monoid].zero(tuple(e.dtype for e in op.body))
    out: list[Tensor] = []
    for f, z in zip(running, zero, strict=True):
        start = torch.full((*f.shape[:-1], 1), z.value, dtype=f.dtype)
        padded = torch.cat([start, f], dim=-1)
        out.append(padded[..., found.segment, found.taken].movedim(-1, axis))
    return out


def prefixes(monoid: str, fields: list[Tensor], *, reverse: bool = False) -> list[Tensor]:
    """The states after 1, 2, … elements of the last axis.

    Any associative monoid: neighbours merge, the pairs are scanned, and the places between take one more merge, which is
    linear work (Ladner and Fischer 1980). With ``reverse`` the elements come last first, each standing left of those before it.
    """
    n = fields[0].shape[-1]
    dense = None if fields[0].dtype in scalars.UNSIGNED else _DENSE.get(monoid)
    if dense:
        return [dense(fields[0], dim=-1, dtype=fields[0].dtype)]
    if n <= 1:
        return fields
    dtypes = tuple(scalars.NAMES[f.dtype] for f in fields)

    def merge(before: list[Tensor], after: list[Tensor]) -> list[Tensor]:
        return closures.combine(monoid, *((after, before) if reverse else (before, after)), dtypes)

    even = n - n % 2
    pairs = merge([f[..., 0:even:2] for f in fields], [f[..., 1:even:2] for f in fields])
    odd = prefixes(monoid, pairs, reverse=reverse)
    between = merge([p[..., : (n - 1) // 2] for p in odd], [f[..., 2::2] for f in fields]) if n > 2 else []
    out = [torch.empty_like(f, memory_format=torch.contiguous_format) for f in fields]
    for k, o in enumerate(out):
        o[..., 0] = fields[k][..., 0]
        o[..., 1::2] = odd[k]
        if between:
            o[..., 2::2] = between[k]
    return out


# Kernels on views of the buffers that an operation has (`image_view`).


def viewed(run: CpuKernel, of: Seen, packed: Collection[int] = ()) -> CpuKernel:
    """The kernel of an operation from that of its view; weights that are ``packed`` are read as they are."""
    if run.packs:
        packs = {k: _pack(p, of.views[k]) for k, p in run.packs.items()}
        return replace(run, plain=_plain_of(run.plain, of), packs=packs, on_packed=viewed(run.packed, of, packs.keys()))
    if run.bind is None or run.parts or not _lies(run, of):
        return CpuKernel(
            plain=lambda ins, states: [of.back(x) for x in run(of.of(ins, packed), states)], way=run.way, tried=run.tried
        )
    bind = run.bind

    def bound(ins: Ins, memory: Sequence[Tensor]) -> CCall | Calls:
        seen = of.of(ins, packed)
        return hold(bind(seen, memory), not moved(ins, seen))

    arrays = tuple(functools.partial(_back, of, array) for array in run.arrays)
    plain = run.plain and _plain_of(run.plain, of, packed)
    return replace(run, plain=plain, bind=bound, arrays=arrays)


def _plain_of(run: Run | None, of: Seen, packed: Collection[int] = ()) -> Run:
    """What computes the operation by what computes its view."""
    assert run
    if isinstance(run, CpuKernel):
        return viewed(run, of, packed)
    return lambda ins, states: [of.back(x) for x in run(of.of(ins, packed), states)]


def _lies(run: CpuKernel, of: Seen) -> bool:
    """Whether what the kernel writes is the operation's result as it lies, and is not copied into its order."""
    try:
        for array, (size, dtype) in zip(run.arrays, run.memory, strict=True):
            array(torch.empty(size, dtype=dtype, device="meta")).permute(of.order).view(of.shape)
    except RuntimeError:  # torch has no view of it
        return False
    return True


def _pack(p: Pack, view: View | None) -> Pack:
    if view is None:
        return p
    make: Callable[[Tensor], Tensor] = lambda buffer: p.run(view(buffer))  # noqa: E731
    return Pack((*p.key, view), make, p.finite)


def _back(of: Seen, array: Callable[[Tensor], Tensor], memory: Tensor) -> Tensor:
    return of.back(array(memory))
