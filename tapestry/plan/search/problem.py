"""The planning problem as a network: a node per operation, a choice per strategy, a table per tensor that flows.

Tables depend on signatures alone (index spaces, projections, dtypes, layouts), so that building the problem grows with
the number of distinct operations, not with the number of layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.plan import Layout, Strategy
from tapestry.ir.syntax.printer import signature
from tapestry.ir.types import itemsize
from tapestry.plan.cost import compute, transfer
from tapestry.plan.layout_constraints import Key, LayoutConstraints, allowed
from tapestry.plan.solver.network import Factor, Network
from tapestry.plan.strategy import (
    MAX_STRATEGIES,
    Boxes,
    Pin,
    covers,
    every_strategy,
    footprints,
    left_out,
    merges,
    op_boxes,
    out_layout,
    tensor_boxes,
)
from tapestry.plan.topology import Device, Topology

STRATEGY, CELL, OPERATION = 800_000, 100, 100_000  # units of work for building one
LOWERED = 400_000  # units of work for lowering an operation
HOST_SECONDS_PER_BYTE = 1e-14  # breaks ties between plans of equal latency: load less from the host


@dataclass(frozen=True, slots=True)
class Menu:
    """What one kind of operation offers: its strategies, and per strategy cost, memory and footprints.

    ``left_out`` counts strategies that are not offered (`strategy.left_out`, and those beyond `MAX_STRATEGIES`): no bound says
    anything of them.
    """

    strategies: list[Strategy]
    seconds: np.ndarray
    state_bytes: np.ndarray
    held_states: np.ndarray
    outs_bytes: np.ndarray
    reads: list[dict[int, Boxes]]
    left_out: int = 0


@dataclass(slots=True)
class Problem:
    """Costs of every choice, and linear underestimates of memory."""

    graph: Graph
    topo: Topology
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    streamed: frozenset[str] = frozenset()
    menus: list[Menu] = field(default_factory=list[Menu])
    factors: list[Factor] = field(default_factory=list[Factor])
    distinct: int = 0
    work: float = 0.0  # units that building it took, about

    @property
    def left_out(self) -> int:
        """Most strategies of one operation that were not looked at."""
        return max((m.left_out for m in self.menus), default=0)

    @property
    def sizes(self) -> list[int]:
        """Number of choices of each operation."""
        return [len(m.strategies) for m in self.menus]

    @property
    def lowering(self) -> float:
        """Units of work that lowering a plan of it takes, about."""
        return LOWERED * len(self.graph.ops) * (1 + len(self.topo.memories()) / 8)

    @property
    def network(self) -> Network:
        """Choices and costs, without limits."""
        return Network(self.sizes, self.factors)


@dataclass(slots=True)
class Tables:
    """What was worked out for a topology, by signatures: graphs that rewrites make of each other share most of it."""

    menus: dict[str, Menu] = field(default_factory=dict[str, Menu])
    pairs: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict[tuple[object, ...], np.ndarray])
    loads: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict[tuple[object, ...], np.ndarray])

    def work(self) -> float:
        """Units of work that making them took, about."""
        devices = max((len(b) for m in self.menus.values() for r in m.reads[:1] for b in r.values()), default=1)
        return STRATEGY * sum(len(m.strategies) for m in self.menus.values()) + CELL * devices * sum(
            t.size for t in self.pairs.values()
        )


def build(
    graph: Graph,
    topo: Topology,
    pins: Mapping[int, tuple[Pin, ...]],
    inputs: Mapping[str, Layout],
    outputs: Mapping[str, Layout],
    fixed: LayoutConstraints = LayoutConstraints(),  # noqa: B008  (immutable)
    streamed: frozenset[str] = frozenset(),
    known: Tables | None = None,
) -> Problem:
    """The network of a graph on a topology; ``pins`` by operation, fixed layouts by tensor; ``streamed`` weights; ``known``
    tables of other graphs on the same topology."""
    problem, tables = Problem(graph, topo, inputs, outputs, streamed), Tables() if known is None else known
    before, kinds, keys = tables.work(), tables.menus, list[str]()
    for i, op in enumerate(graph.ops):
        given = fixed.key(op)
        key = f"{signature(op, graph)} {pins.get(i, ())} {given}"
        keys.append(key)
        if key not in kinds:
            kinds[key] = _menu(op, graph, topo, pins.get(i, ()), given)
        problem.menus.append(kinds[key])
    problem.distinct = len(set(keys))
    _edges(problem, keys, tables)
    problem.work = tables.work() - before + OPERATION * len(graph.ops)
    return problem


def _menu(op: Op, graph: Graph, topo: Topology, pins: tuple[Pin, ...], given: Key) -> Menu:
    every = allowed(op, given, every_strategy(op, topo.mesh, pins), graph, topo.mesh)
    offered = every[:MAX_STRATEGIES]
    skipped = len(every) - len(offered) + left_out(op, topo.mesh, pins)
    seconds, states, mine, outs = list[float](), list[int](), list[int](), list[list[int]]()
    reads = list[dict[int, Boxes]]()
    at = watched(topo)
    for s in offered:
        block = op_boxes(op, s.dims, topo.mesh)
        final = tensor_boxes(tuple(d.size for d in op.dims), s.out, topo.mesh) if isinstance(op, Block) else block
        prints = {k: (t, b) for k, t, b in footprints(op, graph, s, topo.mesh)}
        unique = {(t, b.tobytes()): b for t, b in prints.values()}
        cut = merges(op, s)
        size = compute.state_bytes(op, block) if cut else 0
        merge = transfer.reduce_seconds(size, cut, topo)
        launches = 2 if isinstance(op, Block) and op.lowers else 1  # merging, and finishing where needed
        seconds.append(
            compute.seconds(op, graph, block, final, unique, topo) + merge + (launches * topo.device.launch if cut else 0.0)
        )
        states.append(size)
        mine.append(compute.state_bytes(op, block[at : at + 1]) if cut else 0)
        shapes = [tensor_boxes(graph.tensors[t].shape, out_layout(op, s.out, n), topo.mesh) for n, t in enumerate(op.outs)]
        widths = [itemsize(graph.tensors[t].dtype) for t in op.outs]
        outs.append([int(compute.sizes(b)[at]) * width for width, b in zip(widths, shapes, strict=True)])
        reads.append({k: b for k, (_, b) in prints.items()})
    width = np.array(outs).reshape(len(offered), -1)
    return Menu(offered, np.array(seconds), np.array(states), np.array(mine), width, reads, skipped)


def _edges(problem: Problem, keys: list[str], tables: Tables) -> None:
    """Unary costs with transfers from fixed layouts, and a table per pair of operations that share a tensor."""
    graph = problem.graph
    makers = graph.producers()
    cache, loading = tables.pairs, tables.loads
    unary = [m.seconds.copy() for m in problem.menus]
    for i, op in enumerate(graph.ops):
        positions: dict[str, list[int]] = {}
        for k, t in enumerate(r.tensor for r in op.reads) if isinstance(op, Block) else enumerate(op.ins):
            if t:
                positions.setdefault(t, []).append(k)
        for t, where in positions.items():
            maker = makers.get(t)
            if maker is None and t not in problem.inputs:
                if i and t in problem.streamed and t in graph.ops[i - 1].inputs:
                    problem.factors.append(Factor((i - 1, i), _reload_seconds(problem, i, t, where)))
                    continue
                key = (keys[i], tuple(where), t in problem.streamed)
                if key not in loading:
                    loading[key] = _load_seconds(problem, i, t, where)
                unary[i] += loading[key]
                continue
            held = [problem.inputs[t]] if maker is None else _layouts(problem, maker, t)
            key = (tuple(held), graph.tensors[t].shape, graph.tensors[t].dtype, keys[i], tuple(where))
            if key not in cache:
                cache[key] = _table(problem, held, i, t, where)
            if maker is None:
                unary[i] += cache[key][0]
            elif cache[key].any():
                problem.factors.append(Factor((maker, i), cache[key]))
    for t, layout in problem.outputs.items():
        maker = makers.get(t)
        if maker is not None:
            unary[maker] += _ending(problem, maker, t, layout)
    problem.factors += [Factor((i,), u) for i, u in enumerate(unary)]


def _layouts(problem: Problem, maker: int, tensor: str) -> list[Layout]:
    op = problem.graph.ops[maker]
    return [out_layout(op, s.out, op.outs.index(tensor)) for s in problem.menus[maker].strategies]


def _table(problem: Problem, held: list[Layout], reader: int, tensor: str, where: list[int]) -> np.ndarray:
    """Seconds for every (layout of the producer, strategy of the reader); equal rows and columns are computed once."""
    graph, topo = problem.graph, problem.topo
    t = graph.tensors[tensor]
    rows = {layout: n for n, layout in enumerate(dict.fromkeys(held))}
    sources = [(layout, tensor_boxes(t.shape, layout, topo.mesh)) for layout in rows]
    columns: dict[bytes, int] = {}
    wanted: list[Boxes] = []
    needs: list[list[int]] = []
    for reads in problem.menus[reader].reads:
        mine: dict[int, None] = {}
        for k in where:
            raw = reads[k].tobytes()
            if raw not in columns:
                columns[raw] = len(wanted)
                wanted.append(reads[k])
            mine[columns[raw]] = None
        needs.append(list(mine))
    found = transfer.costs(sources, wanted, itemsize(t.dtype), topo).seconds
    per_strategy = np.stack([found[:, n].sum(axis=1) for n in needs], axis=1)
    return per_strategy[[rows[layout] for layout in held]]


def _ending(problem: Problem, maker: int, tensor: str, layout: Layout) -> np.ndarray:
    """Seconds to bring an output from each strategy's layout to the one it must end in."""
    t, mesh = problem.graph.tensors[tensor], problem.topo.mesh
    held = [(h, tensor_boxes(t.shape, h, mesh)) for h in _layouts(problem, maker, tensor)]
    wanted = [tensor_boxes(t.shape, layout, mesh)]
    return transfer.costs(held, wanted, itemsize(t.dtype), problem.topo).seconds[:, 0]


