"""Experts in groups (`part_routes`): kernels of each group, plans of them, and what is refused."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import ml_dtypes
import numpy as np
import pytest

import tapestry
from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.recognition.route_groups import unread
from tapestry.ir.recognition.selection_sum import routed
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.plan.cost.floor import least_seconds
from tapestry.plan.topology import parse_mesh, topology
from tapestry.rewrites import RULES
from tapestry.rewrites.core.rule import Refusal, parse_move
from tests.support.triton_kernels import poisoned_lanes, run_kernel  # noqa: F401 (a fixture for every test here)

RULE = RULES["part_routes"]


def text(
    rows: int = 6,
    top: int = 2,
    count: int = 4,
    width: int = 5,
    inner: int = 6,
    *,
    more: str = "",
    h: str = "t[i, n]",
    f: str = "a0 * sigmoid(a0)",
) -> str:
    """A mixture of experts: two routed products, a map between them, and the sum of each token's rows."""
    tokens = rows // top
    return f"""graph g
        input x: bf16[{tokens}, {width}]
        input w: bf16[{count}, {inner}, {width}]
        input u: bf16[{count}, {width}, {inner}]
        input e: i64[{rows}]
        input s: bf16[{tokens}, {top}]
        t: bf16[{rows}, {inner}] = op [i: {rows}, n: {inner} | v: {count} sum]
          reads x[floor((i)/{top}), m], w[v, n, m], e[i]
          let [m: {width} sum] cast(x, f32) * cast(w, f32)
          body where(eq(e, index(v)), let0, 0.0)
          then cast(acc0, bf16)
        h: bf16[{rows}, {inner}] = op [i: {rows}, n: {inner}]
          reads a0 = {h}
          body {f}
        y: bf16[{rows}, {width}] = op [i: {rows}, n: {width} | v: {count} sum]
          reads h[i, m], u[v, n, m], e[i]
          let [m: {inner} sum] cast(h, f32) * cast(u, f32)
          body where(eq(e, index(v)), let0, 0.0)
          then cast(acc0, bf16)
        z: bf16[{tokens}, {width}] = op [i: {tokens}, n: {width} | k: {top} sum]
          reads y[{top}*i + k, n], s[i, k]
          body cast(y, f32) * cast(s, f32)
          then cast(acc0, bf16)
        {more}
        output z{", more" if more else ""}"""


def mixed(values: dict[str, np.ndarray], top: int) -> np.ndarray:
    """What a mixture of experts is, in float64."""
    x, w, u, s = (values[k].astype(np.float64) for k in "xwus")
    t = np.einsum("rm,rnm->rn", np.repeat(x, top, axis=0), w[values["e"]])
    y = np.einsum("rm,rnm->rn", t / (1 + np.exp(-t)), u[values["e"]])
    return (y * s.reshape(-1, 1)).reshape(len(x), top, -1).sum(axis=1)


