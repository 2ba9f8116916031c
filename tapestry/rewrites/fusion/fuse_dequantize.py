"""Contractions read integers and floats of 8 bits as they are; zero points go with them, scales behind the sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, Let, call, cast, rewrite, walk
from tapestry.ir.graph import Block, Dim, Inner, Read, names_of, placed
from tapestry.ir.index import const, dim, dims_of, substitute
from tapestry.ir.recognition.contraction import dims_read, factors, narrow, products
from tapestry.ir.recognition.selection_sum import place_read, routed, selection
from tapestry.ir.types import FLOAT8, FLOATS, Tensor
from tapestry.rewrites.core.edit import (
    fresh_dim,
    merge_reads,
    plain_index,
    read_dims,
    shift_args,
    substitute_expr,
    substitute_read,
    unused,
    with_part,
    without_casts,
)
from tapestry.rewrites.core.inline import limits
from tapestry.rewrites.core.matching import Draft, Match, PairRule
from tapestry.rewrites.core.rule import Refusal, refuse, register


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
        return cast(self.value if self.zero is None else cast(self.value, "i32") - self.zero, dtype)


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
    env = placed(maker.dims, read.index)
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
) -> Refusal | None:
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
        if found is None or not found.of_columns or dims_read(new, found.wanted) & names_of(new.inner_dims):
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
    env = placed(maker.dims, op.reads[k].index) | {picked.over.name: dim(over.name)}
    reads = (*op.reads, *(substitute_read(r, env, ranges) for r in maker.reads))
    shift = shift_args(len(op.reads))
    wanted, matrix = (substitute_expr(e, env, ranges, shift) for e in (picked.wanted, picked.picked))
    (body,) = op.body
    product = rewrite(body, lambda x: matrix if isinstance(x, Arg) and x.pos == k else x)
    test = call("eq", wanted, Index(dim(over.name)))
    return merge_reads(
        replace(
            op,
            reduce=(over,),
            monoid="sum",
            reads=reads,
            inner=(Inner(dims=op.reduce, monoid="sum", body=product),),
            body=(call("where", test, Let(0, body.dtype), 0),),
            source=tuple(dict.fromkeys(maker.source + op.source)),
        )
    )
