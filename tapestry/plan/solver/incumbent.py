"""What a search on a network with usages knows: the best choice, and the network that is left at the best prices."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tapestry.plan.solver.ascent import Messages, Mixture
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.elimination import Contraction, forest
from tapestry.plan.solver.lagrange import ExactPrices, ascend
from tapestry.plan.solver.mip import Program
from tapestry.plan.solver.pairs import (
    PROVED,
    Certificate,
    Infeasible,
    Instance,
    Multipliers,
    Pairs,
    Reduction,
    Solution,
    certify,
    from_instance,
    proved,
    reduce,
    rule_out,
)

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
        return Stage(self.net.copy(), self.done.copy(), self.price, self.forest, self.exact)

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
    unit = np.maximum(stage.net.usage.limit, 1.0)
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


# Large neighbourhood search (Shaw 1998): integer programs around the best choice.
#
# A neighbourhood keeps the best choice, and either the labels and joint choices that the bound says are nearly free, or those
# of the nodes around a few random ones.


PART = 30_000  # joint choices of a neighbourhood, at first
TURN = 0.05  # of the budget, for one, at first
ROUNDS = 20  # of mixing without a better choice before something else is tried
PRICES = (0.95, 1.0, 1.05, 1.1, 1.2)  # times the best prices, for choices to mix
SEEDS = 300  # nodes for each random one that others are near to
HELD = (0.05, 0.1, 0.3, 0.5, 0.7)  # part of the nodes that keep their labels
LEAST = 0.2 * SECOND  # below which none is begun


@dataclass(slots=True)
class Kind:
    """One kind of neighbourhood: its size in joint choices and the work for one, fitted to what was solved before."""

    units: float
    size: int = field(default_factory=lambda: PART)
    worth: float = 1.0  # improvements of late

    def learn(self, solved: bool, spent: float, won: float, most: int) -> None:
        """After one that took so many units and made the best choice cheaper by this part."""
        if not solved:
            self.size = int(self.size * 0.8) + 1
            self.units *= 1.0 if won else 1.3
        else:  # the same one again would bring nothing
            self.size = min(int(self.size * (1.3 if spent < self.units / 4 else 1.1)) + 1, most)
        self.worth = max(0.7 * self.worth + 0.3 * min(won / max(spent / SECOND, 0.1) * 1e4, 1.0), 0.1)


def kinds(units: float) -> dict[str, Kind]:
    """Of a search that has so many units."""
    turn = min(max(TURN * units, 5.0 * SECOND), 60.0 * SECOND)
    return {"cheapest": Kind(turn), "around": Kind(turn), "mixed": Kind(turn)}


def improve(state: Search, stage: Stage, budget: Budget, known: dict[str, Kind], rng: np.random.Generator) -> None:
    """Search neighbourhoods of the best choice for a while; the last one may go on for its turn."""
    proof, most = stage.proof(), stage.net.weight()
    names, near = list(known), None
    for k in known.values():
        k.worth = 1.0
    while budget.left() > LEAST and not state.closed():
        cost, begin = state.cost, budget.meter.spent
        worth = np.array([known[n].worth if np.isfinite(cost) or n == "cheapest" else 0.0 for n in names])
        name = names[int(rng.choice(len(names), p=worth / worth.sum()))]
        budget.spend(100 * most)
        if name == "mixed":
            near = near or Nearby(stage)
            solved, size = near.run(state, budget, rng), most
        else:
            solved, size = _solve(state, stage, proof, known[name], name, rng)
        won = (cost - state.cost) / abs(cost) if np.isfinite(cost) and cost else 0.0
        if size:
            known[name].learn(solved, budget.meter.spent - begin, won, most)
            state.note(f"neighbourhood ({name}) of {size} joint choices{'' if solved else ', cut off'}")


def _solve(
    state: Search, stage: Stage, proof: Certificate, kind: Kind, name: str, rng: np.random.Generator
) -> tuple[bool, int]:
    """The integer program of a neighbourhood: (whether to the end, joint choices: none where it was too small)."""
    part, most = stage.done.copy(), stage.net.weight()
    if name == "cheapest":
        small = _cheapest(state, stage.net, part, proof, kind.size)
    else:
        small = _around(state, stage.net, part, proof, kind.size, rng)
    if small is None or not len(small.nodes()):
        if small is not None:
            state.offer(small, part, np.zeros(0, np.int64))
        kind.size = min(int(kind.size * 1.2) + 1, most)
        return True, 0
    solved, _ = integer(state, small, part, state.budget.part(min(kind.units, 0.2 * state.budget.left() + SECOND)))
    return solved, len(small.a)


class Nearby:
    """Choices that messages find where some random nodes keep the labels of the best one, mixed into it.

    The nodes that are held cut the network into small parts, for which messages are nearly exact, all at once; whether a part
    takes its new labels is decided by what it saves and by the limits (`plan.solver.ascent`).
    """

    def __init__(self, stage: Stage) -> None:
        self.stage, self.messages = stage, Messages(stage.net)
        self.mixture = Mixture(self.messages)
        net = stage.net
        degree = np.bincount(net.tail, minlength=len(net.gone)) + np.bincount(net.head, minlength=len(net.gone))
        self.degree = degree[self.messages.nodes] + 1.0

    def run(self, state: Search, budget: Budget, rng: np.random.Generator) -> bool:
        """Some rounds, more while they bring something; whether the budget held."""
        if self.mixture.best is None or self.mixture.cost + self.stage.net.constant > state.cost:
            begin(state, self.stage.net, self.mixture)
        if self.mixture.best is None:  # ruled out: it is optimal, but for what the bound cannot tell
            return True
        stall = 0
        while stall < ROUNDS and not budget.over() and not state.closed():
            stall = 0 if self._round(budget, rng) else stall + 1
            if not stall:
                take(state, self.stage, self.mixture)
        return not budget.over()

    def _round(self, budget: Budget, rng: np.random.Generator) -> bool:
        """One choice more; whether the best is better."""
        messages, net = self.messages, self.stage.net
        price = self.stage.price * float(rng.choice(PRICES))
        unary = messages.unary + net.usage.priced(price, len(net.unary))[messages.label]
        best = messages.first + self.mixture.ranks()
        held = self._held(rng)
        unary = unary + np.where(np.repeat(held, messages.count), messages.large, 0.0)
        unary[best] -= np.where(held, messages.large, 0.0)
        if rng.random() < 0.5:
            messages.message = np.zeros_like(messages.message)
        sweeps = int(rng.choice([1, 3]))
        for _ in range(sweeps):
            messages.sweep(unary, reverse=False)
            messages.sweep(unary, reverse=True)
        choice = messages.descend(unary, messages.decode(unary), 5)
        budget.spend((2 * sweeps + 2) * messages.work + self.mixture.work)
        return self.mixture.add(self.mixture.labels(choice), price)

    def _held(self, rng: np.random.Generator) -> np.ndarray:
        """Nodes that keep their labels: some anywhere, and half the time all those that are not near a random one."""
        net, nodes = self.stage.net, self.messages.nodes
        weight = self.degree if rng.random() < 0.7 else np.ones(len(nodes))
        held = rng.random(len(nodes)) < np.minimum(weight / weight.mean() * float(rng.choice(HELD)), 0.95)
        if rng.random() < 0.5:
            return held
        near = np.zeros(len(net.gone), bool)
        near[rng.choice(nodes, int(rng.integers(1, 1 + max(1, len(nodes) // SEEDS))))] = True
        for _ in range(int(rng.integers(2, 12))):
            a, b = near[net.tail], near[net.head]
            near[net.head[a]] = True
            near[net.tail[b]] = True
            if near.sum() > 0.3 * len(nodes):
                break
        return held & (rng.random() < 0.5) | ~near[nodes]


def _restrict(state: Search, net: Pairs, done: Reduction, labels: np.ndarray, joint: np.ndarray) -> Pairs:
    """Only these labels and joint choices, and those of the best choice."""
    small = net.copy()
    best = np.zeros(len(net.unary), bool)
    if np.isfinite(state.cost):
        best[state.labels(net)] = True
    small.unary[~(labels | best)] = np.inf
    small.keep(joint | (best[net.a] & best[net.b]))
    reduce(small, done)
    return small


def _cheapest(state: Search, net: Pairs, done: Reduction, proof: Certificate, size: int) -> Pairs | None:
    """The labels and joint choices that add least to the bound, as many as ``size`` joint choices."""
    order = np.sort(proof.joint)
    at, out, kept = size // 2, None, done
    while at < 2 * len(order):
        most = order[min(at, len(order) - 1)]
        steps = done.copy()
        try:
            small = _restrict(state, net, steps, proof.label <= most, proof.joint <= most)
        except Infeasible:  # too few, while no choice is known
            at = int(at * 1.5)
            continue
        if len(small.a) > size and out is not None:
            break
        out, kept = small, steps
        at = int(at * 1.5)
    if out is not None:
        done.steps = kept.steps
    return out


def _around(
    state: Search, net: Pairs, done: Reduction, proof: Certificate, size: int, rng: np.random.Generator
) -> Pairs | None:
    """What adds little to the bound on the nodes around a random one, and the best choice elsewhere."""
    most = (state.cost - proof.bound) * float(rng.choice([1.0, 0.5, 0.2, 0.1, 0.05]))
    free = np.zeros(len(net.gone), bool)
    free[rng.choice(net.nodes(), int(rng.integers(1, 4)))] = True
    weight = np.bincount(net.edge, proof.joint <= most, len(net.tail))
    while True:
        inside = free[net.tail] & free[net.head]
        border = np.unique(np.concatenate([net.head[free[net.tail]], net.tail[free[net.head]]]))
        border = rng.permutation(border[~free[border]])
        border = border[: max(1, len(border) // 2)]
        if weight[inside].sum() > size or free[net.nodes()].all():
            break
        free[border if len(border) else rng.choice(net.nodes())] = True
    label = free[net.node] & (proof.label <= most)
    return _restrict(state, net, done, label, proof.joint <= most)


# Large networks of pairs with usages over time: a choice, and a certified lower bound.
#
# Exact reductions; prices and messages for the bound, which with the best known choice rule out labels and joint choices;
# again reductions; the integer program on what is left when it is small enough. Otherwise neighbourhoods of the best choice for
# the choice, and branch and bound for the bound, in turns.
#
# Branch and bound (Land and Doig 1960) is over who may use much of the resource. The prices leave a gap because they let
# nodes use an average of much and little. So a node whose nearly free labels use very different amounts, at these prices, is
# split: at most the middle amount, or more. Bounds come from the prices of each part.


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
