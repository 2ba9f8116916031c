"""What ranks send each other, and who is to blame when they do not."""

import pytest
import torch

from tapestry.runtime.processes.heartbeat import COMPUTE, IDLE, PEER, PHASE, STEP, WAIT, Heartbeat, guilty, shared
from tapestry.runtime.processes.wire import Mismatch, Wire


def wire(**more) -> Wire:
    return Wire(**({"rank": 0, "world": 2, "plan": bytes(range(16)), "heartbeat": Heartbeat(shared(2), 0)} | more))


def test_a_message_says_what_it_is():
    a, b = torch.arange(6, dtype=torch.int16).reshape(2, 3), torch.tensor([True, False, True])
    pieces = [("a", (2, 3), torch.int16), ("b", (3,), torch.bool), ("none", (0, 4), torch.float64)]
    message = wire()._pack(5, list(zip(pieces, (a, b, torch.empty(0, 4, dtype=torch.float64)), strict=True)))
    got = wire(rank=1)._unpack(5, 0, message, pieces)
    assert torch.equal(got[0], a) and torch.equal(got[1], b) and got[2].shape == (0, 4)
    other = [("a", (3, 2), torch.int16), *pieces[1:]]
    typed = [("a", (2, 3), torch.uint16), *pieces[1:]]
    for bad in (
        lambda: wire(rank=1)._unpack(6, 0, message, pieces), lambda: wire(rank=1, plan=bytes(16))._unpack(5, 0, message, pieces),
        lambda: wire(rank=1, batch=2)._unpack(5, 0, message, pieces), lambda: wire(rank=0)._unpack(5, 1, message, pieces),
        lambda: wire(rank=1)._unpack(5, 0, message, other), lambda: wire(rank=1)._unpack(5, 0, message, typed),
    ):  # fmt: skip
        with pytest.raises(Mismatch, match="sent a message that the plan has not"):
            bad()


def test_who_is_to_blame():
    slots = shared(3)
    slots[:, PHASE], slots[:, STEP], slots[:, PEER] = (WAIT, COMPUTE, WAIT), (7, 6, 6), (1, -1, 0)
    assert guilty(slots, {2}) == [2]  # who is stopped
    assert guilty(slots, set()) == [1]  # who waits for nobody
    slots[:, PHASE] = (WAIT, WAIT, IDLE)
    slots[:, PEER] = (1, 2, -1)
    assert guilty(slots, set()) == [2]  # whom the least advanced one waits for


def test_headers_that_are_checked_at_the_end():
    """On a GPU a header is looked at when the run is over: a message that differs ends it all the same."""
    pieces = [("a", (2,), torch.float32)]
    for batch in (0, 1):
        message = wire(batch=batch)._pack(5, [(pieces[0], torch.ones(2))])
        late = wire(rank=1, deferred=True, ahead=False)
        assert late._unpack(5, 0, message, pieces)[0].tolist() == [1, 1]
        if batch == 0:
            late.check_all()
            assert late.unchecked == []
            continue
        with pytest.raises(Mismatch, match="sent a message that the plan has not"):
            late.check_all()
