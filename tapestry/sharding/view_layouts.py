"""Where the cells of a view are, from where those of the tensor behind it are; and the other way round.

A view (a reshape, a transpose, a slice) has no place of its own in a plan. A spec of one is a layout of what it is a view of,
and the layout of that is a spec of the view: with several ``simple_sharding`` entries for an axis fused from several.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from math import prod

import numpy as np

from tapestry.interop.placement import Intervals, Placement, held, placement, spec_for
from tapestry.interop.sharding_specs import ShardedDim, ShardingSpec, SimpleShard
from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block, Dim, Graph, Read
from tapestry.ir.index import Aff, dim, dims_of, evaluate, floordiv, modulo
from tapestry.ir.plan import Layout, Mesh
from tapestry.rewrites.core.edit import is_view
from tapestry.rewrites.core.rule import Move

MAX_CELLS = 1 << 22  # of the axes that one index expression ties together


def view_at(graph: Graph, tensor: str) -> Block | None:
    """The view that writes a tensor, if one does and nothing is filled in by it."""
    at = graph.producers().get(tensor, -1)
    op = graph.ops[at] if at >= 0 else None
    if op is None or not is_view(op) or op.reads[0].when or op.reads[0].other is not None:
        return None
    return op


def fused_view(move: Move, lifted: Graph, plan: Graph) -> Block | None:
    """The view of what an ``unfuse`` move computes that its result became; ``None`` where the plan has no such tensor."""
    t, source = lifted.tensors.get(move.at), plan.tensors.get(f"{move.at}.{move.text('dim')}")
    if t is None or source is None or len(source.shape) != len(t.shape) + 1:
        return None
    k = next((k for k in range(len(t.shape)) if source.shape[k] * source.shape[k + 1] == t.shape[k] != source.shape[k]), 0)
    dims = tuple(Dim(f"x{j}", n) for j, n in enumerate(t.shape))
    index = [dim(d.name) for d in dims]
    place = (*index[:k], floordiv(index[k], source.shape[k + 1]), modulo(index[k], source.shape[k + 1]), *index[k + 1 :])
    return Block(outs=(move.at,), dims=dims, reads=(Read(tensor=source.name, index=place),), body=(Arg(0, t.dtype),))


def seen_through(view: Block, behind: Placement) -> Placement | None:
    """The placement of a view's result; ``None`` where a device has no product of intervals of it, or it is too large."""
    pieces: dict[int, tuple[Intervals, ...]] = {}
    known: dict[tuple[Intervals, ...], tuple[Intervals, ...] | None] = {}
    for device, piece in behind.pieces.items():
        if piece not in known:
            known[piece] = _through(view, piece)
        found = known[piece]
        if found is None:
            return None
        if all(found):
            pieces[device] = found
    return Placement(tuple(d.size for d in view.dims), pieces)


def _through(view: Block, piece: tuple[Intervals, ...]) -> tuple[Intervals, ...] | None:
    """The cells of a view that read some cells: intervals per axis; an axis without any means that there are none."""
    index, out = view.reads[0].index, dict[str, Intervals]()
    for names in _tied(index, [d.name for d in view.dims]):
        sizes = [d.size for d in view.dims if d.name in names]
        if prod(sizes) > MAX_CELLS:
            return None
        grid = dict(zip([d.name for d in view.dims if d.name in names], np.indices(sizes, sparse=True), strict=True))
        mask = np.ones(sizes, bool)
        for e, cells in zip(index, piece, strict=True):
            if dims_of(e) & names:
                at = np.asarray(evaluate(e, grid))
                mask &= np.logical_or.reduce([(at >= lo) & (at < hi) for lo, hi in cells])
        rows = [np.any(np.asarray(mask), axis=tuple(j for j in range(len(sizes)) if j != k)) for k in range(len(sizes))]
        whole = (row.reshape([-1 if j == k else 1 for j in range(len(sizes))]) for k, row in enumerate(rows))
        if not np.array_equal(mask, reduce(np.logical_and, whole)):
            return None
        for name, row in zip([d.name for d in view.dims if d.name in names], rows, strict=True):
            out[name] = _runs(row)
    fixed = [(e, cells) for e, cells in zip(index, piece, strict=True) if not dims_of(e)]
    here = all(any(lo <= e.const < hi for lo, hi in cells) for e, cells in fixed)
    return tuple(out[d.name] if here else () for d in view.dims)


def _tied(index: Sequence[Aff], names: Sequence[str]) -> Iterator[frozenset[str]]:
    """Dimensions in groups that no index expression ties together."""
    groups = [frozenset({n}) for n in names]
    for e in index:
        tied = [g for g in groups if g & dims_of(e)]
        groups = [g for g in groups if g not in tied] + ([frozenset[str]().union(*tied)] if tied else [])
    yield from groups


def _runs(row: np.ndarray) -> Intervals:
    ends = np.flatnonzero(np.diff(np.concatenate(([False], row, [False])).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in zip(ends[::2], ends[1::2], strict=True))


def layout_behind(views: Sequence[Block], wanted: Placement, shape: tuple[int, ...], mesh: Mesh) -> Layout | None:
    """The layout of a tensor of some shape that puts the cells of a view of it where they are wanted.

    Args:
        views: the view, what that is a view of, and so on to the tensor.
    """
    for layout in itertools.product([None, *range(len(shape))], repeat=len(mesh)):
        found: Placement | None = laid(layout, shape, mesh)
        for view in reversed(views):
            found = None if found is None else seen_through(view, found)
        if found is not None and found.pieces == wanted.pieces:
            return layout
    return None


def laid(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> Placement:
    """A layout as a placement."""
    boxes = enumerate(held(layout, shape, mesh))
    return Placement(shape, {d: tuple((x,) for x in b) for d, b in boxes if all(lo < hi for lo, hi in b)})


def view_spec(tensor: str, view: Block, layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> ShardingSpec | None:
    """The spec of a view of a tensor of some shape in a layout; ``None`` where sharding specs cannot say it."""
    place = seen_through(view, laid(layout, shape, mesh))
    if place is None:
        return None
    dims: list[ShardedDim] = []
    cutters: list[tuple[int, ...]] = []
    for k, d in enumerate(view.dims):
        walked = [j for j, e in enumerate(view.reads[0].index) if [*dims_of(e)] == [d.name] and shape[j] > 1]
        if not any(j in layout for j in walked):
            continue
        env = {d.name: np.arange(d.size)}
        steps = {j: int(np.argmax(np.asarray(evaluate(view.reads[0].index[j], env)) == 1)) for j in walked}
        walked.sort(key=lambda j: steps[j], reverse=True)
        by = [tuple(a for a, t in enumerate(layout) if t == j) for j in walked]
        counts = [prod(mesh[a].size for a in axes) for axes in by]
        entries = tuple(SimpleShard(n, shape[j]) for n, j in zip(counts, walked, strict=True))
        if len(walked) == 1 or (all(n == 1 for n in counts[1:]) and shape[walked[0]] % counts[0] == 0):
            entries, by = (SimpleShard(counts[0], d.size),), by[:1]
        dims.append(ShardedDim(k, entries))
        cutters += by
    spec = replace(spec_for(tensor, cutters, mesh), dims=tuple(dims))
    return spec if prod(s.num_shards or 1 for d in dims for s in d.shards) == len(spec.devices) and _same(spec, place) else None


def _same(spec: ShardingSpec, place: Placement) -> bool:
    return placement(spec, place.shape).pieces == place.pieces
