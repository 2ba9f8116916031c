"""Distinct operations on awkward operands: infinities, NaN, zeros, denormal and huge numbers among the reference's own values.

The counterpart of an operation is the nodes of the model between the tensors that both have (`counterparts`). Numbers are put
where some output cells look, a few in an evaluation, so that one does not hide the next; the operation at those cells must give
what the counterpart gives. A cell that does not is asked again, its own numbers alone among clean ones, of every evaluator that
there is, in single and double precision. It is a fault where these agree with each other and not with the operation, but for
the policy of docs/decisions.md: a NaN that a maximum of ours keeps, and what a cell sees of an operand on which, as long as
that is finite, it does not depend (a key behind a mask, a padding, a weight of 0).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tapestry.errors import LawError, TapestryError
from tapestry.ir.expr import Call, arg_positions, distinct
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import dims_of
from tapestry.ir.laws import where
from tapestry.ir.types import FLOATS, numpy_dtype
from tapestry.onnx_eval.value_kinds import is_array
from tapestry.verify.model.cell_sample import cells
from tapestry.verify.model.cell_tolerance import explained, same
from tapestry.verify.model.cell_values import CellValues
from tapestry.verify.model.counterparts import Counterpart, Counterparts, NoCounterpart
from tapestry.verify.model.model_facts import LAW
from tapestry.verify.model.scaled_operands import LARGEST, variants

Array = np.ndarray[Any, Any]
Place = tuple[str, tuple[int, ...]]  # a tensor and a cell of it
Numbers = dict[Place, float]
TARGETS = 96  # output cells of an operation
WORK = 1 << 20  # index points that they may take
BEHIND = 8  # index points that a cell which is followed back may take before fewer cells are looked at
EACH = 2  # times each kind of number is put into each operand at least, where that takes few evaluations
ALL_POINTS = 1 << 34  # index points that the evaluations of all operations may take
POINTS, ROUNDS = 1 << 29, 16  # those of one operation, and how many evaluations these may be
SCALED = 1 << 27  # those with operands that are scaled as a whole
ALL_ROUNDS = 256  # of all operations, where that is more than one of each
ALONE = (3, 32)  # cells of an operation that are asked again, at least and at most
SECOND = 1 << 27  # index points for which the slow reference is asked
PRODUCTS = 1 << 31  # those where it multiplies matrices
FOLLOWED = 8 * TARGETS  # cells of an operation that is followed back
BOTH = 0.2  # of the cells have a number in every operand
APART = "not on awkward operands"  # as a certificate counts operations
DENORMAL = {"f64": 1e-310, "f32": 1e-40, "f16": 1e-6, "bf16": 1e-40}
ASKING = ("IsNaN", "IsInf")  # operators that say of a number whether it is finite
CLEAN = ((1.0, 0.0), (2.0, 1.0), (-1.0, -0.5))  # factors and terms that make a clean number another one
GROWING = (8, 14)  # exponents of numbers that stand for an infinity, in any type
PLAIN = frozenset({"sum", "prod", "or", "and", "xor"})  # monoids in which no NaN is lost or found


@dataclass(slots=True)
class AwkwardOperands:
    """Holds operations of one graph to their counterparts.

    Attributes:
        operations: how many distinct ones there are, about.
        left: index points that evaluations may still take.
    """

    graph: Graph
    parts: Counterparts
    seed: int
    coarsest: float
    operations: int
    counts: Counter[str] = field(default_factory=Counter[str])
    left: int = ALL_POINTS

    def check(self, op: Block, number: int) -> None:
        """One operation; where it cannot be held to anything, that is counted with its reason.

        Raises:
            LawError: naming it, a cell, and the numbers that show it.
        """
        try:
            part = self.parts.of(op)
            seen, points, rng = self._places(op, part, number)
        except NoCounterpart as e:
            self.counts[f"{APART} ({e})"] += 1
            return
        except (TapestryError, ArithmeticError, ValueError):  # a constant behind it is of no evaluator
            self.counts[f"{APART} (of no evaluator)"] += 1
            return
        groups = min(math.prod(d.size for d in op.dims if d.name in s.roots) for s in seen)
        width = max(1, min(len(points), groups // 2))
        work = max(1, sum(_work(b) for b in (op, *part.behind)), sum(v.size for v in part.values.values() if is_array(v)))
        if work > self.left:
            self.counts[f"{APART} (beyond the budget)"] += 1
            return
        self.counts["on awkward operands"] += 1
        wanted = EACH * len(_kinds("f32")) * len({s.tensor for s in seen})
        rounds = max(1, min(math.ceil(wanted / width), ROUNDS, min(POINTS, self.left) // work, ALL_ROUNDS // self.operations))
        again = min(ALONE[1], max(ALONE[0], SECOND // work))
        self._scaled(op, part, points[:width], number, work)
        for k in range(rounds):
            self.left -= work
            chosen = rng.permutation(len(points))[:width] if k else np.arange(width)
            again -= self._round(op, part, points[chosen], _placed(self.graph, seen, chosen, rng, k), number, again)

    def _places(self, op: Block, part: Counterpart, number: int) -> tuple[list[_Seen], Array, np.random.Generator]:
        """Some cells of an operation, and where they look."""
        rng = np.random.default_rng((self.seed, number, 2))
        behind = max([math.prod(d.size for d in (*b.reduce, *b.inner_dims)) for b in part.behind], default=1)
        points = cells(op, self.graph, rng, TARGETS, WORK // max(1, behind // BEHIND))
        points = points[rng.permutation(len(points))[:TARGETS]]
        seen = [s for s in _Footprint(self.graph, self.parts, part).of(op, points, rng) if len(s.targets)]
        if not seen:
            raise NoCounterpart("of no floats")
        return seen, points, rng

    def _round(self, op: Block, part: Counterpart, points: Array, numbers: list[Numbers], number: int, most: int) -> int:
        """One evaluation with numbers at many cells; returns how many cells were asked again alone."""
        try:
            values = _changed(part.operands, {p: v for row in numbers for p, v in row.items()})
            theirs = self.parts.run(part, values)
        except (TapestryError, ArithmeticError, ValueError):
            self.counts["evaluations on awkward operands that no evaluator makes"] += 1
            return 0
        self.counts["cells on awkward operands"] += len(points)
        suspects: dict[tuple[str, ...], tuple[int, int]] = {}
        for k, name in enumerate(op.outs):
            reference, t = theirs.get(name), self.graph.tensors[name]
            if not is_array(reference) or reference.shape != t.shape:
                continue
            (mine, slack), evaluator = self._mine(op, values, points, k)
            there = reference[tuple(points.T)].reshape(len(points)).astype(numpy_dtype(t.dtype))
            clean = np.asarray(self.parts.known(name))[tuple(points.T)].reshape(len(points))
            for at in np.flatnonzero(~same(mine, slack, there, t.dtype, evaluator.unit, clean)):
                if numbers[at]:
                    suspects.setdefault(_sort(numbers[at]), (int(at), k))
        asked = list(suspects.values())[: max(0, most)]
        for at, k in asked:
            shown = ", ".join(f"{t}{list(i)} = {v:.3g}" for (t, i), v in numbers[at].items())
            values = _changed(part.operands, numbers[at])
            self._alone(op, part, points[at : at + 1], values, numbers[at], k, number, shown)
        return len(asked)

    def _scaled(self, op: Block, part: Counterpart, points: Array, number: int, work: int) -> None:
        """Evaluations with operands that are scaled as a whole."""
        spent = 0
        for said, changed in variants(self.graph, part.values, part.weights):
            if work > self.left or spent + work > SCALED:
                return
            self.left -= work
            spent += work
            values = {**part.values, **changed}
            try:
                theirs = self.parts.run(part, values)
            except (TapestryError, ArithmeticError, ValueError):
                self.counts["evaluations on awkward operands that no evaluator makes"] += 1
                continue
            self.counts["cells on scaled operands"] += len(points)
            for k, name in enumerate(op.outs):
                reference, t = theirs.get(name), self.graph.tensors[name]
                if not is_array(reference) or reference.shape != t.shape:
                    continue
                (mine, slack), evaluator = self._mine(op, values, points, k)
                there = reference[tuple(points.T)].reshape(len(points)).astype(numpy_dtype(t.dtype))
                for at in np.flatnonzero(~same(mine, slack, there, t.dtype, evaluator.unit))[: ALONE[0]]:
                    self._alone(op, part, points[at : at + 1], values, {}, k, number, said)

    def _mine(self, op: Block, values: Mapping[str, Any], points: Array, k: int) -> tuple[tuple[Array, Array], CellValues]:
        """What the operation gives, and the evaluator that gave it."""
        found = CellValues(self.graph, lambda t: values.get(t, self.parts.known(t)), coarsest=self.coarsest)
        return found.block(op, points)[k], found

    def _alone(
        self, op: Block, part: Counterpart, point: Array, values: Mapping[str, Any], numbers: Numbers, k: int, number: int,
        shown: str,
    ) -> None:  # fmt: skip
        """A cell once more, nothing else awkward: refused where all evaluators agree on another value."""
        name, at = op.outs[k], tuple(point.T)
        dtype = self.graph.tensors[name].dtype
        (mine, slack), evaluator = self._mine(op, values, point, k)
        odd = not all(math.isfinite(v) for v in numbers.values())
        if evaluator.whole_numbers:  # of which a NaN or an infinity may be any
            return
        slow = _work(op) <= (PRODUCTS if part.of_products() else SECOND)
        found = self.parts.opinions(part, values, slow, _work(op) <= SECOND)
        opinions = (r[name][at].reshape(1).astype(numpy_dtype(dtype)) for r in found)
        first = next(opinions, None)
        if first is None:
            return
        finite = not odd or any(math.isfinite(v) and abs(v) > 1 for v in numbers.values())
        on_the_way = finite and not (_work(op) <= SECOND and self._too_large(part, values, name, at))
        if self._settled(op, part, mine[0], first[0], on_the_way, dtype) or same(mine, slack, first, dtype, evaluator.unit)[0]:
            return
        asks = dtype not in FLOATS and any(n.op_type in ASKING for n in part.nodes)  # of finite numbers the answer is one
        if (
            odd
            and not asks
            and (self._indifferent(part, numbers, name, at) or self._limit(part, numbers, name, at, mine[0], first[0]))
        ):
            self.counts["cells by policy"] += 1
            return
        trial = CellValues(self.graph, lambda t: values.get(t, self.parts.known(t)), coarsest=self.coarsest)
        if explained(trial, op, k, point, first, dtype, number)[0]:
            return
        others, wide = list(opinions), first.astype(mine.dtype)
        if not others or not all(same(wide, slack, r, dtype, evaluator.unit)[0] for r in others):
            self.counts["cells where evaluators differ"] += 1
            return
        by = f"{first[0]!s} by {1 + len(others)} evaluations"
        said = f"cell {point[0].tolist()} is {mine[0]!s} by the plan, {by}, where {shown}"
        raise LawError(LAW, f"'{name}' is not the model's", where=where(op), why=said)

    def _settled(self, op: Block, part: Counterpart, mine: Any, first: Any, on_the_way: bool, dtype: str) -> bool:
        """Whether a policy says enough of a value: a NaN that is kept, or an overflow on the way, a matter of order."""
        if dtype not in FLOATS:
            return False
        kept = bool(np.isnan(mine) and not np.isnan(first)) and self._keeps_nan(op, part)
        overflows = on_the_way and (not np.isfinite(first) or abs(float(first)) > 1.99 * 2.0 ** LARGEST[dtype])
        if kept or overflows:
            self.counts["cells by policy" if kept else "cells where evaluators differ"] += 1
        return kept or overflows

    def _too_large(self, part: Counterpart, values: Mapping[str, Any], name: str, at: tuple[Array, ...]) -> bool:
        """Whether a result, and not only something on the way to it, is beyond its type."""
        dtype = self.graph.tensors[name].dtype
        try:
            wide = float(np.asarray(self.parts.run(part, values, independent=True, wide=True)[name])[at].reshape(-1)[0])
        except (TapestryError, ArithmeticError, ValueError, TypeError):
            return False
        return dtype in LARGEST and math.isfinite(wide) and abs(wide) > 2.0 ** (LARGEST[dtype] + 2)

    def _keeps_nan(self, op: Block, part: Counterpart) -> bool:
        """Whether a maximum is computed, or a state: there a NaN is not lost, and the mean of an infinity is one."""
        chain = [op, *part.behind]
        calls = (x for b in chain for x in distinct((*b.point, *b.then)) if isinstance(x, Call))
        monoids = {m for b in chain for m in (b.monoid, *(s.monoid for s in b.inner)) if m is not None}
        return bool(monoids - PLAIN) or any(x.fn in ("max", "min") for x in calls)

    def _indifferent(self, part: Counterpart, numbers: Numbers, name: str, at: tuple[Array, ...]) -> bool:
        """Whether a cell is the same for any clean operand where one that is no number was."""

        def same_for(place: Place) -> bool:
            was = float(part.operands[place[0]][place[1]])
            return len({self._theirs(part, {place: was * f + c}, name, at).tobytes() for f, c in CLEAN}) == 1

        return any(same_for(p) for p, v in numbers.items() if not math.isfinite(v))

    def _limit(self, part: Counterpart, numbers: Numbers, name: str, at: tuple[Array, ...], mine: Any, first: Any) -> bool:
        """Whether an infinity of ours is what ever larger operands lead to, where the reference has NaN: 0 times an infinity
        beside the infinity itself, at a place that an interpolation hits."""
        if not (np.isinf(mine) and np.isnan(first)) or any(math.isnan(v) for v in numbers.values()):
            return False
        near, far = (
            float(
                self._theirs(part, {p: math.copysign(2.0**e, v) if math.isinf(v) else v for p, v in numbers.items()}, name, at)[
                    0
                ]
            )
            for e in GROWING
        )
        return math.isfinite(far) and near * mine > 0 and far / near >= 2.0 ** (GROWING[1] - GROWING[0] - 1)

    def _theirs(self, part: Counterpart, numbers: Numbers, name: str, at: tuple[Array, ...]) -> Array:
        """A cell of the counterpart."""
        return np.asarray(self.parts.run(part, _changed(part.operands, numbers))[name])[at]


def _kinds(dtype: str) -> list[float]:
    """The awkward numbers of a type, the huge ones drawn for each place."""
    return [math.inf, -math.inf, math.nan, 1.0, -1.0, 2.0, -2.0, DENORMAL[dtype], -0.0]


def _work(op: Block) -> int:
    """Index points of an operation, those of an inner sum along the dimensions alone that it depends on."""
    found = math.prod(d.size for d in (*op.dims, *op.reduce))
    for s in op.inner:
        used = {n for k in arg_positions((s.body,)) for e in op.reads[k].index for n in dims_of(e)}
        found += math.prod(d.size for d in op.space if d.name in used)
    return found


def _sort(numbers: Numbers) -> tuple[str, ...]:
    """What tells one trial from another: which tensors hold infinities, NaN, huge and small numbers."""

    def of(v: float) -> str:
        return str(v) if not math.isfinite(v) else ("huge" if abs(v) > 1 else "small") + "-" * (v < 0)

    return tuple(sorted(f"{t} {of(v)}" for (t, _), v in numbers.items()))


def _number(dtype: str, kind: int, rng: np.random.Generator) -> float:
    value = _kinds(dtype)[kind % len(_kinds(dtype))]
    if abs(value) not in (1.0, 2.0):
        return value
    largest = math.log10({"f16": 6e4, "f64": 3e300}.get(dtype, 3e38))
    return math.copysign(10.0 ** (largest if abs(value) == 2 else rng.uniform(4.1, largest)), value)


def _placed(
    graph: Graph, seen: Sequence[_Seen], chosen: Sequence[int] | Array, rng: np.random.Generator, first: int
) -> list[Numbers]:
    """A number for each of some output cells, in one of the operands that it looks at or in all of them."""
    looked: dict[int, list[Place]] = {}
    for s in seen:
        for target, index in zip(s.targets.tolist(), s.index.tolist(), strict=True):
            looked.setdefault(target, []).append((s.tensor, tuple(index)))
    out: list[Numbers] = []
    tensors, kinds = sorted({s.tensor for s in seen}), len(_kinds("f32"))
    for k, target in enumerate(chosen):
        number, places = first * len(chosen) + k, sorted(set(looked.get(int(target), [])))
        if places and rng.random() > BOTH:
            mine = [p for p in places if p[0] == tensors[number // kinds % len(tensors)]] or places
            places = [mine[int(rng.integers(len(mine)))]]
        out.append({})
        for n, p in enumerate(places):
            out[-1][p] = _number(graph.tensors[p[0]].dtype, int(rng.integers(99)) if n else number, rng)
    return out


def _changed(values: Mapping[str, Array], numbers: Numbers) -> dict[str, Array]:
    """Copies of some values with numbers put into them."""
    out = {t: values[t].copy() for t in {t for t, _ in numbers}}
    for (t, index), v in numbers.items():
        out[t][index] = v
    return {**values, **out}


@dataclass(frozen=True, slots=True)
class _Seen:
    """Where output cells look in one tensor: a cell of it for each target.

    Attributes:
        roots: the output's dimensions that say where.
    """

    tensor: str
    targets: Array
    index: Array
    roots: frozenset[str]


class _Footprint:
    """Cells of a counterpart's operands that cells of an operation look at: one of each read, at a random place of a sum.

    Every operation that is followed back is looked at once, behind all that read it, at so many cells at most.
    """

    def __init__(self, graph: Graph, parts: Counterparts, part: Counterpart) -> None:
        self.graph, self.parts, self.part = graph, parts, part
        self.values = CellValues(graph, lambda t: None)
        self.asked: dict[str, list[_Seen]] = {}

    def of(self, op: Block, points: Array, rng: np.random.Generator) -> Iterator[_Seen]:
        """For all reads, also those of tensors that the model does not have."""
        yield from self._of(op, points, np.arange(len(points)), [frozenset({d.name}) for d in op.dims], rng)
        for b in reversed(self.part.behind):
            asked = [s for t in b.outs for s in self.asked.pop(t, [])]
            if asked:
                targets, index = np.concatenate([s.targets for s in asked]), np.concatenate([s.index for s in asked])
                some = rng.permutation(len(targets))[:FOLLOWED]
                roots = frozenset[str]().union(*(s.roots for s in asked))
                yield from self._of(b, index[some], targets[some], [roots] * len(b.dims), rng)

    def _of(
        self, op: Block, points: Array, targets: Array, roots: Sequence[frozenset[str]], rng: np.random.Generator
    ) -> Iterator[_Seen]:
        env = {d.name: points[:, k] for k, d in enumerate(op.dims)}
        env |= {d.name: rng.integers(0, d.size, len(points)) for d in (*op.reduce, *op.inner_dims)}
        by = dict(zip([d.name for d in op.dims], roots, strict=True))
        for r in op.reads:
            operand = r.tensor in self.part.operands
            if not operand and self.parts.given(r.tensor):
                continue
            index, valid = self.values.looked_at(op, r, env)
            rows = np.array([np.broadcast_to(i, len(points)) for i in index], int).reshape(len(index), len(points)).T
            keep = np.broadcast_to(valid, len(points))
            own = frozenset[str]().union(*(by.get(d, frozenset()) for e in r.index for d in dims_of(e)))
            seen = _Seen(r.tensor, targets[keep], rows[keep], own)
            if not operand:
                self.asked.setdefault(r.tensor, []).append(seen)
            elif self.graph.tensors[r.tensor].dtype in FLOATS:
                yield seen
