"""Why a plan is as it is: for every operation, the best other strategy, all else as it stands, and what it would cost.

The differences are those of the search's own tables (the operation itself, and the transfers from its producers and to its
readers), so that an operation of an optimal plan has none below zero, unless memory or a pin is what decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from tapestry.ir.expr import LONG, Call, Expr, uncast, walk
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.plan import Layout, MeshAxis, Plan, Stage, Strategy, stages_refused, still
from tapestry.ir.program import peak_bytes
from tapestry.ir.recognise import NONE, folded_roles, input_axes, kept, product_roles, products
from tapestry.ir.types import itemsize
from tapestry.plan.cost import transfer
from tapestry.plan.cost.transfer import reduce_seconds
from tapestry.plan.lower import exchange, lower
from tapestry.plan.pipelines.staged_plan import lower_plan, stage_ops, stage_plan, stage_topology
from tapestry.plan.requests import kind_of
from tapestry.plan.search.planner import spatial
from tapestry.plan.search.priced_plan import PricedPlan, peak, priced_plan
from tapestry.plan.search.problem import Problem, build
from tapestry.plan.simulate import layouts
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.network import Factor, Network, evaluate, solve
from tapestry.plan.strategy import Boxes, Pin, footprints, merges, out_layout, tensor_boxes
from tapestry.plan.topology import Topology
from tapestry.plan.topology.fabric import Device
from tapestry.rewrites.contractions import FuseContraction, FuseSums, NarrowFactors
from tapestry.rewrites.core.driver import chosen, simplify
from tapestry.rewrites.core.edit import Tile, evaluated, loaded, tile_of
from tapestry.rewrites.core.rule import Move
from tapestry.rewrites.inline_map import InlineMap
from tapestry.rewrites.lay_out import LayOut, gathered

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


def best_alternatives(
    plan: Plan, topo: Topology, pins: Mapping[int, tuple[Pin, ...]] | None = None
) -> list[Alternative | None]:
    """For every operation, its best alternative; ``None`` where it has no other strategy.

    Pinned operations may take any strategy here, which shows what the pin costs.

    Args:
        pins: as the plan was searched with. They are kept only if it has a strategy that would not exist without them.
    """
    if plan.stages:
        return _by_stage(plan, topo)
    problem, choice = _problem(plan, topo, pins or {})
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


def priced_strategies(
    plan: Plan, topo: Topology, pins: Mapping[int, tuple[Pin, ...]] | None = None, most: int = 8
) -> list[list[tuple[Strategy, float]]]:
    """For every operation its best other strategies, the cheapest first, with how many seconds more the whole plan would cost.

    The first one is that of `best_alternatives`.
    """
    if plan.stages:
        out: list[list[tuple[Strategy, float]]] = [[] for _ in plan.graph.ops]
        for k, stage in enumerate(plan.stages):
            found = priced_strategies(stage_plan(plan, k), stage_topology(topo, stage), most=most)
            for i, row in zip(stage_ops(plan, k), found, strict=True):
                out[i] = row
        return out
    problem, choice = _problem(plan, topo, pins or {})
    rows: list[list[tuple[Strategy, float]]] = []
    for i, costs in enumerate(local_costs(problem, choice)):
        order = [k for k in np.argsort(costs, kind="stable").tolist() if k != choice[i] and np.isfinite(costs[k])]
        rows.append([(problem.menus[i].strategies[k], float(costs[k] - costs[choice[i]])) for k in order[:most]])
    return rows


def _by_stage(plan: Plan, topo: Topology) -> list[Alternative | None]:
    """The same with pipeline stages: other strategies of an operation on the devices of its stage."""
    out: list[Alternative | None] = [None] * len(plan.graph.ops)
    for k, stage in enumerate(plan.stages):
        found = best_alternatives(stage_plan(plan, k), stage_topology(topo, stage))
        for i, other in zip(stage_ops(plan, k), found, strict=True):
            out[i] = other
    return out


def local_costs(problem: Problem, choice: list[int]) -> list[np.ndarray]:
    """For every operation, the cost of each of its strategies with all other operations as chosen: its own time and the
    transfers that touch it."""
    out = [np.zeros(n) for n in problem.sizes]
    for f in problem.factors:
        for k, n in enumerate(f.nodes):
            out[n] += f.table[tuple(slice(None) if m == k else choice[f.nodes[m]] for m in range(len(f.nodes)))]
    return out


def _problem(plan: Plan, topo: Topology, pins: Mapping[int, tuple[Pin, ...]]) -> tuple[Problem, list[int]]:
    """The search's problem again, and what the plan chose in it."""
    problem = build(plan.graph, topo, {}, plan.inputs, plan.outputs, streamed=plan.streamed)
    plan = replace(plan, strategies=tuple(map(still, plan.strategies)))
    if any(s not in m.strategies for m, s in zip(problem.menus, plan.strategies, strict=True)):
        problem = build(plan.graph, topo, pins, plan.inputs, plan.outputs, streamed=plan.streamed)
    return problem, [m.strategies.index(s) for m, s in zip(problem.menus, plan.strategies, strict=True)]


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
    cache: dict[object, float] = field(default_factory=dict[object, float])

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
        before, after = self.seconds(tensor, *now), self.seconds(tensor, *other)
        if before == after:
            return Part("", tensor, 0.0)
        more = self.nbytes(tensor, *other) - self.nbytes(tensor, *now)
        return Part(self.kind(tensor, *(other if after > before else now)), tensor, after - before, more)

    def wanted(self, i: int, s: Strategy, tensor: str) -> list[Boxes]:
        """The distinct footprints that an operation has in a tensor."""
        found = footprints(self.plan.graph.ops[i], self.plan.graph, s, self.topo.mesh)
        return list({b.tobytes(): b for _, t, b in found if t == tensor}.values())

    def seconds(self, tensor: str, layout: Layout, wanted: list[Boxes]) -> float:
        """Time to bring a layout to some footprints."""
        t = self.plan.graph.tensors[tensor]
        key = (t.shape, t.dtype, layout, tuple(b.tobytes() for b in wanted))
        if key not in self.cache:
            held = [(layout, tensor_boxes(t.shape, layout, self.topo.mesh))]
            self.cache[key] = float(transfer.costs(held, wanted, itemsize(t.dtype), self.topo).seconds.sum()) if wanted else 0.0
        return self.cache[key]

    def nbytes(self, tensor: str, layout: Layout, wanted: list[Boxes]) -> int:
        """Bytes on the wire to bring a layout to some footprints."""
        t = self.plan.graph.tensors[tensor]
        held = [(layout, tensor_boxes(t.shape, layout, self.topo.mesh))]
        return int(transfer.costs(held, wanted, itemsize(t.dtype), self.topo).bytes.sum()) if wanted else 0

    def kind(self, tensor: str, layout: Layout, wanted: list[Boxes]) -> str:
        """What the transfer is called; of several the dearest."""
        dearest = max(wanted, key=lambda w: self.seconds(tensor, layout, [w]))
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


