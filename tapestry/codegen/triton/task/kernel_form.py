"""In which form a kernel is emitted, from its index space, projections and monoid alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tapestry.codegen.triton.task.chips import Chip
from tapestry.codegen.triton.task.lowered import Task, points
from tapestry.codegen.triton.task.regroup import split_groups
from tapestry.codegen.triton.task.tiles import (
    Contraction,
    Folded,
    Stream,
    contraction,
    folded,
    gather,
    row_dims,
    stream,
    without_columns,
)
from tapestry.ir.recognise.selection_sum import Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelForm:
    """A kernel's task and the form in which it is emitted.

    Attributes:
        kind: ``map``; ``dot``, a contraction; ``stream``, a softmax-weighted sum of values in one pass; ``scan``; ``rows``, a
            reduction whose results are used along the row; ``gather``; ``folded``, a reduction of a product tile by tile;
            ``nest``, with inner reductions of any other kind; ``reduce``.
        product, streamed, picked, folded: what was recognised for ``dot`` (and ``folded``), ``stream``, ``gather``, ``folded``.
        reverse: for ``scan``, whether elements come last first.
        packed: for ``dot``, the same on copies of operands that cannot be read by whole rows.
        precision: of f32 operands on matrix units: ``ieee``, ``tf32x3`` or ``tf32``.
    """

    kind: str
    task: Task
    product: Contraction | None = None
    streamed: Stream | None = None
    picked: Selection | None = None
    folded: Folded | None = None
    reverse: bool = False
    precision: str = "ieee"
    packed: PackedOperands | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedOperands:
    """A contraction on copies of operands.

    Attributes:
        copies: for each copied read its position and the copy, in order; copy j writes scratch buffer j.
        product: the contraction, with the same read positions.
        scratch: (dtype, elements) of the copies.
        moved: bytes that the copies read and write.
        padded: whether some row is longer than what it holds.
    """

    copies: tuple[tuple[int, KernelForm], ...]
    product: KernelForm
    scratch: tuple[tuple[str, int], ...]
    moved: int
    padded: bool


def on_chip(found: KernelForm, chip: Chip) -> KernelForm:
    """The operation with operands that the chip's matrix units take: floats of 8 bits that they do not take become f16."""
    product, streamed = found.product, found.streamed
    if product is not None and product.operand == "f8" and not product.kinds <= chip.float8:
        product = replace(product, operand="f16")
    if streamed is not None and streamed.operand == "f8" and not streamed.kinds <= chip.float8:
        streamed = replace(streamed, operand="f16")
    copied = found.packed and replace(found.packed, product=on_chip(found.packed.product, chip))
    return replace(found, product=product, streamed=streamed, packed=copied)


def classified(task: Task, precision: str = "ieee") -> KernelForm:
    """The operation of a task that is no scan."""
    if task.monoid is None or task.mode == "finish":
        return KernelForm(kind="map" if not task.inner else "nest", task=task)
    for cut in () if task.inner else (task, split_groups(task)):
        if (product := contraction(cut)) is not None:
            return KernelForm(kind="dot", task=cut, product=product, precision=precision)
    if (streamed := stream(task)) is not None:
        if points(streamed.rows) < 64:  # few queries: those of all heads that share keys and values make one tile
            shared = split_groups(task)
            if (wider := stream(shared)) is not None and points(wider.rows) > points(streamed.rows):
                task, streamed = shared, wider
        return KernelForm(kind="stream", task=task, streamed=streamed, precision=precision)
    if (of_product := folded(task)) is not None:
        return KernelForm(kind="folded", task=task, product=of_product.product, folded=of_product, precision=precision)
    if task.inner:
        return KernelForm(kind="nest", task=task)
    if (picked := gather(task)) is not None:
        return KernelForm(kind="gather", task=task, picked=picked)
    if task.mode == "partial":
        task = without_columns(task)
    elif _rows(shared := split_groups(task)) < _rows(task):  # channels of a group share its statistics
        task = shared
    return KernelForm(kind="rows" if task.mode == "full" and row_dims(task) else "reduce", task=task)


def _rows(task: Task) -> int:
    """Rows whose states are computed."""
    found = row_dims(task)
    return points(found[0] if found else task.dims)
