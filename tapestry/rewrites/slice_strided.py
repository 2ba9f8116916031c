"""`slice_strided`: a strided convolution as a sum of dense ones, one per phase of the window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

from tapestry.errors import TapestryError
from tapestry.ir.expr import Arg, Const, Expr, Index, call
from tapestry.ir.graph import Block, Dim, Graph, Guard, Read, replace_op, with_ops
from tapestry.ir.index import Aff, dim, dims_of, floordiv, modulo, span
from tapestry.ir.monoid import MONOIDS, number
from tapestry.ir.states import as_scan
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.edit import (
    block_at,
    finish,
    fresh,
    fresh_dim,
    limits,
    plain_index,
    prune,
    read_dims,
    reindex,
    resized,
    results,
    single_consumer,
    splits_in,
)
from tapestry.rewrites.core.rule import Move, Refusal, Rule, refuse, register

# Phases of an axis that is walked in steps: what the two slicing rules share.
#
# Reading ``x[s*h + r]`` in steps of s touches, for each residue f, only cells ``x[s*j + f]``. Those cells in a tensor of
# their own are a phase of x, and reading them is dense. Both rules replace a dimension d by ``s*d + q`` for one residue q
# and let every read whose index then is ``s*(…) + f`` read phase f instead: the cells touched stay exactly the same, also
# where the index leaves the tensor, since ``0 <= s*j + f < n`` says the same as ``0 <= j < ⌈(n - f)/s⌉``.


MOST = 64  # phases, each an operation or more


def too_many(step: int) -> Refusal | None:
    """Why an axis is not cut into so many phases; ``None`` where it may be."""
    return refuse(f"{step} phases are more than {MOST}", "each is an operation of its own") if step > MOST else None


@dataclass(frozen=True, slots=True)
class Window:
    """How one read walks one axis along a map dimension: ``step*dim + Σ coef*other + const``, some other being reduced."""

    tensor: str
    axis: int
    step: int
    others: tuple[tuple[str, int], ...]
    const: int


def windows(op: Block, name: str) -> list[Window]:
    """The sliding windows of an operation along a map dimension, from its projections."""
    reduced = {d.name for d in op.reduce}
    found: list[Window] = []
    for r in op.reads:
        for axis, e in enumerate(r.index):
            others = tuple((str(a), c) for a, c in e.terms if a != name)
            if e.is_affine and e.coef(name) > 0 and any(a in reduced for a, _ in others):
                found.append(Window(r.tensor, axis, e.coef(name), others, e.const))
    return found


def sliding(graph: Graph) -> Iterator[tuple[Block, str]]:
    """Every operation and map dimension along which a window slides."""
    for op in graph.ops:
        for d in op.dims if isinstance(op, Block) else ():
            assert isinstance(op, Block)
            if windows(op, d.name):
                yield op, d.name


def points_in(size: int, step: int, phase: int) -> int:
    """How many of ``size`` points are in a residue class."""
    return -(-(size - phase) // step)


@dataclass(slots=True)
class Phases:
    """The phases taken of a graph's tensors, each once: the operations that make them and the new tensors."""

    graph: Graph
    ops: list[Block] = field(default_factory=list[Block])
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    names: dict[tuple[str, int, int, int], str] = field(default_factory=dict[tuple[str, int, int, int], str])

    def take(self, op: Block, name: str, step: int, phase: int) -> Block | None:
        """The operation over one residue class of a dimension, reading phases; ``None`` when a phase would be empty."""
        space = resized(op.space, name, points_in(op.ranges[name], step, phase))
        moved = reindex(op, {name: dim(name) * step + phase}, space)
        reads: list[Read] = []
        for old, new in zip(op.reads, moved.reads, strict=True):
            for axis, e in enumerate(old.index):
                if name in dims_of(e):
                    new = self._dense(new, axis, step)
                    if new is None:
                        return None
            reads.append(new)
        n = len(op.dims)
        return replace(moved, dims=space[:n], reduce=space[n : n + len(op.reduce)], reads=tuple(reads))

    def _dense(self, read: Read, axis: int, step: int) -> Read | None:
        e = read.index[axis]
        if not e.is_affine or any(c % step for _, c in e.terms):
            return read
        tensor = self._phase(read.tensor, axis, step, e.const % step)
        index = Aff(tuple((a, c // step) for a, c in e.terms), e.const // step)
        if tensor is None:
            return None
        return replace(read, tensor=tensor, index=(*read.index[:axis], index, *read.index[axis + 1 :]))

    def _phase(self, tensor: str, axis: int, step: int, phase: int) -> str | None:
        key = (tensor, axis, step, phase)
        if key not in self.names:
            whole = self.tensors.get(tensor) or self.graph.tensors[tensor]
            extent = points_in(whole.shape[axis], step, phase)
            if extent <= 0:
                return None
            dims = tuple(Dim(f"x{i}", extent if i == axis else n) for i, n in enumerate(whole.shape))
            index = tuple(e * step + phase if i == axis else e for i, e in enumerate(plain_index(dims)))
            out = fresh(self.graph, f"{tensor}.x{axis}.s{phase}")
            self.tensors[out] = Tensor(name=out, dtype=whole.dtype, shape=tuple(d.size for d in dims))
            read = Read(tensor=tensor, index=index)
            self.ops.append(Block(outs=(out,), dims=dims, reads=(read,), body=(Arg(0, whole.dtype),)))
            self.names[key] = out
        return self.names[key]


@dataclass(frozen=True, slots=True)
class Sliced:
    """The dimension that is cut, the phases of the tensors read, and the operation once per phase of the dimension."""

    name: str
    phases: Phases
    parts: tuple[Block, ...]


def sliced(graph: Graph, op: Block, name: str, step: int, outs: Sequence[tuple[str, ...]]) -> Sliced | None:
    """An operation over each of the first residue classes of a dimension, writing ``outs``; ``None`` when a phase is empty."""
    phases = Phases(graph)
    parts: list[Block] = []
    for q, names in enumerate(outs):
        part = phases.take(op, name, step, q)
        if part is None:
            return None
        parts.append(replace(part, outs=names, splits=splits_in(op, part.space)))
    return Sliced(name, phases, tuple(parts))


class Slicing(Rule):
    """What the two slicing rules share: find and apply follow from `plan` and `rest`."""

    phase = "search"

    def plan(self, graph: Graph, op: Block, name: str) -> Sliced | Refusal:
        """The operation in phases along a map dimension, or why not."""
        raise NotImplementedError

    def rest(self, graph: Graph, op: Block, plan: Sliced) -> list[Block]:
        """The operations that make one of the parts; the last of them writes what the operation wrote."""
        raise NotImplementedError

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """For every map dimension along which a window slides."""
        for op, name in sliding(graph):
            plan = self.plan(graph, op, name)
            move = Move(self.name, op.outs[0], (("dim", name),))
            yield replace(plan, rule=self.name, at=move.at) if isinstance(plan, Refusal) else move

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with phases in place of the operation."""
        at, op = block_at(graph, move)
        plan = self.plan(graph, op, move.text("dim"))
        if isinstance(plan, Refusal):
            raise TapestryError(plan.reason, where=str(move), why=plan.witness)
        rest = self.rest(graph, op, plan)
        new = (*plan.phases.tensors.values(), *results(*plan.parts, *rest[:-1]))
        return replace_op(graph, at, (*plan.phases.ops, *plan.parts, *rest), new)


@register
class SliceStrided(Slicing):
    """Cut a window that moves in steps of s into s dense windows: ``y = Σ_q conv(X[q::s], F[q::s])``.

    With ``r = s*r' + q`` the window ``x[s*h + r - p]`` reads phase ``(q - p) mod s`` of x at ``h + r' + …``: dense, so that
    neighbouring outputs share cells again. The phases are merged by the operation's own monoid (a strided max pooling is
    a maximum of dense ones).

    before:
        graph strided
        input x: f32[7]
        input k: f32[3]
        input b: f32[1]
        y: f32[4] = op [h: 4 | r: 3 sum]
          reads x[2*h + r - 1] else 0.0, k[r], b[0]
          body x * k
          then acc0 + b
        output y

    move: slice_strided@y{dim=h}

    after:
        graph strided
        input x: f32[7]
        input k: f32[3]
        input b: f32[1]
        x.x0.s1: f32[3] = op [x0: 3]
          reads x[2*x0 + 1]
          body x
        k.x0.s0: f32[2] = op [x0: 2]
          reads k[2*x0]
          body k
        x.x0.s0: f32[4] = op [x0: 4]
          reads x[2*x0]
          body x
        k.x0.s1: f32[1] = op [x0: 1]
          reads k[2*x0 + 1]
          body k
        y.r0.value: f32[4] = op [h: 4 | r: 2 sum]
          reads a0 = x.x0.s1[h + r - 1] else 0.0, a1 = k.x0.s0[r]
          body a0 * a1
        y.r1.value: f32[4] = op [h: 4 | r: 1 sum]
          reads a0 = x.x0.s0[h + r] else 0.0, a1 = k.x0.s1[r]
          body a0 * a1
        y: f32[4] = op [h: 4]
          reads a0 = y.r0.value[h], a1 = y.r1.value[h], b[0]
          body (a0 + a1) + b
        output y

    legal when:
        some read walks an axis by ``s*h + Σ coef*other + const`` with s above 1 and all coefficients but that of one
        reduced dimension r multiples of s; the monoid commutes; every phase of x has a cell, and there are
        at most 64; r is not split already.
    """

    name = "slice_strided"

    def plan(self, graph: Graph, op: Block, name: str) -> Sliced | Refusal:
        """The operation once per phase of its window, or why not."""
        if all(d.name != name for d in op.dims):
            return refuse(
                f"'{name}' is not a map dimension", "the map dimensions are " + ", ".join(f"'{d.name}'" for d in op.dims)
            )
        found = windows(op, name)
        if not found:
            return refuse(f"no window slides along '{name}'", f"no read is at {name} + (a reduced dimension)")
        strided = next((w for w in found if w.step > 1), None)
        if strided is None:
            return refuse(
                f"the window does not stride along '{name}'", f"'{name}' 0 and 1 read '{found[0].tensor}' 1 cell apart"
            )
        if many := too_many(strided.step):
            return many
        inner = _phase_dim(op, strided)
        if isinstance(inner, tuple):
            return refuse(*inner)
        if op.monoid is None or not MONOIDS[op.monoid].commutative:
            return refuse(f"'{op.monoid}' does not commute", f"'{inner}' {strided.step} would be merged before 1")
        if any(s.dim == inner for s in op.splits):
            return refuse(f"'{inner}' is split already")
        return _parts(graph, op, inner, strided.step) or refuse(
            f"'{strided.tensor}' has fewer than {strided.step} cells along axis {strided.axis}", "a phase of it is empty"
        )

    def rest(self, graph: Graph, op: Block, plan: Sliced) -> list[Block]:
        """The phases' states merged one after another; the last merge also does what the operation did after reducing."""
        assert op.monoid
        dtypes = tuple(e.dtype for e in op.body)
        fields = MONOIDS[op.monoid].fields
        merge = MONOIDS[op.monoid].combiner(dtypes)
        held, ops = plan.parts[0].outs, list[Block]()
        for q, part in enumerate(plan.parts[1:-1], 1):
            outs = tuple(fresh(graph, f"{op.outs[0]}.{plan.name}0_{q}.{f}") for f in fields)
            reads = tuple(Read(tensor=t, index=plain_index(op.dims)) for t in (*held, *part.outs))
            ops.append(Block(outs=outs, dims=op.dims, reads=reads, body=merge, source=op.source, splits=splits_in(op, op.dims)))
            held = outs
        states = held + (plan.parts[-1].outs if len(plan.parts) > 1 else ())
        final: tuple[Expr, ...] = merge if len(plan.parts) > 1 else tuple(Arg(i, d) for i, d in enumerate(dtypes))
        return [*ops, replace(finish(op, states, final), splits=splits_in(op, op.dims))]


def _phase_dim(op: Block, window: Window) -> str | tuple[str, str]:
    """The reduced dimension whose residue decides the phase, or the reason and witness why there is not just one."""
    odd = [(n, c) for n, c in window.others if c % window.step]
    reduced = {d.name for d in op.reduce}
    if len(odd) == 1 and odd[0][0] in reduced:
        return odd[0][0]
    walks = ", ".join(f"'{n}' by {c}" for n, c in window.others)
    if not odd:
        return f"the window reads one phase of '{window.tensor}' alone", f"step {window.step}, {walks}"
    return f"more than one reduced dimension walks '{window.tensor}'", walks


def _parts(graph: Graph, op: Block, inner: str, step: int) -> Sliced | None:
    assert op.monoid
    fields = MONOIDS[op.monoid].fields
    outs = [tuple(fresh(graph, f"{op.outs[0]}.{inner}{q}.{f}") for f in fields) for q in range(min(step, op.ranges[inner]))]
    return sliced(graph, prune(replace(op, then=())), inner, step, outs)


# `slice_dilated`: a dilated convolution as dense ones, one per phase, whose results interleave.


@register
class SliceDilated(Slicing):
    """Cut a dilated window into phases: slice ``X[r::d]``, convolve each densely, interleave Y.

    A window that reads ``x[h + d*r - p]`` touches, from output h, only cells of one residue class modulo d. Output phase
    ``h = d*h' + q`` therefore reads phase ``(q - p) mod d`` of x, densely: neighbouring outputs of a phase share cells,
    so that a block's halo is of r cells, not of d*r.

    before:
      graph dilated
      input x: f32[7]
      input k: f32[2]
      y: f32[5] = op [h: 5 | r: 2 sum]
        reads x[h + 2*r], k[r]
        body x * k
      output y

    move: slice_dilated@y{dim=h}

    after:
      graph dilated
      input x: f32[7]
      input k: f32[2]
      x.x0.s0: f32[4] = op [x0: 4]
        reads x[2*x0]
        body x
      x.x0.s1: f32[3] = op [x0: 3]
        reads x[2*x0 + 1]
        body x
      y.h0: f32[3] = op [h: 3 | r: 2 sum]
        reads a0 = x.x0.s0[h + r], k[r]
        body a0 * k
      y.h1: f32[2] = op [h: 2 | r: 2 sum]
        reads a0 = x.x0.s1[h + r], k[r]
        body a0 * k
      y: f32[5] = op [h: 5]
        reads a0 = y.h0[floor((h)/2)] when ((h) mod 2) == 0 else 0.0, a1 = y.h1[floor((h)/2)] when ((h) mod 2) - 1 == 0 else 0.0
        body where(eq(index(((h) mod 2)), 0), a0, a1)
      output y

    legal when:
        some read walks an axis by ``h + Σ coef*other + const`` where the greatest common divisor d of the coefficients
        is above 1 and at most 64; every phase of x and of y has a cell; h is not split already.
    """

    name = "slice_dilated"

    def plan(self, graph: Graph, op: Block, name: str) -> Sliced | Refusal:
        """The operation once per phase of its output, or why not."""
        size = {d.name: d.size for d in op.dims}.get(name)
        if size is None:
            return refuse(
                f"'{name}' is not a map dimension", "the map dimensions are " + ", ".join(f"'{d.name}'" for d in op.dims)
            )
        found = windows(op, name)
        if not found:
            return refuse(f"no window slides along '{name}'", f"no read is at {name} + (a reduced dimension)")
        dense = next((w for w in found if w.step == 1), None)
        if dense is None:
            w = found[0]
            return refuse(
                f"the window strides along '{name}': see slice_strided", f"'{name}' 0 and 1 read '{w.tensor}' {w.step} apart"
            )
        step = gcd(*(c for w in found if w.step == 1 for _, c in w.others))
        if step == 1:
            other, coef = min(dense.others, key=lambda t: abs(t[1]))
            return refuse(f"the window is dense along '{name}'", f"'{other}' 0 and 1 read '{dense.tensor}' {abs(coef)} apart")
        if many := too_many(step):
            return many
        if size < step:
            return refuse(f"{size} points of '{name}' leave one of {step} phases empty", f"no point is {size} modulo {step}")
        if any(s.dim == name for s in op.splits):
            return refuse(f"'{name}' is split already")
        outs = [tuple(fresh(graph, f"{t}.{name}{q}") for t in op.outs) for q in range(step)]
        return sliced(graph, op, name, step, outs) or refuse(
            f"'{dense.tensor}' has fewer than {step} cells along axis {dense.axis}", f"phase {step - 1} of it is empty"
        )

    def rest(self, graph: Graph, op: Block, plan: Sliced) -> list[Block]:
        """The operation that interleaves the phases."""
        return [_interleave(graph, op, plan.name, plan.parts)]


def _interleave(graph: Graph, op: Block, name: str, parts: tuple[Block, ...]) -> Block:
    """Assemble the output: cell h is cell ``h // d`` of phase ``h mod d``."""
    step, ranges = len(parts), op.ranges
    assert sum(points_in(ranges[name], step, q) for q in range(step)) == ranges[name]
    phase, place = modulo(dim(name), step, ranges), floordiv(dim(name), step, ranges)
    index = tuple(place if d.name == name else e for d, e in zip(op.dims, plain_index(op.dims), strict=True))
    reads: list[Read] = []
    body: list[Expr] = []
    for i, t in enumerate(op.outs):
        dtype = graph.tensors[t].dtype
        first = len(reads)
        other = number(0, dtype).value
        reads += [
            Read(tensor=part.outs[i], index=index, other=other, when=(Guard(phase - q, "eq"),)) for q, part in enumerate(parts)
        ]
        e: Expr = Arg(first + step - 1, dtype)
        for q in reversed(range(step - 1)):
            e = call("where", call("eq", Index(phase), Const(q, "i64")), Arg(first + q, dtype), e)
        body.append(e)
    return Block(
        outs=op.outs, dims=op.dims, reads=tuple(reads), body=tuple(body), source=op.source, splits=splits_in(op, op.dims)
    )


# `overlap`: what a sliding window reads is computed in blocks that overlap, so that one wider halo serves two operations.


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
        for op in graph.ops:
            for d in op.dims if isinstance(op, Block) else ():
                assert isinstance(op, Block)
                for t in dict.fromkeys(w.tensor for w in windows(op, d.name) if w.tensor in makers):
                    seams = _seams(graph, op, t, d.name, parts)
                    params = (("tensor", t), ("dim", d.name), ("parts", parts))
                    yield seams if isinstance(seams, Refusal) else Move(self.name, op.outs[0], params)

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with the tensor in overlapping blocks."""
        at, op = block_at(graph, move)
        tensor, name = move.text("tensor"), move.text("dim")
        seams = _seams(graph, op, tensor, name, move.number("parts"))
        if isinstance(seams, Refusal):
            raise TapestryError(seams.reason, where=str(move), why=seams.witness)
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
    def no(reason: str, witness: str = "") -> Refusal:
        return Refusal("overlap", op.outs[0], reason, witness)

    at = graph.producers().get(tensor)
    maker = None if at is None else graph.ops[at]
    if not isinstance(maker, Block) or len(maker.outs) != 1:
        return no(f"'{tensor}' is not the one result of a block operation")
    if single_consumer(graph, tensor) is None:
        others = [graph.ops[i].outs[0] for i in graph.consumers().get(tensor, []) if graph.ops[i] is not op]
        return no(f"'{tensor}' has other readers, which need it as it is", ", ".join(others) or "it is an output")
    if op.splits or maker.splits or as_scan(op) or as_scan(maker):
        return no("one of the two operations is split, or a running state")
    reads = [r for r in op.reads if r.tensor == tensor]
    shapes = {_walk(r, name) for r in reads}
    if len(shapes) != 1 or None in shapes:
        return no(f"'{tensor}' is not read by windows that slide along '{name}' with one step")
    found = next(iter(shapes))
    size = op.ranges.get(name, 0)
    if found is None or not 2 <= parts <= size:
        return no(f"{size} points of '{name}' cannot be cut into {parts} blocks")
    axis, step = found
    rests = [span(r.index[axis] - dim(name) * step, op.ranges) for r in reads]
    first, last = min(lo for lo, _ in rests), max(hi for _, hi in rests)
    if last - first < step:
        return no(f"windows along '{name}' do not overlap", f"each is {last - first + 1} wide, and {step} from the next")
    each = -(-size // parts)
    return _Seams(
        tensor=tensor, maker=maker, dim=name, axis=axis, step=step, each=each, count=-(-size // each), first=first,
        reach=step * (each - 1) + last - first + 1,
    )  # fmt: skip


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
    wide = Tensor(name=name, dtype=out.dtype, shape=tuple(d.size for d in dims))
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
