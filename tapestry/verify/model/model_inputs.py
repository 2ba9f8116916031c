"""Awkward numbers among a model's inputs."""
# pyright: basic

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tapestry.onnx_eval.value_kinds import is_array

SHARE = 0.02  # of an input's cells
DENORMAL = {"float64": 1e-310, "float32": 1e-40, "float16": 1e-6, "bfloat16": 1e-40}


def awkward(feeds: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The inputs with infinities, NaN, -0 and denormal numbers among their floats; empty where there are no floats."""
    rng = np.random.default_rng((seed, 1))
    out, some = dict(feeds), False
    for name, a in feeds.items():
        if is_array(a) and a.dtype.name in DENORMAL and a.size:
            small = DENORMAL[a.dtype.name]
            numbers = np.array([np.inf, -np.inf, np.nan, -0.0, small, -small]).astype(a.dtype)
            changed = a.copy().reshape(-1)
            at = rng.choice(a.size, max(1, int(a.size * SHARE)), replace=False)
            changed[at] = rng.choice(numbers, len(at))
            out[name], some = changed.reshape(a.shape), True
    return out if some else {}
