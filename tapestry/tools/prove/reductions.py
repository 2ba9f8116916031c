"""Reductions as nodes: equal ones are found, and those over a part of another one's domain are known as its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, islice
from math import prod

import numpy as np

from tapestry.ir.expr import PRIMITIVES, Const
from tapestry.ir.graph import Dim, Guard
from tapestry.ir.index import Aff, Atom, Floor, Mod, const, dim, dims_of, evaluate, floordiv, modulo, substitute
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.space import nowhere
from tapestry.ir.types import FLOATS
from tapestry.tools.prove.values import MERGES, Domain, Node, Ranges, Ref, Table, Value, extents, keyed, low, moved, same, union

# Reads beyond an edge: a tensor with a number around it is a function of its own, of which a halo's inside is a part.
#
# Where the model reads a tensor or, outside of it, a number, the table has one node for both (``padded``), whose places may
# be any. A program that reads the same cells and the same number has that node: its own guards say so by themselves at an
# outer edge (the places where they hold are those inside the model's tensor, which isl decides), and where it reads inside
# alone there is nothing to guard.

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
            return Ref(_node(table, inside.node, other, box), inside.index)
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


def _node(table: Table, at: int, other: Const, box: Box) -> int:
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


DEEP = 6  # steps from a read down to a choice of what it reads: a bias, a scale and a cast after a matrix product
MOST_POINTS = 1 << 22  # of a reduced dimension, where places are listed


@dataclass(frozen=True, slots=True)
class Reduction:
    """One field of a reduction of values over a space.

    Attributes:
        values: the lifted state, over the map dimensions and the reduced ones.
        reduce: the reduced dimensions.
        ranges: sizes of the map dimensions.
    """

    monoid: str
    field: int
    values: tuple[Value, ...]
    reduce: tuple[Dim, ...]
    ranges: Ranges

    @property
    def wide(self) -> dict[str, int]:
        """Sizes of all dimensions."""
        return {**self.ranges, **{d.name: d.size for d in self.reduce}}

    def over(self, reduce: tuple[Dim, ...], env: Mapping[str, Aff]) -> Reduction:
        """The same points along other reduced dimensions, by which ``env`` writes those that are no longer there."""
        wide = replace(self, reduce=reduce).wide
        values = (Ref(v.node, tuple(moved(e, env, wide) for e in v.index)) if isinstance(v, Ref) else v for v in self.values)
        return replace(self, values=tuple(values), reduce=reduce)


def reduced(table: Table, r: Reduction) -> Value:
    """The value of a reduction: a known node, a part of one, or a new one."""
    r = _unflattened(_without_single_points(r))
    if MERGES.get(r.monoid) == "add" and isinstance(v := r.values[0], Const):
        return Const(v.value * prod(d.size for d in r.reduce), v.dtype)
    if r.monoid == "sum" and isinstance(v := r.values[0], Ref) and table.dtype(v) in FLOATS:
        term, factor = _without_numbers(table, v, r.wide)
        if factor != 1:
            return table.multiple(reduced(table, replace(r, values=(term,))), factor, table.dtype(v), r.ranges)
    label, why = (r.monoid, r.field), ""
    key = keyed("reduce", label, r.values)
    for way in chain([r.values], () if table.building else with_padding(table, r.values, r.wide)):
        for at in table.known.get(keyed("reduce", label, way), ()):
            found = _matched(table.nodes[at], replace(r, values=way))
            if not isinstance(found, str):
                return table.part(at, found[1], found[0])
            why = why or (found if table.nodes[at].model and way is r.values else "")
    if why and not table.building:
        table.miss(why, table.origin(table.known[key][0]))
    if not r.reduce and r.monoid in MERGES:
        return r.values[0]
    args, index = _template(r)
    bound = tuple(d.size for d in r.reduce)
    return Ref(table.add(key, Node("reduce", label, args, len(index), table.dtype(r.values[r.field]), bound)), index)


def _without_numbers(table: Table, v: Value, ranges: Ranges, deep: int = DEEP) -> tuple[Value, Fraction]:
    """What a sum adds without the numbers that it is multiplied by, and the product of these."""
    x, factor = table.unscaled(v)
    args = table.args_of(x, "mul")
    if not args or not deep:
        return x, factor
    parts = [_without_numbers(table, a, ranges, deep - 1) for a in args]
    inside = prod((f for _, f in parts), start=Fraction(1))
    return (x if inside == 1 else table.call("mul", [a for a, _ in parts], table.dtype(x), ranges)), factor * inside


def opened(table: Table, ref: Ref, ranges: Ranges) -> tuple[tuple[Dim, ...], list[Value], dict[str, int]]:
    """What a reduction merges, over the space where it is read and dimensions of its own: these, the values, all sizes."""
    node = table.nodes[ref.node]
    dims = tuple(Dim(f"s{len(ranges)}_{k}", n) for k, n in enumerate(node.bound))
    wide = {**ranges, **{d.name: d.size for d in dims}}
    env = {f"v{k}": e for k, e in enumerate(ref.index)} | {f"r{k}": dim(d.name) for k, d in enumerate(dims)}
    return dims, [table.read(a, env, wide) for a in node.args], wide


def alike(table: Table, a: Value, b: Value, ranges: Ranges, deep: int = DEEP) -> bool:
    """Whether two values are equal: the same at the same places, or the same function of equal values, up to so many steps."""
    a, b = (table.resolved(v, ranges) if isinstance(v, Ref) else v for v in (a, b))
    if not isinstance(a, Ref) or not isinstance(b, Ref):
        return a == b
    m, n = table.nodes[a.node], table.nodes[b.node]
    if a.node == b.node and all(same(x, y, ranges) for x, y in zip(a.index, b.index, strict=True)):
        return True
    if not deep or m.kind not in ("call", "reduce") or (m.kind, m.label, m.bound) != (n.kind, n.label, n.bound):
        return False
    (_, xs, wide), (_, ys, _) = (opened(table, v, ranges) for v in (a, b))
    turned = m.kind == "call" and m.label[0] in PRIMITIVES and PRIMITIVES[m.label[0]].commutative
    orders = (ys, ys[::-1]) if turned else (ys,)
    return any(all(alike(table, x, y, wide, deep - 1) for x, y in zip(xs, order, strict=True)) for order in orders)


def settled(table: Table, v: Value, ranges: Ranges, deep: int = DEEP) -> Value:
    """A program's value where choices by place that are known in this space are made, up to so many steps below it."""
    if not isinstance(v, Ref) or table.choice_below(v.node) > deep:
        return v
    v = table.resolved(v, ranges)
    if not isinstance(v, Ref) or table.choice_below(v.node) > deep:
        return v
    node = table.nodes[v.node]
    if node.kind == "call":
        args = table.arguments(v)
        new = tuple(settled(table, a, ranges, deep - 1) for a in args)
        return v if new == args else table.call(node.label[0], new, node.label[1], ranges)
    dims, values, wide = opened(table, v, ranges)
    new = tuple(settled(table, a, wide, deep - 1) for a in values)
    monoid, number = node.label
    return v if new == tuple(values) else reduced(table, Reduction(monoid, number, new, dims, ranges))


