"""A contraction is computed inside the reduction that reads it: pools behind convolutions, reductions of logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, Let, call, cast, rewrite, size, walk
from tapestry.ir.graph import Block, Dim, Inner, Op, Read
from tapestry.ir.index import const, dim, dims_of, substitute
from tapestry.ir.monoid import MOST_SUMS, number, sums
from tapestry.ir.recognise import (
    MOST_KEPT,
    dims_read,
    factors,
    folded_roles,
    kept,
    narrow,
    place_read,
    products,
    routed,
    selection,
)
from tapestry.ir.states import as_scan
from tapestry.ir.types import FLOAT8, FLOATS, Tensor, itemsize
from tapestry.rewrites.core.edit import (
    fresh_dim,
    inline,
    limits,
    merge_reads,
    nest,
    over,
    plain_index,
    points,
    prune,
    read_dims,
    resolved,
    shift_args,
    substitute_expr,
    substitute_read,
    unused,
    with_part,
    without_casts,
)
from tapestry.rewrites.core.rule import Draft, Match, PairRule, Refusal, refuse, register
from tapestry.rewrites.inline_map import MOST_NODES
from tapestry.rewrites.joined_reductions import Merged, side_by_side


@register
class FuseContraction(PairRule):
    """Compute a contraction, with all that follows it, inside the one reduction that reads it: its result is never written.

    The product becomes an inner reduction, which kernels compute tile by tile. Where windows of the reduction overlap it is
    computed again for each of them, so it is a choice. What the reader finds outside the contraction's cells, such as the minus
    infinity around a maximum pool, stays what it is.

    before:
        graph g
        input x: f32[6, 9]
        input w: f32[9, 5]
        input c: f32[5]
        t: f32[6, 5] = op [i: 6, n: 5 | m: 9 sum]
          reads x[i, m], w[m, n], c[n]
          body x * w
          then max((acc0 + c), 0.0)
        y: f32[3, 5] = op [x0: 3, x1: 5 | r: 3 max]
          reads t[2*x0 + r - 1, x1] else -inf
          body t
        output y
    move: fuse_contraction@y{tensor=t}
    after:
        graph g
        input x: f32[6, 9]
        input w: f32[9, 5]
        input c: f32[5]
        y: f32[3, 5] = op [x0: 3, x1: 5 | r: 3 max]
          reads x[r + 2*x0 - 1, m] when r + 2*x0 - 1 >= 0 else 0.0, w[m, x1], c[x1]
          let [m: 9 sum] x * w
          body where(ge(index(r + 2*x0 - 1), 0), max((let0 + c), 0.0), f32(-inf))
        output y
    legal when: one reduction alone reads the contraction, before it reduces, through one projection that uses all of its
    dimensions; both factors keep dimensions of their own, so that tiles of the product are matrices. A norm, which reads
    elements of the row again, keeps them as the sum that picks the row's own: rows of up to 256 columns, as they fit a tile.
    """

    name = "fuse_contraction"
    phase = "fusion"
    nothing = "that is not written by an operation that it reads"

    def partners(self, draft: Draft, at: int) -> Iterable[str]:
        """What a plain reduction reads."""
        op = draft.block(at)
        return op.inputs if op is not None and op.reduce and not op.inner and not _contracts(op) else ()

    def match(self, draft: Draft, at: int, other: int) -> Match | Refusal | None:
        """The reduction with the contraction as an inner one."""
        op, maker = draft.block(at), draft.block(other)
        if op is None or maker is None or factors(maker) is None or not set(maker.outs) & set(op.inputs):
            return None
        if no := _refused(draft, op, maker):
            return no
        (tensor,) = maker.outs
        whole = _keeping(op, maker)
        if isinstance(whole, Refusal):
            return refuse(f"'{tensor}' is used again after the reduction: {whole.reason}")
        mine = [k for k, r in enumerate(whole.reads) if r.tensor == tensor]
        if no := _again(whole, maker, mine):
            return no
        new = inline(whole, mine[0], nest(maker), draft.tensors)
        if folded_roles(new) is None:
            return refuse(
                "it leaves too few rows or columns of its factors' own: tiles of it would be no matrices", f"'{tensor}'"
            )
        return Match({at: (new,), other: ()})


def _contracts(op: Block) -> bool:
    """Whether a reduction is a contraction itself; a sum of squares is none."""
    return any(dims_read(op, a) != dims_read(op, b) for a, b in products(op) or ())


def _refused(draft: Draft, op: Block, maker: Block) -> Refusal | None:
    """Why a reduction may not compute a contraction that it reads, whatever it does with it."""
    tensor = maker.outs[0]
    if maker.inner or len(maker.outs) != 1:
        return refuse(f"'{tensor}' is no contraction with one result")
    if not op.monoid or not op.reduce or op.inner or _contracts(op) or as_scan(op):
        return refuse("only a plain reduction computes a contraction itself")
    if op.splits or maker.splits:
        return refuse("an operation that is split already is not fused")
    if draft.only_reader(tensor) is None:
        readers = len(draft.readers_of(tensor))
        elsewhere = f"{readers} operations read it" if readers > 1 else "it is an output of the graph"
        return refuse(f"'{tensor}' is needed elsewhere", elsewhere)
    return None


def _again(op: Block, maker: Block, mine: list[int]) -> Refusal | None:
    """Why the contraction, which reads number ``mine`` are of, would be computed more than once, or be too much of it."""
    (tensor,) = maker.outs
    if len(mine) > 1:
        return refuse(f"'{tensor}' is read through {len(mine)} projections: it would be computed for each")
    nodes = size((*op.point, *maker.then))
    if nodes > MOST_NODES:
        return refuse(f"'{op.outs[0]}' would grow too large", f"it would have {nodes} nodes")
    within, own = dims_read(op, Arg(mine[0], "f32")), kept(op.monoid, op.dims, op.reduce, op.body)
    along = [d for d in op.space if d.size > 1 and d.name not in within and not (own and d == own.column)]
    if along:
        return refuse(
            f"'{tensor}' does not vary along '{along[0].name}': it would be computed for each", f"{points(along)} times"
        )
    return None


def _keeping(op: Block, maker: Block) -> Block | Refusal:
    """The reduction with elements that ``then`` reads again as a state that picks them; why that cannot be.

    The state, which is a sum, is of the widest type of the others: it would round more otherwise, for all that the law sees.
    """
    (tensor,) = maker.outs
    again = [k for k in sorted(op.then_reads()) if op.reads[k].tensor == tensor]
    first = [k for k in sorted(op.body_reads()) if op.reads[k].tensor == tensor]
    over = [d for d in op.reduce if d.size > 1]
    if not again:
        return op
    if len(again) > 1 or len(first) != 1 or len(over) != 1 or not op.monoid:
        return refuse("rows are of one dimension, and elements are read at their own place alone")
    if over[0].size > MOST_KEPT:
        return refuse(f"a row of {over[0].size} is more than a tile holds")
    read = op.reads[first[0]]
    for d in op.dims:
        there = substitute_read(read, {over[0].name: dim(d.name)}, op.ranges)
        if d.size != over[0].size or d.name in dims_read(op, Arg(first[0], "f32")) or there != op.reads[again[0]]:
            continue
        x = next(e for out in op.then for e in walk(out) if isinstance(e, Arg) and e.pos == again[0])
        sums = [e.dtype for e in (*op.body, *maker.body) if e.dtype in FLOATS and x.dtype in FLOATS]
        wide = max([x.dtype, *sums], key=itemsize)
        at = call("eq", Index(dim(over[0].name)), Index(dim(d.name)))
        own = call("where", at, cast(Arg(first[0], x.dtype), wide), number(0, wide))
        then = tuple(_picked(e, x, Acc(len(op.body), wide)) for e in op.then)
        return prune(replace(op, monoid=f"{op.monoid}.sum", body=(*op.body, own), then=then))
    return refuse("an element is not read at its own place")


def _picked(e: Expr, x: Arg, own: Acc) -> Expr:
    return rewrite(e, lambda leaf: cast(own, x.dtype) if leaf == x else leaf)


# Contractions that share a factor become one operation with several sums side by side: QKV, gate and up.


@register
class FuseSums(PairRule):
    """Compute contractions of one common factor in one pass over it, each sum with an accumulator of its own.

    What the second does to its sum may use the first one's result at the same point (SwiGLU, a gate): it then never leaves
    the chip. Weights stay the tensors that they were, so that heads and columns are cut as before.

    before:
        graph g
        input x: f32[4, 6]
        input w: f32[6, 3]
        input v: f32[6, 3]
        g: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum]
          reads x[i, m], w[m, n]
          body x * w
          then acc0 * sigmoid(acc0)
        y: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum]
          reads x[i, m], v[m, n], g[i, n]
          body x * v
          then g * acc0
        output y
    move: fuse_sums@y{with=g}
    after:
        graph g
        input x: f32[4, 6]
        input w: f32[6, 3]
        input v: f32[6, 3]
        y: f32[4, 3] = op [i: 4, n: 3 | m: 6 sums2]
          reads x[i, m], w[m, n], v[m, n]
          body x * w, x * v
          then (acc0 * sigmoid(acc0)) * acc1
        output y
    legal when: both run over the same points, one factor is the same tensor through the same projection, the other depends on
    the same dimensions; the second needs the first at most at its own point, and nothing in between needs either; together
    they have at most four sums.
    """

    name = "fuse_sums"
    phase = "fusion"
    second = "with"
    nothing = "no two block operations"

    def named(self, op: Op) -> str:
        """The last result: those before may have been the first operation's."""
        return op.outs[-1]

    def partners(self, draft: Draft, at: int) -> Iterable[str]:
        """For each tensor that a contraction reads, the contraction before it that reads it over as many points."""
        op = draft.block(at)
        if op is None or products(op) is None or op.inner:
            return ()
        sizes = tuple(d.size for d in op.dims), tuple(d.size for d in op.reduce)
        keys = [(t, *sizes) for t in sorted({op.reads[k].tensor for k in op.body_reads()})]
        before = dict.fromkeys(draft.memo[key] for key in keys if key in draft.memo)
        draft.memo |= dict.fromkeys(keys, op.outs[-1])
        return list(before)

    def match(self, draft: Draft, at: int, other: int) -> Match | Refusal | None:
        """Both as one operation, in place of the first or of the second."""
        first, second = draft.block(other), draft.block(at)
        if first is None or second is None:
            return None
        if no := _differ(first, second):
            return no
        early = _early(draft, other, at)
        if early is None:
            return refuse("what is between the two needs the first, and the second needs it")
        env = {b.name: dim(a.name) for a, b in zip(first.space, second.space, strict=True)}
        theirs = over(second, env, first)
        shared = _shared(first, theirs)
        if shared is None:
            return refuse("no factor of theirs is one tensor read through one projection")
        given = {k for k, r in enumerate(theirs.reads) if r.tensor in first.outs}
        if any(theirs.reads[k].index != plain_index(first.dims) or theirs.reads[k].when for k in given) or (
            given & theirs.body_reads()
        ):
            return refuse("the second needs the first at other points than its own")
        needed = [k for k, t in enumerate(first.outs) if t in draft.outputs or set(draft.readers_of(t)) - {at}]
        both = merge_reads(side_by_side(first, theirs, _sums(first, theirs, shared), needed))
        return Match({other: (both,), at: ()} if early else {other: (), at: (both,)})


