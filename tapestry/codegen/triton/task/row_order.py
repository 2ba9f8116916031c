"""Rows of a routed product sorted by the matrix that each picks (`ir.recognition.selection_sum`).

Rows do not depend on each other, so tiles may have them in any order. In a batch neighbours pick as many matrices as there are
rows; sorted, with the first row of each matrix at the start of a tile, every tile has one. A pass before writes the order,
with rows that pick none of the block's last; the product loads its rows and stores their results by it.
"""

from __future__ import annotations

from dataclasses import replace

from tapestry.codegen.blocks.forms import KernelForm
from tapestry.codegen.blocks.lowered import Access, points
from tapestry.codegen.triton.config_fields import KernelConfig
from tapestry.ir.expr import arg_positions
from tapestry.ir.graph import Dim
from tapestry.ir.index import const, dim
from tapestry.ir.recognition.contraction import dims_read
from tapestry.ir.recognition.selection_sum import Routed, Selection, routed


def sorted_rows(form: KernelForm) -> tuple[Routed, tuple[Dim, ...]] | None:
    """The routed product that a kernel is, and the dimensions of its rows; ``None`` where they stay as they are."""
    f = form.folded
    found = routed(form.task) if f and not f.folds else None
    if f is None or found is None or found.base.terms or points(f.outer) != found.over.size or points(f.product.batch) > 1:
        return None
    along = dims_read(form.task, found.wanted)
    sides = [dims for dims in (f.product.m, f.product.n) if along & {d.name for d in dims}]
    return (found, sides[0]) if len(sides) == 1 else None


def elements(rows: int, count: int, tile: int) -> int:
    """Places of the order: whole tiles for each matrix, and for rows that pick none."""
    return tile * (-(-rows // tile) + count + 1)


def in_order(form: KernelForm, config: KernelConfig) -> tuple[KernelForm, int, KernelForm, int] | None:
    """The pass before, how many rows a tile has, the product, and the position of its read of the order."""
    made = sorted_rows(form)
    if made is None or form.folded is None:
        return None
    (found, rows), task = made, form.task
    place, step, position = const(0), 1, max(task.reads) + 1
    for d in reversed(rows):
        place, step = place + dim(d.name) * step, step * d.size
    order = Access(tensor="order", dtype="i32", offset=place)
    picked = Selection(wanted=found.wanted, picked=found.wanted, over=found.over, base=found.base)
    first = replace(
        task, mode="full", dims=rows, reduce=(), monoid=None, states=(), outs=(order,), inner=(), then=(),
        reads={p: task.reads[p] for p in arg_positions((found.wanted,))}, body=(found.wanted,),
    )  # fmt: skip
    product = replace(form, task=replace(task, reads={**task.reads, position: order}))
    tile = config.bm if rows == form.folded.product.m else config.bn
    return KernelForm(kind="order", task=first, picked=picked), tile, product, position
