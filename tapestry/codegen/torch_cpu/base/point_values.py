"""Values at the points of a block: expressions over a frame, and the matrix product that a sum of products is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch

from tapestry.codegen.torch_cpu.base import closures, contract, scalars
from tapestry.codegen.torch_cpu.base.closures import compile_value
from tapestry.codegen.torch_cpu.base.strided_reads import SAME_BITS, Fetch, Frame, Remembered, Tensor, index_values, reader
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.ir.expr import Arg, Call, Const, Expr, Index, arg_positions, walk
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, shape, size
from tapestry.ir.recognise import dims_read, routed, selection, sides
from tapestry.ir.types import STORED, numpy_dtype

States = Callable[[Sequence[Tensor | None]], list[Tensor]]


Run = Callable[[Sequence[Tensor | None], Sequence[Tensor]], list[Tensor]]
"""From the buffers of the reads, and the merged states in ``finish`` mode, to new contiguous buffers."""


class Expressions:
    """Values of expressions over a frame, as new dense tensors of the frame's shape, in whatever order of axes."""

    def __init__(
        self, op: Block, graph: Graph, kernel: Kernel, exprs: tuple[Expr, ...], frame: Frame, *, owned: bool = False
    ) -> None:
        self.shape = frame.extents
        self.fetch = _fetchers(op, graph, kernel, exprs, frame)
        index = {x: index_values(x.aff, frame) for e in exprs for x in walk(e) if isinstance(x, Index)}
        self.owned = owned and len(exprs) == 1
        self.compiled = [compile_value(e, index, owned=self.owned) for e in exprs]
        self.fresh, self.size = all(c.fresh for c in self.compiled), torch.Size(frame.extents)

    def values(self, ins: Sequence[Tensor | None], states: list[Tensor]) -> list[Tensor]:
        """Values that broadcast to the frame."""
        args = {k: f(held(ins[k])) for k, f in self.fetch.items()}
        return [c.run(args, states) for c in self.compiled]

    def __call__(self, ins: Sequence[Tensor | None], states: list[Tensor], kept: Sequence[Tensor] = ()) -> list[Tensor]:
        """New tensors: a state may be one itself unless it is ``kept``."""
        values = self.values(ins, states)
        if self.fresh and not kept and all(v.shape == self.size for v in values):
            return values
        given = {t.data_ptr() for t in (*ins, *kept) if t is not None and not t.is_mkldnn}
        return [_own(v.expand(self.shape), given) for v in values]


def _own(v: Tensor, given: set[int]) -> Tensor:
    """A buffer of its own for every output: a view of an input must not outlive the input's."""
    if v.data_ptr() not in given and v.untyped_storage().nbytes() == v.nbytes and (v.is_contiguous() or _dense(v)):
        return v
    return v.clone(memory_format=torch.preserve_format if _dense(v) else torch.contiguous_format)


def _dense(v: Tensor) -> bool:
    """Whether no two places of a tensor are one cell, and no cell between them is left out."""
    step = 1
    for stride, n in sorted(zip(v.stride(), v.shape, strict=True)):
        if n == 1:
            continue
        if stride != step:
            return False
        step *= n
    return True


def held(buffer: Tensor | None) -> Tensor:
    """The buffer of a read that the kernel uses."""
    assert buffer is not None, "a read that the kernel uses has no buffer"
    return buffer


def _fetchers(op: Block, graph: Graph, kernel: Kernel, exprs: tuple[Expr, ...], frame: Frame) -> dict[int, Fetch]:
    out: dict[int, Fetch] = {}
    for k in sorted({x.pos for e in exprs for x in walk(e) if isinstance(x, Arg)}):
        box = kernel.ins[k]
        assert box is not None
        r = op.reads[k]
        tensor = graph.tensors[r.tensor]
        if r.other is not None and tensor.dtype in STORED and scalars.TORCH_DTYPES[tensor.dtype] == torch.uint8:  # held as bits
            r = replace(r, other=int(np.array(r.other, numpy_dtype(tensor.dtype)).view(np.uint8)))
        out[k] = Remembered(reader(r, frame, box, tensor.shape))
    return out


