"""Facts about boxes whose ends follow from sizes, for every size of a region: isl finds a size and a cell where one fails.

Each device has boxes of its own, so that a fact speaks of sizes and cells and never of a device's number. Axes on which all
boxes of a fact are the same text are left out: what they hold they hold on both sides.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from tapestry.errors import LawError
from tapestry.ir import space
from tapestry.ir.graph import Block, Dim, Graph, Op, Read
from tapestry.ir.index import Aff, Atom, Mod, bounds, dims_of
from tapestry.ir.kernel import Box
from tapestry.ir.laws import where
from tapestry.ir.many_sizes.size_formula import Region, Size, Sizes, names_of
from tapestry.ir.types import Array
from tapestry.verify.box_lists import Breach, Lists, Parts, Spans
from tapestry.verify.boxes import Coverage, Point

OPERATIONS = 20_000_000  # of isl's own, for one fact: some seconds


class SizedLawError(LawError):
    """A law that does not hold at some sizes of a region; ``sizes`` are such, and ``blame`` the symbols that it is about."""

    def __init__(self, law: str, what: str, *, where: str, why: str, sizes: Sizes | None, blame: Sequence[int] = ()) -> None:
        super().__init__(law, what, where=where, why=why)
        self.sizes, self.blame = sizes, blame


@dataclass(slots=True)
class Proofs(Lists):
    """Answers the plan checker's questions about boxes for all sizes of a region; what was proved is not proved again.

    Attributes:
        symbols: what the model calls the sizes, for witnesses.
        witness: where the last question was answered by a counterexample: sizes, or none if isl was not done, symbols to
            blame, and both in words.
    """

    sized: ClassVar[bool] = True
    region: Region = field(kw_only=True)
    symbols: Sequence[str] = field(kw_only=True)
    proved: set[str] = field(default_factory=set[str])
    witness: tuple[Sizes | None, list[int], str] | None = None

    def somewhere(self, cells: Sequence[str], wrong: str) -> Point | None:
        """The cell at which a condition, as isl reads it, holds at some size; it is also the answer if isl cannot say."""
        if wrong in self.proved:
            return None
        names = names_of(len(self.symbols))
        try:
            with space.bounded(OPERATIONS):
                found = space.solution(dict.fromkeys((*names, *cells), 0), f"{self.region.text()} and ({wrong})")
        except space.TooHard:
            self.witness = None, [], f"isl was not done with: {wrong[:200]}"
            return ()
        if found is None:
            self.proved.add(wrong)
            return None
        sizes, cell = tuple(found[n] for n in names), tuple(found[c] for c in cells)
        about = frozenset(re.findall(r"\bn\d+", wrong))
        blame = [k for k, n in enumerate(names) if n in about]
        self.witness = sizes, blame, f"at {named(self.symbols, sizes)}" + (f", cell {cell}" if cell else "")
        return cell

    def broken(self, breach: Breach, step: str) -> LawError:
        """The error, with a size and a cell."""
        sizes, blame, why = self.witness or (None, [], str(breach.why))
        what = breach.what if sizes or not self.witness else f"not proved for all sizes: {breach.what}"
        return SizedLawError(breach.law, what, where=step, why=why, sizes=sizes, blame=blame)

    def _device(self, one: Spans, other: Spans, wrong: Callable[[Any, Any, Any, Any], str]) -> int:
        """A device for which a condition on the ends of its two boxes along an axis holds; -1 if there is none."""
        for d in np.flatnonzero(one.there).tolist():
            for (a, b), (lo, hi) in zip(_device_box(one, d), _device_box(other, d), strict=True):
                if (condition := wrong(a, b, lo, hi)) and self.somewhere((), condition) is not None:
                    return d
        return -1

    def outside(self, inner: Spans, outer: Spans, points: bool = False) -> int:
        """A device whose box, which has its ends in order, does not lie in its other box, even where it is empty."""

        def wrong(a: Any, b: Any, lo: Any, hi: Any) -> str:
            return f"{a} < {lo} or {b} < {a} or {b} > {hi}" if sized(a, b, lo, hi) else ""

        return self._device(inner, outer, wrong)

    def differ(self, one: Spans, other: Spans) -> int:
        """A device whose box has not the ends of its other box."""

        def wrong(a: Any, b: Any, lo: Any, hi: Any) -> str:
            return f"{a} != {lo} or {b} != {hi}" if str(a) != str(lo) or str(b) != str(hi) else ""

        return self._device(one, other, wrong)

    def hollow(self, points: Spans, space: Spans) -> int:
        """A device whose block is empty along a dimension that is not."""

        def wrong(lo: Any, hi: Any, _: Any, size: Any) -> str:
            return f"{hi} <= {lo} and 0 < {size}" if sized(lo, hi) else ""

        return self._device(points, space, wrong)

    def coverage(self, boxes: Sequence[Box], target: Box, *, gap: bool = True, twice: bool = True) -> Coverage:
        """A cell of ``target`` that is in no box, or else one that is in two, where they are asked for."""
        axes = _differing([target, *boxes])
        if gap and (axes or not boxes):
            missing = [f"not ({_inside(part, axes)})" for part in boxes]
            wrong = " and ".join(filter(None, [_inside(target, axes), *missing])) or "0 = 0"
            if (cell := self.somewhere([f"p{k}" for k in axes], wrong)) is not None:
                return cell, None
        for one, other in itertools.combinations(boxes if twice else (), 2):
            axes = range(len(one))
            both = " and ".join(filter(None, [_inside(one, axes), _inside(other, axes)])) or "0 = 0"
            if (cell := self.somewhere([f"p{a}" for a in axes], both)) is not None:
                return None, cell
        return None, None

    def fixed(self, parts: Parts) -> bool:
        """Whether no end of any box follows from sizes."""
        return not any(sized(*ends) for mine in parts for box in mine or () for ends in box)

    def pieces(self, src: Spans, dst: Spans, boxes: Spans, receiver: Array) -> Iterator[tuple[int, list[Box], Box, Point]]:
        """For each device what it has, and is sent, and its box."""
        for d in np.flatnonzero(dst.there).tolist():
            sent, own = [_device_box(boxes, k) for k in np.flatnonzero(receiver == d).tolist()], src.box(d)
            yield d, [*sent, *([] if own is None else [own])], _device_box(dst, d), ()

    def reads_outside(
        self, op: Op, graph: Graph, k: int, points: Spans, held: Spans, key: tuple[object, ...]
    ) -> tuple[int, object]:
        """A device that reads of read ``k`` what is not in its box."""
        if not isinstance(op, Block):
            return self.outside(self.footprint(op, graph, k, points), held), ""
        read, name = op.reads[k], where(op)
        given = op.space, read, graph.tensors[read.tensor].shape, name
        bad = (
            d for d in np.flatnonzero(points.there).tolist() if self._reads(given, _device_box(points, d), _device_box(held, d))
        )
        return next(bad, -1), ""

    def _reads(self, given: tuple[Sequence[Dim], Read, Sequence[int], str], block: Box, held: Box) -> bool:
        """Whether a block reads what is not in a box of the tensor.

        Args:
            given: the dimensions, the read, the tensor's shape, and where that is.
        """
        dims, read, shape, _ = given
        names = {d.name: f"p{k}" for k, d in enumerate(dims)}
        for _, axes, when in space.apart(read):
            used = frozenset(n for k in axes for n in dims_of(read.index[k])) | {n for g in when for n in dims_of(g.aff)}
            affs = [*(read.index[k] for k in axes), *(g.aff for g in when)]
            ends = [x for k, d in enumerate(dims) if d.name in used for x in block[k]]
            if not sized(*ends, *(x for k in axes for x in (*held[k], shape[k])), *(x for e in affs for x in _numbers(e))):
                continue
            if any(isinstance(x, Size) for e in affs for x in _integers_of_terms(e)):
                if self._between(given, block, held, axes):
                    return True
                continue
            there = [f"{block[k][0]} <= p{k} < {block[k][1]}" for k, d in enumerate(dims) if d.name in used]
            there += [f"{space.aff_text(g.aff, names)} {'>=' if g.op == 'ge' else '='} 0" for g in when]
            text = {k: space.aff_text(read.index[k], names) for k in axes}
            there += [f"0 <= {text[k]} < {shape[k]}" for k in axes if read.other is not None]
            out = [f"not ({held[k][0]} <= {text[k]} < {held[k][1]})" for k in axes]
            cells = [f"p{k}" for k, d in enumerate(dims) if d.name in used]
            if out and self.somewhere(cells, " and ".join([*there, f"({' or '.join(out)})"])) is not None:
                return True
        return False

    def _between(
        self, given: tuple[Sequence[Dim], Read, Sequence[int], str], block: Box, held: Box, axes: Sequence[int]
    ) -> bool:
        """The same where a place is no affine function of dimensions and sizes: by its least and largest value on each axis."""
        dims, read, shape, name = given
        ends = {d.name: e for d, e in zip(dims, block, strict=True)}
        for k in axes:
            low, high = self._ends(read.index[k], ends, name)
            inside = f" and 0 <= p0 < {shape[k]}" if read.other is not None else ""
            wrong = f"{low} <= p0 <= {high}{inside} and not ({held[k][0]} <= p0 < {held[k][1]})"
            if self.somewhere(["p0"], wrong) is not None:
                return True
        return False

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
                what = "a place is a product of a size and a dimension that follows from one"
                raise SizedLawError("access", what, where=where, why=str(e), sizes=None)
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
        if self.somewhere((), f"{low} < {first} * {atom.div} or {high} >= {last + 1} * {atom.div}") is not None:
            raise self.broken(Breach("access", what), where)
        return str(first), str(last)


def _device_box(spans: Spans, device: int) -> Box:
    """The box of a device that has one."""
    box = spans.box(device)
    assert box is not None
    return box


def named(symbols: Sequence[str], sizes: Sizes) -> str:
    return ", ".join(f"{s} = {n}" for s, n in zip(symbols, sizes, strict=True))


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
