"""A large network of choices with costs on nodes and on pairs, and usages of one shared resource over intervals of time.

Everything is kept in flat arrays over labels (a label is one choice of one node) and over allowed joint choices of pairs, so
that a pass over the whole network is a few numpy calls. Labels keep their numbers for good: a label that is ruled out has
an infinite cost, a node that another one decides is `gone`.

For any prices over time and any messages, the sum of the minima of all moved costs less the price of the limits is at most
the cost of every choice that keeps to the limits (Lagrangian duality: Geoffrion 1974). So a label or a joint choice that
raises it above the cost of a known choice is in no better one (reduced-cost fixing: Dantzig, Fulkerson and Johnson 1954).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

FORBIDDEN = 1e17  # a cost this high means: not allowed
ROUNDING = 1e-13  # of the largest cost: about 450 roundings of a double; smaller differences mean nothing


PROVED = 1e-9  # of the cost: how far the bound may be below it where a choice counts as optimal; rounding takes as much


class Infeasible(Exception):
    """No choice is allowed, or none keeps to the limits of the usages."""


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

    def copy(self) -> Usage:
        """The arrays are never changed in place."""
        return Usage(self.label, self.lo, self.hi, self.amount, self.limit, self.time)


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
        """A network that may be changed without this one."""
        return Pairs(
            self.start, self.node, self.unary.copy(), self.gone.copy(), self.tail.copy(), self.head.copy(), self.edge,
            self.a.copy(), self.b.copy(), self.cost.copy(), self.usage.copy(), self.constant, self.tiny,
        )  # fmt: skip


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
    scale = max(float(np.abs(cost).max(initial=0.0)), float(np.abs(unary[np.isfinite(unary)]).max(initial=0.0)))
    return Pairs(
        start, node, unary, np.zeros(count, bool), tail, head, edge[allowed], a[allowed], b[allowed], cost,
        given.usage.copy(), 0.0, ROUNDING * scale,
    )  # fmt: skip


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
    moved = net.unary + net.usage.priced(price, len(net.unary))
    moved = moved - np.bincount(of_a, given.tails, len(moved)) - np.bincount(of_b, given.heads, len(moved))
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


# Exact reductions of a network: fewer nodes, labels and pairs with the same optimum, and the way back.
#
# Arc consistency over forbidden joint choices, with costs normalised so that every label of every pair has a free joint
# choice (Larrosa and Schiex 2004); separable pairs folded into their nodes; parallel pairs added up; nodes joined by
# one-to-one pairs merged; nodes on one pair and without usage folded into the other node (Bertelè and Brioschi 1972); usages
# that all choices share taken from the limit, and times at which the limit cannot be passed forgotten.


@dataclass(frozen=True, slots=True)
class Follow:
    """Node ``child[k]`` takes label ``table[first[k] + label of parent[k]]``."""

    child: np.ndarray
    parent: np.ndarray
    first: np.ndarray
    table: np.ndarray


@dataclass(slots=True)
class Reduction:
    """How the labels of nodes that are gone follow from those that are left."""

    steps: list[Follow] = field(default_factory=list[Follow])

    def copy(self) -> Reduction:
        """The same way back, to be continued in another direction."""
        return Reduction(list(self.steps))

    def lift(self, label: np.ndarray) -> np.ndarray:
        """Complete the label of every node, given those of the nodes that are left (changed in place)."""
        for s in reversed(self.steps):
            label[s.child] = s.table[s.first + label[s.parent]]
        return label


def reduce(net: Pairs, done: Reduction) -> None:
    """Apply all reductions until none does anything.

    Raises:
        Infeasible: no choice is allowed.
    """
    _loops(net)
    changed = 1
    while changed:
        changed = settle(net)
        while merged := merge_parallel(net):
            changed += merged + settle(net)  # one-to-one pairs are told by counts, which needs arc consistency
        changed += merge_bijective(net, done) + limit_usage(net)
        settle(net)
        changed += fold_leaves(net, done)
    settle(net)


def settle(net: Pairs) -> int:
    """Arc consistency, normalised costs, no separable pairs; how many pairs it dropped."""
    while True:
        alive = net.alive()
        both = alive[net.a] & alive[net.b]
        if not both.all():
            net.keep(both)
        sa, of_a, sb, of_b = net.slots()
        for slot, label in ((sa, of_a), (sb, of_b)):
            least = np.full(len(label), np.inf)
            np.minimum.at(least, slot, net.cost)
            net.cost = net.cost - least[slot]
            least[~net.alive()[label]] = 0.0
            net.unary = net.unary + np.bincount(label, least, len(net.unary))
        if (net.alive() == alive).all():
            break
    counts = net.counts()
    if (counts[~net.gone] == 0).any():
        raise Infeasible
    entries, most = np.bincount(net.edge, minlength=len(net.tail)), np.zeros(len(net.tail))
    np.maximum.at(most, net.edge, net.cost)
    separable = (entries == counts[net.tail] * counts[net.head]) & (most <= net.tiny)
    net.drop(separable)
    return int(separable.sum())


def merge_parallel(net: Pairs) -> int:
    """One pair for each two nodes: what all of them allow, at the sum of their costs."""
    swap = net.tail > net.head
    flipped = swap[net.edge]
    net.a, net.b = np.where(flipped, net.b, net.a), np.where(flipped, net.a, net.b)
    net.tail, net.head = np.where(swap, net.head, net.tail), np.where(swap, net.tail, net.head)
    _, first, of, times = np.unique(
        net.tail * len(net.gone) + net.head, return_index=True, return_inverse=True, return_counts=True
    )  # fmt: skip
    merged = len(net.tail) - len(first)
    if not merged:
        return 0
    net.tail, net.head, net.edge = net.tail[first], net.head[first], of[net.edge]
    many = (times > 1)[net.edge]
    at = np.flatnonzero(many)
    at = at[np.lexsort((net.b[at], net.a[at], net.edge[at]))]
    new = _starts(net.edge[at], net.a[at], net.b[at])
    group = np.cumsum(new) - 1
    total, here = np.bincount(group, net.cost[at]), at[new]
    ok = np.bincount(group) == times[net.edge[here]]
    here, total = here[ok], total[ok]
    rest = ~many
    net.cost = np.concatenate([net.cost[rest], total])
    for name in ("edge", "a", "b"):
        old = getattr(net, name)
        setattr(net, name, np.concatenate([old[rest], old[here]]))
    return merged


def merge_bijective(net: Pairs, done: Reduction) -> int:
    """Merge nodes joined by pairs that allow each label with exactly one other: one label of each node per class of labels."""
    counts = net.counts()
    entries = np.bincount(net.edge, minlength=len(net.tail))
    one = (entries == counts[net.tail]) & (entries == counts[net.head])
    if not one.any():
        return 0
    here = one[net.edge]
    root, labels = components(len(net.gone), net.tail[one], net.head[one]), np.flatnonzero(net.alive())
    of = components(len(net.node), net.a[here], net.b[here])
    at_root = root[net.node[labels]] == net.node[labels]
    to = np.full(len(net.node), -1)
    to[of[labels[at_root]]] = labels[at_root]
    to = np.where(net.alive(), to[of], -1)
    size = np.bincount(root, minlength=len(net.gone))
    clash = np.bincount(of[labels], minlength=len(net.node))[of[labels]] != size[root[net.node[labels]]]
    moved = root != np.arange(len(root))
    done.steps.append(_following(net, np.flatnonzero(moved), root, labels, to))
    total = np.bincount(to[labels], net.unary[labels], len(net.node))
    net.unary = np.full(len(net.node), np.inf)
    good = labels[at_root & ~clash]
    net.unary[good] = total[good]
    net.gone = net.gone | moved
    net.a, net.b, net.tail, net.head = to[net.a], to[net.b], root[net.tail], root[net.head]
    net.usage.keep(to[net.usage.label] >= 0)
    net.usage.label = to[net.usage.label]
    _loops(net)
    return int(moved.sum())


def _following(net: Pairs, child: np.ndarray, root: np.ndarray, labels: np.ndarray, to: np.ndarray) -> Follow:
    """The label of each merged node for each label of the node it was merged into."""
    parent = root[child]
    first = np.cumsum(net.size[parent]) - net.size[parent] - net.start[parent]
    of_node = np.zeros(len(root), np.int64)
    of_node[child] = first
    table = np.zeros(int(net.size[parent].sum()), np.int64)
    mine = labels[root[net.node[labels]] != net.node[labels]]
    table[of_node[net.node[mine]] + to[mine]] = mine
    return Follow(child, parent, first, table)


def _loops(net: Pairs) -> None:
    """Pairs of a node with itself: a label that they do not allow with itself is ruled out."""
    loop = net.tail == net.head
    if loop.any():
        here = loop[net.edge] & (net.a == net.b)
        net.unary = net.unary + np.bincount(net.a[here], net.cost[here], len(net.unary))
        need = np.bincount(net.tail[loop], minlength=len(net.gone))[net.node]
        net.unary[np.bincount(net.a[here], minlength=len(net.unary)) < need] = np.inf
        net.drop(loop)


def fold_leaves(net: Pairs, done: Reduction) -> int:
    """Nodes without usage that have one pair, or none, take what is best for their only neighbour's label."""
    degree = np.bincount(net.tail, minlength=len(net.gone)) + np.bincount(net.head, minlength=len(net.gone))
    free = ~net.gone
    free[net.node[net.usage.label]] = False
    alone = np.flatnonzero(free & (degree == 0))
    if len(alone):
        _settle_alone(net, done, alone)
    leaf = free & (degree == 1)
    swap = leaf[net.tail] & ~leaf[net.head]
    fold = leaf[net.tail] | leaf[net.head]
    if not fold.any():
        return len(alone)
    flipped = swap[net.edge]
    net.a, net.b = np.where(flipped, net.b, net.a), np.where(flipped, net.a, net.b)
    net.tail, net.head = np.where(swap, net.head, net.tail), np.where(swap, net.tail, net.head)
    slot, label, _, _ = net.slots()
    here = np.flatnonzero(fold[net.edge])
    total = net.cost[here] + net.unary[net.b[here]]
    order = np.lexsort((total, slot[here]))
    order = order[_starts(slot[here][order])]
    best = here[order]
    least, table = np.zeros(len(label)), np.zeros(len(label), np.int64)
    least[slot[best]], table[slot[best]] = total[order], net.b[best]
    size = net.size[net.tail]
    first = np.cumsum(size) - size - net.start[net.tail]
    done.steps.append(Follow(net.head[fold], net.tail[fold], first[fold], table))
    net.unary = net.unary + np.bincount(label, least, len(net.unary))
    net.gone[net.head[fold]] = True
    net.unary[net.gone[net.node]] = np.inf
    net.drop(fold)
    return len(alone) + int(fold.sum())