def _load_seconds(problem: Problem, reader: int, tensor: str, where: list[int]) -> np.ndarray:
    """Seconds to load what an operation reads of an input or weight: streamed weights over the host's link, for this use."""
    width, menu, device = itemsize(problem.graph.tensors[tensor].dtype), problem.menus[reader], problem.topo.device
    if tensor in problem.streamed:  # each distinct footprint is loaded
        found = [list({r[k].tobytes(): r[k] for k in where}.values()) for r in menu.reads]
        return np.array([sum(load_seconds(int(compute.sizes(b).max()) * width, device) for b in boxes) for boxes in found])
    return np.array([HOST_SECONDS_PER_BYTE * width * max(int(compute.sizes(r[k]).max()) for k in where) for r in menu.reads])


def load_seconds(nbytes: int, device: Device) -> float:
    """Seconds to load bytes of a streamed weight from the host."""
    return device.host_latency + nbytes / device.host


def _reload_seconds(problem: Problem, reader: int, tensor: str, where: list[int]) -> np.ndarray:
    """Seconds to load a streamed weight again: none where the operation just before has loaded all that this one reads."""
    op = problem.graph.ops[reader - 1]
    names = [r.tensor for r in op.reads] if isinstance(op, Block) else op.ins
    out = np.tile(_load_seconds(problem, reader, tensor, where), (len(problem.menus[reader - 1].reads), 1))
    for a, held in enumerate(problem.menus[reader - 1].reads):
        mine = [boxes for k, boxes in held.items() if names[k] == tensor]
        for b, needed in enumerate(problem.menus[reader].reads):
            if all(any(covers(m, needed[k]) for m in mine) for k in where):
                out[a, b] = 0.0
    return out


def watched(topo: Topology) -> int:
    """The device whose memory the rows estimate: the last of those that have least. Of equal cuts it has the largest block."""
    least = topo.memories()
    return len(least) - 1 - least[::-1].index(min(least))
