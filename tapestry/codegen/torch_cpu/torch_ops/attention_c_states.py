"""Attention by our own kernel (`native`): states of the softmax of scaled and biased scores, head by head."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.c import conv_c
from tapestry.codegen.torch_cpu.c.c_calls import CCall


def states_by_our_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(maximum, sum of weights, weighted values) of every row, the first two (outer, inner, rows); ``None`` without kernels.

    Args:
        q: (outer, inner, rows, depth), the last dimension adjacent; k and v with keys for rows.
        mask: added to the scores; (outer, inner, rows, keys), 1 where it is the same throughout.
        scale: of the products of queries and keys.
    """
    lib = native.library()
    if lib is None or q.dtype != torch.float32 or max(k.shape[2], q.shape[3]) > conv_c.DEEPEST:
        return None
    outer, inner, rows, depth = q.shape
    out = torch.empty(outer, rows, inner, depth).transpose(1, 2)  # heads side by side, as who reads it wants them
    top, total = torch.empty(outer, inner, rows), torch.empty(outer, inner, rows)
    bias = (0, 0, 0, 0) if mask is None else tuple(0 if n == 1 else s for s, n in zip(mask.stride(), mask.shape, strict=True))
    sizes = native.Attention(
        outer,
        inner,
        1,
        rows,
        k.shape[2],
        depth,
        *map(_strides, (q, k, v)),
        (ctypes.c_int64 * 4)(*bias),
        _strides(out),
        (ctypes.c_int64 * 3)(),
        0,
        scale,
    )
    at = (None if x is None else x.data_ptr() for x in (q, k, v, mask, out, top, total))
    CCall(lib.tapestry_attention, sizes, native.Heads(*at), (q, k, v, mask, out, top, total)).run()
    return top, total, out


def _strides(x: Tensor) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * 3)(*x.stride()[:3])
