"""Message passing on a large network of pairs, many nodes at a time.

Sequential tree-reweighted message passing (Kolmogorov 2006, 2015) over levels of nodes that share no pair (the colours of a
greedy colouring), the pairs of a level stacked by shape. Every pair keeps a message to each of its nodes: costs moved from
the pair to the node, so that the sum of all minima stays a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tapestry.plan.search.pairs import Pairs


@dataclass(frozen=True, slots=True)
class Block:
    """Pairs of one shape, seen from their nodes in one level: ``table[pair, label, label of the other]``."""

    table: np.ndarray
    mine: slice  # of the messages to the nodes of this level
    other: np.ndarray  # numbers of the messages to the other nodes: (pairs, their labels)
    neighbour: np.ndarray  # the other node of each pair


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes without pairs among them; their labels, and the messages to them, are numbered consecutively."""

    nodes: slice
    labels: slice
    first: np.ndarray  # first label of every node, from the start of the level
    messages: slice
    to: np.ndarray  # label of each message, from the start of the level
    up: np.ndarray  # 1.0 where the other node is in a later level
    share: np.ndarray  # of each label: the part of its cost that each pair further on gets
    blocks: list[Block]


class Messages:
    """The network in the order of levels, and its messages."""

    def __init__(self, net: Pairs) -> None:
        self.net = net
        nodes = net.nodes()
        level = colours(len(net.gone), net.tail, net.head)[nodes]
        self.nodes = nodes[np.argsort(level, kind="stable")]
        self.level = np.sort(level)
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
        self._stack(place)

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
        self.table = np.full(int((rows * columns).sum()), np.inf)
        a, b = self.number[net.a] - self.first[place[net.tail]][net.edge], self.number[net.b] - self.first[place[net.head]][net.edge]
        for side, (x, y) in enumerate(((a, b), (b, a))):
            d = position[net.edge + side * pairs]
            self.table[at[d] + x * columns[d] + y] = net.cost
        self.message = np.zeros(int(rows.sum()))
        self.of_pair = message[position[:pairs]], message[position[pairs:]]  # first message to the tail and to the head
        self.levels = self._levels(me, you, at, message, twin)

    def _levels(self, me: np.ndarray, you: np.ndarray, at: np.ndarray, message: np.ndarray, twin: np.ndarray) -> list[Level]:
        out: list[Level] = []
        rows, columns = self.count[me], self.count[you]
        up = (self.level[you] > self.level[me]).astype(float)
        later = np.bincount(me, up, len(self.nodes))
        weight = 1.0 / np.maximum(np.maximum(later, np.bincount(me, minlength=len(self.nodes)) - later), 1.0)
        for k in range(int(self.level.max(initial=-1)) + 1):
            n0, n1 = np.searchsorted(self.level, [k, k + 1])
            d0, d1 = np.searchsorted(self.level[me], [k, k + 1])
            first = self.first[n0:n1]
            l0, l1 = first[0], first[-1] + self.count[n1 - 1]
            m0 = message[d0] if d0 < len(message) else len(self.message)
            m1 = message[d1] if d1 < len(message) else len(self.message)
            of = np.repeat(np.arange(d0, d1), rows[d0:d1])
            to = self.first[me[of]] + np.arange(m0, m1) - message[of] - l0
            shapes = rows[d0:d1] * (int(columns.max(initial=0)) + 1) + columns[d0:d1]
            cuts = [0, *(np.flatnonzero(np.diff(shapes)) + 1), d1 - d0] if d1 > d0 else []
            blocks = [self._block(d0 + i, d0 + j, rows, columns, at, message, twin, you) for i, j in zip(cuts, cuts[1:])]
            node_weight = np.repeat(weight[n0:n1], self.count[n0:n1])
            out.append(
                Level(
                    slice(n0, n1), slice(l0, l1), first - l0, slice(m0, m1), to, up[of], node_weight, blocks
                )  # fmt: skip
            )
        return out

    def _block(self, i, j, rows, columns, at, message, twin, you) -> Block:
        r, c = int(rows[i]), int(columns[i])
        table = self.table[at[i] : at[i] + (j - i) * r * c].reshape(j - i, r, c)
        other = message[twin[i:j]][:, None] + np.arange(c)
        return Block(table, slice(message[i], message[i] + (j - i) * r), other, you[i:j])

    def sweep(self, unary: np.ndarray, reverse: bool) -> float:
        """Pass messages through all levels in turn; returns the sum of all minima (the pairs' are then zero)."""
        bound = 0.0
        for level in reversed(self.levels) if reverse else self.levels:
            spare = np.empty(level.messages.stop - level.messages.start)
            for b in level.blocks:
                least = (b.table + self.message[b.other][:, None, :]).min(axis=2)
                spare[b.mine.start - level.messages.start : b.mine.stop - level.messages.start] = least.ravel()
            total = unary[level.labels] + np.bincount(level.to, spare, level.labels.stop - level.labels.start)
            forward = 1.0 - level.up if reverse else level.up
            given = (total * level.share)[level.to] * forward
            self.message[level.messages] = given - spare
            rest = total - np.bincount(level.to, given, len(total))
            bound += float(np.minimum.reduceat(rest, level.first).sum())
        return bound

    def bound(self, unary: np.ndarray) -> float:
        """Sum of the nodes' minima after a sweep, for any costs of nodes."""
        return float(np.minimum.reduceat(self.moved(unary), self.first).sum()) if len(self.first) else 0.0

    def moved(self, unary: np.ndarray) -> np.ndarray:
        """Costs of labels after the messages."""
        out = unary.copy()
        for level in self.levels:
            out[level.labels] -= np.bincount(level.to, self.message[level.messages], level.labels.stop - level.labels.start)
        return out

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

    def decode(self, unary: np.ndarray) -> np.ndarray:
        """A label for each node, level after level, given those of earlier levels and the messages of later ones."""
        choice = np.zeros(len(self.nodes), np.int64)
        for level in self.levels:
            total = unary[level.labels].copy()
            for b in level.blocks:
                start = b.mine.start - level.messages.start
                to = level.to[start : start + b.mine.stop - b.mine.start].reshape(b.table.shape[:2])
                up = level.up[start : start + b.mine.stop - b.mine.start : b.table.shape[1]] > 0
                if up.any():
                    least = (b.table[up] + self.message[b.other[up]][:, None, :]).min(axis=2)
                    total += np.bincount(to[up].ravel(), least.ravel(), len(total))
                down = np.flatnonzero(~up)
                if len(down):
                    fixed = b.table[down, :, choice[b.neighbour[down]]]
                    total += np.bincount(to[down].ravel(), fixed.ravel(), len(total))
            choice[level.nodes] = self._best(level, total)
        return choice

    def descend(self, unary: np.ndarray, choice: np.ndarray, rounds: int = 20) -> np.ndarray:
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
            start = b.mine.start - level.messages.start
            to = level.to[start : start + b.mine.stop - b.mine.start]
            fixed = b.table[np.arange(len(b.table)), :, choice[b.neighbour]]
            total += np.bincount(to, fixed.ravel(), len(total))
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

    def cost(self, unary: np.ndarray, choice: np.ndarray) -> float:
        """Cost of a choice, with any costs of nodes."""
        total = float(unary[self.first + choice].sum())
        for level in self.levels:
            for b in level.blocks:
                start = b.mine.start - level.messages.start
                up = level.up[start : start + b.mine.stop - b.mine.start : b.table.shape[1]] > 0
                mine = np.repeat(np.arange(level.nodes.start, level.nodes.stop), np.diff(np.append(level.first, level.labels.stop - level.labels.start)))
                at = mine[level.to[start : start + b.mine.stop - b.mine.start : b.table.shape[1]]]
                total += float(b.table[up, choice[at[up]], choice[b.neighbour[up]]].sum())
        return total


def colours(count: int, tail: np.ndarray, head: np.ndarray) -> np.ndarray:
    """A colour for each node, different across every pair: greedily, nodes of high degree first (Welsh and Powell 1967)."""
    degree = np.bincount(tail, minlength=count) + np.bincount(head, minlength=count)
    x, y = np.concatenate([tail, head]), np.concatenate([head, tail])
    order = np.argsort(x, kind="stable")
    near = np.split(y[order], np.cumsum(degree)[:-1]) if count else []
    colour = np.full(count, -1)
    for n in np.argsort(-degree, kind="stable"):
        if degree[n] == 0:
            colour[n] = 0
            continue
        taken = set(colour[near[n]].tolist())
        colour[n] = next(c for c in range(len(taken) + 1) if c not in taken)
    return colour
