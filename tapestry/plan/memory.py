"""Where memory is short: splits in time, recomputation and streamed weights, by a search around the planner.

A state is a rewritten graph. Its trial plans it with as few streamed weights as fit (with all of them where even that is too
much). States are rewritten where their plan needs most; the cheapest plan that fits is kept until the budget is over or nothing
gets better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Dim, Graph, Op, Opaque
from tapestry.ir.plan import Layout, Plan, device_count
from tapestry.ir.program import Program, alive_at, alive_bytes, peak_bytes
from tapestry.ir.states import varies
from tapestry.ir.syntax.printer import signature, to_text
from tapestry.ir.types import itemsize
from tapestry.plan.cost.compute import least_cells, least_seconds
from tapestry.plan.search.planner import Point, beginning, spatial, start_of
from tapestry.plan.search.priced_plan import (
    PricedPlan,
    TooBig,
    fewest,
    operations_served,
    peak,
    priced_plan,
    streamable,
    too_big,
)
from tapestry.plan.search.problem import build
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.topology import Topology
from tapestry.rewrites import split, tiled_region
from tapestry.rewrites.core.driver import apply_legal, apply_moves
from tapestry.rewrites.core.rule import Move
from tapestry.rewrites.split import splittable
from tapestry.rewrites.tiled_region import Cut, batch_move, reads_of

# What every plan of a graph needs at least, however its operations are cut in space and time: said before any is sought.
#
# Two things are certain of each graph that splits in time and recomputation make of one, and of each plan of it:
#
# - Results stay to the end, each whole on all devices together. The operation that writes the last of them reads at least as
#   much as the graph's own operation does, its states, or, where that was run part by part, the parts that are put together.
# - A launch has at least one point of what it computes, with all that this point reads: inner reductions and what an opaque
#   node does not commute with are never cut, nor is a reduced dimension that its monoid keeps in order.


@dataclass(frozen=True, slots=True)
class Lack:
    """An operation for which no plan has the memory: the bytes it takes at least, and those that there are.

    Attributes:
        tensor: what the operation writes.
        together: whether all devices share them; else one device has them.
    """

    tensor: str
    need: int
    have: int
    together: bool

    def text(self, devices: int, limit: int) -> str:
        """By how much it fails."""
        where = f"all {devices} devices, of {limit:,} each," if devices > 1 else f"the device, of {limit:,},"
        have = f"{where} have {self.have:,}" if self.together else f"no device has more than {self.have:,}"
        needs = f"the operation that writes '{self.tensor}' needs {self.need:,} bytes at once"
        return f"{needs}, {have}: {self.need - self.have:,} too many"

    def why(self) -> str:
        """What takes them."""
        if self.together:
            return "outputs are held to the end, beside all that the last operation reads, however it is cut"
        return "one point of it reads and writes so much, which no cut in space or time makes smaller"


def lacking(graph: Graph, topo: Topology) -> Lack | None:
    """The operation for which no plan in space and time has the memory; none where nothing says so."""
    memories = topo.memories()
    need, tensor = _at_the_end(graph)
    if need > sum(memories):
        return Lack(tensor, need, sum(memories), True)
    need, tensor = max(((_point_bytes(op, graph), op.outs[0]) for op in graph.ops), default=(0, ""))
    return Lack(tensor, need, max(memories), False) if need > max(memories) else None


def _at_the_end(graph: Graph) -> tuple[int, str]:
    """Bytes of all results, and of what the last of them is made of: the one of which that is least; and which that is."""
    held, makers = sum(graph.tensors[t].nbytes for t in set(graph.outputs)), graph.producers()
    if any(t not in makers for t in graph.outputs):  # (one that nothing writes may be loaded last)
        return held, graph.outputs[0]
    beside = [(_beside(graph.ops[makers[t]], t, graph), t) for t in graph.outputs]
    most, tensor = min(beside, default=(0, ""))
    return held + most, tensor


def _beside(op: Op, tensor: str, graph: Graph) -> int:
    """Bytes that are there beside all results when the operation that writes one of them ends."""
    if isinstance(op, Opaque):
        return min(graph.tensors[tensor].nbytes, sum(graph.tensors[t].nbytes for t in op.inputs if t not in graph.outputs))
    others = frozenset(k for k in op.body_reads() if op.reads[k].tensor not in graph.outputs)  # (results are counted already)
    most = [graph.tensors[tensor].nbytes, _read_bytes(op, graph, op.ranges, others)]
    if op.monoid and op.lowers:
        fields = zip(op.body, varies(op), strict=True)
        most.append(sum(itemsize(e.dtype) * prod(d.size for d, v in zip(op.dims, along) if v) for e, along in fields))
    return min(most)


def _point_bytes(op: Op, graph: Graph) -> int:
    """Bytes of one point of an operation, of the dimensions that may be cut."""
    if isinstance(op, Opaque):
        cuts = {t: {a for a in axes if a is not None} for t, axes in zip((*op.ins, *op.outs), (*op.in_axes, *op.out_axes))}
        shapes = {t: prod(n for a, n in enumerate(graph.tensors[t].shape) if a not in cut) for t, cut in cuts.items() if t}
        return sum(n * itemsize(graph.tensors[t].dtype) for t, n in shapes.items() if not graph.tensors[t].on_host)
    cut = {d.name for d in (*op.dims, *splittable(op))} | {
        d.name for d in op.reduce if split.split_time_refusal(op, d.name, 2) is None
    }  # fmt: skip
    sizes = {d.name: 1 if d.name in cut else d.size for d in op.space}
    results = 0 if op.monoid else sum(itemsize(graph.tensors[t].dtype) for t in op.outs)
    return results + _read_bytes(op, graph, sizes, op.body_reads())


def _read_bytes(op: Block, graph: Graph, sizes: dict[str, int], some: frozenset[int]) -> int:
    """Bytes that some reads of an operation touch at least, in a part of it of so many points along each dimension."""
    most: dict[str, int] = {}
    for r in (op.reads[k] for k in some):
        t = graph.tensors[r.tensor]
        most[r.tensor] = max(most.get(r.tensor, 0), least_cells(op, r, t.shape, sizes) * itemsize(t.dtype))
    return sum(most.values())


# Where a program needs too much memory, and the moves that may need less there: splits in time and recomputation.


PARTS = (2, 4, 8, 16, 32)
AHEAD = 6  # operations after the peak that a region may end in
REACH = (0, 1, 2, 3, 5, 8, 13, 21, 34)  # positions before the peak that a region may begin at
MOST_CLONES = 4096  # operations of a rewritten graph
REGION = 300_000  # units for an operation of a region
LIKE = 0.9  # operations that need this share of the peak are treated like the one at the peak


@dataclass(frozen=True, slots=True)
class Peak:
    """The operation at which a device needs most, what is alive there, and what needs nearly as much.

    Attributes:
        op: position of the operation at the peak.
        nbytes: bytes of each tensor alive there, on the device that needs most.
        high: operations that need nearly as much, or more than the device has.
    """

    op: int
    nbytes: dict[str, int]
    high: tuple[int, ...]


def peak_of(found: PricedPlan, topo: Topology) -> Peak:
    """The peak of a plan's program, on the device that lacks most memory or has least left."""
    program = found.program
    most, at = peak_bytes(program)
    device = topo.tightest(most)
    limit = topo.memories()[device]
    serves = operations_served(program, len(found.plan.graph.ops))
    bar = min(LIKE * most[device], limit) if most[device] > limit else LIKE * most[device]
    high = dict.fromkeys(op for op, alive in zip(serves, alive_bytes(program), strict=True) if alive[device] > bar)
    held: dict[str, int] = {}
    for buffer in (program.buffers[b] for b in alive_at(program, at[device])):
        held[buffer.tensor] = held.get(buffer.tensor, 0) + buffer.nbytes(device)
    return Peak(serves[at[device]], held, tuple(high))


