"""Pipeline × tensor × data parallel plans from one search: an outer dynamic program over cuts and submeshes (`stage_chain`),
fed by the exact inner solver (`segments`), with micro-batches as a rewrite of the graph.

Few distinct pieces: all are solved, and the chain is the best there is under the model. Otherwise the program runs on upper
estimates, the pieces of the chain that it picks are solved, and so on until a chain of solved pieces wins.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf

from tapestry.ir.graph import Graph
from tapestry.ir.plan import Arrival, Layout, Plan, Stage, Strategy, device_count, stages_refused
from tapestry.ir.program import peak_bytes
from tapestry.ir.syntax.printer import signature
from tapestry.plan.pipelines.estimate import Estimates
from tapestry.plan.pipelines.segments import NOTHING, Pieces, Solved, solve_piece
from tapestry.plan.pipelines.sequence import NotInStages, StageSequence, batch_cut, cut_points, in_stages, sequence
from tapestry.plan.pipelines.stage_chain import Chain, Piece, best_chain, submeshes
from tapestry.plan.pipelines.stage_constraints import Asked, stage_numbers
from tapestry.plan.pipelines.staged_plan import link_between, lower_plan, segment, stage_topology
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.plan.solver.budget import Budget, OutOfTime
from tapestry.plan.strategy import out_layout
from tapestry.plan.topology import Link, Topology

MOST_POINTS = 48  # positions at which a long sequence may be cut
SOLVE_ALL = 300  # so many distinct pieces are all solved; of more, only those that estimates single out
MICRO_BATCHES = (1, 2, 4, 8, 16)
SLACK = 1.3  # estimates are upper ones: chains that look this much too slow may still pay
SHRINKS = 3  # times that a plan whose stages together need more memory than each alone is searched again with less


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A plan with pipeline stages.

    Attributes:
        found: the plan; its objective is ``Σ t_s + (M - 1) max t_s``, and its bound one of all such plans.
        seconds: of each stage, per micro-batch.
        sequence: the graph as micro-batches.
        exact: whether every piece was solved, so that no other chain of the cut points is better under the model.
    """

    found: PricedPlan
    seconds: tuple[float, ...]
    sequence: StageSequence
    exact: bool


def search_stages(
    graph: Graph,
    topo: Topology,
    budget: Budget,
    *,
    stages: int | None = None,
    micro: Several[int] = MICRO_BATCHES,
    upper: float = inf,
    insist: bool = True,
    asked: Asked = NOTHING,
    streams: bool = False,
) -> Staged | None:
    """The best plan with pipeline stages that fits, or ``None``.

    Args:
        asked: what it keeps to; where that says the stage of each operation, it says their number.
        streams: whether weights may be streamed; they are only where nothing fits without.
        stages: exactly that many; by default two or more.
        micro: numbers of micro-batches to try; those that do not divide the batch are left out.
        upper: plans that are not faster need not be found.
        insist: whether to go on without time until there is a plan.
    """
    best: Staged | None = None
    refused: list[NotInStages] = []
    bound, alone, possible = inf, 0.0, list[int]()
    stages = max(asked.cuts.values()) + 1 if asked.cuts else stages
    for m in micro:
        if best is not None and budget.over():
            bound = min(bound, alone) if batch_cut(graph, m) else bound
            continue
        limit = best.found.objective if best else upper
        try:
            seq = sequence(graph, m)
            if seq is None:
                continue
            found, lower = _Attempt(seq, topo, stages, limit, budget, asked, insist).best()
        except OutOfTime:
            return None if best is None else _bounded(best, min(bound, alone))
        except NotInStages as e:
            refused.append(e)
            continue
        possible.append(m)
        bound = min(bound, lower)
        if m == 1:  # parts of an operation take as long as the operation, and some stage does its share of all of them
            alone = lower / (stages or device_count(topo.mesh))
        if found is not None and (best is None or found.found.objective < best.found.objective):
            best = found
    if refused and not possible:
        raise refused[0]
    if best is None and streams:
        found = _streaming(graph, topo, stages, possible, upper, budget, asked, insist=insist)
        return None if found is None else _bounded(found, 0.0)  # (streamed or not: the bound of one pass is not of both)
    return None if best is None else _bounded(best, bound)


def _bounded(staged: Staged, bound: float) -> Staged:
    """Bounds of all numbers of micro-batches hold together for the best of them."""
    return replace(staged, found=replace(staged.found, bound=min(bound, staged.found.objective)))


