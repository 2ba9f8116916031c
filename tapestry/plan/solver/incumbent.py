"""What a search on a network with usages knows: the best choice, and the network that is left at the best prices."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from tapestry.plan.solver.ascent import Messages
from tapestry.plan.solver.budget import Budget
from tapestry.plan.solver.crossover import Mixture
from tapestry.plan.solver.lagrange import ExactPrices, ascend
from tapestry.plan.solver.mip import Program
from tapestry.plan.solver.network_reduction import Reduction, reduce
from tapestry.plan.solver.pairs import PROVED, Certificate, Instance, Multipliers, Pairs, Solution, certify, proved, rule_out
from tapestry.plan.solver.tree_contraction import Contraction, forest

TURNS, SOME = 0.6, 0.2  # of the budget, for exact prices of the forest within; for multiplying those of the whole
REFINED = 40  # rounds of the model's prices at most
ORDERED = 40_000  # units for a node, to find an order of elimination or that there is none
FORCE = 0.5  # of the budget left, for raising prices until a choice keeps to the limits


@dataclass(slots=True)
class Search:
    """The best choice and the best bound so far."""

    given: Instance
    budget: Budget
    choice: np.ndarray
    cost: float = np.inf
    bound: float = -np.inf
    gap: float = PROVED
    quick: bool = False
    tiny: float = 0.0  # differences below are rounding
    log: list[tuple[float, str, float, float]] = field(default_factory=list[tuple[float, str, float, float]])
    began: float = field(default_factory=time.monotonic)

    def offer(self, net: Pairs, done: Reduction, label: np.ndarray) -> None:
        """Take labels for the nodes left of a network as the best choice if they are, when put back into the given problem."""
        start = net.start[:-1]
        full = start.copy()
        full[net.node[label]] = label
        self.start(done.lift(full) - start)

    def start(self, choice: np.ndarray) -> None:
        """Take a whole choice as the best one if it is allowed and better."""
        cost = self.given.cost(choice)
        if cost < self.cost and self.given.excess(choice) <= 0:
            self.choice, self.cost = choice.copy(), cost

    def labels(self, net: Pairs) -> np.ndarray:
        """The best choice as labels of the nodes left."""
        nodes = net.nodes()
        return net.start[nodes] + self.choice[nodes]

    def raise_bound(self, bound: float) -> None:
        """The best bound, never above the cost of a known choice."""
        self.bound = min(max(self.bound, bound), self.cost)

    def note(self, what: str) -> None:
        """For reports."""
        self.log.append((time.monotonic() - self.began, what, self.cost, self.bound))

    def closed(self) -> bool:
        """Whether the best choice is proved to be optimal, or that there is none."""
        if self.bound == np.inf:
            return True
        return proved(self.cost, self.bound + self.tiny, self.gap)

    def solution(self) -> Solution:
        """For callers."""
        return Solution([int(c) for c in self.choice], self.cost, self.bound)


@dataclass(slots=True)
class Stage:
    """What is left of the problem: costs moved so that the least of each node and pair add up to the bound at these prices.

    ``forest``: whether it may still be solved exactly at given prices; ``exact``: the bound then, and what labels add to it.
    """

    net: Pairs
    done: Reduction
    price: np.ndarray = field(default_factory=lambda: np.zeros(0))
    forest: bool = True
    exact: Certificate | None = None

    def proof(self) -> Certificate:
        """The bound, and what labels and joint choices add to it."""
        if self.exact is not None:
            return Certificate(self.exact.bound, self.exact.label, np.zeros(len(self.net.a)))
        return certify(self.net, _priced(self.net, self.price))

    def copy(self) -> Stage:
        """To be continued in another direction."""
        return replace(self, net=self.net.copy(), done=self.done.copy())

    def reduce(self) -> None:
        """Reduce the network, and keep the prices of times that are left (those of others go to the next one)."""
        times, price = self.net.usage.time, self.price
        reduce(self.net, self.done)
        now = self.net.usage.time
        self.price = np.zeros(len(now))
        if len(now):
            at = np.flatnonzero(price)
            np.add.at(self.price, np.minimum(np.searchsorted(now, times[at]), len(now) - 1), price[at])

    def move(self, given: Multipliers) -> None:
        """Move costs along messages; the prices stay apart."""
        self.net.move(given.tails, given.heads)
        self.price, self.exact = given.price, None


def _priced(net: Pairs, price: np.ndarray) -> Multipliers:
    slots = net.slots()
    return Multipliers(price, np.zeros(len(slots[1])), np.zeros(len(slots[3])))


def raise_prices(state: Search, stage: Stage, budget: Budget, rounds: int = 1000) -> float:
    """Look for better prices and messages, and move costs along them; returns the bound."""
    messages = Messages(stage.net)
    mixture = _mixture(state, stage, messages, budget)
    forcing = state.budget.share(FORCE)
    stage.move(ascend(messages, stage.price, budget, mixture, rounds=rounds, forcing=forcing).multipliers())
    return stage.proof().bound


def raise_exactly(state: Search, stage: Stage, budget: Budget) -> float:
    """Better prices where the network is nearly a forest, and less of it: the bound, which says nothing where it is not.

    What no better choice can use is ruled out by what every choice adds to the bound, exactly.
    """
    if not stage.forest:
        return -np.inf
    budget.spend(ORDERED * len(stage.net.nodes()))
    order = Contraction.of(stage.net)
    if order is None:
        stage.forest = False
        return -np.inf
    mixture = _mixture(state, stage, Messages(stage.net), budget)
    unit = stage.net.usage.unit
    first = stage.price * unit
    if not first.any():
        first = _first_prices(stage.net, mixture, order, budget.share(TURNS))
    found = ExactPrices(first, order=order, mixture=mixture, budget=budget)
    found.best_price = first
    found.turn(budget.share(SOME))
    found.fit(budget.share(TURNS))
    found.refine(REFINED)
    stage.price, constant = found.best_price / unit, stage.net.constant
    found.price = found.best_price
    at, _ = found.look()
    stage.exact = order.certificate(at + constant)
    budget.spend(4 * order.work)
    if np.isfinite(state.cost):
        rule_out(stage.net, stage.exact, state.cost)
        stage.reduce()
    return found.best + constant


def _first_prices(net: Pairs, mixture: Mixture, order: Contraction, budget: Budget) -> np.ndarray:
    """Prices of the forest within a network, which takes much less time; and a choice that keeps to the limits, be it dear."""
    rough = Contraction.of(forest(net))
    found = ExactPrices(np.zeros(len(net.usage.limit)), order=rough or order, mixture=mixture, budget=budget)
    found.best_price = found.price
    found.turn(budget.share(TURNS))
    found.fit(budget)
    return found.best_price


def _mixture(state: Search, stage: Stage, messages: Messages, budget: Budget) -> Mixture:
    """Of the best choice with those to come, which are offered to the search."""

    def known(better: Mixture | None) -> float:
        budget.spend(mixture.work)
        if better is not None:
            take(state, stage, better)
        return state.cost - stage.net.constant

    mixture = Mixture(messages, known)
    begin(state, stage.net, mixture)
    return mixture


def begin(state: Search, net: Pairs, mixture: Mixture) -> None:
    """Mix with the best choice from the start, where the network still has it."""
    if np.isfinite(state.cost):
        label = net.start[:-1] + state.choice
        if not mixture.crossing.forbidden(label):
            mixture.add(label, np.zeros(len(net.usage.limit)))


def take(state: Search, stage: Stage, mixture: Mixture) -> None:
    """Offer the best of a mixture when it keeps to the limits."""
    if mixture.best is not None and mixture.fits() and mixture.cost + stage.net.constant < state.cost:
        state.offer(stage.net, stage.done, mixture.best[mixture.crossing.nodes])


def tighten(state: Search, stage: Stage) -> None:
    """Rule out what no better choice uses, and reduce; when nothing is left, the best choice is optimal."""
    if np.isfinite(state.cost):
        rule_out(stage.net, stage.proof(), state.cost)
        stage.reduce()
        if not len(stage.net.nodes()):
            state.offer(stage.net, stage.done, np.zeros(0, np.int64))


def integer(state: Search, net: Pairs, done: Reduction, budget: Budget, nodes: int | None = None) -> tuple[bool, float]:
    """Solve the integer program of a network until the time, or HiGHS's number of nodes, is up: (whether to the end, a lower
    bound)."""
    program, bound, sharp = Program(net), -np.inf, False
    while True:
        start = state.labels(net) if np.isfinite(state.cost) else None
        point = program.integer(budget, start, nodes)
        if point is None:  # a program without choices, while none is known, is solved
            none = program.infeasible() and not sharp and not np.isfinite(state.cost)
            return none, np.inf if none else bound
        if not sharp:
            bound = max(bound, point.bound)
        state.offer(net, done, np.flatnonzero(point.weight > 0.5))
        if not program.add_rows(point.weight):
            if not program.sharpen(point.weight):
                return point.proved and not sharp, bound
            sharp = True
        if budget.over():
            return False, bound