def _sums(first: Block, second: Block, shared: str) -> Merged:
    """The sums of both side by side."""
    n, shift = len(first.body), shift_args(len(first.reads))
    body = _ordered(first, shared) + tuple(rewrite(e, shift) for e in _ordered(second, shared))
    accs = tuple(Acc(n + k, e.dtype) for k, e in enumerate(second.body))
    return Merged(monoid=sums(len(body)), body=body, first=first.then, accs=accs)


def _differ(first: Block, second: Block) -> Refusal | None:
    if products(first) is None or products(second) is None or first.inner or second.inner:
        return refuse("only sums of products are put side by side")
    if first.splits or second.splits:
        return refuse("an operation that is split already is not fused")
    if len(first.body) + len(second.body) > MOST_SUMS:
        return refuse(f"they would have more than {MOST_SUMS} accumulators")
    if len(first.dims) != len(second.dims) or [d.size for d in first.space] != [d.size for d in second.space]:
        return refuse("they run over different points")
    return None


def _early(draft: Draft, i: int, j: int) -> bool | None:
    """Whether both can be where the first is (all that they read is there), or where the second is (nobody has needed them)."""
    first, second = draft.block(i), draft.block(j)
    if i > j or first is None or second is None:
        return None
    if all(draft.makers.get(t, -1) < i for t in second.inputs if t not in first.outs):
        return True
    return None if any(k < j for t in first.outs for k in draft.readers_of(t)) else False