# Plans that a person would think of first, priced beside the planner's: the whole model on one device with the others idle,
# the same on all, cut along the batch, cut along the weights.
#
# All but the first are choices within the search's own tables. One device is a plan with a single stage: it may have other
# fusions, the rates of a device that works alone (where they were measured), and no transfers.


LARGE = 1 << 12  # cells; smaller weights are nobody's load
MISSED = 1e3  # seconds for each mesh axis that does not cut what it should: taken where an operation cannot be cut so
WORK = 2.0 * SECOND  # for one of them
UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePlan:
    """A plan of the whole graph by one idea, and whether it fits (``None``: that was not worked out, the graph is large);
    ``found``: lowered."""

    name: str
    objective: float
    fits: bool | None
    found: PricedPlan | None = None

    def data(self) -> dict[str, object]:
        """For the JSON document."""
        return {"name": self.name, "objective_s": self.objective, "fits": self.fits}


def one_device(graph: Graph, topo: Topology, budget: Budget) -> PricedPlan:
    """The graph on the first device, of unlimited memory, at the rates of one that works alone; its plan is of that device."""
    stage = Stage(0, (MeshAxis(topo.mesh[-1].name, 1),))
    device = replace(topo.alone or topo.device, memory=UNLIMITED)
    alone = replace(stage_topology(topo, stage), device=device, kinds=(), calls=())
    problem = build(graph, alone, {}, {}, {})
    budget.spend(problem.work)
    return spatial(problem, budget)


