"""What collectives compute, as values: sums of partial states that become whole, and places of what is gathered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from tapestry.ir.expr import Const
from tapestry.ir.index import Aff, const, dim, floordiv, modulo, substitute
from tapestry.ir.types import FLOATS
from tapestry.tools.prove.reductions import Reduction, opened, reduced
from tapestry.tools.prove.values import MERGES, Domain, Ranges, Ref, Table, Value, extents, join_all

REDUCING = {"SUM": "sum", "AVG": "sum", "MAX": "max", "MIN": "min", "PROD": "prod"}


@dataclass(frozen=True, slots=True)
class Collective:
    """One node of one rank's program.

    Attributes:
        kind: ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, REDUCE, GATHER or SCATTER.
        op: SUM, PROD, MAX, MIN, AVG or NONE.
        root: a rank, where the kind has one.
        group: ranks in order.
        source, target: names of the tensors read and written; "" where this rank has none.
    """

    name: str
    kind: str
    op: str
    root: int
    group: tuple[int, ...]
    source: str
    target: str


def results(table: Table, c: Collective, values: Sequence[Value | None], shape: tuple[int, ...]) -> list[Value | None]:
    """What each member of a group has after a collective of the values that they had before it.

    Args:
        values: one for each member, over the axes of what is sent; None where it sends nothing.
        shape: of what each sends.
    """
    n = len(c.group)
    root = c.group.index(c.root) if c.kind in ("BROADCAST", "REDUCE", "SCATTER", "GATHER") else 0
    if c.kind in ("BROADCAST", "SCATTER"):
        sent = values[root]
        assert sent is not None
        return [sent if c.kind == "BROADCAST" else piece(table, sent, k, n, shape) for k in range(n)]
    given = [v for v in values if v is not None]
    if c.kind in ("ALL_REDUCE", "REDUCE", "REDUCE_SCATTER"):
        merged = merge(table, c, given, extents(shape))
        if c.kind == "REDUCE_SCATTER":
            return [piece(table, merged, k, n, shape) for k in range(n)]
        return [merged if c.kind == "ALL_REDUCE" or k == root else None for k in range(n)]
    if c.kind == "ALL_TO_ALL":
        small = (shape[0] // n, *shape[1:])
        return [gathered(table, [piece(table, v, k, n, shape) for v in given], small) for k in range(n)]
    joined = gathered(table, given, shape)
    return [joined if c.kind == "ALL_GATHER" or k == root else None for k in range(n)]


def piece(table: Table, v: Value, k: int, parts: int, shape: tuple[int, ...]) -> Value:
    """Part ``k`` of a value along its first axis."""
    size = shape[0] // parts
    return table.read(v, {"y0": (dim("y0") if size != 1 else const(0)) + k * size}, extents((size, *shape[1:])))


def gathered(table: Table, values: Sequence[Value], shape: tuple[int, ...]) -> Value:
    """Values of equal shapes one after another along their first axis."""
    size, n = shape[0], len(values)
    whole = {"y0": size * n} | {f"y{a}": s for a, s in enumerate(shape) if a and s != 1}
    place = dim("y0")
    refs = [v for v in values if isinstance(v, Ref)]
    if len(refs) == n and len({v.node for v in refs}) == 1:
        columns = [_column([v.index[k] for v in refs], size, whole) for k in range(len(refs[0].index))]
        if all(c is not None for c in columns):
            return Ref(refs[0].node, tuple(c for c in columns if c is not None))
    if len({repr(v) for v in values if isinstance(v, Const)}) == 1 and not refs:
        return values[0]
    out = table.read(values[-1], {"y0": place - (n - 1) * size}, whole)
    for k in range(n - 2, -1, -1):
        test = table.test("ge", place * -1 + ((k + 1) * size - 1), whole)
        here = table.read(values[k], {"y0": place - k * size}, whole)
        out = table.call("where", (test, here, out), table.dtype(here), whole)
    return out


def _column(places: Sequence[Aff], size: int, ranges: Ranges) -> Aff | None:
    """One expression for a place whose pieces are given one after another; None where there is none that is simple."""
    one = [substitute(e, {"y0": dim("y0") - k * size}, ranges) for k, e in enumerate(places)]
    if all(e == one[0] for e in one):
        return one[0]
    apart = [e - places[0] for e in places]
    if any(e.terms for e in apart):
        return None
    steps, n = [e.const for e in apart], len(places)
    number, inside = floordiv(dim("y0"), size, ranges), modulo(dim("y0"), size, ranges)
    base = substitute(places[0], {"y0": inside}, ranges)
    for minor in (m for m in range(1, n + 1) if n % m == 0):
        inner, outer = (steps[1] if minor > 1 else 0), (steps[minor] if minor < n else 0)
        if all(steps[k] == k % minor * inner + k // minor * outer for k in range(n)):
            major = floordiv(dim("y0"), size * minor, ranges)
            return base + modulo(number, minor, ranges) * inner + major * outer if minor > 1 else base + number * outer
    return None


@dataclass(frozen=True, slots=True)
class _Term:
    """A part of a sum: a number times factors times a core, which is a partial reduction or anything else.

    ``whole`` is the value that a program has for this term alone, with the number ``own`` in place of ``coef``.
    """

    coef: Fraction
    factors: tuple[tuple[str, Value], ...]
    core: Value
    whole: Value
    own: Fraction


Key = tuple[tuple[tuple[str, Value], ...], object]


def merge(table: Table, c: Collective, values: Sequence[Value], ranges: Ranges) -> Value:
    """The values of a group's members, merged."""
    monoid = REDUCING[c.op]
    if monoid == "sum":
        inner = _sum_in_domain(table, c, values, ranges)
        if inner is not None:
            return inner
        found = _summed(table, values, Fraction(1, len(values)) if c.op == "AVG" else Fraction(1), ranges)
        if found is not None:
            return found
    else:
        if monoid in ("max", "min") and all(v == values[0] for v in values):
            return values[0]
        whole = _joined(table, monoid, values)
        if whole is not None:
            return whole
    out = values[0]
    for v in values[1:]:
        out = table.call(MERGES[monoid], (out, v), table.dtype(out), ranges)
    return table.multiple(out, Fraction(1, len(values)), table.dtype(out), ranges) if c.op == "AVG" else out