def _shared(first: Block, second: Block) -> str | None:
    """Text of a factor that every sum of both has, the other factors varying along the same dimensions."""
    pairs = [(op, *f) for op in (first, second) for f in products(op) or ()]
    for candidate in (resolved(e, first) for e in pairs[0][1:]):
        named = [(op, a, b, resolved(a, op), resolved(b, op)) for op, a, b in pairs]
        others = [(op, b if left == candidate else a) for op, a, b, left, right in named if candidate in (left, right)]
        if len(others) == len(pairs) and len({dims_read(op, e) for op, e in others}) == 1:
            return candidate
    return None


def _ordered(op: Block, shared: str) -> tuple[Expr, ...]:
    """The body with the shared factor first in every product."""

    def put(e: Expr, pair: tuple[Expr, Expr]) -> Expr:
        assert isinstance(e, Call)
        if e.fn == "cast":
            return replace(e, args=(put(e.args[0], pair),))
        return e if resolved(pair[0], op) == shared else replace(e, args=pair[::-1])

    pairs = products(op)
    assert pairs
    return tuple(put(e, p) for e, p in zip(op.body, pairs, strict=True))


# Contractions read integers and floats of 8 bits as they are; zero points go with them, scales behind the sum.


@dataclass(frozen=True, slots=True)
class Scaled:
    """``(value - zero)`` of 8 bits, widened, then multiplied and divided by what ``by`` lists."""

    value: Expr
    zero: Expr | None
    by: tuple[tuple[str, Expr], ...] = ()

    @property
    def others(self) -> tuple[Expr, ...]:
        """Everything but the value."""
        return (*([self.zero] if self.zero is not None else []), *(e for _, e in self.by))

    def widened(self, dtype: str) -> Expr:
        """The difference, unscaled."""
        return cast(self.value if self.zero is None else call("sub", cast(self.value, "i32"), self.zero), dtype)


