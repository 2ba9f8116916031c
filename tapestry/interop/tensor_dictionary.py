"""Tensor dictionaries: a tensor as the tiles that instances hold (docs/sharding.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from tapestry.errors import TapestryError
from tapestry.interop.tile_changes import exact, naive, received
from tapestry.interop.tile_patterns import SUPPRESSED, Tiling, parse
from tapestry.ir.kernel import Box, shape, slices

Instances = Sequence[int] | None


class TensorDictionary:
    """A tensor on one or more instances, printed as ``{2,1: 0,1}``.

    Attributes:
        shape: of the whole tensor.
        tiling: its pattern and assignment.
    """

    def __init__(self, tensor: Any, pattern: str | Sequence[int] | Tiling = (1,), assignment: Instances = None) -> None:
        """Cut a tensor into tiles; without a pattern it is whole on instance 0.

        Args:
            pattern: tiles per axis (leading ones may be left out), or the text ``{2,1: 0,1}``.
            assignment: the instance of each tile, -1 for a tile that nobody has; by default tile j is on instance j. Of the
                pattern ``(1,)``: all instances that have the tensor.

        Raises:
            TapestryError: pattern and assignment do not make a tiling of the tensor.
        """
        array = np.asarray(tensor)
        self.shape, self.tiling = array.shape, tiling_of(pattern, assignment)
        self._tiles = {i: np.array(array[slices(b)]) for i, b in self.tiling.tiles(array.shape).items()}

    @classmethod
    def of_tiles(
        cls,
        tiles: Mapping[int, Any],
        extents: Sequence[int],
        pattern: str | Sequence[int] | Tiling,
        assignment: Instances = None,
    ) -> TensorDictionary:
        """Tensors that instances hold already, as the tiles of one.

        Raises:
            TapestryError: an instance has no tile, or one of another shape or type.
        """
        out = cls.__new__(cls)
        out.shape, out.tiling = tuple(extents), tiling_of(pattern, assignment)
        out._tiles = {i: np.asarray(a) for i, a in tiles.items()}
        wanted = {i: shape(b) for i, b in out.tiling.tiles(out.shape).items()}
        given = {i: a.shape for i, a in out._tiles.items()}
        if wanted != given or len({a.dtype for a in out._tiles.values()}) > 1:
            why = f"the tiles are {given}, those of the pattern {wanted}, all of one type"
            raise TapestryError("these are not the tiles of that pattern", where=str(out.tiling), why=why)
        return out

    @classmethod
    def combine(cls, *parts: TensorDictionary) -> TensorDictionary:
        """One dictionary of several with the same pattern, each with some of the tiles (or some of the copies).

        Raises:
            TapestryError: shapes or patterns differ, or two have the same tile or instance.
        """
        first = parts[0]
        if any(p.shape != first.shape or p.tiling.pattern != first.tiling.pattern for p in parts):
            texts = ", ".join(str(p.tiling) for p in parts)
            raise TapestryError("dictionaries of different shapes or patterns do not combine", where=texts)
        tiles: dict[int, np.ndarray] = {}
        for p in parts:
            twice = tiles.keys() & p._tiles.keys()
            if twice:
                raise TapestryError(f"instance {min(twice)} is in two of the dictionaries", where=str(p))
            tiles |= p._tiles
        if first.tiling.count == 1:
            return cls.of_tiles(tiles, first.shape, first.tiling.pattern, [i for p in parts for i in p.instances])
        rows = [[i for i in tile if i != SUPPRESSED] for tile in zip(*(p.tiling.instances for p in parts), strict=True)]
        if any(len(r) > 1 for r in rows):
            raise TapestryError(f"tile {next(k for k, r in enumerate(rows) if len(r) > 1)} is in two of the dictionaries")
        assignment = [r[0] if r else SUPPRESSED for r in rows]
        return cls.of_tiles(tiles, first.shape, first.tiling.pattern, assignment)

    @property
    def instances(self) -> tuple[int, ...]:
        """The instances that hold something, in the order of their tiles."""
        return tuple(i for i in self.tiling.instances if i != SUPPRESSED)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements."""
        return next(iter(self._tiles.values())).dtype

    def __str__(self) -> str:
        return str(Tiling(self.tiling.pattern, self.tiling.instances))

    def __repr__(self) -> str:
        return f"TensorDictionary({self} of {list(self.shape)} {self.dtype})"

    @overload
    def __getitem__(self, at: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, at: tuple[int, ...]) -> Any: ...
    def __getitem__(self, at: int | tuple[int, ...]) -> Any:
        """By an instance: what it holds. By a cell (a tuple): its value.

        Raises:
            TapestryError: the instance holds nothing, nobody has the cell, or it is outside.
        """
        if isinstance(at, tuple):
            holder, inner = next(iter(self.locate(at).items()), (None, ()))
            if holder is None:
                raise TapestryError(f"no instance holds cell {list(at)}", where=str(self), hint="its tile is suppressed")
            return self._tiles[holder][inner]
        if at not in self._tiles:
            raise TapestryError(f"instance {at} holds no tile", where=str(self), hint=f"one of {sorted(self._tiles)}")
        return self._tiles[at]

    def locate(self, cell: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """The instances that hold a cell of the whole tensor, and where in their tiles it is.

        Raises:
            TapestryError: it is no cell of the tensor.
        """
        if len(cell) != len(self.shape) or any(not 0 <= x < n for x, n in zip(cell, self.shape, strict=True)):
            raise TapestryError(f"{list(cell)} is no cell of a tensor of shape {list(self.shape)}", where=str(self))
        found = sorted(self.tiling.tiles(self.shape).items())
        return {i: tuple(x - lo for x, (lo, _) in zip(cell, b, strict=True)) for i, b in found if _holds(b, cell)}

    def whole(self) -> np.ndarray:
        """The tensor put together.

        Raises:
            TapestryError: a tile is suppressed.
        """
        boxes = self.tiling.tiles(self.shape)
        if not boxes or (self.tiling.count != 1 and len(boxes) < self.tiling.count):
            raise TapestryError("a suppressed tile is missing", where=str(self), hint="combine with a dictionary that has it")
        out = np.empty(self.shape, self.dtype)
        for i, box in boxes.items():
            out[slices(box)] = self._tiles[i]
        return out

    def extract(self) -> dict[int, np.ndarray]:
        """Every instance's own tensor, as a copy."""
        return {i: np.array(a) for i, a in self._tiles.items()}

    def retile(
        self, pattern: str | Sequence[int] | Tiling, assignment: Instances = None, *, slides: bool = False
    ) -> TensorDictionary:
        """The same tensor in another tiling, each instance from its own tile and what it is sent.

        Args:
            slides: by the slides' evaluation (whole tensors are sent, then cut) instead of sending what is lacking.

        Raises:
            TapestryError: a tile that is needed is suppressed.
        """
        after = tiling_of(pattern, assignment)
        change = (naive if slides else exact)(self.tiling, after, self.shape)
        return TensorDictionary.of_tiles(received(self._tiles, self.tiling, after, change, self.shape), self.shape, after)


def tiling_of(pattern: str | Sequence[int] | Tiling, assignment: Instances = None) -> Tiling:
    """A tiling from its text, or from numbers.

    Raises:
        TapestryError: it is none, or has two assignments.
    """
    if isinstance(pattern, str):
        pattern = parse(pattern)
    if isinstance(pattern, Tiling):
        if assignment is not None and pattern.assignment is not None:
            raise TapestryError("two assignments", where=str(pattern), hint="one of them")
        return pattern if assignment is None else Tiling(pattern.pattern, tuple(assignment))
    return Tiling(tuple(pattern), None if assignment is None else tuple(assignment))


def _holds(box: Box, cell: Sequence[int]) -> bool:
    return all(lo <= x < hi for x, (lo, hi) in zip(cell, box, strict=True))
