"""Integers are taken out of what a plan says and put back in one order, and nothing else is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapestry.ir.graph import Dim, Graph
from tapestry.ir.many_sizes.size_formula import Formula
from tapestry.ir.many_sizes.symbolic_plan import flat, rebuilt
from tapestry.ir.program import Buffer
from tests.support.small_models import case

plain = st.integers(-9, 9) | st.booleans() | st.text(max_size=2) | st.floats(allow_nan=False) | st.none()
boxes = st.tuples(*[st.integers(0, 9)] * 2).map(lambda b: Buffer(name="b", tensor="t", dtype="f32", boxes=((b,),)))
values = st.recursive(
    plain | boxes | st.builds(Dim, st.text(max_size=2), st.integers(1, 9)),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_integers_are_put_back_in_the_order_they_were_taken_out(value: object) -> None:
    apart = flat(value)
    seen: list[int] = []

    def twice(n: int) -> int:
        seen.append(n)
        return 2 * n + 1

    other = rebuilt(value, twice)
    assert seen == apart.integers
    assert flat(other).integers == [2 * n + 1 for n in apart.integers] and flat(other).rest == apart.rest
    assert rebuilt(value, int) == value


def test_what_is_no_integer_stays_as_it_is() -> None:
    """Truth is no 1; a table is told by its keys, a tuple by its length, and a dataclass by its kind."""
    assert flat(True, 1.0, "a", None).integers == [] and flat(True) != flat(1) != flat(1.0)
    assert flat({"a": 1}) != flat({"b": 1}) and flat((1, 2)) != flat((1,), (2,)) and flat(Dim("i", 3)) != flat(("i", 3))
    assert flat({"b": 2, "a": 1}) == flat({"a": 1, "b": 2}) and flat({"b": 2, "a": 1}).integers == [1, 2]
    assert flat(0.0) != flat(-0.0)


@pytest.mark.parametrize("name", ["attention", "conv_chain", "norms", "opaques"])
def test_a_graph_of_other_sizes_differs_in_integers_alone(name: str) -> None:
    graph = case(name).graph
    sizes = {s for t in graph.tensors.values() for s in t.shape}
    other: Graph = rebuilt(graph, lambda n: n + 1000 if n in sizes else n)
    assert flat(other).rest == flat(graph).rest and flat(other).integers != flat(graph).integers
    assert other.outputs == graph.outputs and [op.outs for op in other.ops] == [op.outs for op in graph.ops]
    for t, made in other.tensors.items():
        assert made.shape == tuple(s + 1000 for s in graph.tensors[t].shape)
    renamed = replace(graph, name="another")
    assert flat(renamed).integers == flat(graph).integers and flat(renamed).rest != flat(graph).rest


@given(st.tuples(*[st.integers(-4, 4)] * 2), st.integers(-9, 9), st.integers(1, 5), st.integers(-3, 3), st.integers(-9, 9))
def test_a_multiple_of_a_formula_is_the_multiple_of_its_value(coefs, const, div, times, plus) -> None:
    formula = Formula(coefs, const, div)
    for sizes in ((1, 1), (2, 7), (9, 4)):
        assert formula.at(sizes) == (coefs[0] * sizes[0] + coefs[1] * sizes[1] + const) // div
        assert formula.scaled(times, plus).at(sizes) == times * formula.at(sizes) + plus
        again = formula.scaled(times, plus).scaled(2, -1)
        assert again.at(sizes) == 2 * (times * formula.at(sizes) + plus) - 1
