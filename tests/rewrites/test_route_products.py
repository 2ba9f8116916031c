"""Rows times the matrix that each picks: what `route_products` makes of it, how targets compute it, and what it refuses."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

import tapestry
from tapestry.errors import TapestryError
from tapestry.ir.recognition.selection_sum import routed
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.rewrites import RULES
from tapestry.rewrites.core.rule import Refusal, parse_move
from tests.support.lifting import build, data, node
from tests.support.triton_kernels import check, poisoned_lanes, source_of  # noqa: F401 (a fixture for every test here)

RULE = RULES["route_products"]


def text(*, place: str = "e", of: str = "e[x0]", shape: str = "[5]", x: str = "x[i, m]", more: str = "") -> str:
    return f"""graph g
        input x: f32[5, 3]
        input w: f32[4, 6, 3]
        input e: i64{shape}
        t: f32[5, 6, 3] = op [x0: 5, x1: 6, x2: 3 | v: 4 sum]
          reads w[v, x1, x2], {of}
          body where(eq({place}, index(v)), w, 0.0)
        y: f32[5, 6] = op [i: 5, n: 6 | m: 3 sum]
          reads {x}, t[i, n, m]
          body x * t
          then max(acc0, 0.0)
        {more}
        output y{", z" if more else ""}"""


def experts(rows: int, count: int, width: int, wide: int, top: int, seed: int = 0):
    """A mixture of experts as exporters write it: a Gather of matrices, and a batched product."""
    rng = np.random.default_rng(seed)
    feeds = {"x": data(rows, width, seed=seed), "e": rng.integers(0, count, (rows, top))}
    w = data(count, wide, width, seed=seed + 1)
    nodes = [
        node("Reshape", "e flat", "places"), node("Gather", "w places", "picked", axis=0),
        node("Unsqueeze", "x ones", "apart"), node("Expand", "apart wide", "many"),
        node("Reshape", "many columns", "column"), node("MatMul", "picked column", "y"),
    ]  # fmt: skip
    consts = {
        "w": w, "flat": np.array([-1]), "ones": np.array([1]), "wide": np.array([rows, top, width]),
        "columns": np.array([rows * top, width, 1]),
    }  # fmt: skip
    want = np.einsum("sm,skom->sko", feeds["x"].astype(np.float64), w.astype(np.float64)[feeds["e"]])
    return build(nodes, feeds, ["y"], consts), feeds, want.reshape(rows * top, wide, 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rows", "count", "width", "wide", "top"), [(7, 5, 9, 11, 2), (3, 8, 17, 5, 1), (33, 3, 6, 10, 3)])
@pytest.mark.parametrize("cut", ["", "y:v={}@d0", "y:i={}@d0", "y:b0={}@d0"])
def test_rows_times_the_matrix_that_each_picks_on_any_cut(tmp_path, rows, count, width, wide, top, cut) -> None:
    model, feeds, want = experts(rows, count, width, wide, top)
    for devices in (2, 3) if cut else (1,):
        plan = tapestry.compile(model, devices=devices, topology="cpu", pins=[cut.format(devices)] if cut else ())
        assert any(routed(op) for op in plan.build.plan.graph.ops if hasattr(op, "inner"))
        np.testing.assert_allclose(plan.run(feeds)["y"], want, rtol=1e-4, atol=1e-5)


def test_what_one_row_does_not_pick_does_not_touch_it() -> None:
    """Infinite weights of one expert, and infinite rows, stay with who multiplies them."""
    model, feeds, _ = experts(6, 4, 5, 7, 1)
    feeds["e"][:] = [[0], [1], [2], [0], [1], [2]]
    feeds["x"][1, 2], feeds["x"][4, 0] = np.inf, np.nan
    w = helper.make_tensor("w", 1, [4, 7, 5], np.where(np.arange(4)[:, None, None] == 3, np.inf, data(4, 7, 5, seed=3)).ravel())
    next(t for t in model.graph.initializer if t.name == "w").CopyFrom(w)
    got = tapestry.compile(model, devices=2, topology="cpu", pins=["y:v=2@d0"]).run(feeds)["y"][..., 0]
    assert np.isfinite(got[[0, 2, 3, 5]]).all() and not np.isfinite(got[[1, 4]]).any()


def test_a_matrix_for_each_row_is_never_written() -> None:
    """512 rows of a table of 8 would be 64 times the table."""
    model, _, _ = experts(512, 8, 64, 96, 1)
    plan = tapestry.compile(model, topology="cpu")
    assert max(np.prod(t.shape) for t in plan.build.plan.graph.tensors.values()) <= 512 * 96


def test_it_costs_one_matrix_for_each_row_and_reads_each_matrix_once() -> None:
    few, many = (tapestry.compile(experts(512, n, 256, 256, 1)[0], topology="h100").report["objective_s"] for n in (2, 4))
    assert many < 1.5 * few, "twice the experts, as many products"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("body", ["x * t", "t * x"])
@pytest.mark.parametrize(("rows", "columns"), [(5, 6), (70, 9), (11, 75), (128, 64)])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_triton_sorts_rows_and_multiplies_each_tile_by_one_matrix(kind: str, rows: int, columns: int, body: str) -> None:
    """Rows are tiles' rows or their columns, as the product has them; a matrix may have no row, or all."""
    case = text().replace("x * t", body).replace("w, 0.0)", "w, f32(0.0))").replace("acc0, 0.0)", "acc0, f32(0.0))")
    case = case.replace("i64", "int").replace("f32", "K").replace("5", str(rows)).replace("6", str(columns)).replace("K", kind)
    after = RULE.apply(parse(case.replace("int", "i64")), parse_move("route_products@y{tensor=t}"))
    rng = np.random.default_rng(2)
    numpy = np.float32 if kind == "f32" else ml_dtypes.bfloat16
    values = {"x": rng.standard_normal((rows, 3)).astype(numpy), "w": rng.standard_normal((4, columns, 3)).astype(numpy)}
    far = np.where(np.arange(rows) % 5 == 2, 3 - (1 << 32), 3)  # places that only their low 32 bits make one
    for picks in (rng.integers(0, 4, rows), np.full(rows, 3), rng.integers(0, 2, rows) * 3, far):  # of all, of one, of two
        check(to_text(after), {**values, "e": picks})
    assert "y_order(" in (source := source_of(to_text(after))) and "for v in" not in source


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (text(place="e + 1"), "computed"),
        (text(of="e[x1]", shape="[6]"), "varies along"),
        (text(of="e[x2]", shape="[3]"), "varies along"),
        (text(x="a0 = x[0, m]"), "several rows alike"),
        (text(more="z: f32[5, 6, 3] = op [a: 5, b: 6, c: 3] reads t[a, b, c] body t + 1.0"), "needed elsewhere"),
    ],
)  # fmt: skip
def test_what_is_refused(case: str, why: str) -> None:
    graph = parse(case.replace("body x * t", "body a0 * t") if "a0 = x" in case else case)
    with pytest.raises(TapestryError, match=why):
        RULE.apply(graph, parse_move("route_products@y{tensor=t}"))
    assert any(isinstance(found, Refusal) for found in RULE.find(graph))


def test_a_table_of_rows_is_looked_up_first() -> None:
    """An embedding times one matrix: the look-up stays what it is."""
    model = build(
        [node("Gather", "t e", "g"), node("MatMul", "g w", "y")], {"e": np.array([1, 3, 0])}, ["y"],
        {"t": data(5, 7), "w": data(7, 4, seed=2)},
    )  # fmt: skip
    graph = tapestry.compile(model, topology="cpu").build.plan.graph
    assert not any(routed(op) for op in graph.ops if hasattr(op, "inner"))