def scaled(e: Expr) -> Scaled | None:
    """An expression as a scaled value of 8 bits; roundings to 16 bits in between, which only lose digits, are left out."""
    if not isinstance(e, Call):
        return None
    if e.fn == "cast" and e.dtype in FLOATS:
        inner = e.args[0]
        if inner.dtype in FLOATS:
            return scaled(inner)
        if inner.dtype in FLOAT8:
            return Scaled(inner, None)
        found = narrow(inner)
        return Scaled(found.value, found.shift) if found else None
    for a, b in (e.args, e.args[::-1]) if e.fn == "mul" else (e.args,) if e.fn == "div" else ():
        if (s := scaled(a)) is not None:
            return replace(s, by=(*s.by, (e.fn, b)))
    return None


@register
class NarrowFactors(PairRule):
    """Let a contraction read what it was made to read dequantised: bytes, for the matrix units that multiply bytes.

    What is made of 8 bits by another operation (quantised there and dequantised at once) is stored in 8 bits.

    before:
        graph g
        input q: i8[4, 6]
        input s: f32[4]
        input w: f32[6, 3]
        x: f32[4, 6] = op [x0: 4, x1: 6]
          reads q[x0, x1], s[x0]
          body cast((cast(q, i32) - i32(5)), f32) * s
        y: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum]
          reads x[i, m], w[m, n]
          body x * w
          then max(acc0, 0.0)
        output y
    move: narrow_factors@y{tensor=x}
    after:
        graph g
        input q: i8[4, 6]
        input s: f32[4]
        input w: f32[6, 3]
        y: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum]
          reads w[m, n], q[i, m], s[i]
          body cast((cast(q, i32) - i32(5)), f32) * w
          then max((acc0 * s), 0.0)
        output y
    legal when: the tensor is a factor of a product under a sum, read through one projection; its scales and zero point do not
    vary along what is summed; where the contraction looks outside it and finds 0, the zero point is known. Scales are finite:
    an infinite one times 0 is a NaN only where the 0 stands alone.
    """

    name = "narrow_factors"
    phase = "fusion"
    nothing = "that is no scaled tensor of 8 bits that a reduction reads"

    def match(self, draft: Draft, at: int, other: int) -> Match | Refusal | None:
        """The contraction on the 8 bits of its factor; what makes the factor, cut in two where it did more, or gone."""
        op, maker = draft.block(at), draft.block(other)
        if op is None or not op.monoid or maker is None or maker.outs[0] not in op.inputs or (s := _result(maker)) is None:
            return None
        if op.splits or maker.splits:
            return refuse("an operation that is split already is not changed")
        (t,), tensors = maker.outs, dict(draft.tensors)
        if op.inner or products(op) is None:
            return refuse(f"'{t}' is not read by a sum of products")
        makers, new = (maker,), ()
        if maker.monoid or not isinstance(s.value, Arg):
            makers, tensor = _in_two(tensors, maker, s)
            new, tensors[tensor.name], s = (tensor,), tensor, _result(makers[-1])
        assert s is not None and isinstance(s.value, Arg)
        one = _moved(tensors, op, makers[-1], s, t)
        if isinstance(one, Refusal):
            return one
        if draft.only_reader(t) == at and t not in one.inputs:
            makers = makers[:-1]
        return Match({other: (*draft.ops(other)[:-1], *makers), at: (*draft.ops(at)[:-1], one)}, new)


