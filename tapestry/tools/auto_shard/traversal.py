"""Traversal of sharding schemes as PopRT does it: out of memory first, then balance; a heuristic, and kept as one.

From a scheme, the group that matters (the one furthest over its memory, or, when all fit, the one with the most FLOPs)
gives away one subgraph: one of its first to a *parent* group, one of its last to a *child* group, either to a *parallel*
group that it has no edge with. Every move keeps stages monotone along edges and groups not empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    problem: Problem,
    start: Scheme,
    capacity: int,
    evaluate: Evaluate,
    *,
    optimal: bool,
    limit: int = LIMIT,
    batch: int | None = None,
) -> Traversal:
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
