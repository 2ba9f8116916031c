"""What a model does with its sizes: it is taken for one model only where it is one, whatever it computes with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto as T
from onnx import helper

import tapestry
from tapestry.compiler.saved_build import verify_build
from tapestry.errors import LawError, TapestryError
from tapestry.ir.many_sizes.size_formula import Region
from tapestry.lift import onnx_to_graph as lift
from tapestry.lift.sizes.model_sizes import SameModel, same_model
from tapestry.lift.sizes.size_columns import Grid
from tests.support.small_models import i64, net

N = helper.make_node
TABLE = [
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    5,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
    3,
]
LENGTH = N("Shape", ["x"], ["n"], name="n", start=0, end=1)
CUT = N("Slice", ["x", "zero", "end"], ["s"], name="cut")
LAST = N("Tanh", ["s"], ["y"], name="tanh")


def cut_at(*nodes: onnx.NodeProto, **constants: np.ndarray) -> onnx.ModelProto:
    """Rows of ``x`` up to ``end``, which some nodes make of the number ``n`` of its rows; then tanh."""
    return net([LENGTH, *nodes, CUT, LAST], {"x": (T.FLOAT, ["n", 4])}, {"y": T.FLOAT}, {"zero": i64(0), **constants})


def floats(value: float) -> np.ndarray:
    return np.array([value], np.float32)


def branch(name: str, test: str, yes: int | onnx.NodeProto, no: int | onnx.NodeProto, at: int) -> onnx.NodeProto:
    """``end`` is one number or another one, or what a node makes."""

    def graph(what: int | onnx.NodeProto, out: str) -> onnx.GraphProto:
        if not isinstance(what, int):
            return helper.make_graph([what], out, [], [helper.make_tensor_value_info(what.output[0], T.INT64, [1])])
        node = N("Constant", [], [out], value=helper.make_tensor(out, T.INT64, [1], [what]))
        return helper.make_graph([node], out, [], [helper.make_tensor_value_info(out, T.INT64, [1])])

    parts = {"then_branch": graph(yes, f"yes{at}"), "else_branch": graph(no, f"no{at}")}
    return N("If", [test], ["end" if at == 0 else f"end{at}"], name=name, **parts)


CASES = {
    "equal": (
        cut_at(
            N("Equal", ["n", "c"], ["t"], name="is_13"), N("Where", ["t", "a", "b"], ["end"], name="choice"),
            c=i64(13), a=i64(2), b=i64(5),
        ), [(1, 5), (5, 12), (13, 13), (14, 40)],
    ),
    "remainder": (
        cut_at(
            N("Mod", ["n", "seven"], ["r"], name="mod"), N("Equal", ["r", "c"], ["t"], name="is_3"),
            N("Where", ["t", "a", "n"], ["end"], name="choice"), seven=i64(7), c=i64(3), a=i64(1),
        ), [(1, 2), (3, 3), (4, 9), (10, 10), (11, 16), (17, 17), (18, 23), (24, 24), (25, 30), (31, 31), (32, 37), (38, 38), (39, 40)],
    ),
    "third": (cut_at(N("Div", ["n", "three"], ["end"], name="third"), three=i64(3)), [(1, 2), (3, 40)]),
    "between": (
        cut_at(N("Clip", ["n", "low", "high"], ["end"], name="clip"), low=np.int64(5), high=np.int64(20)),
        [(1, 5), (5, 20), (20, 40)],
    ),
    "table": (cut_at(N("Gather", ["table", "n"], ["end"], name="look"), table=i64(*TABLE)), [(1, 3), (3, 10), (11, 11), (12, 40)]),
    "tenths": (
        cut_at(
            N("Cast", ["n"], ["f"], name="f", to=T.FLOAT), N("Mul", ["f", "c"], ["m"], name="m"),
            N("Ceil", ["m"], ["u"], name="u"), N("Cast", ["u"], ["end"], name="end", to=T.INT64), c=floats(0.3),
        ), None,
    ),
    "there_and_back": (
        cut_at(
            N("Cast", ["n"], ["f"], name="f", to=T.FLOAT), N("Mul", ["f", "c"], ["m"], name="m"),
            N("Add", ["m", "d"], ["h"], name="h"), N("Cast", ["h"], ["end"], name="end", to=T.INT64), c=floats(0.5), d=floats(0.5),
        ), [(1, 40)],
    ),
    "branches": (
        cut_at(
            N("Squeeze", ["n"], ["k"], name="k"), N("Greater", ["k", "ten"], ["big"], name="big"),
            N("Equal", ["k", "c"], ["is17"], name="is17"),
            branch("outer", "big", branch("inner", "is17", 2, 3, 1), 4, 0), ten=np.int64(10), c=np.int64(17),
        ), [(1, 4), (4, 10), (11, 16), (17, 17), (18, 40)],
    ),
}  # fmt: skip


def same(model: onnx.ModelProto, tmp_path: Path, low: tuple[int, ...], high: tuple[int, ...], at: tuple[int, ...]) -> SameModel:
    onnx.save(model, tmp_path / "m.onnx")
    source = lift.read_model(tmp_path / "m.onnx", False)
    symbols = ["n", "m"][: len(low)]
    return same_model(source.model, lift.bound_inputs(source, symbols, {}, at), symbols, Region(low, high, {}), at)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [n for n, (_, pieces) in CASES.items() if pieces])
def test_a_model_is_one_exactly_where_its_sizes_say_so(name, tmp_path):
    model, pieces = CASES[name]
    for n in sorted({e + d for piece in pieces for e in piece for d in (-2, 0, 2)} & {*range(1, 41)}):
        found = same(model, tmp_path, (1,), (40,), (n,)).region
        assert n in range(found.low[0], found.high[0] + 1)
        around = [p for p in pieces if p[0] <= found.low[0] and found.high[0] <= p[1]]
        assert around, (n, found)
        low, high = around[0]
        if high - low > 2 and low + 1 < n < high - 1:
            assert (found.low[0], found.high[0]) == (low, high), (n, found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["equal", "table", "branches", "between", "tenths"])
def test_every_size_is_right(name, tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(CASES[name][0], path)
    c, peer = tapestry.compile(path, topology="cpu", shapes={"n": "9..21"}), onnxruntime.InferenceSession(path)
    for n in range(9, 22):
        x = np.random.default_rng(n).standard_normal((n, 4)).astype(np.float32)
        np.testing.assert_allclose(c.run({"x": x})["y"], peer.run(["y"], {"x": x})[0], rtol=1e-5, atol=1e-6)


def test_a_region_over_a_branch_is_refused(tmp_path):
    """Where every law of the plan holds, and the shapes at both ends are the model's."""
    onnx.save(CASES["equal"][0], tmp_path / "m.onnx")
    c, wide = tapestry.compile(tmp_path / "m.onnx", topology="cpu", shapes={"n": "14..21"}), Region((9,), (21,), {})
    assert c.sized is not None and len(c.sized.regions) == 1
    region = replace(c.sized.regions[0], region=wide)
    replace(c, sized=replace(c.sized, asked=wide, regions=(region,))).save(tmp_path / "b")
    with pytest.raises(LawError, match="another one at some sizes") as e:
        verify_build(tmp_path / "b")
    assert "n = 13" in e.value.why


