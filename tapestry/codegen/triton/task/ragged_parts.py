"""A reduced dimension in parts of equal size, but for the last one, which may have fewer points."""

from __future__ import annotations

from tapestry.codegen.triton.task.kernel_form import KernelForm
from tapestry.codegen.triton.task.primitives import HALVES
from tapestry.codegen.triton.task.tiles import bare_read, centred
from tapestry.ir.expr import Expr
from tapestry.ir.monoid import MONOIDS

_GRAIN, _LARGE = 16, 64  # points that a part has a multiple of, where its end is not the dimension's: whole tiles


def part_size(total: int, parts: int) -> int:
    """Points of every part but the last, which has what is left; 0 where nothing would be left."""
    share = total // parts if total % parts == 0 else _in_tiles(-(-total // parts))
    return share if (parts - 1) * share < total else 0


def most_parts(total: int, most: int) -> int:
    """The number of parts, ``most`` at the most, that begin at whole tiles and have points all."""
    return -(-total // _in_tiles(-(-total // most))) if most > 0 else 0


def _in_tiles(share: int) -> int:
    grain = _LARGE if share >= 4 * _LARGE else _GRAIN
    return -(-share // grain) * grain


def splits(form: KernelForm, parts: int, depth: int = 1) -> str:
    """The reduced dimension that ``parts`` programs may share, each with ``depth`` points at least; ``""`` for none."""
    task = form.task
    if form.kind not in ("dot", "stream", "reduce", "folded") or task.mode != "full":
        return ""
    if task.monoid is None or not MONOIDS[task.monoid].commutative:
        return ""
    dims = (form.streamed.key,) if form.streamed else task.reduce
    fit = [d for d in dims if part_size(d.size, parts) >= max(2, depth)]
    fit = [d for d in fit if d.size % parts == 0] or (fit if _may_be_ragged(form) else [])
    return max(fit, key=lambda d: d.size).name if fit else ""


def _may_be_ragged(form: KernelForm) -> bool:
    """Whether points past the end can be kept from the result: by a hidden score, by factors of zero or by the identity."""
    if form.streamed is not None:
        return _zero_outside(form, form.streamed.value)
    if form.kind == "dot" and form.product is not None:
        c = form.product
        return c.operand in (*HALVES, "f32") and all(_zero_outside(form, e) for pair in c.pairs for e in pair)
    return form.kind == "reduce" and not centred(form.task)


def _zero_outside(form: KernelForm, e: Expr) -> bool:
    """Whether an expression is a read that may give zero where it has no cell."""
    position = bare_read(e)
    return position is not None and not form.task.reads[position].other
