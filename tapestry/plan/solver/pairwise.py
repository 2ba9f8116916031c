"""Large networks of pairs with usages over time: a choice, and a certified lower bound.

Exact reductions; prices and messages for the bound, which with the best known choice rule out labels and joint choices;
again reductions; the integer program on what is left when it is small enough. Otherwise neighbourhoods of the best choice for
the choice, and branch and bound for the bound, in turns.

Branch and bound (Land and Doig 1960) is over who may use much of the resource. The prices leave a gap because they let
nodes use an average of much and little. So a node whose nearly free labels use very different amounts, at these prices, is
split: at most the middle amount, or more. Bounds come from the prices of each part.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.incumbent import Search, Stage, integer, raise_exactly, raise_prices, tighten
from tapestry.plan.solver.mip import Program
from tapestry.plan.solver.neighbourhood import LEAST, improve, kinds
from tapestry.plan.solver.network_reduction import Reduction, reduce
from tapestry.plan.solver.pairs import PROVED, Infeasible, Instance, from_instance

EXACT = 150_000  # joint choices up to which the whole network goes to HiGHS
BRANCH = 400_000  # the same for branch and bound: where prices take seconds
SHARE = 0.2  # of the budget left, for the first search for prices (twice that of large networks), or one linear relaxation
FOREST = 0.6  # of the budget left, for exact prices
PAIRWISE_TURN = 0.04  # of the budget, for neighbourhoods or for branching before the other's turn
NODES = 10  # of HiGHS in a quick search: its root finds nearly all that 200 find in ten times the time
TRIES = 2  # searches for prices of the whole
LEAF = 50_000  # joint choices of a part for which the integer program is tried
NEAR = 0.03  # labels that add less than this part of the bound are nearly free
WORK, PAIRWISE_ROUNDS = 4.0 * SECOND, 60  # for the prices of a part


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
    turn, tree = max(PAIRWISE_TURN * budget.left(), 2.0 * SECOND), None
    tried: list[float] = []
    while not tried or not (state.quick or state.closed() or budget.left() < LEAST):
        anew = not tried or (tree is None and state.cost < tried[-1] and len(tried) < TRIES)
        if anew:
            tried.append(state.cost)
            _shrink(state, stage)
            if not state.closed() and len(stage.net.a) <= EXACT and (state.quick or not stage.forest):
                _exact(state, stage)
        if (not anew or stage.forest) and len(stage.net.a) <= BRANCH and not (state.quick or state.closed()):
            tree = tree or Tree(stage.copy(), state.bound)
            tree.run(state, budget.part(2 * turn))
        if not (state.quick or state.closed()):
            alone = len(tried) == TRIES and tree is None and len(stage.net.a) > BRANCH  # nothing else will change
            improve(state, stage, budget.part(budget.left() if alone else turn if tree else 2 * turn), known, rng)


def _shrink(state: Search, stage: Stage) -> None:
    """Bound, rule out and reduce while that makes the network much smaller."""
    while True:
        before = stage.net.weight()
        share = (SHARE if before <= BRANCH else 2 * SHARE) * (0.5 if np.isfinite(state.bound) else 1.0)
        exact = -np.inf if state.quick else raise_exactly(state, stage, state.budget.share(FOREST))
        if exact > -np.inf:
            state.raise_bound(exact)
            state.note(f"exact prices; left {len(stage.net.nodes())} nodes, {len(stage.net.a)} joint choices")
        rounds = 1 if stage.exact else 1000  # (messages alone are wanted where prices are exact)
        state.raise_bound(raise_prices(state, stage, state.budget.share(share), rounds))
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


class Tree:
    """The parts that are open, by their bounds; the least of them is a bound for all."""

    def __init__(self, stage: Stage, bound: float) -> None:
        self.count = itertools.count()
        self.open = [(max(stage.proof().bound, bound), next(self.count), stage)]

    def bound(self, state: Search) -> float:
        """Of every choice."""
        return min(self.open[0][0], state.cost) if self.open else state.cost

    def run(self, state: Search, budget: Budget) -> None:
        """Split the part with the least bound until all are closed or the time is up."""
        while self.open and not budget.over() and not state.closed():
            bound, _, stage = heapq.heappop(self.open)
            if bound < state.cost - state.tiny:
                self._expand(state, bound, stage, budget)
            state.raise_bound(self.bound(state))
        state.note(f"{len(self.open)} parts open")

    def _push(self, state: Search, bound: float, stage: Stage) -> None:
        if bound < state.cost - state.tiny:
            heapq.heappush(self.open, (bound, next(self.count), stage))

    def _expand(self, state: Search, bound: float, stage: Stage, budget: Budget) -> None:
        """Solve a small part, or split it and bound its halves."""
        budget.spend(200 * stage.net.weight())
        try:
            tighten(state, stage)
            if not len(stage.net.nodes()):
                return
            if stage.net.weight() <= LEAF:
                solved, lower = integer(state, stage.net, stage.done, state.budget.part(4 * WORK))
                bound = max(bound, lower)
                if solved:
                    return
        except Infeasible:
            return
        halves = _nonempty_parts(stage, bound)
        while len(halves) == 1:
            stage = halves[0]
            halves = _nonempty_parts(stage, bound)
        for half in halves or [stage]:
            try:
                part = state.budget.part(WORK)
                lower = max(bound, raise_exactly(state, half, part))
                lower = max(lower, raise_prices(state, half, part, PAIRWISE_ROUNDS)) if half.exact is None else lower
                tighten(state, half)
                if len(half.net.nodes()):
                    self._push(state, max(lower, half.proof().bound), half)
            except Infeasible:
                continue


def _nonempty_parts(stage: Stage, bound: float) -> list[Stage]:
    """The parts that are not empty, reduced; none when no node has labels to tell apart."""
    net = stage.net
    proof = stage.proof()
    paid = net.usage.priced(stage.price, len(net.unary))
    near = np.flatnonzero((proof.label <= NEAR * abs(bound)) & net.alive())
    most, least = np.full(len(net.gone), -np.inf), np.full(len(net.gone), np.inf)
    np.maximum.at(most, net.node[near], paid[near])
    np.minimum.at(least, net.node[near], paid[near])
    spread = np.where(np.isfinite(least), most - np.where(np.isfinite(least), least, 0.0), -1.0)
    node = int(spread.argmax())
    if spread[node] <= 0:
        return []
    large = paid > (most[node] + least[node]) / 2
    mine = net.node == node
    out: list[Stage] = []
    for side in (~large, large):
        half = stage.copy()
        half.net.unary[mine & ~side] = np.inf
        try:
            half.reduce()
        except Infeasible:
            continue
        out.append(half)
    return out
