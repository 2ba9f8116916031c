"""In which order an intermediate tensor has its axes: channels last, and heads beside each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tapestry.ir.expr import Index, arg_positions, walk
from tapestry.ir.graph import Block, Dim, Op, Read, names_of, points, ranges_of
from tapestry.ir.index import Aff, const, dim, dims_of, span
from tapestry.ir.recognition.contraction import products
from tapestry.rewrites.core.edit import fresh_dim, reindex, results, unused
from tapestry.rewrites.core.matching import Candidate, Draft, Match, MatchRule
from tapestry.rewrites.core.rule import Move, Refusal, refuse, register

Order = tuple[tuple[int, ...], ...]
"""For each new axis the old ones that it is made of: one, or several that are joined, the slowest first."""


@register
class LayOut(MatchRule):
    """Hold a tensor with its axes in another order, or with some of them joined to one.

    A matrix unit's loads go along the summed axis, so that a convolution wants its input with channels last. Projections of
    attention that are scaled have their heads as an axis; with heads and features as one they run over the same points as
    those that are not, and `fuse_sums` puts them side by side.

    before:
        graph g
        input x: f16[2, 5]
        input w: f16[5, 6]
        t: f16[3, 2, 2] = op [h: 3, i: 2, d: 2 | m: 5 sum]
          reads x[i, m], w[m, 2*h + d]
          body cast(x, f32) * cast(w, f32)
          then cast(acc0, f16) * f16(0.5)
        y: f16[2] = op [i: 2 | d: 2 sum]
          reads t[1, i, d]
          body cast(t, f32)
          then cast(acc0, f16)
        output y
    move: lay_out@t{axes=1.0+2}
    after:
        graph g
        input x: f16[2, 5]
        input w: f16[5, 6]
        t.laid: f16[2, 6] = op [i: 2, n: 6 | m: 5 sum]
          reads x[i, m], w[m, n]
          body cast(x, f32) * cast(w, f32)
          then cast(acc0, f16) * f16(0.5)
        y: f16[2] = op [i: 2 | d: 2 sum]
          reads a0 = t.laid[i, d + 2]
          body cast(a0, f32)
          then cast(acc0, f16)
        output y
    legal when: the tensor is no output of the graph, and is made and read by block operations that are not split; axes that are
    joined are used together alone by what makes it, and no reader looks beyond their ends.
    """

    name = "lay_out"
    phase = "fusion"
    exact = True
    nothing = "it has no other order of axes"
    backwards = True
    again = True

    def candidates(self, draft: Draft, at: int, move: Move | None) -> Iterator[Candidate | Refusal]:
        """The orders that its readers want, and the one that joins what it uses together; or the one asked for."""
        op = draft.block(at)
        if op is None or not op.dims:
            return
        readers = {i: draft.op(i) for t in op.outs for i in draft.readers_of(t)}
        for order in dict.fromkeys(_wished(op, readers.values()) if move is None else [_order_of(move.text("axes"))]):
            result = _laid(draft, at, op, readers, order)
            yield result if isinstance(result, Refusal) else ((("axes", _order_text(order)),), result)


def _order_text(order: Order) -> str:
    return ".".join("+".join(map(str, axes)) for axes in order)


def _order_of(text: str) -> Order:
    return tuple(tuple(map(int, re.findall(r"\d+", part))) for part in text.split("."))


def _laid(draft: Draft, at: int, op: Block, readers: dict[int, Op | None], order: Order) -> Match | Refusal:
    if sorted(a for axes in order for a in axes) != [*range(len(op.dims))] or order == _plain(op):
        return refuse("it is no other order of the axes", _order_text(order))
    if set(op.outs) & draft.outputs or not readers:
        return refuse("it is an output of the graph, or nobody reads it", f"'{op.outs[0]}'")
    if op.splits or any(not isinstance(r, Block) or r.splits for r in readers.values()):
        return refuse("an opaque or split operation has it as it is")
    joined = [axes for axes in order if len(axes) > 1]
    for axes in joined:
        if not _digits_of_one(op, [op.dims[a] for a in axes]):
            return refuse("the axes are not used together alone", " and ".join(op.dims[a].name for a in axes))
    names: dict[str, str] = {}
    for t in op.outs:
        names[t] = unused(f"{t}.laid", {*draft.tensors, *names.values()})
    moved: dict[int, tuple[Op, ...]] = {}
    for i, reader in readers.items():
        assert isinstance(reader, Block)
        found = [_read(r, reader, names, op, order) if r.tensor in names else r for r in reader.reads]
        if any(r is None for r in found):
            return refuse("a reader looks beyond the end of an axis that is joined", f"'{reader.outs[0]}'")
        moved[i] = (replace(reader, reads=tuple(r for r in found if r is not None)),)
    made = replace(_over(op, order), outs=tuple(names.values()))
    return Match({at: (made,), **moved}, results(made))


def _plain(op: Block) -> Order:
    return tuple((a,) for a in range(len(op.dims)))


def _over(op: Block, order: Order) -> Block:
    """The operation over the axes in another order."""
    env, dims = dict[str, Aff](), list[Dim]()
    for axes in order:
        old = [op.dims[a] for a in axes]
        new = old[0] if len(old) == 1 else Dim(fresh_dim(op, "n"), points(old))
        dims.append(new)
        if len(old) > 1:  # used together alone, so that the last one may stand for all
            env |= {d.name: const(0) for d in old[:-1]} | {old[-1].name: dim(new.name)}
    return replace(reindex(op, env, (*dims, *op.reduce)), dims=tuple(dims))


def _read(r: Read, reader: Block, names: dict[str, str], op: Block, order: Order) -> Read | None:
    """A reader's look at the tensor in the new order; ``None`` where it may look beyond an axis that is joined."""
    index, ranges = list[Aff](), {**reader.ranges, **ranges_of(reader.inner_dims)}
    for axes in order:
        place = const(0)
        for a in axes:
            low, high = span(r.index[a], ranges)
            if len(axes) > 1 and (low < 0 or high >= op.dims[a].size):
                return None
            place = place * op.dims[a].size + r.index[a]
        index.append(place)
    return replace(r, tensor=names[r.tensor], index=tuple(index))


