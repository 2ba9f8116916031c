"""The checker of a plan whose sizes are symbols: what `certificate` proves of boxes, for every size of a region.

What a program does to names (what is alive, what a buffer holds, who sends to whom) is the same at every size: `certificate`
replays it at the sizes at which the plan was made. Here the steps are walked once more for their boxes alone, by no part of
the planner. The largest peak is that of some size near the region's ends (`_peaks`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np

from tapestry.errors import LawError
from tapestry.ir import space
from tapestry.ir.graph import Block, Dim, Graph, Guard, Op, Read
from tapestry.ir.index import Aff, Atom, Mod, bounds, dims_of
from tapestry.ir.kernel import Box
from tapestry.ir.laws import where
from tapestry.ir.program import Free, Launch, Program, Reduce, Transfer, allocated
from tapestry.ir.space import apart
from tapestry.ir.states import varies
from tapestry.ir.symbolic_plan import Formula, Region, Size, Sizes, SymbolicPlan, formula_of, names_of
from tapestry.ir.types import itemsize

Array = np.ndarray[Any, Any]


# Facts about boxes whose ends follow from sizes, for every size of a region: isl finds a size and a cell where one fails.
#
# Each device has boxes of its own, so that a fact speaks of sizes and cells and never of a device's number. Axes on which all
# boxes of a fact are the same text are left out: what they hold they hold on both sides.


OPERATIONS = 20_000_000  # of isl's own, for one fact: some seconds


class SizedLawError(LawError):
    """A law that does not hold at some sizes of a region; ``sizes`` are such, and ``blame`` the symbols that it is about."""

    def __init__(self, law: str, what: str, *, where: str, why: str, sizes: Sizes | None, blame: Sequence[int] = ()) -> None:
        super().__init__(law, what, where=where, why=why)
        self.sizes, self.blame = sizes, blame


@dataclass(slots=True)
class Proofs:
    """Proves facts about a region; one that was proved is not proved again.

    Attributes:
        symbols: what the model calls the sizes, for witnesses.
        laws: how often each law was checked, for all sizes.
    """

    region: Region
    symbols: Sequence[str]
    laws: Counter[str] = field(default_factory=Counter[str])
    proved: set[str] = field(default_factory=set[str])

    def never(self, law: str, what: str, where: str, cells: Sequence[str], wrong: str) -> None:
        """At no size of the region, and no cell, does a condition hold.

        Args:
            cells: the names of coordinates in the condition.
            wrong: the condition, as isl reads it.

        Raises:
            SizedLawError: it does; with a size and a cell.
        """
        self.laws[law] += 1
        if wrong in self.proved:
            return
        names = names_of(len(self.symbols))
        try:
            with space.bounded(OPERATIONS):
                found = space.solution(dict.fromkeys((*names, *cells), 0), f"{self.region.text()} and ({wrong})")
        except space.TooHard:
            what, why = f"not proved for all sizes: {what}", f"isl was not done with: {wrong[:200]}"
            raise SizedLawError(law, what, where=where, why=why, sizes=None) from None
        if found is None:
            self.proved.add(wrong)
            return
        sizes = tuple(found[n] for n in names)
        at = ", ".join(f"{s} = {n}" for s, n in zip(self.symbols, sizes, strict=True))
        cell = tuple(found[c] for c in cells)
        why, about = f"at {at}" + (f", cell {cell}" if cell else ""), frozenset(re.findall(r"\bn\d+", wrong))
        blame = [k for k, n in enumerate(names) if n in about]
        raise SizedLawError(law, what, where=where, why=why, sizes=sizes, blame=blame)

    def fails(self, law: str, what: str, where: str, why: str = "") -> SizedLawError:
        """What holds at no size, or is beyond what is proved."""
        return SizedLawError(law, what, where=where, why=why, sizes=None)

    # facts about boxes

    def same(self, law: str, what: str, where: str, one: Box, other: Box) -> None:
        """Two boxes have the same ends."""
        for (a, b), (c, d) in zip(one, other, strict=True):
            if str(a) != str(c) or str(b) != str(d):
                self.never(law, what, where, (), f"{a} != {c} or {b} != {d}")

    def within(self, law: str, what: str, where: str, inner: Box, outer: Box) -> None:
        """A box with ends in order lies in another, even where it is empty."""
        for k, ((a, b), (c, d)) in enumerate(zip(inner, outer, strict=True)):
            if sized(a, b, c, d):
                self.never(law, what, f"{where}, axis {k}", (), f"{a} < {c} or {b} < {a} or {b} > {d}")

    def covered(self, law: str, what: str, where: str, box: Box, parts: Sequence[Box]) -> None:
        """Every cell of a box is in one of some others."""
        axes = _differing([box, *parts])
        if not axes and parts:
            self.laws[law] += 1
            return
        cells = [f"p{k}" for k in axes]
        missing = " and ".join(f"not ({_inside(part, axes)})" for part in parts)
        self.never(law, what, where, cells, " and ".join(filter(None, [_inside(box, axes), missing])) or "0 = 0")

    def apart(self, law: str, what: str, where: str, parts: Sequence[Box]) -> None:
        """No cell is in two of some boxes."""
        for k, one in enumerate(parts):
            for other in parts[k + 1 :]:
                axes = range(len(one))
                both = " and ".join(filter(None, [_inside(one, axes), _inside(other, axes)])) or "0 = 0"
                self.never(law, what, where, [f"p{a}" for a in axes], both)

    def reads(self, law: str, what: str, where: str, given: tuple[Sequence[Dim], Box, Read, Sequence[int]], held: Box) -> None:
        """Everything that a block reads of a tensor is in a box of it.

        Args:
            given: the dimensions, the block over them, the read, and the tensor's shape.
        """
        dims, block, read, shape = given
        names = {d.name: f"p{k}" for k, d in enumerate(dims)}
        for axes, when in _groups(read):
            used = frozenset(n for k in axes for n in dims_of(read.index[k])) | {n for g in when for n in dims_of(g.aff)}
            affs = [*(read.index[k] for k in axes), *(g.aff for g in when)]
            ends = [x for k, d in enumerate(dims) if d.name in used for x in block[k]]
            if not sized(*ends, *(x for k in axes for x in (*held[k], shape[k])), *(x for e in affs for x in _numbers(e))):
                self.laws[law] += 1
                continue
            if any(isinstance(x, Size) for e in affs for x in _integers_of_terms(e)):
                self._between(law, what, where, given, held, axes)
                continue
            there = [f"{block[k][0]} <= p{k} < {block[k][1]}" for k, d in enumerate(dims) if d.name in used]
            there += [f"{space.aff_text(g.aff, names)} {'>=' if g.op == 'ge' else '='} 0" for g in when]
            text = {k: space.aff_text(read.index[k], names) for k in axes}
            there += [f"0 <= {text[k]} < {shape[k]}" for k in axes if read.other is not None]
            out = [f"not ({held[k][0]} <= {text[k]} < {held[k][1]})" for k in axes]
            cells = [f"p{k}" for k, d in enumerate(dims) if d.name in used]
            if out:
                self.never(law, what, where, cells, " and ".join([*there, f"({' or '.join(out)})"]))

    def _between(
        self, law: str, what: str, where: str, given: tuple[Sequence[Dim], Box, Read, Sequence[int]], held: Box,
        axes: Sequence[int],
    ) -> None:  # fmt: skip
        """The same where a place is no affine function of dimensions and sizes: by its least and largest value on each axis."""
        dims, block, read, shape = given
        ends = {d.name: e for d, e in zip(dims, block, strict=True)}
        for k in axes:
            low, high = self._ends(read.index[k], ends, where)
            inside = f" and 0 <= p0 < {shape[k]}" if read.other is not None else ""
            wrong = f"{low} <= p0 <= {high}{inside} and not ({held[k][0]} <= p0 < {held[k][1]})"
            self.never(law, what, f"{where}, axis {k}", ["p0"], wrong)

    def _ends(self, e: Aff, block: Mapping[str, tuple[int, int]], where: str) -> tuple[str, str]:
        """The least and the largest value of an index expression over a block, as isl reads them; they may be too far apart.

        Raises:
            SizedLawError: they follow from sizes by more than sums and quotients.
        """
        low, high = [str(e.const)], [str(e.const)]
        for atom, coef in e.terms:
            a, b = self._atom_ends(atom, block, where)
            plain = a.lstrip("-").isdecimal() and b.isdecimal()
            if isinstance(coef, Size) and (min(*coef.formula.coefs, coef.formula.const) < 0 or not plain):
                raise self.fails(
                    "access", "a place is a product of a size and a dimension that follows from one", where, str(e)
                )
            first, last = (a, b) if isinstance(coef, Size) or coef > 0 else (b, a)
            low, high = [*low, _times(coef, first)], [*high, _times(coef, last)]
        return f"({' + '.join(low)})", f"({' + '.join(high)})"

    def _atom_ends(self, atom: Atom, block: Mapping[str, tuple[int, int]], where: str) -> tuple[str, str]:
        if isinstance(atom, str):
            lo, hi = block[atom]
            return str(lo), f"({hi} - 1)" if isinstance(hi, Size) else str(hi - 1)
        low, high = self._ends(atom.arg, block, where)
        if isinstance(atom, Mod):
            return "0", f"({atom.div} - 1)" if isinstance(atom.div, Size) else str(atom.div - 1)
        if not isinstance(atom.div, Size):
            return f"floor({low}/{atom.div})", f"floor({high}/{atom.div})"
        there = bounds(atom.arg, {n: (int(lo), int(hi) - 1) for n, (lo, hi) in block.items()})
        first, last = int(there[0]) // int(atom.div), int(there[1]) // int(atom.div)  # as it is where the plan was made
        what = "a quotient by a size is not the same at all sizes"
        self.never("access", what, where, (), f"{low} < {first} * {atom.div} or {high} >= {last + 1} * {atom.div}")
        return str(first), str(last)


def _times(coef: int, end: str) -> str:
    return f"{end} * {coef}" if isinstance(coef, Size) else f"{int(coef)} * {end}"


def sized(*values: int) -> bool:
    """Whether some integer follows from sizes."""
    return any(isinstance(v, Size) for v in values)


def _inside(box: Box, axes: Sequence[int]) -> str:
    return " and ".join(f"{box[k][0]} <= p{k} < {box[k][1]}" for k in axes)


def _differing(boxes: Sequence[Box]) -> list[int]:
    """Axes on which boxes are not all the same text."""
    return [k for k in range(len(boxes[0])) if len({(str(b[k][0]), str(b[k][1])) for b in boxes}) > 1]


def _groups(read: Read) -> list[tuple[list[int], list[Guard]]]:
    """Axes and guards that share dimensions, together."""
    return [(axes, when) for _, axes, when in apart(read)]


def _integers_of_terms(e: Aff) -> list[int]:
    """Coefficients and divisors, which must be numbers."""
    out: list[int] = []
    for atom, coef in e.terms:
        out.append(coef)
        if not isinstance(atom, str):
            out += [atom.div, *_integers_of_terms(atom.arg)]
    return out


def _numbers(e: Aff) -> list[int]:
    """All integers of an index expression."""
    return [e.const, *_integers_of_terms(e), *(x for a, _ in e.terms if not isinstance(a, str) for x in _numbers(a.arg))]


# The largest peak of a plan over a region of sizes, exactly.
#
# Every extent of a buffer is a difference of multiples of floors: over a step of the least common multiple L of all divisors it
# grows by its slope times L. Where no slope is negative, bytes at a size are no more than L further on, so the largest peak is
# reached among the last L sizes of each symbol; where one is, at some size. Those are evaluated, all at once.


MOST = 1 << 20  # sizes that are evaluated


def largest_peaks(plan: SymbolicPlan, region: Region) -> tuple[list[int], list[Sizes]]:
    """By device, the most bytes at any size of a region, and a size at which it is so many.

    Raises:
        LawError: there are too many sizes to look at.
    """
    period = _period(plan.program, len(region.low))
    last = [_last(region, k, period) for k in range(len(region.low))]
    count = math.prod(map(len, last))
    if count > MOST:
        raise LawError("memory", f"{count:,} sizes would have to be looked at", why=f"cuts repeat after {period}")
    peaks, at = list[int](), list[Sizes]()
    for peak in _peaks(plan.program, last):
        place = np.unravel_index(int(peak.argmax()), peak.shape)
        peaks.append(int(peak.max()))
        at.append(tuple(some[p] for some, p in zip(last, place, strict=True)))
    return peaks, at


def peaks_at(plan: SymbolicPlan, sizes: Sizes) -> list[int]:
    """By device, the most bytes that are alive at once, at some sizes."""
    return [int(peak.max()) for peak in _peaks(plan.program, [[n] for n in sizes])]


def _peaks(program: Program, along: Sequence[Sequence[int]]) -> list[Array]:
    """By device, the most bytes that are alive at once, for each combination of sizes."""
    shape = tuple(map(len, along))
    axes = [np.array(some, np.int64).reshape([-1 if j == k else 1 for j in range(len(along))]) for k, some in enumerate(along)]
    found = dict[Formula, Array]()

    def column(value: int) -> Any:
        f = formula_of(value)
        if f is None:
            return int(value)
        if f not in found:
            top: Any = sum((c * n for c, n in zip(f.coefs, axes, strict=True) if c), np.int64(f.const))
            found[f] = f.times * (top // f.div) + f.plus
        return found[f]

    out: list[Array] = []
    for d in range(program.devices):
        alive, peak = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        sizes = dict[str, Any]()
        for step in program.steps:
            for name in allocated(step):
                b = program.buffers[name]
                box = b.boxes[d]
                cells = 0 if box is None else math.prod((column(hi) - column(lo) for lo, hi in box), start=itemsize(b.dtype))
                sizes[name] = cells
                alive += cells
            peak = np.maximum(peak, alive)
            for name in step.buffers if isinstance(step, Free) else ():
                alive -= sizes[name]
        out.append(peak)
    return out


def _last(region: Region, k: int, period: int) -> list[int]:
    some = region.along(k)
    if k in region.among or not period:  # between listed sizes anything may lie
        return list(some)
    return list(some[-period:])


def _period(program: Program, symbols: int) -> int:
    """After how many sizes all cuts repeat; 0 where an extent shrinks as a size grows."""
    found = 1
    for lo, hi in _extents(program):
        ends = [formula_of(lo), formula_of(hi)]
        found = lcm(found, *(f.div for f in ends if f))
        for k in range(symbols):
            a, b = (Fraction(f.times * f.coefs[k], f.div) if f else Fraction(0) for f in ends)
            if b < a:
                return 0
    return found


def _extents(program: Program) -> Iterator[tuple[int, int]]:
    for b in program.buffers.values():
        for box in b.boxes:
            yield from box or ()


Parts = dict[int, list[Box]]
"""By device, the boxes of the reduced dimensions that its states have merged."""


@dataclass(slots=True)
class _Walk:
    """The steps so far: parts that states hold, and the blocks of each operation by mode."""

    graph: Graph
    program: Program
    proofs: Proofs
    holds: dict[str, Parts] = field(default_factory=dict[str, Parts])
    blocks: dict[int, dict[str, dict[str, Box]]] = field(default_factory=dict[int, dict[str, dict[str, Box]]])
    merged: set[int] = field(default_factory=set[int])


def check_sizes(
    plan: SymbolicPlan, region: Region, symbols: Sequence[str], limits: Sequence[int] | None = None
) -> tuple[dict[str, int], list[int]]:
    """Prove the boxes of a plan for every size of a region.

    Args:
        limits: bytes that each device has.

    Returns:
        how many facts of each law, and the largest peak of every device in bytes, at whatever size it is reached.

    Raises:
        SizedLawError: one does not hold at some size; with that size and a cell.
    """
    walk = _Walk(plan.graph, plan.program, Proofs(region, symbols))
    for op in plan.graph.ops:
        _operation(walk, op)
    _declared(walk)
    for i, step in enumerate(plan.program.steps):
        name = f"step {i} ({type(step).__name__.lower()})"
        match step:
            case Launch():
                _launch(walk, step, f"{name} of {where(plan.graph.ops[step.op])}")
            case Transfer():
                _transfer(walk, step, name)
            case Reduce():
                _reduce(walk, step, name)
            case _:
                pass
    for i, op in enumerate(plan.graph.ops):
        _cover(walk, i, op)
    for t in plan.graph.outputs:
        whole = tuple((0, n) for n in plan.graph.tensors[t].shape)
        parts = _distinct(plan.program.buffers[plan.program.outputs[t]].boxes)
        walk.proofs.covered("written_once", f"output '{t}' misses a cell", f"output '{t}'", whole, parts)
    peaks, at = largest_peaks(plan, region)
    for d, peak in enumerate(peaks):
        walk.proofs.laws["memory"] += 1
        if limits is not None and peak > limits[d]:
            sizes = ", ".join(f"{s} = {n}" for s, n in zip(symbols, at[d], strict=True))
            what, blame = f"device {d} needs {peak:,} bytes of {limits[d]:,}", range(len(symbols))
            raise SizedLawError("memory", what, where="", why=f"at {sizes}", sizes=at[d], blame=blame)
    return dict(walk.proofs.laws), peaks


def cover(regions: Sequence[Region], asked: Region, symbols: Sequence[str]) -> int:
    """Every size that was asked for is in a region; how many facts that is.

    Raises:
        SizedLawError: one is not.
    """
    proofs = Proofs(asked, symbols)
    missing = " and ".join(f"not ({r.text()})" for r in regions)
    proofs.never("sizes", "a size is in no region", "sizes.json", (), missing)
    return proofs.laws["sizes"]


def _distinct(boxes: Sequence[Box | None]) -> list[Box]:
    """The boxes that differ as text."""
    return list({str(b): b for b in boxes if b is not None}.values())


def _operation(walk: _Walk, op: Op) -> None:
    """Laws 1 to 3 at all sizes: results are as large as the dimensions, and reads without another value stay inside."""
    tensors, name, extents = walk.graph.tensors, where(op), tuple((0, d.size) for d in op.dims)
    if isinstance(op, Block):
        for t in op.outs:
            walk.proofs.same("agreement", f"'{t}' is not of its size", name, tuple((0, n) for n in tensors[t].shape), extents)
        space = tuple((0, d.size) for d in op.space)
        for r in op.reads:
            if r.other is None:
                whole = tuple((0, n) for n in tensors[r.tensor].shape)
                given = op.space, space, r, tensors[r.tensor].shape
                walk.proofs.reads("access", f"it reads outside of '{r.tensor}'", name, given, whole)
        return
    for names, axes in ((op.ins, op.in_axes), (op.outs, op.out_axes)):
        for t, at in zip(names, axes, strict=True):
            for d, axis in zip(op.dims, at, strict=True):
                if t and axis is not None:
                    ends = ((0, tensors[t].shape[axis]),)
                    walk.proofs.same("agreement", f"'{t}' is not of its size", name, ends, ((0, d.size),))


def _declared(walk: _Walk) -> None:
    """Every buffer lies in its tensor."""
    for b in walk.program.buffers.values():
        whole = tuple((0, n) for n in walk.graph.tensors[b.tensor].shape)
        for d, box in enumerate(b.boxes):
            if box is not None:
                walk.proofs.within("agreement", f"not inside '{b.tensor}'", f"buffer '{b.name}', device {d}", box, whole)


def _dims(op: Op, mode: str) -> tuple[Dim, ...]:
    return op.dims if mode == "finish" else op.space


def _launch(walk: _Walk, step: Launch, name: str) -> None:
    op, proofs = walk.graph.ops[step.op], walk.proofs
    dims, n = _dims(op, step.mode), len(op.dims)
    inner = len(op.inner_dims) if isinstance(op, Block) else 0
    uncut = {"full": range(n, len(dims)), "partial": range(len(dims) - inner, len(dims)), "finish": range(0)}[step.mode]
    seen = walk.blocks.setdefault(step.op, {}).setdefault(step.mode, {})
    parts: Parts = {}
    for d, block in enumerate(step.blocks):
        if block is None:
            continue
        here = f"{name}, device {d}"
        proofs.within("split_partition", "a block is not in the index space", here, block, tuple((0, x.size) for x in dims))
        for (lo, hi), x in zip(block, dims, strict=True):
            if sized(lo, hi):
                proofs.never("split_partition", "a block is empty", here, (), f"{hi} <= {lo} and 0 < {x.size}")
        whole = tuple((0, dims[k].size) for k in uncut)
        proofs.same("split_partition", "a reduction over a part is not merged", here, tuple(block[k] for k in uncut), whole)
        _block_reads(walk, step, op, block, (d, here))
        _block_results(walk, step, op, block, (d, here))
        seen[str(block)] = block
        if step.mode == "partial":
            before = walk.holds[step.states[0]][d] if step.states else []
            parts[d] = [*before, block[n : len(dims) - inner]]
            proofs.apart("written_once", "part of a reduction is merged twice", here, parts[d])
        if step.mode == "finish":
            _complete(walk, op, walk.holds[step.states[0]][d], here)
    if step.mode == "partial":
        walk.holds |= dict.fromkeys(step.outs, parts)


def _block_reads(walk: _Walk, step: Launch, op: Op, block: Box, at: tuple[int, str]) -> None:
    """What a device's block reads is in the buffers that it is given."""
    (d, here), tensors = at, walk.graph.tensors
    if isinstance(op, Block):
        dims = op.space if step.mode != "finish" else (*op.dims, *op.reduce, *op.inner_dims)
        points = (*block, *((0, x.size) for x in dims[len(block) :]))
        used = {"full": op.body_reads() | op.then_reads(), "partial": op.body_reads(), "finish": op.then_reads()}[step.mode]
        for k in sorted(used):
            held = walk.program.buffers[step.ins[k]].boxes[d]
            assert held is not None  # `certificate` has seen that it is alive
            r = op.reads[k]
            what = f"device {d} reads '{r.tensor}' outside its buffer '{step.ins[k]}'"
            walk.proofs.reads("access_preserved", what, here, (dims, points, r, tensors[r.tensor].shape), held)
        return
    for k, t in enumerate(op.ins):
        held = walk.program.buffers[step.ins[k]].boxes[d] if t else None
        if held is not None:
            need = _of_axes(tuple((0, n) for n in tensors[t].shape), op.in_axes[k], block)
            walk.proofs.within("access_preserved", f"device {d} reads '{t}' outside its buffer", here, need, held)