def _sum_in_domain(table: Table, c: Collective, values: Sequence[Value], ranges: Ranges) -> Value | None:
    """The sum of the members' sums over one domain, as one sum of the sums of what they add; None where the domains differ."""
    nodes = [table.nodes[v.node] for v in values if isinstance(v, Ref)]
    sums = [n for n in nodes if n.kind == "reduce" and n.label[0] == "sum" and not n.model]
    if len(sums) < len(values) or len({n.bound for n in sums}) > 1:
        return None
    apart = [opened(table, v, ranges) for v in values if isinstance(v, Ref)]
    dims, _, wide = apart[0]
    return reduced(table, Reduction("sum", 0, (merge(table, c, [b[0] for _, b, _ in apart], wide),), dims, ranges))


def _joined(table: Table, monoid: str, values: Sequence[Value]) -> Value | None:
    """Parts of one reduction by this monoid, as the reduction over all of them."""
    refs = [v for v in values if isinstance(v, Ref) and table.nodes[v.node].kind == "part"]
    if len(refs) < len(values) or len({(table.parted(v.node)[0], v.index) for v in refs}) > 1:
        return None
    base = table.parted(refs[0].node)[0]
    if table.merges_by(base) != monoid:
        return None
    domain = join_all([table.parted(v.node)[1] for v in refs], monoid in ("max", "min"))
    return None if domain is None else table.part(base, domain, refs[0].index)


def _summed(table: Table, values: Sequence[Value], share: Fraction, ranges: Ranges) -> Value | None:
    """The sum of values: partial sums of one reduction joined, equal terms counted; in the form of the longest value."""
    every = [_terms(table, v) for v in values]
    found: dict[Key, list[tuple[_Term, Domain | None]]] = {}
    for t in (t for terms in every for t in terms):
        base, domain = _based(table, t.core)
        found.setdefault((t.factors, base), []).append((t, domain))
    totals: dict[Key, tuple[Value, Fraction]] = {}
    for key, terms in found.items():
        total = _total(table, terms)
        if total is None:
            return None
        totals[key] = total[0], share * total[1]
    form = {(t.factors, _based(table, t.core)[0]): t for t in max(every, key=len)}
    out: Value | None = None
    for key in (*form, *(k for k in totals if k not in form)):
        core, coef = totals[key]
        if not coef:
            continue
        minus, here = _instead(table, form.get(key, found[key][0][0]), core, coef, ranges)
        if out is None:
            out = table.call("neg", (here,), table.dtype(here), ranges) if minus else here
        else:
            out = table.call("sub" if minus else "add", (out, here), table.dtype(out), ranges)
    return out


