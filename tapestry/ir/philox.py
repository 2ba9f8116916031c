"""Philox4x32-10, the counter-based generator (Salmon, Moraes, Dror and Shaw, SC'11), on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from tapestry.ir.types import Array


def philox(key: Any, stream: Any, draw: Any, word: Any, index: Any) -> Array:
    """Output word 0..3 for counter ``(index lo, index hi, draw, stream)`` and a 64-bit key, as i64 in [0, 2^32)."""
    u = np.uint64
    mask = u(0xFFFFFFFF)
    index, key = np.asarray(index).astype(u), np.asarray(key).astype(u)
    c = [index & mask, index >> u(32), np.asarray(draw).astype(u), np.asarray(stream).astype(u)]
    k0, k1 = key & mask, key >> u(32)
    with np.errstate(over="ignore"):
        for _ in range(10):
            p0, p1 = c[0] * u(0xD2511F53), c[2] * u(0xCD9E8D57)
            c = [(p1 >> u(32)) ^ c[1] ^ k0, p1 & mask, (p0 >> u(32)) ^ c[3] ^ k1, p0 & mask]
            k0, k1 = (k0 + u(0x9E3779B9)) & mask, (k1 + u(0xBB67AE85)) & mask
    return np.choose(np.asarray(word), np.broadcast_arrays(*c)).astype(np.int64)
