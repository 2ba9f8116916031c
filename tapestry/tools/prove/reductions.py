"""Reductions as nodes: equal ones are found, and those over a part of another one's domain are known as its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from math import prod

import numpy as np

from tapestry.ir.expr import PRIMITIVES, Const
from tapestry.ir.graph import Dim
from tapestry.ir.index import Aff, Atom, Floor, Mod, const, dim, dims_of, evaluate, substitute
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.types import FLOATS
from tapestry.tools.prove.padded_reads import with_padding
from tapestry.tools.prove.values import MERGES, Domain, Node, Ranges, Ref, Table, Value, keyed, moved, same, union

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
