"""Find a plan: the cheapest choice of strategies, then the cheapest that keeps to the memory, with a proven bound."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tapestry.errors import PlanError
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Layout, Plan
from tapestry.ir.program import Launch, Program, Reduce, alive_at, peak_bytes
from tapestry.plan.layout_constraints import Fixed
from tapestry.plan.lower import lower
from tapestry.plan.search import to_ring
from tapestry.plan.search.problem import Problem, build, memory_row
from tapestry.plan.search.resume import Start, beginning, fingerprint
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.network import Factor, Solution, evaluate, solve
from tapestry.plan.strategy import Pin
from tapestry.plan.topology import Topology

SQUEEZE_SECONDS = 5.0  # for a last search near the plan with the least memory, before giving up
GRACE_SECONDS = 1.0  # for the same when the time is up and nothing fits yet
FIRST = 0.6  # of the time left, for prices that make a plan fit
PROVED = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan with its program, its cost in seconds, a proven lower bound of any plan's cost, and what the search saw."""

    plan: Plan
    program: Program
    objective: float
    bound: float
    distinct: int
    problem: Problem | None = field(default=None, compare=False, repr=False)

    @property
    def gap(self) -> float:
        """``(objective - bound) / objective``: 0 means proved optimal."""
        return max(0.0, self.objective - self.bound) / self.objective if self.objective > 0 else 0.0


class TooBig(PlanError):
    """Nothing fits into the devices' memory; ``found`` is the plan with the least that was found."""

    def __init__(self, found: Found, what: str, *, why: str, hint: str) -> None:
        super().__init__(what, why=why, hint=hint)
        self.found = found


def search(
    graph: Graph,
    topo: Topology,
    *,
    pins: Mapping[int, tuple[Pin, ...]] | None = None,
    inputs: Mapping[str, Layout] | None = None,
    outputs: Mapping[str, Layout] | None = None,
    fixed: Fixed = Fixed(),  # noqa: B008  (immutable)
    time_limit: float | Budget = 60.0,
    start: Start | None = None,
) -> Found:
    """The best plan that the strategies allow within the devices' memory.

    Args:
        pins: splits that the user insists on, by operation.
        inputs, outputs: layouts fixed for graph inputs (or weights) and outputs.
        fixed: what annotations of the model say of its operations.
        time_limit: seconds, or a budget that may be interrupted; a plan comes out of none at all.
        start: what an earlier search found; what is found is never worse, as far as it applies.

    Raises:
        PlanError: no plan fits (or was found in time); says by how many bytes, on which device, and for which tensors.
    """
    return fitting(build(graph, topo, pins or {}, inputs or {}, outputs or {}, fixed), Budget.of(time_limit), start)


def fitting(problem: Problem, budget: Budget, start: Start | None = None) -> Found:
    """The best plan of a problem within the devices' memory.

    Raises:
        TooBig: no plan fits, or none was found in time.
    """
    found, limit = spatial(problem, budget, start), problem.topo.device.memory
    if peak(found) > limit:
        raise too_big(found, limit, budget)
    return found


def spatial(problem: Problem, budget: Budget, start: Start | None = None, squeeze: bool = True) -> Found:
    """The best plan of a problem that fits; where none was found, the one with the least memory.

    Args:
        start: what an earlier search found.
        squeeze: whether to look once more near the plan with the least memory before giving up.
    """
    limit = problem.topo.device.memory
    choice = beginning(problem, start) if start else None
    bound = start.bound if start and np.isfinite(start.bound) and fingerprint(problem) == start.key else -np.inf
    begun = found_plan(problem, Solution(choice, 0.0, bound), bound) if choice else None
    if begun is not None and (peak(begun) > limit or not np.isfinite(begun.objective)):
        begun = None
    if begun is not None and begun.objective - begun.bound <= PROVED * begun.objective:
        return begun
    first = solve(problem.sizes, problem.factors, budget, choice)
    gathered = found_plan(problem, first, max(first.bound, bound))
    found = turned(gathered)
    if peak(found) <= limit or max(problem.sizes, default=1) == 1:
        return found
    return turned(_within_memory(problem, gathered, budget, begun, bound, squeeze))