def idle_beside(found: PricedPlan, topo: Topology) -> PricedPlan | None:
    """The plan of one device as one of the whole mesh; ``None`` where it is none."""
    stage = Stage(0, found.plan.mesh)
    plan = replace(found.plan, mesh=topo.mesh, stages=(stage,), stage_of=(0,) * len(found.plan.graph.ops))
    return None if stages_refused(plan) else replace(found, plan=plan, program=lower_plan(plan), problem=None)


def within_tables(problem: Problem, budget: Budget) -> list[WholePlan]:
    """The whole graph on every device, cut along the batch, and cut along the weights, as far as pins and layouts let it be."""
    batched = batch_dims(problem.graph)
    out: list[WholePlan] = []
    if not any(d for m in problem.menus for d in m.strategies[0].dims):
        out.append(_priced("replicated", problem, [0] * len(problem.menus), budget))
    if any(batched):
        out.append(_preferred("batch", problem, lambda i, s: sum(d is None or d != batched[i] for d in s.dims), budget))
    out.append(
        _preferred("tensor", problem, lambda i, s: _largest_share(problem, i, s) + s.dims.count(batched[i] or ""), budget)
    )
    return out


def _preferred(name: str, problem: Problem, missed: Callable[[int, Strategy], float], budget: Budget) -> WholePlan:
    """The cheapest plan of those that miss as little as they can of what is wanted of every operation."""
    more = [
        Factor((i,), MISSED * np.array([float(missed(i, s)) for s in menu.strategies])) for i, menu in enumerate(problem.menus)
    ]
    solution = solve(Network(problem.sizes, [*problem.factors, *more]), budget.part(WORK), quick=True)
    return _priced(name, problem, solution.choice, budget)


def _priced(name: str, problem: Problem, choice: Sequence[int], budget: Budget) -> WholePlan:
    if problem.lowering > WORK:
        return WholePlan(name=name, objective=evaluate(choice, problem.factors), fits=None)
    found = priced_plan(problem, choice, -np.inf)
    budget.spend(problem.lowering)
    fits = peak(found) <= problem.topo.device.memory
    return WholePlan(name=name, objective=found.objective, fits=fits, found=found)


def batch_dims(graph: Graph) -> list[str | None]:
    """For each operation the dimension that counts what axis 0 of the inputs counts (or axis 1, where axis 0 of every input is
    1 long)."""
    inputs = [t for t in graph.inputs if t not in graph.weights and graph.tensors[t].shape]
    at = 0 if any(graph.tensors[t].shape[0] > 1 for t in inputs) else 1
    long = max((graph.tensors[t].shape[at] for t in inputs if len(graph.tensors[t].shape) > at), default=1)
    batch = {(t, at) for t in inputs if graph.tensors[t].shape[at : at + 1] == (long,)}
    runs = zip(graph.ops, input_axes(graph), strict=True)
    return [next((d.name for d in op.dims if d.size > 1 and along.get(d.name, NONE) & batch), None) for op, along in runs]


def _largest_share(problem: Problem, i: int, s: Strategy) -> float:
    """The largest share that a device holds of a large weight that an operation reads; 0 where it reads none."""
    op, graph, menu = problem.graph.ops[i], problem.graph, problem.menus[i]
    reads = menu.reads[menu.strategies.index(s)]
    names: Sequence[str] = [r.tensor for r in op.reads] if isinstance(op, Block) else op.ins
    large = {k: graph.tensors[t].size for k, t in enumerate(names) if t in graph.weights and graph.tensors[t].size >= LARGE}
    held = [int(np.prod(b[:, :, 1] - b[:, :, 0], axis=1).max()) / large[k] for k, b in reads.items() if k in large]
    return max(held, default=0.0)


