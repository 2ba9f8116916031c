"""Replace a read by what computes it: the step that every fusion is made of.

`inline` puts a producer into an operation that reads it. `nest` turns a reduction into a map that computes the reduction
whole at each of its points, so that `inline` can put it into another reduction. Whether that is legal, and whether it pays,
is for the rules to say; here is only how it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, Let, call, number, rewrite
from tapestry.ir.graph import Block, Guard, Inner, Read, map_exprs, placed, ranges_of
from tapestry.ir.index import Aff, Ranges, const, dim, span
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.edit import fresh_dims, merge_reads, substitute_expr, substitute_read
from tapestry.rewrites.core.tile_footprint import implied


def inline(reader: Block, k: int, producer: Block, tensors: Mapping[str, Tensor]) -> Block:
    """The reader with read number ``k`` computed in place by the producer's body.

    Dimensions of the producer become the index expressions of the read, so that projections compose. Equal reads go with
    it; a tensor that is read through other projections too takes a call for each. The result has equal reads merged, unused
    ones dropped, and the ONNX nodes of both as its source.

    - The producer is a map: its body takes the place of the read, and its inner reductions (see `nest`) become the reader's.
      A read with a value of its own outside the producer's cells keeps that value: ``where(inside, body, other)``, unless the
      reader looks at it inside alone. The producer's reads are guarded as the read was.
    - The producer is a reduction: the reader must be a map. It becomes the reduction, over dimensions with fresh names,
      and what it did becomes ``then``. It reads results of the producer at one row (``k``'s) alone, and never outside.

    Args:
        tensors: of the graph; needed are those that the producer reads.
    """
    read, reduces = reader.reads[k], producer.monoid is not None
    assert not reduces or (reader.monoid is None and read.other is None)
    own = fresh_dims((*producer.reduce, *producer.inner_dims), reader.space)
    ranges = reader.ranges | ranges_of(own.values())
    env = placed(producer.dims, read.index) | {n: dim(d.name) for n, d in own.items()}
    inside = _inside(read, producer, reader.ranges)
    theirs = [_guarded(substitute_read(r, env, ranges), inside, ranges, tensors) for r in producer.reads]
    # the reads of a reduction come first, as its body does
    here, there = (len(theirs), 0) if reduces else (0, len(reader.reads))

    def moved(e: Expr) -> Expr:
        return substitute_expr(e, env, ranges, lambda x: _shifted(x, there, len(reader.inner)))

    results = {t: moved(e) for t, e in zip(producer.outs, producer.then if reduces else producer.body, strict=True)}
    at = {j: r for j, r in enumerate(reader.reads) if r.tensor in results and (reduces or _alike(r, read))}
    if inside and read.other is not None and not _only_inside(reader, at, inside):
        test, other = _test(inside), read.other
        results = {t: call("where", test, e, number(other, e.dtype)) for t, e in results.items()}
    values = {j: results[r.tensor] for j, r in at.items()}

    def put(x: Expr) -> Expr:
        return values[x.pos] if isinstance(x, Arg) and x.pos in values else _shifted(x, here, 0)

    new = map_exprs(reader, lambda e: rewrite(e, put))
    if reduces:
        reduce = tuple(own[d.name] for d in producer.reduce)
        new = replace(new, reduce=reduce, monoid=producer.monoid, body=tuple(map(moved, producer.body)), then=new.body)
    inner = tuple(Inner(dims=tuple(own[d.name] for d in s.dims), monoid=s.monoid, body=moved(s.body)) for s in producer.inner)
    reads = (*theirs, *reader.reads) if reduces else (*reader.reads, *theirs)
    source = tuple(dict.fromkeys(producer.source + reader.source))
    return merge_reads(replace(new, inner=new.inner + inner, reads=reads, source=source))


def nest(op: Block) -> Block:
    """A reduction of one field as a map that computes it whole at each of its points, as an inner reduction.

    That is no operation of a graph: `inline` puts it into a reduction, which then has the inner reduction.
    """
    assert op.monoid and len(op.body) == 1 and not op.inner
    body = tuple(rewrite(e, lambda x: Let(0, x.dtype) if isinstance(x, Acc) else x) for e in op.then)
    inner = Inner(dims=op.reduce, monoid=op.monoid, body=op.body[0])
    return replace(op, reduce=(), monoid=None, inner=(inner,), body=body, then=())


def limits(index: Iterable[Aff], shape: Sequence[int], ranges: Ranges) -> list[Guard]:
    """The conditions under which an index is inside a tensor, without those that always hold."""
    out: list[Guard] = []
    for e, n in zip(index, shape, strict=True):
        lo, hi = span(e, ranges)
        out += [Guard(e, "ge")] if lo < 0 else []
        out += [Guard(const(n - 1) - e, "ge")] if hi >= n else []
    return out


def _alike(a: Read, b: Read) -> bool:
    """Whether two reads are of one place (by text, which tells 0.0 from -0.0)."""
    return repr(replace(a, tensor=b.tensor)) == repr(b)


def _shifted(x: Expr, reads: int, lets: int) -> Expr:
    if isinstance(x, Arg):
        return replace(x, pos=x.pos + reads)
    return replace(x, pos=x.pos + lets) if isinstance(x, Let) else x


def _inside(read: Read, producer: Block, ranges: Ranges) -> list[Guard]:
    """When a read with a value of its own is of one of the producer's cells; nothing for one that always is."""
    if read.other is None:
        return []
    return list(dict.fromkeys([*limits(read.index, [d.size for d in producer.dims], ranges), *read.when]))


def _guarded(read: Read, inside: list[Guard], ranges: Ranges, tensors: Mapping[str, Tensor]) -> Read:
    """A read of the producer, safe where the reader looks outside the producer's cells; whatever it gives there."""
    if not inside:
        return read
    tensor = tensors[read.tensor]
    if not limits(read.index, tensor.shape, ranges):
        return read
    other = number(0, tensor.dtype).value if read.other is None else read.other
    return replace(read, when=tuple(dict.fromkeys([*read.when, *inside])), other=other)


def _test(inside: list[Guard]) -> Expr:
    return reduce(lambda a, b: a & b, (call(g.op, Index(g.aff), 0) for g in inside))


def _only_inside(reader: Block, at: Mapping[int, Read], inside: list[Guard]) -> bool:
    """Whether the value of some reads is used inside alone: under choices that imply it (asked of isl)."""

    def safe(e: Expr, given: tuple[Guard, ...]) -> bool:
        if isinstance(e, Arg):
            return e.pos not in at or all(implied(reader, given, g) for g in inside)
        if not isinstance(e, Call):
            return True
        if e.fn == "where":
            yes, no = _conditions(e.args[0])
            return safe(e.args[0], given) and safe(e.args[1], (*given, *yes)) and safe(e.args[2], (*given, *no))
        return all(safe(a, given) for a in e.args)

    return all(safe(e, ()) for e in (*reader.point, *reader.then))


def _conditions(test: Expr) -> tuple[tuple[Guard, ...], tuple[Guard, ...]]:
    """What holds where a comparison of an index with a number does, and where it does not."""
    if not isinstance(test, Call) or len(test.args) != 2:
        return (), ()
    left, right = test.args
    if test.fn == "and":
        return _conditions(left)[0] + _conditions(right)[0], ()
    if not isinstance(left, Index) or not isinstance(right, Const):
        return (), ()
    more, less = left.aff - int(right.value), const(int(right.value)) - left.aff
    holds = {"lt": less - 1, "le": less, "gt": more - 1, "ge": more}.get(test.fn)
    if holds is None:
        return ((Guard(more, "eq"),), ()) if test.fn == "eq" else ((), ())
    return (Guard(holds, "ge"),), (Guard(const(-1) - holds, "ge"),)
