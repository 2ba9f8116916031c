"""Find a plan: the cheapest choice of strategies, then the cheapest that keeps to the memory, with a proven bound."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tapestry.errors import PlanError
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Layout, Plan
from tapestry.ir.program import Launch, Program, Reduce, alive_at, peak_bytes
from tapestry.plan.fixed import Fixed
from tapestry.plan.lower import lower
from tapestry.plan.search.network import Factor, Solution, evaluate, solve
from tapestry.plan.search.problem import Problem, build, memory_row
from tapestry.plan.strategy import Pin
from tapestry.plan.topology import Topology

SQUEEZE_SECONDS = 5.0  # for a last search near the plan with the least memory, before giving up


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan with its program, its cost in seconds, a proven lower bound of any plan's cost, and what the search saw."""

    plan: Plan
    program: Program
    objective: float
    bound: float
    distinct: int

    @property
    def gap(self) -> float:
        """``(objective - bound) / objective``: 0 means proved optimal."""
        return max(0.0, self.objective - self.bound) / self.objective if self.objective > 0 else 0.0


def search(
    graph: Graph,
    topo: Topology,
    *,
    pins: Mapping[int, tuple[Pin, ...]] | None = None,
    inputs: Mapping[str, Layout] | None = None,
    outputs: Mapping[str, Layout] | None = None,
    fixed: Fixed = Fixed(),  # noqa: B008  (immutable)
    time_limit: float = 60.0,
) -> Found:
    """The best plan that the strategies allow within the devices' memory.

    Args:
        pins: splits that the user insists on, by operation.
        inputs, outputs: layouts fixed for graph inputs (or weights) and outputs.
        fixed: what annotations of the model say of its operations.
        time_limit: seconds.

    Raises:
        PlanError: no plan fits; says by how many bytes, on which device, and for which tensors.
    """
    start = time.monotonic()
    problem = build(graph, topo, pins or {}, inputs or {}, outputs or {}, fixed)
    first = solve(problem.sizes, problem.factors, time_limit)
    found = found_plan(problem, first, first.bound)
    if max(peak_bytes(found.program)[0]) <= topo.device.memory:
        return found
    return _within_memory(problem, found, start + time_limit)


def found_plan(problem: Problem, solution: Solution, bound: float) -> Found:
    """The plan of a solution, lowered; the bound is never above its cost."""
    plan = Plan(
        graph=problem.graph, mesh=problem.topo.mesh, inputs=problem.inputs, outputs=problem.outputs,
        strategies=tuple(m.strategies[c] for m, c in zip(problem.menus, solution.choice, strict=True)),
    )  # fmt: skip
    objective = evaluate(solution.choice, problem.factors)
    return Found(plan=plan, program=lower(plan), objective=objective, bound=min(bound, objective), distinct=problem.distinct)


@dataclass(slots=True)
class Prices:
    """Seconds per byte for memory held while some operations run."""

    problem: Problem
    rows: dict[int, list[np.ndarray]]
    price: dict[int, float]

    def solve(self, scale: float, costs: float, time_limit: float) -> tuple[Solution, float]:
        """Minimise ``costs * time + price * memory``; the value is a Lagrangian lower bound when ``costs`` is 1."""
        sizes, limit = self.problem.sizes, self.problem.topo.device.memory
        factors = [Factor(f.nodes, f.table * costs) for f in self.problem.factors]
        for at, rows in self.rows.items():
            factors += [Factor((i,), scale * self.price[at] * row) for i, row in enumerate(rows) if row.any()]
        solution = solve(sizes, factors, time_limit)
        return solution, solution.bound - scale * sum(self.price.values()) * limit