def _settle_alone(net: Pairs, done: Reduction, nodes: np.ndarray) -> None:
    mine = np.flatnonzero(np.isin(net.node, nodes))
    order = mine[np.lexsort((net.unary[mine], net.node[mine]))]
    best = order[_starts(net.node[order])]
    child = net.node[best]
    done.steps.append(Follow(child, child, np.arange(len(best)) - net.start[child], best))
    net.constant += float(net.unary[best].sum())
    net.gone[nodes] = True
    net.unary[mine] = np.inf


def limit_usage(net: Pairs) -> int:
    """Take what all labels of a node use from the limit, rule out labels that cannot fit, and forget times that do not bind.

    Returns:
        how many labels it ruled out.
    """
    use = net.usage
    if not len(use.limit):
        return 0
    use.keep(net.alive()[use.label] & (use.lo < use.hi))
    order = np.lexsort((use.hi, use.lo, use.label))
    use.keep(order)
    new = _starts(use.label, use.lo, use.hi)
    amount = np.bincount(np.cumsum(new) - 1, use.amount)
    use.keep(new)
    use.amount = amount
    span = len(use.limit) + 1
    _, first, item, count = np.unique(
        (net.node[use.label] * span + use.lo) * span + use.hi, return_index=True, return_inverse=True, return_counts=True
    )  # fmt: skip
    least, most = np.full(len(first), np.inf), np.zeros(len(first))
    np.minimum.at(least, item, amount)
    np.maximum.at(most, item, amount)
    least[count < net.counts()[net.node[use.label[first]]]] = 0.0
    items = Usage(use.label[first], use.lo[first], use.hi[first], least, use.limit, use.time)
    limit = use.limit - items.over_time(least)
    if (limit < 0).any():
        raise Infeasible
    use.amount = amount - least[item]
    dead = np.unique(use.label[use.amount > _least_between(limit, use.lo, use.hi)])
    net.unary[dead] = np.inf
    _forget_times(use, limit, items.over_time(most - least) > limit)
    _maximal_times(use)
    return len(dead)


