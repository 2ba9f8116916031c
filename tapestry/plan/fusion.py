"""Which fusions pay on one device: launches and bytes saved, against arithmetic and loads done again.

The rules that cost nothing are simplifications and have been applied already. Those here are choices, so they are moves: a
map computed by its readers (`inline_map`), a contraction by the reduction that reads it (`fuse_contraction`), contractions
of one factor side by side (`fuse_sums`), and contractions that read 8 bits as they are (`narrow_factors`), for devices that
multiply those. An operation is priced by its tiles (`tile_footprint`): its launch, each tensor once from memory, what every
tile loads once from the cache in between, and each primitive as often as the tiles compute it. A device that runs
expressions operator by operator (torch on a CPU) has no tiles, but a price for every operator, and what a reduction
computes before it reduces is written and read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tapestry.ir.expr import LONG, Call, Expr, uncast, walk
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.recognition.contraction import folded_roles, kept, product_roles, products
from tapestry.ir.types import itemsize
from tapestry.plan.topology.fabric import Device
from tapestry.rewrites.core.applied import chosen
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.matching import Accept
from tapestry.rewrites.core.rule import Move
from tapestry.rewrites.core.tile_footprint import Tile, evaluated, loaded, tile_of
from tapestry.rewrites.fusion.contractions import FuseContraction
from tapestry.rewrites.fusion.fuse_dequantize import NarrowFactors
from tapestry.rewrites.fusion.fuse_siblings import FuseSums
from tapestry.rewrites.inline_map import InlineMap
from tapestry.rewrites.lay_out import LayOut, gathered

CACHE = 2.0  # bandwidth of the cache that tiles share (L2), as a multiple of the memory's: 5.5 of 3.35 TB/s on H100
_NONE = frozenset[str]()
REACHED = 0.6  # of a preset's rate, by products in tiles: Triton's FA2 gets 471 of 790 TFLOP/s, H100 (pytorch/benchmark#2391)
ROWS = 32  # of a tile that is worth a program: an estimate, twice the 16 that matrix units take at least
PROGRAMS = 64  # an estimate, the power of two under half of an H100's 132 multiprocessors: with fewer, most of it is idle
KEPT = 1 << 22  # bytes of a result of weights alone that are worth keeping rather than computing it in who reads it
OPERATOR = 2e-6  # s, one of torch's operators on four numbers on one core: 2.1 (add) to 2.5 µs (exp, tanh) with torch 2.13


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One device, and whether it runs expressions operator by operator."""

    device: Device
    eager: bool


def fused(
    graph: Graph, machine: Machine, disabled: frozenset[str] = _NONE, keeps: Accept | None = None
) -> tuple[Graph, list[Move]]:
    """The graph with every fusion that pays, and the moves that lead there.

    Args:
        disabled: rules that are left out.
        keeps: whether some operations may become others.
    """
    prices: dict[Block, float] = {}
    once = _worked_out_once(graph) if machine.eager else _NONE

    def price(op: Block) -> float:
        if op not in prices:
            prices[op] = 0.0 if once.issuperset(op.outs) else seconds(graph, op, machine)
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
            graph, moves = chosen(rule, graph, _both(keeps, wanted) if keeps and wanted else keeps or wanted)
            found += moves
    return (simplify(graph, disabled=disabled) if found else graph), found


def _both(first: Accept, then: Accept) -> Accept:
    return lambda old, new: first(old, new) and then(old, new)


def _worked_out_once(graph: Graph) -> frozenset[str]:
    """What follows from weights alone and is small: a run on CPUs finds it done (`runtime.one_process.weights_only`)."""
    known, out = set(graph.weights), set[str]()
    for op in graph.ops:
        if known.issuperset(op.inputs) and isinstance(op, Block) and all(graph.tensors[t].nbytes <= KEPT for t in op.outs):
            known.update(op.outs)
            out.update(op.outs)
    return frozenset(out)


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
