"""Inputs that a model accepts: random ones (indices inside their tables, masks with every row partly open), those of files, and
whether given indices are inside their tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from tapestry.errors import TapestryError
from tapestry.ir.expr import Arg, Call, Const, Expr, Index, walk
from tapestry.ir.graph import Block, Graph, Opaque, Read
from tapestry.ir.index import dims_of
from tapestry.ir.types import FLOATS, STORED, Array, Tensor, numpy_dtype


def random_feeds(graph: Graph, seed: int) -> dict[str, Any]:
    """An array for every graph input, the same for the same seed."""
    rng = np.random.default_rng(seed)
    tables = _tables(graph)
    return {t: _random(graph.tensors[t], tables.get(t), rng) for t in graph.inputs}


def given_feeds(graph: Graph, files: Iterable[tuple[str, Path]], seed: int) -> dict[str, Any]:
    """The inputs, read from files (mapped where that can be); those without a file are random.

    Raises:
        TapestryError: a file does not read.
    """
    return random_feeds(graph, seed) | {name: read_array(path) for name, path in files}


def read_array(path: Path) -> Array:
    """A .npy file, mapped.

    Raises:
        TapestryError: it is none.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise TapestryError(f"not an array: {e}", where=str(path), hint="a .npy file written by numpy.save") from None


