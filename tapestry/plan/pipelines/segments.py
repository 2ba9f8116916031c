"""What a piece of a sequence of operations costs on some devices: solved exactly, once for all pieces that are alike.

What a piece receives from earlier ones is an operation of its own in its problem, whose strategies are the layouts in which
the tensor may arrive: each device receives its part over the link from the stage before, and from there the usual tables
apply. So "send a part to each and gather over the fast links" competes with "send everything to everyone". What a piece
costs does not depend on how its neighbours are cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from tapestry.errors import PlanError
from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block, Dim, Graph, Read
from tapestry.ir.index import dim
from tapestry.ir.plan import Layout, Stage, Strategy
from tapestry.ir.syntax.printer import signature
from tapestry.plan.cost import compute
from tapestry.plan.pipelines.stage_chain import Piece, Submesh
from tapestry.plan.pipelines.stage_constraints import Asked, Given
from tapestry.plan.pipelines.staged_plan import link_between, segment, stage_topology
from tapestry.plan.search.planner import spatial
from tapestry.plan.search.priced_plan import PricedPlan, peak, summed
from tapestry.plan.search.problem import Problem, build
from tapestry.plan.search.streamed_weights import fewest, streamable
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.network import Factor
from tapestry.plan.strategy import tensor_boxes
from tapestry.plan.topology import Link, Topology

Key = tuple[object, ...]
NOTHING = Asked()
_NONE = frozenset[str]()
PIECE = 5.0 * SECOND  # for one piece: what takes more hardly fits, and there are others


@dataclass(frozen=True, slots=True)
class Solved:
    """A piece on its devices: seconds, peak bytes of the device that needs most, the strategy of each operation, the layout in
    which each tensor from outside is received, and the weights that are streamed."""

    seconds: float
    peak: int
    strategies: tuple[Strategy, ...]
    arrivals: tuple[Layout, ...]
    streamed: frozenset[str] = frozenset()


def receive_seconds(nbytes: int, link: Link, topo: Topology) -> float:
    """A device receives and stores some bytes from another stage: one message, a new buffer, a launch."""
    return link.alpha + nbytes * link.beta + nbytes / topo.device.bandwidth + topo.device.launch


@dataclass(slots=True)
class _Solving:
    """One piece: its graph with copies of what it receives, the links of those, and what it keeps to."""

    graph: Graph
    links: list[Link]
    topo: Topology
    budget: Budget
    given: Given
    inputs: Mapping[str, Layout]

    def plan(self, streamed: frozenset[str]) -> PricedPlan | None:
        """The best plan; ``None`` where what is asked for leaves some operation without a strategy."""
        given = self.given
        try:
            problem = build(
                self.graph, self.topo, given.pins, {**given.inputs, **self.inputs}, given.outputs, given.fixed, streamed
            )
        except PlanError:
            return None
        self.budget.spend(problem.work)
        for i, link in enumerate(self.links):
            problem.factors.append(_receiving(problem, i, link))
        return spatial(problem, self.budget.part(PIECE), squeeze=False, clock=False)

    def fits(self, found: PricedPlan | None) -> bool:
        return found is not None and peak(found) <= self.topo.device.memory

    def streaming(self) -> PricedPlan | None:
        """The best plan with as few streamed weights as fit; ``None`` where even all are not enough."""
        fixed = (*self.given.inputs, *self.inputs)
        every = self.plan(streamable(self.graph, fixed, self.topo.device.memory))
        if every is None or not self.fits(every) or not every.plan.streamed:
            return None
        fewer = self.plan(fewest(every, self.topo))
        return fewer if fewer is not None and self.fits(fewer) and summed(fewer) < summed(every) else every


def solve_piece(
    sub: Graph,
    links: Mapping[str, Link],
    topo: Topology,
    budget: Budget,
    inputs: Mapping[str, Layout] | None = None,
    asked: Asked = NOTHING,
    *,
    streams: bool = False,
) -> Solved | None:
    """The best plan of a piece on its devices; ``None`` when it does not fit, or cannot keep to what is asked for.

    Args:
        sub: the piece as a graph.
        links: for each of its inputs that another stage computes, the link that it comes over.
        inputs: layouts of inputs that are already on these devices.
        streams: whether weights may be loaded for every use where they do not fit.
    """
    graph = with_arrivals(sub, list(links))
    given = asked.on(graph, topo.mesh, {*links})
    if given is None:
        return None
    solving = _Solving(graph, list(links.values()), topo, budget, given, inputs or {})
    found = solving.plan(_NONE)
    if found is not None and not solving.fits(found):
        found = solving.streaming() if streams else None
    if found is None:
        return None
    chosen, n = found.plan.strategies, len(links)
    arrivals = tuple(s.out for s in chosen[:n])
    return Solved(summed(found), peak(found), chosen[n:], arrivals, found.plan.streamed)


def with_arrivals(sub: Graph, received: Sequence[str]) -> Graph:
    """The graph with a copy of each received tensor in front: its strategies are the layouts of the arrival."""
    if not received:
        return sub
    copies: list[Block] = []
    tensors, inputs = dict(sub.tensors), list(sub.inputs)
    for t in received:
        tensor, sent = sub.tensors[t], f"{t} sent"
        while sent in tensors:
            sent += "_"
        tensors[sent] = replace(tensor, name=sent)
        inputs[inputs.index(t)] = sent
        dims = tuple(Dim(f"x{k}", n) for k, n in enumerate(tensor.shape))
        read = Read(tensor=sent, index=tuple(dim(d.name) for d in dims))
        copies.append(Block(outs=(t,), dims=dims, reads=(read,), body=(Arg(0, tensor.dtype),)))
    return replace(sub, tensors=tensors, inputs=tuple(inputs), ops=(*copies, *sub.ops))


def _receiving(problem: Problem, i: int, link: Link) -> Factor:
    """What turns the cost of a copy into the cost of receiving."""
    menu, graph, topo = problem.menus[i], problem.graph, problem.topo
    tensor = graph.tensors[graph.ops[i].outs[0]]
    width = compute.itemsize(tensor.dtype)
    largest = [int(compute.sizes(tensor_boxes(tensor.shape, s.out, topo.mesh)).max()) * width for s in menu.strategies]
    return Factor((i,), np.array([receive_seconds(n, link, topo) for n in largest]) - menu.seconds)


@dataclass(slots=True)
class Pieces:
    """Costs of all pieces of a sequence of operations.

    Attributes:
        graph: the operations in order; its inputs come from the host.
        points: positions where it may be cut, from 0 to the number of operations.
        insist: whether to go on without a budget until there is a plan.
        asked: what every piece keeps to.
        streams: whether weights may be loaded for every use where they do not fit.
    """

    graph: Graph
    topo: Topology
    shapes: list[Submesh]
    points: list[int]
    budget: Budget
    insist: bool = True
    asked: Asked = NOTHING
    streams: bool = False
    keys: list[str] = field(init=False)
    makers: dict[str, int] = field(init=False)
    readers: dict[str, list[int]] = field(init=False)
    solved: dict[Key, Solved | None] = field(default_factory=dict[Key, Solved | None])
    known: dict[Piece, Solved | None] = field(default_factory=dict[Piece, Solved | None])
    numbers: dict[Key, int] = field(default_factory=dict[Key, int])
    names: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])

    def __post_init__(self) -> None:
        self.keys = [f"{signature(op, self.graph)} {self.asked.key(op)}" for op in self.graph.ops]
        self.makers, self.readers = self.graph.producers(), self.graph.consumers()

    def check(self) -> None:
        """Raises `OutOfTime` when the budget is over, unless somebody insists on a plan."""
        if not self.insist:
            self.budget.check()

    def stage(self, piece: Piece) -> Stage:
        """Where a piece is."""
        return Stage(piece.first, self.shapes[piece.shape].mesh)

    def link(self, piece: Piece) -> Link:
        """What a piece receives is priced as if from the device before its own."""
        return link_between(self.topo, piece.first - 1, piece.first) if piece.first else Link(0.0, 0.0)

    def key(self, piece: Piece) -> Key:
        """Equal for pieces that are planned alike: kinds of operations, how they are joined, devices and links."""
        sub = stage_topology(self.topo, self.stage(piece))
        return (
            self.name(piece.lo, piece.hi),
            tuple((a.size, link) for a, link in zip(sub.mesh, sub.links, strict=True)),
            self.link(piece) if piece.lo else None,
            self.kinds(piece.shape, piece.first),
        )

    def kinds(self, shape: int, first: int) -> tuple[int, ...]:
        """Which kinds of devices a submesh has, where not all are alike: each by the first device of its kind."""
        return tuple(self.topo.kinds.index(d) for d in self.topo.kinds[first : first + self.shapes[shape].count])

    def name(self, lo: int, hi: int) -> int:
        """A number for a piece without the names of its tensors: equal for equal ones."""
        if (lo, hi) not in self.names:
            found = self.anonymous(self.points[lo], self.points[hi])
            self.names[lo, hi] = self.numbers.setdefault(found, len(self.numbers))
        return self.names[lo, hi]

    def anonymous(self, first: int, last: int) -> Key:
        """Kinds of operations; for each read which operation of the piece made it, or which source it is and of which sort;
        and which results leave the piece."""
        graph = self.graph
        sources: dict[str, int] = {}
        out: list[object] = []
        for i in range(first, last):
            op, wiring = graph.ops[i], list[object]()
            for t in op.inputs:
                maker = self.makers.get(t, -1)
                if maker >= first:
                    wiring.append((maker - first, graph.ops[maker].outs.index(t)))
                else:
                    sort = "arrives" if maker >= 0 else "weight" if t in graph.weights else "input"
                    wiring.append((sort, sources.setdefault(t, len(sources))))
            leaves = tuple(t in graph.outputs or any(r >= last for r in self.readers.get(t, ())) for t in op.outs)
            out.append((self.keys[i], tuple(wiring), leaves))
        return tuple(out)

    def solve(self, piece: Piece) -> Solved | None:
        """The best plan of a piece; ``None`` when it does not fit."""
        if piece not in self.known:
            key = self.key(piece)
            if key not in self.solved:
                sub = self.part(piece)
                links = {t: self.link(piece) for t in sub.inputs if t in self.makers}
                topo = stage_topology(self.topo, self.stage(piece))
                self.solved[key] = solve_piece(sub, links, topo, self.budget, asked=self.asked, streams=self.streams)
            self.known[piece] = self.solved[key]
        return self.known[piece]

    def part(self, piece: Piece) -> Graph:
        """A piece as a graph of its own."""
        return segment(self.graph, range(self.points[piece.lo], self.points[piece.hi]), first=piece.lo == 0)

    def seconds(self, piece: Piece) -> float:
        """Exact cost of a piece."""
        found = self.solve(piece)
        return inf if found is None else found.seconds
