"""A region of operations run part after part: what `split_time` and `micro_batch` share.

Every operation of the region has a `Cut`: one dimension, and for each part the interval of it that this part computes.
Intervals grow backwards from the operations that are cut evenly: a producer computes the hull of what its readers in the
region need, so that a window's overlap (halo) is computed again and nothing is exchanged. Clones of one part follow each
other in the graph's order, part after part, so that liveness frees what a part no longer needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tapestry.ir.expr import Arg, Index, choose, number
from tapestry.ir.graph import Block, Dim, Graph, Op, Opaque, Read, names_of, shape_of, with_ops
from tapestry.ir.index import bounds, dim
from tapestry.ir.kernel import cut, whole
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.edit import finish, fresh, plain_index, prune, reindex, resized

Interval = tuple[int, int]
MOST_AGAIN = 1.5  # an operation joins a region if its parts together compute at most this many times its points


@dataclass(frozen=True, slots=True)
class Cut:
    """The dimension of an operation that is run part by part, and the half-open interval of each part."""

    dim: str
    parts: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Clones:
    """A graph with a region run part by part; ``part[i]`` is the part that operation i belongs to (-1: to none)."""

    graph: Graph
    part: tuple[int, ...]


def even(name: str, size: int, parts: int, grain: int = 1) -> Cut:
    """A balanced cut of a dimension into parts of whole grains (``size`` is a multiple of ``grain``)."""
    ends = [cut(size // grain, parts, k) for k in range(parts)]
    return Cut(name, tuple((lo * grain, hi * grain) for lo, hi in ends))


def grow(graph: Graph, seeds: Mapping[int, Cut], first: int) -> dict[int, Cut]:
    """The region that ends in the seeds: producers from position ``first`` on of which each part needs a part.

    A producer that some part needs whole is left outside, before the region, with everything that it depends on.
    """
    cuts: dict[int, Cut] = {}
    needs: dict[str, list[list[Interval]]] = {}  # tensor -> per part and axis, the hull of what the region's readers need
    before: set[str] = set()  # tensors that operations before the region need
    readers = graph.consumers()
    for i in range(max(seeds, default=-1), max(first, 0) - 1, -1):
        op = graph.ops[i]
        wanted = [t for t in op.outs if t in needs]
        blocked = bool(before & set(op.outs)) or bool(op.splits)
        outside = any(t in graph.outputs or any(r not in cuts for r in readers.get(t, ())) for t in op.outs)
        found = None if blocked else _joined(op, graph, needs, seeds.get(i), outside)
        if found is not None:
            cuts[i] = found
            _need(op, graph, found, needs)
        elif blocked or wanted:
            before |= set(op.inputs)
    return cuts


def _joined(op: Op, graph: Graph, needs: Mapping[str, list[list[Interval]]], seed: Cut | None, outside: bool) -> Cut | None:
    """How an operation is cut: by its seed, grown to what its readers need; ``None`` when it stays outside."""
    wanted = [t for t in op.outs if t in needs]
    if not wanted or (seed is not None and seed.dim not in _output_dims(op, 0)):
        return None if wanted else seed
    for name in [seed.dim] if seed else list(_output_dims(op, 0)):
        asked = [needs[t] for n, t in enumerate(op.outs) if t in needs and name in _output_dims(op, n)]
        if len(asked) < len(wanted):
            continue
        spots = [[p[_output_dims(op, n)[name]] for p in needs[t]] for n, t in enumerate(op.outs) if t in needs]
        parts = [_hull(column) for column in zip(*spots, *([seed.parts] if seed else []), strict=True)]
        size = op.ranges[name]
        parts = [(lo, hi) if lo < hi else (min(lo, size - 1), min(lo, size - 1) + 1) for lo, hi in parts]
        if outside:
            parts = _covering(parts, size)
        if size and sum(hi - lo for lo, hi in parts) <= MOST_AGAIN * size and _ordered(parts):
            return Cut(name, tuple(parts))
    return None


def _output_dims(op: Op, output: int) -> dict[str, int]:
    """Dimensions of an operation that are axes of an output."""
    if isinstance(op, Block):
        return {d.name: a for a, d in enumerate(op.dims)}
    return {d.name: a for d, a in zip(op.dims, op.out_axes[output], strict=True) if a is not None}


def _hull(found: tuple[Interval, ...]) -> Interval:
    real = [f for f in found if f[0] < f[1]] or list(found[:1])
    return min(lo for lo, _ in real), max(hi for _, hi in real)


def _ordered(parts: list[Interval]) -> bool:
    return all(a[0] <= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(parts))


def _covering(parts: list[Interval], size: int) -> list[Interval]:
    """The intervals extended so that no point between them is left out."""
    after = [lo for lo, _ in parts[1:]]
    joined = [(lo, max(hi, nxt)) for (lo, hi), nxt in zip(parts, [*after, size], strict=True)]
    return [(0, joined[0][1]), *joined[1:]]


def _need(op: Op, graph: Graph, at: Cut, needs: dict[str, list[list[Interval]]]) -> None:
    """Add what each part of an operation reads."""
    for tensor, boxes in reads_of(op, graph, at):
        old = needs.get(tensor)
        needs[tensor] = (
            boxes
            if old is None
            else [[_hull(pair) for pair in zip(a, b, strict=True)] for a, b in zip(old, boxes, strict=True)]
        )


def reads_of(op: Op, graph: Graph, at: Cut) -> list[tuple[str, list[list[Interval]]]]:
    """For every read: the tensor, and per part the interval hull of what it needs on each axis."""
    out: list[tuple[str, list[list[Interval]]]] = []
    if isinstance(op, Opaque):
        n = [d.name for d in op.dims].index(at.dim)
        for t, axes in zip(op.ins, op.in_axes, strict=True):
            if t:
                full = whole(graph.tensors[t].shape)
                out.append((t, [[p if a == axes[n] else f for a, f in enumerate(full)] for p in at.parts]))
        return out
    for r in op.reads:
        shape, boxes = graph.tensors[r.tensor].shape, list[list[Interval]]()
        for lo, hi in at.parts:
            box = {d.name: (0, d.size - 1) for d in op.space} | {at.dim: (lo, hi - 1)}
            ends = [bounds(e, box) for e in r.index]
            boxes.append([(min(max(int(a), 0), n), min(max(int(b) + 1, 0), n)) for (a, b), n in zip(ends, shape, strict=True)])
        out.append((r.tensor, boxes))
    return out


def clone(graph: Graph, cuts: Mapping[int, Cut]) -> Clones:
    """The graph with every operation of the region once per part, and whole tensors again for readers outside."""
    state = _Cloning(graph, cuts)
    count = len(next(iter(cuts.values())).parts)
    behind, last = _behind(graph, cuts), max(cuts)
    for i, op in enumerate(graph.ops[:last]):
        if i not in cuts and i not in behind:
            state.add(op, -1)
    for k in range(count):
        for i in sorted(cuts):
            state.clone(i, k)
    state.join()
    for op, k in state.ends:  # what they read besides states may be of the region, and whole only now
        state.add(op, k)
    for i, op in enumerate(graph.ops):
        if i in behind or i > last:
            state.add(op, -1)
    done = with_ops(graph, tuple(state.ops), tuple(state.new.values()))
    return Clones(done, tuple(state.part))


def _behind(graph: Graph, cuts: Mapping[int, Cut]) -> set[int]:
    """Operations that depend on the region."""
    made = {t for i in cuts for t in graph.ops[i].outs}
    out: set[int] = set()
    for i, op in enumerate(graph.ops):
        if i not in cuts and made & set(op.inputs):
            out.add(i)
            made |= set(op.outs)
    return out


@dataclass(slots=True)
class _Cloning:
    """Operations so far, the part of each, and the tensors that are new."""

    graph: Graph
    cuts: Mapping[int, Cut]
    ops: list[Op] = field(default_factory=list[Op])
    ends: list[tuple[Block, int]] = field(default_factory=list[tuple[Block, int]])
    part: list[int] = field(default_factory=list[int])
    new: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    names: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    makers: dict[str, int] = field(default_factory=dict[str, int])
    states: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])

    def __post_init__(self) -> None:
        self.makers = {t: i for i in self.cuts for t in self.graph.ops[i].outs}

    def add(self, op: Op, part: int) -> None:
        """Append an operation."""
        self.ops.append(op)
        self.part.append(part)

    def tensor(self, base: str, dtype: str, shape: tuple[int, ...]) -> str:
        """Declare a tensor under a free name."""
        name = fresh(self.graph, base)
        while name in self.new:
            name += "_"
        self.new[name] = Tensor(name=name, dtype=dtype, shape=shape)
        return name

    def clone(self, i: int, k: int) -> None:
        """Part k of operation i."""
        op, at = self.graph.ops[i], self.cuts[i]
        if isinstance(op, Opaque):
            self.opaque(op, at, k)
            return
        lo, hi = at.parts[k]
        dims, reduce = resized(op.dims, at.dim, hi - lo), resized(op.reduce, at.dim, hi - lo)
        moved = reindex(op, {at.dim: dim(at.dim) + lo}, dims + reduce)
        moved = replace(moved, dims=dims, reduce=reduce, reads=tuple(self.read(r, k) for r in moved.reads))
        if at.dim in names_of(op.reduce):
            self.partial(i, moved, k)
            return
        shape = shape_of(dims)
        outs = tuple(self.tensor(f"{t}@{k}", self.graph.tensors[t].dtype, shape) for t in op.outs)
        self.names |= {(t, k): n for t, n in zip(op.outs, outs, strict=True)}
        self.add(replace(moved, outs=outs), k)

    def read(self, r: Read, k: int) -> Read:
        """A read of part k: of a clone where the region makes the tensor, at the clone's own coordinates."""
        maker = self.makers.get(r.tensor)
        if maker is None:
            return r
        axis, origin = self.origin(r.tensor, k)
        index = tuple(e - origin if a == axis else e for a, e in enumerate(r.index))
        return replace(r, tensor=self.names[r.tensor, k], index=index)

    def origin(self, tensor: str, k: int) -> tuple[int, int]:
        """The axis of a tensor of the region that is cut, and where part k begins."""
        op, at = self.graph.ops[self.makers[tensor]], self.cuts[self.makers[tensor]]
        return _output_dims(op, op.outs.index(tensor))[at.dim], at.parts[k][0]

    def opaque(self, op: Opaque, at: Cut, k: int) -> None:
        """Part k of an opaque operation; what it reads is cut to the part first, since it reads whole tensors."""
        n = [d.name for d in op.dims].index(at.dim)
        lo, hi = at.parts[k]
        ins = tuple(
            self.sliced(t, axes[n], (lo, hi), k, op.source) if t else "" for t, axes in zip(op.ins, op.in_axes, strict=True)
        )
        outs: list[str] = []
        for t, axes in zip(op.outs, op.out_axes, strict=True):
            shape = tuple(hi - lo if a == axes[n] else s for a, s in enumerate(self.graph.tensors[t].shape))
            outs.append(self.tensor(f"{t}@{k}", self.graph.tensors[t].dtype, shape))
            self.names[t, k] = outs[-1]
        self.add(replace(op, ins=ins, outs=tuple(outs), dims=resized(op.dims, at.dim, hi - lo)), k)

    def sliced(self, tensor: str, axis: int | None, want: Interval, k: int, source: tuple[str, ...]) -> str:
        """A tensor that is one interval of an axis of another."""
        held: Interval = (0, -1)
        name, start = tensor, 0
        if tensor in self.makers:
            cut_axis, start = self.origin(tensor, k)
            name = self.names[tensor, k]
            held = self.cuts[self.makers[tensor]].parts[k]
            assert cut_axis == axis, "an opaque operation reads a cut axis whole"
        elif axis is None:
            return tensor
        if held == want or (held[1] < 0 and want == (0, self.graph.tensors[tensor].shape[axis or 0])):
            return name
        t = self.graph.tensors[tensor]
        dims = tuple(Dim(f"x{a}", want[1] - want[0] if a == axis else s) for a, s in enumerate(t.shape))
        index = tuple(dim(d.name) + (want[0] - start if a == axis else 0) for a, d in enumerate(dims))
        out = self.tensor(f"{tensor}@{k}.part", t.dtype, shape_of(dims))
        reads = (Read(tensor=name, index=index),)
        self.add(Block(outs=(out,), dims=dims, reads=reads, body=(Arg(0, t.dtype),), source=source), k)
        return out

    def partial(self, i: int, moved: Block, k: int) -> None:
        """States of part k of a reduction, merged into those of the parts before it; the last also does ``then``."""
        op, last = self.graph.ops[i], k + 1 == len(self.cuts[i].parts)
        assert isinstance(op, Block) and op.monoid is not None
        shape, fields = shape_of(op.dims), MONOIDS[op.monoid].fields
        dtypes = op.dtypes
        outs = tuple(self.tensor(f"{op.outs[0]}@{k}.{f}", d, shape) for f, d in zip(fields, dtypes, strict=True))
        self.add(prune(replace(moved, outs=outs, then=())), k)
        if k == 0:
            self.states[i] = outs
            return
        held = (*self.states[i], *outs)
        reads = tuple(Read(tensor=t, index=plain_index(op.dims)) for t in held)
        merged = MONOIDS[op.monoid].combiner(dtypes)
        if last:
            self.ends.append((finish(op, held, merged), k))
            return
        sums = tuple(self.tensor(f"{op.outs[0]}@0_{k}.{f}", d, shape) for f, d in zip(fields, dtypes, strict=True))
        self.add(Block(outs=sums, dims=op.dims, reads=reads, body=merged, source=op.source), k)
        self.states[i] = sums

    def join(self) -> None:
        """Whole tensors from their parts, for readers outside the region and the graph's outputs."""
        readers, late = self.graph.consumers(), {t for op, _ in self.ends for t in op.inputs}
        for i in sorted(self.cuts):
            op = self.graph.ops[i]
            for t in op.outs if (op.outs[0], 0) in self.names else ():
                if t in self.graph.outputs or t in late or any(r not in self.cuts for r in readers.get(t, ())):
                    self.add(self.joined(t, op.source), -1)

    def joined(self, tensor: str, source: tuple[str, ...]) -> Block:
        """One tensor from its parts: a guarded read of each, and a choice by position; a cell of two parts from the first."""
        t, parts = self.graph.tensors[tensor], self.cuts[self.makers[tensor]].parts
        dims = tuple(Dim(f"x{a}", s) for a, s in enumerate(t.shape))
        reads: list[Read] = []
        for k in range(len(parts)):
            axis, origin = self.origin(tensor, k)
            index = tuple(dim(d.name) - (origin if a == axis else 0) for a, d in enumerate(dims))
            reads.append(Read(tensor=self.names[tensor, k], index=index, other=number(0, t.dtype).value))
        axis, _ = self.origin(tensor, 0)
        place = Index(dim(f"x{axis}"))
        values = [Arg(k, t.dtype) for k in range(len(parts))]
        body = choose(place, [0, *(hi for _, hi in parts[:-1])], values)
        return Block(outs=(tensor,), dims=dims, reads=tuple(reads), body=(body,), source=source)
