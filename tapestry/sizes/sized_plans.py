"""One plan at several sizes: its graph made again at each, the same strategies lowered, and its integers fitted.

A graph at another size is made of the model by the passes that made the first one, and by the same moves; so is the program by
the same strategies. What differs in more than integers, or in an integer that no formula gives, is no plan for both sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from tapestry.sizes.formula_fit import fitted

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
