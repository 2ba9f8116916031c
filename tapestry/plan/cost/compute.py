"""Seconds and bytes of an operation's own block: a roofline (Williams et al. 2009).

``time = launch + FLOPs / rate + bytes / bandwidth``. Adding instead of taking the maximum is at most twice the roofline, and
keeps the search from calling a plan free that reads every weight on every device. Where kernels load while they compute
(`Device.power`) it is the p-norm of the terms in place of their sum: near the maximum, and still more for each byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import numpy as np

from tapestry.ir.expr import Call, arg_positions, count_calls, walk
from tapestry.ir.graph import Block, Graph, Op, Opaque, Read
from tapestry.ir.index import Aff, bounds, dims_of
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.plan import Layout, Mesh, Strategy, coordinates, device_count
from tapestry.ir.recognise import (
    convolution,
    dims_read,
    dims_varied,
    exponential,
    inner_product,
    kept,
    products,
    routed,
    selection,
)
from tapestry.ir.states import as_scan, counted, layered, native, row_groups, varies
from tapestry.ir.types import itemsize
from tapestry.plan.strategy import Boxes, footprints, op_boxes, tensor_boxes
from tapestry.plan.topology import Device, Topology
from tapestry.plan.topology.fabric import PRODUCTS

# Classes of kernels, each with rates of its own where they were measured (`plan.topology`).
#
# - ``contraction``: sums of products, those of rows with the matrix that each picks too.
# - ``convolution``: a sum of products whose windows slide over an image.
# - ``unfolded``: a sum of products of windows that is no convolution, such as one over an image's overlapping strips: the
#   windows are written out before they are multiplied.
# - ``attention``: sums of products inside another reduction (attention, a norm of a product's rows), and sums by weights of
#   rows.
# - ``scored``: attention whose scores are more than a product and what is added to it: masked by comparing places, chosen by
#   another tensor, capped. They are computed score by score.
# - ``computed``: those inside another reduction, of factors that are computed from several values, such as attention
#   that rotates its queries: they are written out before they are multiplied.
# - ``gather``: picks elements by index, as an embedding lookup does.
# - ``softmax``: sums with exponential weights: softmax, log-sum-exp, cross-entropy.
# - ``row``: any other reduction or scan: sums, norms, argmax, recurrences.
# - ``map``: no reduction: element-wise work, copies, transpositions.
# - ``opaque``: a node of ONNX that is run as it is.


CONTRACTION, CONVOLUTION, UNFOLDED = "contraction", "convolution", "unfolded"
ATTENTION, SCORED, COMPUTED = "attention", "scored", "computed"
ARITHMETIC = frozenset({"add", "sub", "mul", "div", "neg", "cast"})
ROW, SOFTMAX, MAP, GATHER, OPAQUE = "row", "softmax", "map", "gather", "opaque"


@lru_cache(maxsize=1 << 12)
def kernel_class(op: Op) -> str:
    """The class of an operation's kernel."""
    if not isinstance(op, Block):
        return OPAQUE
    if products(op):
        return CONVOLUTION if convolution(op) else UNFOLDED if _windows(op) else CONTRACTION
    if routed(op):
        return CONTRACTION
    if (inner := inner_product(op)) is not None:
        return COMPUTED if any(len(arg_positions((f,))) > 1 for f in inner.args) else SCORED if _scored(op) else ATTENTION
    if _weighs(op):
        return ATTENTION
    if selection(op):
        return GATHER
    if exponential(op.monoid):
        return SOFTMAX
    return ROW if op.monoid or op.inner else MAP


def _scored(op: Block) -> bool:
    """Whether the exponents of its weights are computed otherwise than by arithmetic of products, tensors and numbers."""
    calls = (x.fn for x in walk(op.body[0]) if isinstance(x, Call))
    return exponential(op.monoid, sums=2) is not None and not ARITHMETIC.issuperset(calls)


def _windows(op: Block) -> bool:
    """Whether cells of a factor are read several times along an axis: two dimensions that overlap there, one of them reduced.
    Those of a transposed convolution, which every so many places reads anew, are not written out."""
    reduced = {d.name for d in op.reduce if d.size > 1}
    reads = [op.reads[k] for k in sorted(arg_positions(tuple(e for pair in products(op) or () for e in pair)))]
    sliding = (r for r in reads if not any(g.op == "eq" for g in r.when))
    return any(dims_of(e) & reduced and _overlap(e, op.ranges) for r in sliding for e in r.index)


