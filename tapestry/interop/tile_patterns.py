"""Tile patterns and tensor dictionaries: the other multi-device proposal for ONNX ("Multi-Device ONNX", M. Villmow).

A pattern says into how many tiles each axis is cut, an assignment on which instance each tile is (-1: nowhere). The text
form is ``{3,2,1:5,4,3,2,1,0}``. The slides' start and stop formulas take ``j mod pattern[i]`` as the coordinate of tile j
on axis i, which names every tile only when the pattern's entries have no common factor ({2,2} has four tiles and two
names); `slide_tile` is that formula to the letter, `tile` counts row-major and agrees with it wherever one axis is cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto

from tapestry.errors import TapestryError
from tapestry.interop.sharding_specs import metadata, set_metadata
from tapestry.ir.kernel import Box, cut, inside, intersect, size

SUPPRESSED = -1
KEY = "tile"  # of metadata on a value or initializer; on the model, "tile:NAME" for values that the file does not declare


@dataclass(frozen=True, slots=True)
class Tiling:
    """A pattern and an assignment.

    Attributes:
        pattern: tiles per axis; ``(1,)`` means the whole tensor on every instance of the assignment. Leading ones may be
            left out.
        assignment: for each tile its instance or -1; ``None`` means tile j on instance j.
    """

    pattern: tuple[int, ...]
    assignment: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.pattern or any(p < 1 for p in self.pattern):
            raise TapestryError(f"a tile pattern of {list(self.pattern)}", hint="positive numbers, one per axis, or {1}")
        given = self.instances
        if self.count != 1 and len(given) != self.count:
            what = f"{self.count} tiles and {len(given)} assignments"
            raise TapestryError(what, where=str(self), hint="one per tile, -1 for none")
        used = [i for i in given if i != SUPPRESSED]
        if any(i < SUPPRESSED for i in given) or len(set(used)) < len(used):
            raise TapestryError("an instance is negative or has two tiles", where=str(self), hint="one tile per instance")

    @property
    def count(self) -> int:
        """Number of tiles: the volume of the pattern."""
        return prod(self.pattern)

    @property
    def instances(self) -> tuple[int, ...]:
        """The assignment, with its default."""
        return tuple(range(self.count)) if self.assignment is None else self.assignment

    def __str__(self) -> str:
        head = ",".join(map(str, self.pattern))
        return f"{{{head}}}" if self.assignment is None else f"{{{head}:{','.join(map(str, self.assignment))}}}"

    def over(self, rank: int) -> tuple[int, ...]:
        """Tiles per axis of a tensor of some rank.

        Raises:
            TapestryError: the pattern has more axes than the tensor.
        """
        if self.count == 1:
            return (1,) * rank
        if len(self.pattern) > rank:
            raise TapestryError(f"a pattern of {len(self.pattern)} axes for a tensor of rank {rank}", where=str(self))
        return (1,) * (rank - len(self.pattern)) + self.pattern

    def tile(self, j: int, shape: tuple[int, ...]) -> Box:
        """Tile number j, row-major."""
        parts = self.over(len(shape))
        digits = np.unravel_index(j, parts) if shape else ()
        return tuple(cut(n, p, int(k)) for n, p, k in zip(shape, parts, digits, strict=True))

    def slide_tile(self, j: int, shape: tuple[int, ...]) -> Box:
        """Tile number j by the formulas of the slides, to the letter (integer parts taken after the division)."""
        p = self.pattern
        j = j if self.count != 1 else 0
        parts = [p[i % len(p)] for i in range(len(shape))]
        return tuple((j % k * n // k, min(n, (j % k + 1) * n // k)) for n, k in zip(shape, parts, strict=True))

    def tiles(self, shape: tuple[int, ...], *, slides: bool = False) -> dict[int, Box]:
        """The tile of every instance that has one."""
        one = self.slide_tile if slides else self.tile
        every = range(len(self.instances)) if self.count == 1 else range(self.count)
        return {self.instances[j]: one(0 if self.count == 1 else j, shape) for j in every if self.instances[j] != SUPPRESSED}


def parse(text: str) -> Tiling:
    """``{3,2,1:5,4,3,2,1,0}``, or without an assignment ``{1,4}``.

    Raises:
        TapestryError: it is neither.
    """
    m = re.fullmatch(r"\s*\{\s*([\d\s,]+?)\s*(?::\s*([-\d\s,]+?)\s*)?\}\s*", text)
    try:
        if m is None:
            raise ValueError
        pattern = tuple(int(x) for x in m.group(1).split(","))
        assignment = None if m.group(2) is None else tuple(int(x) for x in m.group(2).split(","))
    except ValueError:
        hint = "{2,1:0,1}: tiles per axis, then the instance of each tile"
        raise TapestryError(f"'{text}' is not a tile pattern", hint=hint) from None
    return Tiling(pattern, assignment)


# tensor dictionaries


@dataclass(frozen=True, slots=True, eq=False)
class TensorDictionary:
    """A tensor as the tiles that instances hold."""

    shape: tuple[int, ...]
    tiling: Tiling
    data: Mapping[int, np.ndarray]

    def __getitem__(self, instance: int) -> np.ndarray:
        """What one instance holds.

        Raises:
            TapestryError: it holds nothing.
        """
        if instance not in self.data:
            hint = f"one of {sorted(self.data)}"
            raise TapestryError(f"instance {instance} holds no tile", where=str(self.tiling), hint=hint)
        return self.data[instance]

    def locate(self, cell: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """The instances that hold a cell of the whole tensor, and where in their tiles it is."""
        found = self.tiling.tiles(self.shape).items()
        inner = {i: tuple(x - lo for x, (lo, _) in zip(cell, box, strict=True)) for i, box in found if _holds(box, cell)}
        return sorted(inner.items())

    def whole(self) -> np.ndarray:
        """The tensor put together.

        Raises:
            TapestryError: a tile is suppressed.
        """
        boxes = self.tiling.tiles(self.shape)
        some = next(iter(self.data.values()))
        out = np.empty(self.shape, some.dtype)
        if self.tiling.count != 1 and len(boxes) < self.tiling.count:
            hint = "combine with a dictionary that has it"
            raise TapestryError("a suppressed tile is missing", where=str(self.tiling), hint=hint)
        for i, box in boxes.items():
            out[_slices(box)] = self.data[i]
        return out

    def extract(self) -> dict[int, np.ndarray]:
        """Every instance's own tensor, as a copy."""
        return {i: np.array(a) for i, a in self.data.items()}


