"""Rows of an operation that keeps states once per row: how many there are, and the reduced dimension as the row's columns."""

from __future__ import annotations

from math import prod

from tapestry.ir.graph import Block
from tapestry.ir.recognition.state import row_groups


def rows(op: Block) -> int:
    """Rows whose states an operation computes: points of the map dimensions that the body depends on."""
    return prod(d.size // row_groups(op).get(d.name, 1) for d in op.dims)