def _overlap(e: Aff, ranges: Mapping[str, int]) -> bool:
    """Whether several points have one value, by the sizes of the terms."""
    box = {n: (0, size - 1) for n, size in ranges.items()}
    reach = 0
    for coef, (lo, hi) in sorted((abs(c), bounds(Aff(((atom, 1),)), box)) for atom, c in e.terms):
        if hi > lo and coef <= reach:
            return True
        reach += coef * int(hi - lo)
    return False


def _weighs(op: Block) -> bool:
    """Whether it sums columns by weights of rows, such as a softmax that multiplies values."""
    return exponential(op.monoid, sums=2) is not None and bool(dims_varied(op, op.body[-1]) - dims_varied(op, op.body[0]))


def sizes(boxes: Boxes) -> np.ndarray:
    """Number of points of each device's box."""
    return np.prod(np.maximum(boxes[..., 1] - boxes[..., 0], 0), axis=-1)


def work(op: Op, block: Boxes) -> np.ndarray:
    """Points of each device's block at which the body is computed: those of its index space, but for a scan one for each
    element that runs (`ir.recognise`), in every segment that the block meets."""
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
        return 2 * sizes(block) // route.over.size, sizes(final) * (1 + count_calls(op.then))
    if isinstance(op, Block) and layered(op):
        return layered_flops(op, block, final)
    heavy, light = flops(op, work(op, block), sizes(final))
    factors = dict.fromkeys(f for pair in products(op) or () for f in pair) if isinstance(op, Block) else {}
    for e, count in ((e, n) for e in factors if (n := count_calls((e,)))):  # computed once for each point that they vary along
        assert isinstance(op, Block)
        along = dims_read(op, e)
        light = light + sizes(block[:, [i for i, d in enumerate(op.space) if d.name in along]]) * count
    return heavy, light


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
    return heavy, light


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
    return _quantities(op, graph, block, final, [(t, boxes, None) for (t, _), boxes in reads.items()])