def _result(maker: Block) -> Scaled | None:
    """An operation's result as a scaled value of 8 bits."""
    if len(maker.outs) != 1 or (maker.monoid and not maker.then):
        return None
    found = scaled((maker.then if maker.monoid else maker.body)[0])
    if found is None or any(isinstance(x, Acc | Let) for e in found.others for x in walk(e)):
        return None
    return found


def _in_two(tensors: Mapping[str, Tensor], maker: Block, s: Scaled) -> tuple[tuple[Block, Block], Tensor]:
    """An operation in two, with a tensor of 8 bits in between."""
    old = tensors[maker.outs[0]]
    name = unused(f"{old.name}.q", tensors)
    first = replace(maker, outs=(name,), **({"then": (s.value,)} if maker.monoid else {"body": (s.value,)}))
    whole = (maker.then if maker.monoid else maker.body)[0]
    body = with_part(whole, s.value, Arg(len(maker.reads), s.value.dtype))
    reads = (*maker.reads, Read(tensor=name, index=plain_index(maker.dims)))
    second = Block(outs=maker.outs, dims=maker.dims, reads=reads, body=(body,), source=maker.source)
    return (merge_reads(first), merge_reads(second)), Tensor(name=name, dtype=s.value.dtype, shape=old.shape)


def _moved(tensors: Mapping[str, Tensor], op: Block, maker: Block, s: Scaled, t: str) -> Block | Refusal:
    """The contraction reading what a map reads, with the map's scales behind the sum."""
    used = [k for k, r in enumerate(op.reads) if r.tensor == t and k in op.body_reads()]
    if len(used) != 1:
        return refuse(f"'{t}' is read through {len(used)} projections")
    (at,) = used
    fields = _fields(op, at)
    if fields is None:
        return refuse(f"'{t}' is not a factor of its own")
    read, base = op.reads[at], len(op.reads)
    assert isinstance(s.value, Arg)
    env = dict(zip((d.name for d in maker.dims), read.index, strict=True))
    single = {d.name: const(0) for d in op.reduce if d.size == 1}  # behind the sum its dimensions are gone
    fixed = {d: substitute(e, single, op.ranges) for d, e in env.items()}
    moved = [substitute_read(r, env if k == s.value.pos else fixed, op.ranges) for k, r in enumerate(maker.reads)]
    others = [substitute_expr(e, fixed, op.ranges, shift_args(base)) for e in s.others]
    reads = {base + k: r for k, r in enumerate(moved)}
    if no := _varies(op, others, reads, t) or _outside(tensors, op, read, s, others, reads, t):
        return no
    place = base + s.value.pos
    if read.other is not None:
        moved[s.value.pos] = _guarded(tensors, op, read, reads[place], s.zero)
    zero = others[0] if s.zero is not None else None
    by = tuple((fn, e) for (fn, _), e in zip(s.by, others[s.zero is not None :], strict=True))
    now = Scaled(Arg(place, s.value.dtype), zero, by)
    body = tuple(_with(e, at, now) if f in fields else e for f, e in enumerate(op.body))

    def after(x: Expr) -> Expr:
        if isinstance(x, Acc) and x.field in fields:
            for fn, e in by:
                x = call(fn, x, cast(e, x.dtype))
        return x

    ends = op.then or tuple(Acc(f, e.dtype) for f, e in enumerate(op.body))
    then = tuple(rewrite(e, after) for e in ends) if by else op.then
    source = tuple(dict.fromkeys(maker.source + op.source))
    return merge_reads(replace(op, reads=(*op.reads, *moved), body=body, then=then, source=source))


