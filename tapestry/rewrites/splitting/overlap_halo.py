"""`overlap`: what a sliding window reads is computed in blocks that overlap, so that one wider halo serves two operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tapestry.ir.expr import number
from tapestry.ir.graph import Block, Dim, Graph, Guard, Read, shape_of, with_ops
from tapestry.ir.index import dim, dims_of, floordiv, modulo, span
from tapestry.ir.recognition.running_state import as_scan
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.edit import accept, block_at, fresh, fresh_dim, read_dims, reindex, single_consumer
from tapestry.rewrites.core.inline import limits
from tapestry.rewrites.core.rule import Move, Refusal, Rule, refuse, register
from tapestry.rewrites.splitting.phases import windows


@register
class Overlap(Rule):
    """Compute the tensor that windows slide over block by block, each block as far as its own windows reach.

    Neighbouring blocks then both hold the rows at their seam: those are computed twice, and not exchanged. What the first
    operation reads is exchanged instead, once, with a halo as wide as both windows. Rows beyond the end of the tensor
    between the two are nobody's: the second operation reads its fill there, as before.

    before:
        graph two
        input x: f32[12]
        input v: f32[3]
        input w: f32[3]
        t: f32[12] = op [h: 12 | r: 3 sum]
          reads x[h + r - 1] else 0.0, v[r]
          body x * v
        y: f32[12] = op [h: 12 | r: 3 sum]
          reads t[h + r - 1] else 0.0, w[r]
          body t * w
        output y

    move: overlap@y{tensor=t,dim=h,parts=3}

    after:
        graph two
        input x: f32[12]
        input v: f32[3]
        input w: f32[3]
        t.wide: f32[3, 6] = op [k: 3, p: 6 | r: 3 sum]
          reads x[4*k + p + r - 2] else 0.0, v[r]
          body x * v
        y: f32[12] = op [h: 12 | r: 3 sum]
          reads a0 = t.wide[floor((h)/4), r + ((h) mod 4)] when h + r - 1 >= 0 when -h - r + 12 >= 0 else 0.0, w[r]
          body a0 * w
        output y

    legal when:
        the tensor's only reader slides windows over one of its axes along the dimension, all with the same step; neither
        operation is split, opaque or a running state; and 2 <= parts <= points of the dimension.
    """

    name = "overlap"
    phase = "search"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """Every window that reads what another operation computed, in two blocks; `sized` gives the number of a mesh axis."""
        yield from self.sized(graph, 2)

    def sized(self, graph: Graph, parts: int) -> Iterator[Move | Refusal]:
        """The same in so many blocks."""
        makers = graph.producers()
        for op in graph.blocks:
            for d in op.dims:
                for t in dict.fromkeys(w.tensor for w in windows(op, d.name) if w.tensor in makers):
                    params = (("tensor", t), ("dim", d.name), ("parts", parts))
                    yield self.offered(Move(self.name, op.outs[0], params), _seams(graph, op, t, d.name, parts))

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with the tensor in overlapping blocks."""
        at, op = block_at(graph, move)
        tensor, name = move.text("tensor"), move.text("dim")
        seams = accept(_seams(graph, op, tensor, name, move.number("parts")), move)
        first = graph.producers()[tensor]
        wide, made = _wide(graph, seams, fresh(graph, f"{tensor}.wide"))
        reader = _reader(op, seams, wide.name, graph.tensors[tensor].shape)
        ops = [made if i == first else reader if i == at else o for i, o in enumerate(graph.ops)]
        return with_ops(graph, tuple(ops), (wide,))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seams:
    """Blocks of ``each`` points of the reader's dimension; a block's windows reach ``reach`` rows, from row
    ``step * each * k + first`` of ``axis`` on, where k is the block."""

    tensor: str
    maker: Block
    dim: str
    axis: int
    step: int
    each: int
    count: int
    first: int
    reach: int


