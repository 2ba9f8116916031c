"""What repeats in a model, said once: ``layers.*.self_attn.q_proj ×32``.

Names say which operations of different layers are one another's counterparts: they differ in the numbers of layers alone. Where
the file has no names, the structure says it: runs of operations that come again and again, equal in what they compute, how they
are cut and what they read from one another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tapestry.ir.graph import Graph
from tapestry.ir.naming.author_names import operation_names, parts
from tapestry.ir.plan import Plan
from tapestry.ir.syntax.printer import signature
from tapestry.rewrites.core.rule import Refusal
from tapestry.viz.format import wrapped

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
LEAST = 4  # operations that a run must hold, so that it is worth one
WORD = re.compile(r"(?<=[@=])(\"?)([^\",{}\d][^\",{}]*)\1")  # of the text of a move: what stands behind @ and =
Reads = list[tuple[int | str, ...]]


def together(rows: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Rows with equal keys together, in the order in which they come first."""
    out: dict[K, list[T]] = {}
    for row in rows:
        out.setdefault(key(row), []).append(row)
    return out


def template(name: str) -> str:
    """A name with ``*`` for the numbers of layers, which are those of all its parts but the last; that one's count goes."""
    *outer, last = re.split(r"([./])", name)
    outer = [re.sub(r"\d+$", "*", p) for p in outer]
    return "".join([*outer, "*" if last.isdecimal() else re.sub(r"_\d+$", "", last)])


def layer_of(name: str) -> str:
    """The layer that an operation is in: its name up to the first number that stands for itself; "" outside of layers."""
    parts = name.split(".")
    at = next((k for k, p in enumerate(parts[:-1]) if p.isdecimal()), None)
    return ".".join(parts[: at + 1]) if at is not None else ""


def listed(names: Sequence[str]) -> str:
    """Names with those alike once: ``layers.*.mlp.up ×32, lm_head``."""
    rows = together(names, template)
    return ", ".join(f"{t} ×{len(same)}" if len(same) > 1 else same[0] for t, same in rows.items())


def moves_text(moves: Sequence[str], most: int = 3) -> Iterator[str]:
    """Rewrites in the order in which they come first, equal ones of different layers once; of more than ``most`` kinds by one
    rule, those and how many follow."""
    for of_rule in together(moves, lambda m: m.partition("@")[0]).values():
        kinds = list(together(of_rule, lambda m: WORD.sub(lambda w: template(w[2]), m)).items())
        shown = kinds[: most if len(kinds) > most + 1 else None]
        yield from (f"{text} ×{len(same)}" if len(same) > 1 else same[0] for text, same in shown)
        if len(shown) < len(kinds):
            left = kinds[len(shown) :]
            yield f"{of_rule[0].partition('@')[0]}@… ×{sum(len(same) for _, same in left)}, {len(left)} kinds of places"


def refusals_text(refused: Sequence[Refusal], names: Mapping[str, str]) -> str:
    """Why rules do not apply, each reason once, and where that is so by the names of the model's author."""

    def said(text: str) -> str:
        return re.sub(r"'([^']+)'", lambda m: f"'{template(names[m[1]])}'" if m[1] in names else m[0], text)

    groups = together(refused, lambda m: (m.rule, said(m.reason), said(m.witness)))
    lines = [f"{'×':>5}  rule: why it does not apply" if groups else "no rule was refused"]
    for (rule, reason, witness), same in groups.items():
        lines += wrapped(f"{len(same):>5}  {rule}: {reason}{f' (e.g. {witness})' if witness else ''}", " " * 9)
        lines += wrapped(f"{'':7}at {listed([names.get(m.at, m.at) for m in same])}", " " * 9)
    return "\n".join(lines)