def excess(program: Program, topo: Topology) -> int:
    """Bytes above what the devices have, summed over the steps of the program and its devices."""
    limit = np.array(topo.memories(), np.int64)
    return sum(int(np.maximum(alive - limit, 0).sum()) for alive in alive_bytes(program))


def moves(graph: Graph, found: PricedPlan, topo: Topology, count: int, budget: Budget) -> list[tuple[Move, ...]]:
    """Lists of moves that may lower the peak, the most promising first, at most ``count`` of each kind; those that were looked
    at when the budget is over."""
    spot = peak_of(found, topo)
    above = max(topo.strain(peak_bytes(found.program)[0]) - topo.device.memory, 1)
    out: list[tuple[Move, ...]] = []
    scored = sorted(_regions(graph, spot, budget), key=lambda s: (-min(s.saved, above), s.clones, -s.saved))
    seen: set[tuple[int, str, int]] = set()
    for s in scored:
        if len(out) < count and (s.at, s.dim, s.clones) not in seen:
            seen.add((s.at, s.dim, s.clones))
            out.append(_alike(graph, spot, s))
    batches = [batch_move(graph, p) for p in PARTS] if len(graph.ops) * 2 < MOST_CLONES else []
    out += [(m,) for m in batches if m is not None and m.number("parts") * len(graph.ops) <= MOST_CLONES][:count]
    return out + [(m,) for m in _again(graph, spot)][: max(2, count // 2)]


@dataclass(frozen=True, slots=True)
class _Region:
    """A split in time that ends in operation ``at``: about how many bytes it saves at the peak, and operations it adds."""

    at: int
    dim: str
    parts: int
    back: int
    saved: int
    clones: int


def _regions(graph: Graph, spot: Peak, budget: Budget) -> Iterator[_Region]:
    """Regions around the peak, each with a first estimate of what it saves."""
    for at in _around_peak(graph, spot.op):
        op = graph.ops[at]
        for d in op.space:
            if _window(op, d):
                continue
            for parts in (p for p in PARTS if split.split_time_refusal(op, d.name, p) is None):
                if budget.over():
                    return
                whole = split.region(graph, at, d.name, parts, min(at, at - spot.op + REACH[-1]))
                budget.spend(REGION * len(whole))
                known = 0
                for back in (at - spot.op + r for r in REACH) if spot.op in whole else ():
                    cuts = {i: c for i, c in whole.items() if i >= at - back}  # about what a shorter reach gives
                    if len(cuts) == known or len(cuts) * parts > MOST_CLONES:
                        continue
                    known, saved = len(cuts), _saved(graph, spot, cuts)
                    if saved > 0:
                        yield _Region(at, d.name, parts, min(back, at), saved, len(cuts) * (parts - 1))


def _window(op: Op, d: Dim) -> bool:
    """Whether a reduced dimension is small beside another one (a convolution's window)."""
    largest = max((r.size for r in op.reduce), default=0) if isinstance(op, Block) else 0
    return isinstance(op, Block) and d in op.reduce and d.size < largest and d.size < 16


def _around_peak(graph: Graph, first: int) -> list[int]:
    """The operation at the peak, and those that its results flow into soon."""
    out, flows = [first], set(graph.ops[first].outs)
    for i in range(first + 1, min(first + 1 + 4 * AHEAD, len(graph.ops))):
        if flows & set(graph.ops[i].inputs) and len(out) < AHEAD:
            out.append(i)
            flows |= set(graph.ops[i].outs)
    return out


def _saved(graph: Graph, spot: Peak, cuts: dict[int, Cut]) -> int:
    """Bytes that the tensors alive at the peak need less when each part holds its own part of them."""
    makers, readers = graph.producers(), graph.consumers()
    here = dict(reads_of(graph.ops[spot.op], graph, cuts[spot.op]))
    total = 0
    for t, n in spot.nbytes.items():
        maker = makers.get(t)
        if maker in cuts:
            op, cut = graph.ops[maker], cuts[maker]
            if cut.dim not in {d.name for d in op.dims}:
                total -= n  # two states are merged
            elif t not in graph.outputs and all(r in cuts for r in readers.get(t, ())):
                total += n - n * max(hi - lo for lo, hi in cut.parts) // max(1, op.ranges[cut.dim])
        elif t in graph.weights and t in here:
            whole = graph.tensors[t].nbytes
            part = max(int(np.prod([hi - lo for lo, hi in box])) for box in here[t]) * itemsize(graph.tensors[t].dtype)
            total += n - n * part // max(1, whole)
    return total


def _alike(graph: Graph, spot: Peak, s: _Region) -> tuple[Move, ...]:
    """The split at every operation that is like the one at the end of the region and lies as near to a high place."""
    kind, far = signature(graph.ops[s.at], graph), s.at - spot.op
    here = signature(graph.ops[spot.op], graph)
    ends = dict.fromkeys([s.at])
    for p in spot.high:
        q = p + far
        if q < len(graph.ops) and signature(graph.ops[p], graph) == here and signature(graph.ops[q], graph) == kind:
            ends[q] = None
    return tuple(split.time_move(graph.ops[q], s.dim, s.parts, s.back) for q in ends)


def _again(graph: Graph, spot: Peak) -> Iterator[Move]:
    """Recomputing what is alive at the peak but not used there, the largest first."""
    makers, readers = graph.producers(), graph.consumers()
    used = {*graph.ops[spot.op].inputs, *graph.ops[spot.op].outs}
    for t in sorted(set(spot.nbytes) - used, key=lambda t: -spot.nbytes[t]):
        before = sum(r < spot.op for r in dict.fromkeys(readers.get(t, ())))
        if t in makers and before and tiled_region.refusal(graph, graph.ops[makers[t]], before) is None:
            yield Move("recompute", t, (("keep", before),))


BEAM = 2  # states rewritten in one round
CHOICES = 5  # splits tried per state
PATIENCE = 2  # rounds without a better plan before the search stops
NEAR = 1.01  # times the bound: good enough to stop
MORE = 10.0 * SECOND  # to look for a cheaper plan after the first one that fits
TRIAL = 4.0 * SECOND  # for planning one state
ALONE = 0.6  # of the budget that is left


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A plan that fits, the moves that led to its graph, what a person should know of why, and all plans met that fit."""

    found: PricedPlan
    moves: tuple[Move, ...]
    report: Mapping[str, object]
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class _State:
    """A rewritten graph with its plan: one that fits, or the one with the least memory that was found."""

    graph: Graph
    moves: tuple[Move, ...]
    found: PricedPlan


def fit(
    graph: Graph,
    topo: Topology,
    first: PricedPlan,
    *,
    inputs: Mapping[str, Layout] | None = None,
    outputs: Mapping[str, Layout] | None = None,
    budget: Budget,
    previous: tuple[PricedPlan, Sequence[Move]] | None = None,
) -> Fitted:
    """The cheapest plan that was found to fit, by splits in time, recomputation and streamed weights.

    Args:
        first: the plan without them, which does not fit.
        inputs, outputs: layouts fixed for graph inputs (or weights) and outputs.
        previous: a plan that fits, with the moves to its graph, to go on from; what is found is never worse.

    Raises:
        TooBig: nothing fits; says by how many bytes, on which device, for which tensors, and what was tried.
    """
    lack = lacking(graph, topo)
    if lack is not None:
        raise TooBig(
            first, f"no plan fits: {lack.text(device_count(topo.mesh), topo.device.memory)}", why=lack.why(),
            hint="more memory (--memory), more devices (--devices) or a smaller batch (--shape)",
        )  # fmt: skip
    bound = least_seconds(graph, topo)
    search = _Search(topo, inputs or {}, outputs or {}, bound, budget.share(ALONE))
    states = [search.plan(graph, ()), _State(graph, (), first)]
    if previous:
        states.append(_State(previous[0].plan.graph, tuple(previous[1]), previous[0]))
    best = search.explore(states)
    if peak(best.found) > topo.device.memory:
        raise too_big(min(best.found, first, key=peak), topo.device.memory, budget, search.tried())
    found = replace(best.found, bound=min(bound, best.found.objective))
    return Fitted(found=found, moves=best.moves, report=_report(first, found, topo, search.trials), points=tuple(search.points))


@dataclass(slots=True)
class _Search:
    """What is fixed during the search, and what it has looked at."""

    topo: Topology
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    bound: float
    budget: Budget
    trials: int = 0
    points: list[Point] = field(default_factory=list[Point])
    kinds: dict[str, int] = field(default_factory=dict[str, int])
    met: set[tuple[str, ...]] = field(default_factory=set[tuple[str, ...]])

    @property
    def limit(self) -> int:
        """Bytes of a device."""
        return self.topo.device.memory

    def explore(self, states: list[_State]) -> _State:
        """Rewrite the best states round by round; returns the best one."""
        best, idle = min(states, key=self.rank), 0
        beam = states
        while beam and idle < PATIENCE and not self.budget.over():
            if self.rank(best) <= (False, self.bound * NEAR):
                break
            beam = sorted((c for s in beam for c in self.children(s)), key=self.rank)[:BEAM]
            better = bool(beam) and self.rank(beam[0]) < self.rank(best)
            best, idle = (beam[0], 0) if better else (best, idle + 1)
        return best

    def rank(self, state: _State) -> tuple[bool, float, int]:
        """Smaller is better: what fits by cost, the rest by its peak and then by all that is above the limit over time."""
        most = peak(state.found)
        if most <= self.limit:
            return False, state.found.objective, 0
        return True, float(most), excess(state.found.program, self.topo)

    def children(self, state: _State) -> list[_State]:
        """The states that one list of moves leads to."""
        out: list[_State] = []
        for group in moves(state.graph, state.found, self.topo, CHOICES, self.budget):
            if self.budget.over():
                break
            key = tuple(map(str, (*state.moves, *group)))
            if key in self.met:
                continue
            self.met.add(key)
            graph, done = apply_legal(state.graph, group)  # (nothing is simplified: that would undo them)
            if done:
                self.kinds[done[0].rule] = self.kinds.get(done[0].rule, 0) + 1
                out.append(self.plan(graph, (*state.moves, *done)))
        return out

    def plan(self, graph: Graph, done: tuple[Move, ...]) -> _State:
        """The best plan of a graph with as few streamed weights as fit, or with all where none fits."""
        every = self.spatial(graph, streamable(graph, tuple(self.inputs), self.limit))
        if peak(every) > self.limit or not every.plan.streamed:
            return _State(graph, done, every)
        plain = self.spatial(graph, frozenset())
        found = plain if peak(plain) <= self.limit else self.spatial(graph, fewest(every, self.topo))
        best = min((f for f in (every, found) if peak(f) <= self.limit), key=lambda f: f.objective)
        self.points.append(Point(best.objective, peak(best), tuple(map(str, done))))
        self.budget = self.budget.part(MORE)
        return _State(graph, done, best)

    def spatial(self, graph: Graph, streamed: frozenset[str]) -> PricedPlan:
        """The planner's own search, for a while."""
        self.trials += 1
        problem = build(graph, self.topo, {}, self.inputs, self.outputs, streamed=streamed)
        self.budget.spend(problem.work)
        return spatial(problem, self.budget.part(TRIAL), squeeze=False)

    def tried(self) -> str:
        """For the error: what was tried."""
        kinds = ", ".join(f"{n} × {k}" for k, n in sorted(self.kinds.items())) or "no rewrite applies"
        return f"; tried {self.trials} plans with all weights streamed and these moves: {kinds}"


def _report(first: PricedPlan, found: PricedPlan, topo: Topology, trials: int) -> dict[str, object]:
    """Why the plan is not only spatial: by how much the best of those did not fit, and what this one does instead."""
    most, at = peak_bytes(first.program)
    device = topo.tightest(most)
    buffers = first.program.buffers
    alive = sorted(alive_at(first.program, at[device]), key=lambda b: -buffers[b].nbytes(device))[:4]
    streamed = found.plan.streamed
    return {
        "spatial_peak_bytes": most[device], "device": device, "short_bytes": most[device] - topo.memories()[device],
        "largest": [{"buffer": b, "bytes": buffers[b].nbytes(device)} for b in alive], "trials": trials,
        "streamed": sorted(streamed), "streamed_bytes": sum(found.plan.graph.tensors[t].nbytes for t in streamed),
    }  # fmt: skip


# An earlier plan with splits in time, recomputation or streamed weights, made again from its moves: a state to go on from.


def refitted(
    graph: Graph,
    topo: Topology,
    earlier: Plan,
    moves: Sequence[Move],
    *,
    inputs: Mapping[str, Layout],
    outputs: Mapping[str, Layout],
) -> PricedPlan | None:
    """The earlier plan on the graph that its moves make; None where that is another graph, or it does not fit.

    Args:
        graph: the model's, simplified; it is not simplified again, which would undo recomputation.
    """
    try:
        again = apply_moves(graph, moves)
    except TapestryError:
        return None
    if to_text(again) != to_text(earlier.graph) or earlier.mesh != topo.mesh:
        return None
    problem = build(again, topo, {}, inputs, outputs, streamed=earlier.streamed)
    choice = beginning(problem, start_of(earlier))
    plan = priced_plan(problem, choice, -np.inf) if choice else None
    return plan if plan is not None and peak(plan) <= topo.device.memory and np.isfinite(plan.objective) else None
