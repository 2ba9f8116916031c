"""What a piece of a sequence of operations costs on some devices: solved exactly, once for all pieces that are alike.

What a piece receives from earlier ones is an operation of its own in its problem, whose strategies are the layouts in which
the tensor may arrive: each device receives its part over the link from the stage before, and from there the usual tables
apply. So "send a part to each and gather over the fast links" competes with "send everything to everyone". What a piece
costs does not depend on how its neighbours are cut.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TypeVar

import numpy as np

from tapestry.errors import PlanError
from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block, Dim, Graph, Op, Read
from tapestry.ir.index import dim
from tapestry.ir.plan import Layout, Mesh, MeshAxis, Stage, Strategy, device_count, on_stage
from tapestry.ir.syntax.printer import signature
from tapestry.ir.types import itemsize
from tapestry.plan.cost import compute
from tapestry.plan.pipelines.staged_plan import link_between, segment, stage_topology
from tapestry.plan.requests import AskedPin, read_pins
from tapestry.plan.search.planner import spatial
from tapestry.plan.search.priced_plan import PricedPlan, fewest, peak, streamable, summed
from tapestry.plan.search.problem import Problem, build
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.network import Factor
from tapestry.plan.strategy import Dims, LayoutConstraints, Pin, tensor_boxes
from tapestry.plan.topology import Link, Topology
from tapestry.rewrites.core.driver import logged
from tapestry.rewrites.core.rule import Move, own_rules
from tapestry.rewrites.tiled_region import batch_move, micro_batch

# What the pipeline search cuts into stages: the operations of one micro-batch, in order.


class NotInStages(PlanError):
    """So many micro-batches cannot be in the stages that are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSequence:
    """A graph as micro-batches.

    Attributes:
        copies: for each micro-batch its operations, all in the same order; ``copies[0]`` is planned, the others follow it.
        before, after: operations that run once, ahead of the micro-batches and behind them.
        moves: the rewrite that made the micro-batches.
    """

    graph: Graph
    copies: tuple[tuple[int, ...], ...]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def micro(self) -> int:
        """Number of micro-batches."""
        return len(self.copies)

    def one(self) -> Graph:
        """The operations of one micro-batch as a graph."""
        return segment(self.graph, self.copies[0], first=self.micro == 1)


def batch_cut(graph: Graph, micro: int) -> Move | None:
    """The rewrite that cuts the batch into some number of equal micro-batches; ``None`` when there is no such batch."""
    move = batch_move(graph, micro)
    return None if move is None or graph.tensors[move.at].shape[move.number("axis")] % micro else move


def sequence(graph: Graph, micro: int) -> StageSequence | None:
    """The graph as some number of equal micro-batches; ``None`` when it has no batch to cut."""
    if micro == 1:
        return StageSequence(graph=graph, copies=(tuple(range(len(graph.ops))),))
    move = batch_cut(graph, micro)
    if move is None:
        return None
    found = micro_batch(graph, move)
    copies = tuple(tuple(i for i, p in enumerate(found.part) if p == k) for k in range(micro))
    before = tuple(i for i, p in enumerate(found.part) if p < 0 and i < copies[0][0])
    after = tuple(i for i, p in enumerate(found.part) if p < 0 and i > copies[0][0])
    equal = all([_extents(found.graph, i) for i in c] == [_extents(found.graph, i) for i in copies[0]] for c in copies)
    graph = logged(own_rules()["micro_batch"], graph, found.graph, str(move))
    return StageSequence(graph=graph, copies=copies, before=before, after=after, moves=(move,)) if equal else None


def in_stages(seq: StageSequence, stages: list[int]) -> tuple[StageSequence, list[int]]:
    """Every copy with the operations of a stage after those of the stages before, and the positions where stages begin.

    Raises:
        NotInStages: a stage would have no operation, or a value of the host would have to cross into another one.
    """
    copies = tuple(tuple(sorted(c, key=lambda i: (stages[i], i))) for c in seq.copies)
    mine = [stages[i] for i in copies[0]]
    points = [*(bisect_left(mine, k) for k in range(max(stages) + 1)), len(mine)]
    empty = next((k for k, (lo, hi) in enumerate(itertools.pairwise(points)) if lo == hi), None)
    if empty is not None:
        raise NotInStages(
            f"stage {empty} would have no operation", where="--stage-at", hint="another node, or without it",
            why="its nodes became views or constants, or run once for all micro-batches",
        )  # fmt: skip
    out = replace(seq, copies=copies)
    if crossed_by_host_values(out.one()) & {*points[1:-1]}:
        raise NotInStages("a value of the host would have to cross into another stage", where="--stage-at", hint="another node")
    return out, points