def _fields(op: Block, at: int) -> frozenset[int] | None:
    """The sums that have read ``at`` as a factor; ``None`` where it stands anywhere else in the body."""
    out: set[int] = set()
    for f, pair in enumerate(products(op) or ()):
        mine = [any(isinstance(x, Arg) and x.pos == at for x in walk(e)) for e in pair]
        if all(mine):
            return None
        if any(mine):
            if not _bare(pair[mine.index(True)], at):
                return None
            out.add(f)
    return frozenset(out)


def _bare(e: Expr, at: int) -> bool:
    """Whether a factor is a read, but for casts between floats."""
    e = without_casts(e, FLOATS)
    return isinstance(e, Arg) and e.pos == at


def _with(e: Expr, at: int, now: Scaled) -> Expr:
    """A product with one factor replaced."""
    assert isinstance(e, Call)
    if e.fn == "mul":
        return call("mul", *(now.widened(a.dtype) if _bare(a, at) else a for a in e.args))
    return Call(e.fn, tuple(_with(a, at, now) for a in e.args), e.dtype)


def _varies(op: Block, others: list[Expr], reads: Mapping[int, Read], t: str) -> Refusal | None:
    """Whether a scale or zero point varies along what is summed."""
    summed = {d.name for d in op.reduce if d.size > 1}
    for x in (x for e in others for x in walk(e)):
        dims = dims_of(x.aff) if isinstance(x, Index) else read_dims(reads[x.pos]) if isinstance(x, Arg) else frozenset[str]()
        if found := sorted(dims & summed):
            return refuse(f"scales or zero points of '{t}' vary along {', '.join(found)}, which is summed")
    return None


def _outside(
    tensors: Mapping[str, Tensor], op: Block, read: Read, s: Scaled, others: list[Expr], reads: Mapping[int, Read], t: str
) -> Refusal | None:  # fmt: skip
    """Why what the contraction finds outside the tensor cannot be said in 8 bits."""
    if read.other is None:
        return None
    assert isinstance(s.value, Arg)
    if read.other != 0:
        return refuse(f"'{t}' is read as {read.other} outside its cells")
    if s.zero is not None and not isinstance(s.zero, Const):
        return refuse(f"'{t}' is read as 0 outside its cells, and its zero point is known only when it runs")
    for x in (x for e in others for x in walk(e) if isinstance(x, Arg)):
        r = reads[x.pos]
        if r.other is None and limits(r.index, tensors[r.tensor].shape, op.ranges):
            return refuse(f"'{t}' is read outside its cells, where it has no scale")
    return None


def _guarded(tensors: Mapping[str, Tensor], op: Block, read: Read, inner: Read, zero: Expr | None) -> Read:
    """The read of the 8 bits, which gives the zero point where the contraction found 0."""
    other = int(zero.value) if isinstance(zero, Const) else 0
    guards = (*read.when, *inner.when)
    if inner.index != read.index or tensors[inner.tensor].shape != tensors[read.tensor].shape:
        guards = (*guards, *limits(read.index, tensors[read.tensor].shape, op.ranges))
    return replace(inner, when=tuple(dict.fromkeys(guards)), other=other)


# Rows are multiplied by the matrix that each picks, without a copy of that matrix for each row: a mixture of experts.