def test_what_is_not_understood_names_its_node(tmp_path):
    """The largest of as many positions as there are rows."""
    model = cut_at(
        N("Squeeze", ["n"], ["k"], name="k"), N("Range", ["none", "k", "step"], ["at"], name="at"),
        N("ReduceMax", ["at"], ["end"], name="largest", keepdims=1), none=np.int64(0), step=np.int64(1),
    )  # fmt: skip
    found = same(model, tmp_path, (1,), (40,), (9,))
    assert found.region == Region((9,), (9,), {}) and "'largest'" in found.reasons[0]
    with pytest.raises(TapestryError, match=r"(?s)even 16 plans would not cover this range.*'largest'"):
        tapestry.compile(tmp_path / "m.onnx", topology="cpu", shapes={"n": "9..40"})


def test_a_mask_of_positions_is_one_model(tmp_path):
    """What is asked of positions in a tensor is asked by an operation on data, at every size."""
    model = net(
        [
            LENGTH, N("Squeeze", ["n"], ["k"], name="k"), N("Range", ["none", "k", "step"], ["at"], name="at"),
            N("Equal", ["at", "c"], ["t"], name="is_13"), N("Unsqueeze", ["t", "last"], ["u"], name="u"),
            N("Where", ["u", "a", "x"], ["y"], name="choice"),
        ], {"x": (T.FLOAT, ["n", 4])}, {"y": T.FLOAT},
        {"none": np.int64(0), "step": np.int64(1), "c": np.int64(13), "last": i64(1), "a": np.float32(3)},
    )  # fmt: skip
    assert same(model, tmp_path, (2,), (40,), (9,)).region == Region((2,), (40,), {})