def _seams(graph: Graph, op: Block, tensor: str, name: str, parts: int) -> _Seams | Refusal:
    at = graph.producers().get(tensor)
    maker = None if at is None else graph.ops[at]
    if not isinstance(maker, Block) or len(maker.outs) != 1:
        return refuse(f"'{tensor}' is not the one result of a block operation")
    if single_consumer(graph, tensor) is None:
        others = [graph.ops[i].outs[0] for i in graph.consumers().get(tensor, []) if graph.ops[i] is not op]
        return refuse(f"'{tensor}' has other readers, which need it as it is", ", ".join(others) or "it is an output")
    if op.splits or maker.splits or as_scan(op) or as_scan(maker):
        return refuse("one of the two operations is split, or a running state")
    reads = [r for r in op.reads if r.tensor == tensor]
    shapes = {_walk(r, name) for r in reads}
    if len(shapes) != 1 or None in shapes:
        return refuse(f"'{tensor}' is not read by windows that slide along '{name}' with one step")
    found = next(iter(shapes))
    size = op.ranges.get(name, 0)
    if found is None or not 2 <= parts <= size:
        return refuse(f"{size} points of '{name}' cannot be cut into {parts} blocks")
    axis, step = found
    rests = [span(r.index[axis] - dim(name) * step, op.ranges) for r in reads]
    first, last = min(lo for lo, _ in rests), max(hi for _, hi in rests)
    if last - first < step:
        return refuse(f"windows along '{name}' do not overlap", f"each is {last - first + 1} wide, and {step} from the next")
    each = -(-size // parts)
    return _Seams(
        tensor=tensor,
        maker=maker,
        dim=name,
        axis=axis,
        step=step,
        each=each,
        count=-(-size // each),
        first=first,
        reach=step * (each - 1) + last - first + 1,
    )


def _walk(read: Read, name: str) -> tuple[int, int] | None:
    """(axis, step) of the one axis that a read walks along a dimension; ``None`` where it is not a window."""
    along = [i for i, e in enumerate(read.index) if name in dims_of(e)]
    if len(along) != 1 or any(name in dims_of(g.aff) for g in read.when):
        return None
    e = read.index[along[0]]
    return (along[0], e.coef(name)) if e.is_affine and e.coef(name) > 0 else None


def _wide(graph: Graph, s: _Seams, name: str) -> tuple[Tensor, Block]:
    """The tensor in overlapping blocks, and the operation that computes them."""
    op = s.maker
    k = Dim(fresh_dim(op, "k"), s.count)
    p = Dim(fresh_dim(op, "p"), s.reach)
    old = op.dims[s.axis]
    dims = (*op.dims[: s.axis], k, p, *op.dims[s.axis + 1 :])
    row = dim(k.name) * (s.step * s.each) + dim(p.name) + s.first
    moved = reindex(op, {old.name: row}, dims + op.reduce)
    inside = limits((row,), (old.size,), {k.name: k.size, p.name: p.size})
    reads = [
        _kept_inside(new, inside, graph.tensors[new.tensor].dtype) if old.name in read_dims(was) else new
        for was, new in zip(op.reads, moved.reads, strict=True)
    ]
    out = graph.tensors[s.tensor]
    wide = Tensor(name=name, dtype=out.dtype, shape=shape_of(dims))
    return wide, replace(moved, outs=(name,), dims=dims, reads=tuple(reads))


def _kept_inside(read: Read, inside: list[Guard], dtype: str) -> Read:
    """A read that says what it gives at rows that do not exist; one that fills in already may do so there, too."""
    if read.other is not None or not inside:
        return read
    return replace(read, when=(*read.when, *inside), other=number(0, dtype).value)


def _reader(op: Block, s: _Seams, wide: str, shape: tuple[int, ...]) -> Block:
    """The reader, finding every row in its own block."""
    block, place = floordiv(dim(s.dim), s.each, op.ranges), modulo(dim(s.dim), s.each, op.ranges)

    def moved(r: Read) -> Read:
        if r.tensor != s.tensor:
            return r
        row = r.index[s.axis]
        within = place * s.step + (row - dim(s.dim) * s.step) - s.first
        index = (*r.index[: s.axis], block, within, *r.index[s.axis + 1 :])
        ends = limits((row,), (shape[s.axis],), op.ranges) if r.other is not None else []
        return replace(r, tensor=wide, index=index, when=(*r.when, *ends))

    return replace(op, reads=tuple(moved(r) for r in op.reads))
