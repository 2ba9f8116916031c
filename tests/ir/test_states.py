"""What partial sums may be rounded to before they travel, and which fields only count."""

from __future__ import annotations

import pytest

from tapestry.ir.graph import Block
from tapestry.ir.recognition.state import counted, native
from tapestry.ir.syntax.parser import parse

TEXT = """graph g input x: f32[6, 8] input b: f32[6] y: {to}[6] = op [i: 6 | k: 8 {monoid}]
  reads x[i, k], b[i]
  body {body} then {then}
output y"""


def summed(then: str, to: str = "bf16", monoid: str = "sum", body: str = "x") -> Block:
    """Sums of rows, and what is made of them."""
    (op,) = parse(TEXT.format(to=to, monoid=monoid, body=body, then=then)).ops
    assert isinstance(op, Block)
    return op


LINEAR = (
    "acc0",
    "acc0 + b",
    "b - acc0",
    "neg(acc0)",
    "acc0 * b",
    "acc0 / b",
    "(acc0 + b) * 0.5",
    "cast(acc0, f32)",
    "acc0 + acc0",
)
OTHER = ("exp(acc0)", "acc0 * acc0", "b / acc0", "max(acc0, b)", "exp(acc0) + b", "acc0 / acc0", "b * exp(acc0)")


@pytest.mark.parametrize("to", ["bf16", "f16"])
def test_sums_that_are_rounded_anyhow_travel_rounded(to):
    """Only what is scaled or shifted before it is rounded may be rounded before it is summed."""
    for e in LINEAR:
        assert native(summed(f"cast({e}, {to})", to)) == to, e
        assert native(summed(e, "f32")) == "", e
        assert native(summed(f"cast(exp(cast({e}, {to})), {to})", to)) == to, "what becomes of the rounded sum does not matter"
    for e in OTHER:
        assert native(summed(f"cast({e}, {to})", to)) == "", e


def test_a_sum_of_which_one_use_is_not_rounded_travels_whole():
    assert native(summed("cast(cast(cast(acc0, bf16), f32) + cast(cast(acc0, f16), f32), bf16)")) == ""
    assert native(summed("cast(cast(cast(acc0, bf16), f32) + acc0, bf16)")) == "bf16"
    assert native(summed("cast(cast(cast(acc0, bf16), f32) * exp(acc0), bf16)")) == ""
    assert native(summed("cast(b, bf16)")) == "", "no sum is seen"


@pytest.mark.parametrize("monoid", ["max", "prod"])
def test_only_sums_are_rounded(monoid):
    assert native(summed("cast(acc0, bf16)", monoid=monoid)) == ""


def test_a_field_counts_where_every_point_adds_the_same_number():
    assert counted(summed("acc1 / acc0", "f32", "sums2", "1.0, x")) == {0: 1.0}
    assert counted(summed("acc1 / acc0", "f32", "sums2", "x, 0.5")) == {1: 0.5}
    assert counted(summed("acc0", "f32", "sum", "x")) == {} == counted(summed("acc0", "f32", "max", "1.0"))
    assert native(summed("cast(acc1, bf16)", monoid="sums2", body="1.0, x")) == "", "a count is not rounded"
