"""A cache of a model: a tensor that a step reads, appends to, and leaves for the next one."""

from __future__ import annotations

import msgspec


class Cache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Its input and output, the axis that grows, how many cells that has, and how many a step appends."""

    past: str
    present: str
    axis: int
    capacity: int
    new: int
