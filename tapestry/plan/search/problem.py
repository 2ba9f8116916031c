"""The planning problem as a network: a node per operation, a choice per strategy, a table per tensor that flows.

Tables depend on signatures alone (index spaces, projections, dtypes, layouts), so that building the problem grows with
the number of distinct operations, not with the number of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from tapestry.errors import PlanError
from tapestry.ir.footprint import Boxes
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.plan import Layout, Strategy, coordinates, device_count
from tapestry.ir.syntax.printer import signature
from tapestry.ir.types import itemsize
from tapestry.plan import ring_attention
from tapestry.plan.cost import compute, transfer
from tapestry.plan.cost.collective import merge, reductions
from tapestry.plan.layout_constraints import Key, LayoutConstraints, Sayable, allowed, stated
from tapestry.plan.pipelines.staged_plan import link_between
from tapestry.plan.solver.network import Factor, Network
from tapestry.plan.strategy import (
    MAX_STRATEGIES,
    Pin,
    covers,
    every_strategy,
    footprints_of_all,
    left_out,
    merges,
    op_boxes,
    out_layout,
    result_boxes,
    tensor_boxes,
)
from tapestry.plan.topology import Device, Topology


def ring_floors(
    op: Block,
    graph: Graph,
    s: Strategy,
    wanted: dict[int, Boxes],
    own: np.ndarray,
    lanes: list[int],
    topo: Topology,
    order: Sequence[int],
) -> dict[int, list[tuple[np.ndarray, Boxes]]]:
    """For each read that may travel, and each ring: by lane, seconds of all its messages but for what kernels may hide, and
    what each device has of it to begin with.

    A device gets all blocks but its own, one message after another. The kernel of the last block, at least an even share of all
    that they do, follows the last message. A kernel for each block is a launch for each.

    Args:
        wanted: what each read gathers.
        own: seconds of the operation's kernels, by lane.
        order: its reads, those of what is made last first. Kernels hide what follows them at the end: an `Arc` that counts a
            tensor's way counts those of what is made later, too.
    """
    out: dict[int, list[tuple[np.ndarray, Boxes]]] = {}
    launch = np.broadcast_to(topo.each(lambda d: d.launch), device_count(topo.mesh))[lanes]
    for r in ring_attention.rings(op, s, topo.mesh):
        axis = ring_attention.axis_of(r)
        assert axis is not None
        turning, steps = ring_attention.travelling(op, r), topo.mesh[axis].size - 1
        floors, begin, waits = dict[int, np.ndarray](), dict[int, Boxes](), np.zeros(len(lanes))
        launches = (steps + 1) * launch / len({op.reads[k].tensor for k in turning})  # (shared out among what travels)
        hides, level = (own - own / (steps + 1)) * topo.overlap, dict[str, np.ndarray]()
        for k in sorted(turning, key=order.index):
            held = begin[k] = ring_attention.held(op, graph, r, topo.mesh, k, 0)
            width = itemsize(graph.tensors[op.reads[k].tensor].dtype)
            missing = np.maximum(compute.sizes(wanted[k]) - compute.sizes(held), 0) * width
            senders, takes = ring_attention.neighbours(topo.mesh, axis), np.all(held[lanes, :, 0] < held[lanes, :, 1], axis=1)
            links = [link_between(topo, senders[d], d) if t else None for d, t in zip(lanes, takes, strict=True)]
            way = [steps * link.alpha + missing[d] * link.beta if link else 0.0 for d, link in zip(lanes, links, strict=True)]
            most = level.setdefault(op.reads[k].tensor, hides)
            hidden = np.minimum(way, most)
            floors[k], hides = np.array(way) - hidden, np.minimum(hides, most - hidden)
            waits += floors[k]
        for k, f in floors.items():  # kernels take as much longer as there are launches, or wait
            out.setdefault(k, []).append((np.where(launches * len(floors) > waits, launches, f)[:, None], begin[k]))
    return out


STRATEGY, CELL, OPERATION = 800_000, 3, 100_000  # units of work for building one
LOWERED = 400_000  # units of work for lowering an operation
MANY = 64  # devices from which on one more takes less: arrays over devices are what there is then
HOST_SECONDS_PER_BYTE = 1e-14  # breaks ties between plans of equal latency: load less from the host


@dataclass(frozen=True, slots=True)
class Menu:
    """What one kind of operation offers: its strategies, and per strategy cost, memory and footprints.

    ``own[lane, strategy]`` are seconds of its kernels on some devices (`lanes`), ``merging[strategy]`` at least those of
    merging states. ``left_out`` counts strategies that are not offered (`strategy.left_out`, and those beyond
    `MAX_STRATEGIES`): no bound says anything of them.
    """

    strategies: list[Strategy]
    seconds: np.ndarray
    state_bytes: np.ndarray
    held_states: np.ndarray
    outs_bytes: np.ndarray
    reads: list[dict[int, Boxes]]
    own: np.ndarray
    merging: np.ndarray
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Flow:
    """What a tensor's way to a reader takes at least on the clock of some devices (`lanes`).

    Attributes:
        maker, reader: operations; -1 where an input starts in a fixed layout, or an output ends in one.
        seconds: [lane, choice of the maker, choice of the reader]; one choice where there is no operation.
    """

    maker: int
    reader: int
    tensor: str
    seconds: np.ndarray


@dataclass(slots=True)
class Problem:
    """Costs of every choice, and linear underestimates of memory and of time (``flows``)."""

    graph: Graph
    topo: Topology
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    streamed: frozenset[str] = frozenset()
    menus: list[Menu] = field(default_factory=list[Menu])
    factors: list[Factor] = field(default_factory=list[Factor])
    flows: list[Flow] = field(default_factory=list[Flow])
    distinct: int = 0
    work: float = 0.0  # units that building it took, about
    clock: dict[str, Any] = field(default_factory=dict[str, Any])  # what the clock knows of its plans (`simulate.Known`)

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
        devices = len(self.topo.memories())
        return LOWERED * len(self.graph.ops) * (1 + min(devices, MANY) / 16 + max(devices - MANY, 0) / 1024)

    @property
    def network(self) -> Network:
        """Choices and costs, without limits."""
        return Network(self.sizes, self.factors)


@dataclass(slots=True)
class Tables:
    """What was worked out for a topology, by signatures: graphs that rewrites make of each other share most of it."""

    menus: dict[str, Menu] = field(default_factory=dict[str, Menu])
    pairs: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = field(
        default_factory=dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]]
    )
    moves: dict[tuple[object, ...], Moves] = field(default_factory=lambda: dict[tuple[object, ...], Moves]())
    loads: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict[tuple[object, ...], np.ndarray])

    def work(self) -> float:
        """Units of work that making them took, about."""
        devices = max((len(b) for m in self.menus.values() for r in m.reads[:1] for b in r.values()), default=1)
        return STRATEGY * sum(len(m.strategies) for m in self.menus.values()) + CELL * devices * sum(
            seconds.size for seconds, _ in self.pairs.values()
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
    only: Mapping[int, Strategy] | None = None,
) -> Problem:
    """The network of a graph on a topology; ``pins`` by operation, fixed layouts by tensor; ``streamed`` weights; ``known``
    tables of other graphs on the same topology; ``only``: the one strategy of some operations, where they have it."""
    sayable = fixed.language(graph, topo.mesh) if fixed.language else [None] * len(graph.ops)
    ends = {
        t: (None,) * len(topo.mesh) for op, s in zip(graph.ops, sayable, strict=True) if s and s.ends_whole for t in op.outs
    }
    outputs = {t: whole for t, whole in ends.items() if t in graph.outputs} | dict(outputs)
    problem, tables = Problem(graph, topo, inputs, outputs, streamed), Tables() if known is None else known
    before, kinds, keys = tables.work(), tables.menus, list[str]()
    for i, op in enumerate(graph.ops):
        given = fixed.key(op)
        mine = only.get(i) if only else None
        key = f"{signature(op, graph)} {pins.get(i, ())} {given} {sayable[i] or ''} {mine or ''}"
        keys.append(key)
        if key not in kinds:
            kinds[key] = _menu(op, graph, topo, pins.get(i, ()), given, sayable[i], mine)
        problem.menus.append(kinds[key])
    problem.distinct = len(set(keys))
    _edges(problem, keys, tables)
    _held_alike(problem, sayable)
    problem.work = tables.work() - before + OPERATION * len(graph.ops)
    return problem


def _menu(
    op: Op, graph: Graph, topo: Topology, pins: tuple[Pin, ...], given: Key, sayable: Sayable | None, only: Strategy | None
) -> Menu:
    pins = (*pins, *stated(given, {p.axis for p in pins}))
    every = allowed(op, given, every_strategy(op, topo.mesh, pins), graph, topo.mesh)
    if sayable and not (every := [s for s in every if sayable.of(op, s, graph, topo.mesh)]):
        where, hint = f"node '{', '.join(op.source)}'", "compile without --for, or without the pin or layout"
        raise PlanError("no split that is asked for can be said in the format", where=where, hint=hint)
    offered = [only] if only and only in every else every[:MAX_STRATEGIES]
    skipped = len(every) - len(offered) + left_out(op, topo.mesh, pins)
    blocks = np.stack([op_boxes(op, s.dims, topo.mesh) for s in offered])
    finals = np.stack([result_boxes(op, s, topo.mesh) for s in offered])
    prints = footprints_of_all(op, graph, offered, topo.mesh)
    each = compute.seconds_of_all(op, graph, blocks, finals, prints, topo)
    seconds, states, mine, merging = list[float](), list[int](), list[int](), list[float]()
    at, kept, own = watched(topo), lanes(topo), list[np.ndarray]()
    launches = 2 if isinstance(op, Block) and op.lowers else 1  # merging, and finishing where needed
    again = (launches - 1) * np.broadcast_to(topo.each(lambda d: d.launch), each.shape[1])[kept]
    for s, block, final, took in zip(offered, blocks, finals, each, strict=True):
        cut = merges(op, s)
        size = compute.state_bytes(op, block, topo) if cut else 0
        by = reductions(op, s, topo.mesh) if cut else ("", "")
        merges_take = [w.seconds for w in merge(size, cut, topo, by)] if cut else []
        seconds.append(float(np.max(took)) + sum(merges_take) + (launches * topo.device.launch if cut else 0.0))
        own.append(took[kept] + again * bool(cut))
        left = compute.state_bytes(op, final, topo) if len(merges_take) > 1 else 0  # of what was scattered
        second = merge(left, [(a, k) for a, k in cut if not k], topo, by) if left else []
        merging.append(sum(merges_take[:1]) + sum(w.seconds for w in second) + topo.device.launch if cut else 0.0)
        states.append(size)
        mine.append(compute.state_bytes(op, block[at : at + 1], None) if cut else 0)
    widths = [itemsize(graph.tensors[t].dtype) for t in op.outs]
    held = [[out_layout(op, s.out, n) for n in range(len(op.outs))] for s in offered]
    outs = [
        [int(compute.sizes(tensor_boxes(graph.tensors[t].shape, h, topo.mesh)[at])) * w for t, h, w in zip(op.outs, hs, widths)]
        for hs in held
    ]
    reads = [{k: found[n] for k, found in prints.items()} for n in range(len(offered))]
    own_seconds = np.array(own).reshape(len(offered), len(kept)).T
    return Menu(
        offered,
        np.array(seconds),
        np.array(states),
        np.array(mine),
        np.array(outs).reshape(len(offered), -1),
        reads,
        own_seconds,
        np.array(merging),
        skipped,
    )


def _edges(problem: Problem, keys: list[str], tables: Tables) -> None:
    """Unary costs with transfers from fixed layouts, and a table per pair of operations that share a tensor."""
    graph = problem.graph
    makers = graph.producers()
    cache, loading, readers = tables.pairs, tables.loads, dict[str, list[tuple[int, int]]]()
    for i, op in enumerate(graph.ops):
        for k, t in enumerate(op.operands):
            readers.setdefault(t, []).append((i, k))
    unary = [m.seconds.copy() for m in problem.menus]
    for i, op in enumerate(graph.ops):
        positions: dict[str, list[int]] = {}
        for k, t in enumerate(op.operands):
            if t:
                positions.setdefault(t, []).append(k)
        turns = isinstance(op, Block) and op.inner
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
            order = tuple(sorted(range(len(op.operands)), key=lambda k: -makers.get(op.operands[k], -1))) if turns else ()
            moves = _moves(problem, held, t, readers[t], keys, tables)
            key = (id(moves), tuple(held), keys[i], tuple(where), order)
            if key not in cache:
                cache[key] = _table(problem, moves, held, i, where, order)
            table, least = cache[key]
            if maker is None:
                unary[i] += table[0]
            elif table.any():
                problem.factors.append(Factor((maker, i), table))
            if least.any():
                problem.flows.append(Flow(-1 if maker is None else maker, i, t, least))
    for t in (t for t in problem.outputs if t in makers):  # from each strategy's layout to the one that it must end in
        held = _layouts(problem, maker := makers[t], t)
        moves = _moves(problem, held, t, readers.get(t, []), keys, tables)
        n = moves.columns[tensor_boxes(graph.tensors[t].shape, problem.outputs[t], problem.topo.mesh).tobytes()]
        at = [moves.rows[h] for h in held]
        unary[maker] += moves.seconds[at, n]
        least = moves.least[:, at, n : n + 1]
        if least.any():
            problem.flows.append(Flow(maker, -1, t, least))
    problem.factors += [Factor((i,), u) for i, u in enumerate(unary)]


def _held_alike(problem: Problem, sayable: Sequence[Sayable | None]) -> None:
    """An input or weight that must be held in a layout has one: all readers hold the same of it."""
    last: dict[str, tuple[int, int]] = {}
    for i, (op, says) in enumerate(zip(problem.graph.ops, sayable, strict=True)):
        for k in sorted(says.placed) if says else ():
            t = op.operands[k]
            before, at = last.get(t, (i, k))
            last[t] = i, k
            theirs, mine = ([_boxes_key(r[n]) for r in problem.menus[j].reads] for j, n in ((before, at), (i, k)))
            if before != i:
                problem.factors.append(Factor((before, i), np.where(np.array(theirs)[:, None] == np.array(mine), 0.0, np.inf)))
            elif at != k:
                problem.factors.append(Factor((i,), np.where(np.array(theirs) == np.array(mine), 0.0, np.inf)))


def _boxes_key(boxes: Boxes) -> bytes:
    """Boxes as something to compare; nothing where all devices have the same, whatever of a tensor that is."""
    return b"" if (boxes == boxes[:1]).all() else boxes.tobytes()


def _layouts(problem: Problem, maker: int, tensor: str) -> list[Layout]:
    op = problem.graph.ops[maker]
    return [out_layout(op, s.out, op.outs.index(tensor)) for s in problem.menus[maker].strategies]


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """What brings a tensor from its layouts to its footprints, of all readers and where it must end.

    Attributes:
        rows, columns: numbers of layouts, and of footprints by their bytes.
        seconds: [layout, footprint] of the transfer.
        least: [lane, layout, footprint], what a device that lacks some of it waits at least: one footprint may cover another,
            and larger ones may take less.
    """

    rows: Mapping[Layout, int]
    columns: Mapping[bytes, int]
    seconds: np.ndarray
    least: np.ndarray


def _moves(
    problem: Problem, held: list[Layout], tensor: str, readers: list[tuple[int, int]], keys: list[str], tables: Tables
) -> Moves:
    """The moves of a tensor from the layouts in which it may be held; those of one that is alike are made once."""
    graph, topo, t = problem.graph, problem.topo, problem.graph.tensors[tensor]
    end, alike = problem.outputs.get(tensor), {(keys[i], k): (i, k) for i, k in readers}
    key = (tuple(held), t.shape, t.dtype, tuple(alike), end)
    if key not in tables.moves:
        wanted = {} if end is None else {b.tobytes(): b for b in [tensor_boxes(t.shape, end, topo.mesh)]}
        for i, k in alike.values():
            op, menu = graph.ops[i], problem.menus[i]
            wanted |= {r[k].tobytes(): r[k] for r in menu.reads}
            rings = [r for s in menu.strategies for r in ring_attention.rings(op, s, topo.mesh)]
            begins = (
                ring_attention.held(op, graph, r, topo.mesh, k, 0) for r in rings if k in ring_attention.travelling(op, r)
            )
            wanted |= {b.tobytes(): b for b in begins}
        rows = {layout: n for n, layout in enumerate(dict.fromkeys(held))}
        sources = [(layout, tensor_boxes(t.shape, layout, topo.mesh)) for layout in rows]
        found = transfer.costs(sources, list(wanted.values()), itemsize(t.dtype), topo).seconds
        kept = lanes(topo)
        at = np.stack([b[kept] for b in wanted.values()])
        least = np.where(_inside(at[:, None], at[None]).all(axis=2), found[:, None], np.inf).min(axis=2)
        have, want = np.stack([b[kept] for _, b in sources])[:, None], at[None]
        lacks = ~_inside(want, have) & np.all(want[..., 0] < want[..., 1], axis=-1)
        columns = {raw: n for n, raw in enumerate(wanted)}
        tables.moves[key] = Moves(rows, columns, found, np.moveaxis(lacks, 2, 0) * least)
    return tables.moves[key]


def _table(
    problem: Problem, moves: Moves, held: list[Layout], reader: int, where: list[int], order: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds for every (layout of the producer, strategy of the reader), and those of a `Flow`; equal rows and columns are
    computed once.

    On the clock, readers may share a transfer, a device that receives nothing goes on, and what may travel round a ring, or is
    read after states are merged alone, is waited for less: so a flow counts a reader's dearest footprint that a device lacks,
    less what may hide it; or what goes round a ring, and its beginning.
    """
    graph, topo, columns = problem.graph, problem.topo, moves.columns
    op, menu, kept = graph.ops[reader], problem.menus[reader], lanes(topo)
    found = np.zeros((len(moves.rows), len(menu.reads)))
    least = np.zeros((len(kept), *found.shape))
    for n, (s, reads) in enumerate(zip(menu.strategies, menu.reads, strict=True)):
        found[:, n] = moves.seconds[:, list({columns[reads[k].tobytes()] for k in where})].sum(axis=1)
        rings = ring_floors(op, graph, s, reads, menu.own[:, n], kept, topo, order) if isinstance(op, Block) and order else {}
        late = isinstance(op, Block) and op.lowers and (bool(rings) or bool(merges(op, s)))
        hides = (menu.own[:, n] + menu.merging[n])[:, None] if late else np.zeros((len(kept), 1))
        early = op.body_reads() if isinstance(op, Block) and late else frozenset(where)
        for k in where:  # gathered, or a part that then goes round
            whole = np.maximum(moves.least[:, :, columns[reads[k].tobytes()]] - hides * (k not in early), 0.0)
            around = (moves.least[:, :, columns[begin.tobytes()]] + floor for floor, begin in rings.get(k, ()))
            least[:, :, n] = np.maximum(least[:, :, n], np.minimum.reduce([whole, *around]))
    at = [moves.rows[layout] for layout in held]
    return found[at], least[:, at]


