"""The dynamic program over topological cuts: the best pipeline among all those whose cuts are in a given family.

A cut is a *downset*: a set of subgraphs with everything that they need. Stages are differences of nested downsets, and
every monotone assignment of stages is such a chain. When a graph has few downsets (chains, residual blocks) all are taken and
the result is optimal; else the family is the prefixes of several orders, with every cut between larger subgraphs where those
have few. The heuristic's own cuts always belong to it, so the result is never worse than the heuristic's.

The program itself is the compiler's (`stage_chain.best_chain`), with stages on one device each: first for the slowest stage,
then for the sum among chains that are as fast. Both are exact over the family, with whole picoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np

from tapestry.ir.plan import MeshAxis
from tapestry.plan.pipelines.stage_chain import Submesh, best_chain
from tapestry.tools.auto_shard.scheme_cost import Evaluation, Problem, Scheme, bits

DOWNSETS = 700  # up to so many, all of them
NEVER = 1 << 62


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
    in_stages = ([u for mask in scheme for u in bits(mask)] for scheme in known)
    for order in (range(len(problem.units)), _depth_first(problem), *in_stages):
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
    bound = min((e.interval for e in map(problem.evaluate, known) if e.memory <= capacity), default=NEVER)
    costs, sure = _stages(problem, cuts.cuts, bound, capacity)
    return _chain(problem, devices, cuts.cuts, costs, lambda i, j: j in sure[i] or _bytes(problem, cuts.cuts, i, j) <= capacity)


def least_memory(problem: Problem, devices: int, cuts: Family, known: Sequence[Scheme] = ()) -> Evaluation | None:
    """The scheme whose fullest stage needs the fewest bytes; for saying by how much a model does not fit."""
    bound = min((e.memory for e in map(problem.evaluate, known)), default=NEVER)
    near, _ = _stages(problem, cuts.cuts, NEVER, bound)
    costs = [{j: _bytes(problem, cuts.cuts, i, j) for j in row} for i, row in enumerate(near)]
    return _chain(problem, devices, cuts.cuts, costs, lambda i, j: costs[i][j] <= bound)


def _bytes(problem: Problem, cuts: Sequence[int], i: int, j: int) -> int:
    return problem.cost(cuts[j] & ~cuts[i]).memory


def _chain(
    problem: Problem,
    devices: int,
    cuts: Sequence[int],
    costs: Sequence[Mapping[int, float]],
    fits: Callable[[int, int], bool],
) -> Evaluation | None:
    """The chain of stages that fit whose largest cost is least, and of those the one of the least sum; ``costs`` and ``fits``:
    of the stage between two cuts."""
    one = Submesh((MeshAxis("d0", 1),), 1, tuple(range(devices)))
    chain = partial(
        best_chain, len(cuts) - 1, devices, [one], stages=devices, ends=costs.__getitem__, fits=lambda p: fits(p.lo, p.hi)
    )
    first = chain(lambda p: costs[p.lo][p.hi], micro=inf)
    if first is None:
        return None
    found = chain(lambda p: c if (c := costs[p.lo][p.hi]) <= first.slowest else inf)
    assert found is not None
    return problem.evaluate(tuple(cuts[p.hi] & ~cuts[p.lo] for p in found.pieces))


def _stages(
    problem: Problem, cuts: Sequence[int], bound: int, capacity: int
) -> tuple[list[dict[int, int]], list[frozenset[int]]]:
    """Of the stages that begin at each cut, by the cut where they end: picoseconds of those within the bound whose weights fit;
    and where even all of their data at once would."""
    graph, made = problem.graph, np.array(problem.made)
    moves, sizes = np.array(graph.moves), np.array(graph.sizes)
    inside, readers = (
        np.array([[m >> u & 1 for u in range(len(problem.units))] for m in of]) for of in (cuts, problem.readers)
    )
    reads, written = inside @ readers.T, (inside[:, made] * (made >= 0)) @ sizes
    time, apart = inside @ np.array(problem.time), inside @ np.array(problem.bytes)
    weights = np.array([problem.weight_bytes(frozenset(w for u in bits(c) for w in problem.weights[u])) for c in cuts])
    costs, sure = list[dict[int, int]](), list[frozenset[int]]()
    for i, here in enumerate(cuts):
        crossing = np.flatnonzero((made >= 0) & (inside[i][made] > 0) & (reads[-1] > reads[i]))
        received = reads[:, crossing] > reads[i, crossing]
        seconds = time - time[i] + received @ moves[crossing]
        most = apart - apart[i] + written - written[i] + sizes[made < 0].sum() + received @ sizes[crossing]
        near = np.flatnonzero((seconds[i + 1 :] <= bound) & (weights[i + 1 :] - weights[i] <= capacity)) + i + 1
        costs.append({j: int(seconds[j]) for j in near.tolist() if not here & ~cuts[j]})
        sure.append(frozenset(np.flatnonzero(most <= capacity).tolist()))
    return costs, sure


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
