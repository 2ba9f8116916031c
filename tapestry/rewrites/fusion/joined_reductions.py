"""Two reductions over the same points as one operation: how they correspond, what both read, what becomes of their results.

Which monoid the one operation has is the rules' business (`fuse_nested`, `fuse_product`); here is all that they share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tapestry.ir.expr import Acc, Arg, Expr, rewrite
from tapestry.ir.graph import Block, Op, Read, placed, shape_of
from tapestry.ir.index import Aff, const, dim, substitute
from tapestry.ir.recognition.contraction import factors
from tapestry.ir.recognition.running_state import as_scan
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.edit import merge_reads, plain_index, read_dims, shift_args, unused, without_units
from tapestry.rewrites.core.inline import inline
from tapestry.rewrites.core.matching import Draft, Match
from tapestry.rewrites.core.rule import Refusal, refuse

Env = Mapping[str, Aff]
MOST_VISITED = 256  # operations looked at to tell whether one reduction needs another


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The state of the one operation, and the results of both in terms of it.

    Attributes:
        body: the lifted fields, over the reads of the first (moved) and then those of the second.
        first: ``then`` of the first, over the new state and its own reads (moved).
        accs: what the fields of the second are in the new state.
    """

    monoid: str
    body: tuple[Expr, ...]
    first: tuple[Expr, ...]
    accs: tuple[Expr, ...]


def reduction(op: Op) -> bool:
    """Whether an operation is a reduction that may be joined to another one at all."""
    without_units = isinstance(op, Block) and bool(op.reduce) and op.monoid is not None and not op.inner and not op.splits
    return without_units and as_scan(op) is None and all(d.size for d in op.space)


def aligned(a: Block, b: Block) -> dict[str, Aff] | None:
    """The dimensions of one reduction as those of another, in order and by size; ``None`` where they differ. Those of size 1
    do not matter."""
    env: dict[str, Aff] = {}
    for mine, theirs in ((a.dims, b.dims), (a.reduce, b.reduce)):
        if shape_of(mine) != shape_of(theirs):
            env |= {d.name: const(0) for d in mine if d.size == 1}
            mine, theirs = (tuple(d for d in dims if d.size > 1) for dims in (mine, theirs))
        if shape_of(mine) != shape_of(theirs):
            return None
        env |= placed(mine, plain_index(theirs))
    return env


@lru_cache(maxsize=1 << 12)
def swept(op: Block) -> frozenset[Read]:
    """What the body reads along the reduced dimensions."""
    along = {d.name for d in op.reduce if d.size > 1}
    reads = (without_units(op.reads[k], op) for k in op.body_reads())
    return frozenset(r for r in reads if along & read_dims(r))


def unlike(a: Block, b: Block) -> Refusal | None:
    """Why two reductions, the first in the dimensions of the second, do not go once over the same input."""
    mine, theirs = swept(a), swept(b)
    if not (mine <= theirs or theirs <= mine) or not mine & theirs:
        return refuse("they go over different inputs")
    space = {d.name for d in b.space if d.size > 1}
    if not any(space <= read_dims(r) for r in mine & theirs):
        return refuse("what both read is used in several rows")
    for pair in (factors(a), factors(b)):
        if pair is not None and {type(e) for e in pair} == {Arg} and pair[0] != pair[1]:
            return refuse("one of them is a contraction")
    return None


def opened(draft: Draft, op: Block, first: Block) -> Block:
    """The reduction with the maps written out that stand between it and the results of an earlier one."""
    for _ in range(4):
        for k in sorted(op.body_reads()):
            maker = draft.maker(op.reads[k].tensor)
            if maker is None or maker.monoid or len(maker.outs) != 1 or maker.splits:
                continue
            if op.reads[k].other is None and (set(maker.inputs) & set(first.outs) or _between(draft, maker, first)):
                op = inline(op, k, maker, draft.tensors)
                break
        else:
            return op
    return op


