"""Values that the user says to be finite: what no test for NaN chose any longer goes, is counted, and is made again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapestry.ir.graph import Block, Graph
from tapestry.ir.syntax.parser import parse
from tapestry.verify import interp
from tapestry.verify.rewriting import footprints
from tapestry.verify.rewriting.footprints import assume_finite, follows

TESTED = (
    "where(isnan(x), 0.0, x)",
    "where(isinf(x), 1.0, where(isnan(x + z), 2.0, x * z))",
    "where(or(isnan(x), gt(x, z)), z, x)",
    "where(and(isnan(x), gt(x, z)), z, x)",
    "where(and(gt(x, z), isinf(z)), z, x)",
)


def graph(first: str, second: str = "t + x") -> Graph:
    return parse(f"""graph g input x: f32[5] input z: f32[5]
t: f32[5] = op [i: 5]
  reads x[i], z[i] body {first}
y: f32[5] = op [i: 5]
  reads t[i], x[i] body {second}
output y""")


def evaluated(g: Graph, x: np.ndarray, z: np.ndarray) -> np.ndarray:
    return interp.run(g, {"x": x, "z": z})["y"]


@pytest.mark.parametrize("body", TESTED)
def test_a_test_goes_with_all_that_only_it_chose_and_is_counted(body):
    before = graph(body)
    after = assume_finite(before)
    assert isinstance(after.ops[0], Block) and not {"isnan", "isinf"} & {getattr(e, "fn", "") for e in after.ops[0].point}
    assert footprints.tests_dropped(after) == 1 and footprints.tests_dropped(before) == 0
    assert follows(before, after) and assume_finite(after) is after
    both = assume_finite(graph(body, "where(isnan(t), x, t)"))
    assert footprints.tests_dropped(both) == 2


@pytest.mark.parametrize("body", ["x * z", "where(gt(x, z), x, z)", "where(eq(x, x), x, z)"])
def test_a_graph_without_tests_is_the_same_graph(body):
    before = graph(body)
    assert assume_finite(before) is before and footprints.tests_dropped(before) == 0 and follows(before, before)
    assert not follows(before, graph("x - z")) and not follows(graph("x - z"), before)


finite = st.lists(st.floats(-1e3, 1e3, width=32), min_size=5, max_size=5).map(lambda v: np.array(v, np.float32))


@given(st.sampled_from(TESTED), finite, finite)
def test_finite_values_see_no_difference(body, x, z):
    before = graph(body, "where(isnan(t), x, t * x)")
    np.testing.assert_array_equal(evaluated(before, x, z), evaluated(assume_finite(before), x, z))
