"""Distinct operations on awkward operands: infinities, NaN, zeros, denormal and huge numbers among the reference's own values.

The counterpart of an operation is the nodes of the model between the tensors that both have (`counterparts`). Numbers are put
where some output cells look, a few in an evaluation, so that one does not hide the next; the operation at those cells must give
what the counterpart gives. A cell that does not is asked again, its own numbers alone among clean ones, of every evaluator that
there is, in single and double precision. It is a fault where these agree with each other and not with the operation, but for
the policy of docs/decisions.md: a NaN that a maximum of ours keeps, and what a cell sees of an operand on which, as long as
that is finite, it does not depend (a key behind a mask, a padding, a weight of 0).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tapestry.errors import LawError, TapestryError
from tapestry.ir.expr import Call, arg_positions
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import dims_of
from tapestry.ir.laws import where
from tapestry.ir.types import FLOATS, Array, numpy_dtype
from tapestry.onnx_eval.value_kinds import is_array
from tapestry.verify.model.awkward_numbers import KINDS, NOT_FINITE, Footprint, Numbers, Place, Placing, changed, sort_of
from tapestry.verify.model.cell_sample import cells
from tapestry.verify.model.cell_tolerance import explained, same
from tapestry.verify.model.cell_values import CellValues
from tapestry.verify.model.counterparts import Counterpart, Counterparts, NoCounterpart
from tapestry.verify.model.model_facts import LAW
from tapestry.verify.model.model_values import at_cells
from tapestry.verify.model.scaled_operands import ELSEWHERE, FACTORS, LARGE, LARGEST, PATTERN, ROOM


def variants(
    graph: Graph,
    operands: Mapping[str, Array],
    weights: Mapping[str, Array],
    unseen: Mapping[str, Array],
    rng: np.random.Generator,
) -> Iterator[tuple[str, dict[str, Array]]]:
    """What is scaled, as a person reads it, and the scaled values by name; nothing that is finite becomes infinite.

    Cells that no cell of the operation looks at, if it looks where it says, are all large beside small and zero ones.
    """
    floats = {t: v for t, v in operands.items() if graph.tensors[t].dtype in FLOATS}
    for e in FACTORS:
        found = {t: np.asarray(v * np.asarray(0.0 if e is None else 2.0**e, v.dtype)) for t, v in floats.items()}
        if found and all(np.isfinite(found[t]).sum() == np.isfinite(v).sum() for t, v in floats.items()):
            others = {t: u for t, u in unseen.items() if t in found and u.any() and e in ELSEWHERE}
            for t, u in others.items():
                drawn = np.asarray(ELSEWHERE[e] * (1 + rng.random(PATTERN)), found[t].dtype)
                found[t] = np.where(u, np.resize(drawn, u.shape), found[t])
            said = ", ".join(found) + (" = 0" if e is None else f" times 2^{e}")
            yield said + (f", and others where {', '.join(others)} is not looked at" if others else ""), found
    for limit in (LARGE, None):
        found = dict[str, Array]()
        for t, v in weights.items():
            most, dtype = float(np.abs(v).max(initial=0)), graph.tensors[t].dtype
            largest = LARGEST[dtype] - ROOM.get(dtype, 0)
            if np.isfinite(most) and most > 0:
                wanted = largest if limit is None else min(limit, largest)
                found[t] = np.ldexp(v, wanted - 1 - int(np.floor(np.log2(most))) + (limit is None))
        if found:
            yield f"{', '.join(found)} brought to 2^{limit or 'the largest of its type'}", found


TARGETS = 96  # output cells of an operation
WORK = 1 << 20  # index points that they may take
BEHIND = 8  # index points that a cell which is followed back may take before fewer cells are looked at
EACH = 2  # times each kind of number is put where each read looks, where that takes few evaluations
ALL_POINTS = 1 << 34  # index points that the evaluations of all operations may take
POINTS, ROUNDS = 1 << 29, 16  # those of one operation, and how many evaluations these may be
ZEROS = 1 << 28  # those of the evaluation with zeros beside infinities
SCALED = 1 << 27  # those with operands that are scaled as a whole
ALL_ROUNDS = 256  # of all operations, where that is more than one of each
ALONE = (6, 32)  # cells of an operation that are asked again, at least and at most
ALIKE = 3  # those with the same numbers in the same operands
SECOND = 1 << 27  # index points for which the slow reference is asked
PRODUCTS = 1 << 31  # those where it multiplies matrices
APART = "not on awkward operands"  # as a certificate counts operations
ASKING = ("IsNaN", "IsInf")  # operators that say of a number whether it is finite
CLEAN = ((64.0, 8.0), (-64.0, -8.0), (2.0, 1.0), (-1.0, -0.5))  # factors and terms that make a clean number another one
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
            found, points, rng = self._places(op, part, number)
        except NoCounterpart as e:
            self.counts[f"{APART} ({e})"] += 1
            return
        except (TapestryError, ArithmeticError, ValueError):  # a constant behind it is of no evaluator
            self.counts[f"{APART} (of no evaluator)"] += 1
            return
        work = max(1, sum(_work(b) for b in (op, *part.behind)), sum(v.size for v in part.values.values() if is_array(v)))
        if work > self.left:
            self.counts[f"{APART} (beyond the budget)"] += 1
            return
        self.counts["on awkward operands"] += 1
        trial = _Trial(op, part, number, points, min(ALONE[1], max(ALONE[0], SECOND // work)))
        self._scaled(trial, work, found)
        rounds = max(1, min(ROUNDS, min(POINTS, self.left) // work, ALL_ROUNDS // self.operations))
        todo = Placing(self.graph, found, len(points), KINDS, EACH)
        while todo.left and rounds:
            rounds -= 1
            self.left -= work
            before = len(todo.left)
            self._round(trial, *todo.draw(rng, TARGETS), part.operands)
            if len(todo.left) == before:
                break
        if work <= min(ZEROS, self.left):
            self.left -= work
            zeros = {t: np.zeros_like(v) for t, v in part.values.items() if self.graph.tensors[t].dtype in FLOATS}
            few = Placing(self.graph, found, len(points), NOT_FINITE, 1)
            self._round(trial, *few.draw(rng, TARGETS, 0.0), {**part.operands, **zeros})

    def _places(self, op: Block, part: Counterpart, number: int) -> tuple[Footprint, Array, np.random.Generator]:
        """Some cells of an operation, and where they look."""
        rng = np.random.default_rng((self.seed, number, 2))
        behind = max([b.merged_cells for b in part.behind], default=1)
        points = cells(op, self.graph, rng, TARGETS, WORK // max(1, behind // BEHIND))
        points = points[rng.permutation(len(points))[:TARGETS]]
        found = Footprint(self.graph, self.parts, part).look(op, points, rng)
        self.counts.update(found.untried)
        if not found.seen:
            raise NoCounterpart("of no floats")
        return found, points, rng

    def _round(self, c: _Trial, chosen: Array, numbers: list[Numbers], base: Mapping[str, Array]) -> None:
        """One evaluation with numbers at many cells; cells that differ are asked again alone."""
        if not len(chosen):
            return
        points = c.points[chosen]
        try:
            values = changed(base, {p: v for row in numbers for p, v in row.items()})
            theirs = self.parts.run(c.part, values)
        except (TapestryError, ArithmeticError, ValueError):
            self.counts["evaluations on awkward operands that no evaluator makes"] += 1
            return
        self.counts["cells on awkward operands"] += len(points)
        suspects: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for k, differ in self._differing(c.op, values, theirs, points, typical=True):
            for at in differ:
                suspects.setdefault(sort_of(numbers[at]), []).append((at, k))
        alike = [some[:ALIKE] for some in suspects.values()]
        for at, k in [s for row in itertools.zip_longest(*alike) for s in row if s is not None]:
            if not c.again:
                return
            c.again -= 1
            self._alone(c, points[at : at + 1], base, numbers[at], k)

    def _scaled(self, c: _Trial, work: int, found: Footprint) -> None:
        """Evaluations with operands that are scaled as a whole, and others where the operation does not look."""
        op, part, points, spent = c.op, c.part, c.points, 0
        rng = np.random.default_rng((self.seed, c.number, 3))
        unseen = {t: ~found.looked_at(t) for t, v in part.values.items() if is_array(v)}
        for said, scaled in variants(self.graph, part.values, part.weights, unseen, rng):
            if work > self.left or spent + work > SCALED:
                return
            self.left -= work
            spent += work
            values = {**part.values, **scaled}
            try:
                theirs = self.parts.run(part, values)
            except (TapestryError, ArithmeticError, ValueError):
                self.counts["evaluations on awkward operands that no evaluator makes"] += 1
                continue
            self.counts["cells on scaled operands"] += len(points)
            for k, differ in self._differing(op, values, theirs, points, typical=False):
                for at in differ[: ALONE[0]]:
                    self._alone(c, points[at : at + 1], values, {}, k, said)

    def _differing(
        self, op: Block, values: Mapping[str, Any], theirs: Mapping[str, Any], points: Array, *, typical: bool
    ) -> Iterator[tuple[int, list[int]]]:
        """For each result, which cells are not the reference's; with ``typical``, what is so is taken from the run before."""
        for k, name in enumerate(op.outs):
            reference, t = theirs.get(name), self.graph.tensors[name]
            if is_array(reference) and reference.shape == t.shape:
                (mine, slack), evaluator = self._mine(op, values, points, k)
                there = at_cells(reference, points).astype(numpy_dtype(t.dtype))
                clean = at_cells(np.asarray(self.parts.known(name)), points) if typical else None
                yield k, np.flatnonzero(~same(mine, slack, there, t.dtype, evaluator.unit, clean)).tolist()

    def _mine(self, op: Block, values: Mapping[str, Any], points: Array, k: int) -> tuple[tuple[Array, Array], _Watched]:
        """What the operation gives, and the evaluator that gave it."""
        found = _Watched(self.graph, lambda t: values.get(t, self.parts.known(t)), coarsest=self.coarsest)
        return found.block(op, points)[k], found

    def _alone(self, c: _Trial, point: Array, base: Mapping[str, Any], numbers: Numbers, k: int, said: str = "") -> None:
        """A cell once more, nothing else awkward: refused where all evaluators agree on another value."""
        op, part, name, at = c.op, c.part, c.op.outs[k], tuple(point.T)
        dtype, values = self.graph.tensors[name].dtype, changed(base, numbers)
        (mine, slack), evaluator = self._mine(op, values, point, k)
        odd = {p: v for p, v in numbers.items() if not math.isfinite(v)}
        if evaluator.whole_numbers:  # of which a NaN or an infinity may be any
            return
        slow = _work(op) <= (PRODUCTS if part.of_products() else SECOND)
        found = self.parts.opinions(part, values, slow, _work(op) <= SECOND)
        opinions = (r[name][at].reshape(1).astype(numpy_dtype(dtype)) for r in found)
        first = next(opinions, None)
        if first is None or same(mine, slack, first, dtype, evaluator.unit)[0]:
            return
        if self._settled(c, point, base, numbers, k, mine[0], first[0], evaluator.kept):
            return
        asks = dtype not in FLOATS and any(n.op_type in ASKING for n in part.nodes)  # of finite numbers the answer is one
        if odd and not asks:
            seen = {p: v for p, v in numbers.items() if p not in odd or not self._indifferent(part, p, name, at)}
            if len(seen) < len(numbers):
                self.counts["cells by policy"] += 1
                return self._alone(c, point, base, seen, k) if seen.keys() & odd.keys() else None
            if self._limit(part, numbers, name, at, mine[0], first[0]):
                self.counts["cells by policy"] += 1
                return
            if (
                (np.isnan(mine[0]) or np.isfinite(first[0]))
                and not np.isfinite(mine[0])
                and self.parts.of_one_library(part, values)
            ):
                self.counts["cells where evaluators differ"] += 1
                return  # recurrences of onnxruntime saturate: nobody else says that they should not
        trial = CellValues(self.graph, lambda t: values.get(t, self.parts.known(t)), coarsest=self.coarsest)
        if explained(trial, op, k, point, first, dtype, c.number)[0]:
            return
        others, wide = list(opinions), first.astype(mine.dtype)
        if not others or not all(same(wide, slack, r, dtype, evaluator.unit)[0] for r in others):
            self.counts["cells where evaluators differ"] += 1
            return
        shown = said or ", ".join(f"{t}{list(i)} = {v:.3g}" for (t, i), v in numbers.items())
        by = f"{first[0]!s} by {1 + len(others)} evaluations"
        why = f"cell {point[0].tolist()} is {mine[0]!s} by the plan, {by}, where {shown}"
        raise LawError(LAW, f"'{name}' is not the model's", where=where(op), why=why)

    def _settled(
        self, c: _Trial, point: Array, base: Mapping[str, Any], numbers: Numbers, k: int, mine: Any, first: Any, kept: bool
    ) -> bool:
        """Whether a policy says enough of a value: a NaN that is kept, or an overflow on the way, a matter of order."""
        name, at = c.op.outs[k], tuple(point.T)
        dtype = self.graph.tensors[name].dtype
        given_nan = any(math.isnan(v) for v in numbers.values())
        if dtype not in FLOATS:  # the place of a maximum beside a NaN
            return kept and given_nan
        if not numbers:
            typed = CellValues(self.graph, lambda t: base.get(t, self.parts.known(t)), wide=False, coarsest=self.coarsest)
            there = typed.block(c.op, point)[k][0]
            if not same(there, np.zeros(1), np.asarray([mine]), dtype, typed.unit)[0]:
                self.counts["cells where evaluators differ"] += 1
                return True  # a number on the way is beyond its type: what comes of it depends on the order
        if np.isnan(mine) and not np.isnan(first) and (kept or given_nan):  # pools of the reference evaluator drop it
            self.counts["cells by policy"] += 1
            return True
        odd = {p: v for p, v in numbers.items() if not math.isfinite(v)}
        if odd and len(odd) == len(numbers):
            return False
        if np.isfinite(first) and abs(float(first)) <= 1.99 * 2.0 ** LARGEST[dtype]:
            return False
        if np.isnan(first) and odd and np.isnan(self._theirs(c.part, base, odd, name, at)).any():
            (alone, _), _ = self._mine(c.op, changed(base, odd), point, k)
            if np.isnan(alone[0]):
                return False  # a NaN that is lost beside a large number only
            self._alone(c, point, base, odd, k)  # what is finite has no part in it
            return True
        if _work(c.op) <= SECOND and not odd and self._too_large(c.part, changed(base, numbers), name, at):
            return False
        self.counts["cells where evaluators differ"] += 1
        return True

    def _too_large(self, part: Counterpart, values: Mapping[str, Any], name: str, at: tuple[Array, ...]) -> bool:
        """Whether a result, and not only something on the way to it, is beyond its type."""
        dtype = self.graph.tensors[name].dtype
        try:
            wide = float(np.asarray(self.parts.run(part, values, independent=True, wide=True)[name])[at].reshape(-1)[0])
        except (TapestryError, ArithmeticError, ValueError, TypeError):
            return False
        return dtype in LARGEST and math.isfinite(wide) and abs(wide) > 2.0 ** (LARGEST[dtype] + 2)

    def _indifferent(self, part: Counterpart, place: Place, name: str, at: tuple[Array, ...]) -> bool:
        """Whether a cell is the same for any clean operand where one that is no number was."""
        was = float(part.operands[place[0]][place[1]])
        clean = self._theirs(part, part.operands, {}, name, at).tobytes()
        return all(self._theirs(part, part.operands, {place: was * f + c}, name, at).tobytes() == clean for f, c in CLEAN)

    def _limit(self, part: Counterpart, numbers: Numbers, name: str, at: tuple[Array, ...], mine: Any, first: Any) -> bool:
        """Whether an infinity of ours is what ever larger operands lead to, where the reference has NaN: 0 times an infinity
        beside the infinity itself, at a place that an interpolation hits."""
        if not (np.isinf(mine) and np.isnan(first)) or any(math.isnan(v) for v in numbers.values()):
            return False
        grown = ({p: math.copysign(2.0**e, v) if math.isinf(v) else v for p, v in numbers.items()} for e in GROWING)
        near, far = (float(self._theirs(part, part.operands, n, name, at)[0]) for n in grown)
        return math.isfinite(far) and near * mine > 0 and far / near >= 2.0 ** (GROWING[1] - GROWING[0] - 1)

    def _theirs(self, part: Counterpart, base: Mapping[str, Any], numbers: Numbers, name: str, at: tuple[Array, ...]) -> Array:
        """A cell of the counterpart."""
        return np.asarray(self.parts.run(part, changed(base, numbers))[name])[at]


