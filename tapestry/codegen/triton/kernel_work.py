"""What a kernel must do at least: FLOPs, on matrix units and elsewhere, bytes from exact footprints, and the roofline time."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from tapestry.codegen.blocks.forms import KernelForm, row_dims
from tapestry.codegen.blocks.lowered import points
from tapestry.codegen.triton.task.chips import Chip
from tapestry.ir.expr import count_calls
from tapestry.ir.graph import Block, Graph, Read
from tapestry.ir.index import Aff, bounds, dims_of, evaluate
from tapestry.ir.kernel import Box, Kernel, size
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.types import itemsize

# Seconds from a load to its value, past both caches: 479 cycles at 1.755 GHz (Luo et al. 2024, "Benchmarking and Dissecting the
# Nvidia Hopper GPU Architecture via Microbenchmarking"); of an idle memory, so that more must be under way in truth
LATENCY = 2.7e-7
_MOST = 1 << 20  # points of one axis's dimensions that are enumerated; beyond, the axis counts whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of one launch of a kernel.

    Attributes:
        matrix_flops: two for each point of a contraction.
        other_flops: primitive applications besides.
        reads, writes: bytes of memory that must be touched once.
    """

    matrix_flops: int
    other_flops: int
    reads: int
    writes: int

    @property
    def flops(self) -> int:
        """All of them."""
        return self.matrix_flops + self.other_flops

    @property
    def bytes(self) -> int:
        """Read and written."""
        return self.reads + self.writes


def work_of(graph: Graph, kernel: Kernel, op: KernelForm) -> Work:
    """FLOPs and bytes of a kernel over its block."""
    matrix, other = _flops(op)
    return Work(matrix_flops=matrix, other_flops=other, reads=_read_bytes(graph, kernel, op), writes=_written_bytes(kernel, op))


def roofline(work: Work, op: KernelForm, chip: Chip, waves: float = 1.0) -> float:
    """Seconds that the chip needs at least: memory, matrix units and the other units side by side, each at the rate that
    the planner has of it.

    Args:
        waves: how much longer the units take because the last of them wait for nobody else's programs.
    """
    shares = [(op.product.operand if op.product is not None else "f32", 1)]
    if (s := op.streamed) is not None:  # two products, by the FLOPs of each
        shares = [(s.operand, points(s.depth)), (s.weighted, points(s.columns))]
    matrix = sum(n / chip.rate(operand, op.precision) for operand, n in shares) / sum(n for _, n in shares)
    units = max(work.matrix_flops * matrix, work.other_flops / chip.card.vector)
    return max(work.bytes / chip.bandwidth, units * waves)


