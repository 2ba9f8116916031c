"""What every piece of a sequence costs about, without solving each: the whole sequence is solved once per submesh, and a piece
keeps the choices that its operations have there. That is one of the piece's own plans, so it is an upper estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np

from tapestry.ir.plan import Stage, device_count
from tapestry.ir.types import itemsize
from tapestry.plan.cost import compute
from tapestry.plan.pipelines.segments import Pieces
from tapestry.plan.pipelines.stage_chain import Piece
from tapestry.plan.pipelines.staged_plan import stage_topology
from tapestry.plan.search.problem import Problem, build
from tapestry.plan.solver.network import solve
from tapestry.plan.strategy import out_layout, tensor_boxes
from tapestry.plan.topology import Topology
from tapestry.plan.topology.fabric import slowest


@dataclass(frozen=True, slots=True)
class _Table:
    """For one submesh, of each piece [lo, hi): seconds inside; tensors that arrive, their bytes per device as they are needed,
    their bytes per device when each device gets a part, and the seconds to gather those; least bytes of weights."""

    seconds: np.ndarray
    messages: np.ndarray
    nbytes: np.ndarray
    parts: np.ndarray
    gather: np.ndarray
    weights: np.ndarray


@dataclass(slots=True)
class Estimates:
    """Upper estimates of pieces, and a lower bound of the sum over any chain."""

    pieces: Pieces
    tables: dict[tuple[int, tuple[int, ...]], _Table] = field(default_factory=dict[tuple[int, tuple[int, ...]], _Table])
    least: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        graph = self.pieces.graph
        self.least = np.full(len(graph.ops), inf)
        places = [(k, first) for k, shape in enumerate(self.pieces.shapes) for first in shape.starts]
        for k, first in places:
            key = (k, self.pieces.kinds(k, first))
            if key in self.tables:
                continue
            self.pieces.check()
            problem = build(graph, stage_topology(self.pieces.topo, Stage(first, self.pieces.shapes[k].mesh)), {}, {}, {})
            self.pieces.budget.spend(problem.work)
            self.tables[key] = _table(problem, self.pieces)
            self.least = np.minimum(self.least, [float(m.seconds.min()) for m in problem.menus])

    def seconds(self, piece: Piece) -> float:
        """About what a piece costs, whatever is asked for; infinite where its weights do not fit and may not be streamed."""
        t = self.tables[piece.shape, self.pieces.kinds(piece.shape, piece.first)]
        device = stage_topology(self.pieces.topo, self.pieces.stage(piece)).device
        at = (piece.lo, piece.hi)
        if t.weights[at] > device.memory and not self.pieces.streams:
            return inf
        link = self.pieces.link(piece)
        per_byte = link.beta + 1 / device.bandwidth
        moved = min(t.nbytes[at] * per_byte, t.parts[at] * per_byte + t.gather[at])
        return float(t.seconds[at] + t.messages[at] * (link.alpha + device.launch) + moved)

    def bound(self) -> float:
        """Seconds that the stages of every chain take at least, all together: each operation at its best anywhere."""
        return float(self.least.sum())


def _table(problem: Problem, pieces: Pieces) -> _Table:
    graph, points = problem.graph, pieces.points
    n = len(points) - 1
    bucket = np.searchsorted(points, np.arange(len(graph.ops)), side="right") - 1
    choice = solve(problem.network, pieces.budget).choice
    own = np.zeros(n)
    for f in problem.factors:
        own[bucket[f.nodes[-1]]] += float(f.table[tuple(choice[k] for k in f.nodes)])
    ends = np.concatenate([[0.0], np.cumsum(own)])
    messages, nbytes, parts, gather, weights = (np.zeros((n, n + 1)) for _ in range(5))
    for t, readers in graph.consumers().items():
        at = sorted({int(bucket[r]) for r in readers})
        if t in graph.weights:
            _first_read(weights, at, -1, _least_bytes(problem, t, readers[0]))
        elif t in pieces.makers:
            maker = pieces.makers[t]
            whole = graph.tensors[t].size * itemsize(graph.tensors[t].dtype)
            needed = _arriving_bytes(problem, t, maker, choice[maker])
            part = min(needed, whole / device_count(problem.topo.mesh))
            amounts = (1.0, needed, part, _gather_seconds(needed - part, needed, problem.topo))
            for table, amount in zip((messages, nbytes, parts, gather), amounts, strict=True):
                _first_read(table, at, int(bucket[maker]), amount)
    sums = [np.cumsum(x, axis=1) for x in (messages, nbytes, parts, gather, weights)]
    return _Table(ends[None, :] - ends[:n, None], *sums)


def _gather_seconds(missing: float, needed: float, topo: Topology) -> float:
    """About what it takes to bring the parts of a tensor together on the devices of a submesh."""
    if not missing:
        return 0.0
    link, steps = slowest(topo.links), np.ceil(np.log2(device_count(topo.mesh) + 1))
    return float(link.alpha * steps + missing * link.beta + needed / topo.device.bandwidth + topo.device.launch)


def _first_read(table: np.ndarray, readers: list[int], maker: int, amount: float) -> None:
    """A tensor counts in a piece [lo, hi) that starts after its maker, at the first of its readers there: add the amount at
    [lo, reader + 1], so that sums along the second axis count it from there on."""
    before = maker
    for r in readers:
        table[before + 1 : r + 1, r + 1] += amount
        before = max(before, r)


def _arriving_bytes(problem: Problem, tensor: str, maker: int, choice: int) -> float:
    """Bytes per device of a tensor that arrives in the layout that its maker would give it on these devices."""
    op, t, mesh = problem.graph.ops[maker], problem.graph.tensors[tensor], problem.topo.mesh
    layout = out_layout(op, problem.menus[maker].strategies[choice].out, op.outs.index(tensor))
    return float(compute.sizes(tensor_boxes(t.shape, layout, mesh)).max()) * itemsize(t.dtype)


def _least_bytes(problem: Problem, tensor: str, reader: int) -> float:
    """The least that a device holds of a weight, whichever way its first reader is cut."""
    where = [k for k, t in enumerate(problem.graph.ops[reader].operands) if t == tensor]
    cells = min(max(int(compute.sizes(r[k]).max()) for k in where) for r in problem.menus[reader].reads)
    return float(cells * itemsize(problem.graph.tensors[tensor].dtype))
