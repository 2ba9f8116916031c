"""Branch and bound (Land and Doig 1960) over who may use much of the resource.

The prices leave a gap because they let nodes use an average of much and little. So a node whose nearly free labels use very
different amounts, at these prices, is split: at most the middle amount, or more. Bounds come from the prices of each part.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.incumbent import Search, Stage, integer, raise_prices, tighten
from tapestry.plan.solver.pairs import Infeasible

LEAF = 50_000  # joint choices for which the integer program is tried
NEAR = 0.03  # labels that add less than this part of the bound are nearly free
WORK, ROUNDS = 4.0 * SECOND, 60  # for the prices of a part


class Tree:
    """The parts that are open, by their bounds; the least of them is a bound for all."""

    def __init__(self, stage: Stage) -> None:
        self.count = itertools.count()
        self.open = [(stage.proof().bound, next(self.count), stage)]

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
        halves = _split(stage, bound)
        while len(halves) == 1:
            stage = halves[0]
            halves = _split(stage, bound)
        for half in halves or [stage]:
            try:
                lower = max(bound, raise_prices(state, half, state.budget.part(WORK), ROUNDS))
                tighten(state, half)
                if len(half.net.nodes()):
                    self._push(state, max(lower, half.proof().bound), half)
            except Infeasible:
                continue


def _split(stage: Stage, bound: float) -> list[Stage]:
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