def create(array: np.ndarray, tiling: Tiling = Tiling((1,), (0,))) -> TensorDictionary:
    """Cut a tensor into tiles; without a tiling it is whole on instance 0."""
    boxes = tiling.tiles(array.shape)
    return TensorDictionary(array.shape, tiling, {i: np.array(array[_slices(b)]) for i, b in boxes.items()})


def combine(*parts: TensorDictionary) -> TensorDictionary:
    """One dictionary of several with the same pattern, each with some of the tiles (or some of the copies).

    Raises:
        TapestryError: shapes or patterns differ, or two have the same tile or instance.
    """
    first = parts[0]
    if any(p.shape != first.shape or p.tiling.pattern != first.tiling.pattern for p in parts):
        texts = ", ".join(str(p.tiling) for p in parts)
        raise TapestryError("dictionaries of different shapes or patterns do not combine", where=texts)
    data: dict[int, np.ndarray] = {}
    for p in parts:
        twice = data.keys() & p.data.keys()
        if twice:
            raise TapestryError(f"instance {min(twice)} is in two of the dictionaries", where=str(p.tiling))
        data |= p.data
    if first.tiling.count == 1:
        copies = tuple(i for p in parts for i in p.tiling.instances)
        return TensorDictionary(first.shape, Tiling(first.tiling.pattern, copies), data)
    rows = [[i for i in tile if i != SUPPRESSED] for tile in zip(*(p.tiling.instances for p in parts), strict=True)]
    if any(len(r) > 1 for r in rows):
        raise TapestryError(f"tile {next(k for k, r in enumerate(rows) if len(r) > 1)} is in two of the dictionaries")
    return TensorDictionary(first.shape, Tiling(first.tiling.pattern, tuple(r[0] if r else SUPPRESSED for r in rows)), data)


def _holds(box: Box, cell: tuple[int, ...]) -> bool:
    return all(lo <= x < hi for x, (lo, hi) in zip(cell, box, strict=True))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in box)


# runtime evaluation


@dataclass(frozen=True, slots=True)
class Send:
    """A box of the tensor from one instance to another."""

    src: int
    dst: int
    box: Box


@dataclass(frozen=True, slots=True)
class Change:
    """How a tensor gets from one tiling to another: what it is called, and every message."""

    kind: str
    sends: tuple[Send, ...]

    def cells(self) -> int:
        """Elements on the wire, summed over senders."""
        return sum(size(s.box) for s in self.sends)


