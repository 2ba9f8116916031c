"""Why a plan is as it is: for every operation, the best other strategy, all else as it stands, and what it would cost.

The differences are those of the search's own tables (the operation itself, and the transfers from its producers and to its
readers), so that an operation of an optimal plan has none below zero, unless memory or a pin is what decided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TypeVar

import numpy as np

from tapestry.ir.footprint import Boxes
from tapestry.ir.graph import Op
from tapestry.ir.plan import Layout, Plan, Strategy, still
from tapestry.ir.program import peak_bytes
from tapestry.ir.types import itemsize
from tapestry.plan.cost import transfer
from tapestry.plan.cost.collective import reduce_seconds
from tapestry.plan.kinds import kind_of
from tapestry.plan.lower import exchange, lower
from tapestry.plan.pipelines.staged_plan import stage_ops, stage_plan, stage_topology
from tapestry.plan.search.priced_plan import choice_of
from tapestry.plan.search.problem import Problem, build
from tapestry.plan.simulate import layouts
from tapestry.plan.strategy import Pin, footprints, merges, out_layout, tensor_boxes
from tapestry.plan.topology import Topology

T = TypeVar("T")
LOWERINGS = 16  # how many better-looking alternatives are lowered to see whether they fit into memory
NOISE = 1e-3  # parts below this share of the largest one are left out


@dataclass(frozen=True, slots=True)
class Part:
    """A share of a difference in cost: ``what`` ("compute", "all_reduce", "halo", …), of which tensor, seconds more, and bytes
    more that all devices together put on the wire."""

    what: str
    tensor: str
    seconds: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best other strategy of one operation.

    Attributes:
        seconds: how much more the whole plan would cost (negative: less).
        parts: what that is made of, largest first.
        excess: bytes by which it would not fit into a device's memory (0: it fits); ``None`` where that was not worked out.
    """

    strategy: Strategy
    seconds: float
    parts: tuple[Part, ...]
    excess: int | None = None


def best_alternatives(plan: Plan, topo: Topology) -> list[Alternative | None]:
    """For every operation, its best alternative; ``None`` where it has no other strategy.

    Pinned operations may take any strategy here, which shows what the pin costs; but for those whose own would not be offered
    without a pin.
    """
    if plan.stages:
        return _by_stage(plan, topo, best_alternatives)
    problem, choice = _problem(plan, topo)
    moves = _Moves(plan, topo)
    out: list[Alternative | None] = []
    lowerings = 0
    for i, costs in enumerate(local_costs(problem, choice)):
        now = choice[i]
        rest = costs.copy()
        rest[now] = np.inf
        best = int(np.argmin(rest))
        if not np.isfinite(rest[best]):
            out.append(None)
            continue
        s, difference = problem.menus[i].strategies[best], float(costs[best] - costs[now])
        excess = None
        if difference < 0 and lowerings < LOWERINGS:
            excess, lowerings = _excess(plan, topo, i, s), lowerings + 1
        parts = moves.parts(problem, i, now, best, difference)
        out.append(Alternative(strategy=s, seconds=difference, parts=parts, excess=excess))
    return out


def priced_strategies(plan: Plan, topo: Topology, most: int = 8) -> list[list[tuple[Strategy, float]]]:
    """For every operation its best other strategies, the cheapest first, with how many seconds more the whole plan would cost.

    The first one is that of `best_alternatives`.
    """
    if plan.stages:
        return _by_stage(plan, topo, partial(priced_strategies, most=most))
    problem, choice = _problem(plan, topo)
    rows: list[list[tuple[Strategy, float]]] = []
    for i, costs in enumerate(local_costs(problem, choice)):
        order = [k for k in np.argsort(costs, kind="stable").tolist() if k != choice[i] and np.isfinite(costs[k])]
        rows.append([(problem.menus[i].strategies[k], float(costs[k] - costs[choice[i]])) for k in order[:most]])
    return rows


