"""Traversal of sharding schemes as PopRT does it: out of memory first, then balance; a heuristic, and kept as one.

From a scheme, the group that matters (the one furthest over its memory, or, when all fit, the one with the most FLOPs)
gives away one subgraph: one of its first to a *parent* group, one of its last to a *child* group, either to a *parallel*
group that it has no edge with. Every move keeps stages monotone along edges and groups not empty.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from tapestry.tools.auto_shard.scheme_cost import Evaluation, Problem, Scheme, bits

Evaluate = Callable[[Sequence[Scheme]], list[Evaluation]]
BEAM = 8  # schemes of a round that the next round starts from
LIMIT = 2000  # schemes in all


@dataclass(slots=True)
class Traversal:
    """What was found: the best scheme that fits, if any; the one that is least over; how many were looked at.

    ``moves`` counts schemes by the kind of move that made them.
    """

    best: Evaluation | None = None
    least: Evaluation | None = None
    schemes: int = 0
    moves: dict[str, int] = field(default_factory=lambda: {"parent": 0, "child": 0, "parallel": 0})

    def see(self, e: Evaluation, capacity: int) -> None:
        """Take a scheme into account."""
        self.schemes += 1
        if self.least is None or (e.memory, e.rank) < (self.least.memory, self.least.rank):
            self.least = e
        if e.memory <= capacity and (self.best is None or e.rank < self.best.rank):
            self.best = e


def initial(problem: Problem, devices: int) -> Scheme:
    """The scheme to start from: contiguous groups of about equal bytes, none empty.

    Bytes are the weights', as in PopRT; of a model without weights, the seconds.
    """
    count = len(problem.units)
    assert count >= devices
    sizes = problem.bytes if sum(problem.bytes) else problem.time
    before = [0, *accumulate(sizes)]
    cuts = [0]
    for k in range(1, devices):
        target = before[-1] * k / devices
        allowed = range(cuts[-1] + 1, count - (devices - k) + 1)  # every group keeps at least one subgraph
        cuts.append(min(allowed, key=lambda i: abs(before[i] - target)))
    cuts.append(count)
    return tuple(((1 << b) - 1) ^ ((1 << a) - 1) for a, b in pairwise(cuts))


def traverse(
    problem: Problem, start: Scheme, capacity: int, evaluate: Evaluate, *, optimal: bool, limit: int = LIMIT,
    batch: int | None = None,
) -> Traversal:  # fmt: skip
    """Look at schemes around ``start``.

    Args:
        capacity: bytes that a stage may take.
        optimal: go on after the first scheme that fits, for a better balance.
        limit: schemes in all; ``batch``: so many are evaluated at a time (by default all of a round).
    """
    traversal = Traversal()
    seen, frontier = {start}, [start]
    while frontier and traversal.schemes < limit:
        evaluations = list[Evaluation]()
        for at in range(0, len(frontier), batch or len(frontier)):
            evaluations += evaluate(frontier[at : at + (batch or len(frontier))])
            for e in evaluations[at:]:
                traversal.see(e, capacity)
                if traversal.best is not None and not optimal:
                    return traversal
        evaluations.sort(key=lambda e: (max(0, e.memory - capacity), e.rank, e.scheme))
        frontier = list[Scheme]()
        for e in evaluations[:BEAM]:
            for kind, scheme in moves(problem, e.scheme, group(e, capacity)):
                if scheme not in seen:
                    seen.add(scheme)
                    frontier.append(scheme)
                    traversal.moves[kind] += 1
        del frontier[limit - traversal.schemes :]
    return traversal


def group(e: Evaluation, capacity: int) -> int:
    """The stage to relieve: furthest over its memory, or else the one with the most FLOPs."""
    if e.memory > capacity:
        return max(range(len(e.stages)), key=lambda g: e.stages[g].memory)
    return max(range(len(e.stages)), key=lambda g: (e.stages[g].flops, e.stages[g].time))


def moves(problem: Problem, scheme: Scheme, g: int) -> Iterator[tuple[str, Scheme]]:
    """(kind, scheme) for every subgraph that may leave group ``g``, and every group that it may go to."""
    mask = scheme[g]
    if mask.bit_count() < 2:
        return
    for u in bits(mask):
        above, below = problem.parents[u], problem.children[u]
        targets: list[int] = []
        if not above & mask:  # a first subgraph: to earlier groups, not before what it needs
            lowest = max((h for h in range(g) if scheme[h] & above), default=0)
            targets += range(g - 1, lowest - 1, -1)
        if not below & mask:
            highest = min((h for h in range(g + 1, len(scheme)) if scheme[h] & below), default=len(scheme) - 1)
            targets += range(g + 1, highest + 1)
        for h in targets:
            kind = "parent" if scheme[h] & above else "child" if scheme[h] & below else "parallel"
            moved = list(scheme)
            moved[g] ^= 1 << u
            moved[h] |= 1 << u
            yield kind, tuple(moved)


# The dynamic program over topological cuts: the best pipeline among all those whose cuts are in a given family.
#
# A cut is a *downset*: a set of subgraphs with everything that they need. Stages are differences of nested downsets, and
# every monotone assignment of stages is such a chain. When a graph has few downsets (chains, residual blocks) all are taken and
# the result is optimal; else the family is the prefixes of several orders, with every cut between larger subgraphs where those
# have few. The heuristic's own cuts always belong to it, so the result is never worse than the heuristic's.
#
# Two passes, both exact over the family, with whole picoseconds: the least interval (a bottleneck path), then the least
# latency among pipelines of that interval (a shortest path). One program for both objectives at once would not be right: a
# prefix with a longer slowest stage may still be part of the better whole.


DOWNSETS = 700  # up to so many, all of them
NEVER = 1 << 200


@dataclass(frozen=True, slots=True)
class Family:
    """The cuts to choose from, ascending (a subset comes before its supersets), and whether they are all there are."""

    cuts: tuple[int, ...]
    complete: bool


def family(problem: Problem, known: Sequence[Scheme] = (), coarse: Problem | None = None, limit: int = DOWNSETS) -> Family:
    """All downsets if there are at most ``limit``, else prefixes of several orders.

    Args:
        known: schemes whose cuts must be among them.
        coarse: the same graph in larger subgraphs, unions of this problem's; all its cuts are taken as well if they are few.
    """
    masks = downsets(problem, limit)
    if masks is not None:
        return Family(tuple(sorted(masks)), True)
    cuts = {0}
    for order in (range(len(problem.units)), _depth_first(problem), *(_ordered(s) for s in known)):
        mask = 0
        for u in order:
            mask |= 1 << u
            cuts.add(mask)
    for mask in (downsets(coarse, limit) if coarse else None) or ():
        assert coarse is not None
        cuts.add(coarse.translate((mask, coarse.all & ~mask), problem)[0])
    return Family(tuple(sorted(cuts)), False)


def solve(problem: Problem, devices: int, capacity: int, cuts: Family, known: Sequence[Scheme] = ()) -> Evaluation | None:
    """The best scheme of exactly ``devices`` stages that fits, if one does; never worse than those ``known``.

    Args:
        cuts: the cuts to choose from, those of ``known`` among them.
    """
    fitting = [e for e in map(problem.evaluate, known) if e.memory <= capacity]
    table = _Table(problem, cuts.cuts, capacity)
    bound = min((e.interval for e in fitting), default=NEVER)
    interval, _ = table.path(devices, bound, max)
    if interval == NEVER:
        return None
    _, scheme = table.path(devices, interval, lambda a, b: a + b)
    return problem.evaluate(scheme)


def least_memory(problem: Problem, devices: int, cuts: Family, known: Sequence[Scheme] = ()) -> Evaluation | None:
    """The scheme whose fullest stage needs the fewest bytes; for saying by how much a model does not fit."""
    bound = min((e.memory for e in map(problem.evaluate, known)), default=NEVER)
    _, scheme = _Table(problem, cuts.cuts, bound, by_memory=True).path(devices, bound, max)
    return problem.evaluate(scheme) if scheme else None


def downsets(problem: Problem, limit: int) -> set[int] | None:
    """Every set of subgraphs that contains what it needs; nothing when there are more than ``limit``."""
    masks, fresh = {0}, [0]
    while fresh:
        mask = fresh.pop()
        for u in bits(problem.all & ~mask):
            grown = mask | 1 << u
            if not problem.parents[u] & ~mask and grown not in masks:
                masks.add(grown)
                fresh.append(grown)
        if len(masks) > limit:
            return None
    return masks


def _ordered(scheme: Scheme) -> Iterable[int]:
    """The order in which a scheme's stages are contiguous."""
    return (u for mask in scheme for u in bits(mask))


