"""Exact reductions of a network: fewer nodes, labels and pairs with the same optimum, and the way back.

Arc consistency over forbidden joint choices, with costs normalised so that every label of every pair has a free joint
choice (Larrosa and Schiex 2004); separable pairs folded into their nodes; parallel pairs added up; nodes joined by
one-to-one pairs merged; nodes on one pair and without usage folded into the other node (Bertelè and Brioschi 1972); usages
that all choices share taken from the limit, and times at which the limit cannot be passed forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tapestry.plan.solver.pairs import Infeasible, Pairs, Usage


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
    net.swap(net.tail > net.head)
    _, first, of, times = np.unique(
        net.tail * len(net.gone) + net.head, return_index=True, return_inverse=True, return_counts=True
    )
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
    degree = net.degree()
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
    net.swap(swap)
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
    )
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
