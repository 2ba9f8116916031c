"""Operands of an operation made small, large or 0 as a whole: what a mean or a variance of them hides from single numbers.

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
LARGE = 40  # the exponent that a weight's largest number is brought to, and then its type's own largest
LARGEST = {"f64": 1023, "f32": 127, "f16": 15, "bf16": 127}


def variants(
    graph: Graph, operands: Mapping[str, Array], weights: Mapping[str, Array]
) -> Iterator[tuple[str, dict[str, Array]]]:
    """What is scaled, as a person reads it, and the scaled values by name; nothing that is finite becomes infinite."""
    floats = {t: v for t, v in operands.items() if graph.tensors[t].dtype in FLOATS}
    for e in FACTORS:
        found = {t: v * np.asarray(0.0 if e is None else 2.0**e, v.dtype) for t, v in floats.items()}
        if found and all(np.isfinite(found[t]).sum() == np.isfinite(v).sum() for t, v in floats.items()):
            yield ", ".join(found) + (" = 0" if e is None else f" times 2^{e}"), found
    for limit in (LARGE, None):
        found = dict[str, Array]()
        for t, v in weights.items():
            most, largest = float(np.abs(v).max(initial=0)), LARGEST[graph.tensors[t].dtype]
            if np.isfinite(most) and most > 0:
                wanted = largest if limit is None else min(limit, largest)
                found[t] = np.ldexp(v, wanted - 1 - int(np.floor(np.log2(most))) + (limit is None))
        if found:
            yield f"{', '.join(found)} brought to 2^{limit or 'the largest of its type'}", found
