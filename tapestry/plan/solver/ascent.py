"""Message passing on a large network of pairs, many nodes at a time.

Sequential tree-reweighted message passing (Kolmogorov 2006, 2015) over levels of nodes that share no pair, the pairs of a
level stacked by shape. Every pair keeps a message to each of its nodes: costs moved from the pair to the node, so that the sum
of all minima stays a lower bound. Forbidden joint choices cost much instead of infinitely much, which can only lower the bound:
then a choice with fewer of them is a better one, and costs of nodes can be improved one at a time towards none.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from tapestry.plan.solver.pairs import Pairs

LEVELS = 200  # about as many levels as there may be: each takes some numpy calls
PEELS = 30  # levels of leaves after all others
LARGE = 100.0  # of a forbidden joint choice, in the largest cost there is


@dataclass(frozen=True, slots=True)
class Block:
    """Pairs of one shape, seen from their nodes in one level: ``table[label of the other, label, pair]``, the pairs last
    because they are many."""

    table: np.ndarray
    mine: slice  # the messages to the nodes of this level, from the first one of the level
    other: np.ndarray  # numbers of the messages to the other nodes: (their labels, pairs)
    node: np.ndarray  # of this level, for each pair
    neighbour: np.ndarray
    up: np.ndarray  # whether the neighbour is in a later level


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes without pairs among them; their labels, and the messages to them, are numbered consecutively."""

    nodes: slice
    labels: slice
    first: np.ndarray  # first label of every node, from the start of the level
    messages: slice
    to: np.ndarray  # label of each message, from the start of the level
    up: np.ndarray  # 1.0 for messages that get a share on the way forwards: the other node is later, and no leaf
    down: np.ndarray  # and on the way back
    share: np.ndarray  # of each label: the part of its cost that each pair further on gets
    blocks: list[Block]


