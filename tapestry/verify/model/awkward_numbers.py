"""Which awkward numbers are put where: into each read of an operation, at cells that only one of the output's cells looks at.

An infinity hides what becomes of another number in the same sum. So numbers of one evaluation are put where the output cells
that are judged by them see no other: boxes around all that a cell looks at say so (intervals of its index expressions).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapestry.errors import TapestryError
from tapestry.ir.expr import Call, Expr, Index, arg_positions, distinct
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import Aff, Mod, dim, dims_of
from tapestry.ir.types import FLOATS, Array
from tapestry.verify.model.cell_values import CellValues
from tapestry.verify.model.counterparts import Counterpart, Counterparts, NoCounterpart

Place = tuple[str, tuple[int, ...]]  # a tensor and a cell of it
Numbers = dict[Place, float]
Box = tuple[list[Array], list[Array]]  # lowest and highest places along each axis, of every output cell
DENORMAL = {"f64": 1e-310, "f32": 1e-40, "f16": 1e-6, "bf16": 1e-40}
FOLLOWED = 768  # cells of an operation that is followed back
SELECTED = 0.75  # of the cells look where a body compares a merged dimension with a number
BOTH = 0.2  # of the cells have a number in every operand
ENDS = (np.minimum, np.maximum)
KINDS = ("nan", "inf", "-inf", "large", "-large", "largest", "-largest", "denormal", "-0")
NOT_FINITE = KINDS[:3]


def number(dtype: str, kind: str, rng: np.random.Generator) -> float:
    """A number of a kind, of a type; large ones are drawn."""
    if kind in ("nan", "inf", "-inf", "-0"):
        return float(kind)
    if kind == "denormal":
        return DENORMAL[dtype]
    most = math.log10({"f16": 6e4, "f64": 3e300}.get(dtype, 3e38))
    size = 10.0 ** (most if kind.endswith("largest") else rng.uniform(4.1, most))
    return -float(size) if kind[0] == "-" else float(size)


def sort_of(numbers: Numbers) -> tuple[str, ...]:
    """What tells one trial from another: which tensors hold infinities, NaN, huge and small numbers."""

    def of(v: float) -> str:
        return str(v) if not math.isfinite(v) else ("huge" if abs(v) > 1 else "small") + "-" * (v < 0)

    return tuple(sorted(f"{t} {of(v)}" for (t, _), v in numbers.items()))


def changed(values: Mapping[str, Array], numbers: Numbers) -> dict[str, Array]:
    """Copies of some values with numbers put into them."""
    out = {t: values[t].copy() for t in {t for t, _ in numbers}}
    for (t, index), v in numbers.items():
        out[t][index] = v
    return {**values, **out}


class Placing:
    """What is still to be put where: kinds of numbers for each read that output cells look through.

    Attributes:
        left: reads and kinds that no evaluation had.
    """

    def __init__(self, graph: Graph, found: Footprint, count: int, kinds: Sequence[str], each: int) -> None:
        """Every kind in every read so many times, for so many output cells."""
        self.seen = found.seen
        self.dtypes = [graph.tensors[s.tensor].dtype for s in found.seen]
        self.at = [_places(s) for s in found.seen]
        self.meets = [_meets(s, found.boxes[s.tensor], count) for s in found.seen]
        self.left = [(k, kind) for _ in range(each) for kind in kinds for k in range(len(found.seen))]
        self.count = count

    def draw(self, rng: np.random.Generator, most: int, both: float = BOTH) -> tuple[Array, list[Numbers]]:
        """Output cells, and the numbers that each of them sees and no other one, of one evaluation."""
        chosen, numbers = list[int](), list[Numbers]()
        taken, touched = np.zeros(self.count, bool), np.zeros(self.count, bool)
        for target in map(int, rng.permutation(self.count)):
            if len(chosen) == most or touched[target]:
                continue
            free = [k for k in range(len(self.seen)) if target in self.at[k] and not (self.meets[k][target] & taken).any()]
            first = next((i for i in self.left if i[0] in free), None)
            if first is None:
                continue
            put = [first]
            if rng.random() < both:
                put += [(k, str(rng.choice(KINDS))) for k in free if k != first[0]]
            mine = np.logical_or.reduce([self.meets[k][target] for k, _ in put])
            self.left.remove(first)
            touched |= mine
            taken[target] = True
            chosen.append(target)
            numbers.append({})
            for k, kind in put:
                numbers[-1].setdefault((self.seen[k].tensor, self.at[k][target]), number(self.dtypes[k], kind, rng))
        return np.array(chosen, int), numbers


def _places(s: Seen) -> dict[int, tuple[int, ...]]:
    """Where each output cell looks through a read."""
    return {int(t): tuple(int(i) for i in row) for t, row in zip(s.targets, s.index, strict=True)}


def _meets(s: Seen, box: Box, count: int) -> Array:
    """For each output cell (a row), which of them may look where it looks through a read."""
    out = np.zeros((count, count), bool)
    inside = np.ones((len(s.targets), count), bool)
    for axis, (low, high) in enumerate(zip(*box, strict=True)):
        inside &= (low <= s.index[:, axis, None]) & (s.index[:, axis, None] <= high)
    np.logical_or.at(out, s.targets, inside)
    return out


@dataclass(frozen=True, slots=True)
class Seen:
    """Where output cells look through one read: a cell of the tensor for each target."""

    tensor: str
    targets: Array
    index: Array


class Footprint:
    """Cells of a counterpart's operands that cells of an operation look at: one of each read, at a random place of a sum.

    Every operation that is followed back is looked at once, behind all that read it, at so many cells at most.

    Attributes:
        seen: a read each.
        boxes: for each tensor, and each output cell, a box around all that the cell looks at there.
        untried: how often a place that a sum picks was not worked out, by the reason.
    """

    def __init__(self, graph: Graph, parts: Counterparts, part: Counterpart) -> None:
        self.graph, self.parts, self.part = graph, parts, part
        self.values = CellValues(graph, lambda t: None)
        self.asked: dict[str, list[Seen]] = {}
        self.seen: list[Seen] = []
        self.boxes: dict[str, Box] = {}
        self.untried = Counter[str]()

    def look(self, op: Block, points: Array, rng: np.random.Generator) -> Footprint:
        """Through all reads, also those of tensors that the model does not have."""
        places = {d.name: (points[:, k], points[:, k]) for k, d in enumerate(op.dims)}
        self.seen += self._of(op, points, np.arange(len(points)), rng)
        self._around(op, places, len(points))
        for b in reversed(self.part.behind):
            asked = [s for t in b.outs for s in self.asked.pop(t, [])]
            if asked:
                targets, index = np.concatenate([s.targets for s in asked]), np.concatenate([s.index for s in asked])
                some = rng.permutation(len(targets))[:FOLLOWED]
                self.seen += self._of(b, index[some], targets[some], rng)
            boxes = [self.boxes[t] for t in b.outs if t in self.boxes]
            if boxes:
                low, high = (
                    tuple(map(f.reduce, zip(*side, strict=True)))
                    for f, side in zip(ENDS, zip(*boxes, strict=True), strict=True)
                )
                self._around(b, {d.name: (low[k], high[k]) for k, d in enumerate(b.dims)}, len(points))
        self.seen = [s for s in self.seen if len(s.targets)]
        return self

    def _of(self, op: Block, points: Array, targets: Array, rng: np.random.Generator) -> Iterator[Seen]:
        env = {d.name: points[:, k] for k, d in enumerate(op.dims)}
        env |= {d.name: rng.integers(0, d.size, len(points)) for d in (*op.reduce, *op.inner_dims)}
        for name, place in self._selected(op, points):
            env[name] = np.where((place >= 0) & (rng.random(len(points)) < SELECTED), place, env[name])
        for r in op.reads:
            operand = r.tensor in self.part.operands
            if not operand and self.parts.given(r.tensor):
                continue
            index, valid = self.values.looked_at(op, r, env)
            rows = np.array([np.broadcast_to(i, len(points)) for i in index], int).reshape(len(index), len(points)).T
            keep = np.broadcast_to(valid, len(points))
            seen = Seen(r.tensor, targets[keep], rows[keep])
            if not operand:
                self.asked.setdefault(r.tensor, []).append(seen)
            elif self.graph.tensors[r.tensor].dtype in FLOATS:
                yield seen

    def _selected(self, op: Block, points: Array) -> Iterator[tuple[str, Array]]:
        """Merged dimensions that a body compares with something, and what that is at each cell (-1: none of its places): a sum
        that picks one of its terms reads all the others in vain."""
        merged = {d.name: d.size for d in (*op.reduce, *op.inner_dims)}
        for e in distinct(op.point):
            for a, b in (e.args, e.args[::-1]) if isinstance(e, Call) and e.fn == "eq" else ():
                name = next(iter(dims_of(b.aff)), "") if isinstance(b, Index) else ""
                if name not in merged or b != Index(dim(name)) or _dims(op, a) & merged.keys():
                    continue
                probe = replace(op, outs=op.outs[:1], reduce=(), monoid=None, inner=(), body=(a,), then=())
                try:
                    found = CellValues(self.graph, self.parts.known).block(probe, points)[0][0]
                except (TapestryError, NoCounterpart, ArithmeticError, ValueError) as e:
                    self.untried[f"picked places not tried ({e if isinstance(e, NoCounterpart) else 'of no evaluator'})"] += 1
                    continue
                yield name, np.where((found >= 0) & (found < merged[name]), found, -1).astype(int)

    def looked_at(self, tensor: str) -> Array:
        """Which cells of a tensor are inside some box."""
        shape = self.graph.tensors[tensor].shape
        out = np.zeros(shape, bool)
        low, high = self.boxes.get(tensor, ([], []))
        for a, b in zip(*(np.stack(side, axis=1) for side in (low, high)), strict=True) if low else ():
            out[tuple(slice(max(0, i), max(0, j + 1)) for i, j in zip(a.tolist(), b.tolist(), strict=True))] = True
        return out if shape else np.ones((), bool)

    def _around(self, op: Block, places: Mapping[str, tuple[Array, Array]], count: int) -> None:
        """Boxes around what an operation looks at for boxes of its own cells."""
        merged = {d.name: (np.zeros(count, int), np.full(count, d.size - 1)) for d in (*op.reduce, *op.inner_dims)}
        for r in op.reads:
            ends = [_interval(e, {**merged, **places}, count) for e in r.index]
            low, high = self.boxes.get(r.tensor, (None, None))
            self.boxes[r.tensor] = (
                [a if low is None else np.minimum(a, low[k]) for k, (a, _) in enumerate(ends)],
                [b if high is None else np.maximum(b, high[k]) for k, (_, b) in enumerate(ends)],
            )


def _dims(op: Block, e: Expr) -> set[str]:
    """Dimensions that an expression depends on."""
    own = (dims_of(x.aff) for x in distinct((e,)) if isinstance(x, Index))
    return set[str]().union(*own, *(op.read_dims(k) for k in arg_positions((e,))))


def _interval(e: Aff, places: Mapping[str, tuple[Array, Array]], count: int) -> tuple[Array, Array]:
    """The least and the greatest value of an index expression, or bounds of them."""
    low = np.full(count, e.const)
    high = low.copy()
    for atom, c in e.terms:
        if isinstance(atom, str):
            a, b = places[atom]
        else:
            a, b = _interval(atom.arg, places, count)
            a, b = a // atom.div, b // atom.div
            if isinstance(atom, Mod):
                whole = a == b  # no step between them
                x, y = _interval(atom.arg, places, count)
                a, b = np.where(whole, x % atom.div, 0), np.where(whole, y % atom.div, atom.div - 1)
        low, high = (low + c * a, high + c * b) if c > 0 else (low + c * b, high + c * a)
    return low, high
