"""Operands of an operation made small, large or 0 as a whole, and others where it does not look: what a mean or a variance of
them hides from single numbers.

Scales are powers of two, so that they round nothing. Small weights are scaled too, where the operation and its nodes read the
same ones: that their own numbers lead a result nowhere near some limit does not make an operation the model's.
"""

from __future__ import annotations

FACTORS = (-14, 14, None)  # exponents of what operands are multiplied by; None: by 0
ELSEWHERE = {-14: 64.0, None: -64.0}  # with which of these, and what the others are at least
PATTERN = 1021  # numbers that are drawn, over and over
LARGE = 40  # the exponent that a weight's largest number is brought to, and then its type's own largest
LARGEST = {"f64": 1023, "f32": 127, "f16": 15, "bf16": 127}
ROOM = {"f64": 23}  # no wider type has its sums: theirs stay inside it, in whatever order
