"""Random inputs that a model accepts: indices inside their tables, masks with every row partly open."""

from __future__ import annotations

from typing import Any

import numpy as np

from tapestry.errors import TapestryError
from tapestry.ir.expr import Arg, Call, Index, walk
from tapestry.ir.graph import Block, Graph
from tapestry.ir.types import FLOATS, STORED, Tensor, numpy_dtype

Array = np.ndarray[Any, Any]


def random_feeds(graph: Graph, seed: int) -> dict[str, Any]:
    """An array for every graph input, the same for the same seed."""
    rng = np.random.default_rng(seed)
    tables = _tables(graph)
    return {t: _random(graph.tensors[t], tables.get(t), rng) for t in graph.inputs}


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


def _tables(graph: Graph) -> dict[str, int]:
    """For each input used as an index, the size of the smallest axis that it indexes."""
    out: dict[str, int] = {}
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
