"""Rows of one group of a routed product's matrices (`rewrites.splitting.part_routes`): what other rows hold, nobody asks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from tapestry.ir.expr import Call, Const, Expr, Index, arg_positions, call
from tapestry.ir.graph import Block, Graph, Read, placed
from tapestry.ir.index import Aff, dims_of, substitute
from tapestry.ir.recognition.selection_sum import place_read, routed


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A value at rows that pick one of ``each`` matrices from number ``base`` on."""

    wanted: Expr
    base: Aff
    each: int
    value: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rows of an operation that pick one of ``each`` matrices from number ``base`` on, of ``count``.

    Attributes:
        place: the read that says which matrix, over map dimensions; ``wraps``: negative ones count from the end.
    """

    place: Read
    wraps: bool
    base: Aff
    each: int
    count: int


def in_group(wanted: Expr, base: Aff, each: int) -> Expr:
    """Whether a place is one of a group's."""
    return call("and", call("ge", wanted, Index(base)), call("lt", wanted, Index(base + each)))


def guarded(e: Expr) -> Guarded | None:
    """``where(wanted >= base and wanted < base + each, value, 0)``: the value of one group's rows that it is."""
    match e:
        case Call(
            fn="where", args=(Call(args=(Call(args=(wanted, Index() as low)), Call(args=(_, Index() as end)))), value, Const(0))
        ):
            each = (end.aff - low.aff).const
            known = e.args[0] == in_group(wanted, low.aff, each)
            return Guarded(wanted=wanted, base=low.aff, each=each, value=value) if known else None
        case _:
            return None


def by_rows(op: Block, *, late: bool) -> Guarded | None:
    """What a routed product, or a guard around one body (``late``: around what becomes of the state), takes by rows."""
    if not late and (found := routed(op)):
        return Guarded(wanted=found.wanted, base=found.base, each=found.over.size, value=found.rows)
    exprs = op.then if late else op.body
    return guarded(exprs[0]) if len(exprs) == 1 else None


@lru_cache(maxsize=1 << 12)
def group_of(op: Block) -> Group | None:
    """The group whose rows alone an operation computes: as a routed product, or by a guard around its results."""
    found = by_rows(op, late=op.monoid is not None and routed(op) is None)
    if found is None or not dims_of(found.base):
        return None
    count = found.each * prod(d.size for d in op.dims if d.name in dims_of(found.base))
    known = place_read(found.wanted, count)
    if known is None:
        return None
    return Group(place=op.reads[known[0]], wraps=known[1], base=found.base, each=found.each, count=count)


def unread(graph: Graph, op: Block) -> Group | None:
    """The group whose rows alone of an operation's result anybody reads: what the others hold changes nothing."""
    own = group_of(op)
    if own is None or len(op.outs) != 1 or op.outs[0] in graph.outputs:
        return None
    readers = [r for r in graph.ops if op.outs[0] in r.inputs]
    return own if readers and all(isinstance(r, Block) and _by_group(r, op, own) for r in readers) else None


def _by_group(reader: Block, op: Block, own: Group) -> bool:
    """Whether an operation reads a result at rows of the group alone."""
    for k in (k for k, r in enumerate(reader.reads) if r.tensor == op.outs[0]):
        found = by_rows(reader, late=k in reader.then_reads())
        if found is None or k not in arg_positions((found.value,)) or k in reader.then_reads() & reader.body_reads():
            return False
        env = placed(op.dims, reader.reads[k].index)
        there = replace(own.place, index=tuple(substitute(e, env, reader.ranges) for e in own.place.index))
        known = place_read(found.wanted, own.count)
        same = (found.each, found.base) == (own.each, substitute(own.base, env, reader.ranges))
        if not same or known is None or (reader.reads[known[0]], known[1]) != (there, own.wraps):
            return False
    return True
