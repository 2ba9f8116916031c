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


@dataclass(slots=True)
class Search:
    """The best choice and the best bound so far."""

    given: Instance
    deadline: float
    choice: np.ndarray
    cost: float = np.inf
    bound: float = -np.inf
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
        return bool(np.isfinite(self.cost)) and self.cost - self.bound <= CLOSED * abs(self.cost)

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
    net, done = from_instance(given), Reduction()
    try:
        reduce(net, done)
        state.note(f"reduced to {len(net.nodes())} nodes, {len(net.a)} joint choices")
        proof = _shrink(state, net, done)
        if not state.closed() and len(net.a) <= EXACT:
            proof = _exact(state, net, done, proof)
    except Infeasible:
        state.bound = state.cost
        return state
    if not state.closed():
        improve(state, net, done, proof)
    return state


def _shrink(state: Search, net: Pairs, done: Reduction) -> Certificate:
    """Bound, rule out and reduce while that makes the network much smaller."""
    price = np.zeros(len(net.usage.limit))
    share = 0.25
    while True:
        before = net.weight()
        messages = Messages(net)

        def found(choice: np.ndarray, cost: float) -> float:
            if cost + net.constant < state.cost:
                state.offer(net, done, messages.label[messages.first + choice])  # noqa: B023
            return state.cost - net.constant

        ascent = ascend(messages, price, time.monotonic() + state.left() * share, found)
        given = ascent.multipliers()
        if not np.isfinite(state.cost):
            force(ascent, state.deadline, found)
        net.move(given.tails, given.heads)
        state.raise_bound(certify(net, _priced(net, given.price)).bound)
        state.note(f"prices for {int((given.price > 0).sum())} times")
        proof, price = _tighten(state, net, done, given.price)
        if state.closed() or state.left() <= 0 or net.weight() > 0.7 * before:
            return proof


def _priced(net: Pairs, price: np.ndarray) -> Multipliers:
    slots = net.slots()
    return Multipliers(price, np.zeros(len(slots[1])), np.zeros(len(slots[3])))


def _tighten(state: Search, net: Pairs, done: Reduction, price: np.ndarray) -> tuple[Certificate, np.ndarray]:
    """Rule out what no better choice uses and reduce; (certificate, prices) for what is left."""
    if np.isfinite(state.cost):
        rule_out(net, certify(net, _priced(net, price)), state.cost)
        times = net.usage.time
        reduce(net, done)
        moved = np.zeros(len(net.usage.limit))
        if len(moved):
            at = np.flatnonzero(price)
            to = np.minimum(np.searchsorted(net.usage.time, times[at]), len(moved) - 1)
            np.add.at(moved, to, price[at])
        price = moved
        if not len(net.nodes()):
            state.offer(net, done, np.zeros(0, np.int64))
            state.raise_bound(state.cost)
        state.note(f"left {len(net.nodes())} nodes, {len(net.a)} joint choices")
    return certify(net, _priced(net, price)), price


def _exact(state: Search, net: Pairs, done: Reduction, proof: Certificate) -> Certificate:
    """The linear relaxation, then the integer program of what it does not rule out."""
    program = Program(net)
    point = program.relax(time.monotonic() + state.left() * 0.5)
    if point is not None and point.multipliers is not None:
        proof = certify(net, point.multipliers)
        state.raise_bound(proof.bound)
        state.note("linear relaxation")
        net.move(point.multipliers.tails, point.multipliers.heads)
        proof, _ = _tighten(state, net, done, point.multipliers.price)
    if state.closed() or not len(net.nodes()):
        return proof
    _integer(state, net, done, state.deadline, whole=True)
    return proof


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


def improve(state: Search, net: Pairs, done: Reduction, proof: Certificate) -> None:
    """Search neighbourhoods of the best choice until the time is up."""
    rng = np.random.default_rng(0)
    size, turn = PART, 0
    while state.left() > 1.0 and not state.closed():
        part = done.copy()
        cost = state.cost
        if turn % 2 == 0 or not np.isfinite(state.cost):
            small = _cheapest(state, net, part, proof, size)
        else:
            small = _around(state, net, part, proof, size, rng)
        turn += 1
        if small is None or not len(small.nodes()):
            continue
        solved = _integer(state, small, part, time.monotonic() + min(state.left(), 20.0), whole=False)
        if solved and state.cost >= cost and turn % 2 == 0:
            size = int(size * 1.5)


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


def _around(state: Search, net: Pairs, done: Reduction, proof: Certificate, size: int, rng: np.random.Generator) -> Pairs | None:
    """All labels of the nodes around a random one, and the best choice elsewhere."""
    nodes = net.nodes()
    free = np.zeros(len(net.gone), bool)
    free[rng.choice(nodes)] = True
    weight = np.bincount(net.edge, minlength=len(net.tail))
    while True:
        inside = free[net.tail] & free[net.head]
        border = np.unique(np.concatenate([net.head[free[net.tail]], net.tail[free[net.head]]]))
        border = rng.permutation(border[~free[border]])[: max(1, len(border) // 2)]
        if not len(border) or weight[inside].sum() > size:
            break
        free[border] = True
    label = free[net.node]
    return _restrict(state, net, done, label, label[net.a] | label[net.b])
