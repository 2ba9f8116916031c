"""Two choices of a network made into one that is cheaper and keeps to the limits.

Where two choices differ, the nodes that differ fall into components without pairs between them (partition crossover: Whitley,
Hains and Howe 2009). Each component takes the labels of the one or of the other, and what that adds to the cost and to the
usages does not depend on the others: left is a knapsack over components, filled greedily by cost per unit of what is scarce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tapestry.plan.solver.ascent import LARGE, Messages
from tapestry.plan.solver.network_reduction import components
from tapestry.plan.solver.pairs import Pairs, Usage

TOGGLES = 4000  # components that give way one at a time before a mixture is given up


@dataclass(slots=True)
class _Parts:
    """Components: what switching each one to the other choice adds to the cost and to the usages."""

    gain: np.ndarray
    of: np.ndarray  # of each entry of ``usage``
    usage: Usage
    amount: np.ndarray  # of each entry: below zero where it is given up
    first: np.ndarray  # entries of each part, in order of parts


class Crossing:
    """What mixing choices of one network takes; a choice is a label for every node, any one for those that are gone."""

    def __init__(self, net: Pairs) -> None:
        self.net = net
        self.wide = int(net.size.max(initial=1)) + 1
        key = self._key(net.edge, net.a, net.b)
        order = np.argsort(key)
        self.keys, self.costs = key[order], net.cost[order]
        self.large = LARGE * net.largest()
        self.nodes = net.nodes()

    def _key(self, edge: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        net = self.net
        a, b = a - net.start[net.tail[edge]], b - net.start[net.head[edge]]
        return (edge * self.wide + a) * self.wide + b

    def full(self, label: np.ndarray) -> np.ndarray:
        """A choice from the labels of the nodes that are left."""
        out = self.net.start[:-1].copy()
        out[self.net.node[label]] = label
        return out

    def forbidden(self, choice: np.ndarray) -> int:
        """How many labels and joint choices of a choice are not allowed."""
        labels = int((~np.isfinite(self.net.unary[choice[self.nodes]])).sum())
        return labels + int((self.pairs(choice, np.inf) == np.inf).sum())

    def pairs(self, choice: np.ndarray, instead: float | None = None) -> np.ndarray:
        """Cost of every pair; `large`, or what is given instead, where it is forbidden."""
        none = self.large if instead is None else instead
        net = self.net
        if not len(self.keys):
            return np.full(len(net.tail), none)
        key = self._key(np.arange(len(net.tail)), choice[net.tail], choice[net.head])
        at = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        return np.where(self.keys[at] == key, self.costs[at], none)

    def cost(self, choice: np.ndarray) -> float:
        """Of a choice, less the network's constant."""
        return float(self.net.unary[choice[self.nodes]].sum() + self.pairs(choice).sum())

    def used(self, choice: np.ndarray) -> np.ndarray:
        """Over time."""
        weight = np.zeros(len(self.net.unary))
        weight[choice[self.nodes]] = 1.0
        return self.net.usage.of(weight)

    def mix(self, x: np.ndarray, y: np.ndarray, price: np.ndarray) -> np.ndarray:
        """A choice with each component from x or y: within the limits if it can, and cheap.

        Args:
            price: over time, for the first guess.
        """
        parts, part = self._parts(x, y)
        if not len(parts.gain):
            return x
        total = np.concatenate([[0.0], np.cumsum(price)])
        paid = parts.amount * (total[parts.usage.hi] - total[parts.usage.lo])
        switched = parts.gain + np.bincount(parts.of, paid, len(parts.gain)) < 0
        used = self.used(x)
        here = switched[parts.of]
        used = used + parts.usage.over_time(np.where(here, parts.amount, 0.0))
        limit = self.net.usage.limit
        used = self._give_way(parts, switched, used, limit)
        self._fill(parts, switched, used, limit)
        take = (part >= 0) & switched[part]
        return np.where(take, y, x)

    def _parts(self, x: np.ndarray, y: np.ndarray) -> tuple[_Parts, np.ndarray]:
        """The components, and which one every node belongs to (-1: none)."""
        net = self.net
        differs = np.zeros(len(net.gone), bool)
        differs[self.nodes] = x[self.nodes] != y[self.nodes]
        both = differs[net.tail] & differs[net.head]
        root = components(len(net.gone), net.tail[both], net.head[both])
        names, part = np.unique(root[differs], return_inverse=True)
        of = np.full(len(net.gone), -1)
        of[differs] = part
        delta = self.pairs(y) - self.pairs(x)
        touched = differs[net.tail] | differs[net.head]
        end = np.where(differs[net.tail], net.tail, net.head)[touched]
        mine = np.flatnonzero(differs)
        gain = np.bincount(of[mine], net.unary[y[mine]] - net.unary[x[mine]], len(names))
        gain += np.bincount(of[end], delta[touched], len(names))
        use = net.usage
        node = net.node[use.label]
        new = differs[node] & (use.label == y[node])
        old = differs[node] & (use.label == x[node])
        at = np.flatnonzero(new | old)
        order = at[np.argsort(of[node[at]], kind="stable")]
        entries = Usage(use.label[order], use.lo[order], use.hi[order], use.amount[order], use.limit, use.time)
        owner = of[node[order]]
        amount = np.where(new[order], 1.0, -1.0) * use.amount[order]
        return _Parts(gain, owner, entries, amount, np.searchsorted(owner, np.arange(len(names) + 1))), of

    def _give_way(self, parts: _Parts, switched: np.ndarray, used: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """Switch components back or over until no limit is passed, those first that cost least for what they free."""
        tried, unit = np.zeros(len(switched), np.int64), np.maximum(limit, 1e-12)
        for _ in range(TOGGLES if len(limit) else 0):
            t = int(((used - limit) / unit).argmax())
            over = used[t] - limit[t]
            if over <= 0:
                break
            now = (parts.usage.lo <= t) & (t < parts.usage.hi)
            sign = np.where(switched, -1.0, 1.0)
            owner = parts.of[now]
            freed = -np.bincount(owner, parts.amount[now], len(switched)) * sign
            can = (freed > 0) & (tried < 2) & (parts.gain * sign < self.large / 2)
            if not can.any():
                break
            at = np.flatnonzero(can)
            k = int(at[(parts.gain[at] * sign[at] / np.minimum(freed[at], over)).argmin()])
            used = self._toggle(parts, switched, used, k)
            tried[k] += 1
        return used

    def _toggle(self, parts: _Parts, switched: np.ndarray, used: np.ndarray, k: int) -> np.ndarray:
        used = used.copy()
        for e in range(int(parts.first[k]), int(parts.first[k + 1])):
            used[parts.usage.lo[e] : parts.usage.hi[e]] += -parts.amount[e] if switched[k] else parts.amount[e]
        switched[k] = not switched[k]
        return used

    def _fill(self, parts: _Parts, switched: np.ndarray, used: np.ndarray, limit: np.ndarray) -> None:
        """Switch what makes it cheaper and passes no limit that was kept to, those first that save most."""
        for _ in range(2):
            change = np.where(switched, -parts.gain, parts.gain)
            wanted = np.flatnonzero(change < -self.net.tiny)
            count = 0
            for k in wanted[np.argsort(change[wanted])].tolist():
                after = self._toggle(parts, switched, used, k)
                at = slice(int(parts.first[k]), int(parts.first[k + 1]))
                lo, hi = int(parts.usage.lo[at].min(initial=len(limit))), int(parts.usage.hi[at].max(initial=0))
                if (after[lo:hi] > np.maximum(limit[lo:hi], used[lo:hi])).any():
                    switched[k] = not switched[k]
                else:
                    used, count = after, count + 1
            if not count:
                return


class Mixture:
    """The best choice of a network so far, mixed with every one that is seen.

    Attributes:
        best: a label for every node; None before the first one.
        over: by how much ``best`` passes the limits where it does so most, as a part of the limit; at most 0 when it fits.
        forbidden: labels and joint choices of ``best`` that are not allowed.
        cost: of ``best``, less the network's constant; a choice that passes no limit is better than any that does.
        known: told this when its best choice is better, else None; returns the least cost known, less the constant.
    """

    def __init__(self, messages: Messages, known: Callable[[Mixture | None], float] = lambda _: np.inf) -> None:
        self.messages, self.crossing, self.known = messages, Crossing(messages.net), known
        self.best: np.ndarray | None = None
        self.over = self.cost = np.inf
        self.forbidden = 0
        self.work = 40.0 * len(messages.label) + 100_000.0  # units for one more choice, about

    def fits(self) -> bool:
        """Whether the best choice keeps to all limits and uses nothing that is forbidden."""
        return not self.forbidden and self.over <= 0 and self.best is not None

    def labels(self, choice: np.ndarray) -> np.ndarray:
        """A choice in the messages' order as a label for every node."""
        return self.crossing.full(self.messages.label[self.messages.first + choice])

    def ranks(self) -> np.ndarray:
        """The best choice in the messages' order."""
        assert self.best is not None
        return self.messages.number[self.best[self.messages.nodes]] - self.messages.first

    def see(self, choice: np.ndarray, price: np.ndarray) -> float:
        """`add` a choice in the messages' order; the least cost known of one that keeps to the limits."""
        return self.known(self if self.add(self.labels(choice), price) else None)

    def add(self, label: np.ndarray, price: np.ndarray) -> bool:
        """Mix a choice into the best one (prices over time as a first guess of what is scarce); whether that is better."""
        if self.best is None:
            return self._take(label)
        better = self._take(label)
        return self._take(self.crossing.mix(self.best, label, price)) or better

    def _take(self, label: np.ndarray) -> bool:
        limit = self.messages.net.usage.limit
        over = float(((self.crossing.used(label) - limit) / np.maximum(limit, 1e-12)).max(initial=0.0))
        cost, forbidden = self.crossing.cost(label), self.crossing.forbidden(label)
        before = (self.forbidden, max(self.over, 0.0), self.cost)
        if self.best is not None and (forbidden, max(over, 0.0), cost) >= before:
            return False
        self.best, self.over, self.cost, self.forbidden = label, over, cost, forbidden
        return True
