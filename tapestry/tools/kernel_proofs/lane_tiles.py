"""Values of a tile program: terms with a shape, whose lanes are variables by position (``l0.16`` is axis 0 of 16 lanes)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tapestry.ir.index import Aff, const
from tapestry.tools.kernel_proofs.term.terms import Terms, Unsupported

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """A term at every lane of a shape; a scalar has the shape ()."""

    term: int
    shape: Shape = ()


@dataclass(frozen=True, slots=True)
class Pointer:
    """Addresses in a buffer: element offsets at every lane."""

    buffer: str
    at: Tile


def lane(terms: Terms, axis: int, size: int) -> Aff:
    """The variable of an axis."""
    return terms.variable(f"l{axis}.{size}", size)


def lanes(terms: Terms, shape: Shape) -> tuple[Aff, ...]:
    """The variables of a shape."""
    return tuple(lane(terms, k, n) for k, n in enumerate(shape))


def moved(terms: Terms, tile: Tile, places: Sequence[Aff], shape: Shape) -> Tile:
    """A tile as another shape, with an expression for each of its own axes."""
    env = {f"l{k}.{n}": e for k, (n, e) in enumerate(zip(tile.shape, places, strict=True)) if n != 1}
    return Tile(terms.substituted(tile.term, env), shape)


def indexed(terms: Terms, tile: Tile, items: Sequence[Any]) -> Tile:
    """``tile[:, None]``: new axes of one lane."""
    shape, places, axis = list[int](), list[Aff](), 0
    for item in items:
        if item is None:
            shape.append(1)
            continue
        if axis >= len(tile.shape):
            raise Unsupported("more indices than axes")
        places.append(lane(terms, len(shape), tile.shape[axis]))
        shape.append(tile.shape[axis])
        axis += 1
    if axis != len(tile.shape):
        raise Unsupported("an axis without an index")
    return moved(terms, tile, places, tuple(shape))


def together(terms: Terms, tiles: Sequence[Tile], least: Shape = ()) -> tuple[list[Tile], Shape]:
    """Tiles with as many axes each, and the shape that they broadcast to."""
    rank = max([len(least), *(len(t.shape) for t in tiles)])
    out = list[Tile]()
    for t in tiles:
        more = rank - len(t.shape)
        if more and t.shape:
            places = [lane(terms, k + more, n) for k, n in enumerate(t.shape)]
            t = moved(terms, t, places, (1,) * more + t.shape)
        out.append(Tile(t.term, t.shape or (1,) * rank))
    shape = list[int]()
    for sizes in zip(*(t.shape for t in out), *([(1,) * (rank - len(least)) + least] if least else []), strict=True):
        wide = {n for n in sizes if n != 1}
        if len(wide) > 1:
            raise Unsupported(f"shapes that do not broadcast: {[t.shape for t in tiles]}")
        shape.append(max(sizes))
    return out, tuple(shape)


def each(terms: Terms, fn: Callable[..., int], *tiles: Tile) -> Tile:
    """A function at every lane."""
    same, shape = together(terms, tiles)
    return Tile(fn(*(t.term for t in same)), shape)


def folded(terms: Terms, fn: str, tile: Tile, axis: int) -> Tile:
    """A reduction along an axis."""
    axis %= len(tile.shape)
    name, size = terms.fresh(), tile.shape[axis]
    left = tile.shape[:axis] + tile.shape[axis + 1 :]
    places = list(lanes(terms, left))
    places.insert(axis, terms.variable(name, size))
    return Tile(terms.reduce(fn, ((name, size),), moved(terms, tile, places, left).term), left)


def dot(terms: Terms, a: Tile, b: Tile) -> Tile:
    """The product of two tiles of two axes."""
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise Unsupported(f"a product of {a.shape} and {b.shape}")
    name, n = terms.fresh(), a.shape[1]
    inner = terms.variable(name, n)
    shape = (a.shape[0], b.shape[1])
    left = moved(terms, a, [lane(terms, 0, shape[0]), inner], shape)
    right = moved(terms, b, [inner, lane(terms, 1, shape[1])], shape)
    return Tile(terms.reduce("add", ((name, n),), terms.mul([(left.term, 1.0), (right.term, 1.0)])), shape)


def scalar(terms: Terms, value: float | bool) -> Tile:
    """A constant."""
    if isinstance(value, bool):
        return Tile(terms.true if value else terms.false)
    return Tile(terms.int(const(value)) if isinstance(value, int) else terms.const(value))