def _between(draft: Draft, maker: Block, first: Block) -> bool:
    """Whether a map reads another map that reads what an earlier reduction makes."""
    behind = (draft.maker(t) for t in maker.inputs)
    return any(m is not None and not m.monoid and bool(set(first.outs) & set(m.inputs)) for m in behind)


def needs(draft: Draft, op: Block, first: int, second: int) -> Refusal | None:
    """Why an operation at ``second`` cannot run together with the one at ``first``: what it reads is made from what the first
    makes."""
    one = draft.block(first)
    inputs = set(op.inputs)
    queue = [i for t in (one.outs if one else ()) for i in draft.readers_of(t) if i < second]
    seen = set(queue)
    while queue:
        if len(seen) > MOST_VISITED:
            return refuse("too much depends on the first one to tell whether the second does")
        reader = draft.op(queue.pop())
        for t in reader.outs if reader else ():
            if t in inputs:
                return refuse(f"'{t}', made from the result of the first, is read by the second")
            more = [i for i in draft.readers_of(t) if i < second and i not in seen]
            seen |= set(more)
            queue += more
    return None


def joined(draft: Draft, at: tuple[int, int], env: Env, parts: tuple[Block, Block], merged: Merged) -> Match:
    """The one operation in place of the second; ``parts`` are the first (in the second's dimensions) and the second (maps
    written out)."""
    a, b = parts
    old = draft.block(at[0])
    assert old is not None
    needed = [k for k, t in enumerate(old.outs) if t in draft.outputs or set(draft.readers_of(t)) - {at[1]}]
    op = merge_reads(side_by_side(a, b, merged, needed))
    shape, sizes = shape_of(b.dims), shape_of(old.dims)
    if sizes == shape:
        return Match({at[0]: (), at[1]: (op,)})
    back = {str(e): d.name for d in old.dims if (e := env[d.name]).terms}
    index = tuple(dim(back[d.name]) if d.name in back else const(0) for d in b.dims)
    views, tensors = list[Block](), list[Tensor]()
    for k in needed:
        view, tensor = reshaped(draft, old.outs[k], old, index, shape)
        views.append(view)
        tensors.append(tensor)
    op = replace(op, outs=(*(t.name for t in tensors), *b.outs))
    return Match({at[0]: (), at[1]: (op, *views)}, tuple(tensors))


def side_by_side(a: Block, b: Block, merged: Merged, needed: Sequence[int]) -> Block:
    """Two reductions over the same dimensions as one, with those results of the first that are ``needed``; what the second
    does after its reduction may refer to results of the first."""
    shift, results = shift_args(len(a.reads)), dict(zip(a.outs, merged.first, strict=True))

    def after(x: Expr) -> Expr:
        if isinstance(x, Acc):
            return merged.accs[x.field]
        return results[t] if isinstance(x, Arg) and (t := b.reads[x.pos].tensor) in results else shift(x)

    return replace(
        b,
        outs=(*(a.outs[k] for k in needed), *b.outs),
        monoid=merged.monoid,
        reads=a.reads + b.reads,
        body=merged.body,
        then=(*(merged.first[k] for k in needed), *(rewrite(e, after) for e in b.then)),
        source=tuple(dict.fromkeys(a.source + b.source)),
    )


def reshaped(draft: Draft, out: str, op: Block, index: tuple[Aff, ...], shape: tuple[int, ...]) -> tuple[Block, Tensor]:
    """A view that gives a result its own shape, that of ``op``, when it is computed in another one, and the new tensor."""
    tensor = replace(draft.tensors[out], name=unused(f"{out}.rows", draft.tensors), shape=shape, kind="value")
    read = Read(tensor=tensor.name, index=index)
    return Block(outs=(out,), dims=op.dims, reads=(read,), body=(Arg(0, tensor.dtype),), source=op.source), tensor


def at_rows(read: Read, a: Block, env: Env, b: Block) -> bool:
    """Whether a read of a result of the first is of the row that the second is at."""
    one = {d.name: const(0) for d in b.space if d.size == 1}
    want = tuple(substitute(env[d.name], one, b.ranges) for d in a.dims)
    return without_units(read, b).index == want and read.other is None