def _total(table: Table, terms: Sequence[tuple[_Term, Domain | None]]) -> tuple[Value, Fraction] | None:
    """Core and number of terms that differ in number and domain alone; None where they do not add up to one."""
    core = terms[0][0].core
    domains = [d for _, d in terms if d is not None]
    if not domains:
        return core, sum((t.coef for t, _ in terms), Fraction(0))
    assert isinstance(core, Ref)
    base = table.parted(core.node)[0]
    whole = join_all(domains, False)
    if whole is None or len({t.coef for t, _ in terms}) > 1:
        covered = ", ".join(d.text() for d in domains)
        table.miss(f"of the points that the model adds once each the group adds {covered}", table.origin(base))
        return None
    return table.part(base, whole, core.index), terms[0][0].coef


def _instead(table: Table, t: _Term, core: Value, coef: Fraction, ranges: Ranges) -> tuple[bool, Value]:
    """Whether to subtract, and what: a term of one program with its sum over the group in place of it."""
    if abs(coef) == abs(t.own):
        return coef != t.own, _with_core(table, t.whole, t.core, core, ranges)
    out = core
    for fn, y in t.factors:
        out = table.call(fn, (out, y), table.dtype(out), ranges)
    return coef < 0, table.multiple(out, abs(coef), table.dtype(out), ranges)


def _based(table: Table, core: Value) -> tuple[object, Domain | None]:
    """What a core is a part of, with which part it is; itself where it is whole."""
    if isinstance(core, Ref) and table.nodes[core.node].kind == "part":
        base, domain = table.parted(core.node)
        if table.merges_by(base) == "sum":
            return ("part", base, core.index), domain
    return ("whole", core), None


def _terms(table: Table, v: Value) -> list[_Term]:
    """A value as a sum of terms: opened where a program made it of partial sums, or of what the model does not compute."""
    alone = [_Term(Fraction(1), (), v, v, Fraction(1))]
    if not isinstance(v, Ref):
        return alone
    node = table.nodes[v.node]
    fn = node.label[0] if node.kind == "call" else ""
    if not fn or (node.model and not table.has_part(v.node)):
        return alone
    args = table.arguments(v)
    if fn in ("add", "sub"):
        sign = 1 if fn == "add" else -1
        second = [replace(t, coef=t.coef * sign) for t in _terms(table, args[1])]
        return _terms(table, args[0]) + second
    scaled = _scaled(table, fn, node.label[1], args)
    if scaled is None:
        return alone
    inner, scale, factors = scaled
    out = [replace(t, coef=t.coef * scale, factors=(*t.factors, *factors)) for t in inner]
    if len(out) == 1:
        return [replace(out[0], whole=v, own=out[0].coef)]
    return [replace(t, own=Fraction(0)) for t in out] if factors else out


def _scaled(
    table: Table, fn: str, dtype: str, args: Sequence[Value]
) -> tuple[list[_Term], Fraction, tuple[tuple[str, Value], ...]] | None:
    """The terms of a call that is linear in one argument, with what it multiplies them by."""
    if fn == "neg" or (fn == "cast" and dtype in FLOATS and table.dtype(args[0]) in FLOATS):
        return _terms(table, args[0]), Fraction(-1 if fn == "neg" else 1), ()
    if fn not in ("mul", "div") or (fn == "div" and dtype not in FLOATS):
        return None  # (a quotient of whole numbers is cut off)
    x, y = args
    if fn == "mul" and (isinstance(x, Const) or (isinstance(y, Ref) and table.has_part(y.node))):
        x, y = y, x
    if isinstance(y, Const) and y.value and math.isfinite(y.value):
        return _terms(table, x), Fraction(y.value) if fn == "mul" else 1 / Fraction(y.value), ()
    if isinstance(x, Ref) and table.has_part(x.node) and isinstance(y, Ref) and not table.has_part(y.node):
        return _terms(table, x), Fraction(1), ((fn, y),)
    return None


def _with_core(table: Table, v: Value, old: Value, new: Value, ranges: Ranges) -> Value:
    """A chain of operations on one term, on another core."""
    if v == old:
        return new
    if not isinstance(v, Ref) or table.nodes[v.node].kind != "call":
        return v
    node = table.nodes[v.node]
    args = [_with_core(table, a, old, new, ranges) if a == old or _made_of(table, a, old) else a for a in table.arguments(v)]
    return table.call(node.label[0], args, node.label[1], ranges)


def _made_of(table: Table, v: Value, core: Value) -> bool:
    """Whether a term's chain goes on into a value: partial sums, and what no model computes, are chains."""
    if not isinstance(v, Ref) or not isinstance(core, Ref):
        return False
    return table.has_part(v.node) or (table.nodes[v.node].kind == "call" and not table.nodes[v.node].model)
