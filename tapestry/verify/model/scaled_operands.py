"""Operands of an operation made small, large or 0 as a whole, and others where it does not look: what a mean or a variance of
them hides from single numbers.

Scales are powers of two, so that they round nothing. Small weights are scaled too, where the operation and its nodes read the
same ones: that their own numbers lead a result nowhere near some limit does not make an operation the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tapestry.ir.graph import Graph
from tapestry.ir.types import FLOATS

Array = np.ndarray[Any, Any]
FACTORS = (-14, 14, None)  # exponents of what operands are multiplied by; None: by 0
ELSEWHERE = {-14: 64.0, None: -64.0}  # with which of these, and what the others are at least
PATTERN = 1021  # numbers that are drawn, over and over
LARGE = 40  # the exponent that a weight's largest number is brought to, and then its type's own largest
LARGEST = {"f64": 1023, "f32": 127, "f16": 15, "bf16": 127}
ROOM = {"f64": 23}  # no wider type has its sums: theirs stay inside it, in whatever order


def variants(
    graph: Graph,
    operands: Mapping[str, Array],
    weights: Mapping[str, Array],
    unseen: Mapping[str, Array],
    rng: np.random.Generator,
) -> Iterator[tuple[str, dict[str, Array]]]:
    """What is scaled, as a person reads it, and the scaled values by name; nothing that is finite becomes infinite.

    Cells that no cell of the operation looks at, if it looks where it says, are all large beside small and zero ones.
    """
    floats = {t: v for t, v in operands.items() if graph.tensors[t].dtype in FLOATS}
    for e in FACTORS:
        found = {t: np.asarray(v * np.asarray(0.0 if e is None else 2.0**e, v.dtype)) for t, v in floats.items()}
        if found and all(np.isfinite(found[t]).sum() == np.isfinite(v).sum() for t, v in floats.items()):
            others = {t: u for t, u in unseen.items() if t in found and u.any() and e in ELSEWHERE}
            for t, u in others.items():
                drawn = np.asarray(ELSEWHERE[e] * (1 + rng.random(PATTERN)), found[t].dtype)
                found[t] = np.where(u, np.resize(drawn, u.shape), found[t])
            said = ", ".join(found) + (" = 0" if e is None else f" times 2^{e}")
            yield said + (f", and others where {', '.join(others)} is not looked at" if others else ""), found
    for limit in (LARGE, None):
        found = dict[str, Array]()
        for t, v in weights.items():
            most, dtype = float(np.abs(v).max(initial=0)), graph.tensors[t].dtype
            largest = LARGEST[dtype] - ROOM.get(dtype, 0)
            if np.isfinite(most) and most > 0:
                wanted = largest if limit is None else min(limit, largest)
                found[t] = np.ldexp(v, wanted - 1 - int(np.floor(np.log2(most))) + (limit is None))
        if found:
            yield f"{', '.join(found)} brought to 2^{limit or 'the largest of its type'}", found