def _extents(graph: Graph, i: int) -> tuple[int, ...]:
    return tuple(d.size for d in graph.ops[i].space)


def cut_points(graph: Graph, most: int) -> list[int]:
    """Positions in the order of operations where stages may begin: all of them if they are few, otherwise the one that the
    fewest bytes cross in each of ``most`` stretches of operations; none that a value of the host would have to cross."""
    n, never = len(graph.ops), crossed_by_host_values(graph)
    if n <= most:
        return [p for p in range(n + 1) if p not in never]
    crossing = crossing_bytes(graph)
    ends = [round(k * n / most) for k in range(most + 1)]
    inner = {lo + int(np.argmin(crossing[lo:hi])) for lo, hi in itertools.pairwise(ends)}
    return sorted({0, n, *(inner - never)})


def crossed_by_host_values(graph: Graph) -> set[int]:
    """Positions before which a value of the host is made that is read at them or later: it is never sent."""
    readers = graph.consumers()
    ends = [(m, max(readers.get(t, ()), default=m)) for t, m in graph.producers().items() if graph.tensors[t].on_host]
    return {p for maker, last in ends for p in range(maker + 1, last + 1)}


def crossing_bytes(graph: Graph) -> np.ndarray:
    """For each position, bytes of all tensors that are made before it and read at it or later."""
    change = np.zeros(len(graph.ops) + 1, np.int64)
    readers = graph.consumers()
    for t, maker in graph.producers().items():
        last = max(readers.get(t, ()), default=maker)
        nbytes = graph.tensors[t].size * itemsize(graph.tensors[t].dtype)
        change[maker + 1] += nbytes
        change[last + 1] -= nbytes
    out = np.cumsum(change)
    out[0] = np.iinfo(np.int64).max  # no cut
    return out


# The outer dynamic program of pipeline plans: where a sequence of operations is cut, and which devices each piece gets.
#
# As in Alpa (Zheng et al. 2022), with M micro-batches the latency of stages of t_1 … t_S seconds per micro-batch is
# ``Σ t_s + (M - 1) max t_s``. Alpa enumerates the maximum; here every state keeps all pairs (sum, maximum) of which no other is
# smaller in both, which is as exact and needs one pass.


@dataclass(frozen=True, slots=True)
class Submesh:
    """Consecutive devices as a mesh: ``count`` devices, which may start at any of ``starts``."""

    mesh: Mesh
    count: int
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stage: positions [lo, hi) of the sequence, on submesh number ``shape``, from device ``first`` on."""

    lo: int
    hi: int
    shape: int
    first: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Pieces in order, the sum of their seconds and the largest."""

    pieces: tuple[Piece, ...]
    total: float
    slowest: float

    def latency(self, micro: int) -> float:
        """Seconds for all micro-batches."""
        return self.total + (micro - 1) * self.slowest


Cost = Callable[[Piece], float]
"""Seconds of a piece per micro-batch; infinite when it does not fit."""

Ends = Callable[[int], Iterable[int]]
"""Positions at which a piece that begins at one may end."""


