"""Large networks of pairs with usages over time: a choice, and a certified lower bound.

Exact reductions; prices and messages for the bound, which with the best known choice rule out labels and joint choices;
again reductions; the integer program on what is left when it is small enough. Otherwise neighbourhoods of the best choice for
the choice, and branch and bound for the bound, in turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapestry.plan.solver.branch import Tree
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.incumbent import Search, Stage, integer, raise_prices, tighten
from tapestry.plan.solver.mip import Program
from tapestry.plan.solver.neighbourhood import LEAST, improve, kinds
from tapestry.plan.solver.network_reduction import Reduction, reduce
from tapestry.plan.solver.pairs import PROVED, Infeasible, Instance, from_instance

EXACT = 150_000  # joint choices up to which the whole network goes to HiGHS
BRANCH = 400_000  # the same for branch and bound: where prices take seconds
SHARE = 0.2  # of the budget left, for the first search for prices (twice that of large networks), or one linear relaxation
TURN = 0.04  # of the budget, for neighbourhoods or for branching before the other's turn
NODES = 10  # of HiGHS in a quick search: its root finds nearly all that 200 find in ten times the time
TRIES = 2  # searches for prices of the whole


def search(
    given: Instance,
    time_limit: float | Budget | None,
    start: Sequence[int] | None = None,
    bound: float = -np.inf,
    gap: float = PROVED,
    quick: bool = False,
) -> Search:
    """Minimise within the limit of the usages.

    Args:
        time_limit: seconds, a budget, or nothing: the usual amount of work.
        start: a choice to improve on.
        bound: a lower bound that is already proved.
        gap, quick: see `network.solve`.

    Returns:
        What it saw on the way, and as its `solution` the best choice, never worse than ``start``; the cost is infinite when
        there was none, and so is the bound when there is none.
    """
    state = Search(given, Budget.of(time_limit), np.zeros(len(given.sizes), np.int64), bound=bound, gap=gap, quick=quick)
    if start is not None:
        state.start(np.asarray(start, np.int64))
    stage = Stage(from_instance(given), Reduction())
    state.tiny = stage.net.tiny
    if state.closed():
        return state
    try:
        state.budget.spend(200 * stage.net.weight())
        reduce(stage.net, stage.done)
        stage.price = np.zeros(len(stage.net.usage.limit))
        state.note(f"reduced to {len(stage.net.nodes())} nodes, {len(stage.net.a)} joint choices")
        _work(state, stage)
    except Infeasible:
        state.bound = state.cost
    return state


def _work(state: Search, stage: Stage) -> None:
    """Bound and improve in turns until the best choice is proved or the budget is over; once in any case."""
    budget, rng = state.budget, np.random.default_rng(0)
    known = kinds(budget.left())
    turn, tree = max(TURN * budget.left(), 2.0 * SECOND), None
    tried: list[float] = []
    while not tried or not (state.quick or state.closed() or budget.left() < LEAST):
        if not tried or (tree is None and state.cost < tried[-1] and len(tried) < TRIES):
            tried.append(state.cost)
            _shrink(state, stage)
            if not state.closed() and len(stage.net.a) <= EXACT:
                _exact(state, stage)
        elif len(stage.net.a) <= BRANCH:
            tree = tree or Tree(stage.copy())
            tree.run(state, budget.part(2 * turn))
        if not (state.quick or state.closed()):
            alone = len(tried) == TRIES and tree is None and len(stage.net.a) > BRANCH  # nothing else will change
            improve(state, stage, budget.part(budget.left() if alone else turn if tree else 2 * turn), known, rng)


def _shrink(state: Search, stage: Stage) -> None:
    """Bound, rule out and reduce while that makes the network much smaller."""
    while True:
        before = stage.net.weight()
        share = (SHARE if before <= BRANCH else 2 * SHARE) * (0.5 if np.isfinite(state.bound) else 1.0)
        state.raise_bound(raise_prices(state, stage, state.budget.share(share)))
        state.note(f"prices for {int((stage.price > 0).sum())} times")
        state.budget.spend(200 * stage.net.weight())
        tighten(state, stage)
        if not len(stage.net.nodes()):
            state.raise_bound(state.cost)
        state.note(f"left {len(stage.net.nodes())} nodes, {len(stage.net.a)} joint choices")
        if state.closed() or state.budget.over() or stage.net.weight() > 0.7 * before:
            return


def _exact(state: Search, stage: Stage) -> None:
    """The linear relaxation, then the integer program of what it does not rule out."""
    if state.budget.over():
        return
    program = Program(stage.net)
    point = program.relax(state.budget.share(SHARE))
    if program.infeasible() and not np.isfinite(state.cost):
        raise Infeasible
    if point is None or point.multipliers is None:
        return
    stage.move(point.multipliers)
    state.raise_bound(stage.proof().bound)
    tighten(state, stage)
    state.note(f"linear relaxation; left {len(stage.net.nodes())} nodes, {len(stage.net.a)} joint choices")
    if not state.closed() and len(stage.net.nodes()):
        _, bound = integer(state, stage.net, stage.done, state.budget.share(0.5), NODES if state.quick else None)
        state.raise_bound(bound)
        state.note("integer program")
    elif not len(stage.net.nodes()):
        state.raise_bound(state.cost)