def turned(found: Found) -> Found:
    """The plan with gathers of keys and values as rings, where only so it fits (or is nearer to it), or where it is faster."""
    assert found.problem
    topo = found.problem.topo
    other = to_ring.turned(found.plan, topo)
    if other is None:
        return found
    plan, program, extra = other
    new = replace(found, plan=plan, program=program, objective=found.objective + extra)
    if peak(found) > topo.device.memory:
        return new if peak(new) < peak(found) else found
    right = peak(new) <= topo.device.memory and to_ring.faster((plan, program), (found.plan, found.program), topo)
    return new if right else found


def cheapest(problems: Sequence[Problem], budget: Budget, start: Start | None = None) -> Found:
    """The cheapest plan of the problems that several ways to share out the mesh axes make; its bound holds for all of them.

    Raises:
        PlanError: no problem has a plan that fits; the first one's.
    """
    found: list[Found] = []
    failed: list[PlanError] = []
    for problem in problems:
        try:
            found.append(fitting(problem, budget, start))
        except PlanError as e:
            failed.append(e)
    if not found:
        raise failed[0]
    best = min(found, key=lambda f: f.objective)
    return best if len(found) == 1 else replace(best, bound=min(f.bound for f in found))


def found_plan(problem: Problem, solution: Solution, bound: float) -> Found:
    """The plan of a solution, lowered; the bound is never above its cost."""
    plan = Plan(
        graph=problem.graph, mesh=problem.topo.mesh, inputs=problem.inputs, outputs=problem.outputs,
        strategies=tuple(m.strategies[c] for m, c in zip(problem.menus, solution.choice, strict=True)),
        streamed=problem.streamed,
    )  # fmt: skip
    objective = evaluate(solution.choice, problem.factors)
    return Found(
        plan=plan, program=lower(plan), objective=objective, bound=min(bound, objective), distinct=problem.distinct,
        problem=problem,
    )  # fmt: skip


@dataclass(slots=True)
class Prices:
    """Seconds per byte for memory held while some operations run."""

    problem: Problem
    rows: dict[int, list[np.ndarray]]
    price: dict[int, float]

    def solve(self, scale: float, costs: float, budget: Budget) -> tuple[Solution, float]:
        """Minimise ``costs * time + price * memory``; the value is a Lagrangian lower bound when ``costs`` is 1."""
        sizes, limit = self.problem.sizes, self.problem.topo.device.memory
        scaled = {id(f.table): f.table if costs == 1.0 else f.table * costs for f in self.problem.factors}
        factors = [Factor(f.nodes, scaled[id(f.table)]) for f in self.problem.factors]
        for at, rows in self.rows.items():
            factors += [Factor((i,), scale * self.price[at] * row) for i, row in enumerate(rows) if row.any()]
        solution = solve(sizes, factors, budget)
        return solution, solution.bound - scale * sum(self.price.values()) * limit


def _within_memory(problem: Problem, found: Found, budget: Budget, begun: Found | None, known: float, squeeze: bool) -> Found:
    """Raise the price of memory until the plan fits, then lower it again while it still does.

    The bound is the Lagrangian dual (Geoffrion 1974): for any prices, the minimum of cost plus price times excess is at
    most the cost of every plan that fits, because the rows underestimate the memory of a program.
    """
    prices = Prices(problem, {}, {})
    best, smallest, bound = _raised(prices, found, budget.share(FIRST))
    bound = max(bound, known)  # above the cost of plans that do not fit
    if best is None and begun is None:
        best = _smallest(prices, smallest, bound, budget, squeeze)
        if peak(best) > problem.topo.device.memory:
            return best
    best = min((f for f in (best, begun) if f is not None), key=lambda f: f.objective)
    low, high = 0.0, 1.0
    for _ in range(8):
        if budget.over() or not prices.price or best.objective <= bound * (1 + 1e-3):
            break
        middle = (low + high) / 2
        solution, dual = prices.solve(middle, 1.0, budget)
        bound = max(bound, dual)
        found = found_plan(problem, solution, bound)
        if peak(found) <= problem.topo.device.memory:
            high = middle
            best = min(best, found, key=lambda f: f.objective)
        else:
            low = middle
    return replace(best, bound=min(bound, best.objective))


def _raised(prices: Prices, found: Found, budget: Budget) -> tuple[Found | None, Found, float]:
    """(the first plan that fits, if any, the plan with the least memory, the best bound) as the price of memory rises."""
    bound, smallest, limit = found.bound, found, prices.problem.topo.device.memory
    unit = found.objective / limit
    for _ in range(40):
        if budget.over():
            break
        raise_price(prices, found, unit)
        if any(sum(float(row.min()) for row in rows) > limit for rows in prices.rows.values()):
            break  # the rows underestimate: no choice of strategies fits there
        solution, dual = prices.solve(1.0, 1.0, budget)
        bound = max(bound, dual)
        found = found_plan(prices.problem, solution, bound)
        smallest = min(smallest, found, key=peak)
        if peak(found) <= limit:
            return found, smallest, bound
    return None, smallest, bound


