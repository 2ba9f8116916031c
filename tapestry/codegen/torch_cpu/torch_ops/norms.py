"""Layer normalisation by torch's own operator: moments of a row, and the row scaled by them, in one operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tapestry.codegen.torch_cpu.base import scalars, state_merges
from tapestry.codegen.torch_cpu.base.point_values import Run, held
from tapestry.codegen.torch_cpu.base.strided_reads import Frame
from tapestry.codegen.torch_cpu.base.torch_api import tensor_of
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, arg_positions
from tapestry.ir.graph import Block, Dim
from tapestry.ir.index import dim, substitute
from tapestry.ir.kernel import Box, Kernel, shape, whole
from tapestry.ir.monoid import MONOIDS, Moments
from tapestry.ir.recognition.contraction import only_sums
from tapestry.ir.recognition.running_state import Scan, unguarded
from tapestry.ir.recognition.state import varies
from tapestry.rewrites.core.edit import reindex


def layer_norm(op: Block, kernel: Kernel) -> Run | Refusal:
    """``(x - mean) / sqrt(M2 / n + eps) * scale + shift`` over the last dimension, on blocks of whole rows."""
    moments = op.monoid is not None and isinstance(MONOIDS[op.monoid].structure, Moments)
    if not moments or len(op.reduce) != 1 or len(op.then) != 1 or op.inner or not op.dims:
        return Refusal("no mean and variance of a row are taken")
    n, x, m2 = op.body
    if not isinstance(x, Arg) or x.dtype != "f32" or (n, m2) != (Const(1.0, "f32"), Const(0.0, "f32")):
        return Refusal("the moments are not of a row of f32 as it is")
    found = _normalised_row(op.then[0])
    last, row = op.dims[-1], op.reduce[0]
    if found is None or last.size != row.size or kernel.block[-2:] != ((0, row.size), (0, row.size)) or not row.size:
        return Refusal("what follows is not (x - mean) / sqrt(variance + eps) * scale + shift on whole rows")
    value, scale, shift, eps = found
    r, v = op.reads[x.pos], op.reads[value]
    names = [d.name for d in op.dims]
    moved = tuple(substitute(e, {row.name: dim(last.name)}) for e in r.index)
    if replace(r, index=moved) != v or r.when or r.other is not None or [str(e) for e in v.index] != names:
        return Refusal("moments and result are not of the same rows, read as they lie")
    for k in (scale, shift):
        q = op.reads[k]
        if [str(e) for e in q.index] != [last.name] or q.when or q.other is not None or kernel.ins[k] != whole((row.size,)):
            return Refusal("scale or shift is no vector along the row")
    box = kernel.ins[value]
    if box is None or box != kernel.ins[x.pos]:
        return Refusal("moments and result are of other parts of the rows")
    take = tuple(slice(lo - b[0], hi - b[0]) for (lo, hi), b in zip(kernel.block, box, strict=False))
    wanted, width = shape(kernel.block[: len(op.dims)]), [row.size]

    def run(ins: Sequence[Tensor | None], _: Sequence[Tensor]) -> list[Tensor]:
        rows = held(ins[value])[take].contiguous()
        return [_normalised(rows, width, held(ins[scale]), held(ins[shift]), eps).reshape(wanted)]

    return run


def _normalised(rows: Tensor, width: Sequence[int], scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """torch's operator, and in double precision where it makes a NaN, as it does of numbers whose squares overflow."""
    out = torch.layer_norm(rows, width, scale, shift, eps)
    if out.sum().isnan():
        out = torch.layer_norm(rows.double(), width, scale.double(), shift.double(), eps).to(rows.dtype)
    return out


def _normalised_row(e: Expr) -> tuple[int, int, int, float] | None:
    """(the row's read, the scale's, the shift's, epsilon) of a normalised row."""
    outer = _split(e, "add", lambda x: isinstance(x, Arg))
    scaled = _split(outer[1], "mul", lambda x: isinstance(x, Arg)) if outer else None
    core = _split(scaled[1], "mul", lambda x: isinstance(x, Call) and x.fn == "sub") if scaled else None
    if outer is None or scaled is None or core is None:
        return None
    shift, scale, (centred, inverse) = outer[0], scaled[0], core
    eps = _epsilon(inverse)
    assert isinstance(centred, Call) and isinstance(shift, Arg) and isinstance(scale, Arg)
    value, mean = centred.args
    if not isinstance(value, Arg) or mean != Acc(1, "f32") or eps is None:
        return None
    return value.pos, scale.pos, shift.pos, eps


def by_rows(op: Block) -> bool:
    """Whether rows of one tensor are summed, and then every cell of a row follows from that, as in norms."""
    sums = only_sums(op.monoid) or (op.monoid is not None and isinstance(MONOIDS[op.monoid].structure, Moments))
    if not sums or op.inner or len({op.reads[k].tensor for k in arg_positions(op.body)}) != 1:
        return False
    shared = [d for k, d in enumerate(op.dims) if d.size > 1 and not any(field[k] for field in varies(op))]
    return bool(shared)


def _split(e: Expr, fn: str, first: Callable[[Expr], bool]) -> tuple[Expr, Expr] | None:
    """The two operands of a commutative call, that of a kind first."""
    if not isinstance(e, Call) or e.fn != fn:
        return None
    return next(((a, b) for a, b in (e.args, e.args[::-1]) if first(a)), None)


def _epsilon(e: Expr) -> float | None:
    """eps in ``1 / sqrt(M2 / n + eps)``."""
    if not (isinstance(e, Call) and e.fn == "div" and e.args[0] == Const(1.0, "f32")):
        return None
    root = e.args[1]
    inner = (
        _split(root.args[0], "add", lambda x: isinstance(x, Const)) if isinstance(root, Call) and root.fn == "sqrt" else None
    )
    if inner is None or inner[1] != Call("div", (Acc(2, "f32"), Acc(0, "f32")), "f32"):
        return None
    return float(inner[0].value) if isinstance(inner[0], Const) else None


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