def _quantities(
    op: Op, graph: Graph, block: Boxes, final: Boxes, reads: Sequence[tuple[str, Boxes, np.ndarray | None]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same; ``reads``: tensors, what is read of them, and which of the boxes count."""
    found: dict[str, np.ndarray] = {}
    picks = kernel_class(op) == GATHER
    for tensor, boxes, counts in reads:
        cells = np.minimum(sizes(boxes), sizes(final)) if picks else sizes(boxes)
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
        return np.zeros_like(read), 10 * np.sum(cells, axis=0), read + written
    return *arithmetic(op, block, final), read + sizes(final) * sum(itemsize(graph.tensors[t].dtype) for t in op.outs)


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
    return _priced(op, graph, quantities(op, graph, block, final, reads), topo)


def seconds_of_all(
    op: Op, graph: Graph, blocks: np.ndarray, finals: np.ndarray, prints: dict[int, np.ndarray], topo: Topology
) -> np.ndarray:
    """``[strategy, device]`` seconds of several strategies at once: ``blocks``, ``finals`` and, by read position, ``prints``
    begin with the strategy."""
    reads, seen, n = list[tuple[str, Boxes, np.ndarray | None]](), dict[str, list[np.ndarray]](), blocks.shape[1]
    for k, boxes in prints.items():
        tensor = op.reads[k].tensor if isinstance(op, Block) else op.ins[k]
        before = seen.setdefault(tensor, [])
        new = None if not before else ~np.any([(b == boxes).all(axis=(1, 2, 3)) for b in before], axis=0)
        before.append(boxes)
        reads.append((tensor, _flat(boxes), None if new is None else np.repeat(new, n)))
    work = _quantities(op, graph, _flat(blocks), _flat(finals), reads)
    each = zip(*(w.reshape(len(blocks), n) for w in work), strict=True)
    if topo.kinds:  # (of a device each)
        return np.stack([_priced(op, graph, w, topo) for w in each])
    return _priced(op, graph, work, topo).reshape(len(blocks), n)


def _flat(boxes: np.ndarray) -> Boxes:
    return boxes.reshape(boxes.shape[0] * boxes.shape[1], *boxes.shape[2:])  # (-1 says nothing where there are no dimensions)


def _priced(op: Op, graph: Graph, work: tuple[np.ndarray, np.ndarray, np.ndarray], topo: Topology) -> np.ndarray:
    """Seconds of what `quantities` says of every device."""
    heavy, light, moved = work
    rates = [rates_of(op, graph, d) for d in topo.kinds or (topo.device,)]
    launch, rate, vector, bandwidth = np.array(rates).T
    power = topo.each(lambda d: d.power)
    if np.all(power == 1):
        return heavy / rate + light / vector + moved / bandwidth + launch
    return norm([heavy / rate, light / vector, moved / bandwidth], power) + launch


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


# What cutting an operation into blocks costs: cells that several blocks read, points beyond an even share, seconds a block.
#
# The blocks of an operation together read at least what the whole reads. What they read more, since footprints overlap (a
# window's halo, a weight that every block needs), and what each launch takes, is the marginal cost of a block; merges of
# partial states come on top.


MOST = 1 << 24  # cells of the grid in which overlaps are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """The blocks of one operation.

    Attributes:
        blocks: different ones; ``copies``: devices that compute each.
        uneven: points of the largest block over the mean, less 1.
        overlap: bytes by tensor that blocks read beyond those that the operation reads once.
        seconds: that one block more takes: all blocks' less that of the whole, over the blocks beyond the first.
    """

    blocks: int
    copies: int
    uneven: float
    overlap: dict[str, int]
    seconds: float


def block_cost(op: Block, graph: Graph, s: Strategy, mesh: Mesh, topo: Topology) -> BlockCost | None:
    """What its cut costs; ``None`` where it is not cut."""
    block = op_boxes(op, s.dims, mesh)
    first = np.sort(np.unique(block.reshape(len(block), -1), axis=0, return_index=True)[1])
    if len(first) == 1:
        return None
    points = sizes(block[first])
    prints = {(t, b.tobytes()): b for _, t, b in footprints(op, graph, s, mesh)}
    overlap: dict[str, int] = {}
    for (t, _), boxes in prints.items():
        mine = boxes[first]
        more = int(sizes(mine).sum()) - _union(mine)
        overlap[t] = overlap.get(t, 0) + more * itemsize(graph.tensors[t].dtype)
    whole = Strategy(tuple(None for _ in mesh), tuple(None for _ in mesh))
    one = _seconds(op, graph, whole, mesh, topo)[0]
    each = _seconds(op, graph, s, mesh, topo)[first]
    return BlockCost(
        blocks=len(first), copies=len(block) // len(first), uneven=float(points.max() / points.mean() - 1),
        overlap={t: n for t, n in overlap.items() if n}, seconds=float((each.sum() - one) / (len(first) - 1)),
    )  # fmt: skip


def _seconds(op: Block, graph: Graph, s: Strategy, mesh: Mesh, topo: Topology) -> np.ndarray:
    block, final = op_boxes(op, s.dims, mesh), tensor_boxes(tuple(d.size for d in op.dims), s.out, mesh)
    reads = {(t, b.tobytes()): b for _, t, b in footprints(op, graph, s, mesh)}
    return seconds_each(op, graph, block, final, reads, topo)


def _union(boxes: Boxes) -> int:
    """Cells in at least one of some boxes; in a grid too fine to count in, as if none overlapped."""
    some = np.unique(boxes[sizes(boxes) > 0], axis=0)
    if not len(some):
        return 0
    edges = [np.unique(some[:, a]) for a in range(some.shape[1])]
    if np.prod([float(max(1, len(e) - 1)) for e in edges]) * len(some) > MOST:
        return int(sizes(some).sum())
    seen = np.zeros([len(e) - 1 for e in edges], bool)
    for box in some:
        places = zip(edges, box, strict=True)
        seen[tuple(slice(*np.searchsorted(e, (lo, hi))) for e, (lo, hi) in places)] = True
    for e in reversed(edges):
        seen = seen @ np.diff(e)
    return int(seen)


# Overlaps of footprints with layouts, without anything per pair of devices.
#
# A box is a product over tensor axes, and the cut of a tensor axis depends only on the coordinates along the mesh axes that cut
# it; a receiver's senders are all choices of those coordinates. So what a receiver takes from all senders that agree with it on
# some mesh axes is a product over tensor axes of sums over one axis' parts, and such sums are differences of prefix sums.


Axes = tuple[int, ...]  # mesh axes, the slowest first


@dataclass(slots=True)
class Senders:
    """What each receiver takes from each of some layouts, by whom it takes it from."""

    size: np.ndarray  # [footprints, devices] of cells
    axes: list[Along]
    held: list[tuple[Layout, Boxes]]
    known: dict[Axes, np.ndarray] = field(default_factory=dict[Axes, np.ndarray])

    @property
    def everywhere(self) -> Axes:
        """All mesh axes: only the device itself agrees on them."""
        return tuple(range(len(self.held[0][0])))

    def cells(self, same: Axes) -> np.ndarray:
        """[layouts, footprints, devices] of cells from senders, the device itself included, whose coordinates along some mesh
        axes are the device's."""
        if same not in self.known:
            self.known[same] = self._product(same, 0)
        return self.known[same]

    def number(self, same: Axes) -> np.ndarray:
        """[layouts, footprints, devices] of these senders."""
        return self.cells(same) > 0 if same == self.everywhere else self._product(same, 1)

    def _product(self, same: Axes, which: int) -> np.ndarray:
        out = np.ones((len(self.held), *self.size.shape), np.int64)
        for along in self.axes:
            out *= along.of(self.held, same, which)
        return out


@dataclass(slots=True)
class Along:
    """Footprints along one tensor axis."""

    want: np.ndarray  # [footprints, devices, 2]
    axis: int
    mesh: Mesh
    which: np.ndarray = field(init=False)
    coords: np.ndarray = field(init=False)
    parts: dict[Axes, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(init=False)
    known: dict[tuple[Axes, Axes], tuple[np.ndarray, np.ndarray]] = field(init=False)

    def __post_init__(self) -> None:
        rows: dict[bytes, int] = {}
        self.which = np.array([rows.setdefault(row.tobytes(), len(rows)) for row in self.want])
        self.want = self.want[np.unique(self.which, return_index=True)[1]]
        self.coords = np.array(coordinates(self.mesh), np.int64).reshape(-1, len(self.mesh)).T
        self.parts, self.known = {}, {}

    def of(self, held: list[tuple[Layout, Boxes]], same: Axes, which: int) -> np.ndarray:
        """[layouts, footprints, devices]: cells in (0), or number of (1), the parts that a footprint meets among those whose
        coordinates along some mesh axes are the device's."""
        cuts: dict[Axes, int] = {}
        tables: list[np.ndarray] = []
        rows: list[int] = []
        for layout, boxes in held:
            cut = tuple(a for a, t in enumerate(layout) if t == self.axis)
            if cut not in cuts:
                cuts[cut] = len(tables)
                tables.append(self._met(cut, tuple(a for a in cut if a in same), boxes)[which])
            rows.append(cuts[cut])
        at = np.array(rows)[:, None] * len(self.want) + self.which
        return np.concatenate(tables).take(at, axis=0)

    def _met(self, cut: Axes, same: Axes, boxes: Boxes) -> tuple[np.ndarray, np.ndarray]:
        if (cut, same) not in self.known:
            if cut not in self.parts:
                self.parts[cut] = self._parts(cut, boxes)
            part, lo, hi = self.parts[cut]
            if cut == same:
                cells = np.minimum(self.want[..., 1], hi[part]) - np.maximum(self.want[..., 0], lo[part])
                self.known[cut, same] = np.maximum(cells, 0), (cells > 0).astype(np.int64)
            else:
                digits = np.unravel_index(np.arange(len(lo)), [self.mesh[a].size for a in cut])
                group = self._number(same, [digits[cut.index(a)] for a in same], len(lo))
                mine = self._number(same, [self.coords[a] for a in same], len(part))
                self.known[cut, same] = _parts_met(self.want, lo, hi, group, mine)
        return self.known[cut, same]

    def _parts(self, cut: Axes, boxes: Boxes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each device's part of the tensor axis, and the parts' bounds; devices that hold nothing say nothing of them."""
        part = self._number(cut, [self.coords[a] for a in cut], len(boxes))
        lo, hi = np.zeros((2, prod(self.mesh[a].size for a in cut)), np.int64)
        there = np.all(boxes[..., 1] > boxes[..., 0], axis=-1)
        lo[part[there]], hi[part[there]] = boxes[there, self.axis, 0], boxes[there, self.axis, 1]
        return part, lo, hi

    def by_sender(self, cut: Axes, axes: Axes) -> np.ndarray:
        """[distinct footprints, devices, coordinates] of cells in the parts at each coordinate along some axes of a cut."""
        part, lo, hi = self.parts[cut]
        digits = np.unravel_index(np.arange(len(lo)), [self.mesh[a].size for a in cut])
        group = self._number(axes, [digits[cut.index(a)] for a in axes], len(lo))
        count = prod(self.mesh[a].size for a in axes)
        if axes == cut:
            met = np.minimum(self.want[..., None, 1], hi) - np.maximum(self.want[..., None, 0], lo)
            return np.maximum(met, 0)
        return np.stack([_parts_met(self.want, lo, hi, group, np.full(len(part), g))[0] for g in range(count)], axis=-1)

    def _number(self, axes: Axes, digits: list[np.ndarray], length: int) -> np.ndarray:
        out = np.zeros(length, np.int64)
        for a, d in zip(axes, digits, strict=True):
            out = out * self.mesh[a].size + d
        return out


def _parts_met(
    want: np.ndarray, lo: np.ndarray, hi: np.ndarray, group: np.ndarray, mine: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(cells in, number of) the disjoint parts ``[lo, hi)`` that each interval meets, among those of the device's group."""
    some = np.flatnonzero(hi > lo)
    some = some[np.lexsort((lo[some], group[some]))]
    lo, hi, group = lo[some], hi[some], group[some]
    span = int(max(hi.max(initial=0), want.max(initial=0))) + 1  # so that groups do not mix in one sorted list
    starts, ends = group * span + lo, group * span + hi
    upto = np.concatenate([[0], np.cumsum(hi - lo)])
    first = np.searchsorted(group, mine)
    offset = mine * span

    def below(x: np.ndarray) -> np.ndarray:
        n = np.searchsorted(starts, offset + x, "right")
        last = np.where(n > first, hi[n - 1] - x, 0) if len(hi) else np.zeros_like(x)
        return upto[n] - np.maximum(last, 0)

    number = np.searchsorted(starts, offset + want[..., 1], "left") - np.searchsorted(ends, offset + want[..., 0], "right")
    empty = want[..., 1] <= want[..., 0]
    cells = below(want[..., 1]) - below(want[..., 0])
    return np.where(empty, 0, cells), np.where(empty, 0, number)


# A lower bound of what every plan of every rewritten graph costs: what its operations must do at least, evenly shared.
#
# Splits in time and recomputation compute each point of the graph at least once, write each cell and read each cell that is
# needed at least once; a cost is additive in all three, or a norm of them (the parts' norms are no less than that of their
# sum). Some device does at least its share of each operation, no device is faster than the best of them in anything, and each
# operation is launched. Loads, transfers and what is done twice only add. (The bound of the plans in space is not one of
# these: parts may be spread more evenly than the whole, and their footprints leave out gaps that the whole's includes.)


def least_seconds(graph: Graph, topo: Topology, *, everywhere: bool = True) -> float:
    """Seconds that no plan of the graph, and of no graph that splits in time make of it, can be under.

    Args:
        everywhere: whether each device launches each operation; else some device does, as with pipeline stages.
    """
    n, kinds = device_count(topo.mesh), topo.kinds or (topo.device,)
    total, power = 0.0, np.max(topo.each(lambda d: d.power))
    for op in graph.ops:
        whole = np.array([[(0, d.size) for d in op.space]], np.int64).reshape(1, len(op.space), 2)
        heavy, light = arithmetic(op, whole, whole[:, : len(op.dims)])
        final = prod(d.size for d in op.dims)
        moved = final * sum(itemsize(graph.tensors[t].dtype) for t in op.outs) + _read_bytes(op, graph, final)
        launch, *best = zip(*(rates_of(op, graph, d) for d in kinds), strict=True)
        work = (float(heavy[0]), float(light[0]), moved)
        each = [np.array(w / max(k)) for w, k in zip(work, best, strict=True)]
        total += min(launch) / (1 if everywhere else n) + float(norm(each, power)) / n
    return total


def _read_bytes(op: Op, graph: Graph, final: int) -> int:
    if not isinstance(op, Block):
        return sum(graph.tensors[t].nbytes for t in op.inputs)
    most: dict[str, int] = {}
    for r in op.reads:
        cells = least_cells(op, r, graph.tensors[r.tensor].shape)
        cells = min(cells, final) if selection(op) else cells
        most[r.tensor] = max(most.get(r.tensor, 0), cells * itemsize(graph.tensors[r.tensor].dtype))
    return sum(most.values())


def least_cells(op: Block, read: Read, shape: tuple[int, ...], sizes: Mapping[str, int] | None = None) -> int:
    """Cells that a read surely touches: a product over axes that share no dimension; ``sizes``: in any part of the operation of
    so many points along each dimension.

    An affine index takes at least ``1 + Σ (size - 1)`` values (a sum of sets of integers); those outside are subtracted.
    Axes with a floor, a mod or a dimension of an earlier axis count one, reads under guards nothing.
    """
    if read.when:
        return 0
    cells, used, along = 1, set[str](), sizes or op.ranges
    for e, n in zip(read.index, shape, strict=True):
        if not e.is_affine or used & dims_of(e):
            continue
        lo, hi = bounds(e, {x.name: (0, x.size - 1) for x in op.space})
        values = 1 + sum(along[str(a)] - 1 for a, _ in e.terms)
        cells *= max(0, min(values, n) - max(0, -int(lo)) - max(0, int(hi) - n + 1))
        used |= dims_of(e)
    return cells
