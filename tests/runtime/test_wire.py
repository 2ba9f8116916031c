"""What ranks send each other, when, and who is to blame when they do not."""

import random

import pytest
import torch

from tapestry.runtime.messages.message_buffers import MessageBuffers, drained_at, posted_ahead
from tapestry.runtime.messages.point_to_point import in_one_piece
from tapestry.runtime.processes.heartbeat import COMPUTE, IDLE, PEER, PHASE, STEP, WAIT, Heartbeat, guilty, shared
from tapestry.runtime.processes.process_groups import axis_groups
from tapestry.runtime.processes.wire import Mismatch, Wire, flat_bytes


def wire(**more) -> Wire:
    return Wire(**({"rank": 0, "world": 2, "plan": bytes(range(16)), "heartbeat": Heartbeat(shared(2), 0)} | more))


def test_a_header_says_what_a_message_is():
    told = wire().header(5, "a torch.int16[2, 3]", 12)
    mine = wire(rank=1)
    mine.check(told, mine.header(5, "a torch.int16[2, 3]", 12), 0, 5)
    for named, other, peer in (
        ("step", mine.header(6, "a torch.int16[2, 3]", 12), 0),
        ("plan", wire(plan=bytes(16)).header(5, "a torch.int16[2, 3]", 12), 0),
        ("batch", wire(batch=2).header(5, "a torch.int16[2, 3]", 12), 0),
        ("sender", mine.header(5, "a torch.int16[2, 3]", 12), 1),
        ("pieces", mine.header(5, "a torch.uint16[2, 3]", 12), 0),
        ("bytes", mine.header(5, "a torch.int16[2, 3]", 16), 0),
    ):
        with pytest.raises(Mismatch, match=f"sent a message that the plan has not(.|\n)*{named}"):
            mine.check(told, other, peer, 5)


def test_any_array_is_bytes_where_it_is():
    for a in (
        torch.tensor(3.0),
        torch.arange(6).reshape(1, 6, 1)[:, 2:3],
        torch.ones(2, 3, dtype=torch.bool),
        torch.empty(0, 4),
    ):
        found = flat_bytes(a)
        assert found.data_ptr() == a.data_ptr() and found.shape == (a.nbytes,)
    turned = torch.arange(6).reshape(2, 3).t()
    assert flat_bytes(turned).view(torch.int64).tolist() == [0, 3, 1, 4, 2, 5]


def test_receives_are_posted_ahead_as_far_as_there_is_room():
    assert posted_ahead([(4, 6, 10), (5, 7, 10), (8, 9, 10)], 100) == [0, 0, 0]
    assert posted_ahead([(4, 6, 10), (5, 7, 10), (8, 9, 10)], 5) == [0, 5, 7]  # one at a time; none later than its step
    assert posted_ahead([(4, 6, 10), (5, 7, 10)], 0) == [4, 5]
    rng = random.Random(3)
    for _ in range(50):
        steps = sorted(rng.randrange(60) for _ in range(20))
        asked = [(s, s + rng.randrange(1, 9), rng.randrange(1, 9)) for s in steps]
        for most in (1, 8, 20):
            found = posted_ahead(asked, most)
            assert all(f <= s for f, (s, _, _) in zip(found, asked, strict=True))
            for k, now in enumerate(found):
                before = sum(n for f, (s, use, n) in zip(found[:k], asked[:k], strict=True) if use > now)
                assert before <= most or now == asked[k][0]


def test_sends_are_taken_in_their_order():
    assert drained_at([(1, [5, 5]), (2, [8]), (9, [20])], 12, 30) == [2, 9, 9]
    assert drained_at([(1, [5]), (2, [5])], 12, 30) == [30, 30]


def test_what_lies_in_one_piece():
    rng = random.Random(4)
    for _ in range(200):
        of = [(0, rng.randrange(1, 4)) for _ in range(3)]
        part = [(lo, rng.randrange(lo, hi + 1)) for lo, hi in of]
        a = torch.empty([hi for _, hi in of])[tuple(slice(*p) for p in part)]
        assert not in_one_piece(part, of) or a.is_contiguous()
        assert in_one_piece(part, of) or not a.is_contiguous()


def test_places_of_what_lives_at_once_differ():
    buffers = MessageBuffers()
    for name, first, last in (("a", 0, 3), ("b", 2, 5), ("c", 4, 9)):
        buffers.reserve(name, first, last, 24)
    assert buffers.place(torch.device("cpu")) < 3 * 256
    a, b, c = (buffers.view(n, torch.float64, (3,)) for n in "abc")
    for x, n in ((a, 1), (b, 2)):
        x.fill_(n)
    assert a.tolist() == [1] * 3 and a.data_ptr() == c.data_ptr() != b.data_ptr()


def test_groups_of_an_axis():
    assert axis_groups((2, 3), 0) == ((0, 3), (1, 4), (2, 5)) and axis_groups((2, 3), 1) == ((0, 1, 2), (3, 4, 5))


def test_who_is_to_blame():
    slots = shared(3)
    slots[:, PHASE], slots[:, STEP], slots[:, PEER] = (WAIT, COMPUTE, WAIT), (7, 6, 6), (1, -1, 0)
    assert guilty(slots, {2}) == [2]  # who is stopped
    assert guilty(slots, set()) == [1]  # who waits for nobody
    slots[:, PHASE] = (WAIT, WAIT, IDLE)
    slots[:, PEER] = (1, 2, -1)
    assert guilty(slots, set()) == [2]  # whom the least advanced one waits for
