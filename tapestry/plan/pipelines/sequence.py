"""What the pipeline search cuts into stages: the operations of one micro-batch, in order."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np

from tapestry.errors import PlanError
from tapestry.ir.graph import Graph
from tapestry.ir.types import itemsize
from tapestry.plan.pipelines.staged_plan import segment
from tapestry.rewrites.core.applied import logged
from tapestry.rewrites.core.rule import Move, own_rules
from tapestry.rewrites.splitting.micro_batch import batch_move, micro_batch


class NotInStages(PlanError):
    """So many micro-batches cannot be in the stages that are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSequence:
    """A graph as micro-batches.

    Attributes:
        copies: for each micro-batch its operations, all in the same order; ``copies[0]`` is planned, the others follow it.
        before, after: operations that run once, ahead of the micro-batches and behind them.
        moves: the rewrite that made the micro-batches.
    """

    graph: Graph
    copies: tuple[tuple[int, ...], ...]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def micro(self) -> int:
        """Number of micro-batches."""
        return len(self.copies)

    def one(self) -> Graph:
        """The operations of one micro-batch as a graph."""
        return segment(self.graph, self.copies[0], first=self.micro == 1)


def batch_cut(graph: Graph, micro: int) -> Move | None:
    """The rewrite that cuts the batch into some number of equal micro-batches; ``None`` when there is no such batch."""
    move = batch_move(graph, micro)
    return None if move is None or graph.tensors[move.at].shape[move.number("axis")] % micro else move


def sequence(graph: Graph, micro: int) -> StageSequence | None:
    """The graph as some number of equal micro-batches; ``None`` when it has no batch to cut."""
    if micro == 1:
        return StageSequence(graph=graph, copies=(tuple(range(len(graph.ops))),))
    move = batch_cut(graph, micro)
    if move is None:
        return None
    found = micro_batch(graph, move)
    copies = tuple(tuple(i for i, p in enumerate(found.part) if p == k) for k in range(micro))
    before = tuple(i for i, p in enumerate(found.part) if p < 0 and i < copies[0][0])
    after = tuple(i for i, p in enumerate(found.part) if p < 0 and i > copies[0][0])
    equal = all([_extents(found.graph, i) for i in c] == [_extents(found.graph, i) for i in copies[0]] for c in copies)
    graph = logged(own_rules()["micro_batch"], graph, found.graph, str(move))
    return StageSequence(graph=graph, copies=copies, before=before, after=after, moves=(move,)) if equal else None


def in_stages(seq: StageSequence, stages: list[int]) -> tuple[StageSequence, list[int]]:
    """Every copy with the operations of a stage after those of the stages before, and the positions where stages begin.

    Raises:
        NotInStages: a stage would have no operation, or a value of the host would have to cross into another one.
    """
    copies = tuple(tuple(sorted(c, key=lambda i: (stages[i], i))) for c in seq.copies)
    mine = [stages[i] for i in copies[0]]
    points = [*(bisect_left(mine, k) for k in range(max(stages) + 1)), len(mine)]
    empty = next((k for k, (lo, hi) in enumerate(itertools.pairwise(points)) if lo == hi), None)
    if empty is not None:
        raise NotInStages(
            f"stage {empty} would have no operation",
            where="--stage-at",
            hint="another node, or without it",
            why="its nodes became views or constants, or run once for all micro-batches",
        )
    out = replace(seq, copies=copies)
    if crossed_by_host_values(out.one()) & {*points[1:-1]}:
        raise NotInStages("a value of the host would have to cross into another stage", where="--stage-at", hint="another node")
    return out, points


def _extents(graph: Graph, i: int) -> tuple[int, ...]:
    return tuple(d.size for d in graph.ops[i].space)


def cut_points(graph: Graph, most: int) -> list[int]:
    """Positions in the order of operations where stages may begin: all of them if they are few, otherwise the one that the
    fewest bytes cross in each of ``most`` stretches of operations; none that a value of the host would have to cross."""
    n, never = len(graph.ops), crossed_by_host_values(graph)
    if n <= most:
        return [p for p in range(n + 1) if p not in never]
    crossing = crossing_bytes(graph)
    ends = [round(k * n / most) for k in range(most + 1)]
    inner = {lo + int(np.argmin(crossing[lo:hi])) for lo, hi in itertools.pairwise(ends)}
    return sorted({0, n, *(inner - never)})


def crossed_by_host_values(graph: Graph) -> set[int]:
    """Positions before which a value of the host is made that is read at them or later: it is never sent."""
    readers = graph.consumers()
    ends = [(m, max(readers.get(t, ()), default=m)) for t, m in graph.producers().items() if graph.tensors[t].on_host]
    return {p for maker, last in ends for p in range(maker + 1, last + 1)}


def crossing_bytes(graph: Graph) -> np.ndarray:
    """For each position, bytes of all tensors that are made before it and read at it or later."""
    change = np.zeros(len(graph.ops) + 1, np.int64)
    readers = graph.consumers()
    for t, maker in graph.producers().items():
        last = max(readers.get(t, ()), default=maker)
        nbytes = graph.tensors[t].size * itemsize(graph.tensors[t].dtype)
        change[maker + 1] += nbytes
        change[last + 1] -= nbytes
    out = np.cumsum(change)
    out[0] = np.iinfo(np.int64).max  # no cut
    return out
