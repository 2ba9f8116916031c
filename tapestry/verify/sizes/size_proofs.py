"""Facts about boxes whose ends follow from sizes, for every size of a region: isl finds a size and a cell where one fails.

Each device has boxes of its own, so that a fact speaks of sizes and cells and never of a device's number. Axes on which all
boxes of a fact are the same text are left out: what they hold they hold on both sides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tapestry.errors import LawError
from tapestry.ir import space
from tapestry.ir.graph import Dim, Guard, Read
from tapestry.ir.index import Aff, Atom, Mod, bounds, dims_of
from tapestry.ir.kernel import Box
from tapestry.ir.sizes.size_formula import Region, Size, Sizes, names_of
from tapestry.ir.space import apart

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
            if any(isinstance(x, Size) for e in affs for x in _factors(e)):
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


def _factors(e: Aff) -> list[int]:
    """Coefficients and divisors, which must be numbers."""
    out: list[int] = []
    for atom, coef in e.terms:
        out.append(coef)
        if not isinstance(atom, str):
            out += [atom.div, *_factors(atom.arg)]
    return out


def _numbers(e: Aff) -> list[int]:
    """All integers of an index expression."""
    return [e.const, *_factors(e), *(x for a, _ in e.terms if not isinstance(a, str) for x in _numbers(a.arg))]