def _of_axes(whole: Box, axes: Sequence[int | None], block: Box) -> Box:
    """A whole tensor, but for the axes that a block's dimensions index."""
    cut = {axis: ends for axis, ends in zip(axes, block, strict=True) if axis is not None}
    return tuple(cut.get(k, ends) for k, ends in enumerate(whole))


def _block_results(walk: _Walk, step: Launch, op: Op, block: Box, at: tuple[int, str]) -> None:
    """A device's new buffers are what its block computes."""
    d, here = at
    for k, out in enumerate(step.outs):
        b = walk.program.buffers[out]
        if isinstance(op, Block):
            wanted = _state(op, k, block) if step.mode == "partial" else block[: len(op.dims)]
        else:
            shape = walk.graph.tensors[op.outs[k]].shape
            wanted = _of_axes(tuple((0, n) for n in shape), op.out_axes[k], block)
        held = b.boxes[d]
        assert held is not None
        walk.proofs.same("written_once", f"'{out}' is not what a device computes", here, held, wanted)
    for k, s in enumerate(step.states if isinstance(op, Block) else ()):
        held = walk.program.buffers[s].boxes[d]
        assert held is not None and isinstance(op, Block)
        walk.proofs.same("read_after_write", f"'{s}' does not hold field {k} of the block", here, held, _state(op, k, block))


