"""`split`: cut a dimension into contiguous blocks and bind them to a resource. The one rule that planning is made of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tapestry.ir.expr import Acc, Arg, Const, Expr, Index, arg_positions, call, rewrite
from tapestry.ir.graph import Block, Dim, Graph, Guard, Op, Read, Split, replace_op
from tapestry.ir.index import Aff, bounds, const, dim, dims_of, floordiv, modulo
from tapestry.ir.kernel import cut
from tapestry.ir.monoid import MONOIDS, Driven, number
from tapestry.ir.states import Scan, as_scan, running, unguarded
from tapestry.rewrites.core.edit import (
    accept,
    block_at,
    constant,
    cut_refusal,
    fresh,
    fresh_dim,
    is_view,
    op_at,
    order_refusal,
    plain_index,
    prune,
    read_dims,
    reindex,
    resized,
    results,
    splits_in,
    with_args,
)
from tapestry.rewrites.core.rule import Move, Refusal, Rule, refuse, register
from tapestry.rewrites.tiled_region import Clones, Cut, clone, even, grow

_RESOURCE = re.compile(r"mesh\.\w+|time|grid|loop")


@register
class SplitRule(Rule):
    """Cut a dimension into ``parts`` contiguous blocks, bound to ``mesh.<axis>``, ``time``, ``grid`` or ``loop``.

    Block k of a dimension of size n is ``[k*n // parts, (k+1)*n // parts)``: sizes differ by at most one. A block of a
    map dimension computes its own cells of the outputs; a block of a reduced one computes a partial monoid state, and
    the states are merged. Each block must receive its footprint in every tensor it reads: where neighbouring footprints
    overlap (a convolution's window), the cells beyond the block's own share are its `halo`.

    before:
        graph example
        input x: f32[7, 5]
        y: f32[7] = op [n: 7 | m: 5 sum]
          reads x[n, m]
          body x
        output y

    move: split@y{dim=n,parts=3,to=mesh.d0}

    after:
        graph example
        input x: f32[7, 5]
        y: f32[7] = op [n: 7 | m: 5 sum]
          reads x[n, m]
          body x
          split n/3 mesh.d0
        output y

    legal when:
        the operation has the dimension (an opaque one only has those along which it commutes with splitting); no part
        is empty; a mesh axis cuts one dimension of an operation, once; a reduced dimension has a monoid, and where that
        does not commute it is the first reduced one.
    """

    name = "split"
    phase = "request"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """For every operation and dimension the cut in two over mesh axis d0; `splittable` lists dimensions for any other."""
        for op in graph.ops:
            for d in splittable(op):
                yield split_move(op, d.name, 2, "mesh.d0")
            yield from refusals(op)

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with the split added to the operation."""
        at, op = op_at(graph, move)
        new = Split(move.text("dim"), move.number("parts"), move.text("to"))
        accept(refusal(op, new), move)
        changed = replace(op, splits=(*op.splits, new))
        return replace(graph, ops=(*graph.ops[:at], changed, *graph.ops[at + 1 :]))


def split_move(op: Op, dim: str, parts: int, to: str) -> Move:
    """The move that splits an operation."""
    return Move("split", op.outs[0], (("dim", dim), ("parts", parts), ("to", to)))


def splittable(op: Op) -> tuple[Dim, ...]:
    """The dimensions of an operation that can be cut into at least two parts."""
    return tuple(d for d in op.space if refusal(op, Split(d.name, 2, "time")) is None)


def refusals(op: Op) -> tuple[Refusal, ...]:
    """Why the other dimensions of an operation cannot be cut; for an opaque one, why its other axes cannot."""
    found = [refusal(op, Split(d.name, 2, "time")) for d in op.space]
    if not isinstance(op, Block):
        found.append(Refusal("split", op.outs[0], f"no other axis commutes with splitting: {op.why or op.kind}"))
    return tuple(r for r in found if r)


def refusal(op: Op, new: Split) -> Refusal | None:
    """Why a split is not legal here; ``None`` when it is."""

    def no(reason: str, witness: str = "") -> Refusal:
        return Refusal("split", op.outs[0], reason, witness)

    size = op.ranges.get(new.dim)
    names = ", ".join(f"'{d.name}'" for d in op.space) or "none"
    if size is None and not isinstance(op, Block):
        return no(f"axis '{new.dim}' does not commute with splitting: {op.why or op.kind}", f"it may be cut along {names}")
    if size is None:
        return no(f"there is no dimension '{new.dim}'", f"the dimensions are {names}")
    if isinstance(op, Block) and any(d.name == new.dim for d in op.inner_dims):
        return no(f"'{new.dim}' is reduced whole inside every point", "an inner reduction is never cut")
    if not _RESOURCE.fullmatch(new.to):
        return no(f"'{new.to}' is not a resource", "mesh.d0, time, grid and loop are")
    for s in op.splits:
        if s.to == new.to and s.to.startswith("mesh."):
            return no(f"'{new.to}' already cuts '{s.dim}'", f"{s.dim}/{s.parts} {s.to}")
    return _size_refusal(op, new, size, no("")) or _monoid_refusal(op, new.dim, no(""))


def _size_refusal(op: Op, new: Split, size: int, at: Refusal) -> Refusal | None:
    if new.parts < 1:
        return replace(at, reason=f"a dimension cannot be cut into {new.parts} parts")
    parts = new.parts
    for s in op.splits:
        parts *= s.parts if s.dim == new.dim else 1
    if parts <= size:
        return None
    empty = next(k for k in range(parts) if k * size // parts == (k + 1) * size // parts)
    points = "1 point" if size == 1 else f"{size} points"
    return replace(
        at, reason=f"{points} of '{new.dim}' cannot be cut into {parts} non-empty parts", witness=f"part {empty} is empty"
    )


def _monoid_refusal(op: Op, dim: str, at: Refusal) -> Refusal | None:
    if not isinstance(op, Block) or all(d.name != dim for d in op.reduce):
        return None
    if op.monoid not in MONOIDS:
        return replace(at, reason=f"'{dim}' is reduced by no known monoid", witness=f"monoid {op.monoid}")
    no = order_refusal(op, dim)
    return no and replace(no, rule=at.rule, at=at.at)


def halo(op: Block, read: Read, dim: str, parts: int, graph: Graph) -> tuple[int, int]:
    """Cells that a block reads before and after its own share of the tensor, at most, when ``dim`` is cut.

    The own share of block k is block k of the axis that ``dim`` walks, cut into as many parts. A read that does not
    depend on ``dim`` has no halo: every block reads the same cells.
    """
    before = after = 0
    shape = graph.tensors[read.tensor].shape
    for axis, e in enumerate(read.index):
        if dim not in dims_of(e):
            continue
        for k in range(parts):
            box = {d.name: (0, d.size - 1) for d in op.space}
            lo, hi = cut(box[dim][1] + 1, parts, k)
            box[dim] = (lo, hi - 1)
            first, last = bounds(e, box)
            own = cut(shape[axis], parts, k)
            before = max(before, own[0] - max(0, int(first)))
            after = max(after, min(shape[axis], int(last) + 1) - own[1])
    return before, after


# `split_reduce`: a long reduction as partial states and a merge tree of any fan-in. Linear ⇒ matmul ⇒ sum.


@register
class SplitReduce(Rule):
    """Cut a reduced dimension into partial states, merged by a tree of fan-in b with ⌈log_b parts⌉ levels.

    The partial states become tensors, one per field of the monoid, with a new leading dimension that runs over the
    parts. All blocks have ⌈size / parts⌉ points: where that does not divide the dimension, the points beyond its end
    give the monoid's identity. Blocks and groups are contiguous, so the order of merging is kept.

    before:
        graph linear
        input x: f32[4, 7]
        input w: f32[7, 3]
        input b: f32[3]
        y: f32[4, 3] = op [i: 4, n: 3 | m: 7 sum]
          reads x[i, m], w[m, n], b[n]
          body x * w
          then acc0 + b
        output y

    move: split_reduce@y{dim=m,parts=3,fanin=2}

    after:
        graph linear
        input x: f32[4, 7]
        input w: f32[7, 3]
        input b: f32[3]
        y.p.value: f32[3, 4, 3] = op [k: 3, i: 4, n: 3 | m: 3 sum]
          reads x[i, 3*k + m] when -3*k - m + 6 >= 0 else 0.0, w[3*k + m, n] when -3*k - m + 6 >= 0 else 0.0
          body x * w
        y.p1.value: f32[2, 4, 3] = op [k: 2, i: 4, n: 3 | j: 2 sum]
          reads a0 = y.p.value[j + 2*k, i, n] else 0.0
          body a0
        y: f32[4, 3] = op [i: 4, n: 3 | k: 2 sum]
          reads a0 = y.p1.value[k, i, n], b[n]
          body a0
          then acc0 + b
        output y

    legal when:
        the dimension is reduced by a monoid and not split already; 2 <= parts <= size and fan-in >= 2; where the monoid
        does not commute, the dimension is the first reduced one.
    """

    name = "split_reduce"
    phase = "request"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """For every reduced dimension two parts merged at once; parts and fan-in are the searcher's to choose."""
        for op in graph.ops:
            for d in op.reduce if isinstance(op, Block) else ():
                assert isinstance(op, Block)
                no = split_reduce_refusal(op, d.name, 2, 2)
                yield (
                    replace(no, rule=self.name, at=op.outs[0])
                    if no
                    else Move(self.name, op.outs[0], (("dim", d.name), ("parts", 2), ("fanin", 2)))
                )

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with partial states and their merge tree in place of the operation."""
        at, op = block_at(graph, move)
        name, parts, fanin = move.text("dim"), move.number("parts"), move.number("fanin")
        accept(split_reduce_refusal(op, name, parts, fanin), move)
        ops = [_partial(graph, op, name, parts)]
        while parts > fanin:
            ops.append(_level(graph, op, ops[-1].outs, parts, fanin, len(ops)))
            parts = -(-parts // fanin)
        return replace_op(graph, at, (*ops, _last(op, ops[-1].outs, parts)), results(*ops))


def split_reduce_refusal(op: Block, name: str, parts: int, fanin: int) -> Refusal | None:
    """Why a reduced dimension cannot be cut so; ``None`` when it can."""

    size = {d.name: d.size for d in op.reduce}.get(name)
    if size is None or op.monoid not in MONOIDS:
        known = ", ".join(f"'{d.name}'" for d in op.reduce) or "none"
        return refuse(f"'{name}' is not reduced by a monoid", f"the reduced dimensions are {known}")
    if no_parts := cut_refusal(name, size, parts):
        return no_parts
    if fanin < 2:
        return refuse(f"a tree of fan-in {fanin} never ends", f"{parts} states stay {parts}")
    if any(s.dim == name for s in op.splits):
        return refuse(f"'{name}' is split already", str(next(s for s in op.splits if s.dim == name)))
    return order_refusal(op, name)


def _partial(graph: Graph, op: Block, name: str, parts: int) -> Block:
    """The operation over blocks of the dimension, writing monoid states."""
    size = op.ranges[name]
    each = -(-size // parts)
    k = Dim(fresh_dim(op, "k"), parts)
    dims, reduce = (k, *op.dims), resized(op.reduce, name, each)
    place = dim(k.name) * each + dim(name)
    inner = prune(replace(op, then=()))
    out = replace(
        reindex(inner, {name: place}, dims + reduce),
        outs=_state_names(graph, op, 0), dims=dims, reduce=reduce, splits=splits_in(op, (*op.dims, *op.reduce)),
    )  # fmt: skip
    return out if each * parts == size else _guarded(graph, out, inner, name, const(size - 1) - place)


def _guarded(graph: Graph, op: Block, old: Block, name: str, inside: Aff) -> Block:
    """The partial operation with points beyond the dimension's end giving the monoid's identity.

    Where what the guarded reads give there makes the body that identity by itself (``0 * 0`` under a sum), the body
    stays as it is, so that a contraction is still seen as one.
    """
    assert op.monoid
    zero = MONOIDS[op.monoid].zero(tuple(e.dtype for e in op.body))
    touched = {i for i, r in enumerate(old.reads) if name in read_dims(r)}
    dtypes = [graph.tensors[r.tensor].dtype for r in op.reads]
    for fill in (0, zero[0].value):
        if all(fill == 0 or dtypes[i] == zero[0].dtype for i in touched):
            reads = tuple(_guard(r, inside, dtypes[i], fill) if i in touched else r for i, r in enumerate(op.reads))
            if _vanishes(op, reads, touched, zero):
                return replace(op, reads=reads)
    reads = tuple(_guard(r, inside, dtypes[i], 0) if i in touched else r for i, r in enumerate(op.reads))
    valid = call("ge", Index(inside), Const(0, "i64"))
    body = tuple(call("where", valid, e, z) for e, z in zip(op.body, zero, strict=True))
    return replace(op, reads=reads, body=body)


def _guard(read: Read, inside: Aff, dtype: str, fill: float) -> Read:
    other = number(fill, dtype).value if read.other is None else read.other
    return replace(read, when=(*read.when, Guard(inside, "ge")), other=other)


def _vanishes(op: Block, reads: tuple[Read, ...], touched: set[int], zero: tuple[Const, ...]) -> bool:
    """Whether the body is the monoid's identity where every guarded read gives what it fills in."""
    if op.inner or not arg_positions(op.body) <= touched:
        return False
    fills = [0 if r.other is None else r.other for r in reads]  # the body has those alone that are touched
    return all(constant(e, fills) == z.value for e, z in zip(op.body, zero, strict=True))


def _level(graph: Graph, op: Block, states: tuple[str, ...], count: int, fanin: int, level: int) -> Block:
    """Groups of ``fanin`` neighbouring states merged into one each."""
    assert op.monoid
    k, j = Dim(fresh_dim(op, "k"), -(-count // fanin)), Dim(fresh_dim(op, "j"), fanin)
    zero = MONOIDS[op.monoid].zero(tuple(e.dtype for e in op.body))
    place = dim(k.name) * fanin + dim(j.name)
    reads = tuple(
        Read(tensor=t, index=(place, *plain_index(op.dims)), other=z.value if count % fanin else None)
        for t, z in zip(states, zero, strict=True)
    )
    return Block(
        outs=_state_names(graph, op, level), dims=(k, *op.dims), reduce=(j,), monoid=op.monoid, reads=reads,
        body=_args(op.body), source=op.source, splits=splits_in(op, op.dims),
    )  # fmt: skip


def _last(op: Block, states: tuple[str, ...], count: int) -> Block:
    """The last merge, which also does what the operation did after reducing."""
    k = Dim(fresh_dim(op, "k"), count)
    kept = sorted(op.then_reads())
    leaf = with_args({}, {old: len(states) + new for new, old in enumerate(kept)})
    reads = tuple(Read(tensor=t, index=(dim(k.name), *plain_index(op.dims))) for t in states)
    return replace(
        op, reduce=(k,), inner=(), reads=reads + tuple(op.reads[i] for i in kept), body=_args(op.body),
        then=tuple(rewrite(e, leaf) for e in op.then), splits=splits_in(op, op.dims),
    )  # fmt: skip


def _state_names(graph: Graph, op: Block, level: int) -> tuple[str, ...]:
    assert op.monoid
    return tuple(fresh(graph, f"{op.outs[0]}.p{level or ''}.{f}") for f in MONOIDS[op.monoid].fields)


def _args(body: tuple[Expr, ...]) -> tuple[Expr, ...]:
    return tuple(Arg(i, e.dtype) for i, e in enumerate(body))


# `split_time`: the split of a dimension bound to time. A region is run part after part, so that it needs less memory.


REACH = 8  # positions before an operation that `find` looks at; moves may reach further


@register
class SplitTime(Rule):
    """Run an operation, and those before it that feed each part with a part, once per part of a dimension.

    Of a map dimension that is tiling, of one that reaches the graph's inputs micro-batching; of a reduced one
    accumulation: the states of a part are merged into those of the parts before it. The region reaches ``back`` positions
    before the operation. Each producer in it computes for every part the hull of what that part reads (a window's overlap
    is computed again); one that some part needs whole stays before the region. Readers outside get the parts put together.

    before:
        graph mlp
        input x: f32[4, 3]
        input w: f32[3, 8]
        input v: f32[8, 2]
        h: f32[4, 8] = op [i: 4, n: 8 | m: 3 sum]
          reads x[i, m], w[m, n]
          body x * w
          then max(acc0, 0.0)
        y: f32[4, 2] = op [i: 4, n: 2 | m: 8 sum]
          reads h[i, m], v[m, n]
          body h * v
        output y

    move: split_time@y{dim=m,parts=2,back=1}

    after:
        graph mlp
        input x: f32[4, 3]
        input w: f32[3, 8]
        input v: f32[8, 2]
        "h@0": f32[4, 4] = op [i: 4, n: 4 | m: 3 sum]
          reads x[i, m], w[m, n]
          body x * w
          then max(acc0, 0.0)
        "y@0.value": f32[4, 2] = op [i: 4, n: 2 | m: 4 sum]
          reads a0 = "h@0"[i, m], v[m, n]
          body a0 * v
        "h@1": f32[4, 4] = op [i: 4, n: 4 | m: 3 sum]
          reads x[i, m], w[m, n + 4]
          body x * w
          then max(acc0, 0.0)
        "y@1.value": f32[4, 2] = op [i: 4, n: 2 | m: 4 sum]
          reads a0 = "h@1"[i, m], v[m + 4, n]
          body a0 * v
        y: f32[4, 2] = op [i: 4, n: 2]
          reads a0 = "y@0.value"[i, n], a1 = "y@1.value"[i, n]
          body a0 + a1
        output y

    legal when:
        the operation has the dimension and no part of it is empty; it is not split already; a reduced dimension is the
        first one where its monoid does not commute.
    """

    name = "split_time"
    phase = "fit"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """For every dimension two parts: of the operation alone, and with what feeds it part by part from nearby."""
        for at, op in enumerate(graph.ops):
            for d in op.space:
                no = split_time_refusal(op, d.name, 2)
                if no:
                    yield replace(no, rule=self.name, at=op.outs[0])
                    continue
                reach = at - min(grow(graph, {at: even(d.name, d.size, 2)}, at - REACH))
                for back in dict.fromkeys((0, reach)):
                    yield time_move(op, d.name, 2, back)

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with the region once per part."""
        return split_time(graph, move).graph


def time_move(op: Op, dim: str, parts: int, back: int) -> Move:
    """The move that runs an operation, and what feeds it from ``back`` positions before, part after part."""
    return Move("split_time", op.outs[0], (("dim", dim), ("parts", parts), ("back", back)))


def split_time(graph: Graph, move: Move) -> Clones:
    """Apply the move; says which part each operation belongs to.

    Raises:
        TapestryError: it is not legal here.
    """
    at, op = op_at(graph, move)
    name, parts = move.text("dim"), move.number("parts")
    accept(split_time_refusal(op, name, parts), move)
    return clone(graph, region(graph, at, name, parts, move.number("back")))


def region(graph: Graph, at: int, dim: str, parts: int, back: int) -> dict[int, Cut]:
    """The operations of the region, and how each is cut."""
    return grow(graph, {at: even(dim, graph.ops[at].ranges[dim], parts)}, at - back)


def split_time_refusal(op: Op, name: str, parts: int) -> Refusal | None:
    """Why a dimension cannot be run in so many parts; ``None`` when it can."""

    size = op.ranges.get(name)
    if size is None:
        known = ", ".join(f"'{d.name}'" for d in op.space) or "none"
        return refuse(f"there is no dimension '{name}'", f"the dimensions are {known}")
    if isinstance(op, Block) and any(d.name == name for d in op.inner_dims):
        return refuse(f"'{name}' is reduced whole inside every point", "an inner reduction is never cut")
    if no_parts := cut_refusal(name, size, parts):
        return no_parts
    if op.splits:
        return refuse("it is split already", str(op.splits[0]))
    return order_refusal(op, name) if isinstance(op, Block) and name in {d.name for d in op.reduce} else None


# `unfuse`: an axis that several were fused into, computed as two axes again, so that each can be cut on its own.


@register
class Unfuse(Rule):
    """Compute ``d = inner*d_out + d_in`` as two dimensions; the result is then a view of the tensor that has both axes.

    Cutting both gives each device cells that are interleaved in the result: what several ``simple_sharding`` entries of an ONNX
    sharding spec say.

    before:
        graph fused
        input x: f32[3, 12]
        y: f32[3, 12] = op [i: 3, n: 12]
          reads x[i, n]
          body exp(x)
        output y

    move: unfuse@y{dim=n,inner=4}

    after:
        graph fused
        input x: f32[3, 12]
        y.n: f32[3, 3, 4] = op [i: 3, n_out: 3, n_in: 4]
          reads x[i, n_in + 4*n_out]
          body exp(x)
        y: f32[3, 12] = op [i: 3, n: 12]
          reads a0 = y.n[i, floor((n)/4), ((n) mod 4)]
          body a0
        output y

    legal when:
        the dimension is a map dimension that is not split, of a size that the inner one divides, both parts being more than 1.
    """

    name = "unfuse"
    phase = "request"
    exact = True

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """Every map dimension that has a divisor, with the smallest one inside."""
        for op in graph.ops:
            for d in op.dims if isinstance(op, Block) and not is_view(op) else ():
                inner = next((k for k in range(2, int(d.size**0.5) + 1) if d.size % k == 0), 0)
                assert isinstance(op, Block)
                if inner:
                    no = unfuse_refusal(op, d.name, inner)
                    move = Move(self.name, op.outs[0], (("dim", d.name), ("inner", inner)))
                    yield replace(no, rule=self.name, at=op.outs[0]) if no else move

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with the operation over both dimensions, and its results as views."""
        at, op = block_at(graph, move)
        name, inner = move.text("dim"), move.number("inner")
        accept(unfuse_refusal(op, name, inner), move)
        k = next(i for i, d in enumerate(op.dims) if d.name == name)
        slow = Dim(fresh_dim(op, f"{name}_out"), op.dims[k].size // inner)
        fast = Dim(fresh_dim(op, f"{name}_in"), inner)
        dims = (*op.dims[:k], slow, fast, *op.dims[k + 1 :])
        names = tuple(fresh(graph, f"{t}.{name}") for t in op.outs)
        apart = replace(
            reindex(op, {name: dim(slow.name) * inner + dim(fast.name)}, (*dims, *op.reduce)), dims=dims, outs=names
        )
        apart = replace(apart, splits=splits_in(op, (*dims, *op.reduce)))
        here, ranges = plain_index(op.dims), {name: op.dims[k].size}
        place = (*here[:k], floordiv(here[k], inner, ranges), modulo(here[k], inner, ranges), *here[k + 1 :])
        made = results(apart)
        views = tuple(
            Block(outs=(t,), dims=op.dims, reads=(Read(tensor=n.name, index=place),), body=(Arg(0, n.dtype),), source=op.source)
            for t, n in zip(op.outs, made, strict=True)
        )
        return replace_op(graph, at, (apart, *views), made)


def unfuse_refusal(op: Block, name: str, inner: int) -> Refusal | None:
    """Why a dimension is not taken apart so; ``None`` when it is."""
    size = {d.name: d.size for d in op.dims}.get(name)
    if size is None:
        return refuse(f"'{name}' is not a map dimension", "the map dimensions are " + ", ".join(f"'{d.name}'" for d in op.dims))
    if inner < 2 or size % inner or size == inner:
        rows, left = divmod(size, max(inner, 1))
        return refuse(f"{size} points of '{name}' are not two or more rows of two or more", f"{size} = {rows}*{inner} + {left}")
    split = next((s for s in op.splits if s.dim == name), None)
    return refuse(f"'{name}' is split already", str(split)) if split else None


# `block_scan`: a running state as one per block, started with the merged states of the blocks before.


@register
class BlockScan(Rule):
    """Cut a scan into blocks: every block's total, the totals of the blocks before each, and a scan inside each block.

    What one block needs of the others is a single state. Cut over a mesh axis, only the totals travel: reduce-then-scan
    (Blelloch 1990). The order of merging is kept, so the monoid need not commute.

    before:
        graph running
        input x: f32[6, 4]
        y: f32[6, 4] = op [i: 6, c: 4 | j: 6 sum]
          reads x[j, c] when i - j >= 0 else 0.0
          body x
        output y

    move: block_scan@y{parts=3}

    after:
        graph running
        input x: f32[6, 4]
        y.total.value: f32[3, 4] = op [k: 3, c: 4 | j: 2 sum]
          reads x[j + 2*k, c] else 0.0
          body x
        y.before.value: f32[3, 4] = op [k: 3, c: 4 | m: 3 sum]
          reads a0 = y.total.value[m, c] when k - m - 1 >= 0 else 0.0
          body a0
        y: f32[6, 4] = op [i: 6, c: 4 | j: 2 sum]
          reads x[j + 2*floor((i)/2), c] when -j + ((i) mod 2) >= 0 else 0.0, a1 = y.before.value[floor((i)/2), c]
          body x
          then a1 + acc0
        output y

    legal when:
        the operation is a scan that is not in blocks already, not split, and 2 <= parts <= its points.
    """

    name = "block_scan"
    phase = "search"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """Every scan in two blocks; `sized` gives the number of a mesh axis."""
        yield from self.sized(graph, 2)

    def sized(self, graph: Graph, parts: int) -> Iterator[Move | Refusal]:
        """Every scan in so many blocks."""
        for op in graph.ops:
            if isinstance(op, Block) and as_scan(op):
                yield refusal_of_scan(op, parts) or Move(self.name, op.outs[0], (("parts", parts),))

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with the scan in blocks."""
        at, op = block_at(graph, move)
        parts = move.number("parts")
        accept(refusal_of_scan(op, parts), move)
        scan = as_scan(op)
        assert scan
        each = -(-op.ranges[scan.dim] // parts)
        totals = _totals(graph, op, scan, each)
        before = _before(graph, op, scan, totals)
        return replace_op(graph, at, (totals, before, _scan_in_blocks(op, scan, each, before)), results(totals, before))


def refusal_of_scan(op: Block, parts: int) -> Refusal | None:
    """Why an operation cannot be put into so many blocks; ``None`` when it can."""

    def no(reason: str, witness: str = "") -> Refusal:
        return Refusal("block_scan", op.outs[0], reason, witness)

    scan = as_scan(op)
    if scan is None:
        return no("it is not a running state", "no guard says that place i merges what is at j <= i")
    size = op.ranges[scan.dim]
    if scan.segment < size:
        return no("it runs in blocks already", f"it starts again every {scan.segment} points of '{scan.dim}'")
    if op.splits:
        return no("it is split already", str(op.splits[0]))
    if not 2 <= parts <= size:
        return no(f"{size} points of '{scan.dim}' cannot be cut into {parts} blocks")
    if op.ranges[scan.over] != size:
        return no(f"'{scan.dim}' and '{scan.over}' differ in size", f"{size} and {op.ranges[scan.over]}")
    return None


def _totals(graph: Graph, op: Block, scan: Scan, each: int) -> Block:
    """The merged state of every block."""
    k = Dim(fresh_dim(op, "k"), -(-op.ranges[scan.dim] // each))
    dims = tuple(k if d.name == scan.dim else d for d in op.dims)
    inner = prune(replace(unguarded(op, scan), then=(), outs=_names(graph, op, "total")))
    reduce = resized(op.reduce, scan.over, each)
    place = dim(k.name) * each + dim(scan.over)
    out = reindex(inner, {scan.over: place}, dims + reduce)
    return _within(replace(out, dims=dims, reduce=reduce), op, scan, place)


def _before(graph: Graph, op: Block, scan: Scan, totals: Block) -> Block:
    """The merged totals of the blocks before each one (after, where the scan runs backwards)."""
    assert op.monoid
    k = next(new for new, old in zip(totals.dims, op.dims, strict=True) if old.name == scan.dim)
    m = Dim(fresh_dim(totals, "m"), k.size)
    when = running(dim(k.name), m.name, reverse=scan.sign < 0, exclusive=True)
    index = tuple(dim(m.name) if d == k else dim(d.name) for d in totals.dims)
    zero = MONOIDS[op.monoid].zero(tuple(e.dtype for e in op.body))
    return Block(
        outs=_names(graph, op, "before"), dims=totals.dims, reduce=(m,), monoid=op.monoid, source=op.source,
        reads=tuple(Read(tensor=t, index=index, other=z.value, when=(when,)) for t, z in zip(totals.outs, zero, strict=True)),
        body=tuple(Arg(i, e.dtype) for i, e in enumerate(op.body)),
    )  # fmt: skip


def _scan_in_blocks(op: Block, scan: Scan, each: int, before: Block) -> Block:
    """The scan inside each block, started with what comes before the block."""
    assert op.monoid
    reduce = resized(op.reduce, scan.over, each)
    block = floordiv(dim(scan.dim), each)
    place = block * each + dim(scan.over)
    out = reindex(unguarded(op, scan), {scan.over: place}, op.dims + reduce)
    out = _within(replace(out, reduce=reduce), op, scan, place)
    when = running(modulo(dim(scan.dim), each), scan.over, reverse=scan.sign < 0, exclusive=scan.shift == 1)
    body = out.body_reads()
    reads = tuple(replace(r, when=(when, *r.when)) if i in body else r for i, r in enumerate(out.reads))
    index = tuple(block if d.name == scan.dim else e for d, e in zip(op.dims, plain_index(op.dims), strict=True))
    starts = tuple(Arg(len(reads) + i, e.dtype) for i, e in enumerate(op.body))
    accs = tuple(Acc(i, e.dtype) for i, e in enumerate(op.body))
    monoid = MONOIDS[op.monoid]
    merged = monoid.combine(*((starts, accs) if scan.sign > 0 else (accs, starts)))
    if isinstance(monoid.structure, Driven) and scan.sign > 0:  # there, an infinite factor times nothing is NaN
        first = call("eq", Index(block), number(0, "i64"))
        merged = tuple(call("where", first, acc, both) for acc, both in zip(accs, merged, strict=True))

    def leaf(x: Expr) -> Expr:
        return merged[x.field] if isinstance(x, Acc) else x

    return replace(
        out, reads=reads + tuple(Read(tensor=t, index=index) for t in before.outs),
        then=tuple(rewrite(e, leaf) for e in op.then),
    )  # fmt: skip


def _within(out: Block, op: Block, scan: Scan, place: Aff) -> Block:
    """Reads of the body kept from the points beyond the dimension's end, where the last block is not full."""
    size, inside = op.ranges[scan.dim], const(op.ranges[scan.dim] - 1) - place
    if size % out.ranges[scan.over] == 0:
        return out
    body = out.body_reads()
    guard = Guard(inside, "ge")
    return replace(out, reads=tuple(replace(r, when=(*r.when, guard)) if i in body else r for i, r in enumerate(out.reads)))


def _names(graph: Graph, op: Block, what: str) -> tuple[str, ...]:
    assert op.monoid
    return tuple(fresh(graph, f"{op.outs[0]}.{what}.{f}") for f in MONOIDS[op.monoid].fields)
