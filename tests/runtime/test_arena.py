"""Placing buffers in one piece of memory: no two that live at once overlap, and little is lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapestry.plan.lower import lower
from tapestry.runtime.one_process.arena import ALIGNMENT, Arena, Slot, allocate, most_alive, slots
from tests.support.small_models import case, mesh_of, peak, random_plan


def overlaps(wanted: list[Slot], arena: Arena) -> list[tuple[str, str]]:
    """Every pair that lives at one time and shares a byte, by looking at all pairs."""
    found = []
    for i, a in enumerate(wanted):
        for b in wanted[:i]:
            lo, hi = arena.offsets[a.name], arena.offsets[b.name]
            apart = lo + a.nbytes <= hi or hi + b.nbytes <= lo or not a.nbytes or not b.nbytes
            if a.first <= b.last and b.first <= a.last and not apart:
                found.append((a.name, b.name))
    return found


def check(wanted: list[Slot], arena: Arena) -> None:
    assert overlaps(wanted, arena) == []
    assert all(arena.offsets[s.name] % ALIGNMENT == 0 and arena.offsets[s.name] + s.nbytes <= arena.size for s in wanted)
    assert arena.size >= most_alive(wanted, ALIGNMENT)


@given(st.lists(st.tuples(st.integers(-1, 30), st.integers(0, 9), st.integers(0, 5000)), max_size=40))
def test_no_two_live_buffers_overlap(rows: list[tuple[int, int, int]]) -> None:
    wanted = [Slot(f"b{i}", first, 40 if first < 0 else first + more, n) for i, (first, more, n) in enumerate(rows)]
    check(wanted, allocate(wanted))


def test_a_chain_needs_no_more_than_its_peak() -> None:
    wanted = [Slot(f"b{i}", i, i + 1, 1000 * (i % 3 + 1)) for i in range(20)]
    assert allocate(wanted).size == most_alive(wanted, ALIGNMENT)


def test_nothing_to_place() -> None:
    assert allocate([]) == Arena({}, 0)


@pytest.mark.parametrize("name", ["conv_chain", "norms", "attention", "branches", "opaques"])
@pytest.mark.parametrize("mesh", ["1", "2x2"])
def test_arenas_of_programs(name: str, mesh: str) -> None:
    c = case(name)
    program = lower(random_plan(c.graph, mesh_of(mesh), random.Random(f"{name} {mesh}")))
    for d in range(program.devices):
        wanted = slots(program, d, frozenset(c.graph.weights))
        arena = allocate(wanted)
        check(wanted, arena)
        assert most_alive(wanted, ALIGNMENT) >= peak(program)[d]
        assert arena.size <= 1.25 * most_alive(wanted, ALIGNMENT) + ALIGNMENT
