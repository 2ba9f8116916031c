"""Whether a plan gets pipeline stages: what the user asks for, when it can pay, and which of two plans is better."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from tapestry.errors import PlanError, TapestryError
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.plan import Arrival, Layout, Plan, Stage, Strategy, device_count, stages_refused
from tapestry.ir.program import peak_bytes
from tapestry.ir.syntax.printer import signature
from tapestry.ir.types import itemsize
from tapestry.plan.cost import compute
from tapestry.plan.cost.compute import least_seconds
from tapestry.plan.pipelines.segments import (
    NOTHING,
    Asked,
    Chain,
    NotInStages,
    Piece,
    Pieces,
    Solved,
    StageSequence,
    batch_cut,
    best_chain,
    cut_points,
    in_stages,
    sequence,
    solve_piece,
    submeshes,
)
from tapestry.plan.pipelines.staged_plan import link_between, lower_plan, segment, stage_topology
from tapestry.plan.search.priced_plan import PricedPlan, summed
from tapestry.plan.search.problem import Menu, Problem, build
from tapestry.plan.simulate import TRANSFER, simulate
from tapestry.plan.solver.budget import SECOND, Budget, OutOfTime
from tapestry.plan.solver.network import solve
from tapestry.plan.strategy import out_layout, tensor_boxes
from tapestry.plan.topology import Link, Topology
from tapestry.rewrites.core.rule import Move

# What every piece of a sequence costs about, without solving each: the whole sequence is solved once per submesh, and a piece
# keeps the choices that its operations have there. That is one of the piece's own plans, so it is an upper estimate.


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
    alpha, beta = max(link.alpha for link in topo.links), max(link.beta for link in topo.links)
    steps = np.ceil(np.log2(device_count(topo.mesh) + 1))
    return float(alpha * steps + missing * beta + needed / topo.device.bandwidth + topo.device.launch)


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
    where = _positions(problem.graph, problem.graph.ops[reader], tensor)
    menu: Menu = problem.menus[reader]
    cells = min(max(int(compute.sizes(r[k]).max()) for k in where) for r in menu.reads)
    return float(cells * itemsize(problem.graph.tensors[tensor].dtype))


def _positions(graph: Graph, op: Op, tensor: str) -> list[int]:
    names = [r.tensor for r in op.reads] if isinstance(op, Block) else op.ins
    return [k for k, t in enumerate(names) if t == tensor]


# Pipeline × tensor × data parallel plans from one search: an outer dynamic program over cuts and submeshes (`stage_chain`),
# fed by the exact inner solver (`segments`), with micro-batches as a rewrite of the graph.
#
# Few distinct pieces: all are solved, and the chain is the best there is under the model. Otherwise the program runs on upper
# estimates, the pieces of the chain that it picks are solved, and so on until a chain of solved pieces wins.


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
    graph: Graph, topo: Topology, budget: Budget, *, stages: int | None = None, micro: Several[int] = MICRO_BATCHES,
    upper: float = inf, insist: bool = True, asked: Asked = NOTHING, streams: bool = False,
) -> Staged | None:  # fmt: skip
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
    graph: Graph, topo: Topology, stages: int | None, micro: Several[int], upper: float, budget: Budget, asked: Asked, *,
    insist: bool,
) -> Staged | None:  # fmt: skip
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
            seq, points = in_stages(seq, self.asked.stages(seq.graph))
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
    exact, tried = _few(pieces, devices), False

    def cost(piece: Piece) -> float:
        nonlocal exact
        pieces.check()
        late = tried and pieces.budget.over()
        if exact and late and piece not in pieces.known:
            exact = False
        if exact or piece in pieces.known:
            return pieces.seconds(piece)
        return inf if late else estimates.seconds(piece)  # late: of what is solved the best

    while True:
        limit = upper if exact else upper * SLACK
        alike = not pieces.topo.kinds
        chain = best_chain(length, devices, pieces.shapes, cost, micro=micro, stages=stages, upper=limit, alike=alike)
        new = [p for p in chain.pieces if p not in pieces.known] if chain else []
        if chain is None or not new:
            return chain, exact
        for p in new:
            pieces.solve(p)
        tried = True


def _few(pieces: Pieces, devices: int) -> bool:
    """Whether there are so few distinct pieces that all can be solved."""
    length = len(pieces.points) - 1
    if length**2 * len(pieces.shapes) > 20 * SOLVE_ALL:
        return False
    every = (
        Piece(lo, hi, k, p) for k, shape in enumerate(pieces.shapes) for p in shape.starts
        for lo in range(length) for hi in range(lo + 1, length + 1) if p + shape.count <= devices
    )  # fmt: skip
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
            graph=graph, mesh=self.topo.mesh, strategies=tuple(self.chosen[i] for i in order), stages=self.stages,
            stage_of=tuple(self.stage_of[i] for i in order),
            arrivals=tuple(Arrival(t, k, layout) for (t, k), layout in self.arrivals.items()),
            inputs=self.pieces.asked.inputs, outputs=self.pieces.asked.outputs, streamed=frozenset(self.streamed),
            native_sums=self.topo.native_sums,
        )  # fmt: skip
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


AUTO_SHARE = 0.5  # of what the plan without stages took: work for stages that nobody asked for
LEAST, MOST = 2.0 * SECOND, 5.0 * SECOND  # and the limits of that; where it would be more, they are not looked for
SLOW = 2.0  # a mesh axis is slow if a byte takes so many times longer than on the fastest
WAITING = 0.05  # stages may pay if the spatial plan spends at least this share of its time on transfers


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of stages.

    Attributes:
        stages: how many (``None``: as is best; 1: no stages).
        micro: micro-batches (``None``: as is best).
        asked: what stages keep to.
    """

    stages: int | None = None
    micro: int | None = None
    asked: Asked = NOTHING

    @property
    def explicit(self) -> bool:
        """Whether the user insists on stages."""
        return (self.stages or 1) > 1 or (self.micro or 1) > 1


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan taken, the rewrites that it needs, and what the JSON document says of plans with stages and without."""

    found: PricedPlan
    staged: bool
    moves: tuple[Move, ...]
    report: dict[str, Any]


def parse_request(stages: str, micro: str, topo: Topology) -> Request:
    """``auto`` or a number each.

    Raises:
        TapestryError: not a number, or more stages than devices.
    """
    wanted = Request(_number(stages, "--stages"), _number(micro, "--micro-batches"))
    devices = device_count(topo.mesh)
    if (wanted.stages or 1) > devices:
        raise TapestryError(f"{wanted.stages} stages on {devices} devices", where="--stages", hint="at least one device each")
    if wanted.stages == 1 and (wanted.micro or 1) > 1:
        raise TapestryError("micro-batches without stages", where="--micro-batches", hint="--stages auto, or a number above 1")
    if devices == 1 and wanted.explicit:
        raise TapestryError("pipeline stages need more than one device", where="--stages", hint="--devices or --mesh")
    return wanted


def _number(text: str, where: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise TapestryError(f"'{text}' is neither 'auto' nor a number from 1 to 4096", where=where)
    return int(text)


def choose(
    graph: Graph, topo: Topology, spatial: PricedPlan | PlanError, request: Request, budget: Budget, *, tight: bool = False,
    spent: float = 0.0,
) -> Choice:  # fmt: skip
    """The better of the spatial plan and the best one with stages; the latter if it is asked for.

    Without being asked, a plan with stages must take less time on the simulated clock.

    Args:
        spatial: the plan without stages, or why there is none.
        tight: whether the plan without stages fits only by splits in time or streamed weights.
        spent: units of work that it took.

    Raises:
        PlanError: nothing fits, or there is no plan as asked for.
    """
    unfit = isinstance(spatial, PlanError)
    staged: Staged | None = None
    quick = tight or unfit or AUTO_SHARE * spent <= MOST
    if request.explicit or (request.stages != 1 and quick and _may_pay(spatial, topo, tight)):
        upper = float("inf") if unfit or request.explicit else _summed(spatial)
        part = budget if request.explicit or unfit or tight else budget.part(max(LEAST, AUTO_SHARE * spent))
        insist = request.explicit or unfit
        micro = MICRO_BATCHES if request.micro is None else (request.micro,)
        staged = search_stages(
            graph, topo, stages=request.stages, micro=micro, upper=upper, budget=part, insist=insist, asked=request.asked,
            streams=request.explicit,
        )  # fmt: skip
        if staged is None and request.explicit:
            raise _impossible(graph, topo, request)
    if staged is None:
        if unfit:
            raise spatial
        return Choice(spatial, False, (), {"stages": [], "micro_batches": 1})
    bound = least_seconds(graph, topo, everywhere=False)
    other = request.asked.bound or request.asked.cuts
    report = _report(None if other else spatial, staged, topo, bound)
    simulated = float(report["simulated_s"])
    taken = unfit or request.explicit or simulated < spatial.objective
    report["chosen"] = taken
    if not taken:
        assert isinstance(spatial, PricedPlan)
        return Choice(spatial, False, (), {"stages": [], "micro_batches": 1, "pipeline": report})
    if not request.explicit and isinstance(spatial, PricedPlan):  # a bound of all plans, with stages or without
        bound = min(bound, spatial.bound)
    found = replace(staged.found, objective=simulated, bound=min(bound, simulated))
    data = {"stages": list(staged.seconds), "micro_batches": staged.sequence.micro, "pipeline": report}
    return Choice(found, True, staged.sequence.moves, data)


def _summed(spatial: PricedPlan) -> float:
    """What a plan without stages takes by the model of stages, which adds costs up."""
    return summed(spatial.problem, spatial.plan) if spatial.problem else spatial.objective


def _may_pay(spatial: PricedPlan | PlanError, topo: Topology, tight: bool) -> bool:
    """Whether stages can pay at all: nothing fits without, or the plan waits for links of which some are slow.

    Where devices differ, stages are for those who ask. Without communication a spatial plan uses all devices all the time,
    and stages only add bubbles.
    """
    links = [link.beta for a, link in zip(topo.mesh, topo.links, strict=True) if a.size > 1]
    if not links or topo.kinds:
        return False
    if tight or isinstance(spatial, PlanError):
        return True
    if max(links) < SLOW * min(links):
        return False
    timed = simulate(spatial.plan, spatial.program, topo)
    return bool(timed.busy(TRANSFER).max() > WAITING * timed.total)


def _impossible(graph: Graph, topo: Topology, request: Request) -> PlanError:
    n = request.stages or 2
    if len(graph.ops) < n:
        return PlanError(f"{len(graph.ops)} operations cannot make {n} stages", where="--stages", hint="fewer stages")
    if request.micro and sequence(graph, request.micro) is None:
        what = f"the batch cannot be cut into {request.micro} equal micro-batches"
        return PlanError(what, where="--micro-batches", hint="a number that divides the batch, or auto")
    each = "the smallest device has" if topo.kinds else "each device has"
    why, hint = f"{each} {min(topo.memories()):,} bytes", "more memory (--memory), or other stages"
    if request.asked.bound:
        why += "; or no stage has, as a whole, the mesh axes that the pins, layouts or annotations cut along"
        hint += "; or a --mesh with an axis for stages and one to cut along, as 2x2"
    return PlanError(f"no plan of {request.stages or 'several'} stages fits", where=_asked_by(request), why=why, hint=hint)


def _asked_by(request: Request) -> str:
    return "the given stages" if request.asked.cuts else "--stages"


def _report(spatial: PricedPlan | PlanError | None, staged: Staged, topo: Topology, bound: float) -> dict[str, Any]:
    """Both plans on the simulated clock; the one without stages only where it is of the same problem."""
    total = simulate(staged.found.plan, staged.found.program, topo).total
    out: dict[str, Any] = {
        "objective_s": total, "lower_bound_s": min(bound, total), "exact": staged.exact,
        "simulated_s": total, "stages": len(staged.seconds),
        "micro_batches": staged.sequence.micro, "spatial_objective_s": None, "spatial_simulated_s": None,
    }  # fmt: skip
    if isinstance(spatial, PricedPlan):
        out["spatial_objective_s"] = out["spatial_simulated_s"] = spatial.objective
    elif spatial is not None:
        out["spatial_refused"] = spatial.what
    return out
