"""The laws of monoids that are not the package's own, tried on states that a graph's own operations make.

A merge that is not associative would give other results on other meshes, and no other law would see it. The states are what
an operation's body gives for drawn values of what it reads, and merges of those: what else the fields could hold is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapestry.errors import LawError
from tapestry.ir.expr import Expr
from tapestry.ir.graph import Block, Graph
from tapestry.ir.laws import where
from tapestry.ir.monoid import BUILT_IN, MONOIDS, Monoid
from tapestry.ir.types import FLOATS, Array, numpy_dtype
from tapestry.verify.interp import value

State = tuple[Array, ...]
DRAWS = 256  # states of each operation
NEAR = 1e-9  # of the greatest number in what is merged: rounding in float64
LAW = "monoid"


def check_monoids(graph: Graph) -> int:
    """Try the laws of every monoid of the graph that is none of the package's own; how many were tried, on all states.

    Raises:
        LawError: naming the operation, the law and three states.
    """
    tried, seen = 0, set[tuple[str, tuple[Expr, ...]]]()
    for op in graph.ops:
        if not isinstance(op, Block):
            continue
        reductions = [(op.monoid, op.body), *((s.monoid, (s.body,)) for s in op.inner)]
        for name, body in reductions:
            if name is None or (name, body) in seen or all(n in BUILT_IN for n in name.split(".")):
                continue
            seen.add((name, body))
            tried += _tried(MONOIDS[name], _states(op, body, graph), tuple(e.dtype for e in body), where(op))
    return tried


def _states(op: Block, body: tuple[Expr, ...], graph: Graph) -> State:
    """What a body gives for drawn reads, inner values and indices."""
    rng = np.random.default_rng(0)
    reads = [_drawn(rng, graph.tensors[r.tensor].dtype) for r in op.reads]
    lets = [_drawn(rng, s.body.dtype) for s in op.inner]
    places = {d.name: rng.integers(0, max(d.size, 1), DRAWS) for d in op.space}
    with np.errstate(all="ignore"):
        found = [value(e, reads, lets, places, True) for e in body]
    return tuple(np.broadcast_to(x, (DRAWS,)) for x in found)


def _drawn(rng: np.random.Generator, dtype: str) -> Array:
    """Numbers of a type (wide, if it is a float), with zeros and repetitions among them."""
    if dtype in FLOATS:
        drawn = np.where(rng.random(DRAWS) < 0.25, rng.integers(-3, 4, DRAWS), 3 * rng.standard_normal(DRAWS))
        return drawn.astype(numpy_dtype(dtype, True))
    low = 0 if dtype == "bool" or dtype.startswith("u") else -5
    return rng.integers(low, 2 if dtype == "bool" else 6, DRAWS).astype(numpy_dtype(dtype, True))


def _tried(monoid: Monoid, made: State, dtypes: tuple[str, ...], place: str) -> int:
    """The laws on the states, and on merges of two and of three of them."""
    combined = monoid.combiner(dtypes)

    def merge(a: State, b: State) -> State:
        with np.errstate(all="ignore"):
            found = [value(e, [*a, *b], [], {}, True) for e in combined]
        return tuple(np.broadcast_to(x, (DRAWS,)) for x in found)

    zero = tuple(np.full(DRAWS, c.value, numpy_dtype(d, True)) for c, d in zip(monoid.zero(dtypes), dtypes, strict=True))
    a, b, c = (tuple(np.roll(x, k) for x in made) for k in (0, 1, 7))
    two, three = merge(a, b), merge(merge(a, b), c)
    pairs: list[tuple[str, State, State, Sequence[State]]] = []
    for x, y, z in ((a, b, c), (two, c, three), (three, a, two)):
        pairs.append(("(xy)z = x(yz)", merge(merge(x, y), z), merge(x, merge(y, z)), (x, y, z)))
        pairs += [("x1 = x", merge(x, zero), x, (x,)), ("1x = x", merge(zero, x), x, (x,))]
        pairs += [("xy = yx", merge(x, y), merge(y, x), (x, y))] if monoid.commutative else []
    for law, left, right, of in pairs:
        _check_states(monoid.name, law, left, right, of, place)
    return DRAWS * len(pairs)


def _check_states(name: str, law: str, left: State, right: State, of: Sequence[State], place: str) -> None:
    with np.errstate(all="ignore"):
        numbers = [np.abs(x.astype(np.float64)) for s in (left, right, *of) for x in s]
        scale = np.max([np.where(np.isfinite(x), x, 0.0) for x in numbers], axis=0)
        same = np.ones(DRAWS, bool)
        for x, y in zip(left, right, strict=True):
            near = np.abs(x.astype(np.float64) - y.astype(np.float64)) <= NEAR * scale if x.dtype.kind == "f" else x == y
            same &= near | (x == y) | ((x != x) & (y != y))
    if not same.all():
        k = int(np.flatnonzero(~same)[0])
        states = "; ".join(f"{v} = {tuple(x[k].item() for x in s)}" for v, s in zip("xyz", of, strict=False))
        sides = " and ".join(str(tuple(x[k].item() for x in s)) for s in (left, right))
        raise LawError(LAW, f"'{name}' does not keep {law}", where=place, why=f"with {states} the sides are {sides}")
