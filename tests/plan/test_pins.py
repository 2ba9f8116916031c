"""Pins: what the model's author named is cut as asked, in whatever form of the graph is planned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

import tapestry
from tapestry.errors import PlanError
from tapestry.plan.requests import held
from tapestry.plan.strategy import Pin
from tapestry.plan.topology import parse_mesh
from tests.support.programs.decoder_net import INNER, LAYERS, MEGATRON, TOKENS, decoder
from tests.support.small_models import N, net


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of two layers."""
    path = tmp_path_factory.mktemp("pins") / "m.onnx"
    onnx.save(decoder(), path)
    return path


def cuts(plan: tapestry.Compiled, node: str, tensor: str = "") -> list[tuple[str | None, ...]]:
    """What cuts the operations that have a node among their sources, or that write a tensor."""
    of = plan.build.plan
    found = zip(of.graph.ops, of.strategies, strict=True)
    return [s.dims for op, s in found if (tensor in op.outs if tensor else node in op.source)]


def test_a_pin_keeps_fusion(model: Path):
    how = {"mesh": {"tp": 2}, "topology": "h100", "target": "triton:sm90"}
    free, pinned = tapestry.compile(model, **how), tapestry.compile(model, pins=MEGATRON, **how)
    rules = {str(m).split("@")[0] for m in pinned.build.moves}
    assert rules, "nothing is fused"
    assert rules <= {str(m).split("@")[0] for m in free.build.moves} | {"without"}
    unfused = tapestry.compile(model, pins=MEGATRON, without=["inline_map", "fuse_contraction", "fuse_sums", "lay_out"], **how)
    assert pinned.report["objective_s"] < unfused.report["objective_s"]
    for k in range(LAYERS):
        for node, reduced in ((f"l{k}.u.mm", False), (f"l{k}.d.mm", True)):
            (op,) = [op for op in pinned.build.plan.graph.blocks if node in op.source]
            (cut,) = cuts(pinned, node)
            assert op.ranges[str(cut[0])] == INNER
            assert (cut[0] in {d.name for d in op.reduce}) == reduced


def test_what_would_be_fused_away_stays_where_it_is_pinned(tmp_path: Path):
    nodes = [N("Add", ["x", "x"], ["a"], "a"), N("Tanh", ["a"], ["y"], "y"), N("Transpose", ["a"], ["t"], "t", perm=[1, 0])]
    onnx.save(
        net([*nodes, N("Exp", ["t"], ["z"], "z")], {"x": (T.FLOAT, [64, 32])}, {"y": T.FLOAT, "z": T.FLOAT}),
        tmp_path / "m.onnx",
    )
    how = {"mesh": {"tp": 2}, "topology": "h100", "target": "triton:sm90"}
    assert not cuts(tapestry.compile(tmp_path / "m.onnx", **how), "a", "a"), "it is not fused away"
    for dim in ("x0", "x1"):
        assert cuts(tapestry.compile(tmp_path / "m.onnx", pins=[f"a:{dim}=tp"], **how), "a", "a") == [(dim,)]


def test_products_side_by_side_keep_the_pins_of_all(model: Path):
    how = {"mesh": {"tp": 2}, "topology": "h100", "target": "triton:sm90"}
    pins = [f"l{k}.{n}:n=tp" for k in range(LAYERS) for n in "qkv"]
    plan = tapestry.compile(model, pins=pins, **how)
    assert any("fuse_sums" in str(m) for m in plan.build.moves)
    assert cuts(plan, "l0.k.mm") == [("n",)]
    plan = tapestry.compile(
        model, pins=[*pins[:2], "l0.v:m=tp", *pins[3:]], **how
    )  # of one operation they would not be the same
    assert (cuts(plan, "l0.k.mm"), cuts(plan, "l0.v.mm")) == ([("n",)], [("m",)])


def test_several_axes_in_one_pin_and_none(model: Path):
    plan = tapestry.compile(
        model, mesh="dp=2,tp=2", pins=["l0.u.mm:i=dp,n=tp", "l0.d.mm:replicated", "l1.u.mm:replicated@tp", "l1.u.mm:i=dp"]
    )
    assert cuts(plan, "l0.u.mm") == [("i", "n")]
    assert cuts(plan, "l0.d.mm") == [(None, None)]
    assert cuts(plan, "l1.u.mm") == [("i", None)]
    ids = np.arange(TOKENS)[None] % 32
    one = tapestry.compile(model, devices=1).run({"ids": ids})
    np.testing.assert_allclose(plan.run({"ids": ids})["y"], one["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ("l0.u.mm:replicated@pp", "no mesh axis 'pp'"),
        ("l0.u.mm:n=tp,replicated@tp", "mesh axis 'tp' is pinned twice"),
        ("l0.u.mm:n=", "is not a pin"),
        ("l0.u.mm:", "is not a pin"),
        ("replicated", "is not a pin"),
    ],
)
def test_a_pin_that_cannot_be_is_refused(pin: str, said: str, model: Path):
    with pytest.raises(PlanError, match=said):
        tapestry.compile(model, mesh="dp=2,tp=2", pins=[pin])


def test_a_form_without_the_operation_keeps_no_pin():
    assert held({"gone": (Pin("n", 0),)}, [], parse_mesh("2")) is None
    assert held({}, [], parse_mesh("2")) == {}