# Which fusions pay on one device: launches and bytes saved, against arithmetic and loads done again.
#
# The rules that cost nothing are simplifications and have been applied already. Those here are choices, so they are moves: a
# map computed by its readers (`inline_map`), a contraction by the reduction that reads it (`fuse_contraction`), contractions
# of one factor side by side (`fuse_sums`), and contractions that read 8 bits as they are (`narrow_factors`), for devices that
# multiply those. An operation is priced by its tiles (`tile_footprint`): its launch, each tensor once from memory, what every
# tile loads once from the cache in between, and each primitive as often as the tiles compute it. A device that runs
# expressions operator by operator (torch on a CPU) has no tiles, but a price for every operator, and what a reduction
# computes before it reduces is written and read again.


CACHE = 2.0  # bandwidth of the cache that tiles share (L2), as a multiple of the memory's: 5.5 of 3.35 TB/s on H100
_NONE = frozenset[str]()
REACHED = 0.6  # of a preset's rate, by products in tiles: Triton's FA2 gets 471 of 790 TFLOP/s, H100 (pytorch/benchmark#2391)
ROWS = 32  # of a tile that is worth a program: an estimate, twice the 16 that matrix units take at least
PROGRAMS = 64  # an estimate, the power of two under half of an H100's 132 multiprocessors: with fewer, most of it is idle
OPERATOR = 2e-6  # s, one of torch's operators on four numbers on one core: 2.1 (add) to 2.5 µs (exp, tanh) with torch 2.13


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One device, and whether it runs expressions operator by operator."""

    device: Device
    eager: bool


def fused(graph: Graph, machine: Machine, disabled: frozenset[str] = _NONE) -> tuple[Graph, list[Move]]:
    """The graph with every fusion that pays, and the moves that lead there; ``disabled``: rules that are left out."""
    prices: dict[Block, float] = {}

    def price(op: Block) -> float:
        if op not in prices:
            prices[op] = seconds(graph, op, machine)
        return prices[op]

    def accept(old: Sequence[Op], new: Sequence[Op]) -> bool:
        return sum(price(o) for o in new if isinstance(o, Block)) < sum(price(o) for o in old if isinstance(o, Block))

    def accept_product(old: Sequence[Op], new: Sequence[Op]) -> bool:
        (maker, op), (one,) = old, new
        assert isinstance(maker, Block) and isinstance(op, Block) and isinstance(one, Block)
        if any(itemsize(graph.tensors[maker.reads[k].tensor].dtype) < 2 for k in maker.body_reads()):
            return False  # products of 8 bits have kernels of their own
        own = [products_seconds(o, machine) for o in (maker, one)]
        return reduced_seconds(graph, one, machine) + own[1] < price(maker) + price(op) + own[0]

    def lays_out(old: Sequence[Op], new: Sequence[Op]) -> bool:
        return _lays_out(graph, old, new)

    found, inlining, sums = list[Move](), (InlineMap(), accept), (FuseSums(), None)
    kernels = (NarrowFactors(), None), inlining, (FuseContraction(), accept_product), (LayOut(), lays_out), sums
    for rule, wanted in (inlining, sums) if machine.eager else kernels:
        if rule.name not in disabled:
            graph, moves = chosen(rule, graph, wanted)
            found += moves
    return (simplify(graph, disabled=disabled) if found else graph), found


def _lays_out(graph: Graph, old: Sequence[Op], new: Sequence[Op]) -> bool:
    """Whether another order of axes pays: loads of matrix units that go along rows then, a tensor that follows its readers that
    were laid out anew, or a contraction that another one can be put beside. Only matrix units of 16 bits need rows."""
    before, after = ([op for op in ops if isinstance(op, Block)] for ops in (old, new))
    held = graph.tensors.get(before[0].outs[0])
    if held is None or itemsize(held.dtype) != 2:  # laid out already, or of no 16 bits
        return False
    maker, own = after[0], {r.tensor for r in before[0].reads}
    if len(maker.dims) < len(before[0].dims):
        sizes = [d.size for d in maker.dims], [d.size for d in maker.reduce]
        return products(maker) is not None and any(
            sizes == ([d.size for d in op.dims], [d.size for d in op.reduce]) and own & set(op.inputs) and products(op)
            for op in graph.ops
            if isinstance(op, Block) and op.outs != before[0].outs
        )
    count = [
        sum(gathered(r, op) is not None for op in ops[1:] for r in op.reads if r.tensor in made.outs)
        for ops, made in ((before, before[0]), (after, maker))
    ]
    followed = any(t not in graph.tensors for op in before[1:] for t in op.outs)
    return count[1] < count[0] or (count[1] == count[0] and followed)


def seconds(graph: Graph, op: Block, machine: Machine) -> float:
    """Time of one operation, whole, without its contractions: those are the same however the rest is fused."""
    device = machine.device
    tile = {d.name: d.size for d in op.space} if machine.eager else tile_of(op)
    row = kept(op.monoid, op.dims, op.reduce, op.body)  # what is kept is picked, not summed
    point = (*op.point[:-1], row.value) if row else op.point
    calls = {e for x in (*point, *op.then) for e in walk(x) if isinstance(e, Call) and e.fn != "cast"}
    took = {} if machine.eager else LONG
    exact = sum(evaluated(op, e, tile) * took.get(e.fn, 1) for e in calls - (set() if machine.eager else _multiplied(op)))
    from_memory = sum(prod(d.size for d in op.dims) * itemsize(graph.tensors[t].dtype) for t in op.outs)
    from_cache = 0
    for t in op.inputs:
        size = itemsize(graph.tensors[t].dtype)
        cells = [loaded(op, r, graph.tensors[t].shape, tile) for r in op.reads if r.tensor == t]
        from_memory += min(graph.tensors[t].nbytes, sum(cells) * size)
        from_cache += 0 if machine.eager else sum(cells) * size
    out = device.launch + from_memory / device.bandwidth + from_cache / (CACHE * device.bandwidth) + exact / device.vector
    return out + (_operators(op, calls, tile, device) if machine.eager else 0.0)


def _multiplied(op: Block) -> set[Expr]:
    """The products of an operation's contractions, which matrix units compute."""
    return {uncast(x) for x in ([s.body for s in op.inner] if op.inner else op.body if products(op) else ())}


