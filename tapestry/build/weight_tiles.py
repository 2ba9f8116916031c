"""Hashes of a weight by rectangular tiles of about a mebibyte, so that whoever reads a slice checks that slice and little
more.

Tiles, not runs of bytes: a slice by columns has a part of every row, and every rank would hash the whole tensor. The grid
follows from shape and dtype alone, so that any plan of the model is served. A weight's hash (`Weight.sha256`) is that of its
elements where one tile holds it, and else the hash of its tiles' hashes, which are therefore checked wherever they come from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import product
from math import prod

import numpy as np

from tapestry.errors import damaged
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, slices
from tapestry.ir.types import Array, itemsize

TILE = 1 << 20  # bytes, at most
RUN = 1 << 10  # bytes of a row that are not cut further
DIGEST = 32


def extents(shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Extents of a tile: the longest axis is halved until a tile is small enough, rows only as long as they are long."""
    out = list(shape)
    while prod(out) * width > TILE:
        axes = [a for a in range(len(out)) if a < len(out) - 1 or out[a] * width > RUN] or [len(out) - 1]
        longest = max(axes, key=lambda a: out[a])
        if out[longest] == 1:
            longest = len(out) - 1
        out[longest] = -(-out[longest] // 2)
    return tuple(out)


def count(shape: tuple[int, ...], width: int) -> int:
    """How many tiles a weight has."""
    return prod(-(-s // e) if e else 1 for s, e in zip(shape, extents(shape, width), strict=True))


def touched(shape: tuple[int, ...], width: int, box: Box) -> Iterator[tuple[int, Box]]:
    """(number, box) of every tile that has cells in a box, in row-major order."""
    each = extents(shape, width)
    grid = [-(-s // e) if e else 1 for s, e in zip(shape, each, strict=True)]
    ranges = [range(lo // e, -(-hi // e)) if e else range(1) for (lo, hi), e in zip(box, each, strict=True)]
    for place in product(*ranges):
        number = 0
        for p, g in zip(place, grid, strict=True):
            number = number * g + p
        yield number, tuple((p * e, min((p + 1) * e, s)) for p, e, s in zip(place, each, shape, strict=True))


def digest(array: Array) -> bytes:
    """SHA-256 of an array's elements, row-major and little-endian."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).digest()


def digests(array: Array) -> bytes:
    """The hashes of all tiles of a weight."""
    whole = tuple((0, s) for s in array.shape)
    tiles = touched(array.shape, array.itemsize, whole)
    return b"".join(digest(array[slices(box)]) for _, box in tiles)


def root(tiles: bytes) -> str:
    """The hash of a weight from those of its tiles."""
    return tiles.hex() if len(tiles) == DIGEST else hashlib.sha256(tiles).hexdigest()


def stored(graph: Graph) -> bytes:
    """The hashes that a build keeps beside the graph: those of weights of several tiles."""
    return b"".join(w.tiles for w in graph.weights.values() if len(w.tiles) > DIGEST)


def restored(graph: Graph, data: bytes, where: str) -> dict[str, bytes]:
    """The hashes of the tiles of every weight of a graph that has been read, from what was kept.

    Raises:
        BuildError: they are not what the weights' own hashes say.
    """
    out: dict[str, bytes] = {}
    at = 0
    for name, w in graph.weights.items():
        t = graph.tensors[name]
        n = count(t.shape, itemsize(t.dtype)) * DIGEST if w.file and w.sha256 else 0
        out[name] = bytes.fromhex(w.sha256) if n == DIGEST else data[at : at + n]
        at += 0 if n == DIGEST else n
        if n and root(out[name]) != w.sha256:
            raise damaged(f"the hashes of weight '{name}' are not there", where)
    if at != len(data):
        raise damaged("hashes of no weight", where)
    return out