def _by_stage(plan: Plan, topo: Topology, of: Callable[[Plan, Topology], list[T]]) -> list[T]:
    """The same with pipeline stages: other strategies of an operation on the devices of its stage."""
    found: dict[int, T] = {}
    for k, stage in enumerate(plan.stages):
        found |= zip(stage_ops(plan, k), of(stage_plan(plan, k), stage_topology(topo, stage)), strict=True)
    return [found[i] for i in range(len(plan.graph.ops))]


def local_costs(problem: Problem, choice: list[int]) -> list[np.ndarray]:
    """For every operation, the cost of each of its strategies with all other operations as chosen: its own time and the
    transfers that touch it."""
    out = [np.zeros(n) for n in problem.sizes]
    for f in problem.factors:
        for k, n in enumerate(f.nodes):
            out[n] += f.table[tuple(slice(None) if m == k else choice[f.nodes[m]] for m in range(len(f.nodes)))]
    return out


def _problem(plan: Plan, topo: Topology) -> tuple[Problem, list[int]]:
    """The search's problem again, and what the plan chose in it."""
    problem = build(plan.graph, topo, {}, plan.inputs, plan.outputs, streamed=plan.streamed)
    plan = replace(plan, strategies=tuple(map(still, plan.strategies)))
    own = zip(problem.menus, plan.strategies, strict=True)
    pins = {i: _pins(s) for i, (menu, s) in enumerate(own) if s not in menu.strategies}
    if pins:
        problem = build(plan.graph, topo, pins, plan.inputs, plan.outputs, streamed=plan.streamed)
    return problem, choice_of(problem, plan)


def _pins(s: Strategy) -> tuple[Pin, ...]:
    return tuple(Pin(d, a) for a, d in enumerate(s.dims) if d is not None)


def _excess(plan: Plan, topo: Topology, i: int, s: Strategy) -> int:
    """Bytes above a device's memory when one operation takes another strategy."""
    other = replace(plan, strategies=(*plan.strategies[:i], s, *plan.strategies[i + 1 :]))
    return max(0, topo.strain(peak_bytes(lower(other))[0]) - topo.device.memory)