def products_seconds(op: Block, machine: Machine) -> float:
    """Time of a contraction's products, or of those that a reduction computes itself, the lanes past tiles' ends included."""
    (product,) = _multiplied(op)
    assert isinstance(product, Call)
    deep = {d.name for d in (op.inner_dims or op.reduce)}
    outer = op.reduce if op.inner else ()
    found = product_roles(op, product, kept(op.monoid, op.dims, op.reduce, op.body))
    lanes = found.lanes if found else prod(d.size for d in (*op.dims, *outer))
    return 2 * lanes * prod(d.size for d in op.space if d.name in deep) / (REACHED * machine.device.rate(product.args[0].dtype))


def reduced_seconds(graph: Graph, op: Block, machine: Machine) -> float:
    """`seconds` of a reduction that computes its product itself: its programs go through all that is reduced, so there may be
    few of them; columns in parts are merged by a second launch."""
    found, device = folded_roles(op), machine.device
    assert found is not None
    programs = prod(d.size for d in found.batch) * -(-prod(d.size for d in found.rows) // ROWS)
    extra = 0.0
    if not found.folds:
        programs *= -(-prod(d.size for d in found.columns) // ROWS)
    elif programs < PROGRAMS:
        columns = prod(d.size for d in (*found.columns, *found.taps))
        longest = max(d.size for d in op.reduce)
        wanted = min(2 * PROGRAMS // programs, columns // ROWS)
        parts = max((p for p in range(1, wanted + 1) if longest % p == 0), default=1)
        programs, extra = programs * parts, device.launch if parts > 1 else 0.0
    share = min(1.0, programs / PROGRAMS)
    return device.launch + extra + (seconds(graph, op, machine) - device.launch) / share


def _operators(op: Block, calls: set[Call], tile: Tile, device: Device) -> float:
    """What torch takes beyond the arithmetic: every operator, and every operand of a reduction that is none of its inputs."""
    operands = [f for pair in products(op) or () for f in pair] if products(op) else list(op.body if op.monoid else ())
    operands += [f for s in op.inner if isinstance(s.body, Call) for f in s.body.args]
    made = [e for e in operands if isinstance(e, Call)]
    moved = sum(2 * evaluated(op, e, tile) * itemsize(e.dtype) for e in made)
    return OPERATOR * len(calls) + device.launch * len(made) + moved / device.bandwidth
