"""Tile axes: groups of dimensions flattened into one index vector each, and index expressions printed over them.

Dimensions come out of the flat index by ``//`` and ``%`` with constants, and only where they must: a run of neighbouring
dimensions whose coefficients are those of row-major order stays one variable, so contiguous memory is visibly contiguous.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Sequence
from math import prod

from tapestry.codegen.triton.text.device_functions import HELPERS
from tapestry.ir.graph import Dim
from tapestry.ir.index import Aff, Atom, Floor, dims_of, span

_OWN = {
    "tl",
    "triton",
    "combine",
    "pid",
    "pid_m",
    "pid_n",
    "pid_row",
    "tile",
    "first",
    "high",
    "step",
    "first_tile",
    "tile_index",
    "DEPTH",
    "WIDTH",
    "BLOCK",
    "ROWS",
    "COLS",
    "BM",
    "BN",
    "BK",
}
_RESERVED = frozenset(_OWN) | set(keyword.kwlist) | set(dir(builtins)) | set(HELPERS)


class Namer:
    """Distinct Python names: each is asked for by the name it would like to have."""

    def __init__(self) -> None:
        self.taken: set[str] = set(_RESERVED)

    def take(self, wish: str) -> str:
        """A free identifier close to the wish (the last part of an ONNX path such as ``/layer1/conv/Conv_output_0``)."""
        base = identifier(wish)
        name, n = base, 1
        while name in self.taken:
            name, n = f"{base}_{n}", n + 1
        self.taken.add(name)
        return name


def identifier(text: str) -> str:
    """The last part of a path as a Python identifier of reasonable length."""
    parts = [p for p in re.split(r"[/:]+", text) if p]
    plain = re.sub(r"\W+", "_", parts[-1] if parts else "x", flags=re.ASCII).strip("_")[:40] or "x"
    return f"t_{plain}" if plain[0].isdigit() else plain


class Axis:
    """Some dimensions, flattened in order into the index variable ``name``; ``lines`` define what is derived from it.

    Attributes:
        block: elements per tile; 0 for an axis whose index is a scalar (a batch axis of the grid).
        tile: the constant's name in the source.
    """

    def __init__(self, dims: Sequence[Dim], block: int, tile: str, namer: Namer, wish: str) -> None:
        self.dims = [d for d in dims if d.size != 1]
        self.block, self.tile = block, tile
        self.namer = namer
        self.name = namer.take("_".join(d.name for d in self.dims) if 0 < len(self.dims) <= 4 else wish)
        self.lines: list[str] = []
        self.size = prod(d.size for d in dims)
        self.spare = 0  # tiles more than the points fill, where lanes are given by an order
        self._named: dict[str, str] = {}

    @property
    def ragged(self) -> bool:
        """Whether the last tile reaches past the end, so that lanes must be masked."""
        return self.spare > 0 or (self.block > 0 and self.size % self.block != 0)

    @property
    def tiles(self) -> int:
        """Number of tiles (for a scalar axis, of elements)."""
        return -(-self.size // self.block) + self.spare if self.block else self.size

    def define(self, text: str, wish: str) -> str:
        """A variable for an expression over this axis (the same one when it was defined before)."""
        if text.isidentifier() or text.isdigit():
            return text
        if text not in self._named:
            self._named[text] = self.namer.take(wish)
            self.lines.append(f"{self._named[text]} = {text}")
        return self._named[text]

    def inside(self) -> str:
        """The mask of lanes that exist."""
        return self.define(f"{self.name} < {self.size}", f"{self.name}_in")

    def plain(self, coefs: dict[str, int]) -> list[tuple[str, int]]:
        """``sum(coef * dimension)`` as (variable, coefficient) pairs, one per run of row-major neighbours."""
        out: list[tuple[str, int]] = []
        at = 0
        while at < len(self.dims):
            first = at
            while at + 1 < len(self.dims) and self._merges(coefs, at):
                at += 1
            if coefs.get(self.dims[at].name, 0):
                out.append((self._run(first, at), coefs[self.dims[at].name]))
            at += 1
        return out

    def _merges(self, coefs: dict[str, int], at: int) -> bool:
        upper, lower = self.dims[at], self.dims[at + 1]
        c = coefs.get(lower.name, 0)
        return c != 0 and coefs.get(upper.name, 0) == c * lower.size

    def _run(self, first: int, last: int) -> str:
        below, count = (prod(d.size for d in dims) for dims in (self.dims[last + 1 :], self.dims[first : last + 1]))
        text = self.name if below == 1 else f"{self.name} // {below}"
        if first > 0:
            text = f"{text} % {count}" if below == 1 else f"({text}) % {count}"
        return self.define(text, "_".join(d.name for d in self.dims[first : last + 1]))


class View:
    """How the axes of one place in the kernel lie in its tiles: a suffix such as ``[:, None]`` for each."""

    def __init__(self, axes: Sequence[tuple[Axis, str]], ranges: dict[str, int]) -> None:
        self.suffix = {id(a): s for a, s in axes}
        self.axes = [a for a, _ in axes]
        self.ranges = ranges
        self.owner = {d.name: a for a in self.axes for d in a.dims}

    @property
    def tiled(self) -> list[Axis]:
        """The axes along which there is a vector, in tile order."""
        return [a for a in self.axes if a.block]

    @property
    def shape(self) -> str:
        """The tile's shape as source text."""
        return "(" + ", ".join(a.tile for a in self.tiled) + (",)" if len(self.tiled) == 1 else ")")

    def axes_of(self, e: Aff) -> list[Axis]:
        """The axes that an index expression varies along, in tile order."""
        used = {id(self.owner[d]) for d in dims_of(e) if d in self.owner}
        return [a for a in self.axes if id(a) in used]

    def laid(self, axis: Axis, name: str) -> str:
        """A one-axis variable or number in the shape of this view."""
        return name if name.isdigit() else name + self.suffix[id(axis)]

    def text(self, e: Aff, wish: str = "") -> str:
        """An index expression over the tile; parts along one axis are hoisted to that axis under a name like ``wish``."""
        parts: list[tuple[str, int]] = []
        for axis in self.axes:
            if own := [(t, c) for t, c in e.terms if self._axes(t) == [axis]]:
                name = axis.define(self._along(axis, own), f"{wish or 'at'}_{axis.name}")
                parts.append((self.laid(axis, name), 1))
        parts += [(self._atom(t), c) for t, c in e.terms if len(self._axes(t)) > 1]
        return _linear_text(parts, e.const)

    def _axes(self, atom: Atom) -> list[Axis]:
        return self.axes_of(Aff(((atom, 1),)))

    def _along(self, axis: Axis, terms: list[tuple[Atom, int]]) -> str:
        """Terms along one axis, as an expression over its one-dimensional variables."""
        inner = View([(axis, "")], self.ranges)
        parts = axis.plain({t: c for t, c in terms if isinstance(t, str)})
        parts += [(inner._atom(t), c) for t, c in terms if not isinstance(t, str)]
        return _linear_text(parts, 0)

    def _atom(self, atom: Atom) -> str:
        """A floor or mod. Triton's ``//`` and ``%`` truncate, so an argument that may be negative is shifted first."""
        if isinstance(atom, str):
            axis = self.owner[atom]
            [(name, _)] = axis.plain({atom: 1})
            return self.laid(axis, name)
        lo, _ = span(atom.arg, self.ranges)
        periods = max(0, -(lo // atom.div))
        arg = self._flat(atom.arg + periods * atom.div)
        if isinstance(atom, Floor):
            return f"({arg} // {atom.div} - {periods})" if periods else f"({arg} // {atom.div})"
        return f"({arg} % {atom.div})"

    def _flat(self, e: Aff) -> str:
        """The argument of a floor or mod: runs along each axis, laid out in this view, never hoisted."""
        parts: list[tuple[str, int]] = []
        for axis in self.axes:
            own = {t: c for t, c in e.terms if isinstance(t, str) and self.owner.get(t) is axis}
            parts += [(self.laid(axis, n), c) for n, c in axis.plain(own)]
        parts += [(self._atom(t), c) for t, c in e.terms if not isinstance(t, str) and self._axes(t)]
        text = _linear_text(parts, e.const)
        return text if re.fullmatch(r"\w+(\[[^][]*\])?", text) else f"({text})"


def _linear_text(parts: list[tuple[str, int]], offset: int) -> str:
    """``c0*t0 + c1*t1 - 3`` as source text."""
    out = ""
    for text, coef in parts:
        term = text if abs(coef) == 1 else f"{text} * {abs(coef)}"
        out += (f" {'-' if coef < 0 else '+'} " if out else "-" if coef < 0 else "") + term
    if not out:
        return str(offset)
    return out if not offset else f"{out} {'-' if offset < 0 else '+'} {abs(offset)}"
