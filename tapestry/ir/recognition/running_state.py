"""Scans: running states along a dimension, recognised from the projections alone.

``y[i] = combine over j <= i of x[j]`` is a reduction over j whose reads are guarded by ``i - j >= 0`` and give the monoid's
identity elsewhere. Nothing about it is special to the laws: the access relation, the footprints and the interpreter are those
of a guarded reduction. No target computes it that way: the state at i is the one at i - 1 and one more element. With
``(i mod q) - j`` in the guard the state starts again every q points. The monoid need not commute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tapestry.ir.expr import Arg, arg_positions, uncast
from tapestry.ir.graph import Block, Guard, Op, Read
from tapestry.ir.index import Aff, Floor, Mod, dim, dims_of
from tapestry.ir.monoid import MONOIDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """How an operation's states run.

    Attributes:
        dim: the map dimension along which they run.
        over: the reduced dimension that runs with it.
        segment: points after which the state starts again; the size of ``dim`` (or more) where it never does.
        sign: 1 where a state merges all up to its place, -1 where all from its place on.
        shift: 0 where its own place belongs to it, 1 where not (exclusive).
        guard: what every read of the body is guarded by, ``sign*((dim mod segment) - over) - shift >= 0``.
    """

    dim: str
    over: str
    segment: int
    sign: int
    shift: int
    guard: Guard


def running(place: Aff, over: str, *, reverse: bool = False, exclusive: bool = False) -> Guard:
    """The guard that makes a reduction over ``over`` the running state at ``place``."""
    ahead = dim(over) - place if reverse else place - dim(over)
    return Guard(ahead - int(exclusive), "ge")


def as_scan(op: Op) -> Scan | None:
    """The scan that an operation is; ``None`` where it is none, or where that cannot be seen.

    Each field of the body must be a read (casts aside) that gives the field's identity where the guard fails, and nothing
    else of a read may depend on the place along the dimension: only on the segment, ``floor(dim / segment)``.
    """
    if not isinstance(op, Block) or op.monoid not in MONOIDS or len(op.reduce) != 1:
        return None
    reads = [op.reads[k] for k in sorted(arg_positions(op.body))]
    shared = set[Guard]().union(*(r.when for r in reads))
    for guard in sorted((g for g in shared if all(g in r.when for r in reads)), key=str):
        found = _shape(op, guard)
        if found and all(_only_segments(r, found) for r in reads) and _identity_outside(op):
            return found
    return None


def unguarded(op: Block, scan: Scan) -> Block:
    """The operation without the scan's guard: what is merged at a place, by segment and reduced dimension."""
    body = op.body_reads()
    kept = ((replace(r, when=tuple(g for g in r.when if g != scan.guard)) if k in body else r) for k, r in enumerate(op.reads))
    return replace(op, reads=tuple(kept))


def _shape(op: Block, guard: Guard) -> Scan | None:
    over, e = op.reduce[0], guard.aff
    sign = -e.coef(over.name)
    rest = e + dim(over.name) * sign
    if guard.op != "ge" or sign not in (1, -1) or len(rest.terms) != 1 or rest.terms[0][1] != sign or -rest.const not in (0, 1):
        return None
    atom = rest.terms[0][0]
    name = atom if isinstance(atom, str) else str(atom.arg)
    along = next((d for d in op.dims if d.name == name), None)
    if along is None or isinstance(atom, Floor):
        return None
    segment = atom.div if isinstance(atom, Mod) else max(along.size, 1)
    if isinstance(atom, Mod) and over.size > segment:
        return None
    return Scan(dim=along.name, over=over.name, segment=segment, sign=sign, shift=-rest.const, guard=guard)


def _only_segments(read: Read, scan: Scan) -> bool:
    """Whether, its guard aside, a read depends on the scan's dimension through ``floor(dim / segment)`` alone."""
    whole = Floor(dim(scan.dim), scan.segment)

    def fine(e: Aff) -> bool:
        return all(a == whole or scan.dim not in dims_of(Aff(((a, 1),))) for a, _ in e.terms)

    return all(fine(e) for e in (*read.index, *(g.aff for g in read.when if g != scan.guard)))


def _identity_outside(op: Block) -> bool:
    assert op.monoid
    zero = MONOIDS[op.monoid].zero(op.dtypes)
    for e, z in zip(op.body, zero, strict=True):
        read = uncast(e)
        if not isinstance(read, Arg) or op.reads[read.pos].other is None or op.reads[read.pos].other != z.value:
            return False
    return True
