"""Whether a transfer is what it is called: worked out from its messages as arrays, apart from the planner's words for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapestry.ir.program import Message
from tapestry.verify.box_lists import Breach, Spans, spans_of


def named(kind: str, src: Spans, dst: Spans, sent: Sequence[Message], step: str, rings: bool) -> Breach | None:
    """Check the name of a transfer; ``permute`` is that of a round of a ring, in which each device sends once."""
    senders, receivers = (np.array(ends, np.int64) for ends in ([m.src for m in sent], [m.dst for m in sent]))
    if kind == "permute" and rings:
        once = len(set(senders.tolist())) == len(senders) and len(set(receivers.tolist())) == len(receivers)
        return None if once else Breach("agreement", "a permutation in which a device sends twice", "")
    right = _kind(src, dst, spans_of([m.box for m in sent], src.lo.shape[1], "agreement", step), senders, receivers)
    return None if kind == right else Breach("agreement", f"a transfer is called {kind}", f"it is a {right}")


def _kind(src: Spans, dst: Spans, boxes: Spans, senders: np.ndarray, receivers: np.ndarray) -> str:
    """Whole blocks gathered, rims of neighbours, one box to several, parts from all to all, or none of these."""
    if len(set(senders.tolist())) == 1 and np.all(boxes.lo == boxes.lo[:1]) and np.all(boxes.hi == boxes.hi[:1]):
        return "broadcast" if len(senders) > 1 else "send_recv"
    common_lo, common_hi = np.maximum(src.lo, dst.lo)[receivers], np.minimum(src.hi, dst.hi)[receivers]
    held = (src.hi - src.lo)[receivers]
    there = (src.there & dst.there)[receivers]
    stays = bool(np.all(there & np.all((common_lo < common_hi) & (common_hi - common_lo >= 0.5 * held), axis=1)))
    if np.all((boxes.lo == src.lo[senders]) & (boxes.hi == src.hi[senders])):
        return "all_gather" if stays else "send_recv"
    both = src.there[senders] & src.there[receivers]
    touch = (src.lo[senders] <= src.hi[receivers]) & (src.lo[receivers] <= src.hi[senders])
    if stays and np.all(both & np.all(touch, axis=1)):
        return "halo"
    mutual = set(senders.tolist()) == set(receivers.tolist())
    return ("all_gather" if stays else "all_to_all") if mutual else "send_recv"