def _least_between(values: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """min(values[lo:hi]) for each interval, by a sparse table."""
    out = np.full(len(lo), np.inf)
    if not len(lo):
        return out
    level = np.frexp(hi - lo)[1] - 1  # 2**level <= hi - lo
    table = values
    for k in range(int(level.max()) + 1):
        at = level == k
        out[at] = np.minimum(table[lo[at]], table[hi[at] - (1 << k)])
        table = np.minimum(table[: -(1 << k)], table[1 << k :])
    return out


def _forget_times(use: Usage, limit: np.ndarray, stays: np.ndarray) -> None:
    position = np.concatenate([[0], np.cumsum(stays)])
    use.limit, use.time = limit[stays], use.time[stays]
    use.lo, use.hi = position[use.lo], position[use.hi]
    use.keep((use.lo < use.hi) & (use.amount > 0))


def _maximal_times(use: Usage) -> None:
    """Forget a time when all that is alive then is also alive at the next or the last, with no higher limit."""
    while len(use.limit) > 1:
        end = len(use.limit) + 1
        begins, ends = np.bincount(use.lo, minlength=end)[:-1] > 0, np.bincount(use.hi, minlength=end)[:-1] > 0
        less = np.zeros(len(use.limit), bool)
        less[:-1] = ~ends[1:] & (use.limit[:-1] >= use.limit[1:])
        less[1:] |= ~begins[1:] & (use.limit[1:] >= use.limit[:-1]) & ~less[:-1]
        if not less.any():
            return
        _forget_times(use, use.limit, ~less)


def components(count: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The smallest member of the component of each of ``count`` things joined by ``x[k] — y[k]``."""
    root = np.arange(count)
    while (root[x] != root[y]).any():
        least = np.minimum(root[x], root[y])
        np.minimum.at(root, root[x], least)
        np.minimum.at(root, root[y], least)
        while (root != root[root]).any():
            root = root[root]
    return root


def _starts(*keys: np.ndarray) -> np.ndarray:
    """Where a sorted run of equal keys begins."""
    new = np.ones(len(keys[0]), bool)
    for k in keys:
        new[1:] = (k[1:] != k[:-1]) if k is keys[0] else new[1:] | (k[1:] != k[:-1])
    return new
