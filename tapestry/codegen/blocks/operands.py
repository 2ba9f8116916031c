"""What factors of a product are multiplied as: the dtypes of matrix units, and the casts that lose nothing."""

from __future__ import annotations

from tapestry.ir.recognition.exponential import INT8
from tapestry.ir.types import FLOAT8, itemsize

HALVES = frozenset({"f16", "bf16"})
_EXACT_IN_HALF = FLOAT8 | INT8
EXACT_IN = {"f32": _EXACT_IN_HALF | HALVES, "f16": _EXACT_IN_HALF, "bf16": _EXACT_IN_HALF, "i32": INT8}
"""Casts that lose nothing, by what they give; 8 bits of integer are the significand of a bf16."""


def common_operand(kinds: frozenset[str]) -> str:
    """What a product of factors that are exactly of some dtypes is computed on: ``i8`` and ``f8`` (each factor with a kind of
    its own) where all have 8 bits, else the shorter of f16, bf16 and f32 that holds them all.
    """
    if kinds <= INT8:
        return "i8"
    if kinds <= FLOAT8:
        return "f8"
    return next((half for half in ("f16", "bf16") if kinds <= EXACT_IN[half] | {half}), "f32")


def operand_size(operand: str) -> int:
    """Bytes of an operand of `common_operand`."""
    return 1 if operand == "f8" else itemsize(operand)


def compute(dtype: str) -> str:
    """The dtype that values of a dtype are computed in."""
    return "f32" if dtype in HALVES else dtype