def _state(op: Block, field: int, block: Box) -> Box:
    """What a block, which is not empty, has of a field: one cell where it does not vary along a dimension."""
    return tuple(e if v else (0, 1) for e, v in zip(block, varies(op)[field], strict=False))


def _complete(walk: _Walk, op: Op, parts: list[Box], here: str) -> None:
    assert isinstance(op, Block)
    whole = tuple((0, d.size) for d in op.reduce)
    walk.proofs.covered("written_once", "part of a reduction is missing", here, whole, parts)


def _transfer(walk: _Walk, step: Transfer, name: str) -> None:
    """Messages are parts of what is sent and of what is wanted; with what a device has they make up its box, nothing twice."""
    src, dst, proofs = walk.program.buffers[step.src], walk.program.buffers[step.dst], walk.proofs
    pieces: dict[int, list[Box]] = {d: [] for d, b in enumerate(dst.boxes) if b is not None}
    for m in step.messages:
        held, wanted = src.boxes[m.src], dst.boxes[m.dst]
        assert held is not None and wanted is not None
        proofs.within("read_after_write", f"device {m.src} sends what it does not have", name, m.box, held)
        proofs.within("agreement", f"device {m.dst} is sent what it has no place for", name, m.box, wanted)
        pieces[m.dst].append(m.box)
    for d, sent in pieces.items():
        box, own = dst.boxes[d], src.boxes[d]
        assert box is not None
        here, held = f"{name}, device {d}", [*sent, *([own] if own is not None else [])]
        proofs.covered("read_after_write", f"device {d} lacks cells after the transfer", here, box, held)
        proofs.apart("written_once", f"device {d} receives a cell twice", here, held)