def submeshes(mesh: Mesh) -> list[Submesh]:
    """Ranges of devices that are meshes: some of one axis with all of the faster ones, of a size that divides the axis or
    is a power of two. One device, and less than all."""
    total = device_count(mesh)
    out = {1: Submesh((MeshAxis(mesh[-1].name, 1),), 1, tuple(range(total)))} if total > 1 else {}
    faster = 1
    for k in range(len(mesh) - 1, -1, -1):
        axis = mesh[k]
        for q in range(2, axis.size + 1):
            n = q * faster
            if n >= total or n in out or (axis.size % q and q & (q - 1)):
                continue
            starts = [p for p in range(0, total, faster) if (p // faster) % axis.size + q <= axis.size]
            out[n] = Submesh((MeshAxis(axis.name, q), *mesh[k + 1 :]), n, tuple(starts))
        faster *= axis.size
    return list(out.values())


@dataclass(frozen=True, slots=True)
class _Label:
    """A way to a state: pieces so far, newest first, and their costs."""

    total: float
    slowest: float
    piece: Piece | None = None
    before: _Label | None = None

    def latency(self, micro: float) -> float:
        """Seconds for all micro-batches; of the slowest stage alone where there is no end of them."""
        return self.slowest if micro == inf else self.total + (micro - 1) * self.slowest

    def beats(self, other: _Label, micro: float) -> bool:
        """Whether it is as good in all that counts."""
        return (micro == inf or self.total <= other.total) and (micro == 1 or self.slowest <= other.slowest)


def best_chain(
    length: int,
    devices: int,
    shapes: list[Submesh],
    cost: Cost,
    *,
    micro: float = 1,
    stages: int | None = None,
    upper: float = inf,
    alike: bool = True,
    ends: Ends | None = None,
    fits: Callable[[Piece], bool] | None = None,
) -> Chain | None:
    """The chain of least latency over positions [0, length) on devices in order; ``None`` when none fits below ``upper``.

    Args:
        micro: how many micro-batches; infinite: only the slowest stage counts.
        stages: exactly that many; by default any number from two on.
        alike: whether it is all the same which devices a piece has: then it has the first free ones.
        ends: by default a piece may end at any later position; positions may be those of a partial order, in any of its orders.
        fits: asked only of pieces that would make a better chain.
    """
    ends = ends or (lambda lo: range(lo + 1, length + 1))
    most = stages if stages is not None else 2  # more than two are counted as two
    states: list[dict[tuple[int, int], list[_Label]]] = [{} for _ in range(length + 1)]
    states[0][0, 0] = [_Label(0, 0)]  # whole numbers stay whole
    for lo in range(length):
        for (used, count), labels in states[lo].items():
            for piece, size in _next(lo, used, ends, devices, shapes, alike):
                if stages is not None and (count + 1 == stages) != (piece.hi == length):
                    continue
                seconds = cost(piece)
                if seconds == inf:
                    continue
                there = states[piece.hi].setdefault((piece.first + size, min(count + 1, most)), [])
                for label in labels:
                    new = _Label(label.total + seconds, max(label.slowest, seconds), piece, label)
                    late = new.latency(micro) >= upper or any(o.beats(new, micro) for o in there)
                    if not late and (fits is None or fits(piece)):
                        there[:] = [*(o for o in there if not new.beats(o, micro)), new]
    whole = [label for (_, count), labels in states[length].items() if count == most for label in labels]
    if not whole:
        return None
    best = min(whole, key=lambda e: e.latency(micro))
    return Chain(tuple(_pieces(best))[::-1], best.total, best.slowest)


def _next(lo: int, used: int, ends: Ends, devices: int, shapes: list[Submesh], alike: bool) -> Iterator[tuple[Piece, int]]:
    """Every piece that can come next, with its number of devices: on free devices where its submesh may start."""
    for k, shape in enumerate(shapes):
        free = [p for p in shape.starts if p >= used and p + shape.count <= devices]
        for first in free[:1] if alike else free:
            for hi in ends(lo):
                yield Piece(lo, hi, k, first), shape.count


def _pieces(label: _Label) -> Iterator[Piece]:
    at: _Label | None = label
    while at is not None and at.piece is not None:
        yield at.piece
        at = at.before


# What the stages of a plan keep to: pins, fixed layouts and annotations, and the stage of each tensor where that is given.
#
# A layout of the whole mesh is, on the mesh of a stage, the same axes by name (`ir.plan.on_stage`); a stage that does not
# have an axis that cuts as a whole cannot keep to it. A pin of so many parts needs them on the stage's own mesh.


K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The same for one part of the graph on the mesh of a stage, as the search takes it."""

    pins: Mapping[int, tuple[Pin, ...]]
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    fixed: LayoutConstraints


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked for of a graph on the whole mesh.

    Attributes:
        pins: by the first result of an operation.
        cuts: the stage of each tensor; stages are numbered from 0. Empty: they are searched.
    """

    mesh: Mesh = ()
    pins: Mapping[str, tuple[AskedPin, ...]] = field(default_factory=dict[str, tuple[AskedPin, ...]])
    inputs: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    outputs: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    fixed: LayoutConstraints = field(default_factory=LayoutConstraints)
    cuts: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def bound(self) -> bool:
        """Whether something is fixed inside stages."""
        return bool(self.pins or self.inputs or self.outputs or self.fixed)

    def on(self, graph: Graph, mesh: Mesh, received: Collection[str] = ()) -> Given | None:
        """For a part of the graph on the mesh of a stage; ``None`` when that mesh cannot keep to it.

        Args:
            received: tensors that another stage writes: pins and layouts of their writing are not meant here.
        """
        pins: dict[int, tuple[Pin, ...]] = {}
        outs, reads, dims = dict[str, Layout | None](), dict[tuple[str, str], Layout | None](), dict[str, Dims | None]()
        for i, op in enumerate(graph.ops):
            mine = [t for t in op.outs if t not in received]
            for p in self.pins.get(before_cut(op.outs[0]), ()) if mine else ():
                found = p.on(op, mesh)
                if found is None:
                    return None
                pins[i] = pins.get(i, ()) + found
            outs |= {
                t: on_stage(self.fixed.outs[before_cut(t)], self.mesh, mesh) for t in mine if before_cut(t) in self.fixed.outs
            }
            reads |= {(s, t): on_stage(self.fixed.reads[s, before_cut(t)], self.mesh, mesh) for s, t in self.read(op)}
            if before_cut(op.outs[0]) in self.fixed.dims and mine:
                dims[op.outs[0]] = _dims_on(self.fixed.dims[before_cut(op.outs[0])], self.mesh, mesh)
        ends = (
            {t: on_stage(x, self.mesh, mesh) for t, x in of.items() if t in there}
            for of, there in ((self.inputs, {*graph.inputs, *graph.weights}), (self.outputs, graph.producers()))
        )
        inputs, outputs = ends
        if None in (*outs.values(), *reads.values(), *dims.values(), *inputs.values(), *outputs.values()):
            return None
        fixed = LayoutConstraints(outs=_sure(outs), reads=_sure(reads), dims=_sure(dims), exact=self.fixed.exact)
        return Given(pins=pins, inputs=_sure(inputs), outputs=_sure(outputs), fixed=fixed)

    def read(self, op: Op) -> Iterator[tuple[str, str]]:
        """(node, tensor) of the reads of an operation of which something is said."""
        for s in dict.fromkeys(op.source):
            yield from ((s, t) for t in op.inputs if (s, before_cut(t)) in self.fixed.reads)

    def key(self, op: Op) -> object:
        """What is said of an operation, without its name: equal for those that are planned alike."""
        if not self.bound:
            return None
        name = before_cut(op.outs[0])
        outs = tuple((n, self.fixed.outs.get(before_cut(t)), self.outputs.get(t)) for n, t in enumerate(op.outs))
        ins = tuple((n, self.inputs[t]) for n, t in enumerate(op.inputs) if t in self.inputs)
        reads = tuple((op.inputs.index(t), self.fixed.reads[s, before_cut(t)]) for s, t in self.read(op))
        return self.pins.get(name), outs, ins, reads, self.fixed.dims.get(name)

    def stages(self, graph: Graph) -> list[int]:
        """The stage of each operation: that of its results, and never before what it reads."""
        return stage_numbers(graph, self.cuts)


def asked_of(
    graph: Graph, mesh: Mesh, *, pins: Sequence[str], folded: Sequence[str], inputs: Mapping[str, Layout],
    outputs: Mapping[str, Layout], fixed: LayoutConstraints, cuts: Mapping[str, int],
) -> Asked:  # fmt: skip
    """What is asked for, with the operations that the pins name.

    Raises:
        PlanError: a pin names no operation, dimension or mesh axis; a layout is of an output that no operation writes.
    """
    loose = next((t for t in outputs if t not in graph.producers()), None)
    if loose is not None:
        raise PlanError("an output that is an input as it came is in no stage", where=f"--layout {loose}", hint="--stages 1")
    found: dict[str, tuple[AskedPin, ...]] = {}
    for i, p in read_pins(pins, graph, mesh, folded):
        name = graph.ops[i].outs[0]
        found[name] = (*found.get(name, ()), p)
    return Asked(mesh=mesh, pins=found, inputs=inputs, outputs=outputs, fixed=fixed, cuts=cuts)


def stage_numbers(graph: Graph, known: Mapping[str, int]) -> list[int]:
    """The stage of each operation, from that of some tensors; an operation of whose results nothing is known is in the first
    stage that has all it reads."""
    at: dict[str, int] = {}
    out: list[int] = []
    for op in graph.ops:
        own = max((known.get(before_cut(t), 0) for t in op.outs), default=0)
        out.append(max([own, *(at[t] for t in op.inputs if t in at)]))
        at |= dict.fromkeys(op.outs, out[-1])
    return out


def needed(ends: Sequence[Iterable[int]], parents: Callable[[int], Iterable[int]]) -> list[set[int]]:
    """What each stage has when stages end with these: all that they need and no earlier stage has."""
    taken, out = set[int](), list[set[int]]()
    for end in ends:
        mine, need = set[int](), [*end]
        while need:
            k = need.pop()
            if k not in taken and k not in mine:
                mine.add(k)
                need += parents(k)
        taken |= mine
        out.append(mine)
    return out


def before_cut(tensor: str) -> str:
    """The name of a tensor before the batch was cut: micro-batch 3 of ``h`` is ``h@3``."""
    return re.sub(r"@\d+(\.part|\.\d+)?$", "", tensor)


def _dims_on(dims: Dims, mesh: Mesh, stage: Mesh) -> Dims | None:
    cuts = {a: d for a, d in zip(mesh, dims, strict=True) if d is not None and a.size > 1}
    return None if any(a not in stage for a in cuts) else tuple(cuts.get(a) for a in stage)


def _sure(found: Mapping[K, V | None]) -> dict[K, V]:
    return {k: v for k, v in found.items() if v is not None}


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
        return fewer if fewer is not None and self.fits(fewer) and _total(fewer) < _total(every) else every


def _total(found: PricedPlan) -> float:
    return summed(found.problem, found.plan) if found.problem else inf


def solve_piece(
    sub: Graph, links: Mapping[str, Link], topo: Topology, budget: Budget, inputs: Mapping[str, Layout] | None = None,
    asked: Asked = NOTHING, *, streams: bool = False,
) -> Solved | None:  # fmt: skip
    """The best plan of a piece on its devices; ``None`` when it does not fit, or cannot keep to what is asked for.

    Args:
        sub: the piece as a graph.
        links: for each of its inputs that another stage computes, the link that it comes over.
        inputs: layouts of inputs that are already on these devices.
        streams: whether weights may be loaded for every use where they do not fit.
    """
    graph = _with_arrivals(sub, list(links))
    given = asked.on(graph, topo.mesh, {*links})
    if given is None:
        return None
    solving = _Solving(graph, list(links.values()), topo, budget, given, inputs or {})
    found = solving.plan(_NONE)
    if found is not None and not solving.fits(found):
        found = solving.streaming() if streams else None
    if found is None or found.problem is None:
        return None
    chosen, n = found.plan.strategies, len(links)
    arrivals = tuple(s.out for s in chosen[:n])
    return Solved(summed(found.problem, found.plan), peak(found), chosen[n:], arrivals, found.plan.streamed)


def _with_arrivals(sub: Graph, received: Sequence[str]) -> Graph:
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
            self.name(piece.lo, piece.hi), tuple((a.size, link) for a, link in zip(sub.mesh, sub.links, strict=True)),
            self.link(piece) if piece.lo else None, self.kinds(piece.shape, piece.first),
        )  # fmt: skip

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