def counterparts(plan: Plan) -> list[str]:
    """For each operation what it and its counterparts in other layers are called: a name with ``*``, or, where the file names
    no part of the model, the name of the first one of them in a run.

    An operation beside a run that computes the same under a name with another count goes with those in it, in their order (a
    first layer also makes what all others read, and so is none of the run).
    """
    names, named = operation_names(plan.graph), parts(plan.graph)
    out = [template(name) if part else name for name, part in zip(names, named, strict=True)]
    if all(named):
        return out
    kinds = [(text, template(name)) for text, name in zip(signatures(plan), names, strict=True)]
    first: dict[int, str] = {}
    for run in runs(plan):
        at = range(run.first, run.first + run.length * run.times)
        first |= {i: names[run.first + (i - run.first) % run.length] for i in at if not named[i]}
    places = {kind: list(dict.fromkeys(first[i] for i in at)) for kind, at in together(first, lambda i: kinds[i]).items()}
    beside = together((i for i in range(len(out)) if not named[i] and i not in first), lambda i: kinds[i])
    for kind, at in beside.items():
        first |= {i: places[kind][k % len(places[kind])] for k, i in enumerate(at) if kind in places}
    return [first.get(i, name) for i, name in enumerate(out)]


@dataclass(frozen=True, slots=True)
class Run:
    """``times`` repetitions of ``length`` operations from number ``first`` on; ``label`` is what the repetitions are called."""

    first: int
    length: int
    times: int
    label: str


def signatures(plan: Plan) -> list[str]:
    """What each operation computes, by itself."""
    return [signature(op, plan.graph) for op in plan.graph.ops]


def runs(plan: Plan, alike: Sequence[str] | None = None) -> list[Run]:
    """Disjoint runs in program order; equal operations with other cuts are not alike."""
    kinds, layers = alike or signatures(plan), [layer_of(n) for n in operation_names(plan.graph)]
    number: dict[object, int] = {}
    keys = zip(kinds, plan.strategies, plan.stage_of or (0,) * len(kinds), strict=True)
    symbols = np.array([number.setdefault(k, len(number)) for k in keys], np.int64)
    reads = _reads(plan.graph)
    out: list[Run] = []
    todo = [(0, len(symbols))]
    while todo:
        low, high = todo.pop()
        best = _longest(symbols, reads, low, high)
        if best is not None:
            first, length, times = _turned(layers, reads, *best)
            out.append(Run(first, length, times, _label(layers[first : first + length])))
            todo += [(low, first), (first + length * times, high)]
    return sorted(out, key=lambda f: f.first)


def _reads(graph: Graph) -> Reads:
    """For each operation where it reads: the number of the operation that writes a tensor, "" for weights, an input's name."""
    makers = graph.producers()
    return [tuple(makers.get(t, "" if t in graph.weights else t) for t in op.inputs) for op in graph.ops]


def _longest(symbols: np.ndarray, reads: Reads, low: int, high: int) -> tuple[int, int, int] | None:
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


def _joined_alike(reads: Reads, first: int, length: int, times: int) -> int:
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


def _turned(layers: Sequence[str], reads: Reads, first: int, length: int, times: int) -> tuple[int, int, int]:
    """A run that begins where a layer begins by the names, if one of as many repetitions but one does."""

    def mixed(turn: int) -> int:
        return len(set(layers[first + turn : first + turn + length]) - {""})

    best = min(range(length), key=lambda turn: (mixed(turn), turn))
    if best == 0 or mixed(best) == mixed(0):
        return first, length, times
    fewer = _joined_alike(reads, first + best, length, times - 1)
    return (first + best, length, fewer) if fewer == times - 1 >= 2 else (first, length, times)


def _label(layers: Sequence[str]) -> str:
    """What the names call the repetitions, in the singular: ``layer`` of ``model.layers.3``; "block" where they say nothing."""
    words = [w for name in layers if (w := re.sub(r"[._]?\d+$|[._]?list$", "", name.rpartition(".")[0].rpartition(".")[2]))]
    word = max(sorted(set(words)), key=words.count).removesuffix("s") if words else "block"
    return word if len(word) > 1 else "layer"
