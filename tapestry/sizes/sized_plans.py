"""One plan at several sizes: its graph made again at each, the same strategies lowered, and its integers fitted.

A graph at another size is made of the model by the passes that made the first one, and by the same moves; so is the program by
the same strategies. What differs in more than integers, or in an integer that no formula gives, is no plan for both sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import Any

import numpy as np

from tapestry.build.sized_builds import symbolic
from tapestry.build.store import Build
from tapestry.compiler import pipeline
from tapestry.errors import ModelError, TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.many_sizes.size_formula import Formula, Sizes
from tapestry.ir.many_sizes.symbolic_plan import Flat, SymbolicPlan, alike, flat, with_formulas
from tapestry.ir.program import Free, Program, Step, Transfer, allocated
from tapestry.lift.sizes.model_sizes import SameModel
from tapestry.plan.lower import lower

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


# Formulas of integers that are known at some sizes: a guess, which the laws of the plan decide about.
#
# ``floor((p . n + q) / d)`` has the slope p / d along each symbol between sizes that differ by a multiple of d; what q may then
# be is an interval for each size, and all of them have a common one or the guess fails. A size for each remainder modulo d
# makes the formula unique; so do quotients that the model is known to make of its sizes, which are tried before others.


def fitted(
    values: Array, sizes: Sequence[Sizes], divisors: Sequence[int], known: Sequence[Formula] = ()
) -> tuple[dict[int, Formula], list[int]]:
    """Formulas of columns of integers.

    Args:
        values: [sizes, columns].
        divisors: the d to try, the first that fits is taken.
        known: quotients, multiples of which are tried where 1 does not fit.

    Returns:
        formulas by column, of those that are not the same at all sizes; and the columns that no formula fits.
    """
    changing = np.flatnonzero((values != values[:1]).any(axis=0))
    out, failed = dict[int, Formula](), list[int]()
    if not len(changing):
        return out, failed
    distinct, which = np.unique(values[:, changing], axis=1, return_inverse=True)
    found = [_formula(column, sizes, divisors, known) for column in distinct.T.tolist()]
    for at, k in zip(changing.tolist(), which.reshape(-1).tolist(), strict=True):
        formula = found[k]
        if formula is None:
            failed.append(at)
        else:
            out[at] = formula
    return out, failed


def _formula(
    column: Sequence[int], sizes: Sequence[Sizes], divisors: Sequence[int], known: Sequence[Formula]
) -> Formula | None:
    plain = _with_divisor(column, sizes, 1)
    if plain is not None:
        return plain
    of_known = next(filter(None, (_multiple(column, sizes, f) for f in known)), None)
    if of_known is not None:
        return of_known
    found = next(filter(None, (_with_divisor(column, sizes, d) for d in divisors)), None)
    step = gcd(*(v - column[0] for v in column))
    if found is not None or step == 1:
        return found
    steps = [(v - column[0]) // step for v in column]
    found = next(filter(None, (_with_divisor(steps, sizes, d) for d in divisors)), None)
    return None if found is None else found.scaled(step, column[0])


def _multiple(column: Sequence[int], sizes: Sequence[Sizes], f: Formula) -> Formula | None:
    """So many times a formula and a number, if that is the column."""
    values = [f.at(size) for size in sizes]
    other = next((k for k, v in enumerate(values) if v != values[0]), None)
    if other is None or (column[other] - column[0]) % (values[other] - values[0]):
        return None
    times = (column[other] - column[0]) // (values[other] - values[0])
    found = f.scaled(times, column[0] - times * values[0]) if times else None
    return found if found is not None and [found.at(size) for size in sizes] == list(column) else None


def _with_divisor(column: Sequence[int], sizes: Sequence[Sizes], d: int) -> Formula | None:
    slopes: list[int] = []
    for k in range(len(sizes[0])):
        slope = _slope(column, sizes, k, d)
        if slope is None:
            return None
        slopes.append(slope)
    least = [d * v - sum(p * n for p, n in zip(slopes, size, strict=True)) for v, size in zip(column, sizes, strict=True)]
    low, high = max(least), min(least) + d - 1
    if low > high:
        return None
    const = min(max(0, low), high)
    g = gcd(d, *slopes)
    return Formula(tuple(p // g for p in slopes), const // g, d // g)


def _slope(column: Sequence[int], sizes: Sequence[Sizes], k: int, d: int) -> int | None:
    """d times the slope along one symbol, from two sizes that differ in it alone, by a multiple of d; 0 if it never varies."""
    first, varies = sizes[0], False
    for v, size in zip(column[1:], sizes[1:], strict=True):
        by = size[k] - first[k]
        varies = varies or by != 0
        if by and by % d == 0 and all(a == b for j, (a, b) in enumerate(zip(size, first, strict=True)) if j != k):
            return d * (v - column[0]) // by if d * (v - column[0]) % by == 0 else None
    return None if varies else 0


MOST_AROUND = 32  # sizes of a symbol at which strategies are lowered
NOTHING = Program(devices=0, buffers={}, steps=(), outputs={})


class OtherPlan(TapestryError):
    """At some sizes the plan is another one, in more than its sizes."""

    def __init__(self, what: str, sizes: Sizes, why: str = "") -> None:
        super().__init__(what, why=why)
        self.sizes = sizes


@dataclass
class PlanAtSizes:
    """A plan that was made at some sizes, and the same one at others.

    Attributes:
        options: of the compilation, whose ``shapes`` are those of the symbols that are fixed.
        symbols: those that have a range, in order.
        build: the plan, made at ``sizes``.
        constants: derived constants of the plan.
        same: what the model does with its sizes.
        graphs: by sizes, without what a graph says of its weights.
    """

    options: pipeline.Options
    symbols: Sequence[str]
    build: Build
    sizes: Sizes
    constants: Mapping[str, np.ndarray[Any, Any]]
    same: SameModel
    graphs: dict[Sizes, Graph] = field(default_factory=dict[Sizes, Graph])

    def graph(self, sizes: Sizes) -> Graph:
        """The graph at some sizes, made from the model by the moves of the plan.

        Raises:
            OtherPlan: the model or the moves make another one there.
        """
        if sizes not in self.graphs:
            try:
                found = pipeline.graph_again(self.options_at(sizes), self.build)
            except ModelError:
                raise
            except TapestryError as e:
                raise OtherPlan("the moves of the plan are not there", sizes, f"{e.where}: {e.what}") from None
            mine, new = _derived(self.build.plan.graph), _derived(found)
            if mine != new:
                name = min(set(mine) ^ set(new) or set(mine))
                raise OtherPlan("a constant of the model depends on its sizes", sizes, f"'{name}'")
            self.graphs[sizes] = replace(found, weights={})
        return self.graphs[sizes]

    def options_at(self, sizes: Sizes) -> pipeline.Options:
        """What a plan is made of at some sizes; weights are not read again."""
        return replace(
            self.options, shapes={**self.options.shapes, **dict(zip(self.symbols, sizes, strict=True))}, weights=False
        )

    @property
    def base(self) -> Graph:
        """The plan's graph without what it says of weights."""
        return replace(self.build.plan.graph, weights={})

    def graph_formulas(self, sizes: Sequence[Sizes]) -> dict[int, Formula]:
        """Formulas of the integers of the graph, by place, from the graphs at some sizes.

        Raises:
            OtherPlan: graphs differ in more than integers, or an integer has no formula.
        """
        return self._fit([flat(g) for g in [self.base, *map(self.graph, sizes)]], sizes, (2, *self._divisors))

    def with_sizes(self, sizes: Sequence[Sizes]) -> tuple[dict[int, Formula], SymbolicPlan]:
        """The plan with formulas, by place of its integers, from graphs at some sizes.

        Raises:
            OtherPlan: likewise, of graphs or of programs.
        """
        of_graph = self.graph_formulas(sizes)
        graphs = with_formulas(self.base, NOTHING, of_graph)
        devices = self.build.program.devices
        period = devices * math.lcm(*self._divisors)
        others = _around(self.sizes, min(period, MOST_AROUND)) if devices > 1 else list(sizes)
        programs = [self.build.program, *(self.lowered(graphs.at(n)[0], n) for n in others)]
        if flat(self.lowered(self.build.plan.graph, self.sizes)) != flat(self.build.program):
            raise OtherPlan("the plan's program is not that of its strategies", self.sizes)
        divisors = [d for d in range(1, period + 1) if period % d == 0]
        of_program = self._fit([flat(p) for p in programs], others, divisors)
        behind = len(flat(self.base).integers)
        places = {**of_graph, **{behind + at: f for at, f in of_program.items()}}
        return places, symbolic(self.build, places)

    def lowered(self, graph: Graph, sizes: Sizes) -> Program:
        """The program of the plan's strategies for a graph, its steps in the plan's order and called as there: a halo of half a
        block is an exchange of parts where the block has one cell more.

        Raises:
            OtherPlan: it has other steps.
        """
        weights = self.build.plan.graph.weights
        program = lower(replace(self.build.plan, graph=replace(graph, weights=weights)))
        steps = {_key(s): s for s in program.steps}
        if len(steps) != len(self._order) or not all(k in steps for k in self._order):
            raise OtherPlan("other transfers are needed", sizes)
        mine = zip(self.build.program.steps, (steps[k] for k in self._order), strict=True)
        named = (replace(s, kind=b.kind) if isinstance(s, Transfer) and isinstance(b, Transfer) else s for b, s in mine)
        return replace(program, steps=tuple(named))

    @property
    def _divisors(self) -> list[int]:
        return sorted({f.div for f in self.same.grid.quotients})

    @cached_property
    def _order(self) -> list[tuple[str, tuple[str, ...]]]:
        return [_key(s) for s in self.build.program.steps]

    def _fit(self, flats: Sequence[Flat], sizes: Sequence[Sizes], divisors: Sequence[int]) -> dict[int, Formula]:
        other = next((k for k, f in enumerate(flats[1:]) if not alike([flats[0], f])), None)
        if other is not None:
            raise OtherPlan("the plan differs in more than sizes", sizes[other], _difference(flats[0], flats[other + 1]))
        values = np.array([f.integers for f in flats], np.int64)
        known = sorted(self.same.grid.quotients, key=lambda f: (f.div, f.coefs, f.const))
        found, failed = fitted(values, [self.sizes, *sizes], divisors, known)
        if failed:
            why = f"it is {', '.join(str(n) for n in values[:, failed[0]].tolist())}"
            raise OtherPlan("a number of the plan is no linear function of the sizes", sizes[0], why)
        return found


def _key(step: Step) -> tuple[str, tuple[str, ...]]:
    return type(step).__name__, step.buffers if isinstance(step, Free) else allocated(step)


def _around(sizes: Sizes, devices: int) -> list[Sizes]:
    """Sizes for each remainder of a cut into so many parts, of one symbol at a time; and one of all together."""
    out = [tuple(n + by * (j == k) for j, n in enumerate(sizes)) for k in range(len(sizes)) for by in range(1, devices + 1)]
    return [*out, tuple(2 * n + 1 for n in sizes)] if len(sizes) > 1 else out


def _derived(graph: Graph) -> dict[str, str]:
    """The hashes of the constants that are no weight of the model, by name."""
    return {t: w.sha256 for t, w in graph.weights.items() if not w.file}


def _difference(one: Flat, other: Flat) -> str:
    """The first thing that is not the same in two plans."""
    pairs = zip(one.rest, other.rest, strict=False)
    return next((f"{str(a)[:60]} and {str(b)[:60]}" for a, b in pairs if a != b), "one has more than the other")
