"""A large network of choices with costs on nodes and on pairs, and usages of one shared resource over intervals of time.

Everything is kept in flat arrays over labels (a label is one choice of one node) and over allowed joint choices of pairs, so
that a pass over the whole network is a few numpy calls. Labels keep their numbers for good: a label that is ruled out has
an infinite cost, a node that another one decides is `gone`.

For any prices over time and any messages, the sum of the minima of all moved costs less the price of the limits is at most
the cost of every choice that keeps to the limits (Lagrangian duality: Geoffrion 1974). So a label or a joint choice that
raises it above the cost of a known choice is in no better one (reduced-cost fixing: Dantzig, Fulkerson and Johnson 1954).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

FORBIDDEN = 1e17  # a cost this high means: not allowed
ROUNDING = 1e-13  # of the largest cost: about 450 roundings of a double; smaller differences mean nothing


PROVED = 1e-9  # of the cost: how far the bound may be below it where a choice counts as optimal; rounding takes as much


class Infeasible(Exception):
    """No choice is allowed, or none keeps to the limits of the usages."""


def largest(costs: np.ndarray) -> float:
    """The largest size of any cost."""
    return float(np.abs(costs).max(initial=0.0))


def proved(cost: float, bound: float, gap: float = PROVED) -> bool:
    """Whether a bound shows that no choice is cheaper than ``cost``, up to a part of it."""
    return cost < np.inf and (gap == np.inf or cost - bound <= gap * abs(cost))


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice per node, its cost, and a proven lower bound (infinite where no choice is allowed); prices of usages."""

    choice: list[int]
    objective: float
    bound: float
    price: np.ndarray | None = field(default=None, compare=False)


@dataclass(slots=True)
class Usage:
    """What labels use: ``amount`` of ``label`` counts at times ``lo <= t < hi``; at time t at most ``limit[t]`` may be used."""

    label: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    amount: np.ndarray
    limit: np.ndarray
    time: np.ndarray  # what was given as time of each time that is left

    @staticmethod
    def none() -> Usage:
        """Nothing is used, at no time."""
        zero = np.zeros(0, np.int64)
        return Usage(zero, zero, zero, np.zeros(0), np.zeros(0), zero)

    def keep(self, which: np.ndarray) -> None:
        """Forget all other entries."""
        self.label, self.lo, self.hi, self.amount = self.label[which], self.lo[which], self.hi[which], self.amount[which]

    @property
    def unit(self) -> np.ndarray:
        """What excess and prices are measured in at each time."""
        return np.maximum(self.limit, 1.0)

    def over_time(self, amount: np.ndarray) -> np.ndarray:
        """Sum over the entries alive at each time."""
        end = len(self.limit) + 1
        return np.cumsum(np.bincount(self.lo, amount, end) - np.bincount(self.hi, amount, end))[:-1]

    def of(self, weight: np.ndarray) -> np.ndarray:
        """Used at each time when every label counts with a weight."""
        return self.over_time(self.amount * weight[self.label])

    def priced(self, price: np.ndarray, labels: int) -> np.ndarray:
        """For each label, its usage times the price over time."""
        total = np.concatenate([[0.0], np.cumsum(price)])
        return np.bincount(self.label, self.amount * (total[self.hi] - total[self.lo]), labels)


@dataclass(frozen=True, slots=True)
class Instance:
    """A problem as it is given: minimise node and pair costs, with what is used at any time within the limit.

    Attributes:
        sizes: number of choices of every node.
        unary: costs of the choices, node after node; these are the labels.
        pairs: ``(pairs, 2)`` nodes.
        tables: costs of the pairs, row-major over the choices of the two nodes, pair after pair.
        usage: what the labels use over time, and the limits.
    """

    sizes: np.ndarray
    unary: np.ndarray
    pairs: np.ndarray
    tables: np.ndarray
    usage: Usage = field(default_factory=Usage.none)

    def start(self) -> np.ndarray:
        """First label of every node, and the number of labels."""
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    def cost(self, choice: np.ndarray) -> float:
        """Node and pair costs of a choice; infinite when it uses what is forbidden."""
        one = self.unary[self.start()[:-1] + choice]
        i, j = self.pairs[:, 0], self.pairs[:, 1]
        width = self.sizes[j]
        at = np.concatenate([[0], np.cumsum(self.sizes[i] * width)])[:-1]
        two = self.tables[at + choice[i] * width + choice[j]]
        if (one >= FORBIDDEN).any() or (two >= FORBIDDEN).any():
            return np.inf
        return float(one.sum() + two.sum())

    def excess(self, choice: np.ndarray) -> float:
        """By how much a choice passes the limit where it does so most; at most 0 when it keeps to all limits."""
        weight = np.zeros(len(self.unary))
        weight[self.start()[:-1] + choice] = 1.0
        return float((self.usage.of(weight) - self.usage.limit).max(initial=-np.inf))


