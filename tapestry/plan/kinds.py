"""Which collective a set of messages is. A name for people and for the runtime; the messages are the truth."""

from __future__ import annotations

from collections.abc import Sequence

from tapestry.ir.kernel import Box, intersect
from tapestry.ir.program import Message


def kind_of(messages: Sequence[Message], held: Sequence[Box | None], wanted: Sequence[Box | None]) -> str:
    """``all_gather``: everyone gets whole blocks and keeps its own; ``halo``: rims of touching blocks; ``broadcast``: one
    sender; ``all_to_all``: everyone in a group sends parts to everyone; otherwise ``send_recv``."""
    senders = {m.src for m in messages}
    if len(senders) == 1 and len({m.box for m in messages}) == 1:
        return "broadcast" if len(messages) > 1 else "send_recv"
    receivers = {m.dst for m in messages}
    keeps = all(_keeps(held[d], wanted[d]) for d in receivers)
    if all(m.box == held[m.src] for m in messages):
        return "all_gather" if keeps else "send_recv"
    if keeps and all(_touch(held[m.src], held[m.dst]) for m in messages):
        return "halo"
    if keeps and senders == receivers:
        return "all_gather"
    return "all_to_all" if senders == receivers else "send_recv"


def _keeps(held: Box | None, wanted: Box | None) -> bool:
    """Whether a device goes on using most of what it holds: its footprint spans its block."""
    if held is None or wanted is None:
        return False
    common = intersect(held, wanted)
    return common is not None and all(hi - lo >= 0.5 * (q - p) for (lo, hi), (p, q) in zip(common, held, strict=True))


def _touch(a: Box | None, b: Box | None) -> bool:
    """Whether two blocks are equal or neighbours along every axis."""
    if a is None or b is None:
        return False
    return all(p <= s and r <= q for (p, q), (r, s) in zip(a, b, strict=True))