@dataclass(slots=True)
class _Moves:
    """Transfers priced one by one, to say what a difference is made of."""

    plan: Plan
    topo: Topology
    layouts: dict[str, Layout] = field(init=False)
    readers: dict[str, list[int]] = field(init=False)
    cache: dict[object, tuple[float, int]] = field(default_factory=dict[object, tuple[float, int]])

    def __post_init__(self) -> None:
        self.layouts = layouts(self.plan)
        self.readers = self.plan.graph.consumers()

    def parts(self, problem: Problem, i: int, now: int, other: int, difference: float) -> tuple[Part, ...]:
        """What the difference between two choices of an operation is made of."""
        graph, menu = self.plan.graph, problem.menus[i]
        op, old, new = graph.ops[i], menu.strategies[now], menu.strategies[other]
        merging = [reduce_seconds(op, s, int(menu.state_bytes[k]), self.topo) for k, s in ((now, old), (other, new))]
        reduction = _reduction(op, new if merging[1] >= merging[0] else old)
        sent = [_merge_bytes(op, s, int(menu.state_bytes[k]), self.topo) for k, s in ((now, old), (other, new))]
        out = [Part(reduction, op.outs[0], merging[1] - merging[0], sent[1] - sent[0])]
        own = float(menu.seconds[other] - menu.seconds[now])
        out.append(Part("compute", "", own - out[0].seconds))
        for t in op.inputs:
            if t in self.plan.inputs or not (t in graph.inputs or t in graph.weights):
                layout = self.layouts[t]
                out.append(self.part(t, (layout, self.wanted(i, old, t)), (layout, self.wanted(i, new, t))))
        for n, t in enumerate(op.outs):
            before, after = out_layout(op, old.out, n), out_layout(op, new.out, n)
            wanted = [self.wanted(j, self.plan.strategies[j], t) for j in self.readers.get(t, ())]
            if t in self.plan.outputs:
                wanted.append([tensor_boxes(graph.tensors[t].shape, self.plan.outputs[t], self.topo.mesh)])
            out += [self.part(t, (before, w), (after, w)) for w in wanted]
        return _tidy(out, difference)

    def part(self, tensor: str, now: tuple[Layout, list[Boxes]], other: tuple[Layout, list[Boxes]]) -> Part:
        """The difference in one reader's fetching of one tensor, called after the dearer of the two."""
        (before, had), (after, has) = self.costs(tensor, *now), self.costs(tensor, *other)
        if before == after:
            return Part("", tensor, 0.0)
        return Part(self.kind(tensor, *(other if after > before else now)), tensor, after - before, has - had)

    def wanted(self, i: int, s: Strategy, tensor: str) -> list[Boxes]:
        """The distinct footprints that an operation has in a tensor."""
        found = footprints(self.plan.graph.ops[i], self.plan.graph, s, self.topo.mesh)
        return list({b.tobytes(): b for _, t, b in found if t == tensor}.values())

    def costs(self, tensor: str, layout: Layout, wanted: list[Boxes]) -> tuple[float, int]:
        """Time to bring a layout to some footprints."""
        t = self.plan.graph.tensors[tensor]
        key = (t.shape, t.dtype, layout, tuple(b.tobytes() for b in wanted))
        if key not in self.cache:
            held = [(layout, tensor_boxes(t.shape, layout, self.topo.mesh))]
            found = transfer.costs(held, wanted, itemsize(t.dtype), self.topo) if wanted else None
            self.cache[key] = (float(found.seconds.sum()), int(found.bytes.sum())) if found else (0.0, 0)
        return self.cache[key]

    def nbytes(self, tensor: str, layout: Layout, wanted: list[Boxes]) -> int:
        """Bytes on the wire to bring a layout to some footprints."""
        t = self.plan.graph.tensors[tensor]
        held = [(layout, tensor_boxes(t.shape, layout, self.topo.mesh))]
        return int(transfer.costs(held, wanted, itemsize(t.dtype), self.topo).bytes.sum()) if wanted else 0

    def kind(self, tensor: str, layout: Layout, wanted: list[Boxes]) -> str:
        """What the transfer is called; of several the dearest."""
        dearest = max(wanted, key=lambda w: self.costs(tensor, layout, [w]))
        held = tensor_boxes(self.plan.graph.tensors[tensor].shape, layout, self.topo.mesh)
        messages = exchange(held, dearest, layout, self.topo.mesh)
        return kind_of(messages, *([tuple((lo, hi) for lo, hi in b) for b in w.tolist()] for w in (held, dearest)))


def _merge_bytes(op: Op, s: Strategy, state_bytes: int, topo: Topology) -> int:
    """Bytes on the wire of a strategy's merges, reduce-scatters first, as `ir.program.transfer_bytes` counts them."""
    cut = merges(op, s)
    scattered, gathered = ([topo.mesh[a].size for a, scatter in cut if scatter is kind] for kind in (True, False))
    devices, total = prod(a.size for a in topo.mesh), 0
    for sizes, factor in ((scattered, 1), (gathered, 2)):
        n = prod(sizes)
        total += factor * (n - 1) * state_bytes * (devices // n)
        state_bytes //= n if factor == 1 else 1
    return total


def _reduction(op: Op, s: Strategy) -> str:
    """What the merge of a strategy's partial states is called."""
    kinds = {"reduce_scatter" if scatter else "all_reduce" for _, scatter in merges(op, s)}
    return " and ".join(sorted(kinds, reverse=True))


def _tidy(parts: list[Part], difference: float) -> tuple[Part, ...]:
    """Equal kinds of one tensor together, largest first, trifles left out; what is not explained breaks ties: host loads."""
    rest = difference - sum(p.seconds for p in parts)
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for p in (*parts, Part("host load", "", rest)):
        seconds, nbytes = sums.get((p.what, p.tensor), (0.0, 0))
        sums[(p.what, p.tensor)] = (seconds + p.seconds, nbytes + p.nbytes)
    largest = max(abs(s) for s, _ in sums.values())
    kept = [Part(*k, s, n) for k, (s, n) in sums.items() if s != 0 and abs(s) >= NOISE * largest]
    return tuple(sorted(kept, key=lambda p: -abs(p.seconds)))
