"""What kind of kernel a block operation becomes, from its index space, projections and monoid alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tapestry.codegen.triton.task.chips import Chip
from tapestry.codegen.triton.task.lowered import Task, lower, points
from tapestry.codegen.triton.task.regroup import split_groups
from tapestry.codegen.triton.task.scan_task import scan_of, scan_task
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
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Kernel
from tapestry.ir.recognise.selection import Selection

if TYPE_CHECKING:
    from tapestry.codegen.triton.task.packed_operand import Staged


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A kernel's task and the form in which it is emitted.

    Attributes:
        kind: ``map``; ``dot``, a contraction; ``stream``, a softmax-weighted sum of values in one pass; ``scan``; ``rows``, a
            reduction whose results are used along the row; ``gather``; ``folded``, a reduction of a product tile by tile;
            ``nest``, with inner reductions of any other kind; ``reduce``.
        product, streamed, picked, folded: what was recognised for ``dot`` (and ``folded``), ``stream``, ``gather``, ``folded``.
        reverse: for ``scan``, whether elements come last first.
        staged: for ``dot``, the same on copies of operands that cannot be read by whole rows.
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
    staged: Staged | None = None


def operation(graph: Graph, kernel: Kernel, precision: str = "ieee") -> Operation:
    """The operation that a kernel of the Program runs.

    Raises:
        TapestryError: the operation is opaque.
    """
    if (scan := scan_of(graph, kernel)) is not None:
        return Operation(kind="scan", task=scan_task(graph, kernel, scan), reverse=scan.sign < 0)
    from tapestry.codegen.triton.task.packed_operand import staged  # which builds operations itself

    found = classified(lower(graph, kernel), precision)
    return replace(found, staged=staged(graph, kernel, found)) if found.product is not None else found


def on_chip(found: Operation, chip: Chip) -> Operation:
    """The operation with operands that the chip's matrix units take: floats of 8 bits that they do not take become f16."""
    product, streamed = found.product, found.streamed
    if product is not None and product.operand == "f8" and not product.kinds <= chip.float8:
        product = replace(product, operand="f16")
    if streamed is not None and streamed.operand == "f8" and not streamed.kinds <= chip.float8:
        streamed = replace(streamed, operand="f16")
    copied = found.staged and replace(found.staged, product=on_chip(found.staged.product, chip))
    return replace(found, product=product, streamed=streamed, staged=copied)


def classified(task: Task, precision: str = "ieee") -> Operation:
    """The operation of a task that is no scan."""
    if task.monoid is None or task.mode == "finish":
        return Operation(kind="map" if not task.inner else "nest", task=task)
    for cut in () if task.inner else (task, split_groups(task)):
        if (product := contraction(cut)) is not None:
            return Operation(kind="dot", task=cut, product=product, precision=precision)
    if (streamed := stream(task)) is not None:
        if points(streamed.rows) < 64:  # few queries: those of all heads that share keys and values make one tile
            shared = split_groups(task)
            if (wider := stream(shared)) is not None and points(wider.rows) > points(streamed.rows):
                task, streamed = shared, wider
        return Operation(kind="stream", task=task, streamed=streamed, precision=precision)
    if (of_product := folded(task)) is not None:
        return Operation(kind="folded", task=task, product=of_product.product, folded=of_product, precision=precision)
    if task.inner:
        return Operation(kind="nest", task=task)
    if (picked := gather(task)) is not None:
        return Operation(kind="gather", task=task, picked=picked)
    if task.mode == "partial":
        task = without_columns(task)
    elif _rows(shared := split_groups(task)) < _rows(task):  # channels of a group share its statistics
        task = shared
    return Operation(kind="rows" if task.mode == "full" and row_dims(task) else "reduce", task=task)


def _rows(task: Task) -> int:
    """Rows whose states are computed."""
    found = row_dims(task)
    return points(found[0] if found else task.dims)