def _streaming(
    graph: Graph,
    topo: Topology,
    stages: int | None,
    micro: Several[int],
    upper: float,
    budget: Budget,
    asked: Asked,
    *,
    insist: bool,
) -> Staged | None:
    """The best plan in which weights may be streamed, each for every micro-batch: so the fewest micro-batches first."""
    for m in sorted(micro):
        try:
            seq = sequence(graph, m)
            found = _Attempt(seq, topo, stages, upper, budget, asked, insist, True).best()[0] if seq else None
        except OutOfTime:
            return None
        if found is not None:
            return found
    return None


@dataclass(slots=True)
class _Attempt:
    """A graph as some number of micro-batches, and what is asked of its plan."""

    seq: StageSequence
    topo: Topology
    stages: int | None
    upper: float
    budget: Budget
    asked: Asked
    insist: bool
    streams: bool = False

    def best(self) -> tuple[Staged | None, float]:
        """(the best plan with these micro-batches, a lower bound of all)."""
        seq, topo, share, bound = self.seq, self.topo, 1.0, inf
        shapes, points = submeshes(topo.mesh), None
        if self.asked.cuts:
            seq, points = in_stages(seq, stage_numbers(seq.graph, self.asked.cuts))
        graph = seq.one()
        for _ in range(SHRINKS):
            within = _with_memory(topo, share)
            places = points or cut_points(graph, MOST_POINTS)
            pieces = Pieces(graph, within, shapes, places, self.budget, self.insist, self.asked, self.streams)
            estimates = Estimates(pieces)
            devices = device_count(topo.mesh)
            most = min(self.stages or devices, devices)
            bound = min(bound, estimates.bound() * (1 + (seq.micro - 1) / most))
            if bound >= self.upper:
                break
            chain, exact = _chain(pieces, estimates, seq.micro, self.stages, self.upper)
            built = None if chain is None else _Assembly(seq, chain, pieces, within).plan()
            if built is None:
                break
            plan, seconds, objective = built
            program = lower_plan(plan)
            peak = topo.strain(peak_bytes(program)[0])
            if peak <= topo.device.memory:
                kinds = len({signature(op, plan.graph) for op in plan.graph.ops})
                found = PricedPlan(plan=plan, program=program, objective=objective, bound=min(bound, objective), distinct=kinds)
                return Staged(found=found, seconds=seconds, sequence=seq, exact=exact), bound
            share *= topo.device.memory / peak * 0.98
        return None, bound


def _with_memory(topo: Topology, share: float) -> Topology:
    """The topology with a share of every device's memory."""
    device, *kinds = (replace(d, memory=int(d.memory * share)) for d in (topo.device, *topo.kinds))
    return replace(topo, device=device, kinds=tuple(kinds))


def _chain(pieces: Pieces, estimates: Estimates, micro: int, stages: int | None, upper: float) -> tuple[Chain | None, bool]:
    """(the best chain, of solved pieces only; whether it is the best of all)."""
    length, devices = len(pieces.points) - 1, device_count(pieces.topo.mesh)
    exact, tried, about = _few(pieces, devices), False, cache(estimates.seconds)

    def cost(piece: Piece) -> float:
        nonlocal exact
        pieces.check()
        late = tried and pieces.budget.over()
        if exact and late and piece not in pieces.known:
            exact = False
        if exact or piece in pieces.known:
            return pieces.seconds(piece)
        return inf if late else about(piece)  # late: of what is solved the best

    shapes = pieces.shapes[:1]  # first stages of a device each: what those take is estimated well, and there is a plan soon
    while True:
        limit = upper if exact else upper * SLACK
        alike = not pieces.topo.kinds
        chain = best_chain(length, devices, shapes, cost, micro=micro, stages=stages, upper=limit, alike=alike)
        new = [p for p in chain.pieces if p not in pieces.known] if chain else []
        if shapes is pieces.shapes and not new:
            return chain, exact
        for p in new:
            pieces.solve(p)
        tried, shapes = shapes is pieces.shapes, pieces.shapes


def _few(pieces: Pieces, devices: int) -> bool:
    """Whether there are so few distinct pieces that all can be solved."""
    length = len(pieces.points) - 1
    if length**2 * len(pieces.shapes) > 20 * SOLVE_ALL:
        return False
    every = (
        Piece(lo, hi, k, p)
        for k, shape in enumerate(pieces.shapes)
        for p in shape.starts
        for lo in range(length)
        for hi in range(lo + 1, length + 1)
        if p + shape.count <= devices
    )
    return len({pieces.key(p) for p in every}) <= SOLVE_ALL