def product(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> Callable[[Sequence[Tensor | None]], list[Tensor]] | None:
    """States of a contraction over the block, on matrix units; ``None`` when the operation is none."""
    found = sides(op)
    dtype = op.body[0].dtype
    if found is None or any(d.size == 0 for d in op.space) or scalars.TORCH_DTYPES[dtype] in scalars.UNSIGNED:
        return None
    a, b, a_dims, b_dims = found
    both = Expressions(op, graph, kernel, (a, b), frame)
    run = contract.matmul(op, frame, a_dims, b_dims)

    def states(ins: Sequence[Tensor | None]) -> list[Tensor]:
        left, right = (scalars.cast(v, dtype) for v in both.values(ins, []))
        return [run(left, right)]

    return states


# Operations that are another expression on each side of a place (concatenation, rotary halves): a piece for each side.


def pieces(op: Block, graph: Graph, kernel: Kernel) -> Run | None:
    """The operation piece by piece; ``None`` where it is one piece."""
    found = cut_pieces(op.body, op, kernel.block)
    if len(found) == 1 or any(hi <= lo for lo, hi in kernel.block):
        return None
    runs: list[tuple[tuple[slice, ...], Expressions]] = []
    for box, body in found:
        place = tuple(slice(lo - o, hi - o) for (lo, hi), (o, _) in zip(box, kernel.block, strict=True))
        part = replace(kernel, block=box)
        runs.append((place, Expressions(op, graph, part, body, Frame(op.dims, box))))
    extents = shape(kernel.block)
    dtypes = [scalars.TORCH_DTYPES[e.dtype] for e in op.body]

    def run(ins: Sequence[Tensor | None], _: Sequence[Tensor]) -> list[Tensor]:
        outs = [torch.empty(extents, dtype=d, memory_format=_layout(ins, len(extents))) for d in dtypes]
        for place, values in runs:
            for out, v in zip(outs, values.values(ins, []), strict=True):
                out[place] = v
        return outs

    return run


def _layout(ins: Sequence[Tensor | None], rank: int) -> torch.memory_format:
    """Channels last, if an image is read that is so."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(rank)
    images = [x for x in ins if x is not None and x.dim() == rank and not x.is_contiguous()]
    return last if last and any(x.is_contiguous(memory_format=last) for x in images) else torch.contiguous_format


def cut_pieces(body: tuple[Expr, ...], op: Block, block: Box) -> list[tuple[Box, tuple[Expr, ...]]]:
    """Boxes that cover the block, and the expressions on each."""
    names = [d.name for d in op.dims]
    for x in (x for e in body for x in walk(e)):
        place = _place(x)
        if place is None or place[0] not in names:
            continue
        at, c = names.index(place[0]), place[1]
        lo, hi = block[at]
        assert isinstance(x, Call)
        sides = [((lo, min(c, hi)), x.args[1]), ((max(c, lo), hi), x.args[2])]
        out: list[tuple[Box, tuple[Expr, ...]]] = []
        for (a, b), branch in sides:
            if a < b:
                same = _where_test_is(body, x.args[0], branch is x.args[1])
                out += cut_pieces(same, op, (*block[:at], (a, b), *block[at + 1 :]))
        return out
    return [(block, body)]


def _place(e: Expr) -> tuple[str, int] | None:
    """(dimension, c) of a choice by ``index(dimension) < c``."""
    if not isinstance(e, Call) or e.fn != "where" or not isinstance(e.args[0], Call) or e.args[0].fn != "lt":
        return None
    i, c = e.args[0].args
    if not isinstance(i, Index) or not i.aff.is_dim or not isinstance(c, Const):
        return None
    return str(i.aff), int(c.value)


def _where_test_is(body: tuple[Expr, ...], test: Expr, holds: bool) -> tuple[Expr, ...]:
    """The expressions where a test is known."""

    def known(e: Expr) -> Expr:
        if not isinstance(e, Call):
            return e
        if e.fn == "where" and e.args[0] == test:
            return known(e.args[1 if holds else 2])
        return Call(e.fn, tuple(known(a) for a in e.args), e.dtype)

    return tuple(known(e) for e in body)


# One element picked out of a reduced dimension: rows of a table, gathered without the sum that says so; and rows times the
# matrix that each picks, computed group by group.


def product_by_groups(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> States | Refusal:
    """``sum_v where(i == v, sum_m x * w[v], 0)``: for each v one product, of the rows that want it; exact on any block of v."""
    found = routed(op)
    if found is None or found.shift or 0 in frame.extents:
        return Refusal("no matrix is picked for each row")
    names, extent = [d.name for d in op.space], dict(zip((d.name for d in op.space), frame.extents, strict=True))
    rows, columns = [d.name for d in found.of_rows], [d.name for d in found.of_columns]
    inner, over = [d.name for d in op.inner_dims], found.over.name
    n, (lo, hi) = len(op.dims), kernel.block[len(op.dims)]
    index = Expressions(op, graph, kernel, (found.wanted,), Frame(op.dims, kernel.block[:n]))
    factors = Expressions(op, graph, kernel, (found.rows, found.matrices), frame)
    back = [[*rows, *columns].index(d.name) for d in op.dims]

    def matrix(x: Tensor, *groups: list[str]) -> Tensor:
        """A value with an axis for each group of dimensions, in that order."""
        order = [d for group in groups for d in group]
        x = x.reshape([1] * (len(names) - x.dim()) + list(x.shape))
        x = x.expand([extent[d] if d in order else 1 for d in names])
        x = x.permute([names.index(d) for d in order] + [i for i, d in enumerate(names) if d not in order])
        return x.reshape([prod(extent[d] for d in group) for group in groups])

    def states(ins: Sequence[Tensor | None]) -> list[Tensor]:
        wanted = index.values(ins, [])[0] - lo
        place = matrix(wanted.reshape(*wanted.shape, *[1] * (len(names) - n)) if wanted.dim() == n else wanted, rows)
        x, w = factors.values(ins, [])
        x, w = matrix(x, rows, inner), matrix(w, [over], columns, inner)
        out = torch.zeros(len(place), w.shape[1], dtype=w.dtype)
        for v in sorted(set(place.flatten().numpy().tolist())):
            if 0 <= v < hi - lo:
                mine = place == v
                out[mine] = x[mine] @ w[v].T
        return [out.reshape([extent[d] for d in (*rows, *columns)]).permute(back)]

    return states


def gather(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> States | Refusal:
    """``sum_v where(i == v, x[v], 0)`` without the sum: a masked gather, exact on any block of v."""
    selected = selection(op)
    if selected is None or selected.shift or 0 in frame.extents:
        return Refusal("no row of a table is picked")
    where_index, picked = selected.wanted, selected.picked
    base = Frame(op.dims, kernel.block[: len(op.dims)])
    lo, hi = kernel.block[-1]
    index = Expressions(op, graph, kernel, (where_index,), base)
    rows = Expressions(op, graph, kernel, (picked,), frame)
    of_index, of_rows = dims_read(op, where_index), dims_read(op, picked)
    outer = [i for i, d in enumerate(op.dims) if d.name in of_index]
    inner = [i for i, d in enumerate(op.dims) if d.name not in of_index]
    back = [(*outer, *inner).index(i) for i in range(len(op.dims))]
    apart = not of_index & of_rows

    def states(ins: Sequence[Tensor | None]) -> list[Tensor]:
        at = index.values(ins, [])[0] - lo
        table = rows.values(ins, [])[0]
        dtype = table.dtype
        table = table.view(SAME_BITS.get(dtype, dtype))
        inside = (at >= 0) & (at < hi - lo)
        place = at.clamp(0, hi - lo - 1)
        if apart:  # whole rows of a table
            order = [len(op.dims), *inner, *outer]
            table = table.expand([*(n if i in inner else 1 for i, n in enumerate(base.extents)), hi - lo]).permute(order)
            table = table.flatten(len(inner) + 1) if outer else table
            table = table[..., 0] if outer else table
            place = place.expand([n if i in outer else 1 for i, n in enumerate(base.extents)])
            taken = table.index_select(0, place.reshape(-1))
            taken = taken.reshape([base.extents[i] for i in (*outer, *inner)]).permute(back)
        else:
            table = table.expand([*base.extents, hi - lo])
            taken = torch.gather(table, -1, place.expand(base.extents).unsqueeze(-1)).squeeze(-1)
        taken = taken if bool(inside.all()) else torch.where(inside, taken, torch.zeros((), dtype=taken.dtype))
        return [taken.view(dtype)]

    return states


# Reductions by torch operators, tile by tile: what is written out of an index space at once has a bound.


NO_CONTRACTION = Refusal("it is no sum of products of two factors that torch multiplies as matrices")
POINTS = 1 << 22  # at most in a tile: 16 MiB of f32 for each value of the body


def tiles(block: Box, most: int) -> list[Box]:
    """Boxes of at most so many points that cover a block, in the order of its points.

    A dimension is cut only where all before it are cut to single places, so that a tile's points are consecutive.
    """
    rest, cuts = 1, list[list[tuple[int, int]]]()
    for lo, hi in block:
        rest *= hi - lo
    for lo, hi in block:
        step = hi - lo if rest <= most else max(1, (hi - lo) * most // rest)
        rest = rest // max(hi - lo, 1) * step
        cuts.append([(a, min(a + step, hi)) for a in range(lo, hi, max(step, 1))] or [(lo, hi)])
    return list(itertools.product(*cuts))


def states(op: Block, graph: Graph, kernel: Kernel) -> States:
    """Monoid states of each output point: values at the points of a tile, merged by dense operators, and tiles in order."""
    monoid, keep = op.monoid, len(op.dims)
    assert monoid is not None

    def one(box: Box) -> States:
        frame = Frame(op.space, box)
        body = Expressions(op, graph, replace(kernel, block=box), op.body, frame)
        return lambda ins: closures.reduce(monoid, [v.expand(frame.extents) for v in body.values(ins, [])], keep)

    return _merged(op, kernel, tiles(kernel.block, POINTS), one)


def tiled_product(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> States | Refusal:
    """States of a contraction.

    In tiles where a factor is written out at many more points than its tensor has cells, such as a window's.
    """
    found = sides(op)
    if found is None or any(d.size == 0 for d in op.space):
        return NO_CONTRACTION
    steps = {d.name: hi - lo for d, (lo, hi) in zip(op.space, kernel.block, strict=True)}
    for factor, dims in zip(found[:2], found[2:], strict=True):
        cells = sum(size(box) for k in arg_positions((factor,)) if (box := kernel.ins[k]) is not None)
        points, most = prod(steps[d] for d in dims), max(POINTS, 2 * cells)
        for d in (d.name for d in op.space if d.name in dims and points > most):
            step = max(1, steps[d] * POINTS // points)
            steps[d], points = step, points // steps[d] * step
    cuts = [
        [(a, min(a + steps[d.name], hi)) for a in range(lo, hi, steps[d.name])]
        for d, (lo, hi) in zip(op.space, kernel.block, strict=True)
    ]

    boxes = list(itertools.product(*cuts))
    if len(boxes) == 1:
        return product(op, graph, kernel, frame) or NO_CONTRACTION
    parts = {b: product(op, graph, replace(kernel, block=b), Frame(op.space, b)) for b in boxes}
    runs = {b: run for b, run in parts.items() if run is not None}
    return _merged(op, kernel, boxes, lambda box: runs[box]) if len(runs) == len(boxes) else NO_CONTRACTION


def _merged(op: Block, kernel: Kernel, boxes: Sequence[Box], one: Callable[[Box], States]) -> States:
    """States of boxes that cover a block, those of equal output points one after another."""
    if len(boxes) == 1:
        return one(boxes[0])
    monoid, keep, dtypes = op.monoid or "", len(op.dims), tuple(e.dtype for e in op.body)
    cells = [(cell, [one(box) for box in of]) for cell, of in itertools.groupby(boxes, key=lambda box: box[:keep])]
    extents = [hi - lo for lo, hi in kernel.block[:keep]]

    def run(ins: Sequence[Tensor | None]) -> list[Tensor]:
        outs: list[Tensor] = []
        for cell, parts in cells:
            merged = parts[0](ins)
            for part in parts[1:]:
                merged = closures.combine(monoid, merged, part(ins), dtypes)
            outs = outs or [torch.empty(extents, dtype=x.dtype, device=x.device) for x in merged]
            place = tuple(slice(lo - o, hi - o) for (lo, hi), (o, _) in zip(cell, kernel.block, strict=False))
            for out, x in zip(outs, merged, strict=True):
                out[place] = x
        return outs

    return run
