"""Models that are IR text, for what no ONNX operator lifts to: running states of monoids whose order matters.

``h[i] = a[i] * h[i-1] + b[i]`` in either direction, inclusive or not, along any axis, and a map behind it. The numbers are
such that every product and sum is exact in single precision, so that results are compared bit by bit.
"""

from __future__ import annotations

import random

import numpy as np

from tests.fuzz.generate.evaluate import Array

NAMES = {"float32": "f32", "float64": "f64"}
FACTORS = (1.0, -1.0, 0.5, 0.0, 2.0)


def running(rng: random.Random) -> tuple[str, dict[str, Array], dict[str, Array]]:
    """(text, inputs, outputs) of a linear recurrence."""
    dtype = np.dtype(rng.choice(list(NAMES)))
    shape = [rng.choice([1, 2, 3, 5]) for _ in range(rng.choice([1, 2, 3]))]
    axis = rng.randrange(len(shape))
    shape[axis] = rng.choice([1, 2, 3, 4, 5, 7, 8, 11])
    data = np.random.default_rng(rng.getrandbits(32))
    reverse, exclusive, mapped = (rng.random() < p for p in (0.4, 0.3, 0.5))
    a = data.choice(FACTORS[:3] if rng.random() < 0.7 else FACTORS, shape).astype(dtype)
    b = (data.integers(-8, 9, shape) / 8).astype(dtype)
    outs: dict[str, Array] = dict(zip(("h", "y"), _states(a, b, axis, reverse=reverse, exclusive=exclusive), strict=True))
    if mapped:
        outs["z"] = np.abs(outs["y"] - b)
    return _text(NAMES[dtype.name], shape, axis, reverse=reverse, exclusive=exclusive, mapped=mapped), {"a": a, "b": b}, outs


def _states(a: Array, b: Array, axis: int, *, reverse: bool, exclusive: bool) -> tuple[Array, Array]:
    """The product of the factors and the state, at every place, element by element.

    Whichever way a state runs, what it merges stands in the order of the axis: the last element acts last.
    """
    a, b = np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0)
    h, y = np.ones_like(a), np.zeros_like(b)
    n = len(a)
    for i in range(n):
        first, last = (i + exclusive, n) if reverse else (0, i + 1 - exclusive)
        for j in range(first, last):
            h[i], y[i] = h[i] * a[j], a[j] * y[i] + b[j]
    return np.moveaxis(h, 0, axis), np.moveaxis(y, 0, axis)


def _text(dtype: str, shape: list[int], axis: int, *, reverse: bool, exclusive: bool, mapped: bool) -> str:
    size = f"{dtype}[{', '.join(map(str, shape))}]"
    dims = ", ".join(f"x{k}: {n}" for k, n in enumerate(shape))
    at = ", ".join("j" if k == axis else f"x{k}" for k in range(len(shape)))
    here = ", ".join(f"x{k}" for k in range(len(shape)))
    ahead = f"j - x{axis}" if reverse else f"x{axis} - j"
    guard = f"when {ahead}{' - 1' if exclusive else ''} >= 0"
    lines = [
        "graph running", f"input a: {size}", f"input b: {size}",
        f"h: {size}, y: {size} = op [{dims} | j: {shape[axis]} affine]",
        f"  reads a[{at}] {guard} else 1.0, b[{at}] {guard} else 0.0", "  body a, b",
    ]  # fmt: skip
    if mapped:
        lines += [f"z: {size} = op [{dims}]", f"  reads y[{here}], b[{here}]", "  body abs(y - b)"]
    return "\n".join([*lines, f"output h, y{', z' if mapped else ''}"]) + "\n"