def _without_single_points(r: Reduction) -> Reduction:
    single = {d.name: const(0) for d in r.reduce if d.size == 1}
    return r.over(tuple(d for d in r.reduce if d.size != 1), single) if single else r


def _unflattened(r: Reduction) -> Reduction:
    """A reduced dimension that is only read as ``floor(m/n)`` and ``m mod n``, as two: a product over columns of windows."""
    index = [e for v in r.values if isinstance(v, Ref) for e in v.index]
    atoms = {a for e in index for a, _ in e.terms}
    for d in r.reduce:
        parts = [a for a in atoms if not isinstance(a, str) and dims_of(a.arg) <= {d.name}]
        n = min((a.div for a in parts if a.arg == dim(d.name)), default=0)
        others = any(a == d.name or (a not in parts and not isinstance(a, str) and d.name in dims_of(a.arg)) for a in atoms)
        if n and not others and not d.size % n and 1 < n < d.size:
            major, minor = Dim(f"{d.name}f", d.size // n), Dim(f"{d.name}m", n)
            reduce = tuple(x for old in r.reduce for x in ((major, minor) if old is d else (old,)))
            return _unflattened(r.over(reduce, {d.name: dim(major.name) * n + dim(minor.name)}))
    return r


def _template(r: Reduction) -> tuple[tuple[Value, ...], tuple[Aff, ...]]:
    """The places of a new node over slots and reduced dimensions, and what the slots are here."""
    names = {d.name: dim(f"r{k}") for k, d in enumerate(r.reduce)}
    number: dict[Aff, int] = {}

    def slot(e: Aff) -> Aff:
        return dim(f"v{number.setdefault(e, len(number))}")

    def abstract(e: Aff) -> Aff:
        if not dims_of(e) & names.keys():
            return slot(e)
        mine: list[tuple[Atom, int]] = []
        out = const(0)
        for atom, coef in e.terms:
            own = {atom} if isinstance(atom, str) else dims_of(atom.arg)
            if not own & names.keys():
                mine.append((atom, coef))
            elif isinstance(atom, str):
                out = out + names[atom] * coef
            else:
                inside = abstract(atom.arg)
                out = out + Aff(((type(atom)(inside, atom.div), coef),))
        return out + slot(Aff(tuple(mine), e.const)) if mine else out + e.const

    args = tuple(Ref(v.node, tuple(abstract(e) for e in v.index)) if isinstance(v, Ref) else v for v in r.values)
    return args, tuple(number)


def _matched(node: Node, r: Reduction) -> tuple[tuple[Aff, ...], Domain] | str:
    """The slots and the part of the domain for which a known reduction is this one; in words why it is not."""
    theirs = [e for a in node.args if isinstance(a, Ref) for e in a.index]
    ours = [e for a in r.values if isinstance(a, Ref) for e in a.index]
    ranges, names = r.wide, {d.name for d in r.reduce}
    places = _places(node, theirs, ours, r.reduce)
    if isinstance(places, str):
        return places
    slots: dict[str, Aff] = {}
    later: list[tuple[Aff, Aff]] = []
    for t, e in zip(theirs, ours, strict=True):
        free = [a for a, _ in t.terms if isinstance(a, str) and a[0] == "v"]
        deep = any(isinstance(a, Floor | Mod) and any(n[0] == "v" for n in dims_of(a.arg)) for a, _ in t.terms)
        if not free or deep:
            later.append((t, e))
            continue
        rest = substitute(e - substitute(t, {**places, free[0]: const(0)}, ranges), {}, ranges)
        if dims_of(rest) & names:
            return f"{e} is read where the model reads {t}"
        if not same(slots.setdefault(free[0], rest), rest, r.ranges):
            return f"place {rest} is read with place {slots[free[0]]}, which the model reads as one"
    for t, e in later:  # only where nothing else tells; whether it holds is seen below
        for name, rest in _inside_floor(t, e, places, ranges):
            if not dims_of(rest) & names:
                slots.setdefault(name, rest)
    if len(slots) < node.slots:
        return "places that are merged do not tell where it is read"
    for t, e in later:
        if not same(substitute(t, {**places, **slots}, ranges), e, ranges):
            return f"{e} is read where the model reads {substitute(t, {**places, **slots}, ranges)}"
    domain = _domain(node, places, r)
    return domain if isinstance(domain, str) else (tuple(slots[f"v{k}"] for k in range(node.slots)), domain)


def _inside_floor(t: Aff, e: Aff, places: Mapping[str, Aff], ranges: Ranges) -> list[tuple[str, Aff]]:
    """The slot of ``floor((v - r)/n)``, if another floor is that: its name and what it is."""
    a, b = (x.terms[0][0] if len(x.terms) == 1 and x.terms[0][1] == 1 else None for x in (t, e))
    if not isinstance(a, Floor) or not isinstance(b, Floor) or a.div != b.div:
        return []
    free = [n for n, c in a.arg.terms if isinstance(n, str) and n[0] == "v" and c == 1]
    inner = b.arg + (e.const - t.const) * b.div
    rests = [substitute(inner - substitute(a.arg, {**places, n: const(0)}, ranges), {}, ranges) for n in free]
    return list(zip(free, rests, strict=True)) if len(free) == 1 else []


def _places(node: Node, theirs: Sequence[Aff], ours: Sequence[Aff], reduce: tuple[Dim, ...]) -> dict[str, Aff] | str:
    """Each reduced dimension of a known node as an expression over ours."""
    names = {d.name for d in reduce}
    out: dict[str, Aff] = {}
    for t, e in zip(theirs, ours, strict=True):
        if len(t.terms) == 1 and isinstance(name := t.terms[0][0], str) and name[0] == "r" and name not in out:
            coef, rest = t.terms[0][1], e - t.const
            if dims_of(rest) <= names and not rest.const % coef and all(not c % coef for _, c in rest.terms):
                out[name] = Aff(tuple((a, c // coef) for a, c in rest.terms), rest.const // coef)
    taken = frozenset[str]().union(*map(dims_of, out.values()))
    missing = [k for k in range(len(node.bound)) if f"r{k}" not in out]
    rest = [d for d in reduce if d.name not in taken]
    if [node.bound[k] for k in missing] != [d.size for d in rest]:
        return f"it reduces {[d.size for d in rest]} points where the model reduces {[node.bound[k] for k in missing]}"
    return out | {f"r{k}": dim(d.name) for k, d in zip(missing, rest, strict=True)}


def _domain(node: Node, places: Mapping[str, Aff], r: Reduction) -> Domain | str:
    """The points of a known node's domain that our points are, each once."""
    sizes = {d.name: d.size for d in r.reduce}
    used: set[str] = set()
    axes: list[tuple[tuple[int, int], ...]] = []
    for k, n in enumerate(node.bound):
        e = places[f"r{k}"]
        mine = dims_of(e)
        if mine & used:
            return "two reduced dimensions go along one"
        used |= mine
        points = _points(e, {m: sizes[m] for m in sorted(mine)})
        if isinstance(points, str):
            return points
        if points[0][0] < 0 or points[-1][1] > n:
            return f"{e} leaves the {n} points that the model reduces"
        axes.append(points)
    if used != set(sizes):
        return f"it also reduces {sorted(set(sizes) - used)}"
    domain = Domain(tuple(axes))
    if not MONOIDS[r.monoid].commutative and not (
        domain.whole(node.bound) and all(places[f"r{k}"] == dim(d.name) for k, d in enumerate(r.reduce))
    ):
        return "its order matters"
    return domain


def _points(e: Aff, sizes: Mapping[str, int]) -> tuple[tuple[int, int], ...] | str:
    """All values of an index expression, as ranges; in words why they are no set."""
    if len(sizes) == 1 and e.is_affine and abs(e.terms[0][1]) == 1:  # the usual case, without an array
        (n,) = sizes.values()
        low = e.const if e.terms[0][1] > 0 else e.const - n + 1
        return ((low, low + n),)
    if prod(sizes.values()) > MOST_POINTS:
        return "a reduced dimension is too long"
    env = {n: np.arange(s).reshape([-1 if k == i else 1 for k in range(len(sizes))]) for i, (n, s) in enumerate(sizes.items())}
    points = np.broadcast_to(evaluate(e, env), tuple(sizes.values())).reshape(-1).tolist()
    return f"{e} takes a point more than once" if len(set(points)) < len(points) else union((p, p + 1) for p in points)


# Sums that are scaled later: ``exp(a - b)`` times a sum of ``exp(x - a) …`` and a quotient of a sum are sums themselves.
#
# So a softmax that goes through its row part by part, with a greatest value, a sum and a weighted sum that are rescaled
# whenever a greater value comes, is known as the softmax of the row. What holds of every sum of real numbers is all that is
# used: a factor that does not depend on what is summed may be in each term, and ``exp(x - a) * exp(a - b)`` is ``exp(x - b)``.

Terms = Callable[[Value, Ranges], Iterator[Value]]  # forms of what is summed with the factor in it, over the sum's own space
SUM = ("sum", 0)
MOST_FACTORS = 64  # of a term: a square of a square has each of them twice


def rescaled(table: Table, fn: str, args: tuple[Value, ...], ranges: Ranges) -> Value | None:
    """A program's product or quotient as a sum whose terms have the factor, where that is a known form; else None."""
    if fn not in ("mul", "div") or table.dtype(args[0]) not in FLOATS or _as_model_has_it(table, fn, args):
        return None  # a quotient of whole numbers is cut off: a sum of them is not the quotient of the sum
    misses = len(table.misses)
    if fn == "div" and isinstance(args[1], Ref):
        found = _in_sums(table, args[0], lambda v, wide: _each_factor(table, v, args[1], wide), ranges, known=True)
        if found is not None:
            return found
    for total, factor in (args, args[::-1]) if fn == "mul" else ():
        ends = _difference(table, factor)
        if ends is not None:
            found = _in_sums(table, total, lambda v, wide, ends=ends: _moved(table, v, *ends, wide), ranges, known=False)
            if found is not None:
                return found
    del table.misses[misses:]  # of what was only tried
    return None


def _as_model_has_it(table: Table, fn: str, args: tuple[Value, ...]) -> bool:
    """Whether the model multiplies or divides the same, the whole of it: parts of that are merged as they are."""
    whole = [_all_of(table, a) for a in args if isinstance(a, Ref)]
    key = ("call", (fn, table.dtype(args[0])), tuple(sorted(whole) if fn == "mul" else whole))
    return len(whole) == len(args) and any(table.nodes[k].model for k in table.known.get(key, ()))


def _in_sums(table: Table, v: Value, terms: Terms, ranges: Ranges, known: bool) -> Value | None:
    """A sum of sums with a factor in each term; ``known``: only where the model has that sum."""
    if not isinstance(v, Ref):
        return None
    added = table.args_of(v, "add")
    if added and not table.nodes[v.node].model:
        parts: list[Value] = []
        for a in added:
            part = _in_sums(table, a, terms, ranges, known)
            if part is None:
                return None
            parts.append(part)
        return table.call("add", parts, table.dtype(v), ranges)
    found = _terms(table, v, ranges)
    if found is None:
        return None
    dims, body, wide = found
    for new in terms(body, wide):
        if not known or any(table.nodes[k].model for k in table.known.get(keyed("reduce", SUM, (new,)), ())):
            out = reduced(table, Reduction("sum", 0, (new,), dims, ranges))
            if not known or (isinstance(out, Ref) and table.nodes[_all_of(table, out)].model):
                return out
    return None


def _all_of(table: Table, v: Ref) -> int:
    """The node that a value is all of, or a part of."""
    return table.parted(v.node)[0] if table.nodes[v.node].kind == "part" else v.node


def _terms(table: Table, v: Ref, ranges: Ranges) -> tuple[tuple[Dim, ...], Value, dict[str, int]] | None:
    """The dimensions that a sum goes along, what it adds, and all sizes; of a part of a sum, if that is a box."""
    node = table.nodes[v.node]
    if node.kind == "reduce" and node.label == SUM:
        dims, values, wide = opened(table, v, ranges)
        return dims, values[0], wide
    if node.kind == "call":  # one term
        return (), v, dict(ranges)
    if node.kind != "part" or table.nodes[table.parted(v.node)[0]].label != SUM:
        return None
    base, domain = table.parted(v.node)
    if any(len(runs) != 1 for runs in domain.axes):
        return None
    whole, values, wide = opened(table, Ref(base, v.index), ranges)
    dims = tuple(Dim(f"{d.name}p", high - low) for d, ((low, high),) in zip(whole, domain.axes, strict=True))
    inside = {**ranges, **{d.name: d.size for d in dims}}
    env = {d.name: dim(p.name) + low for d, p, ((low, _),) in zip(whole, dims, domain.axes, strict=True)}
    assert wide.keys() == {*ranges, *env}
    return dims, table.read(values[0], env, inside), inside


def _difference(table: Table, v: Value) -> tuple[Value, Value] | None:
    """a and b of ``exp(a - b)``."""
    power = table.args_of(v, "exp")
    ends = table.args_of(power[0], "sub") if power else None
    return (ends[0], ends[1]) if ends else None


def _factors(table: Table, v: Value, ranges: Ranges) -> Iterator[tuple[Value, Callable[[Value], Value]]]:
    """The factors of a term, each with what makes the term with another one in its place."""
    yield v, lambda x: x
    if not isinstance(v, Ref) or table.nodes[v.node].kind != "call":
        return
    fn, args = table.nodes[v.node].label[0], table.arguments(v)
    dtype = table.nodes[v.node].dtype
    for k in {"mul": (0, 1), "div": (0,)}.get(fn, ()):
        for f, put in _factors(table, args[k], ranges):
            yield (
                f,
                lambda x, k=k, put=put: table.call(fn, [put(x) if n == k else a for n, a in enumerate(args)], dtype, ranges),
            )


def _moved(table: Table, term: Value, a: Value, b: Value, wide: Ranges) -> Iterator[Value]:
    """A term with ``exp(x - a)`` made ``exp(x - b)``."""
    for f, put in islice(_factors(table, term, wide), MOST_FACTORS):
        ends = _difference(table, f)
        if ends is not None and alike(table, ends[1], a, wide, 0):
            dtype = table.dtype(f)
            yield put(table.call("exp", (table.call("sub", (ends[0], b), dtype, wide),), dtype, wide))


def _each_factor(table: Table, term: Value, divisor: Value, wide: Ranges) -> Iterator[Value]:
    """A term with one of its factors divided."""
    for f, put in islice(_factors(table, term, wide), MOST_FACTORS):
        yield put(table.call("div", (f, divisor), table.dtype(f), wide))