def _smallest(prices: Prices, smallest: Found, bound: float, budget: Budget, squeeze: bool) -> Found:
    """A plan with as little memory as can be found: memory alone counts, then a search around the best."""
    limit, grace = prices.problem.topo.device.memory, budget
    if not prices.price:
        raise_price(prices, smallest, smallest.objective / limit)
    if budget.over() and not budget.interrupted():
        grace = Budget(time.monotonic() + GRACE_SECONDS, budget.interrupt)
    solution, _ = prices.solve(1.0, 1e-6, grace)
    last = found_plan(prices.problem, solution, bound)
    smallest = min(smallest, last, key=peak)
    return _squeeze(prices.problem, smallest, grace.part(SQUEEZE_SECONDS)) if squeeze else smallest


def _squeeze(problem: Problem, found: Found, budget: Budget) -> Found:
    """Change operations that touch what is alive at the peak, one or two at a time, while the exact peak gets smaller."""
    limit, graph = problem.topo.device.memory, problem.graph
    while peak(found) > limit:
        most, at = peak_bytes(found.program)
        tensors = {found.program.buffers[b].tensor for b in alive_at(found.program, at[problem.topo.tightest(most)])}
        near = [i for i, op in enumerate(graph.ops) if tensors & {*op.inputs, *op.outs}]
        better = next(_smaller(problem, found, near, budget), None)
        if better is None:
            break
        found = better
    return found


def _smaller(problem: Problem, found: Found, near: list[int], budget: Budget) -> Iterator[Found]:
    now = [m.strategies.index(s) for m, s in zip(problem.menus, found.plan.strategies, strict=True)]
    for group in itertools.chain(itertools.combinations(near, 1), itertools.combinations(near, 2)):
        for picked in itertools.product(*(range(problem.sizes[i]) for i in group)):
            if budget.over():
                return
            choice = list(now)
            for i, c in zip(group, picked, strict=True):
                choice[i] = c
            other = found_plan(problem, Solution(choice, 0.0, found.bound), found.bound)
            if peak(other) < peak(found):
                yield other


def peak(found: Found) -> int:
    """Bytes that the tightest device needs, as if all devices had as much memory as the one that has least."""
    need = peak_bytes(found.program)[0]
    return found.problem.topo.strain(need) if found.problem else max(need)


def raise_price(prices: Prices, found: Found, unit: float) -> None:
    """Add the operation during which the plan needs most, or double its price."""
    most, at = peak_bytes(found.program)
    step = at[prices.problem.topo.tightest(most)]
    op = next((s.op for s in found.program.steps[step:] if isinstance(s, Launch | Reduce)), len(found.plan.graph.ops) - 1)
    if op in prices.price:
        prices.price = {k: p * 2 for k, p in prices.price.items()}
    else:
        prices.rows[op] = memory_row(prices.problem, op)
        prices.price[op] = max([unit, *prices.price.values()])


def too_big(found: Found, limit: int, budget: Budget, tried: str = "") -> TooBig:
    """By how much, on which device and for which tensors a plan does not fit; and what was tried."""
    most, at = peak_bytes(found.program)
    device = int(np.argmax(most))
    if found.problem:
        device = found.problem.topo.tightest(most)
        limit = found.problem.topo.memories()[device]
    alive = alive_at(found.program, at[device])
    largest = sorted(alive, key=lambda b: -found.program.buffers[b].nbytes(device))[:4]
    names = ", ".join(f"'{b}' {found.program.buffers[b].nbytes(device):,}" for b in largest)
    ended = "the search was interrupted before" if budget.interrupted() else "the time was up before" if budget.over() else ""
    return TooBig(
        found,
        f"{ended + ' a plan was found that fits' if ended else 'no plan fits'}: device {device} needs {most[device]:,} bytes"
        f" of {limit:,}, {most[device] - limit:,} too many",
        why=f"the plan with the least memory that was found holds there (bytes): {names}{tried}",
        hint=("more time (--time-limit), " if ended else "")
        + "more memory (--memory), more devices (--devices) or a smaller batch (--shape)",
    )
