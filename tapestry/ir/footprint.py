"""What a read touches over boxes of points, by interval arithmetic: a hull that may be too large, and is never too small.

`ir.space` says the same exactly, by isl, and takes a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tapestry.ir.graph import Graph, Guard, Opaque, Read
from tapestry.ir.index import Aff, Floor, Mod, bounds

Boxes = np.ndarray  # int64 [devices, rank, 2]: half-open boxes, one per device


def hull(read: Read, box: Mapping[str, tuple[np.ndarray, np.ndarray]], shape: tuple[int, ...], n: int) -> Boxes:
    """What a read touches over a box of inclusive intervals, clipped to its tensor, for n devices."""
    out = np.zeros((n, len(shape), 2), np.int64)
    box = _tightened(read, box)
    for i, e in enumerate(read.index):
        whole, div = _under_guards(e, read.when)
        lo, hi = bounds(whole, box)
        out[:, i, 0] = np.minimum(np.maximum(-(-np.asarray(lo) // div), 0), shape[i])  # (np.clip takes much longer)
        out[:, i, 1] = np.maximum(np.minimum(np.asarray(hi) // div + 1, shape[i]), out[:, i, 0])
    return out


def _tightened(read: Read, box: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
    """The block without the points of a dimension at which a guard cannot hold, whatever the other dimensions are."""
    used = frozenset(a for e in read.index for a, _ in e.terms if isinstance(a, str))
    out = dict(box)
    for g in read.when:
        for name, c in g.aff.terms:
            if g.op != "ge" or not isinstance(name, str) or name not in used:
                continue
            rest = np.asarray(bounds(g.aff - Aff(((name, c),)), box)[1])  # at most: where the guard holds, c * name >= -rest
            lo, hi = out[name]
            out[name] = (np.maximum(lo, -(rest // c)), hi) if c > 0 else (lo, np.minimum(hi, rest // -c))
    return out


def _under_guards(e: Aff, when: tuple[Guard, ...]) -> tuple[Aff, int]:
    """(a, d) with e = a/d wherever the guards hold: one of them may say that the argument of a floor divides."""
    for atom, coef in e.terms:
        if isinstance(atom, Floor) and Guard(Aff(((Mod(atom.arg, atom.div), 1),)), "eq") in when:
            rest = Aff(tuple(t for t in e.terms if t[0] != atom), e.const)
            return rest * atom.div + atom.arg * coef, atom.div
    return e, 1


def opaque_boxes(op: Opaque, graph: Graph, block: Boxes) -> Iterator[tuple[int, str, Boxes]]:
    """(number, tensor, boxes) of what an opaque operation reads."""
    for k, t in enumerate(op.ins):
        if not t:
            continue
        shape = graph.tensors[t].shape
        out = np.zeros((len(block), len(shape), 2), np.int64)
        out[:, :, 1] = shape
        for i, axis in enumerate(op.in_axes[k]):
            if axis is not None:
                out[:, axis] = block[:, i]
        yield k, t, out