def naive(before: Tiling, after: Tiling, shape: tuple[int, ...]) -> Change:
    """The slides' evaluation: a broadcast, an all-gather, or an all-gather and then tiling; whole tensors arrive.

    Raises:
        TapestryError: a tile that is needed is suppressed.
    """
    if before == after or before.tiles(shape) == after.tiles(shape):
        return Change("none", ())
    whole: Box = tuple((0, n) for n in shape)
    kind = "broadcast" if before.count == 1 else "all-gather"
    kind += " + tile" if after.count != 1 else ""
    wanted = dict.fromkeys(after.tiles(shape), whole)
    return Change(kind, tuple(_sends(before.tiles(shape), wanted)))


def exact(before: Tiling, after: Tiling, shape: tuple[int, ...]) -> Change:
    """Each instance receives its tile of the new tiling less what it holds, each cell from one holder."""
    held, wanted = before.tiles(shape), after.tiles(shape)
    sends = tuple(_sends(held, {i: b for i, b in wanted.items() if i not in held or not inside(b, held[i])}))
    return Change("exact" if sends else "none", sends)


def _sends(held: Mapping[int, Box], wanted: Mapping[int, Box]) -> Iterator[Send]:
    for dst, box in wanted.items():
        own = intersect(box, held[dst]) if dst in held else None
        missing = subtract(box, own) if own else [box]
        sources = list(dict.fromkeys(held.values()))  # tiles are disjoint, or copies of the whole
        got = 0
        for src_box in sources:
            holders = [i for i, b in held.items() if b == src_box]
            for piece in missing:
                part = intersect(piece, src_box)
                if part is not None and dst not in holders:
                    got += size(part)
                    yield Send(holders[dst % len(holders)], dst, part)
        if got < sum(size(m) for m in missing):
            raise TapestryError(f"instance {dst} needs cells that no instance holds", hint="a tile is suppressed")


def subtract(box: Box, hole: Box) -> list[Box]:
    """Boxes that partition ``box`` without ``hole``, which lies inside it."""
    out: list[Box] = []
    rest = list(box)
    for k, ((lo, hi), (a, b)) in enumerate(zip(box, hole, strict=True)):
        for lo2, hi2 in ((lo, a), (b, hi)):
            if lo2 < hi2:
                out.append((*rest[:k], (lo2, hi2), *rest[k + 1 :]))
        rest[k] = (a, b)
    return out


def evaluate(d: TensorDictionary, after: Tiling, change: Change) -> TensorDictionary:
    """Carry out a change: what each instance of the new tiling holds, from its own tile and what it was sent."""
    held = d.tiling.tiles(d.shape)
    sample = next(iter(d.data.values()))
    data: dict[int, np.ndarray] = {}
    for i, box in after.tiles(d.shape).items():
        whole = np.empty(d.shape, sample.dtype)
        written = np.zeros(d.shape, bool)
        pieces = [(i, held[i])] if i in held else []
        for src, part in [*pieces, *((s.src, s.box) for s in change.sends if s.dst == i)]:
            origin = held[src]
            local = tuple(slice(lo - o, hi - o) for (lo, hi), (o, _) in zip(part, origin, strict=True))
            whole[_slices(part)] = d.data[src][local]
            written[_slices(part)] = True
        assert written[_slices(box)].all(), f"instance {i} was not sent all of its tile"
        data[i] = np.array(whole[_slices(box)])
    return TensorDictionary(d.shape, after, data)


# in a file


def attach(model: ModelProto, tensor: str, tiling: Tiling | None) -> None:
    """Write a tiling into a model's metadata (None removes it): on the value or initializer, else on the model."""
    holders = [h for h in _values(model) if h.name == tensor]
    set_metadata(model, f"{KEY}:{tensor}", None)
    for h in holders:
        set_metadata(h, KEY, None)
    if tiling is None:
        return
    model.ir_version = max(model.ir_version, 10)  # values have metadata from then on
    if holders:
        set_metadata(holders[0], KEY, str(tiling))
    else:
        set_metadata(model, f"{KEY}:{tensor}", str(tiling))


def read(model: ModelProto) -> dict[str, Tiling]:
    """All tilings in a model's metadata.

    Raises:
        TapestryError: one does not parse.
    """
    out = {k.removeprefix(f"{KEY}:"): parse(v) for k, v in metadata(model).items() if k.startswith(f"{KEY}:")}
    for h in _values(model):
        text = metadata(h).get(KEY)
        if text is not None:
            out[h.name] = parse(text)
    return out


def _values(model: ModelProto) -> list[ValueInfoProto | TensorProto]:
    graph = model.graph
    return [*graph.input, *graph.output, *graph.value_info, *graph.initializer]