def _inside(less: Boxes, more: Boxes) -> np.ndarray:
    """Whether boxes lie in others."""
    return np.all((more[..., 0] <= less[..., 0]) & (less[..., 1] <= more[..., 1]), axis=-1)


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
    names = problem.graph.ops[reader - 1].operands
    out = np.tile(_load_seconds(problem, reader, tensor, where), (len(problem.menus[reader - 1].reads), 1))
    for a, held in enumerate(problem.menus[reader - 1].reads):
        mine = [boxes for k, boxes in held.items() if names[k] == tensor]
        for b, needed in enumerate(problem.menus[reader].reads):
            if all(any(covers(m, needed[k]) for m in mine) for k in where):
                out[a, b] = 0.0
    return out


def lanes(topo: Topology) -> list[int]:
    """The devices whose clocks bounds look at: the watched one, one in the middle (at an end there may be no halo), and where
    devices or their shares differ the first of each sort, up to four in all, large shares first."""
    middle = device_count(topo.mesh) // 2
    sorts: dict[tuple[int, float], int] = {}
    for d, at in enumerate(coordinates(topo.mesh)):
        share = prod((a.weights[k] / sum(a.weights) for a, k in zip(topo.mesh, at, strict=True) if a.weights), start=1.0)
        sorts.setdefault((topo.kinds.index(topo.kinds[d]) if topo.kinds else 0, share), d)
    several = [sorts[k] for k in sorted(sorts, key=lambda k: -k[1])] if len(sorts) > 1 else []
    return list(dict.fromkeys((watched(topo), *several, middle)))[: 4 if several else 2]


def watched(topo: Topology) -> int:
    """The device whose memory the rows estimate: the last of those that have least. Of equal cuts it has the largest block."""
    least = topo.memories()
    return len(least) - 1 - least[::-1].index(min(least))
