"""The list of scalar primitives (`ir.expr.PRIMITIVES`), and that whoever spells them spells them all."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tapestry.codegen.torch_cpu.base import scalars, state_merges
from tapestry.codegen.torch_cpu.c import print_c
from tapestry.codegen.triton.task import primitives
from tapestry.ir.expr import PRIMITIVES, Arg, call
from tapestry.ir.monoid import MONOIDS
from tapestry.verify import interp

OF_FLOATS = {f for f, p in PRIMITIVES.items() if p.result == "float"} | {"isnan", "isinf", "philox"}
SPELLINGS = {"verifier": interp.NUMPY, "torch": scalars.TABLE, "triton": primitives.ROWS}


@pytest.mark.parametrize("who", SPELLINGS)
def test_every_primitive_is_spelled(who: str) -> None:
    assert set(SPELLINGS[who]) == set(PRIMITIVES) - {"cast"}  # a cast is no row: it takes a dtype


def test_wide_unsigned_integers_have_what_integers_have() -> None:
    assert set(scalars.UNSIGNED_ROWS) == set(PRIMITIVES) - OF_FLOATS - {"cast"}


def test_c_spells_nothing_else_and_takes_as_many_arguments() -> None:
    tables = (print_c.FLOAT, print_c.LIBRARY, print_c.WHOLE, print_c.TRUTH, print_c.COMPARE)
    rows: Iterable[tuple[str, str]] = (row for table in tables for row in table.items())
    for fn, text in rows:
        assert text.format(*(f"<{k}>" for k in range(PRIMITIVES[fn].arity))).count("<") >= PRIMITIVES[fn].arity, fn


def test_arguments_change_places_where_the_list_says_so() -> None:
    for fn, p in PRIMITIVES.items():
        if p.arity == 2 and p.result != "float":
            args = [6, 1]
            forward, back = (interp.NUMPY[fn](*(interp.np.asarray(x) for x in a)) for a in (args, args[::-1]))
            assert p.commutative == bool(forward == back), fn
            assert call(fn, Arg(0, "i32"), Arg(1, "i32")).dtype == ("bool" if p.result == "bool" else "i32")


def test_a_dense_operator_may_reorder_so_it_needs_a_commutative_monoid() -> None:
    assert {n for n in MONOIDS if state_merges.dense(n)} == {n for n, m in MONOIDS.items() if m.commutative}
