"""Kinds of operations that do something else, on the clock."""

from __future__ import annotations

import numpy as np

from bench.planning import bounds
from tapestry.plan.search.fewest_bytes import NEARLY, by_kinds, sends
from tapestry.plan.search.priced_plan import choice_of, peak, priced_plan
from tapestry.plan.solver.budget import Budget


def test_a_plan_is_left_for_one_that_takes_less_or_sends_less() -> None:
    """From any choice: what is found is lowered as any plan, fits, and is faster, or nearly as fast with no more bytes."""
    better = 0
    for seed in range(12):
        problem = bounds.problem_of(bounds.case(seed))
        begun = priced_plan(problem, [0] * len(problem.menus), -np.inf)
        found = by_kinds(begun, Budget.of(None))
        if found is begun:
            continue
        better += found.objective < begun.objective
        again = priced_plan(problem, choice_of(problem, found.plan), -np.inf)
        assert found.plan.graph is begun.plan.graph and found.objective <= again.objective * (1 + 1e-9)
        assert peak(found) <= problem.topo.device.memory
        if found.objective > begun.objective:
            assert found.objective <= begun.objective * NEARLY and sends(found)[:2] <= sends(begun)[:2]
    assert better >= 3
