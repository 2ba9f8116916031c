"""Exact cover and disjointness of boxes by a coordinate sweep: another algorithm than the planner's, on purpose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapestry.ir.kernel import Box

Point = tuple[int, ...]
Coverage = tuple[Point | None, Point | None]


def coverage(boxes: Sequence[Box], target: Box) -> Coverage:
    """(a point of ``target`` in no box, a point of ``target`` in two boxes), ``None`` where there is none.

    Space is cut at every box edge into cells on which membership is constant; each box counts its cells.
    """
    if any(lo >= hi for lo, hi in target):
        return None, None
    cuts = [sorted({lo, hi, *(min(max(c, lo), hi) for b in boxes for c in b[axis])}) for axis, (lo, hi) in enumerate(target)]
    places = [{c: i for i, c in enumerate(axis)} for axis in cuts]
    count = np.zeros([len(c) - 1 for c in cuts], np.int32)
    for b in boxes:
        place: list[slice] = []
        for axis, (lo, hi) in enumerate(target):
            p, q = max(b[axis][0], lo), min(b[axis][1], hi)
            if p >= q:
                break
            place.append(slice(places[axis][p], places[axis][q]))
        else:
            count[tuple(place)] += 1
    return _corner(count == 0, cuts), _corner(count > 1, cuts)


def _corner(where: np.ndarray, cuts: list[list[int]]) -> Point | None:
    cells = np.argwhere(where)
    return tuple(cuts[a][int(i)] for a, i in enumerate(cells[0])) if len(cells) else None
