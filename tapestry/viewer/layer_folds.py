"""Repeated structure: runs of operations that come again and again, equal in what they compute, how they are cut and what they
read from one another, such as the layers of a transformer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapestry.ir.graph import Graph
from tapestry.ir.plan import Plan
from tapestry.ir.syntax.printer import signature

LEAST = 4  # operations that a fold must hold, so that it is worth one


@dataclass(frozen=True, slots=True)
class Fold:
    """``times`` repetitions of ``length`` operations from number ``first`` on; ``label`` is what the repetitions are called."""

    first: int
    length: int
    times: int
    label: str


def signatures(plan: Plan) -> list[str]:
    """What each operation computes, by itself."""
    return [signature(op, plan.graph) for op in plan.graph.ops]


def folds(plan: Plan, alike: Sequence[str] | None = None) -> list[Fold]:
    """Disjoint folds in program order; equal operations with other cuts are not alike."""
    kinds = alike or signatures(plan)
    number: dict[object, int] = {}
    keys = zip(kinds, plan.strategies, plan.stage_of or (0,) * len(kinds), strict=True)
    symbols = np.array([number.setdefault(k, len(number)) for k in keys], np.int64)
    reads = _reads(plan.graph)
    out: list[Fold] = []
    todo = [(0, len(symbols))]
    while todo:
        low, high = todo.pop()
        best = _longest(symbols, reads, low, high)
        if best is not None:
            first, length, times = _turned(plan.graph, reads, *best)
            out.append(Fold(first, length, times, _label(plan.graph, first, length)))
            todo += [(low, first), (first + length * times, high)]
    return sorted(out, key=lambda f: f.first)


def _reads(graph: Graph) -> list[tuple[int | str, ...]]:
    """For each operation where it reads: the number of the operation that writes a tensor, "" for weights, an input's name."""
    makers = graph.producers()
    return [tuple(makers.get(t, "" if t in graph.weights else t) for t in op.inputs) for op in graph.ops]


def _longest(symbols: np.ndarray, reads: list[tuple[int | str, ...]], low: int, high: int) -> tuple[int, int, int] | None:
    """The run between two places that covers the most, of the shortest repetition."""
    best, covered = None, LEAST - 1
    part = symbols[low:high]
    for length in range(1, len(part) // 2 + 1):
        same = np.concatenate(([False], part[:-length] == part[length:], [False])).astype(np.int8)
        begins, ends = (np.flatnonzero(np.diff(same) == s) for s in (1, -1))
        for k in np.argsort(begins - ends, kind="stable")[:4].tolist():
            first, times = low + int(begins[k]), 1 + int(ends[k] - begins[k]) // length
            if times * length <= covered or times < 2:
                continue
            times = _joined_alike(reads, first, length, times)
            if times >= 2 and times * length > covered:
                best, covered = (first, length, times), times * length
    return best


def _joined_alike(reads: list[tuple[int | str, ...]], first: int, length: int, times: int) -> int:
    """How many repetitions read as the second one does: from the same places outside, or as far behind themselves."""
    for again in range(1, times):
        for k in range(first + again * length, first + (again + 1) * length):
            for now, then in zip(reads[k], reads[k - length], strict=True):
                if isinstance(now, str) or isinstance(then, str):
                    alike = now == then or again == 1
                else:
                    alike = now == then < first or now - then == length or (again == 1 and then < first <= now)
                if not alike:
                    return again
    return times


def _turned(graph: Graph, reads: list[tuple[int | str, ...]], first: int, length: int, times: int) -> tuple[int, int, int]:
    """A fold that begins where a layer begins by the names of its weights, if one of as many repetitions but one does."""

    def numbers(k: int) -> set[str]:
        return {m for t in graph.ops[k].inputs if t in graph.weights for m in re.findall(r"[._/](\d+)[._/]", t)[:1]}

    def mixed(turn: int) -> int:
        return len(set[str]().union(*(numbers(k) for k in range(first + turn, first + turn + length))))

    best = min(range(length), key=lambda turn: (mixed(turn), turn))
    if best == 0 or mixed(best) == mixed(0):
        return first, length, times
    fewer = _joined_alike(reads, first + best, length, times - 1)
    return (first + best, length, fewer) if fewer == times - 1 >= 2 else (first, length, times)


def _label(graph: Graph, first: int, length: int) -> str:
    """ "layer" where the weights' or nodes' names count the repetitions under that word, else "block"."""
    names = [n for op in graph.ops[first : first + length] for n in (*op.inputs, *op.source)]
    words = [w for n in names for w in re.findall(r"(?:^|[./])(layer|block|stage|h)s?[._]?(?:list)?[._/]\d+", n)]
    return max(set(words), key=words.count).replace("h", "layer") if words else "block"
