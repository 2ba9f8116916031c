"""Seconds and bytes of an operation's own block: a roofline (Williams et al. 2009).

``time = launch + FLOPs / rate + bytes / bandwidth``. Adding instead of taking the maximum is at most twice the roofline, and
keeps the search from calling a plan free that reads every weight on every device. Where kernels load while they compute
(`Device.power`) it is the p-norm of the terms in place of their sum: near the maximum, and still more for each byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np

from tapestry.ir.expr import Call, Const, Index, arg_positions, count_calls, number, walk
from tapestry.ir.footprint import Boxes
from tapestry.ir.graph import Block, Graph, Op, Opaque
from tapestry.ir.index import Aff, dim, dims_of
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.recognition.attention_roles import attention
from tapestry.ir.recognition.contraction import dims_read, dims_varied, inner_product, kept, products
from tapestry.ir.recognition.route_groups import guarded, unread
from tapestry.ir.recognition.running_state import as_scan
from tapestry.ir.recognition.selection_sum import Routed, routed, selection
from tapestry.ir.recognition.state import counted, layered, native, row_groups, varies
from tapestry.ir.types import itemsize
from tapestry.plan.cost.kernel_class import ATTENTION, DECODING, GATHER, SCORED, kernel_class
from tapestry.plan.topology import Device, Topology
from tapestry.plan.topology.measured_costs import PRODUCTS

HIDDEN = -1e4  # a score from which on it is that of no key
# rows of a tile that are none, on average for each matrix, or as many as there are (`codegen.triton.task.row_order`)
WASTED = 64


def sizes(boxes: Boxes) -> np.ndarray:
    """Number of points of each device's box."""
    return np.prod(np.maximum(boxes[..., 1] - boxes[..., 0], 0), axis=-1)


