"""Layer normalisation by torch's own operator: moments of a row, and the row scaled by them, in one operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tapestry.codegen.torch_cpu.base.point_values import Run, held
from tapestry.codegen.torch_cpu.base.strided_reads import Tensor
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, arg_positions
from tapestry.ir.graph import Block
from tapestry.ir.index import dim, substitute
from tapestry.ir.kernel import Kernel, shape, whole
from tapestry.ir.monoid import MONOIDS, Moments
from tapestry.ir.recognise.contraction import only_sums
from tapestry.ir.state import varies


def layer_norm(op: Block, kernel: Kernel) -> Run | None:
    """``(x - mean) / sqrt(M2 / n + eps) * scale + shift`` over the last dimension, on blocks of whole rows."""
    moments = op.monoid is not None and isinstance(MONOIDS[op.monoid].structure, Moments)
    if not moments or len(op.reduce) != 1 or len(op.then) != 1 or op.inner or not op.dims:
        return None
    n, x, m2 = op.body
    if not isinstance(x, Arg) or x.dtype != "f32" or (n, m2) != (Const(1.0, "f32"), Const(0.0, "f32")):
        return None
    found = _parts(op.then[0])
    last, row = op.dims[-1], op.reduce[0]
    if found is None or last.size != row.size or kernel.block[-2:] != ((0, row.size), (0, row.size)) or not row.size:
        return None
    value, scale, shift, eps = found
    r, v = op.reads[x.pos], op.reads[value]
    names = [d.name for d in op.dims]
    moved = tuple(substitute(e, {row.name: dim(last.name)}) for e in r.index)
    if replace(r, index=moved) != v or r.when or r.other is not None or [str(e) for e in v.index] != names:
        return None
    for k in (scale, shift):
        q = op.reads[k]
        if [str(e) for e in q.index] != [last.name] or q.when or q.other is not None or kernel.ins[k] != whole((row.size,)):
            return None
    box = kernel.ins[value]
    if box is None or box != kernel.ins[x.pos]:
        return None
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


def _parts(e: Expr) -> tuple[int, int, int, float] | None:
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
