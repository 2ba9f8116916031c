"""Sums that are scaled later: ``exp(a - b)`` times a sum of ``exp(x - a) …`` and a quotient of a sum are sums themselves.

So a softmax that goes through its row part by part, with a greatest value, a sum and a weighted sum that are rescaled
whenever a greater value comes, is known as the softmax of the row. What holds of every sum of real numbers is all that is
used: a factor that does not depend on what is summed may be in each term, and ``exp(x - a) * exp(a - b)`` is ``exp(x - b)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from tapestry.ir.graph import Dim
from tapestry.ir.index import dim
from tapestry.ir.types import FLOATS
from tapestry.tools.prove.reductions import Reduction, alike, opened, reduced
from tapestry.tools.prove.values import Ranges, Ref, Table, Value, keyed

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
