"""What may be said of messages and merges, against sets of cells counted one by one."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from tapestry.ir.kernel import Box
from tapestry.ir.program import Message
from tapestry.verify import exchange
from tapestry.verify.box_lists import spans_of

DEVICES, SIZE = 3, 4
interval = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda p: (min(p), max(p)))
box = st.tuples(interval)
boxes = st.lists(st.none() | box, min_size=DEVICES, max_size=DEVICES)
device = st.integers(0, DEVICES - 1)
stray = st.builds(Message, st.integers(-1, DEVICES), st.integers(-1, DEVICES), box)


def cells(b: Box | None) -> set[tuple[int, ...]]:
    return set() if b is None else set(itertools.product(*(range(lo, hi) for lo, hi in b)))


def within(b: Box, other: Box | None) -> bool:
    """Bounds inside bounds, of an empty box too."""
    return other is not None and all(p <= lo <= hi <= q for (lo, hi), (p, q) in zip(b, other, strict=True))


def delivered(src, dst, sent) -> bool:
    """Whether everybody has what it wants once, and nothing was sent that is not there or not wanted."""
    for m in sent:
        if not (0 <= m.src < DEVICES and 0 <= m.dst < DEVICES and m.src != m.dst):
            return False
        if not (within(m.box, src[m.src]) and within(m.box, dst[m.dst])):
            return False
    for d in range(DEVICES):
        got = Counter(cells(src[d]) & cells(dst[d]))
        for m in sent:
            got.update(cells(m.box) if m.dst == d else ())
        if set(got) != cells(dst[d]) or max(got.values(), default=1) > 1:
            return False
    return True


@st.composite
def right(draw):
    """Boxes, and messages that bring every cell that a device lacks from one that has it."""
    src, dst = draw(boxes), draw(boxes)
    holders = {c: [d for d in range(DEVICES) if c in cells(src[d])] for c in itertools.product(range(SIZE))}
    dst = [None if b is None or not all(holders[c] for c in cells(b)) else b for b in dst]
    lacks = [(d, c) for d in range(DEVICES) for c in sorted(cells(dst[d]) - cells(src[d]))]
    sent = [Message(draw(st.sampled_from(holders[c])), d, ((c[0], c[0] + 1),)) for d, c in lacks]
    return src, dst, draw(st.permutations(sent))


def verdict(src, dst, sent):
    spans = [spans_of(b, 1, "agreement", "") for b in (src, dst)]
    return exchange.messages(*spans, tuple(sent), "a step")


@given(right())
def test_what_delivers_everything_once_passes(case):
    assert delivered(*case) and verdict(*case) is None


@given(right(), st.data())
@example(([((0, 4),), None, None], [None, ((0, 2),), None], [Message(0, 1, ((0, 2),)), Message(0, 3, ((0, 1),))]), None)
@example(([((0, 4),), None, None], [None, ((0, 2),), None], [Message(0, 1, ((0, 2),)), Message(-1, 1, ((1, 1),))]), None)
@example(([((0, 2),), ((0, 4),), None], [((0, 4),), None, None], [Message(1, 0, ((1, 4),))]), None)
def test_an_edit_is_refused_where_it_breaks_something(case, data):
    src, dst, sent = case
    sent = list(sent)
    if data is not None:
        edit = data.draw(st.sampled_from(["drop", "twice", "stray", "sender", "grown"]))
        at = data.draw(st.integers(0, max(len(sent) - 1, 0)))
        if edit == "stray" or not sent:
            sent.append(data.draw(stray))
        elif edit == "drop":
            del sent[at]
        elif edit == "twice":
            sent.append(sent[at])
        elif edit == "sender":
            sent[at] = Message(data.draw(st.integers(-1, DEVICES)), sent[at].dst, sent[at].box)
        else:
            (lo, hi), grown = sent[at].box[0], data.draw(st.integers(-1, 1))
            sent[at] = Message(sent[at].src, sent[at].dst, ((lo + min(grown, 0), hi + max(grown, 0)),))
    assert (verdict(src, dst, sent) is None) == delivered(src, dst, sent)


EXTENT = 6
part = st.tuples(st.tuples(st.integers(0, EXTENT), st.integers(0, EXTENT)).map(lambda p: (min(p), max(p))))
held = st.none() | st.lists(part, max_size=2).map(tuple)


@st.composite
def merges(draw):
    """Groups of devices, what their states are of, what the results are of, and which parts each has merged."""
    edges = sorted(draw(st.lists(st.integers(0, EXTENT), min_size=DEVICES - 1, max_size=DEVICES - 1)))
    parts = [((lo, hi),) for lo, hi in zip([0, *edges], [*edges, EXTENT], strict=True)]
    parts = [(p,) for p in draw(st.permutations(parts))]
    if draw(st.booleans()):
        parts[draw(device)] = draw(st.lists(part, max_size=2).map(tuple))
    state = draw(box)
    src = [draw(box) if draw(st.integers(0, 5)) == 0 else state for _ in range(DEVICES)]
    src = [None if draw(st.integers(0, 8)) == 0 else b for b in src]
    same = draw(st.booleans())
    dst = src if same else [draw(st.none() | box) for _ in range(DEVICES)]
    groups = draw(
        st.sampled_from([((0, 1, 2),), ((0, 1), (2,)), ((0,), (1,), (2,)), ((0, 1),), ((0, 1), (1, 2)), ((2, 0, 1),)])
    )
    return draw(st.sampled_from(["all_reduce", "reduce_scatter"])), groups, src, dst, tuple(parts), draw(st.booleans())


def merged_well(kind, groups, src, dst, parts, ends) -> bool:
    members = [d for g in groups for d in g]
    if sorted(members) != [d for d in range(DEVICES) if src[d] is not None]:
        return False
    for g in groups:
        lo, hi = max(src[d][0][0] for d in g), min(src[d][0][1] for d in g)
        for d in g:
            if dst[d] is None or (cells(dst[d]) and not (lo <= dst[d][0][0] and dst[d][0][1] <= hi)):
                return False
            if kind == "all_reduce" and src[d] != dst[d]:
                return False
        counted = Counter(c for d in g for b in parts[d] or () for c in cells(b))
        if max(counted.values(), default=1) > 1 or (ends and len(counted) < EXTENT):
            return False
    return True


@given(merges())
def test_a_merge_is_legal_when_no_part_is_missing_or_twice(case):
    kind, groups, src, dst, parts, ends = case
    spans = [spans_of(b, 1, "agreement", "") for b in (src, dst)]
    found = exchange.check_merge(kind, groups, *spans, parts, (EXTENT,), ends)
    assert (found is None) == merged_well(*case)


@given(st.lists(held, min_size=2, max_size=2), st.lists(held, min_size=2, max_size=2))
def test_parts_that_are_merged_in_are_others(one, other):
    def fine(mine, more):
        counted = Counter(c for b in (*(mine or ()), *(more or ())) for c in cells(b))
        return more is None or (mine is not None and max(counted.values(), default=1) == 1)

    found = exchange.disjoint(tuple(one), tuple(other), (EXTENT,))
    assert (found is None) == all(map(fine, one, other))


@given(st.lists(held, min_size=3, max_size=3))
def test_what_a_group_has_merged_afterwards(parts):
    after = exchange.after([(0, 2)], tuple(parts), 3)
    assert after[1] is None and after[0] == after[2] == tuple(sorted((*(parts[0] or ()), *(parts[2] or ()))))
    both = exchange.with_part(tuple(parts), (None, ((((0, 1),)),), None))
    assert both == (None, tuple(sorted((*(parts[1] or ()), ((0, 1),)))), None)


@given(st.lists(st.none() | st.lists(st.tuples(interval, interval), max_size=2).map(tuple), min_size=2, max_size=3))
@example([(((0, 3), (0, 1)),), (((2, 3), (1, 2)),)])
def test_states_that_merge_in_order_come_in_the_order_of_their_points(parts):
    held_parts = [p for p in ([b for b in p or () if cells(b)] for p in parts) if p]
    points = [[c for b in p for c in cells(b)] for p in held_parts]
    ordered = all(max(a) < min(b) for a, b in itertools.pairwise(points))
    found = exchange.in_order([range(len(parts))], tuple(parts))
    assert (found is None) == ordered


def test_the_points_named_are_those_of_the_device():
    src, dst = [((0, 2),), ((2, 4),), None], [((2, 4),), None, None]
    found = verdict(src, dst, [Message(1, 0, ((2, 3),))])
    assert found is not None and found.law == "read_after_write" and found.why == (3,)
    found = verdict(src, dst, [Message(1, 0, ((2, 4),)), Message(1, 0, ((3, 4),))])
    assert found is not None and found.law == "written_once" and found.why == (3,)
    assert np.array_equal(spans_of(src, 1, "", "").there, [True, True, False])