def work(op: Op, block: Boxes) -> np.ndarray:
    """Points of each device's block at which the body is computed: those of its index space, but for a scan one for each
    element that runs (`ir.recognition`), in every segment that the block meets."""
    found = as_scan(op)
    if found is None:
        return sizes(block)
    at = next(i for i, d in enumerate(op.space) if d.name == found.dim)
    lo, hi = block[:, at, 0], block[:, at, 1]
    segments = np.maximum(-(-hi // found.segment) - lo // found.segment, 0)
    return sizes(np.delete(block, at, axis=1)) * segments


def flops(op: Op, block: np.ndarray, final: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(contraction FLOPs, other FLOPs) per device, for ``block`` points of the index space and ``final`` output points."""
    none = np.zeros_like(block)
    if not isinstance(op, Block):
        return none, block * 10
    tail = final * count_calls(op.then)
    if (fields := products(op)) is not None:
        return 2 * len(fields) * block, tail
    if selection(op):
        return none, final + tail
    merge = 0
    if op.monoid:
        merge = max(1, count_calls(MONOIDS[op.monoid].combiner(tuple(e.dtype for e in op.body))) // 2)
    return none, block * (count_calls(op.body) + merge) + tail


def arithmetic(op: Op, block: Boxes, final: Boxes) -> tuple[np.ndarray, np.ndarray]:
    """`flops` of boxes rather than of point counts, exact for operations whose state fields run over different dimensions."""
    if isinstance(op, Block) and (route := routed(op)) is not None:  # each row is multiplied by one of the matrices
        rows, share, met = _picked(op, route, block)
        once = 2 * sizes(block) / np.maximum(rows * share * route.places, 1)  # FLOPs of a row and a matrix
        heavy = once * (rows * share + np.minimum(WASTED * met, rows * share))
        return heavy.astype(np.int64), sizes(final) * (1 + count_calls(op.then))
    if isinstance(op, Block) and layered(op):
        return layered_flops(op, block, final)
    heavy, light = flops(op, work(op, block), sizes(final))
    factors = dict.fromkeys(f for pair in products(op) or () for f in pair) if isinstance(op, Block) else {}
    for e, count in ((e, n) for e in factors if (n := count_calls((e,)))):  # computed once for each point that they vary along
        assert isinstance(op, Block)
        along = dims_read(op, e)
        light = light + sizes(block[:, [i for i, d in enumerate(op.space) if d.name in along]]) * count
    return heavy, light


def _picked(op: Block, route: Routed, block: Boxes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each device's block: rows; the share of them that pick one of its matrices, and how many matrices some row picks,
    on average over routes that pick each alike."""
    along = {d.name for d in route.of_rows}
    rows = sizes(block[:, [i for i, d in enumerate(op.space) if d.name in along]])
    share = _share(op, route.base + dim(route.over.name), block)
    return rows, share, share * route.places * (1 - (1 - 1 / route.places) ** rows)


def layered_flops(op: Block, block: Boxes, final: Boxes) -> tuple[np.ndarray, np.ndarray]:
    """(contraction FLOPs, other FLOPs) per device where not everything is computed at every point of the index space.

    An inner reduction is computed once for each point that it depends on, a state field along the map dimensions that it
    varies along. The field that carries most is an exp-weighted sum, two FLOPs per point on matrix units, where its
    lifted value and the weights run over different dimensions.
    """
    names = [d.name for d in op.space]

    def points(dims: frozenset[str]) -> np.ndarray:
        return sizes(block[:, [i for i, n in enumerate(names) if n in dims]])

    def rows(dims: frozenset[str]) -> np.ndarray:
        return points(dims) // _shared(op, block, dims)

    heavy: np.ndarray = np.zeros(len(block), np.int64)
    light = sizes(final) * count_calls(op.then)
    for s in op.inner:
        inside = dims_read(op, s.body) | {d.name for d in s.dims}
        product = s.body.args if s.monoid == "sum" and isinstance(s.body, Call) and s.body.fn == "mul" else ()
        heavy, light = (heavy + 2 * points(inside), light) if product else (heavy, light + 2 * points(inside))
        light = light + sum(points(dims_read(op, e)) * count_calls((e,)) for e in product)
    assert op.monoid
    merge = MONOIDS[op.monoid].combiner(tuple(e.dtype for e in op.body))
    reduced = frozenset(d.name for d in op.reduce if d.size > 1)
    row = kept(op.monoid, op.dims, op.reduce, op.body)
    body = op.body[:-1] if row else op.body  # what is kept is picked, not summed
    if row and op.inner:  # a part of a row has no kernel of whole rows: its product is computed for every column
        part = block[:, names.index(row.over.name)]
        heavy = heavy * np.where(part[:, 1] - part[:, 0] < row.over.size, row.column.size, 1)
    lifted = [dims_varied(op, e) for e in body]
    for e, m, own, along in zip(body, merge[: len(body)], lifted, varies(op)[: len(body)], strict=True):
        light = light + rows(own) * count_calls((e,))
        field = reduced | {d.name for d, v in zip(op.dims, along, strict=True) if v and d.size > 1}
        if field - own and own - lifted[0]:  # weights by rows times values by columns
            heavy = heavy + 2 * points(field)
        else:
            light = light + rows(field) * max(1, count_calls((m,)) // 2)
    seen = _visible(op, block)
    return (heavy * seen).astype(np.int64), (light * seen).astype(np.int64)


def _visible(op: Block, block: Boxes) -> np.ndarray | float:
    """The share of an attention's scores that comparing places leaves, as a causal mask does.

    Triton's kernels leave out tiles of the others. Those of the CPU do not: where these were measured, the rates of their
    classes are of what is counted here.
    """
    names = [d.name for d in op.space]
    hiding = (x for x in walk(op.body[0]) if isinstance(x, Call) and x.fn == "where" and len(op.body) == 3)
    tests = [x.args[0] for x in hiding if isinstance(low := x.args[2], Const) and low.value <= HIDDEN]
    for x in tests:
        if isinstance(x, Call) and x.fn == "and":
            tests += x.args
        if not isinstance(x, Call) or x.fn != "ge" or not isinstance(place := x.args[0], Index) or not place.aff.is_affine:
            continue
        found = {c: names.index(str(a)) for a, c in place.aff.terms}
        if found.keys() == {1, -1} and x.args[1] == number(0, place.dtype):
            (i0, i1), (n0, n1) = block[:, found[1]].T, block[:, found[-1]].T
            many, before = n1 - n0, i0 + place.aff.const - n0  # keys; those that rows before the first see
            last = before + i1 - i0
            a, b, c, d = (np.maximum(k, 0) * (np.maximum(k, 0) + 1) // 2 for k in (last, before, last - many, before - many))
            return (a - b - c + d) / np.maximum((i1 - i0) * many, 1)
    return 1.0


def _shared(op: Block, block: Boxes, dims: frozenset[str]) -> np.ndarray:
    """Neighbours along map dimensions that have one row's states: where a block has whole groups of them, and whole rows."""
    out: np.ndarray = np.ones(len(block), np.int64)
    groups, n = row_groups(op), len(op.dims)
    reduced = block[:, n : n + len(op.reduce)]
    whole = np.all(reduced[..., 1] - reduced[..., 0] == [d.size for d in op.reduce], axis=-1)
    for i, d in enumerate(op.dims):
        if d.name in dims and (k := groups.get(d.name, 1)) > 1:
            out = np.where(whole & np.all(block[:, i] % k == 0, axis=-1), out * k, out)
    return out


def quantities(
    op: Op, graph: Graph, block: Boxes, final: Boxes, reads: dict[tuple[str, bytes], Boxes]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(contraction FLOPs, other FLOPs, bytes read and written) per device: what `seconds_each` prices, and what
    `tapestry calibrate` holds measured times against."""
    return _quantities(op, graph, block, final, [(t, boxes, None) for (t, _), boxes in reads.items()])[:3]


def _quantities(
    op: Op, graph: Graph, block: Boxes, final: Boxes, reads: Sequence[tuple[str, Boxes, np.ndarray | None]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The same, and an attention's heads; ``reads``: tensors, what is read of them, and which of the boxes count."""
    found: dict[str, np.ndarray] = {}
    picks, shares = kernel_class(op) == GATHER, shares_read(op, block)
    for tensor, boxes, counts in reads:
        cells = np.minimum(sizes(boxes), sizes(final)) if picks else sizes(boxes)
        cells = (cells * shares[tensor]).astype(np.int64) if tensor in shares else cells
        found[tensor] = found.get(tensor, 0) + (cells if counts is None else cells * counts)
    looks: dict[str, list[Boxes]] = {}
    for tensor, boxes, _ in reads:
        looks.setdefault(tensor, []).append(boxes)
    for tensor, several in looks.items():
        if len(several) > 1:  # what overlaps is read from memory once
            found[tensor] = np.minimum(found[tensor], _hull(several))
    if isinstance(op, Block):
        for tensor, most in ((t, most) for t, most in _strided_reads(op) if t in found):
            cells = (n * sizes((block if body else final)[:, list(dims)]) for (body, dims), n in most)
            found[tensor] = np.minimum(found[tensor], sum(cells))
    read: np.ndarray = sum((n * itemsize(graph.tensors[t].dtype) for t, n in found.items()), np.zeros(len(block), np.int64))
    if not isinstance(op, Block):
        cells = [_cells_written(op, graph, k, block) for k in range(len(op.outs))]
        written = sum(n * itemsize(graph.tensors[t].dtype) for t, n in zip(op.outs, cells, strict=True))
        return np.zeros_like(read), 10 * np.sum(cells, axis=0), read + written, np.zeros_like(read)
    written = sizes(final) * sum(itemsize(graph.tensors[t].dtype) for t in op.outs)
    if (group := unread(graph, op)) is not None:  # (rows of other groups are not written)
        written = written * _share(op, group.base, block)
    return *arithmetic(op, block, final), read + written, _heads_of_block(op, block)


def _heads_of_block(op: Block, block: Boxes) -> np.ndarray:
    """The heads of an attention in each device's block, of all that it has in a batch; else none."""
    roles = attention(op) if kernel_class(op) in (ATTENTION, SCORED, DECODING) else None
    if roles is None:
        return np.zeros(len(block), np.int64)
    return sizes(block[:, [i for i, d in enumerate(op.dims) if d not in (*roles.rows, *roles.columns)]])


def shares_read(op: Op, block: Boxes) -> dict[str, np.ndarray]:
    """The share that is read of a routed product's rows and matrices, or of what a guard keeps for one group; by tensor."""
    if not isinstance(op, Block):
        return {}
    if (route := routed(op)) is not None:
        _, share, met = _picked(op, route, block)
        of_rows, of_matrices = ([op.reads[k].tensor for k in arg_positions((e,))] for e in (route.rows, route.matrices))
        return dict.fromkeys(of_rows, share) | dict.fromkeys(of_matrices, met / np.maximum(share * route.places, 1))
    out = dict[str, np.ndarray]()
    for found in (guarded(e) for e in (*op.body, *op.then)):
        if found is not None:
            kept = {op.reads[k].tensor for k in arg_positions((found.value,)) if dims_of(found.base) & op.read_dims(k)}
            out |= dict.fromkeys(kept, _share(op, found.base, block))
    return out


def _share(op: Block, place: Aff, block: Boxes) -> np.ndarray:
    """The share of all matrices, or groups of them, that each device's block has."""
    along = [i for i, d in enumerate(op.space) if d.name in dims_of(place)]
    return sizes(block[:, along]) / prod(op.space[i].size for i in along)


def _hull(several: Sequence[Boxes]) -> np.ndarray:
    """Cells of the box around some boxes, for every device."""
    stack = np.stack(several)
    there = (sizes(stack) > 0)[..., None]
    lo, hi = np.where(there, stack[..., 0], np.iinfo(np.int64).max).min(axis=0), np.where(there, stack[..., 1], 0).max(axis=0)
    return sizes(np.stack([np.minimum(lo, hi), hi], axis=-1))


@lru_cache(maxsize=1 << 12)
def _strided_reads(op: Block) -> tuple[tuple[str, tuple[tuple[tuple[bool, tuple[int, ...]], int], ...]], ...]:
    """Tensors of which an operation may touch less than boxes, with steps or diagonals in between: for each of their reads
    whether it is of the body, and the dimensions that it varies along, whose points are the most cells that it touches;
    and how many reads are alike in that."""
    loose = {r.tensor for r in op.reads if not all(e.is_dim or not e.terms for e in r.index)}
    out: dict[str, Counter[tuple[bool, tuple[int, ...]]]] = {t: Counter() for t in op.inputs if t in loose}
    body = op.body_reads()
    for k, r in enumerate(op.reads):
        if r.tensor in out:
            dims, space = op.read_dims(k), op.space if k in body else op.dims
            out[r.tensor][k in body, tuple(i for i, d in enumerate(space) if d.name in dims)] += 1
    return tuple((t, tuple(most.items())) for t, most in out.items())


def _cells_written(op: Opaque, graph: Graph, output: int, block: Boxes) -> np.ndarray:
    """Cells that each device writes of an output of an opaque node: whole, but for the dimensions that are cut."""
    axes = op.out_axes[output] if op.out_axes else ()
    rest = (n for axis, n in enumerate(graph.tensors[op.outs[output]].shape) if axis not in axes)
    return sizes(block[:, [i for i, axis in enumerate(axes) if axis is not None]]) * prod(rest)


def seconds(op: Op, graph: Graph, block: Boxes, final: Boxes, reads: dict[tuple[str, bytes], Boxes], topo: Topology) -> float:
    """Time of the slowest device."""
    return float(np.max(seconds_each(op, graph, block, final, reads, topo)))


def seconds_each(
    op: Op, graph: Graph, block: Boxes, final: Boxes, reads: dict[tuple[str, bytes], Boxes], topo: Topology
) -> np.ndarray:
    """Time of every device: its block of the index space, what it ends with, and each distinct footprint it reads."""
    return _priced(op, graph, _quantities(op, graph, block, final, [(t, b, None) for (t, _), b in reads.items()]), topo)


def seconds_of_all(
    op: Op, graph: Graph, blocks: np.ndarray, finals: np.ndarray, prints: dict[int, np.ndarray], topo: Topology
) -> np.ndarray:
    """``[strategy, device]`` seconds of several strategies at once: ``blocks``, ``finals`` and, by read position, ``prints``
    begin with the strategy."""
    reads, seen, n = list[tuple[str, Boxes, np.ndarray | None]](), dict[str, list[np.ndarray]](), blocks.shape[1]
    for k, boxes in prints.items():
        tensor = op.operands[k]
        before = seen.setdefault(tensor, [])
        new = None if not before else ~np.any([(b == boxes).all(axis=(1, 2, 3)) for b in before], axis=0)
        before.append(boxes)
        reads.append((tensor, _over_devices(boxes), None if new is None else np.repeat(new, n)))
    work = _quantities(op, graph, _over_devices(blocks), _over_devices(finals), reads)
    each = zip(*(w.reshape(len(blocks), n) for w in work), strict=True)
    if topo.kinds:  # (of a device each)
        return np.stack([_priced(op, graph, w, topo) for w in each])
    return _priced(op, graph, work, topo).reshape(len(blocks), n)


def _over_devices(boxes: np.ndarray) -> Boxes:
    return boxes.reshape(boxes.shape[0] * boxes.shape[1], *boxes.shape[2:])  # (-1 says nothing where there are no dimensions)


def _priced(op: Op, graph: Graph, work: tuple[np.ndarray, ...], topo: Topology) -> np.ndarray:
    """Seconds of what `_quantities` says of every device."""
    heavy, light, moved, heads = work
    rates = [rates_of(op, graph, d) for d in topo.kinds or (topo.device,)]
    launch, rate, vector, bandwidth = np.array(rates).T
    power = topo.each(lambda d: d.power)
    if np.all(power == 1):
        return heavy / rate + light / vector + moved / bandwidth + launch
    each = topo.each(lambda d: d.kernel(kernel_class(op), "f32").head)
    return norm([heavy / rate, light / vector, moved / bandwidth, heads * each], power) + launch


def norm(terms: Sequence[np.ndarray], power: np.ndarray) -> np.ndarray:
    """The p-norm of seconds that run side by side: at least the largest, at most their sum, growing with each."""
    most = np.maximum(np.max(terms, axis=0), 1e-300)
    return most * np.sum([(t / most) ** power for t in terms], axis=0) ** (1 / power)


def rates_of(op: Op, graph: Graph, device: Device) -> tuple[float, float, float, float]:
    """(seconds to launch, FLOP/s of contractions, of the rest, B/s) of an operation's kernel; beside a contraction other FLOPs
    take what they take in a map."""
    kind, dtype = kernel_class(op), multiplied(op, graph)
    k = device.kernel(kind, dtype)
    heavy = kind in PRODUCTS
    rate, vector = (k.rate, device.vector) if heavy else (device.rate(dtype), k.rate)
    return k.launch, rate, vector, k.bandwidth


def multiplied(op: Op, graph: Graph) -> str:
    """The dtype whose rate a contraction runs at: the first factor's, or the wider one's."""
    factors = [graph.tensors[t].dtype for t in (_factors(op) if isinstance(op, Block) else ())]
    return max(factors, key=itemsize) if factors else next((graph.tensors[t].dtype for t in op.inputs), "f32")


@lru_cache(maxsize=1 << 12)
def _factors(op: Block) -> tuple[str, ...]:
    """The tensors that the factors of a contraction, or of an inner one, read."""
    inner = inner_product(op)
    pairs = products(op) or ((inner.args,) if inner else ())
    return tuple(op.reads[k].tensor for k in sorted(arg_positions(tuple(e for pair in pairs for e in pair))))


def state_bytes(op: Op, block: Boxes, topo: Topology | None = None) -> int:
    """Bytes of one device's partial monoid states, as far as they are sent: as they travel on a topology, or are held."""
    if not isinstance(op, Block) or op.monoid is None:
        return 0
    total, fixed, sent_as = 0, counted(op), native(op) if topo and topo.native_sums else ""
    for k, (e, along) in enumerate(zip(op.body, varies(op), strict=True)):
        cells = int(np.max(sizes(block[:, : len(op.dims)][:, list(along)])))
        total += 0 if k in fixed else cells * itemsize(sent_as or e.dtype)
    return total
