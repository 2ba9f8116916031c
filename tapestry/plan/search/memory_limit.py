"""Plans within a limit on memory: the solver keeps to it, on a lower estimate of what every choice of strategies holds.

The estimate is linear in the choices and never above the memory of the program that the plan is lowered to, so the solver's
bound holds for every plan that fits. What lowering adds (buffers for transfers, loads that last longer) is seen on the
program: where it passes the limit, the estimate gets that much less room there, and the solver is asked again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tapestry.ir.program import Launch, Program, Reduce, alive_at, alive_bytes, peak_bytes
from tapestry.ir.types import itemsize
from tapestry.plan.cost import compute
from tapestry.plan.search.priced_plan import NEAR, PricedPlan, choice_of, peak, priced_plan
from tapestry.plan.search.problem import Problem, watched
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.network import Network, solve
from tapestry.plan.solver.pairs import PROVED, Solution
from tapestry.plan.solver.shared_prices import Demand
from tapestry.plan.topology import Topology

SOLVE = 5.0 * SECOND  # for one solve
ATTEMPTS = 12  # solves with less and less room before it is said that nothing fits
HALVINGS = 3  # solves that give room back, or look for the least memory
SQUEEZE = 5.0 * SECOND  # for a last search near the plan with the least memory, before giving up
GRACE = SECOND  # for the same when the budget is over and nothing fits yet


def demands(problem: Problem, *, surely: bool) -> list[Demand]:
    """What the choices hold on the watched device over time, which is counted in operations; linear in the choices.

    Weights (charged to their first reader), what an operation loads for itself, results, partial states while they are merged.

    Args:
        surely: results count until their first reader: never more than the program's memory. Otherwise until their last one,
            which is too much where the first one takes a smaller copy and nobody needs the whole any more.
    """
    graph, count = problem.graph, len(problem.graph.ops)
    readers, outputs = graph.consumers(), set(graph.outputs)
    charged: set[str] = set()
    out: list[Demand] = []
    for i, (op, menu) in enumerate(zip(graph.ops, problem.menus, strict=True)):
        for n, t in enumerate(op.outs):
            ends = readers.get(t, (i,))
            last = count - 1 if t in outputs else min(ends) if surely else max(ends)
            out.append(Demand(i, i + 1, last + 1, menu.outs_bytes[:, n]))
        # what it reads may be gone when partial states are merged into results
        now = np.where(menu.state_bytes > 0, menu.held_states, menu.outs_bytes.sum(axis=1))
        stays, mine = np.zeros(len(now)), set[str]()
        for k, t in enumerate(op.operands):
            if t in problem.inputs or t in mine:
                continue
            # weights stay; inputs and streamed weights are loaded for an operation that reads them
            if t in graph.inputs or t in problem.streamed:
                now = now + _read_bytes(problem, i, k, t)
                mine.add(t)
            elif t in graph.weights and t not in charged:
                stays = stays + _read_bytes(problem, i, k, t)
                charged.add(t)
        out += [Demand(i, i, i + 1, now), Demand(i, 0, count, stays)]
    return [d for d in out if d.lo < d.hi and d.amounts.any()]


def _read_bytes(problem: Problem, reader: int, position: int, tensor: str) -> np.ndarray:
    """Bytes of what an operation reads of a tensor on the watched device, by its choices."""
    width, at = itemsize(problem.graph.tensors[tensor].dtype), watched(problem.topo)
    boxes = np.stack([r[position][at] for r in problem.menus[reader].reads])
    return compute.sizes(boxes) * width


def needed_bytes(program: Program, topo: Topology, operations: int) -> np.ndarray:
    """Most bytes that the tightest device needs while each operation runs, as if all had as much as the one that has least."""
    out, memories = np.zeros(operations, np.int64), np.array(topo.memories(), np.int64)
    now = [int((alive - memories).max()) + topo.device.memory for alive in alive_bytes(program)]
    np.maximum.at(out, operations_served(program, operations), now)
    return out


def operations_served(program: Program, operations: int) -> list[int]:
    """For each step of a program, the operation that it serves: the next one that is launched or merged."""
    out, op = list[int](), operations - 1
    for step in reversed(program.steps):
        op = step.op if isinstance(step, Launch | Reduce) else op
        out.append(op)
    return out[::-1]


@dataclass(slots=True)
class Room:
    """The limits within which the solver looks: less than what there is where lowering was seen to add something."""

    problem: Problem
    surely: bool
    demands: list[Demand] = field(init=False)
    less: np.ndarray = field(init=False)
    price: np.ndarray | None = None  # over time, that the last search found

    def __post_init__(self) -> None:
        self.demands = demands(self.problem, surely=self.surely)
        self.less = np.zeros(len(self.problem.graph.ops))

    def estimate(self, choice: Sequence[int]) -> np.ndarray:
        """Bytes by the demands, at each operation."""
        out = np.zeros(len(self.less))
        for d in self.demands:
            out[d.lo : d.hi] += d.amounts[choice[d.node]]
        return out

    def least(self) -> float:
        """Bytes that every choice takes somewhere."""
        out = np.zeros(len(self.less))
        for d in self.demands:
            out[d.lo : d.hi] += d.amounts.min()
        return float(out.max(initial=0.0))

    def solve(self, limit: float, budget: Budget, share: float = 1.0, gap: float = PROVED) -> Solution:
        """The cheapest choice, up to a gap, within a limit less a share of what lowering adds."""
        net = Network(self.problem.sizes, self.problem.factors, self.demands, (limit - share * self.less).tolist())
        found = solve(net, budget.part(SOLVE), gap=gap, quick=True, price=self.price)
        self.price = found.price
        return found

    def learn(self, choice: Sequence[int], plan: PricedPlan, limit: float) -> None:
        """Shrink the limit at each time where this plan exceeds memory, just enough to exclude it."""
        need = needed_bytes(plan.program, self.problem.topo, len(self.less))
        self.less = np.where(need > limit, np.maximum(self.less, need - self.estimate(choice)), self.less)


def within_memory(
    problem: Problem, first: PricedPlan, budget: Budget, begun: PricedPlan | None, bound: float, squeeze: bool
) -> PricedPlan:
    """The cheapest plan that was found to fit, with a bound for all that do; where none was, the one with the least memory.

    Args:
        first: the cheapest plan, which does not fit.
        begun: a plan that fits.
        bound: a lower bound that is already proved.
        squeeze: whether to look once more near the plan with the least memory before giving up.
    """
    limit, sure, room = problem.topo.device.memory, Room(problem, surely=True), Room(problem, surely=False)
    if sure.least() > limit:  # no choice fits
        return _smallest(room, first, bound, budget, squeeze)
    solution = sure.solve(limit, budget)
    room.price = solution.price
    best, smallest, bound = begun, first, max(bound, first.bound, solution.bound)
    for _ in range(ATTEMPTS):
        if not np.isfinite(solution.objective):
            break
        plan = priced_plan(problem, solution.choice, bound)
        budget.spend(problem.lowering)
        if peak(plan) <= limit:
            best = plan if best is None or plan.objective < best.objective else best
            break
        smallest = min(smallest, plan, key=peak)
        room.learn(solution.choice, plan, limit)
        if budget.over():
            break
        solution = room.solve(limit, budget)
    if best is None:
        best = _smallest(room, smallest, bound, budget, squeeze)
        if peak(best) > limit:
            return best
    best = _given_back(room, best, bound, budget)
    return replace(best, bound=min(bound, best.objective))


def _given_back(room: Room, best: PricedPlan, bound: float, budget: Budget) -> PricedPlan:
    """Give room back while plans still fit: what lowering adds to one choice it may not add to another."""
    limit, low, high = room.problem.topo.device.memory, 0.0, 1.0
    for _ in range(HALVINGS):
        if budget.over() or not room.less.any() or best.objective <= bound * (1 + NEAR):
            break
        middle = (low + high) / 2
        solution = room.solve(limit, budget, middle)
        if not np.isfinite(solution.objective):
            break
        plan = priced_plan(room.problem, solution.choice, bound)
        budget.spend(room.problem.lowering)
        if peak(plan) <= limit:
            high, best = middle, min(best, plan, key=lambda p: p.objective)
        else:
            low = middle
    return best


def _smallest(room: Room, smallest: PricedPlan, bound: float, budget: Budget, squeeze: bool) -> PricedPlan:
    """A plan with as little memory as can be found: least limits within which there is any choice, then a search around it."""
    grace = budget
    if budget.over() and not budget.interrupted():
        grace = budget.grace(GRACE)
    low, high = room.least(), float(peak(smallest))
    for _ in range(HALVINGS):
        if grace.over() or high - low <= NEAR * high:
            break
        middle = (low + high) / 2
        solution = room.solve(middle, grace, 0.0, gap=np.inf)
        if np.isfinite(solution.objective):
            smallest = min(smallest, priced_plan(room.problem, solution.choice, bound), key=peak)
            high = float(room.estimate(solution.choice).max())
        else:
            low = middle
    return _squeeze(room.problem, smallest, grace.part(SQUEEZE)) if squeeze else smallest


def _squeeze(problem: Problem, plan: PricedPlan, budget: Budget) -> PricedPlan:
    """Change operations that touch what is alive at the peak, one or two at a time, while the exact peak gets smaller."""
    limit, graph = problem.topo.device.memory, problem.graph
    while peak(plan) > limit:
        most, at = peak_bytes(plan.program)
        tensors = {plan.program.buffers[b].tensor for b in alive_at(plan.program, at[problem.topo.tightest(most)])}
        near = [i for i, op in enumerate(graph.ops) if tensors & {*op.inputs, *op.outs}]
        better = next(_smaller(problem, plan, near, budget), None)
        if better is None:
            break
        plan = better
    return plan


def _smaller(problem: Problem, plan: PricedPlan, near: list[int], budget: Budget) -> Iterator[PricedPlan]:
    now = choice_of(problem, plan.plan)
    for group in itertools.chain(itertools.combinations(near, 1), itertools.combinations(near, 2)):
        for picked in itertools.product(*(range(problem.sizes[i]) for i in group)):
            if budget.over():
                return
            choice = now.copy()
            for i, c in zip(group, picked, strict=True):
                choice[i] = c
            other = priced_plan(problem, choice, plan.bound)
            budget.spend(problem.lowering)
            if peak(other) < peak(plan):
                yield other