@dataclass(slots=True)
class _Trial:
    """An operation that is tried: at which cells, and how many may be asked again."""

    op: Block
    part: Counterpart
    number: int
    points: Array
    again: int


class _Watched(CellValues):
    """Values, and whether a maximum kept a NaN or a state one or an infinity on the way: what becomes of these is a policy."""

    kept = False

    def call(self, e: Call, args: list[Array]) -> Array:
        out = super().call(e, args)
        if e.fn in ("max", "min") and out.dtype.kind == "f":
            self.kept |= bool(np.isnan(out).any())
        return out

    def _fold(self, monoid: str, kinds: tuple[str, ...], fields: list[Array]) -> tuple[list[Array], list[Array | None]]:
        state, slack = super()._fold(monoid, kinds, fields)
        if monoid not in PLAIN:
            self.kept |= any(s.dtype.kind == "f" and not np.isfinite(s).all() for s in state)
        return state, slack


def _work(op: Block) -> int:
    """Index points of an operation, those of an inner sum along the dimensions alone that it depends on."""
    found = math.prod(d.size for d in (*op.dims, *op.reduce))
    for s in op.inner:
        used = {n for k in arg_positions((s.body,)) for e in op.reads[k].index for n in dims_of(e)}
        found += math.prod(d.size for d in op.space if d.name in used)
    return found
