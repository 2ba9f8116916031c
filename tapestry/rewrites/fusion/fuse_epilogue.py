"""Reduction-map fusion: a map that reads each reduced value once becomes the reduction's ``then``."""

from __future__ import annotations

from collections.abc import Iterable

from tapestry.ir import space
from tapestry.ir.graph import Block, Read, points
from tapestry.ir.recognition.running_state import as_scan
from tapestry.ir.recognition.state import layered
from tapestry.rewrites.core.edit import MOST_DEPTH, fresh_dims, renamed_dims, too_deep
from tapestry.rewrites.core.inline import inline
from tapestry.rewrites.core.matching import Draft, Match, PairRule
from tapestry.rewrites.core.rule import Refusal, refuse, register
from tapestry.rewrites.fusion.fuse_rows import along_columns
from tapestry.rewrites.fusion.row_columns import rows


@register
class FuseEpilogue(PairRule):
    """Put a map into the reduction that it reads: bias, activation, residual, normalisation by a reduced value.

    before:
        graph g
        input x: f32[4, 6]
        input w: f32[6, 3]
        input c: f32[3]
        t: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum]
          reads x[i, m], w[m, n]
          body x * w
        y: f32[4, 3] = op [x0: 4, x1: 3]
          reads t[x0, x1], c[x1]
          body tanh(t + c)
        output y
    move: fuse_epilogue@y{tensor=t}
    after:
        graph g
        input x: f32[4, 6]
        input w: f32[6, 3]
        input c: f32[3]
        y: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum]
          reads x[i, m], w[m, n], c[n]
          body x * w
          then tanh((acc0 + c))
        output y
    legal when: the map is the reduction's only reader and reads it by a bijection (asked of isl), so that each reduced
    value is used at exactly one point.
    """

    name = "fuse_epilogue"
    phase = "simplify"
    nothing = "no reduction with that reader alone"

    @property
    def reach(self) -> int:
        """See `MatchRule.reach`."""
        return 1

    def partners(self, draft: Draft, at: int) -> Iterable[str]:
        """Reductions that a map alone reads; the one with most points first."""
        op = draft.block(at)
        makers = {t: made for t in (op.inputs if op else ()) if (made := draft.maker(t)) is not None}
        return sorted(makers, key=lambda t: (points(makers[t].space), t), reverse=True)

    def match(self, draft: Draft, at: int, other: int) -> Match | Refusal | None:
        """The reduction with the map as its ``then``."""
        op, maker = draft.block(at), draft.block(other)
        if op is None or op.monoid or maker is None or not maker.monoid:
            return None
        if all(draft.only_reader(t) != at for t in maker.outs):
            return None
        return _refused(op, maker) or _fused(draft, at, other, op, maker)


def _refused(op: Block, maker: Block) -> Refusal | None:
    """Why a map may not become the reduction's ``then``."""
    if len(maker.outs) != 1:
        return refuse("only a map becomes the 'then' of a reduction with one result")
    if op.splits or maker.splits:
        return refuse("an operation that is split already is not fused")
    (tensor,) = maker.outs
    mine = {r for r in op.reads if r.tensor == tensor}
    if len(mine) > 1 or any(r.other is not None for r in mine):
        return refuse(f"'{tensor}' is not read through one unguarded projection")
    (read,) = mine
    if too_deep(op.body, maker.then):
        return refuse("the expression would be nested too deeply", f"at most {MOST_DEPTH} calls inside each other")
    cells = points((*maker.dims, *maker.inner_dims))
    if cells != points(op.dims):
        return refuse(f"'{tensor}' has {cells} cells, its reader {points(op.dims)} points")
    if _permutes(op, read):
        return None
    if as_scan(maker):
        return refuse(f"'{tensor}' runs along a dimension that its reader does not keep")
    collision = space.access(op, read, ()).collision()  # injective, and as many points as cells: a bijection
    if collision:
        return refuse("two points read one reduced value", str(collision))
    return None


def _fused(draft: Draft, at: int, other: int, op: Block, maker: Block) -> Match | Refusal:
    """The reduction over the map's dimensions, with the map as its ``then``; plain dimensions keep the reduction's names."""
    k = next(k for k, r in enumerate(op.reads) if r.tensor in maker.outs)
    fused = along_columns(inline(renamed_dims(op, _names(op, maker, op.reads[k])), k, maker, draft.tensors))
    if layered(maker) and not _permutes(op, op.reads[k]) and rows(fused) > rows(maker):
        return refuse(f"statistics of rows of '{maker.outs[0]}' would be computed again")
    return Match({at: (fused,), other: ()})


def _permutes(op: Block, read: Read) -> bool:
    """Whether the read is a permutation of the dimensions of size above 1."""
    plain = [str(e) for e in read.index if e.is_dim]
    fixed = all(e.is_dim or not e.terms for e in read.index)
    return fixed and len(set(plain)) == len(plain) and {d.name for d in op.dims if d.size > 1} <= set(plain)


def _names(op: Block, maker: Block, read: Read) -> dict[str, str]:
    """New names for the map's dimensions: the reduction's where a dimension is one of its own, else fresh."""
    out: dict[str, str] = {}
    for d, e in zip(maker.dims, read.index, strict=True):
        if e.is_dim:
            out[str(e)] = d.name
    others = fresh_dims((d for d in op.dims if d.name not in out), maker.space)
    return out | {name: d.name for name, d in others.items()}
