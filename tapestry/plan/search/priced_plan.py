"""A plan that the search has in hand, with what it costs and needs; and the error when none fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tapestry.errors import PlanError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.plan import Plan, still
from tapestry.ir.program import Free, Launch, Program, Reduce, alive_at, alive_bytes, allocated, device_bytes, peak_bytes
from tapestry.ir.types import itemsize
from tapestry.plan.cost import compute
from tapestry.plan.lower import Shapes, distinct, lower
from tapestry.plan.search.problem import Problem, load_seconds, watched
from tapestry.plan.simulate import Known, Schedule, simulate
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.lagrange import Demand, Solution
from tapestry.plan.solver.network import Network, evaluate, solve
from tapestry.plan.solver.pairs import PROVED, proved
from tapestry.plan.topology import Topology

NEAR = 1e-3  # of the objective: plans that differ by less are equally good


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan with its program, its simulated seconds, a proven lower bound of any plan's, and the problem it solves.

    Attributes:
        unlimited: the plan that would have been taken with more memory, where the limit ruled that out.
    """

    plan: Plan
    program: Program
    objective: float
    bound: float
    distinct: int
    problem: Problem | None = field(default=None, compare=False, repr=False)
    unlimited: PricedPlan | None = field(default=None, compare=False, repr=False)

    @property
    def gap(self) -> float:
        """``(objective - bound) / objective``: 0 means proved optimal."""
        return max(0.0, self.objective - self.bound) / self.objective if self.objective > 0 else 0.0

    @property
    def proved(self) -> bool:
        """Whether the bound shows that no plan is faster."""
        return proved(self.objective, self.bound)


class TooBig(PlanError):
    """Nothing fits into the devices' memory; ``closest`` is the plan that needs least of those looked at."""

    def __init__(self, closest: PricedPlan, what: str, *, why: str, hint: str) -> None:
        super().__init__(what, why=why, hint=hint)
        self.closest = closest


def priced_plan(problem: Problem, choice: Sequence[int], bound: float) -> PricedPlan:
    """The plan of a choice of strategies, lowered and put on the clock; the bound is never above its time, nor below none."""
    plan, program, timed = schedule(problem, choice)
    objective = timed.total if np.isfinite(evaluate(choice, problem.factors)) else np.inf
    return PricedPlan(
        plan=plan, program=program, objective=objective, bound=min(max(bound, 0.0), objective), distinct=problem.distinct,
        problem=problem,
    )  # fmt: skip


def schedule(problem: Problem, choice: Sequence[int]) -> tuple[Plan, Program, Schedule]:
    """The plan of a choice of strategies, its program, and that on the clock."""
    plan = Plan(
        graph=problem.graph, mesh=problem.topo.mesh, inputs=problem.inputs, outputs=problem.outputs,
        strategies=tuple(m.strategies[c] for m, c in zip(problem.menus, choice, strict=True)),
        streamed=problem.streamed, native_sums=problem.topo.native_sums,
    )  # fmt: skip
    return plan, *on_the_clock(problem, plan)


def on_the_clock(problem: Problem, plan: Plan) -> tuple[Program, Schedule]:
    """The program of a plan of a problem, and that on the clock."""
    program = lower(plan, problem.clock.setdefault("shapes", Shapes()))
    return program, simulate(plan, program, problem.topo, problem.clock.setdefault("known", Known()))


def choice_of(problem: Problem, plan: Plan) -> list[int]:
    """The strategies of a plan, as if no blocks travelled, by their numbers."""
    return [m.strategies.index(still(s)) for m, s in zip(problem.menus, plan.strategies, strict=True)]


def summed(problem: Problem, plan: Plan) -> float:
    """All costs of a plan added up, in seconds: as if nothing overlapped and nothing were shared."""
    return evaluate(choice_of(problem, plan), problem.factors)


def peak(plan: PricedPlan) -> int:
    """Bytes that the tightest device needs, as if all devices had as much memory as the one that has least."""
    need = peak_bytes(plan.program)[0]
    return plan.problem.topo.strain(need) if plan.problem else max(need)