def _within_memory(problem: Problem, found: Found, deadline: float) -> Found:
    """Raise the price of memory until the plan fits, then lower it again while it still does.

    The bound is the Lagrangian dual (Geoffrion 1974): for any prices, the minimum of cost plus price times excess is at
    most the cost of every plan that fits, because the rows underestimate the memory of a program.
    """
    limit = problem.topo.device.memory
    prices = Prices(problem, {}, {})
    bound, best, smallest = found.bound, None, found
    unit = found.objective / limit
    high = 1.0
    for _ in range(40):
        raise_price(prices, found, unit)
        solution, dual = prices.solve(1.0, 1.0, max(1.0, deadline - time.monotonic()))
        bound = max(bound, dual)
        found = found_plan(problem, solution, bound)
        smallest = min(smallest, found, key=_peak)
        if _peak(found) <= limit:
            best = found
            break
        if time.monotonic() > deadline:
            break
    if best is None:
        solution, _ = prices.solve(1.0, 1e-6, max(1.0, deadline - time.monotonic()))
        last = found_plan(problem, solution, bound)
        smallest = _squeeze(problem, min(smallest, last, key=_peak), min(deadline, time.monotonic() + SQUEEZE_SECONDS))
        if _peak(smallest) > limit:
            raise _too_big(smallest, limit)
        best = smallest
    low = 0.0
    for _ in range(8):
        if time.monotonic() > deadline or best.objective <= bound * (1 + 1e-3):
            break
        middle = (low + high) / 2
        solution, dual = prices.solve(middle, 1.0, max(1.0, deadline - time.monotonic()))
        bound = max(bound, dual)
        found = found_plan(problem, solution, bound)
        if _peak(found) <= limit:
            high = middle
            best = min(best, found, key=lambda f: f.objective)
        else:
            low = middle
    return Found(
        plan=best.plan, program=best.program, objective=best.objective, bound=min(bound, best.objective), distinct=best.distinct
    )


def _squeeze(problem: Problem, found: Found, deadline: float) -> Found:
    """Change operations that touch what is alive at the peak, one or two at a time, while the exact peak gets smaller."""
    limit, graph = problem.topo.device.memory, problem.graph
    while _peak(found) > limit:
        peak, at = peak_bytes(found.program)
        tensors = {found.program.buffers[b].tensor for b in alive_at(found.program, at[int(np.argmax(peak))])}
        near = [i for i, op in enumerate(graph.ops) if tensors & {*op.inputs, *op.outs}]
        better = next(_smaller(problem, found, near, deadline), None)
        if better is None:
            break
        found = better
    return found


def _smaller(problem: Problem, found: Found, near: list[int], deadline: float) -> Iterator[Found]:
    now = [m.strategies.index(s) for m, s in zip(problem.menus, found.plan.strategies, strict=True)]
    for group in itertools.chain(itertools.combinations(near, 1), itertools.combinations(near, 2)):
        for picked in itertools.product(*(range(problem.sizes[i]) for i in group)):
            if time.monotonic() > deadline:
                return
            choice = list(now)
            for i, c in zip(group, picked, strict=True):
                choice[i] = c
            other = found_plan(problem, Solution(choice, 0.0, found.bound), found.bound)
            if _peak(other) < _peak(found):
                yield other


def _peak(found: Found) -> int:
    return max(peak_bytes(found.program)[0])


def raise_price(prices: Prices, found: Found, unit: float) -> None:
    """Add the operation during which the plan needs most, or double its price."""
    peak, at = peak_bytes(found.program)
    step = at[int(np.argmax(peak))]
    op = next((s.op for s in found.program.steps[step:] if isinstance(s, Launch | Reduce)), len(found.plan.graph.ops) - 1)
    if op in prices.price:
        prices.price = {k: p * 2 for k, p in prices.price.items()}
    else:
        prices.rows[op] = memory_row(prices.problem, op)
        prices.price[op] = max([unit, *prices.price.values()])


def _too_big(found: Found, limit: int) -> PlanError:
    peak, at = peak_bytes(found.program)
    device = int(np.argmax(peak))
    alive = alive_at(found.program, at[device])
    largest = sorted(alive, key=lambda b: -found.program.buffers[b].nbytes(device))[:4]
    names = ", ".join(f"'{b}' {found.program.buffers[b].nbytes(device):,}" for b in largest)
    return PlanError(
        f"no plan fits: device {device} needs {peak[device]:,} bytes of {limit:,}, {peak[device] - limit:,} too many",
        why=f"the plan with the least memory that was found holds there (bytes): {names}",
        hint="more memory (--memory), more devices (--devices) or a smaller batch (--shape)",
    )