def made_up(graph: Graph, given: Iterable[str], seed: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """For the document of a run: the inputs for which random numbers stand in; ``tell`` hears of it where only some do."""
    names = [t for t in graph.inputs if t not in set(given)]
    if 0 < len(names) < len(graph.inputs):
        tell(f"{', '.join(names)}: random (seed {seed}), for want of an --input")
    return {"random_inputs": names, "seed": seed}


def _random(t: Tensor, table: int | None, rng: np.random.Generator) -> Any:
    if t.on_host:
        return _words(t, rng)
    dtype = numpy_dtype(t.dtype)
    if t.dtype in FLOATS | STORED:
        return rng.standard_normal(t.shape).astype(dtype)
    if table is not None:
        return rng.integers(0, table, t.shape).astype(dtype)
    if not t.shape:
        return np.asarray(1, dtype)
    # neither a float nor an index: most likely a mask; a row is open up to a random point in its second half
    n = t.shape[-1]
    length = rng.integers((n + 1) // 2, n + 1, (*t.shape[:-1], 1))
    return np.broadcast_to(np.arange(n) < length, t.shape).astype(dtype)


def _words(t: Tensor, rng: np.random.Generator) -> Array:
    """Random text for an input of strings (an unknown size is 2); other values of the host cannot be made up."""
    if not t.about.startswith("string[") or "…" in t.about:
        raise TapestryError(f"no random value for input '{t.name}'", why=f"it is {t.about}", hint="give it from Python")
    sizes = [2 if s == "?" else int(s) for s in t.about.removeprefix("string[").removesuffix("]").split(", ") if s]
    letters = rng.integers(97, 123, (*sizes, 5)).astype(np.uint8)
    return np.array([bytes(w).decode() for w in letters.reshape(-1, 5)], object).reshape(sizes)


Cells = tuple[slice | EllipsisType, ...]
Bound = tuple[str, Cells, int, int]  # an input, its cells, the least position that they may have, and how many there are
Bounds = tuple[Bound, ...]
WRITES = frozenset({"Scatter", "ScatterElements", "ScatterND", "TensorScatter"})


def index_bounds(graph: Graph) -> Bounds:
    """Inputs that say which elements of an axis are gathered or written: the cells so used and the size of that axis.

    A gather is a sum over the axis that finds nothing for an index outside (`gather`), where ONNX has an error. What a
    model computes its indices from is not followed, nor are reads of which the cells are no plain slice.
    """
    entries: dict[str, Bound] = {}
    for op in graph.ops:
        for one in _written(op, graph) if isinstance(op, Opaque) else _gather_positions(op):
            if one[0] in graph.inputs:
                entries.setdefault(str(one), one)
    return tuple(entries.values())


def _gather_positions(op: Block) -> Iterator[Bound]:
    """Positions from which a block gathers."""
    for x in (x for e in op.point for x in walk(e)):
        for at, size in (_gathered(x, op), *_coordinates(x)):
            cells = _cells(op.reads[at], op.ranges) if at >= 0 else None
            if cells is not None:
                yield op.reads[at].tensor, cells, -size, size


def _written(op: Opaque, graph: Graph) -> Iterator[Bound]:
    """Positions at which an opaque node writes."""
    at = 2 if op.kind == "TensorScatter" else 1
    if op.kind not in WRITES or len(op.ins) <= at or not op.ins[at]:
        return
    given: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in NodeProto.FromString(op.node).attribute}
    data, index = graph.tensors[op.ins[0]].shape, graph.tensors[op.ins[at]].shape
    if op.kind == "ScatterND":
        yield from ((op.ins[at], (..., slice(c, c + 1)), -data[c], data[c]) for c in range(index[-1] if index else 0))
    elif op.kind != "TensorScatter":
        size = data[int(given.get("axis", 0))]
        yield op.ins[at], (...,), -size, size
    elif given.get("mode", b"linear") == b"linear":
        axis = int(given.get("axis", -2))
        yield op.ins[at], (...,), 0, data[axis] - graph.tensors[op.ins[1]].shape[axis] + 1


def check_indices(feeds: Mapping[str, Any], bounds: Iterable[Bound]) -> None:
    """Raise a TapestryError for the first index outside what it indexes; it counts from the back where it is negative."""
    for name, cells, least, size in bounds:
        a = feeds[name][cells]
        if a.size and not (least <= a.min() and a.max() < size):
            worst = a.min() if a.min() < least else a.max()
            raise TapestryError(
                f"input '{name}' has an index outside of what it indexes", why=f"{worst} where there are {size} elements"
            )


def _gathered(x: Expr, op: Block) -> tuple[int, int]:
    """Of ``where(where(i < 0, i + size, i) = v, data at v, 0)``: the read i and the size; of all else (-1, 0).

    A OneHot asks the same of its indices, which may be anything; what it takes does not depend on v.
    """
    if not isinstance(x, Call) or x.fn != "where" or not isinstance(x.args[0], Call) or x.args[0].fn != "eq":
        return -1, 0
    front, v = x.args[0].args if isinstance(x.args[0].args[1], Index) else x.args[0].args[::-1]
    if not isinstance(v, Index) or not v.aff.is_dim:
        return -1, 0
    if not any(isinstance(a, Arg) and _varies(op.reads[a.pos], str(v.aff)) for a in walk(x.args[1])):
        return -1, 0
    return _from_front(front, op.ranges.get(str(v.aff)))


def _from_front(front: Expr, size: float | None) -> tuple[int, int]:
    """Of ``where(i < 0, i + size, i)``: the read i and the size; of all else (-1, 0)."""
    if not isinstance(front, Call) or front.fn != "where" or size is None:
        return -1, 0
    test, moved, plain = front.args
    while isinstance(plain, Call) and plain.fn == "cast":
        plain = plain.args[0]
    if not isinstance(plain, Arg) or not isinstance(test, Call) or test.fn != "lt":
        return -1, 0
    if not isinstance(moved, Call) or moved.fn != "add" or not isinstance(moved.args[1], Const):
        return -1, 0
    return (plain.pos, int(size)) if moved.args[1].value == size else (-1, 0)


def _coordinates(x: Expr) -> list[tuple[int, int]]:
    """Of the row-major position that a GatherND picks, -cells - 1 where a coordinate is outside: the reads of the coordinates,
    and the sizes of their axes."""
    if not isinstance(x, Call) or x.fn != "where" or not isinstance(x.args[2], Const):
        return []
    ends = [t.args for t in walk(x.args[0]) if isinstance(t, Call) and t.fn == "lt" and isinstance(t.args[1], Const)]
    found = [one for place, size in ends if isinstance(size, Const) and (one := _from_front(place, size.value))[0] >= 0]
    return found if found and x.args[2].value == -math.prod(size for _, size in found) - 1 else []


def _varies(read: Read, name: str) -> bool:
    return any(name in dims_of(e) for e in read.index)


def _cells(read: Read, ranges: Mapping[str, int]) -> Cells | None:
    """The cells that a read of plain dimensions (times a step, from a start) has; None for any other."""
    out: list[slice] = []
    for e in read.index:
        if not e.terms:
            out.append(slice(e.const, e.const + 1))
        elif len(e.terms) == 1 and isinstance(e.terms[0][0], str) and e.terms[0][1] > 0:
            name, step = e.terms[0]
            out.append(slice(e.const, e.const + step * (ranges[str(name)] - 1) + 1, step))
        else:
            return None
    plain = read.other is None and not read.when and all(s.start >= 0 for s in out)
    return tuple(out) if plain else None


def _tables(graph: Graph) -> dict[str, int]:
    """For each input used as an index, the size of the smallest axis that it indexes."""
    out: dict[str, int] = {}
    for name, _, _, size in index_bounds(graph):
        out[name] = min(out.get(name, size), size)
    for op in graph.ops:
        if not isinstance(op, Block) or not op.reduce:
            continue
        sizes = op.ranges
        for x in (x for e in op.point for x in walk(e)):
            if isinstance(x, Call) and x.fn == "eq" and any(isinstance(a, Index) for a in x.args):
                index = next(a for a in x.args if isinstance(a, Index))
                size = sizes.get(str(index.aff)) if index.aff.is_dim else None
                for a in (y for arg in x.args for y in walk(arg) if isinstance(y, Arg)):
                    t = op.reads[a.pos].tensor
                    if size is not None:
                        out[t] = min(out.get(t, size), size)
    return out