def predicted(work: Work, op: KernelForm, chip: Chip, programs: int, in_flight: int) -> float:
    """The roofline with whole waves of programs, and with the bandwidth that so many bytes under way sustain.

    Bytes per second are bytes under way over latency (Little 1961); 0 bytes: nothing is known of them.
    """
    waves = -(-programs // chip.units) * chip.units / max(1, programs)
    return max(roofline(work, op, chip, waves), work.bytes * LATENCY / in_flight if in_flight else 0.0)


def _flops(op: KernelForm) -> tuple[int, int]:
    task = op.task
    after = points(task.dims) * count_calls(task.then)
    inside = points(task.dims + task.reduce)
    if op.streamed is not None:
        s = op.streamed
        scores = points(s.batch) * points(s.rows) * s.key.size
        return scores * 2 * (points(s.depth) + points(s.columns)), after + scores * (count_calls(task.body[:1]) + 4)
    if op.folded is not None:
        body, c = task.body[:-1] if op.folded.row else task.body, op.folded.product
        merge = MONOIDS[task.monoid or ""].combiner(tuple(e.dtype for e in task.body))[: len(body)]
        inside = points((*c.batch, *c.m, *c.n, *op.folded.outer))
        return 2 * inside * points(task.inner_dims), after + inside * (count_calls(body) + max(1, count_calls(merge) // 2))
    if op.product is not None:
        sums = len(task.body)
        return 2 * inside * sums, after + inside * (count_calls(task.body) - sums)
    if op.kind == "gather":
        return 0, after
    nested = sum(inside * points(s.dims) * (count_calls((s.body,)) + 1) for s in task.inner)
    if task.monoid is None or task.mode == "finish":
        return 0, after + nested + inside * count_calls(task.body)
    if op.kind == "rows" or op.kind == "reduce":
        found = row_dims(task)
        inside = points((found[0] if found else task.dims) + task.reduce)
    merge = MONOIDS[task.monoid].combiner(tuple(e.dtype for e in task.body))
    return 0, after + nested + inside * (count_calls(task.body) + max(1, count_calls(merge) // 2))


def _written_bytes(kernel: Kernel, op: KernelForm) -> int:
    return sum(size(box) * itemsize(a.dtype) for box, a in zip(kernel.outs, op.task.outs, strict=True))


def _read_bytes(graph: Graph, kernel: Kernel, op: KernelForm) -> int:
    """Cells of each tensor that some point of the block reads, each once, and the states of ``finish``."""
    found = graph.ops[kernel.op]
    assert isinstance(found, Block)
    space = found.dims if kernel.mode == "finish" else found.space
    block = {d.name: b for d, b in zip(space, kernel.block, strict=True)}
    held: dict[str, dict[tuple[tuple[int, int, int], ...], int]] = {}
    widths: dict[str, int] = {}
    for p in op.task.reads:
        box = kernel.ins[p]
        assert box is not None
        read = found.reads[p]
        axes, cells = _cells(read, box, block)
        if op.picked is not None and any(op.picked.over.name in dims_of(e) for e in read.index):
            cells = min(cells, points(op.task.dims))  # what is picked
        held.setdefault(read.tensor, {})[axes] = cells
        widths[read.tensor] = max(widths.get(read.tensor, 0), size(box))
    total = sum(min(sum(f.values()), widths[t]) * itemsize(graph.tensors[t].dtype) for t, f in held.items())
    states = sum(points(op.task.dims) * itemsize(a.dtype) for a in op.task.states)
    return total + states


def _cells(read: Read, box: Box, block: dict[str, tuple[int, int]]) -> tuple[tuple[tuple[int, int, int], ...], int]:
    """(least, greatest and number of places along each axis), and the number of cells that a read touches.

    Exact where the axes share no dimension; where they do, the lesser of the places' product and the points.
    """
    axes = tuple(_place_bounds(e, b, block) for e, b in zip(read.index, box, strict=True))
    shared: set[str] = set()
    seen: set[str] = set()
    for e in read.index:
        shared |= seen & dims_of(e)
        seen |= dims_of(e)
    whole = prod(n for _, _, n in axes)
    return axes, min(whole, prod(hi - lo for d, (lo, hi) in block.items() if d in seen)) if shared else whole


def _place_bounds(e: Aff, box: tuple[int, int], block: dict[str, tuple[int, int]]) -> tuple[int, int, int]:
    """Least and greatest place of an index expression over the block, inside the box, and how many there are."""
    names = sorted(dims_of(e))
    lo, hi = bounds(e, {d: (block[d][0], block[d][1] - 1) for d in names})
    lo, hi = max(int(lo), box[0]), min(int(hi), box[1] - 1)
    extents = [block[d][1] - block[d][0] for d in names]
    if hi < lo or not prod(extents):
        return 0, 0, 0
    coefs = [abs(c) for _, c in e.terms]
    if e.is_affine and (not coefs or min(coefs) == 1) and _dense(e, dict(zip(names, extents, strict=True))):
        return lo, hi, hi - lo + 1
    if prod(extents) > _MOST:
        return lo, hi, min(hi - lo + 1, prod(extents))
    grids = np.meshgrid(*(np.arange(*block[d]) for d in names), indexing="ij")
    values = np.unique(np.asarray(evaluate(e, dict(zip(names, grids, strict=True)))))
    return lo, hi, int(((values >= lo) & (values <= hi)).sum())


def _dense(e: Aff, extents: dict[str, int]) -> bool:
    """Whether an affine expression reaches every integer between its ends: each step is no longer than what is below it."""
    reach = 0
    for name, c in sorted(((str(a), abs(c)) for a, c in e.terms), key=lambda t: t[1]):
        if c > reach + 1:
            return False
        reach += c * (extents[name] - 1)
    return True
