"""Reads beyond an edge: a tensor with a number around it is a function of its own, of which a halo's inside is a part.

Where the model reads a tensor or, outside of it, a number, the table has one node for both (``padded``), whose places may
be any. A program that reads the same cells and the same number has that node: its own guards say so by themselves at an
outer edge (the places where they hold are those inside the model's tensor, which isl decides), and where it reads inside
alone there is nothing to guard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tapestry.ir.expr import Const
from tapestry.ir.graph import Guard
from tapestry.ir.index import Aff, dim, floordiv, modulo
from tapestry.ir.space import nowhere
from tapestry.tools.prove.values import Node, Ranges, Ref, Table, Value, extents, low

Box = tuple[tuple[int, int, int], ...]  # of each slot of a node: the first place, the step to the next, how many there are


def padded(
    table: Table, tensor: Value, inside: Value, guards: Sequence[Guard], other: Const, shape: Sequence[int], ranges: Ranges
) -> Ref | None:
    """A read that gives a number where its guards do not hold, as a read of the padded tensor; None where it is none.

    Args:
        tensor: the value of what is read, over its axes.
        inside: the same at the places that are read.
        guards: all that must hold, the tensor's ends among them.
    """
    if not isinstance(inside, Ref) or not isinstance(tensor, Ref) or any(g.op != "ge" for g in guards):
        return None
    open_ = [g.aff for g in guards if low(g.aff, ranges) < 0]
    if table.building:
        box = _box(tensor, shape) if inside.node == tensor.node else None
        if box is not None and open_ and _same_region(open_, inside.index, box, ranges):
            return Ref(_padded_node(table, inside.node, other, box), inside.index)
        return None
    for at in table.padded.get(inside.node, ()):
        _, _, number, region = table.nodes[at].label
        if number == repr(other.value) and _same_region(open_, inside.index, region, ranges):
            return Ref(at, inside.index)
    return None


def _box(tensor: Ref, shape: Sequence[int]) -> Box | None:
    """The places of a node's slots that a tensor is made of; None where they are not one slot for each axis."""
    axes = extents(shape)
    out: list[tuple[int, int, int]] = []
    for e in tensor.index:
        if not e.terms:
            out.append((e.const, 1, 1))
            continue
        if len(e.terms) != 1 or not isinstance(e.terms[0][0], str) or e.terms[0][1] < 1:
            return None
        size = axes.pop(e.terms[0][0], None)
        if size is None:
            return None
        out.append((e.const, e.terms[0][1], size))
    return None if axes else tuple(out)


def _ends(index: Sequence[Aff], box: Box) -> list[Aff] | None:
    """What is at least 0 where places are inside a box; None where some lie between its places."""
    out: list[Aff] = []
    for place, (first, step, count) in zip(index, box, strict=True):
        e = place - first
        if e.const % step or any(c % step for _, c in e.terms):
            return None
        out += [e, e * -1 + step * (count - 1)]
    return out


def _same_region(tests: Sequence[Aff], index: Sequence[Aff], box: Box, ranges: Ranges) -> bool:
    """Whether tests hold at exactly those points of a space where places are inside a box."""
    ends = _ends(index, box)
    if ends is None:
        return False
    ends = [e for e in ends if low(e, ranges) < 0]
    return all(e in tests or nowhere(ranges, tests, e) for e in ends) and all(
        t in ends or nowhere(ranges, ends, t) for t in tests
    )


def _padded_node(table: Table, at: int, other: Const, box: Box) -> int:
    node = table.nodes[at]
    label = ("padded", node.dtype, repr(other.value), box)
    inner = Ref(at, tuple(dim(f"v{k}") for k in range(node.slots)))
    made = table.interned(("call", label, (at,)), Node("call", label, (inner,), node.slots, node.dtype, origin=node.origin))
    around = table.padded.setdefault(at, [])
    around += [made] if made not in around else []
    return made


def with_padding(table: Table, args: Sequence[Value], ranges: Ranges) -> Iterator[tuple[Value, ...]]:
    """Arguments of a program with reads that stay inside as those of padded tensors, one way after another."""
    refs = ((k, v) for k, v in enumerate(args) if isinstance(v, Ref))
    for k, v in refs:
        for at in table.padded.get(v.node, ()):
            ends = _ends(v.index, table.nodes[at].label[3])
            if ends is not None and all(low(e, ranges) >= 0 for e in ends):
                yield (*args[:k], Ref(at, v.index), *args[k + 1 :])


def chosen(table: Table, args: Sequence[Value], dtype: str, ranges: Ranges, hold: Sequence[Aff] = ()) -> Value | None:
    """A program's choice by place as one read, where both sides read one node and agree; None where it is no such choice.

    Args:
        hold: what is known to be at least 0 where the choice is made.
    """
    test, yes, no = args
    place = table.tested(test)
    if place is None:
        return None
    there, elsewhere = [*hold, place], [*hold, place * -1 - 1]
    yes, no = _within(table, yes, there, ranges), _within(table, no, elsewhere, ranges)
    if isinstance(yes, Ref) and isinstance(no, Ref) and yes.node == no.node:
        both = [_both(a, b, there, elsewhere, ranges) for a, b in zip(yes.index, no.index, strict=True)]
        if None not in both:
            return Ref(yes.node, tuple(e for e in both if e is not None))
    return table.call("where", (test, yes, no), dtype, ranges)


def _both(a: Aff, b: Aff, there: Sequence[Aff], elsewhere: Sequence[Aff], ranges: Ranges) -> Aff | None:
    """One expression that is ``a`` in one place and ``b`` elsewhere: either of them, what goes around a circle (a rotation of
    halves), or a step (from row to row); None where it is none of these."""
    ways, turn, over = [a, b], (a - b).const if not (a - b).terms else 0, there[-1] * -1 - 1
    if turn > 1:
        ways.append(modulo(a, turn, ranges) + Aff(tuple((n, c) for n, c in a.terms if not c % turn), a.const // turn * turn))
    if turn:
        n = max(-low(over, ranges), 1 - low(over * -1, ranges))
        ways.append(a - floordiv(over + n, n, ranges) * turn)
    return next((e for e in ways if _agree(e, a, there, ranges) and _agree(e, b, elsewhere, ranges)), None)


def _agree(a: Aff, b: Aff, hold: Sequence[Aff], ranges: Ranges) -> bool:
    return a == b or (nowhere(ranges, hold, a - b) and nowhere(ranges, hold, b - a))


def _within(table: Table, v: Value, hold: Sequence[Aff], ranges: Ranges) -> Value:
    """A value where some expressions are at least 0: choices by place that are known there are made."""
    v = table.given(v, lambda e: nowhere(ranges, hold, e))
    choice = table.args_of(v, "where")
    if not choice or not isinstance(v, Ref) or table.nodes[v.node].model:
        return v
    return chosen(table, choice, table.dtype(v), ranges, hold) or v
