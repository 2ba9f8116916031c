"""Transfers that were moved ahead: same results, bytes and peaks, every law, and the same time on the clock."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tapestry.ir.program import Free, Reduce, Transfer, allocated
from tapestry.plan.hoist_transfers import early, in_better_order
from tapestry.plan.lower import lower
from tapestry.plan.simulate import simulate
from tapestry.plan.topology import Link, topology
from tapestry.verify import certificate
from tests.support.small_models import case, execute, mesh_of, peak, planned_transfers, random_plan


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["attention", "branches", "norms", "selections"])
def test_earlier_and_otherwise_the_same(name):
    c, moved = case(name), 0
    for mesh in ("2", "3", "2x2"):
        for seed in range(6):
            plan = random_plan(c.graph, mesh_of(mesh), random.Random(f"{name} {mesh} {seed}"))
            before = lower(plan)
            after = early(before)
            if after.steps == before.steps:
                continue
            moved += 1
            assert peak(after) == peak(before) and planned_transfers(after) == planned_transfers(before)
            assert what(after) == what(before)
            certificate.check(plan.annotated(), after, limit=1 << 40, stated_peak=peak(after), places=plan.places)
            ours, theirs = execute(c.graph, after, c)[0], execute(c.graph, before, c)[0]
            assert all(a.tobytes() == theirs[t].tobytes() for t, a in ours.items())
            topo = topology(plan.mesh, "cpu")
            clocks = [simulate(plan, p, topo) for p in (after, before)]
            served = [{str(p.steps[t.step]): t.op for t in x.timed} for p, x in zip((after, before), clocks, strict=True)]
            assert served[0] == served[1]
            assert clocks[0].total == pytest.approx(clocks[1].total, rel=1e-4)  # (in turns, waits for neighbours change)
    assert moved or name != "branches"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "branches", "norms", "selections"])
def test_in_better_order_and_otherwise_the_same(name):
    """Where transfers are issued in another order, it takes less time, no more memory, and gives the same bits."""
    c, faster = case(name), 0
    for mesh in ("2", "3", "2x2"):
        topo = replace(topology(mesh_of(mesh), "cpu"), links=(Link(1e-6, 1e-9),) * len(mesh_of(mesh)), overlap=True)
        for seed in range(25):
            plan = random_plan(c.graph, topo.mesh, random.Random(f"{name} {mesh} {seed}"))
            before = lower(plan)
            after, seconds = in_better_order(plan, before, topo)
            assert seconds == simulate(plan, after, topo).total
            assert seconds <= simulate(plan, before, topo).total
            faster += seconds < simulate(plan, before, topo).total
            assert all(a <= b for a, b in zip(peak(after), peak(before), strict=True))
            assert what(after) == what(before)
            certificate.check(plan.annotated(), after, limit=1 << 40, stated_peak=peak(after), places=plan.places)
            ours, theirs = execute(c.graph, after, c)[0], execute(c.graph, before, c)[0]
            assert all(a.tobytes() == theirs[t].tobytes() for t, a in ours.items())
    assert faster or name != "branches"


def what(program) -> tuple[list[str], list[str]]:
    """Its steps, and what it frees, in any order."""
    frees = [b for s in program.steps if isinstance(s, Free) for b in s.buffers]
    return sorted(str(s) for s in program.steps if not isinstance(s, Free)), sorted(frees)


def test_a_transfer_stands_right_behind_what_it_sends():
    """Unless the links or memory are in its way: every launch that it waits for without need is accounted for."""
    ahead = 0
    for name, seed in ((n, s) for n in ("attention", "branches", "norms", "selections") for s in range(30)):
        before = lower(random_plan(case(name).graph, mesh_of("3"), random.Random(seed)))
        steps = early(before).steps
        for i, step in enumerate(steps):
            if not isinstance(step, Transfer) or before.steps.index(step) <= i:
                continue
            ahead += 1
            at = next(k for k in range(i - 1, -1, -1) if not isinstance(steps[k], Free))
            free = not isinstance(steps[at], Transfer | Reduce) and step.src not in allocated(steps[at])
            assert not free or rises(before, steps, i, at)
    assert ahead > 5


def rises(program, steps, i: int, at: int) -> bool:
    """Whether a device's peak would rise were a step at an earlier place."""
    moved = replace(program, steps=(*steps[:at], steps[i], *steps[at:i], *steps[i + 1 :]))
    return any(a > b for a, b in zip(peak(moved), peak(program), strict=True))