@dataclass(slots=True)
class _Assembly:
    """The plan of a chain: every stage solved once more, with the links that its tensors really come over, and the
    operations that run once put into the first and the last stage."""

    seq: StageSequence
    chain: Chain
    pieces: Pieces
    topo: Topology
    stages: tuple[Stage, ...] = field(init=False)
    stage_of: dict[int, int] = field(init=False)
    chosen: dict[int, Strategy] = field(default_factory=dict[int, Strategy])
    arrivals: dict[tuple[str, int], Layout] = field(default_factory=dict[tuple[str, int], Layout])
    streamed: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        points = self.pieces.points
        self.stages = tuple(map(self.pieces.stage, self.chain.pieces))
        self.stage_of = dict.fromkeys(self.seq.before, 0) | dict.fromkeys(self.seq.after, len(self.stages) - 1)
        for copy in self.seq.copies:
            for k, p in enumerate(self.chain.pieces):
                self.stage_of |= dict.fromkeys(copy[points[p.lo] : points[p.hi]], k)

    def plan(self) -> tuple[Plan, tuple[float, ...], float] | None:
        """(the plan, seconds of each stage, the objective); ``None`` when a stage does not fit after all."""
        points, last = self.pieces.points, len(self.stages) - 1
        mine = [self.seq.copies[0][points[p.lo] : points[p.hi]] for p in self.chain.pieces]
        joint = self.solve((*self.seq.before, *mine[0]), 0) if self.seq.before else None
        if self.seq.before and joint is None:
            return None
        seconds: list[float] = []
        for k, ops in enumerate(mine):
            done = self.solve(ops, k)
            if done is None:
                return None
            seconds.append(done.seconds)
        once = max(0.0, joint.seconds - seconds[0]) if joint else 0.0
        self.follow()
        if self.seq.after:
            done = self.solve(self.seq.after, last)
            if done is None:
                return None
            once += done.seconds
        order = self.order()
        graph = replace(self.seq.graph, ops=tuple(self.seq.graph.ops[i] for i in order))
        plan = Plan(
            graph=graph,
            mesh=self.topo.mesh,
            strategies=tuple(self.chosen[i] for i in order),
            stages=self.stages,
            stage_of=tuple(self.stage_of[i] for i in order),
            arrivals=tuple(Arrival(t, k, layout) for (t, k), layout in self.arrivals.items()),
            inputs=self.pieces.asked.inputs,
            outputs=self.pieces.asked.outputs,
            streamed=frozenset(self.streamed),
            native_sums=self.topo.native_sums,
        )
        if stages_refused(plan):  # what runs once makes or reads a value of the host that another stage reads or makes
            return None
        return plan, tuple(seconds), once + sum(seconds) + (self.seq.micro - 1) * max(seconds)

    def order(self) -> list[int]:
        """Operations as a wavefront: in step n, stage k has micro-batch n - k. Later stages first, so that what one stage
        gives to another moves between two steps."""
        points, out = self.pieces.points, list(self.seq.before)
        for n in range(self.seq.micro + len(self.stages) - 1):
            for k, p in reversed(list(enumerate(self.chain.pieces))):
                if 0 <= n - k < self.seq.micro:
                    out += self.seq.copies[n - k][points[p.lo] : points[p.hi]]
        return [*out, *self.seq.after]

    def solve(self, ops: Several[int], k: int) -> Solved | None:
        """Plan some operations on a stage, and keep what was chosen."""
        graph, stage = self.seq.graph, self.stages[k]
        sub = segment(graph, ops, first=k == 0 and self.seq.micro == 1)
        makers = graph.producers()
        links: dict[str, Link] = {}
        inputs: dict[str, Layout] = {}
        for t in sub.inputs:
            if t not in makers:
                continue
            if self.stage_of[makers[t]] == k and makers[t] in self.chosen:
                op = graph.ops[makers[t]]
                inputs[t] = out_layout(op, self.chosen[makers[t]].out, op.outs.index(t))
            elif (t, k) in self.arrivals:
                inputs[t] = self.arrivals[t, k]
            else:
                links[t] = link_between(self.topo, self.stages[self.stage_of[makers[t]]].first, stage.first)
        topo, of = stage_topology(self.topo, stage), self.pieces
        done = solve_piece(sub, links, topo, of.budget, inputs, of.asked, streams=of.streams)
        if done is not None:
            self.streamed |= done.streamed
            self.chosen |= dict(zip(ops, done.strategies, strict=True))
            self.arrivals |= {(t, k): layout for t, layout in zip(links, done.arrivals, strict=True)}
        return done

    def follow(self) -> None:
        """Every other micro-batch takes the choices of the first."""
        ops = self.seq.graph.ops
        names: dict[str, list[str]] = {}
        for copy in self.seq.copies[1:]:
            for i, j in zip(self.seq.copies[0], copy, strict=True):
                self.chosen[j] = self.chosen[i]
                for t, u in zip(ops[i].outs, ops[j].outs, strict=True):
                    names.setdefault(t, []).append(u)
        for (t, k), layout in list(self.arrivals.items()):
            self.arrivals |= {(u, k): layout for u in names.get(t, ())}
