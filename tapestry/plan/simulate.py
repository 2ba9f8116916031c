"""A Program on a clock: when every step begins and ends on every device, by the cost model, and what that hangs on.

What is assumed: inputs, and weights that stay, are in place at time 0; a streamed weight is loaded by the compute stream, for
nothing is loaded ahead of its use. Each device has one compute stream and one transfer stream, and
each of them takes its steps in the order of the program; a step begins as soon as its stream is free and what it reads is
there. So a transfer and a kernel overlap exactly where neither needs the other; where the topology says that they do not
overlap, they share one stream. Devices that exchange data in one step (joined
by messages, or a group of a reduction) begin and end together, after the time that the cost model gives to the slowest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeGuard

import numpy as np

from tapestry.ir.footprint import Boxes
from tapestry.ir.graph import Block, Op
from tapestry.ir.kernel import Box, size
from tapestry.ir.plan import Layout, Plan, Stage, Strategy
from tapestry.ir.program import Launch, Load, Program, Reduce, Step, Transfer, allocated, reads, sent_bytes
from tapestry.ir.syntax.printer import signature
from tapestry.ir.types import itemsize
from tapestry.plan import ring_attention
from tapestry.plan.cost import compute, transfer
from tapestry.plan.cost.collective import Way, merge, reductions
from tapestry.plan.pipelines.staged_plan import link_between, stage_topology
from tapestry.plan.search.problem import load_seconds
from tapestry.plan.strategy import footprints, merges, op_boxes, out_layout, result_boxes
from tapestry.plan.topology import Topology

BESIDE = (
    "one compute and one transfer stream per device, each in program order; transfers and kernels overlap where neither "
    "needs the other"
)
IN_TURNS = "each device takes its kernels and transfers in turns, in program order: the topology says that they do not overlap"
IN_PLACE = "inputs, and weights that are not streamed, are in place at the start"
STREAMS = ("compute", "transfer")
COMPUTE, TRANSFER = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One step that takes time.

    Attributes:
        step: position in ``program.steps``.
        op: the operation it belongs to: a transfer to the one that it fetches for (``None``: it brings outputs to their end).
        start, end, took: seconds by device; NaN where the device takes no part.
        groups: devices with the same number begin and end together.
        by: the algorithm that a reduction is priced by.
    """

    step: int
    op: int | None
    stream: int
    start: np.ndarray
    end: np.ndarray
    took: np.ndarray
    groups: np.ndarray
    by: str = ""

    @property
    def seconds(self) -> float:
        """On the device where it takes longest."""
        return float(np.nanmax(self.took, initial=0.0))

    def members(self, device: int) -> list[int]:
        """Devices that begin and end with this one."""
        return [int(d) for d in np.flatnonzero(self.groups == self.groups[device]) if not np.isnan(self.end[d])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A program's steps on the clock, in program order."""

    program: Program
    timed: tuple[Timed, ...]
    overlap: bool = True

    @property
    def assumption(self) -> str:
        """What the times assume, for people."""
        return f"{BESIDE if self.overlap else IN_TURNS}; {IN_PLACE}"

    @property
    def total(self) -> float:
        """Seconds until the last device is done."""
        return max((float(np.nanmax(t.end, initial=0.0)) for t in self.timed), default=0.0)

    def busy(self, stream: int) -> np.ndarray:
        """Seconds that each device's stream works."""
        out = np.zeros(self.program.devices)
        for t in self.timed:
            if t.stream == stream:
                out += np.nan_to_num(t.took)
        return out

    def exposed(self) -> np.ndarray:
        """Seconds of the whole in which each device runs no kernel."""
        return self.total - self.busy(COMPUTE)


@dataclass(frozen=True, slots=True)
class Hop:
    """A step on the critical path, on the device where it held the others up; it begins when the one before ends."""

    timed: Timed
    device: int

    @property
    def seconds(self) -> float:
        """How long the step takes there."""
        return float(self.timed.took[self.device])


@dataclass(slots=True)
class Known:
    """Seconds of kernels and transfers on a topology, worked out once for all that are alike."""

    modes: dict[tuple[str, Strategy, Stage], dict[str, np.ndarray]] = field(
        default_factory=dict[tuple[str, Strategy, Stage], dict[str, np.ndarray]]
    )
    launches: dict[object, np.ndarray] = field(default_factory=dict[object, np.ndarray])
    merges: dict[object, tuple[np.ndarray, np.ndarray, str]] = field(
        default_factory=dict[object, tuple[np.ndarray, np.ndarray, str]]
    )
    transfers: dict[object, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict[object, tuple[np.ndarray, np.ndarray]])


def simulate(plan: Plan, program: Program, topo: Topology, known: Known | None = None) -> Schedule:
    """The schedule of a plan's program on a topology; a device whose neighbours are all idle works at its own rates.

    Args:
        known: of other plans of the same mesh and stages on the same topology.
    """
    if topo.alone and sum(len(s.devices) for s in plan.stages) == 1:
        topo = replace(topo, device=topo.alone, alone=None)
    clock = _Clock(_Costs(plan, program, topo, known or Known()))
    owners = _operations(program)
    for i, step in enumerate(program.steps):
        if isinstance(step, Launch | Transfer | Reduce) or _streams(step, plan, program):
            clock.take(i, step, owners[i])
        elif isinstance(step, Load):
            clock.ready[step.buffer] = np.zeros(program.devices)
        else:
            for b in step.buffers:
                del clock.ready[b]
    return Schedule(program=program, timed=tuple(clock.timed), overlap=topo.overlap)


def _streams(step: Step, plan: Plan, program: Program) -> TypeGuard[Load]:
    return isinstance(step, Load) and program.buffers[step.buffer].tensor in plan.streamed


def reads_of(step: Step) -> tuple[str, ...]:
    """Buffers that a step reads."""
    return tuple(dict.fromkeys(b for b in reads(step) if b))


def critical_path(schedule: Schedule) -> list[Hop]:
    """The steps that the total hangs on, first one first: each begins the moment the one before ends, so that their times add
    up to the total. Where several ended at that moment, data is blamed before a busy stream."""
    if not schedule.timed:
        return []
    makers = {b: n for n, t in enumerate(schedule.timed) for b in allocated(schedule.program.steps[t.step])}
    n = int(np.argmax([np.nanmax(t.end, initial=0.0) for t in schedule.timed]))
    device = int(np.nanargmax(schedule.timed[n].end))
    path = [Hop(schedule.timed[n], device)]
    while schedule.timed[n].start[device] > 0:
        n, device = next(_blockers(schedule, makers, n, device))
        path.append(Hop(schedule.timed[n], device))
    return path[::-1]


def _blockers(schedule: Schedule, makers: dict[str, int], n: int, device: int) -> Iterator[tuple[int, int]]:
    """(position in ``timed``, device) of what ended when a step could begin."""
    now = schedule.timed[n]
    begin, members = now.start[device], now.members(device)
    for d in sorted(members, key=lambda d: d != device):
        for b in reads_of(schedule.program.steps[now.step]):
            if b in makers and schedule.timed[makers[b]].end[d] == begin:
                yield makers[b], d
    for d in members:
        for k in range(n - 1, -1, -1):
            before = schedule.timed[k]
            if (before.stream == now.stream or not schedule.overlap) and not np.isnan(before.end[d]):
                if before.end[d] == begin:
                    yield k, d
                break


@dataclass(slots=True)
class _Clock:
    """When each stream is free, and each buffer there."""

    costs: _Costs
    timed: list[Timed] = field(default_factory=list[Timed])
    ready: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    free: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.free = np.zeros((len(STREAMS), self.costs.program.devices))

    def take(self, i: int, step: Launch | Load | Transfer | Reduce, op: int | None) -> None:
        """Put a step on its stream."""
        seconds, groups, by = self.costs.of(step)
        stream = COMPUTE if isinstance(step, Launch | Load) else TRANSFER
        taken = stream if self.costs.topo.overlap else COMPUTE
        takes = ~np.isnan(seconds)
        start = self.free[taken].copy()
        for b in reads_of(step):
            start = np.maximum(start, self.ready[b])
        if stream == TRANSFER:
            together = np.zeros(int(groups.max(initial=0)) + 1)
            np.maximum.at(together, groups[takes], start[takes])
            start = together[groups]
        start = np.where(takes, start, np.nan)
        end = start + seconds
        self.free[taken] = np.where(takes, end, self.free[taken])
        for b in allocated(step):
            self.ready[b] = np.where(takes, end, 0.0)
        self.timed.append(Timed(step=i, op=op, stream=stream, start=start, end=end, took=seconds, groups=groups, by=by))


@dataclass(slots=True)
class _Costs:
    """Seconds of steps by device."""

    plan: Plan
    program: Program
    topo: Topology
    known: Known
    layouts: dict[str, Layout] = field(default_factory=dict[str, Layout])
    topologies: dict[Stage, Topology] = field(default_factory=dict[Stage, Topology])
    makers: dict[str, int] = field(init=False)
    alone: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.layouts, self.makers = layouts(self.plan), self.plan.graph.producers()
        self.alone = np.arange(self.program.devices)
        stages = self.plan.stages or (Stage(0, self.plan.mesh),)
        self.topologies = {s: stage_topology(self.topo, s) for s in stages}

    def of(self, step: Launch | Load | Transfer | Reduce) -> tuple[np.ndarray, np.ndarray, str]:
        """(seconds by device, NaN where it takes no part; which devices begin and end together; the algorithm of a merge)."""
        match step:
            case Launch():
                return self.launch(step), self.alone, ""
            case Load():
                b = self.program.buffers[step.buffer]
                most = max(b.nbytes(d) for d in self.alone.tolist())
                takes = np.array([box is not None for box in b.boxes])
                return np.where(takes, load_seconds(most, self.topo.device), np.nan), self.alone, ""
            case Transfer():
                src, dst = (self.program.buffers[b] for b in (step.src, step.dst))
                passed = step.messages if step.kind == "permute" else ()  # (else they follow from the boxes)
                key = (self.layouts[src.tensor], src.dtype, src.boxes, dst.boxes, step.kind, passed)
                if key not in self.known.transfers:
                    self.known.transfers[key] = self.transfer(step)
                return *self.known.transfers[key], ""
            case Reduce():
                sent = (self.program.buffers[b] for b in step.sent)
                key = (*self.kind(step), step.kind, step.groups, *((b.dtype, b.boxes) for b in sent))
                if key not in self.known.merges:
                    self.known.merges[key] = self.reduce(step)
                return self.known.merges[key]

    def kind(self, step: Launch | Reduce) -> tuple[str, Strategy, Stage]:
        """What a step's operation is, and how and where it is run."""
        return signature(self.plan.graph.ops[step.op], self.plan.graph), self.plan.strategies[step.op], self.plan.stage(step.op)

    def launch(self, step: Launch) -> np.ndarray:
        """A kernel: the whole of an operation, or what comes before or after its states are merged."""
        kind = self.kind(step)
        key = (*kind, step.mode, step.blocks)
        if key not in self.known.launches:
            op, s, stage = self.plan.graph.ops[step.op], kind[1], kind[2]
            if kind not in self.known.modes:
                self.known.modes[kind] = self.modes(op, s, self.topologies[stage])
            takes = np.array([b is not None for b in step.blocks])
            self.known.launches[key] = np.where(takes, self.placed(self.known.modes[kind][step.mode], stage), np.nan)
        return self.known.launches[key]

    def placed(self, seconds: np.ndarray, stage: Stage) -> np.ndarray:
        """Seconds of a stage's devices as seconds of all devices."""
        out = np.full(self.program.devices, np.nan)
        out[list(stage.devices)] = seconds
        return out

    def modes(self, op: Op, s: Strategy, topo: Topology) -> dict[str, np.ndarray]:
        """Seconds of each mode: ``partial`` and ``finish`` together are ``full`` and one launch more."""
        graph = self.plan.graph
        block = op_boxes(op, s.dims, topo.mesh)
        final = result_boxes(op, s, topo.mesh)
        prints = list(footprints(op, graph, s, topo.mesh))
        full = compute.seconds_each(op, graph, block, final, {(t, b.tobytes()): b for _, t, b in prints}, topo)
        if not isinstance(op, Block) or not op.monoid:
            return {"full": full}
        axis = ring_attention.axis_of(s)
        if not op.lowers and axis is None:
            return {"full": full, "partial": full}
        after = {(t, b.tobytes()): b for k, t, b in prints if k in op.then_reads()}
        tail = replace(op, reduce=(), monoid=None, body=op.then, then=(), inner=())
        finish = compute.seconds_each(tail, graph, final, final, after, topo)
        launch = topo.each(lambda d: d.launch)
        partial = np.maximum(full - finish + launch, launch)
        if axis is not None:  # a block at a time
            partial = (partial - launch) / topo.mesh[axis].size + launch
        return {"full": full, "partial": partial, "finish": finish}

    def transfer(self, step: Transfer) -> tuple[np.ndarray, np.ndarray]:
        """Devices joined by messages take the model's time for the whole exchange; the others only copy what they hold."""
        src, dst = (self.program.buffers[b] for b in (step.src, step.dst))
        wanted, width = _array(dst.boxes), itemsize(dst.dtype)
        copying = compute.sizes(wanted) * width / self.topo.each(lambda d: d.bandwidth) + self.topo.device.launch
        pairs = np.array([(m.src, m.dst) for m in step.messages], np.int64).reshape(-1, 2)
        groups = _components(pairs, self.program.devices)
        joined = np.isin(self.alone, pairs)
        takes = np.array([b is not None for b in dst.boxes]) | joined
        stage = next((s for s in self.topologies if _stays_on_stage(src.boxes, dst.boxes, s)), None)
        if stage is None or step.kind == "permute":
            seconds = float(np.max(crossing_seconds(step, self.program, self.topo) + copying))
        else:
            part, layout = slice(stage.first, stage.devices.stop), self.received(src.tensor, stage)
            held = [(layout, _array(src.boxes)[part])]
            seconds = float(transfer.costs(held, [wanted[part]], width, self.topologies[stage]).seconds[0, 0])
        return np.where(takes, np.where(joined, seconds, np.minimum(copying, seconds)), np.nan), groups

    def received(self, tensor: str, stage: Stage) -> Layout:
        """The layout in which a tensor is first on a stage."""
        made = self.makers.get(tensor)
        if made is None or self.plan.stage(made) == stage:
            return self.layouts[tensor]
        found = (a.layout for a in self.plan.arrivals if a.tensor == tensor and self.plan.stages[a.stage] == stage)
        return next(found, (None,) * len(stage.mesh))

    def cut(self, step: Reduce) -> list[tuple[int, bool]]:
        """(mesh axis, whether it scatters) of all reduced dimensions that the step's operation cuts."""
        return merges(self.plan.graph.ops[step.op], self.plan.strategies[step.op])

    def ways(self, step: Reduce) -> list[Way]:
        """How a step merges states."""
        axes = [(a, scatter) for a, scatter in self.cut(step) if scatter == (step.kind == "reduce_scatter")]
        nbytes = int(sent_bytes(step, self.program)[[d for g in step.groups for d in g]].max())
        op, s, topo = self.plan.graph.ops[step.op], self.plan.strategies[step.op], self.topologies[self.plan.stage(step.op)]
        return merge(nbytes, axes, topo, reductions(op, s, topo.mesh))

    def reduce(self, step: Reduce) -> tuple[np.ndarray, np.ndarray, str]:
        """Merging states; the last merge of an operation also pays for the kernel that merges."""
        last, ways = not (step.kind == "reduce_scatter" and any(not scatter for _, scatter in self.cut(step))), self.ways(step)
        seconds = sum(w.seconds for w in ways) + last * self.topo.device.launch
        out, groups = np.full(self.program.devices, np.nan), self.alone.copy()
        for n, g in enumerate(step.groups):
            out[list(g)], groups[list(g)] = seconds, n
        return out, groups, " then ".join(w.name for w in ways)


def crossing_seconds(step: Transfer, program: Program, topo: Topology) -> np.ndarray:
    """Seconds in which each device receives its messages from another stage: all bytes over their links, one after another,
    and the latency of the slowest (as inside a stage, `cost.transfer`)."""
    out, worst, peers = (np.zeros(program.devices) for _ in range(3))
    width = itemsize(program.buffers[step.dst].dtype)
    for m in step.messages:
        link = link_between(topo, m.src, m.dst)
        out[m.dst] += size(m.box) * width * link.beta
        worst[m.dst] = max(worst[m.dst], link.alpha)
        peers[m.dst] += 1
    return out + worst * np.ceil(np.log2(peers + 1))


def _stays_on_stage(held: tuple[Box | None, ...], wanted: tuple[Box | None, ...], stage: Stage) -> bool:
    """Whether a transfer stays on a stage's devices."""
    return all(d in stage.devices for d, b in enumerate(zip(held, wanted, strict=True)) if b != (None, None))


def layouts(plan: Plan) -> dict[str, Layout]:
    """The layout in which each tensor first exists: as fixed, or as its producer leaves it; loaded ones are replicated."""
    graph, nowhere = plan.graph, (None,) * len(plan.mesh)
    out: dict[str, Layout] = {t: plan.inputs.get(t, nowhere) for t in (*graph.inputs, *graph.weights)}
    for op, s in zip(graph.ops, plan.strategies, strict=True):
        out.update({t: out_layout(op, s.out, n) for n, t in enumerate(op.outs)})
    return out


def _operations(program: Program) -> list[int | None]:
    """The operation that each step serves: a transfer the one that first reads what it brings, a load the next one."""
    out: list[int | None] = []
    serves: int | None = None
    reader: dict[str, int | None] = {}
    for step in reversed(program.steps):
        if isinstance(step, Launch | Reduce):
            serves = step.op
            reader.update(dict.fromkeys((*step.ins, *step.states) if isinstance(step, Launch) else step.srcs, serves))
        served = serves
        if isinstance(step, Transfer):
            served = reader[step.src] = reader.get(step.dst)
        out.append(served)
    return out[::-1]


def _array(boxes: tuple[Box | None, ...]) -> Boxes:
    rank = next(len(b) for b in boxes if b is not None)
    return np.array([[(0, 0)] * rank if b is None else b for b in boxes], np.int64).reshape(len(boxes), rank, 2)


def _components(pairs: np.ndarray, devices: int) -> np.ndarray:
    """The smallest device that each one is joined to, directly or through others."""
    labels = np.arange(devices)
    while True:
        before = labels.copy()
        least = np.minimum(labels[pairs[:, 0]], labels[pairs[:, 1]])
        np.minimum.at(labels, pairs[:, 0], least)
        np.minimum.at(labels, pairs[:, 1], least)
        labels = labels[labels]
        if np.array_equal(labels, before):
            return labels