def test_the_smaller_of_two_sizes_ends_where_the_other_is_smaller(tmp_path):
    model = net(
        [
            N("Shape", ["x"], ["n"], start=0, end=1, name="n"), N("Shape", ["z"], ["m"], start=0, end=1, name="m"),
            N("Min", ["n", "m"], ["end"], name="min"), CUT, LAST, N("Neg", ["z"], ["w"], name="neg"),
        ], {"x": (T.FLOAT, ["n", 4]), "z": (T.FLOAT, ["m", 4])}, {"y": T.FLOAT, "w": T.FLOAT}, {"zero": i64(0)},
    )  # fmt: skip
    found = same(model, tmp_path, (1, 1), (30, 30), (6, 20)).region
    assert found.high[0] <= found.low[1] and (6, 20) in found and found.high[0] - found.low[0] >= 6


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "f",
    [
        lambda n: n // 3,
        lambda n: (n + 5) // 8,
        lambda n: 4 * n - 3,
        lambda n: n * n + n,
        lambda n: 7,
        lambda n: (2 * n + 1) // 3,
    ],
)
def test_one_expression_is_seen_as_one_and_a_single_other_number_is_not(f):
    grid = Grid(Region((2,), (90,), {}), (20,))
    column = np.array([f(n) for n in range(2, 91)])
    assert grid.uniform(column).all()
    for n in (2, 19, 21, 22, 50, 89, 90):
        other = column.copy()
        other[n - 2] += 1
        found = grid.uniform(other)
        assert not found.all() and found[18], n


def right_at(model: onnx.ModelProto, path: Path, sizes: range) -> tapestry.Compiled:
    """A build for all sizes, which gives what onnxruntime does at each."""
    onnx.save(model, path)
    c, peer = (
        tapestry.compile(path, topology="cpu", shapes={"n": f"{sizes[0]}..{sizes[-1]}"}),
        onnxruntime.InferenceSession(path),
    )
    for n in sizes:
        x = np.random.default_rng(n).standard_normal((n, 4)).astype(np.float32)
        np.testing.assert_allclose(c.run({"x": x})["y"], peer.run(["y"], {"x": x})[0], rtol=1e-5, atol=1e-6)
    return c


def test_a_weight_that_one_region_has_and_another_has_not(tmp_path):
    """A branch that only small sizes take reads a row, and one that others take none."""
    branch = [helper.make_graph([node], node.name, [], [helper.make_tensor_value_info(node.output[0], T.FLOAT, ["n", 4])])
              for node in (N("Add", ["x", "row"], ["a"], name="plus"), N("Tanh", ["x"], ["b"], name="tanh"))]  # fmt: skip
    model = net(
        [
            LENGTH, N("Less", ["n", "nine"], ["t"], name="few"),
            N("If", ["t"], ["y"], name="choice", then_branch=branch[0], else_branch=branch[1]),
        ], {"x": (T.FLOAT, ["n", 4])}, {"y": T.FLOAT}, {"nine": i64(9), "row": np.arange(4, dtype=np.float32)},
    )  # fmt: skip
    c = right_at(model, tmp_path / "m.onnx", range(4, 17))
    assert c.sized is not None
    assert len({frozenset(r.build.plan.graph.weights) for r in c.sized.regions}) > 1