def _reduce(walk: _Walk, step: Reduce, name: str) -> None:
    """Every member of a group has the states that another one's results need; no part of the reduction is merged twice."""
    op, proofs = walk.graph.ops[step.op], walk.proofs
    assert isinstance(op, Block)
    if step.known and any(sized(*e) for parts in walk.holds[step.srcs[0]].values() for box in parts for e in box):
        raise proofs.fails("agreement", "a count that is known follows from a size", name)
    for k, (s, t) in enumerate(zip(step.srcs, step.dsts, strict=True)):
        src, dst, parts, after = walk.program.buffers[s], walk.program.buffers[t], walk.holds[s], Parts()
        for g in step.groups:
            merged = [b for d in g for b in parts[d]]
            if k == 0:
                proofs.apart("written_once", "a state is merged twice", name, merged)
            for d in g:
                wanted = dst.boxes[d]
                assert wanted is not None
                for e in g:
                    held = src.boxes[e]
                    assert held is not None
                    proofs.within("read_after_write", "a device has no states for another's part", name, wanted, held)
                after[d] = merged
                if dst.field is None:
                    _complete(walk, op, merged, f"{name}, device {d}")
        if dst.field is None:
            walk.merged.add(step.op)
        walk.holds[t] = after


def _cover(walk: _Walk, i: int, op: Op) -> None:
    """Law 4: the blocks of an operation cover its index space, no point is in two that differ; results likewise."""
    launched, name = walk.blocks.get(i, {}), where(op)
    mine = list((launched.get("full") or launched.get("partial") or {}).values())
    space = tuple((0, d.size) for d in op.space)
    walk.proofs.covered("split_partition", "a point is computed by no device", name, space, mine)
    walk.proofs.apart("split_partition", "a point is in two different blocks", name, mine)
    if "finish" in launched:
        ends = list(launched["finish"].values())
        walk.proofs.covered("written_once", "an output cell is never finished", name, space[: len(op.dims)], ends)