@dataclass(slots=True)
class Pairs:
    """The network: ``cost[k]`` is what choosing labels ``a[k]`` and ``b[k]`` of pair ``edge[k]`` adds; others are forbidden."""

    start: np.ndarray  # first label of every node
    node: np.ndarray  # of every label
    unary: np.ndarray
    gone: np.ndarray  # nodes that others decide
    tail: np.ndarray  # of every pair
    head: np.ndarray
    edge: np.ndarray
    a: np.ndarray
    b: np.ndarray
    cost: np.ndarray
    usage: Usage
    constant: float
    tiny: float  # differences below are rounding

    @property
    def size(self) -> np.ndarray:
        """Number of labels of every node, ruled out or not."""
        return np.diff(self.start)

    def alive(self) -> np.ndarray:
        """Which labels may be used."""
        return np.isfinite(self.unary)

    def counts(self) -> np.ndarray:
        """How many labels of every node may be used."""
        return np.bincount(self.node[self.alive()], minlength=len(self.gone))

    def nodes(self) -> np.ndarray:
        """The nodes that are left."""
        return np.flatnonzero(~self.gone)

    def degree(self) -> np.ndarray:
        """How many pairs every node is in."""
        return np.bincount(np.append(self.tail, self.head), minlength=len(self.gone))

    def largest(self) -> float:
        """The largest cost that is allowed."""
        return max(largest(self.cost), largest(self.unary[self.alive()]), self.tiny)

    def priced(self, price: np.ndarray) -> np.ndarray:
        """For each label, its cost and its usage times the price over time."""
        return self.unary + self.usage.priced(price, len(self.unary))

    def weight(self) -> int:
        """Labels and joint choices that are left."""
        return int(self.alive().sum()) + len(self.a)

    def keep(self, which: np.ndarray) -> None:
        """Forbid all other joint choices."""
        self.edge, self.a, self.b, self.cost = self.edge[which], self.a[which], self.b[which], self.cost[which]

    def drop(self, dead: np.ndarray) -> None:
        """Forget pairs."""
        if dead.any():
            self.keep(~dead[self.edge])
            self.edge = (np.cumsum(~dead) - 1)[self.edge]
            self.tail, self.head = self.tail[~dead], self.head[~dead]

    def swap(self, pairs: np.ndarray) -> None:
        """Exchange tail and head of some pairs."""
        flipped = pairs[self.edge]
        self.a, self.b = np.where(flipped, self.b, self.a), np.where(flipped, self.a, self.b)
        self.tail, self.head = np.where(pairs, self.head, self.tail), np.where(pairs, self.tail, self.head)

    def slots(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(number of the side's label for each joint choice, label of each number), for tails and for heads.

        The labels of the tail of pair 0 come first, then those of pair 1, …; likewise for heads.
        """
        out: list[np.ndarray] = []
        for nodes, label in ((self.tail, self.a), (self.head, self.b)):
            size = self.size[nodes]
            first = np.cumsum(size) - size - self.start[nodes]
            out += [first[self.edge] + label, np.arange(int(size.sum())) - np.repeat(first, size)]
        return out[0], out[1], out[2], out[3]

    def move(self, tails: np.ndarray, heads: np.ndarray) -> None:
        """Move costs from nodes to pairs (by the numbers of `slots`): no total changes, but what the minima add up to does."""
        sa, of_a, sb, of_b = self.slots()
        self.cost = self.cost + tails[sa] + heads[sb]
        gone = np.bincount(of_a, tails, len(self.unary)) + np.bincount(of_b, heads, len(self.unary))
        self.unary = self.unary - gone

    def copy(self) -> Pairs:
        """A network that may be changed without this one: only these arrays are ever changed in place."""
        return replace(self, unary=self.unary.copy(), gone=self.gone.copy(), usage=replace(self.usage))


def from_instance(given: Instance) -> Pairs:
    """Flat arrays of an instance; forbidden joint choices are left out."""
    if (given.usage.amount < 0).any():
        raise ValueError("usages must not be negative")
    start = given.start()
    count = len(given.sizes)
    node = np.repeat(np.arange(count), given.sizes)
    tail, head = given.pairs[:, 0].astype(np.int64), given.pairs[:, 1].astype(np.int64)
    entries = given.sizes[tail] * given.sizes[head]
    edge = np.repeat(np.arange(len(tail)), entries)
    within = np.arange(len(edge)) - np.repeat(np.cumsum(entries) - entries, entries)
    width = given.sizes[head][edge]
    allowed = given.tables < FORBIDDEN
    a, b = start[tail][edge] + within // width, start[head][edge] + within % width
    unary = np.where(given.unary < FORBIDDEN, given.unary, np.inf).astype(float)
    cost = given.tables[allowed].astype(float)
    scale = max(largest(cost), largest(unary[np.isfinite(unary)]))
    return Pairs(
        start,
        node,
        unary,
        np.zeros(count, bool),
        tail,
        head,
        edge[allowed],
        a[allowed],
        b[allowed],
        cost,
        replace(given.usage),
        0.0,
        ROUNDING * scale,
    )


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Price over time, and for each number of `Pairs.slots` the cost moved from the node's label to the pair."""

    price: np.ndarray
    tails: np.ndarray
    heads: np.ndarray


@dataclass(frozen=True, slots=True)
class Certificate:
    """The bound, and how much each label and each joint choice adds to it at least."""

    bound: float
    label: np.ndarray
    joint: np.ndarray


def certify(net: Pairs, given: Multipliers) -> Certificate:
    """Evaluate the bound from scratch, whoever found the multipliers."""
    price = np.maximum(given.price, 0.0)
    sa, of_a, sb, of_b = net.slots()
    count = len(net.unary)
    moved = net.priced(price) - np.bincount(of_a, given.tails, count) - np.bincount(of_b, given.heads, count)
    least = np.full(len(net.gone), np.inf)
    np.minimum.at(least, net.node, moved)
    joint = net.cost + given.tails[sa] + given.heads[sb]
    least_pair = np.full(len(net.tail), np.inf)
    np.minimum.at(least_pair, net.edge, joint)
    left = np.isfinite(least)
    bound = net.constant + float(least[left].sum() + least_pair.sum() - (price * net.usage.limit).sum())
    joint = joint - least_pair[net.edge]
    extra = np.where(net.alive(), moved - np.where(left, least, 0.0)[net.node], np.inf)
    best_a, best_b = np.full(len(of_a), np.inf), np.full(len(of_b), np.inf)
    np.minimum.at(best_a, sa, joint)
    np.minimum.at(best_b, sb, joint)
    for best, of in ((best_a, of_a), (best_b, of_b)):
        best[~net.alive()[of]] = 0.0
        extra = extra + np.bincount(of, best, len(extra))
    joint = joint + (extra[net.a] - best_a[sa]) + (extra[net.b] - best_b[sb])
    return Certificate(bound, extra, joint)


def rule_out(net: Pairs, proof: Certificate, cost: float) -> int:
    """Forbid labels and joint choices that only choices dearer than ``cost`` can use; how many."""
    slack = cost - proof.bound + PROVED * abs(cost)
    dead = (proof.label > slack) & net.alive()
    net.unary[dead] = np.inf
    keep = proof.joint <= slack
    net.keep(keep)
    return int(dead.sum()) + int((~keep).sum())