@pytest.mark.slow
def test_small_tables_that_follow_from_sizes_are_one_plan(tmp_path):
    """Rows of a table by positions, and a mask by them: of few they would be constants, and others at each size."""
    model = net(
        [
            LENGTH, N("Squeeze", ["n"], ["k"], name="k"), N("Range", ["none", "k", "step"], ["at"], name="at"),
            N("Mod", ["at", "three"], ["which"], name="which"), N("Gather", ["table", "which"], ["e"], name="rows"),
            N("Unsqueeze", ["at", "one"], ["column"], name="column"), N("Less", ["column", "at"], ["later"], name="mask"),
            N("Where", ["later", "never", "zero"], ["bias"], name="bias"), N("MatMul", ["bias", "x"], ["m"], name="product"),
            N("Add", ["m", "e"], ["y"], name="add"),
        ], {"x": (T.FLOAT, ["n", 4])}, {"y": T.FLOAT},
        {
            "none": np.int64(0), "step": np.int64(1), "three": np.int64(3), "table": np.arange(12, dtype=np.float32).reshape(3, 4),
            "one": i64(1), "never": np.float32(-2), "zero": np.float32(0.5),
        },
    )  # fmt: skip
    c = right_at(model, tmp_path / "m.onnx", range(1, 17))
    assert c.sized is not None and len(c.sized.regions) == 1


@pytest.mark.slow
def test_what_no_law_of_all_sizes_is_known_of_has_a_plan_for_each(tmp_path):
    model = net(
        [N("Resize", ["x", "", "", "to"], ["r"], name="r", coordinate_transformation_mode="asymmetric", nearest_mode="floor"), N(
            "Tanh", ["r"], ["y"], name="tanh"
        )], {"x": (T.FLOAT, ["n", 4])}, {"y": T.FLOAT}, {"to": i64(7, 4)},
    )  # fmt: skip
    c = right_at(model, tmp_path / "m.onnx", range(4, 17))
    assert c.sized is not None and "a product of a size" in str([r.about["ends"] for r in c.sized.regions])


@pytest.mark.parametrize(
    ("model", "region"),
    [
        (cut_at(N("Sub", ["n", "c"], ["d"]), N("Div", ["one", "d"], ["end"], name="d"), c=i64(14), one=i64(1)), (16, 40)),
        (cut_at(N("Gather", ["table", "n"], ["end"], name="look"), table=i64(*[3] * 31)), (3, 30)),
        (
            cut_at(N("Concat", ["n", "n"], ["m"], axis=0), N("ReduceMax", ["m", "all"], ["end"]), all=np.zeros(0, np.int64)),
            (1, 40),
        ),
    ],
)
def test_a_region_ends_where_a_node_has_no_value(model, region, tmp_path):
    found = same(model, tmp_path, (1,), (40,), (20,)).region
    assert (found.low[0], found.high[0]) == region


def test_a_product_of_sizes_is_one_expression_for_each_size_of_the_one_with_few(tmp_path):
    """Also for the largest of two: an expression that is not right there says nothing."""
    model = net(
        [helper.make_node("Reshape", ["x", "flat"], ["y"])],
        {"x": (T.FLOAT, ["n", "m", 4])},
        {"y": T.FLOAT},
        {"flat": i64(-1, 4)},
    )
    for at in ((7, 64), (8, 64)):
        region = same(model, tmp_path, (7, 16), (8, 256), at).region
        assert (at[0], 16) in region and (at[0], 256) in region
