"""From a kernel of the Program to the form in which it is emitted."""

from __future__ import annotations

from dataclasses import replace

from tapestry.codegen.blocks.forms import KernelForm, classified
from tapestry.codegen.blocks.lowered import lower
from tapestry.codegen.blocks.ragged_parts import scan_of, scan_task
from tapestry.codegen.triton.task.packed_operand import packed_operands
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Kernel


def kernel_form(graph: Graph, kernel: Kernel, precision: str = "ieee") -> KernelForm:
    """The form of a kernel of the Program.

    Args:
        precision: of products of f32: ``ieee``, ``tf32x3`` or ``tf32``.

    Raises:
        TapestryError: the operation is opaque.
    """
    if (scan := scan_of(graph, kernel)) is not None:
        return KernelForm(kind="scan", task=scan_task(graph, kernel, scan), reverse=scan.sign < 0)
    form = classified(lower(graph, kernel), precision)
    return replace(form, packed=packed_operands(graph, kernel, form)) if form.product is not None else form
