"""Large networks of pairs with usages over time: a choice, and a certified lower bound.

Exact reductions; prices and messages for the bound, which with the best known choice rule out labels and joint choices;
again reductions; the integer program on what is left when it is small enough, and otherwise on neighbourhoods of the best
choice: the labels that the bound says are nearly free, or all labels of the nodes around one (large neighbourhood search:
Shaw 1998).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from tapestry.plan.search.ascent import Messages
from tapestry.plan.search.bound import Certificate, Multipliers, certify, rule_out
from tapestry.plan.search.lagrange import ascend, force
from tapestry.plan.search.mip import Program
from tapestry.plan.search.pairs import Infeasible, Instance, Pairs, Solution, from_instance
from tapestry.plan.search.reduce import Reduction, reduce

EXACT = 150_000  # joint choices up to which the whole network goes to HiGHS
PART = 30_000  # the same for a neighbourhood, at first
CLOSED = 1e-9
SHARE = 0.2  # of the time left, for one search for prices or one linear relaxation
SLICE = 0.5  # of the time left, for neighbourhoods before the bound is tried again
TURN = 15.0  # seconds for a neighbourhood


@dataclass(slots=True)
class Search:
    """The best choice and the best bound so far."""

    given: Instance
    deadline: float
    choice: np.ndarray
    cost: float = np.inf
    bound: float = -np.inf
    tiny: float = 0.0  # differences below are rounding
    log: list[tuple[float, str, float, float]] = field(default_factory=list[tuple[float, str, float, float]])
    began: float = field(default_factory=time.monotonic)

    def offer(self, net: Pairs, done: Reduction, label: np.ndarray) -> bool:
        """Take labels for the nodes left of a network as the best choice if they are, when put back into the given problem."""
        start = net.start[:-1]
        full = start.copy()
        full[net.node[label]] = label
        choice = done.lift(full) - start
        cost = self.given.cost(choice)
        if cost >= self.cost or self.given.peak(choice) > self.given.limit:
            return False
        self.choice, self.cost = choice, cost
        return True

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
        """Whether the best choice is proved to be optimal."""
        return bool(np.isfinite(self.cost)) and self.cost - self.bound <= CLOSED * abs(self.cost) + self.tiny

    def solution(self) -> Solution:
        """For callers."""
        return Solution([int(c) for c in self.choice], self.cost, self.bound)

    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()


def solve(given: Instance, time_limit: float) -> Solution:
    """Minimise within the limit of the usages.

    Args:
        time_limit: seconds.

    Returns:
        The best choice found; its cost is infinite when none was, and so is the bound when there is none.
    """
    return search(given, time_limit).solution()


def search(given: Instance, time_limit: float) -> Search:
    """`solve`, with what it saw on the way."""
    state = Search(given, time.monotonic() + time_limit, np.zeros(len(given.sizes), np.int64))
    stage = Stage(from_instance(given), Reduction())
    state.tiny = stage.net.tiny
    try:
        reduce(stage.net, stage.done)
        stage.price = np.zeros(len(stage.net.usage.limit))
        state.note(f"reduced to {len(stage.net.nodes())} nodes, {len(stage.net.a)} joint choices")
        tried = None
        while not state.closed() and state.left() > 1.0:
            if tried is None or state.cost < tried:
                tried = state.cost
                _shrink(state, stage)
                if not state.closed() and len(stage.net.a) <= EXACT:
                    _exact(state, stage)
            if not state.closed():
                improve(state, stage, time.monotonic() + SLICE * state.left())
    except Infeasible:
        state.bound = state.cost
    return state


@dataclass(slots=True)
class Stage:
    """What is left of the problem: costs moved so that the least of each node and pair add up to the bound at these prices."""

    net: Pairs
    done: Reduction
    price: np.ndarray = field(default_factory=lambda: np.zeros(0))
    size: dict[str, int] = field(default_factory=lambda: {"cheapest": PART, "around": PART})

    def proof(self) -> Certificate:
        """The bound, and what labels and joint choices add to it."""
        return certify(self.net, _priced(self.net, self.price))

    def move(self, given: Multipliers) -> None:
        """Move costs along messages; the prices stay apart."""
        self.net.move(given.tails, given.heads)
        self.price = given.price


def _shrink(state: Search, stage: Stage) -> None:
    """Bound, rule out and reduce while that makes the network much smaller."""
    while True:
        net = stage.net
        before, messages = net.weight(), Messages(net)

        def found(choice: np.ndarray, cost: float, net: Pairs = net, messages: Messages = messages) -> float:
            if cost + net.constant < state.cost:
                state.offer(net, stage.done, messages.label[messages.first + choice])
            return state.cost - net.constant

        share = SHARE if not np.isfinite(state.bound) else SHARE / 2
        ascent = ascend(messages, stage.price, time.monotonic() + state.left() * share, found)
        if not np.isfinite(state.cost):
            force(ascent, time.monotonic() + state.left() * SHARE, found)
        stage.move(ascent.multipliers())
        state.raise_bound(stage.proof().bound)
        state.note(f"prices for {int((stage.price > 0).sum())} times")
        _tighten(state, stage)
        if state.closed() or state.left() <= 0 or net.weight() > 0.7 * before:
            return


def _priced(net: Pairs, price: np.ndarray) -> Multipliers:
    slots = net.slots()
    return Multipliers(price, np.zeros(len(slots[1])), np.zeros(len(slots[3])))


def _tighten(state: Search, stage: Stage) -> None:
    """Rule out what no better choice uses, and reduce."""
    if not np.isfinite(state.cost):
        return
    net, price = stage.net, stage.price
    rule_out(net, stage.proof(), state.cost)
    times = net.usage.time
    reduce(net, stage.done)
    stage.price = np.zeros(len(net.usage.limit))
    if len(stage.price):
        at = np.flatnonzero(price)
        to = np.minimum(np.searchsorted(net.usage.time, times[at]), len(stage.price) - 1)
        np.add.at(stage.price, to, price[at])
    if not len(net.nodes()):
        state.offer(net, stage.done, np.zeros(0, np.int64))
        state.raise_bound(state.cost)
    state.note(f"left {len(net.nodes())} nodes, {len(net.a)} joint choices")


def _exact(state: Search, stage: Stage) -> None:
    """The linear relaxation, then the integer program of what it does not rule out."""
    point = Program(stage.net).relax(time.monotonic() + state.left() * SHARE)
    if point is None or point.multipliers is None:
        return
    stage.move(point.multipliers)
    state.raise_bound(stage.proof().bound)
    state.note("linear relaxation")
    _tighten(state, stage)
    if not state.closed() and len(stage.net.nodes()):
        _integer(state, stage.net, stage.done, time.monotonic() + state.left() * 0.5, whole=True)


def _integer(state: Search, net: Pairs, done: Reduction, deadline: float, *, whole: bool) -> bool:
    """Solve the integer program of a network until the time is up; whether it was solved to the end."""
    program = Program(net)
    while True:
        start = state.labels(net) if np.isfinite(state.cost) else None
        point = program.integer(deadline, start)
        if point is None:
            return False
        if whole:
            state.raise_bound(point.bound)
        label = np.flatnonzero(point.weight > 0.5)
        state.offer(net, done, label)
        if not program.add_rows(point.weight):
            if whole and point.proved:
                state.raise_bound(point.bound)
            state.note("integer program" if whole else "neighbourhood")
            return point.proved
        if time.monotonic() > deadline:
            return False


def improve(state: Search, stage: Stage, deadline: float) -> None:
    """Search neighbourhoods of the best choice for a while; sizes follow what the integer program can do in a turn."""
    proof = stage.proof()
    rng = np.random.default_rng(len(state.log))
    turn, wins = 0, {"cheapest": 1.0, "around": 1.0}
    while time.monotonic() < deadline and state.left() > 1.0 and not state.closed():
        part, cost, size, begin = stage.done.copy(), state.cost, stage.size, time.monotonic()
        kind = "cheapest" if not np.isfinite(cost) or rng.random() < wins["cheapest"] / sum(wins.values()) else "around"
        turn += 1
        if kind == "cheapest":
            small = _cheapest(state, stage.net, part, proof, size[kind])
        else:
            small = _around(state, stage.net, part, proof, size[kind], rng)
        if small is None or not len(small.nodes()):
            if small is not None:
                state.offer(small, part, np.zeros(0, np.int64))
            size[kind] = min(int(size[kind] * 1.2) + 1, stage.net.weight())
            continue
        solved = _integer(state, small, part, begin + min(state.left(), TURN), whole=False)
        spent = time.monotonic() - begin
        if not solved:
            size[kind] = int(size[kind] * 0.7) + 1
        elif spent < TURN / 4:
            size[kind] = min(int(size[kind] * 1.3) + 1, stage.net.weight())
        won = (cost - state.cost) / abs(cost) / max(spent, 0.1) if np.isfinite(cost) and cost else 0.0
        wins[kind] = max(0.7 * wins[kind] + 0.3 * min(won * 1e4, 1.0), 0.1)


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
    at, out = size // 2, None
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