def _depth_first(problem: Problem) -> list[int]:
    """One branch after another, where the file may interleave them."""
    order: list[int] = []
    done, ready = 0, [u for u in reversed(range(len(problem.units))) if not problem.parents[u]]
    while ready:
        u = ready.pop()
        order.append(u)
        done |= 1 << u
        ready += [c for c in reversed(list(bits(problem.children[u]))) if not problem.parents[c] & ~done]
    return order


class _Table:
    """Stages between two cuts of a family: which there are, what they cost, and whether they fit."""

    def __init__(self, problem: Problem, cuts: Sequence[int], capacity: int, *, by_memory: bool = False) -> None:
        self.problem, self.cuts, self.capacity, self.by_memory = problem, cuts, capacity, by_memory
        self.time = [sum(problem.time[u] for u in bits(c)) for c in cuts]
        self.separate = [sum(problem.bytes[u] for u in bits(c)) for c in cuts]
        weights = [frozenset[int]().union(*(problem.weights[u] for u in bits(c))) for c in cuts]
        self.together = [problem.weight_bytes(w) for w in weights]
        graph = problem.graph
        making = [0] * len(problem.units)
        for t, u in enumerate(problem.made):
            if u >= 0:
                making[u] += graph.sizes[t]
        self.written = [sum(making[u] for u in bits(c)) for c in cuts]
        self.host = sum(size for size, u in zip(graph.sizes, problem.made) if u < 0)
        self.by_time = sorted(range(len(cuts)), key=lambda i: self.time[i])
        self.times = [self.time[i] for i in self.by_time]
        self._edges: dict[int, list[tuple[int, int]]] = {}
        self._bound = -1
        self._fits: dict[int, bool] = {}

    def path(self, devices: int, bound: int, join: Callable[[int, int], int]) -> tuple[int, Scheme]:
        """Least ``join`` of stage costs over chains of ``devices`` stages, none above ``bound``; `NEVER` if there is none."""
        if bound != self._bound:
            self._edges, self._bound = {}, bound
        end = len(self.cuts) - 1
        layer, back = {0: 0}, list[dict[int, int]]()
        for k in range(devices):
            after: dict[int, int] = {}
            chosen: dict[int, int] = {}
            for i, value in sorted(layer.items(), key=lambda item: item[1]):
                for j, cost in self._from(i):
                    total = join(value, cost)
                    if (j == end) != (k == devices - 1) or total >= after.get(j, NEVER):
                        continue
                    if self._fit(i, j):
                        after[j], chosen[j] = total, i
            layer = after
            back.append(chosen)
        if end not in layer:
            return NEVER, ()
        stages: list[int] = []
        at = end
        for chosen in reversed(back):
            stages.append(self.cuts[at] & ~self.cuts[chosen[at]])
            at = chosen[at]
        return layer[end], tuple(reversed(stages))

    def _from(self, i: int) -> list[tuple[int, int]]:
        """(cut, cost) of the stages that start at a cut and cost at most the bound."""
        if i not in self._edges:
            self._edges[i] = list(self._memories(i) if self.by_memory else self._times(i))
        return self._edges[i]

    def _times(self, i: int) -> Iterable[tuple[int, int]]:
        here, crossing = self.cuts[i], self._crossing(i)
        reach = slice(bisect_left(self.times, self.time[i]), bisect_right(self.times, self.time[i] + self._bound))
        for j in self.by_time[reach]:
            there = self.cuts[j]
            if j == i or here & ~there or self.together[j] - self.together[i] > self.capacity:
                continue
            cost = self.time[j] - self.time[i] + sum(move for readers, move, _ in crossing if readers & there)
            if cost <= self._bound:
                self._surely_fits(i, j, crossing)
                yield j, cost

    def _memories(self, i: int) -> Iterable[tuple[int, int]]:
        here = self.cuts[i]
        for j, there in enumerate(self.cuts):
            if j == i or here & ~there or self.together[j] - self.together[i] > self._bound:
                continue
            cost = self.problem.cost(there & ~here).memory
            if cost <= self._bound:
                yield j, cost

    def _crossing(self, i: int) -> list[tuple[int, int, int]]:
        """(readers after the cut, picoseconds, bytes) of each activation made before it."""
        p, here = self.problem, self.cuts[i]
        return [
            (p.readers[t] & ~here, p.graph.moves[t], p.graph.sizes[t])
            for t, u in enumerate(p.made)
            if u >= 0 and here >> u & 1 and p.readers[t] & ~here
        ]  # fmt: skip

    def _surely_fits(self, i: int, j: int, crossing: list[tuple[int, int, int]]) -> None:
        """Spare the exact count where even everything at once would fit."""
        there = self.cuts[j]
        received = sum(size for readers, _, size in crossing if readers & there)
        most = self.separate[j] - self.separate[i] + self.written[j] - self.written[i] + received + self.host
        if most <= self.capacity:
            self._fits[there & ~self.cuts[i]] = True

    def _fit(self, i: int, j: int) -> bool:
        mask = self.cuts[j] & ~self.cuts[i]
        if mask not in self._fits:
            self._fits[mask] = self.problem.cost(mask).memory <= self.capacity
        return self._fits[mask]
