"""Where a program needs too much memory, and the moves that may need less there: splits in time and recomputation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tapestry.ir.graph import Block, Dim, Graph, Op
from tapestry.ir.program import Program, alive_at, alive_bytes, peak_bytes
from tapestry.ir.syntax.printer import signature
from tapestry.ir.types import itemsize
from tapestry.plan.search.memory_limit import operations_served
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.topology import Topology
from tapestry.rewrites import recompute
from tapestry.rewrites.core.rule import Move
from tapestry.rewrites.splitting import split_time
from tapestry.rewrites.splitting.micro_batch import batch_move
from tapestry.rewrites.splitting.tiled_region import Cut, reads_of

PARTS = (2, 4, 8, 16, 32)
AHEAD = 6  # operations after the peak that a region may end in
REACH = (0, 1, 2, 3, 5, 8, 13, 21, 34)  # positions before the peak that a region may begin at
MOST_CLONES = 4096  # operations that moves at one time make
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


def moves(graph: Graph, found: PricedPlan, topo: Topology, budget: Budget) -> list[list[tuple[Move, ...]]]:
    """Ladders of moves that may lower the peak, the most promising first: of each, a rung is a finer cut than the one before.
    Those that were looked at when the budget is over."""
    spot = peak_of(found, topo)
    above = max(topo.strain(peak_bytes(found.program)[0]) - topo.device.memory, 1)
    ladders: dict[tuple[int, str, int], list[tuple[Move, ...]]] = {}
    for s in sorted(_regions(graph, spot, budget), key=lambda s: (-min(s.saved, above), s.clones, -s.saved)):
        at = (s.at, s.dim, s.back)
        if at not in ladders and len(ladders) == CHOICES:
            continue
        rungs = ladders.get(at, [])
        if (not rungs or s.parts > rungs[-1][0].number("parts")) and (rung := _alike(graph, spot, s)):
            ladders[at] = [*rungs, rung]
    out = [*ladders.values()]
    batches = (batch_move(graph, p) for p in PARTS if p * len(graph.ops) <= MOST_CLONES)
    out.append([(m,) for m in batches if m])
    return out + [[(m,)] for m in itertools.islice(_again(graph, spot), AGAIN)]


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
            for parts in (p for p in PARTS if split_time.split_time_refusal(op, d.name, p) is None):
                if budget.over():
                    return
                whole = split_time.region(graph, at, d.name, parts, min(at, at - spot.op + REACH[-1]))
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
    """The split at every operation that is like the one at the end of the region and lies as near to a high place; none where
    that makes too many operations."""
    kind, far = signature(graph.ops[s.at], graph), s.at - spot.op
    here = signature(graph.ops[spot.op], graph)
    ends = dict.fromkeys([s.at])
    for p in spot.high:
        q = p + far
        if q < len(graph.ops) and signature(graph.ops[p], graph) == here and signature(graph.ops[q], graph) == kind:
            ends[q] = None
    if len(ends) * s.clones > MOST_CLONES:
        return ()
    return tuple(split_time.time_move(graph.ops[q], s.dim, s.parts, s.back) for q in ends)


def _again(graph: Graph, spot: Peak) -> Iterator[Move]:
    """Recomputing what is alive at the peak but not used there, the largest first."""
    makers, readers = graph.producers(), graph.consumers()
    used = {*graph.ops[spot.op].inputs, *graph.ops[spot.op].outs}
    for t in sorted(set(spot.nbytes) - used, key=lambda t: -spot.nbytes[t]):
        before = sum(r < spot.op for r in dict.fromkeys(readers.get(t, ())))
        if t in makers and before and recompute.refusal(graph, graph.ops[makers[t]], before) is None:
            yield Move("recompute", t, (("keep", before),))


BEAM = 2  # states rewritten in one round
CHOICES = 5  # regions that are split, per state
AGAIN = 2  # tensors that are computed again, per state
PATIENCE = 2  # rounds without a better plan before the search stops
NEAR = 1.01  # times the bound: good enough to stop
MORE = 10.0 * SECOND  # to look for a cheaper plan after the first one that fits
TRIAL = 4.0 * SECOND  # for planning one state
ALONE = 0.6  # of the budget that is left