@register
class RouteProducts(PairRule):
    """Multiply rows by the matrix that each picks, and pick the product instead of the matrix.

    A matrix for each row is never written: products go by groups of rows that pick the same one, and the dimension of the
    matrices can be cut over devices, as experts are.

    before:
        graph g
        input x: f32[5, 3]
        input w: f32[4, 6, 3]
        input e: i64[5]
        t: f32[5, 6, 3] = op [x0: 5, x1: 6, x2: 3 | v: 4 sum]
          reads w[v, x1, x2], e[x0]
          body where(eq(e, index(v)), w, 0.0)
        y: f32[5, 6] = op [i: 5, n: 6 | m: 3 sum]
          reads x[i, m], t[i, n, m]
          body x * t
          then max(acc0, 0.0)
        output y
    move: route_products@y{tensor=t}
    after:
        graph g
        input x: f32[5, 3]
        input w: f32[4, 6, 3]
        input e: i64[5]
        y: f32[5, 6] = op [i: 5, n: 6 | v: 4 sum]
          reads x[i, m], w[v, n, m], e[i]
          let [m: 3 sum] x * w
          body where(eq(e, index(v)), let0, 0.0)
          then max(acc0, 0.0)
        output y
    legal when: the product alone reads what is picked, as a factor, and everywhere inside it; which matrix is picked does not
    vary along what the product sums or along its columns. Places are places of the matrices: for one outside, 0 is the result,
    where 0 times an infinite row would be NaN.
    """

    name = "route_products"
    phase = "simplify"
    nothing = "that is no matrix picked for each row of a product"

    def match(self, draft: Draft, at: int, other: int) -> Match | Refusal | None:
        """The product of the matrices themselves, of which one is picked."""
        op, maker = draft.block(at), draft.block(other)
        picked = selection(maker) if maker is not None else None
        if op is None or maker is None or picked is None or len(maker.outs) != 1 or op.inner or factors(op) is None:
            return None
        t = maker.outs[0]
        mine = [k for k, r in enumerate(op.reads) if r.tensor == t]
        if maker.lowers or op.splits or maker.splits or picked.shift:
            return refuse(f"'{t}' is more than what is picked, or split already")
        if draft.only_reader(t) is None or len(mine) != 1:
            return refuse(f"'{t}' is needed elsewhere")
        read = op.reads[mine[0]]
        if read.when or mine[0] not in op.body_reads() or mine[0] in op.then_reads():
            return refuse(f"'{t}' is read outside its cells, or after the sum")
        if place_read(picked.wanted, picked.over.size) is None:
            return refuse(f"the place in '{t}' is computed: whether it is one of the matrices' is not known")
        new = _routed(op, maker, mine[0])
        found = routed(new)
        if found is None or not found.of_columns or dims_read(new, found.wanted) & {d.name for d in new.inner_dims}:
            return refuse(f"rows do not pick a matrix each: '{t}' has no columns of its own, or the pick varies along them")
        if not dims_read(new, found.wanted) & dims_read(new, found.rows):
            return refuse("one matrix is picked for several rows alike: look it up first")
        return Match({at: (new,), other: ()})


def _routed(op: Block, maker: Block, k: int) -> Block:
    """The product with what read ``k`` picks inside, and the pick around it."""
    picked = selection(maker)
    assert picked is not None
    over = Dim(fresh_dim(op, picked.over.name), picked.over.size)
    ranges = op.ranges | {over.name: over.size}
    env = dict(zip((d.name for d in maker.dims), op.reads[k].index, strict=True)) | {picked.over.name: dim(over.name)}
    reads = (*op.reads, *(substitute_read(r, env, ranges) for r in maker.reads))
    shift = shift_args(len(op.reads))
    wanted, matrix = (substitute_expr(e, env, ranges, shift) for e in (picked.wanted, picked.picked))
    (body,) = op.body
    product = rewrite(body, lambda x: matrix if isinstance(x, Arg) and x.pos == k else x)
    test = call("eq", wanted, Index(dim(over.name)))
    return merge_reads(replace(
        op, reduce=(over,), monoid="sum", reads=reads, inner=(Inner(dims=op.reduce, monoid="sum", body=product),),
        body=(call("where", test, Let(0, body.dtype), number(0, body.dtype)),),
        source=tuple(dict.fromkeys(maker.source + op.source)),
    ))  # fmt: skip
