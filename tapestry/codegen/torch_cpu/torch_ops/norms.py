"""Which operations are norms of rows; and running states, by torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tapestry.codegen.torch_cpu.base import scalars, state_merges
from tapestry.codegen.torch_cpu.base.strided_reads import Frame
from tapestry.codegen.torch_cpu.base.torch_api import tensor_of
from tapestry.ir.expr import arg_positions
from tapestry.ir.graph import Block, Dim
from tapestry.ir.index import dim
from tapestry.ir.kernel import Box
from tapestry.ir.monoid import MONOIDS, Moments
from tapestry.ir.recognition.contraction import only_sums
from tapestry.ir.recognition.running_state import Scan, unguarded
from tapestry.ir.recognition.state import varies
from tapestry.rewrites.core.edit import reindex


def by_rows(op: Block) -> bool:
    """Whether rows of one tensor are summed, and then every cell of a row follows from that, as in norms."""
    sums = only_sums(op.monoid) or (op.monoid is not None and isinstance(MONOIDS[op.monoid].structure, Moments))
    if not sums or op.inner or len({op.reads[k].tensor for k in arg_positions(op.body)}) != 1:
        return False
    shared = [d for k, d in enumerate(op.dims) if d.size > 1 and not any(field[k] for field in varies(op))]
    return bool(shared)


# Running states (`ir.recognition`) in linear time: one prefix along the scanned axis, read at every place.


_DENSE: dict[str, Callable[..., Tensor]] = {"sum": torch.cumsum, "prod": torch.cumprod}


@dataclass(frozen=True, slots=True)
class Runs:
    """What is merged, as an operation over segments in place of the scanned dimension, and where every state is taken.

    Attributes:
        op: its body over ``frame``: the other map dimensions, the segments that the block meets, and the reduced one.
        segment: for each place of the block along the scanned dimension, its segment (from the first one met).
        taken: how many elements of the segment's block, in order of merging, the state at that place has merged.
    """

    op: Block
    frame: Frame
    segment: Tensor
    taken: Tensor


def runs(op: Block, scan: Scan, block: Box) -> Runs:
    """The prefixes that a block needs."""
    at = {d.name: b for d, b in zip(op.space, block, strict=True)}
    (i0, i1), (j0, j1), q = at[scan.dim], at[scan.over], scan.segment
    first, last = i0 // q, (max(i1, i0 + 1) - 1) // q
    axis = next(k for k, d in enumerate(op.dims) if d.name == scan.dim)
    segments = Dim(scan.dim, -(-op.dims[axis].size // q))
    dims = (*op.dims[:axis], segments, *op.dims[axis + 1 :])
    body = reindex(unguarded(op, scan), {scan.dim: dim(scan.dim) * q}, dims + op.reduce)
    box = (*block[:axis], (first, last + 1), *block[axis + 1 :])
    places = np.arange(i0, i1)
    inner = places % q
    taken = inner - scan.shift + 1 - j0 if scan.sign > 0 else j1 - (inner + scan.shift)
    return Runs(
        Block(outs=op.outs, dims=dims, reduce=op.reduce, monoid=op.monoid, reads=body.reads, body=body.body),
        Frame(dims + op.reduce, box),
        tensor_of(places // q - first),
        tensor_of(np.clip(taken, 0, j1 - j0)),
    )


def scan_states(op: Block, scan: Scan, found: Runs, fields: list[Tensor]) -> list[Tensor]:
    """The state at every point of the block, from the values merged over ``found.frame``."""
    assert op.monoid
    axis = next(k for k, d in enumerate(op.dims) if d.name == scan.dim)
    flat = [f.movedim(axis, -2) for f in fields]  # [other map dimensions, segment, reduced]
    if scan.sign < 0:
        flat = [f.flip(-1) for f in flat]
    running = prefixes(op.monoid, flat, reverse=scan.sign < 0)
    zero = MONOIDS[op.monoid].zero(tuple(e.dtype for e in op.body))
    out: list[Tensor] = []
    for f, z in zip(running, zero, strict=True):
        start = torch.full((*f.shape[:-1], 1), z.value, dtype=f.dtype)
        padded = torch.cat([start, f], dim=-1)
        out.append(padded[..., found.segment, found.taken].movedim(-1, axis))
    return out


def prefixes(monoid: str, fields: list[Tensor], *, reverse: bool = False) -> list[Tensor]:
    """The states after 1, 2, … elements of the last axis.

    Any associative monoid: neighbours merge, the pairs are scanned, and the places between take one more merge, which is
    linear work (Ladner and Fischer 1980). With ``reverse`` the elements come last first, each standing left of those before it.
    """
    n = fields[0].shape[-1]
    dense = None if fields[0].dtype in scalars.UNSIGNED else _DENSE.get(monoid)
    if dense:
        return [dense(fields[0], dim=-1, dtype=fields[0].dtype)]
    if n <= 1:
        return fields
    dtypes = tuple(scalars.NAMES[f.dtype] for f in fields)

    def merge(before: list[Tensor], after: list[Tensor]) -> list[Tensor]:
        return state_merges.combine(monoid, *((after, before) if reverse else (before, after)), dtypes)

    even = n - n % 2
    pairs = merge([f[..., 0:even:2] for f in fields], [f[..., 1:even:2] for f in fields])
    odd = prefixes(monoid, pairs, reverse=reverse)
    between = merge([p[..., : (n - 1) // 2] for p in odd], [f[..., 2::2] for f in fields]) if n > 2 else []
    out = [torch.empty_like(f, memory_format=torch.contiguous_format) for f in fields]
    for k, o in enumerate(out):
        o[..., 0] = fields[k][..., 0]
        o[..., 1::2] = odd[k]
        if between:
            o[..., 2::2] = between[k]
    return out