class Messages:
    """The network in the order of levels, and its messages."""

    def __init__(self, net: Pairs) -> None:
        self.net = net
        nodes = net.nodes()
        level = levels(len(net.gone), net.tail, net.head)[nodes]
        self.nodes = nodes[np.argsort(level, kind="stable")]
        self.level = np.sort(level)
        self.leaf = (_peel(len(net.gone), net.tail, net.head) >= 0)[self.nodes]
        alive = net.alive()
        count = net.counts()[self.nodes]
        self.count, self.first = count, np.cumsum(count) - count
        rank = np.cumsum(alive) - 1
        place = np.zeros(len(net.gone), np.int64)
        place[self.nodes] = np.arange(len(nodes))
        of_label = net.node[alive]
        before = np.cumsum(net.counts()) - net.counts()
        to = self.first[place[of_label]] + rank[alive] - before[of_label]
        self.label = np.zeros(len(to), np.int64)
        self.label[to] = np.flatnonzero(alive)  # the network's number of each label here
        self.number = np.full(len(alive), -1)
        self.number[self.label] = np.arange(len(to))
        self.unary = net.unary[self.label]
        self.large = LARGE * net.largest()
        self._stack(place)
        blocks = [b.table.size for level in self.levels for b in level.blocks]
        self.work = 4.0 * sum(blocks) + 20_000.0 * (len(blocks) + len(self.levels))  # units of one sweep, about

    def _stack(self, place: np.ndarray) -> None:
        """Tables of all pairs from both of their sides, sorted by level and shape."""
        net, pairs = self.net, len(self.net.tail)
        me = np.concatenate([place[net.tail], place[net.head]])
        you = np.concatenate([place[net.head], place[net.tail]])
        order = np.lexsort((self.count[you], self.count[me], self.level[me]))
        position = np.zeros(2 * pairs, np.int64)
        position[order] = np.arange(2 * pairs)
        twin = position[np.concatenate([np.arange(pairs) + pairs, np.arange(pairs)])][order]
        me, you = me[order], you[order]
        rows, columns = self.count[me], self.count[you]
        at, message = np.cumsum(rows * columns) - rows * columns, np.cumsum(rows) - rows
        flat = np.full(int((rows * columns).sum()), self.large)
        a = self.number[net.a] - self.first[place[net.tail]][net.edge]
        b = self.number[net.b] - self.first[place[net.head]][net.edge]
        for side, (x, y) in enumerate(((a, b), (b, a))):
            d = position[net.edge + side * pairs]
            flat[at[d] + x * columns[d] + y] = net.cost
        self.message = np.zeros(int(rows.sum()))
        self.of_pair = message[position[:pairs]], message[position[pairs:]]  # first message to the tail and to the head
        self.levels = self._levels(me, you, flat, at, message, twin)

    def _levels(
        self, me: np.ndarray, you: np.ndarray, flat: np.ndarray, at: np.ndarray, message: np.ndarray, twin: np.ndarray
    ) -> list[Level]:
        """Pairs ``me — you`` in order of the level of ``me``; where their tables and messages start; ``you — me``."""
        count = self.count
        after = self.level[you] > self.level[me]
        onward, back = after & ~self.leaf[you], ~after
        later, earlier = np.bincount(me, onward, len(self.nodes)), np.bincount(me, back, len(self.nodes))
        weight = np.repeat(1.0 / np.maximum(np.maximum(later, earlier), 1.0), count)
        ends = np.append(message, len(self.message))
        out: list[Level] = []
        for k in range(int(self.level.max(initial=-1)) + 1):
            n0, n1 = (int(x) for x in np.searchsorted(self.level, [k, k + 1]))
            d0, d1 = (int(x) for x in np.searchsorted(self.level[me], [k, k + 1]))
            labels = slice(int(self.first[n0]), int(self.first[n1 - 1] + count[n1 - 1]))
            messages = slice(int(ends[d0]), int(ends[d1]))
            of = np.repeat(np.arange(d0, d1), count[me[d0:d1]])
            to = self.first[me[of]] + np.arange(messages.start, messages.stop) - message[of] - labels.start
            shapes = count[me[d0:d1]] * (int(count.max(initial=0)) + 1) + count[you[d0:d1]]
            cuts = [d0, *(d0 + 1 + np.flatnonzero(np.diff(shapes))).tolist(), d1] if d1 > d0 else []
            blocks: list[Block] = []
            for i, j in itertools.pairwise(cuts):
                r, c = int(count[me[i]]), int(count[you[i]])
                table = np.ascontiguousarray(flat[at[i] : at[i] + (j - i) * r * c].reshape(j - i, r, c).transpose(2, 1, 0))
                other = message[twin[i:j]] + np.arange(c)[:, None]
                start = int(message[i]) - messages.start
                up = self.level[you[i:j]] > k
                blocks.append(Block(table, slice(start, start + (j - i) * r), other, me[i:j], you[i:j], up))
            first = self.first[n0:n1] - labels.start
            up, down = onward[of].astype(float), back[of].astype(float)
            out.append(Level(slice(n0, n1), labels, first, messages, to, up, down, weight[labels], blocks))
        return out

    def sweep(self, unary: np.ndarray, reverse: bool) -> float:
        """Pass messages through all levels in turn; returns the sum of all minima (the pairs' are then zero)."""
        bound = 0.0
        for level in reversed(self.levels) if reverse else self.levels:
            spare = np.empty(level.messages.stop - level.messages.start)
            for b in level.blocks:
                least = (b.table + self.message[b.other][:, None, :]).min(axis=0)
                spare[b.mine] = least.T.ravel()
            total = unary[level.labels] + np.bincount(level.to, spare, level.labels.stop - level.labels.start)
            given = (total * level.share)[level.to] * (level.down if reverse else level.up)
            self.message[level.messages] = given - spare
            rest = total - np.bincount(level.to, given, len(total))
            bound += float(np.minimum.reduceat(rest, level.first).sum())
        return bound

    def spread(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Messages by the numbers of `Pairs.slots`: those to tails, those to heads."""
        net = self.net
        alive = net.alive()
        out: list[np.ndarray] = []
        for nodes, first, slots in zip((net.tail, net.head), self.of_pair, net.slots()[1::2]):
            of = np.repeat(np.arange(len(nodes)), net.size[nodes])
            value = np.zeros(len(slots))
            ok = alive[slots]
            value[ok] = message[first[of[ok]] + self._rank(slots[ok])]
            out.append(value)
        return out[0], out[1]

    def _rank(self, labels: np.ndarray) -> np.ndarray:
        """Position of labels among those of their node."""
        place = np.zeros(len(self.net.gone), np.int64)
        place[self.nodes] = self.first
        return self.number[labels] - place[self.net.node[labels]]

    def priced(self, price: np.ndarray) -> np.ndarray:
        """Costs of the labels, with what they use at prices over time."""
        return self.net.priced(price)[self.label]

    def decode(self, unary: np.ndarray) -> np.ndarray:
        """A label for each node, level after level, given those of earlier levels and the messages of later ones."""
        choice = np.zeros(len(self.nodes), np.int64)
        for level in self.levels:
            total = unary[level.labels].copy()
            for b in level.blocks:
                told = b.table[choice[b.neighbour], :, np.arange(len(b.up))]
                if b.up.any():
                    least = (b.table[:, :, b.up] + self.message[b.other[:, b.up]][:, None, :]).min(axis=0)
                    told[b.up] = least.T
                total += np.bincount(level.to[b.mine], told.ravel(), len(total))
            choice[level.nodes] = self._best(level, total)
        return choice

    def descend(self, unary: np.ndarray, choice: np.ndarray, rounds: int) -> np.ndarray:
        """Iterated conditional modes (Besag 1986), a level at a time."""
        choice = choice.copy()
        for _ in range(rounds):
            changed = False
            for level in self.levels:
                total = self.conditional(unary, choice, level)
                new = self._best(level, total)
                old = choice[level.nodes]
                better = total[level.first + new] < total[level.first + old]
                changed |= bool(better.any())
                choice[level.nodes] = np.where(better, new, old)
            if not changed:
                break
        return choice

    def conditional(self, unary: np.ndarray, choice: np.ndarray, level: Level) -> np.ndarray:
        """Costs of the labels of a level given the choices of all other nodes."""
        total = unary[level.labels].copy()
        for b in level.blocks:
            fixed = b.table[choice[b.neighbour], :, np.arange(len(b.up))]
            total += np.bincount(level.to[b.mine], fixed.ravel(), len(total))
        return total

    def _best(self, level: Level, total: np.ndarray) -> np.ndarray:
        """The cheapest label of each node of a level (the first of equals)."""
        least = np.minimum.reduceat(total, level.first)
        size = np.diff(np.append(level.first, len(total)))
        hit = np.flatnonzero(total <= np.repeat(least, size))
        of = np.repeat(np.arange(len(size)), size)[hit]
        out = np.zeros(len(size), np.int64)
        out[of[::-1]] = (hit - level.first[of])[::-1]
        return out

    def cost(self, unary: np.ndarray, choice: np.ndarray) -> tuple[float, bool]:
        """(cost of a choice with any costs of nodes, whether it is allowed); what is forbidden counts as `large` here."""
        total, allowed = float(unary[self.first + choice].sum()), True
        for level in self.levels:
            for b in level.blocks:
                used = b.table[choice[b.neighbour], choice[b.node], np.arange(len(b.up))][b.up]
                total += float(used.sum())
                allowed &= bool((used < self.large).all())
        return total, allowed


def levels(count: int, tail: np.ndarray, head: np.ndarray) -> np.ndarray:
    """A level for each node, different across every pair: breadth-first order, each node after those before it.

    Costs travel along pairs from level to level, so that one sweep carries them far.
    """
    peeled = _peel(count, tail, head)
    core = peeled < 0
    near = [list[int]() for _ in range(count)]
    inner = core[tail] & core[head]
    degree = np.bincount(tail[inner], minlength=count) + np.bincount(head[inner], minlength=count)
    ends: list[tuple[int, int]] = list(zip(tail[inner].tolist(), head[inner].tolist(), strict=True))
    for a, b in ends:
        near[a].append(b)
        near[b].append(a)
    seen: list[bool] = (~core).tolist()
    level = [0] * count
    order: list[int] = np.argsort(degree, kind="stable").tolist()
    for first in order:
        if seen[first]:
            continue
        seen[first], queue = True, [first]
        placed: set[int] = set()
        for n in queue:
            level[n] = 1 + max((level[m] for m in near[n] if m in placed), default=-1)
            placed.add(n)
            for m in near[n]:
                if not seen[m]:
                    seen[m] = True
                    queue.append(m)
    if max(level, default=0) > LEVELS:
        level = _interleaved(level, near)
    found = np.where(core, np.array(level, np.int64), len(level) + PEELS - peeled)
    used = np.unique(found)
    return np.searchsorted(used, found)


def _peel(count: int, tail: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Leaves, then what are leaves without them, …: the round in which each node goes, -1 for those that stay.

    Few levels hold most nodes of a forest then, and what leaves tell the others goes up the trees whole: for a forest the
    bound is exact after one pass.
    """
    out = np.full(count, -1)
    for k in range(PEELS):
        left = (out[tail] < 0) & (out[head] < 0)
        t, h = tail[left], head[left]
        degree = np.bincount(t, minlength=count) + np.bincount(h, minlength=count)
        leaf = (out < 0) & (degree <= 1)
        both = leaf[t] & leaf[h]  # two nodes that have only each other
        leaf[np.maximum(t, h)[both]] = False
        if not leaf.any():
            break
        out[leaf] = k
    return out


def _interleaved(level: list[int], near: list[list[int]]) -> list[int]:
    """Long chains in pieces, side by side: level by level in every piece at once, a few more where that puts a pair in one."""
    out = [-1] * len(level)
    for n in sorted(range(len(level)), key=lambda n: level[n]):
        taken = {out[m] for m in near[n]}
        out[n] = level[n] % LEVELS
        while out[n] in taken:
            out[n] += 1
    return out