def values_of(graph: Graph, picks: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {t: graph.tensors[t].shape for t in graph.inputs if t != "e"}
    return {"e": picks} | {t: (rng.standard_normal(n) / 4).astype(ml_dtypes.bfloat16) for t, n in shapes.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("rows", "top", "count", "width", "inner"), [(14, 2, 4, 33, 20), (150, 3, 6, 17, 48), (128, 2, 2, 64, 64)]
)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("picks", ["any", "one", "none of the first"])
def test_groups_on_devices_of_their_own_that_leave_other_rows_alone(rows, top, count, width, inner, parts, picks) -> None:
    """Triton's kernels of each group write its own rows alone: the others are NaN here, and are never read."""
    if count % parts:
        pytest.skip("groups are of the same size")
    graph = RULE.apply(parse(text(rows, top, count, width, inner)), parse_move(f"part_routes@t{{parts={parts}}}"))
    rng = np.random.default_rng(1)
    low = count // parts if picks == "none of the first" else 0
    values = values_of(graph, np.full(rows, count - 1) if picks == "one" else rng.integers(low, count, rows))
    shape = {t: graph.tensors[t].shape for op in graph.ops for t in op.outs}
    values |= {t: np.full(shape[t], np.nan, ml_dtypes.bfloat16) for t in ("t.parts", "h.parts", "y.parts")}
    sums = np.zeros(shape["z"])
    for g in range(parts):
        for at, op in enumerate(graph.ops):
            assert isinstance(op, Block)
            block = tuple((g, g + 1) if d.name == "g" else (0, d.size) for d in op.space)
            last = at == len(graph.ops) - 1
            (got,) = run_kernel(graph, at, values, mode="partial" if last else "full", block=block)
            if last:
                sums += got.astype(np.float64).reshape(sums.shape)
            else:
                values[op.outs[0]][g] = got.reshape(values[op.outs[0]][g].shape)
        each = count // parts
        others = (values["e"] < g * each) | (values["e"] >= (g + 1) * each)
        assert np.isnan(values["h.parts"][g, others].astype(np.float32)).all()
    np.testing.assert_allclose(sums, mixed(values, top), rtol=3e-2, atol=3e-2)


def test_what_others_read_is_written_whole() -> None:
    """Rows of other groups are 0 where anybody might look at them."""
    graph = RULE.apply(parse(text()), parse_move("part_routes@t{parts=2}"))
    assert [unread(graph, op) is not None for op in graph.blocks] == [True, True, True, False]
    outside = parse(to_text(graph).replace("output z", "output z, t.parts"))
    assert [unread(outside, op) is not None for op in outside.blocks] == [False, True, True, False]


@pytest.mark.parametrize(
    ("case", "move", "why"),
    [
        (text(count=5), "part_routes@t{parts=2}", "not 2 groups of the same size"),
        (text(), "part_routes@t{parts=8}", "cannot be cut into 8"),
        (text(), "part_routes@h{parts=2}", "no matrix is picked"),
        (text(h="t[i, n], a1 = t[5 - i, n]", f="a0 + a1"), "part_routes@t{parts=2}", "several rows"),
        (text(more="more: bf16[6, 6] = op [a: 6, b: 6] reads t[a, b] body t + bf16(1.0)"), "part_routes@t{parts=2}", "not read by"),
    ],
)  # fmt: skip
def test_what_is_refused(case: str, move: str, why: str) -> None:
    graph = parse(case)
    with pytest.raises(TapestryError, match=why):
        RULE.apply(graph, parse_move(move))
    assert any(isinstance(found, Refusal) for found in RULE.find(graph)) or "8" in move or "@h" in move


@pytest.mark.parametrize("picks", ["any", "one", "few"])
def test_plans_of_groups_have_the_values_of_the_model(tmp_path, picks: str) -> None:
    """On the CPU, cut and whole."""
    graph = RULE.apply(parse(text(14, 2, 4, 33, 20)), parse_move("part_routes@t{parts=2}"))
    file = tmp_path / "groups.tap"
    file.write_text(to_text(graph))
    rng = np.random.default_rng(4)
    values = values_of(graph, {"any": rng.integers(0, 4, 14), "one": np.full(14, 2), "few": rng.integers(0, 3, 14)}[picks])
    for devices, pins in ((1, ()), (2, ("t.parts:g=2@d0", "y.parts:g=2@d0"))):
        plan = tapestry.compile(file, devices=devices, topology="cpu", pins=list(pins))
        got = plan.run(values)["z"].astype(np.float64)
        np.testing.assert_allclose(got, mixed(values, 2), rtol=3e-2, atol=3e-2)


def test_where_weights_decide_each_device_has_its_own_experts(tmp_path) -> None:
    """Two products of Mixtral's sizes for 64 tokens: reading the matrices is nearly all of the time."""
    file = tmp_path / "experts.tap"
    file.write_text(text(128, 2, 8, 4096, 14336))
    plan = tapestry.compile(file, devices=8, topology="h100")
    products = [op for op in plan.build.plan.graph.blocks if routed(op)]
    assert [(op.outs[0], op.dims[0].size, op.reduce[0].size) for op in products] == [("t.parts", 8, 1), ("y.parts", 8, 1)]
    assert sum(t["bytes"] for t in plan.report["transfers"]) < 64 << 20


@pytest.mark.parametrize("rows", [2, 8, 512])
def test_no_plan_is_under_the_floor_however_few_experts_rows_pick(tmp_path, rows: int) -> None:
    """A few rows read a few of the experts, and that is what the floor may count."""
    file = tmp_path / "experts.tap"
    file.write_text(text(rows, 2, 64, 1024, 2048))
    for devices in (1, 4):
        plan = tapestry.compile(file, devices=devices, topology="h100")
        floor = least_seconds(plan.build.plan.graph, topology(parse_mesh(str(devices)), "h100"))
        assert floor <= plan.report["objective_s"] * (1 + 1e-9)
        assert plan.report["lower_bound_s"] <= plan.report["objective_s"]