def too_big(closest: PricedPlan, limit: int, budget: Budget, tried: str = "") -> TooBig:
    """By how much, on which device and for which tensors a plan does not fit; and what was tried."""
    most, at = peak_bytes(closest.program)
    device = int(np.argmax(most))
    if closest.problem:
        device = closest.problem.topo.tightest(most)
        limit = closest.problem.topo.memories()[device]
    alive = alive_at(closest.program, at[device])
    largest = sorted(alive, key=lambda b: -closest.program.buffers[b].nbytes(device))[:4]
    names = ", ".join(f"'{b}' {closest.program.buffers[b].nbytes(device):,}" for b in largest)
    ended = (
        "the search was interrupted before" if budget.interrupted() else "the budget was over before" if budget.over() else ""
    )
    return TooBig(
        closest,
        f"{ended + ' a plan was found that fits' if ended else 'no plan fits'}: device {device} needs {most[device]:,} bytes"
        f" of {limit:,}, {most[device] - limit:,} too many",
        why=f"the plan with the least memory that was found holds there (bytes): {names}{tried}",
        hint=("more time (--time-limit), " if ended else "")
        + "more memory (--memory), more devices (--devices) or a smaller batch (--shape)",
    )


# Plans within a limit on memory: the solver keeps to it, on a lower estimate of what every choice of strategies holds.
#
# The estimate is linear in the choices and never above the memory of the program that the plan is lowered to, so the solver's
# bound holds for every plan that fits. What lowering adds (buffers for transfers, loads that last longer) is seen on the
# program: where it passes the limit, the estimate gets that much less room there, and the solver is asked again.


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
        for k, t in enumerate(r.tensor for r in op.reads) if isinstance(op, Block) else enumerate(op.ins):
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
    limit = problem.topo.device.memory
    solution = Room(problem, surely=True).solve(limit, budget)
    room = Room(problem, surely=False, price=solution.price)
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
    now = [m.strategies.index(s) for m, s in zip(problem.menus, plan.plan.strategies, strict=True)]
    for group in itertools.chain(itertools.combinations(near, 1), itertools.combinations(near, 2)):
        for picked in itertools.product(*(range(problem.sizes[i]) for i in group)):
            if budget.over():
                return
            choice = list(now)
            for i, c in zip(group, picked, strict=True):
                choice[i] = c
            other = priced_plan(problem, choice, plan.bound)
            budget.spend(problem.lowering)
            if peak(other) < peak(plan):
                yield other


# Which weights may be loaded from the host for every use, and which must be for a plan to fit.


def streamable(graph: Graph, fixed: Sequence[str], limit: int) -> frozenset[str]:
    """Weights that may be streamed: none in a fixed layout, no outputs, none so small that its loads are not worth it."""
    least = min(limit, 1 << 26) / 1000
    readers = graph.consumers()
    stay = {*fixed, *graph.outputs}
    return frozenset(t for t in graph.weights if t not in stay and t in readers and graph.tensors[t].nbytes >= least)


def fewest(found: PricedPlan, topo: Topology) -> frozenset[str]:
    """Of the weights that a plan streams, those that must be for it to fit; the others stay where they are needed most often.

    Worked out on the plan's own program: a weight that stays holds its footprints from the start to the end instead of
    around its uses. Those stay first whose loads take the most seconds per byte held.
    """
    program = found.program
    over = np.zeros((len(program.steps), program.devices), np.int64)  # alive after each step, less the limit
    kept: dict[str, np.ndarray] = {}
    seconds: dict[str, float] = {}
    boxes: dict[str, list[np.ndarray]] = {}
    ends = {b: i for i, s in enumerate(program.steps) if isinstance(s, Free) for b in s.buffers}
    for i, step in enumerate(program.steps):
        for b in allocated(step):
            buffer = program.buffers[b]
            sizes = device_bytes(buffer)
            until = ends.get(b, len(program.steps))
            over[i:until] += sizes
            if buffer.tensor in found.plan.streamed:
                t = buffer.tensor
                kept.setdefault(t, np.zeros_like(over))[i:until] -= sizes
                seconds[t] = seconds.get(t, 0.0) + load_seconds(int(sizes.max()), topo.device)
                boxes.setdefault(t, []).append(np.array(buffer.boxes, np.int64).reshape(program.devices, -1, 2))
    over -= np.array(topo.memories(), np.int64)
    for t, found_boxes in boxes.items():
        width = itemsize(found.plan.graph.tensors[t].dtype)
        kept[t] += sum(np.prod(b[..., 1] - b[..., 0], axis=-1) * width for b in distinct(found_boxes))
    streamed = set(found.plan.streamed)
    for t in sorted(kept, key=lambda t: -seconds[t] / max(1, int(kept[t].max()))):
        if not np.any(over + kept[t] > 0):
            over += kept[t]
            streamed.remove(t)
    return frozenset(streamed)
