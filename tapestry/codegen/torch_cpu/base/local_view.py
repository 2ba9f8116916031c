"""An operation as one block sees it: dimensions of one point and axes read at one place are gone, floors and mods are plain.

A convolution over overlapping blocks (`overlap_halo`) names the block by an axis of its own; on the device that has one
block it is a plain convolution again, and is run as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tapestry.codegen.torch_cpu.base.strided_reads import Frame
from tapestry.ir.graph import Block, Dim, Graph, Guard, Read
from tapestry.ir.index import Aff, Floor, bounds, const, dims_of, substitute
from tapestry.ir.kernel import Box, Kernel


@dataclass(frozen=True, slots=True)
class Held:
    """A read's tensor as the block sees it: the buffer's part, the box that the part holds, and the extents of the whole."""

    take: tuple[slice | int, ...]
    box: Box
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Local:
    """The operation over the dimensions that are left, its frame, and what became of each read."""

    op: Block
    frame: Frame
    held: dict[int, Held]


def localise(op: Block, graph: Graph, kernel: Kernel) -> Local:
    """The block's own view; reads that cannot be told so simply keep their guards."""
    at = {d.name: b for d, b in zip(op.space, kernel.block, strict=True)}
    single = {d.name for d in op.dims if at[d.name][1] - at[d.name][0] == 1 and _named_in_floor(op, d)}
    env = {n: const(at[n][0]) for n in single}
    held: dict[int, Held] = {}
    reads: list[Read] = []
    for k, r in enumerate(op.reads):
        box = kernel.ins[k]
        if k not in op.body_reads() or box is None:
            reads.append(r)
            continue
        new, held[k] = _read(r, env, at, box, graph.tensors[r.tensor].shape)
        reads.append(new)
    dims = tuple(d for d in op.dims if d.name not in single)
    kept = tuple(at[d.name] for d in (*dims, *op.reduce))
    return Local(replace(op, dims=dims, reads=tuple(reads)), Frame(dims + op.reduce, kept), held)


def _named_in_floor(op: Block, d: Dim) -> bool:
    """Whether a dimension of one point is a block's number: some read adds it to another dimension of the operation."""
    mixed = (e for r in op.reads for e in r.index if d.name in dims_of(e))
    return d.size > 1 and any(len(dims_of(e) - {x.name for x in op.reduce}) > 1 for e in mixed)


def _read(
    read: Read, env: dict[str, Aff], at: dict[str, tuple[int, int]], box: Box, shape: tuple[int, ...]
) -> tuple[Read, Held]:
    index = [_without_periods(substitute(e, env), at) for e in read.index]
    guards = [replace(g, aff=_without_periods(substitute(g.aff, env), at)) for g in read.when]
    inclusive = {n: (lo, hi - 1) for n, (lo, hi) in at.items()}
    guards = [g for g in guards if not always(g, inclusive)]
    take: list[slice | int] = []
    kept: list[tuple[Aff, tuple[int, int], int]] = []
    for old, e, (lo, hi), n in zip(read.index, index, box, shape, strict=True):
        if old.terms and not e.terms and lo <= e.const < hi and n > 1:
            take.append(e.const - lo)
            continue
        first, last = 0, n
        for g in list(guards):  # a guard on the place along this axis: the axis ends there
            low, high = g.aff - e, g.aff + e
            if g.op == "ge" and not low.terms:
                first = max(first, -low.const)
            elif g.op == "ge" and not high.terms:
                last = min(last, high.const + 1)
            else:
                continue
            guards.remove(g)
        inner = (max(lo, first), max(min(hi, last), max(lo, first)))
        take.append(slice(inner[0] - lo, inner[1] - lo))
        kept.append((e - first, (inner[0] - first, inner[1] - first), max(last - first, 0)))
    new = replace(read, index=tuple(e for e, _, _ in kept), when=tuple(guards))
    return new, Held(tuple(take), tuple(b for _, b, _ in kept), tuple(n for _, _, n in kept))


def _without_periods(e: Aff, at: dict[str, tuple[int, int]]) -> Aff:
    """The expression without the floors and mods that stay within one period on the block."""
    box = {n: (lo, hi - 1) for n, (lo, hi) in at.items()}
    out = const(e.const)
    for atom, c in e.terms:
        if isinstance(atom, str):
            out = out + Aff(((atom, c),))
            continue
        lo, hi = bounds(atom.arg, box)
        if lo // atom.div != hi // atom.div:
            return e
        floor = int(lo // atom.div)
        out = out + (const(floor * c) if isinstance(atom, Floor) else (_without_periods(atom.arg, at) - floor * atom.div) * c)
    return out


def always(g: Guard, intervals: Mapping[str, tuple[int, int]]) -> bool:
    """Whether a guard holds everywhere in some inclusive intervals."""
    lo, hi = bounds(g.aff, intervals)
    return bool(lo >= 0 if g.op == "ge" else lo == hi == 0)