def _digits_of_one(op: Block, dims: Sequence[Dim]) -> bool:
    """Whether an operation uses some dimensions only as the places of one that they would be the digits of."""
    steps = [points(dims[k + 1 :]) for k in range(len(dims))]
    affs = [e for r in op.reads for e in (*r.index, *(g.aff for g in r.when))]
    affs += [x.aff for e in (*op.point, *op.then) for x in walk(e) if isinstance(x, Index)]
    names = names_of(dims)
    return all(
        not dims_of(e) & names
        or (e.is_affine and all(e.coef(d.name) == s * e.coef(dims[-1].name) for d, s in zip(dims, steps, strict=True)))
        for e in affs
    )


def _wished(op: Block, readers: Sequence[Op | None] | object) -> Iterator[Order]:
    """Orders that readers want: the summed axis last, or axes as they go through them; then heads and features joined."""
    plain = range(len(op.dims))
    looks = [(r, x) for x in readers if isinstance(x, Block) for r in x.reads if r.tensor in op.outs]  # type: ignore[union-attr]
    for read, reader in looks:
        if (a := gathered(read, reader)) is not None:
            yield (*((b,) for b in plain if b != a), (a,))
    for read, reader in looks:
        at = {d.name: k for k, d in enumerate(reader.dims) if d.size > 1}
        walked = [[at[n] for n in dims_of(e) if n in at] for e in read.index]
        if all(len(w) == 1 for w in walked) and len({w[0] for w in walked}) == len(walked):
            yield tuple((a,) for a in sorted(plain, key=lambda a: walked[a][0]))
    for a in plain:
        for b in plain[a + 1 :]:
            pair, size = (op.dims[a].name, op.dims[b].name), op.dims[b].size
            if any(e.coef(pair[1]) and e.coef(pair[0]) == size * e.coef(pair[1]) for r in op.reads for e in r.index):
                yield (*((c,) for c in plain if c not in (a, b)), (a, b))


def gathered(read: Read, reader: Block) -> int | None:
    """The axis that a contraction sums a factor along, where that is not the last one: its loads go from row to row."""
    position, pairs = next(k for k, r in enumerate(reader.reads) if r is read), products(reader)
    if not pairs or reader.inner or position not in reader.body_reads():
        return None
    if any(len(arg_positions(pair)) < 2 for pair in pairs):
        return None  # a sum of one tensor
    summed = {d.name for d in reader.reduce if d.size > 1}
    along = [a for a, e in enumerate(read.index) if e.is_dim and dims_of(e) <= summed]
    return along[-1] if along and along[-1] != len(read.index) - 1 else None
