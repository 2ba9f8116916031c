"""Convolutions in the order of axes that torch's have, on views of the buffers: one kernel for all that are the same cells.

An image may have its channels last, one axis or two; rows and columns may lie in one axis, of which padding is told by guards
on ``floor(p/k)`` and ``p mod k``. Such a dimension is two, the axis is two, and what is left is a convolution as any other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from tapestry.ir.graph import Block, Dim, Graph, Guard, Read
from tapestry.ir.index import Aff, bounds, const, dim, dims_of
from tapestry.ir.kernel import Kernel, whole
from tapestry.ir.recognition.contraction import factors
from tapestry.ir.recognition.convolution import convolution, plain_read
from tapestry.ir.types import Tensor as Typed
from tapestry.rewrites.core.edit import fresh_dim, reindex

Axis = tuple[Aff, int]
"""What is read along an axis, and how many cells that has."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in another shape of as many cells, then its axes in another order."""

    shape: tuple[int, ...]
    order: tuple[int, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor's view; a copy where it has none."""
        return x.reshape(self.shape).permute(self.order)


@dataclass(frozen=True, slots=True)
class Seen:
    """A kernel on views: those of each read's buffer, and the result back from the view's order."""

    graph: Graph
    kernel: Kernel
    views: tuple[View | None, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def op(self) -> Block:
        """The operation on the views."""
        (op,) = self.graph.ops
        assert isinstance(op, Block)
        return op

    def of(self, ins: Sequence[torch.Tensor | None], packed: Collection[int] = ()) -> list[torch.Tensor | None]:
        """The views of buffers, but for those that are ``packed``."""
        both = enumerate(zip(ins, self.views, strict=True))
        return [x if x is None or v is None or k in packed else v(x) for k, (x, v) in both]

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """The result in the order and shape of the operation."""
        return x.permute(self.order).reshape(self.shape)


def seen(op: Block, graph: Graph, kernel: Kernel) -> Seen | None:
    """A whole convolution in torch's order; ``None`` where it is none, or in that order as it is."""
    if kernel.mode != "full" or op.inner or op.monoid != "sum" or len(op.body) != 1 or op.body[0].dtype != "f32":
        return None
    both, sizes = factors(op), tuple(d.size for d in op.space)
    if both is None or 0 in sizes or kernel.block != whole(sizes) or (len(op.dims) > 3 and convolution(op)):
        return None
    reads = [plain_read(op, e, guarded=True) for e in both]
    shapes = [graph.tensors[r.tensor].shape for r in op.reads]
    if None in reads or any(box not in (None, whole(s)) for box, s in zip(kernel.ins, shapes, strict=True)):
        return None
    for x, w in (reads, reads[::-1]):
        assert x is not None and w is not None
        found = _Sight(op, graph, kernel, x, w).found() if _is_weight(op.reads[w]) and x not in op.then_reads() else None
        if found:
            return found
    return None


def _is_weight(r: Read) -> bool:
    plain = [str(e) for e in r.index if e.terms]
    return not r.when and r.other is None and all(e.is_dim or e == const(0) for e in r.index) and len({*plain}) == len(plain)


@dataclass(frozen=True, slots=True)
class _Roles:
    """What dimensions and axes are in a convolution.

    Attributes:
        axes: of the image, in torch's order.
        outs: the places of the output; ``windows``: the taps at each; an empty name where there is one, as of ``channel``.
    """

    axes: list[Axis]
    outs: list[Dim]
    channel: str
    windows: list[str]
    feature: Dim
    batch: Dim


@dataclass(slots=True)
class _Sight:
    """Looks for the convolution of an image ``x`` with a weight ``w``."""

    op: Block
    graph: Graph
    kernel: Kernel
    x: int
    w: int

    def found(self) -> Seen | None:
        """The operation in torch's order."""
        op, pairs = self._cut()
        cells = [self._axes(op, k) for k in range(len(op.reads))]
        image = cells[self.x]
        roles = None if image is None else self._roles(op, image)
        if roles is None or any(c is None for k, c in enumerate(cells) if k == self.w):
            return None
        dims = (roles.batch, roles.feature, *roles.outs)
        if {d.name for d in op.dims if d.size > 1} - {d.name for d in dims} or len({d.name for d in dims}) < len(dims):
            return None
        return self._result(op, pairs, cells, dims, roles)

    def _cut(self) -> tuple[Block, dict[str, tuple[str, str]]]:
        """The operation with dimensions of one point gone, and those in two that the image alone has by rows and columns."""
        op, env = self.op, dict[str, Aff]()
        cut, pairs, weight = list[Dim](), dict[str, tuple[str, str]](), {n for e in op.reads[self.w].index for n in dims_of(e)}
        r = op.reads[self.x]
        parts = {a for e in (*r.index, *(g.aff for g in r.when)) for a, _ in e.terms if not isinstance(a, str) and a.arg.is_dim}
        for d in op.dims:
            k = {a.div for a in parts if str(a.arg) == d.name}
            if d.size == 1:
                env[d.name] = const(0)
            elif d.name not in weight and len(k) == 1 and d.size % (n := next(iter(k))) == 0:
                taken = replace(op, dims=(*op.dims, *cut))
                row, column = fresh_dim(taken, f"{d.name}_row"), fresh_dim(taken, f"{d.name}_column")
                env[d.name], pairs[d.name] = dim(row) * n + dim(column), (row, column)
                cut += [Dim(row, d.size // n), Dim(column, n)]
            else:
                cut.append(d)
        env |= {d.name: const(0) for d in op.reduce if d.size == 1}
        reduced = tuple(d for d in op.reduce if d.size > 1)
        new = reindex(replace(op, splits=()), env, (*cut, *reduced))
        return replace(new, dims=tuple(cut), reduce=reduced), pairs

    def _axes(self, op: Block, k: int) -> list[Axis] | None:
        """What a read is of a buffer without axes of one cell, with axes in two where it can be told by rows and columns."""
        r, out = op.reads[k], list[Axis]()
        inside = {d.name: (0, d.size - 1) for d in op.space}
        guards = [g for g in r.when if not _holds(g, inside)]
        for e, n in zip(r.index, self.graph.tensors[r.tensor].shape, strict=True):
            if n == 1 and e == const(0):
                continue
            found = _in_two(e, n, guards, inside) if len(dims_of(e)) > 1 else None
            guards = guards if found is None else []
            out += [(e, n)] if found is None else found
        return None if guards and k in (self.x, self.w) else out

    def _roles(self, op: Block, image: list[Axis]) -> _Roles | None:
        """What the axes of the image are in a convolution."""
        reduced, weight = {d.name for d in op.reduce}, {n for e in op.reads[self.w].index for n in dims_of(e)}
        sizes = {d.name: d for d in op.dims}
        features = [d for d in op.dims if d.name in weight]
        if len(features) != 1 or not reduced <= weight:
            return None
        f = features[0].name
        channels = [a for a in image if f in dims_of(a[0]) or (a[0].is_dim and str(a[0]) in reduced)]
        windows = [a for a in image if a not in channels and dims_of(a[0]) & reduced]
        rest = [a for a in image if a not in channels and a not in windows]
        if len(channels) > 1 or len(rest) > 1 or not 1 <= len(windows) <= 2 or any(not e.is_dim for e, _ in rest):
            return None
        places, outs, names = [(const(0), 1)] * (2 - len(windows)) + windows, list[Dim](), list[str]()
        for e, _ in places:
            own = sorted(dims_of(e) - reduced)
            if not e.is_affine or len(own) > 1 or len(dims_of(e) & reduced) > 1:
                return None
            outs.append(sizes[own[0]] if own else Dim(fresh_dim(replace(op, dims=(*op.dims, *outs)), "line"), 1))
            names.append(next(iter(dims_of(e) & reduced), ""))
        inner = sorted(dims_of(channels[0][0]) & reduced) if channels else []
        batch = sizes[str(rest[0][0])] if rest else Dim(fresh_dim(replace(op, dims=(*op.dims, *outs)), "image"), 1)
        if sorted([*inner, *filter(None, names)]) != sorted(reduced):
            return None
        axes = [rest[0] if rest else (dim(batch.name), 1), channels[0] if channels else (const(0), 1), *places]
        return _Roles(axes, outs, "".join(inner), names, features[0], batch)

    def _result(
        self, op: Block, pairs: dict[str, tuple[str, str]], cells: list[list[Axis] | None], dims: tuple[Dim, ...], roles: _Roles
    ) -> Seen | None:
        names = [roles.channel, *roles.windows]
        wanted = {self.x: roles.axes, self.w: self._weight(cells[self.w] or [], [roles.feature.name, *names])}
        reads, views, tensors, ins = (
            list[Read](),
            list[View | None](),
            dict[str, Typed](),
            list[tuple[tuple[int, int], ...] | None](),
        )
        for k, (r, box) in enumerate(zip(op.reads, self.kernel.ins, strict=True)):
            given = cells[k]
            axes = wanted.get(k, given)
            if given is None or axes is None:
                return None
            name, t = f"view {k}", self.graph.tensors[r.tensor]
            new = tuple(n for _, n in axes)
            tensors[name] = replace(t, name=name, shape=new)
            guards = () if k == self.x else r.when
            reads.append(replace(r, tensor=name, index=tuple(e for e, _ in axes), when=guards))
            views.append(None if box is None else _view(given, axes))
            ins.append(None if box is None else whole(new))
        order, first = list[int](), {d.name: i for i, d in enumerate(dims)}
        for d in self.op.dims:
            order += [first[n] for n in pairs.get(d.name, (d.name,)) if n in first]
        order += [i for i in range(len(dims)) if i not in order]
        reduced = {d.name: d for d in op.reduce}
        inner = tuple(reduced[n] for n in names if n)
        shape = tuple(d.size for d in dims)
        new_op = replace(op, dims=dims, reduce=inner, reads=tuple(reads))
        if convolution(new_op) is None:
            return None
        tensors |= {t: replace(self.graph.tensors[t], shape=shape) for t in op.outs}
        alone = Graph(
            name=self.graph.name,
            tensors=tensors,
            ops=(new_op,),
            inputs=tuple(f"view {k}" for k in range(len(reads))),
            outputs=op.outs,
        )
        block = whole((*shape, *(d.size for d in inner)))
        kernel = Kernel(op=0, mode="full", block=block, ins=tuple(ins), outs=(whole(shape),) * len(op.outs))
        return Seen(alone, kernel, tuple(views), tuple(order), tuple(d.size for d in self.op.dims))

    @staticmethod
    def _weight(cells: list[Axis], names: list[str]) -> list[Axis] | None:
        """The weight's axes in torch's order, those that it lacks of one cell."""
        own = {str(e): (e, n) for e, n in cells}
        return [own.get(n, (const(0), 1)) for n in names] if own.keys() <= {*names} else None


def _view(given: list[Axis], wanted: list[Axis]) -> View:
    """The view that has axes in another order, and of those that are new one cell each."""
    new = [a for a in wanted if a not in given]
    have = [*given, *new]
    left, order = list(range(len(have))), list[int]()
    for a in wanted:
        order.append(next(i for i in left if have[i] == a))
        left.remove(order[-1])
    return View(tuple(n for _, n in have), tuple(order))


def _holds(g: Guard, inside: dict[str, tuple[int, int]]) -> bool:
    lo, hi = bounds(g.aff, inside)
    return bool(lo >= 0 if g.op == "ge" else lo == hi == 0)


def _in_two(e: Aff, n: int, guards: list[Guard], inside: dict[str, tuple[int, int]]) -> list[Axis] | None:
    """An axis as rows and columns, where to be inside both is what the guards say; ``None`` where it is not."""
    if any(g.op != "ge" for g in guards) or not e.is_affine:
        return None
    for width in sorted({abs(c) for _, c in e.terms if 1 < abs(c) < n}, reverse=True):
        columns = Aff(tuple(t for t in e.terms if t[1] % width))
        if n % width or not 1 <= len(columns.terms) <= 2 or not 1 <= len(e.terms) - len(columns.terms) <= 2:
            continue
        starts = {g.aff.const for g in guards if g.aff.terms == columns.terms} | {e.const % width}
        for start in (s for s in starts if (e.const - s) % width == 0):
            column, row = (
                columns + start,
                Aff(tuple((a, c // width) for a, c in e.terms if c % width == 0), (e.const - start) // width),
            )
            asked = {
                x for y, m in ((column, width), (row, n // width)) for x in (Guard(y, "ge"), Guard(y * -1 + (m - 1), "ge"))
            }
            if {*guards} <= asked and all(x in guards or _holds(x, inside) for x in asked):
                return [(row, n // width), (column, width)]
    return None
