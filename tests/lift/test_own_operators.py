"""Operators of a domain of the user's own: by a file of IR text and by a Python function, lifted, planned, run and verified."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, save

import tapestry
from tapestry.errors import ModelError, TapestryError
from tapestry.lift import own_operators, registry
from tapestry.onnx_eval import own_nodes
from tests.support.command_line import document, run
from tests.support.paths import ROOT

RNG = np.random.default_rng(3)
PAGE = (ROOT / "docs" / "howto" / "operator.md").read_text()
FROM_PAGE = re.search(r"```operators acme.tap\n(.*?)```", PAGE, re.DOTALL)[1]
GATED = f"""
# a gate: the first half of the columns times the sigmoid of the second, scaled
{FROM_PAGE}
operator "com.acme" Gated {{alpha = 1.0}}
graph of_one_row
input x: T[N]
y: T[N] = op [n: N]
  reads x[n]
  body x * T(alpha)
output y

operator "com.acme" Extent
graph extent
input x: f32[B, N]
top: f32[B], low: f32[B] = op [b: B | n: N max.min]
  reads x[b, n]
  body x, x
  then acc0 / f32(N), acc1
output top, low
"""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test defines is gone after it, as in another process."""
    yield
    for table in (own_operators.OWN, registry.LIFTERS, own_nodes.EVALUATORS):
        for key in [k for k in table if k[0] == "com.acme"]:
            del table[key]


@pytest.fixture
def operators(tmp_path: Path) -> Path:
    (tmp_path / "acme.tap").write_text(GATED)
    return tmp_path / "acme.tap"


def model(path: Path, nodes: list, shapes: dict[str, list[int]], outputs: list[str]) -> Path:
    ins = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    outs = [helper.make_empty_tensor_value_info(o) for o in outputs]
    graph = helper.make_graph(nodes, "g", ins, outs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.acme", 1)]
    save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def gated(x: np.ndarray, alpha: float) -> np.ndarray:
    half = x.shape[1] // 2
    return x[:, :half] / (1 + np.exp(-alpha * x[:, half:]))


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "up"),
        helper.make_node("Gated", ["h"], ["g"], "gate", domain="com.acme", alpha=1.5),
        helper.make_node("Extent", ["g"], ["top", "low"], "extent", domain="com.acme"),
        helper.make_node("Neg", ["low"], ["y"], "neg"),
    ]
    return model(tmp_path / "mlp.onnx", nodes, {"x": [8, 16], "w": [16, 32]}, ["y", "top"])


def expected(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    g = gated(x @ w, 1.5)
    return -g.min(1), g.max(1) / 16


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [1, 4])
def test_a_file_of_operators(mlp: Path, operators: Path, devices: int) -> None:
    build = tapestry.compile(mlp, ops=operators, devices=devices)
    x, w = (RNG.standard_normal(s).astype(np.float32) for s in ((8, 16), (16, 32)))
    out = build.run({"x": x, "w": w})
    for name, ref in zip(("y", "top"), expected(x, w), strict=True):
        np.testing.assert_allclose(out[name], ref, rtol=1e-5, atol=1e-6)
    assert all(type(op).__name__ == "Block" for op in build.build.plan.graph.ops)
    assert build.report["ops"] <= 4 and build.verify()["model"] > 0  # fused with what is around it, and held to the file
    assert build.check({"x": x, "w": w})["passed"]


def test_each_rank_has_its_definition(operators: Path, tmp_path: Path) -> None:
    node = helper.make_node("Gated", ["x"], ["y"], "scale", domain="com.acme", alpha=-2.0)
    build = tapestry.compile(model(tmp_path / "row.onnx", [node], {"x": [6]}, ["y"]), ops=[operators])
    np.testing.assert_allclose(build.run({"x": np.arange(6, dtype=np.float32)})["y"], -2.0 * np.arange(6))


@pytest.mark.parametrize(
    ("shape", "attributes", "why"),
    [
        ([4, 7], {}, "N == 2 * H, and these are 7 and 6"),
        ([4, 8, 2], {}, "x' is T[B, N]"),
        ([4, 8], {"beta": 1.0}, "no attribute 'beta'"),
    ],
)
def test_what_no_definition_is_for(
    operators: Path, tmp_path: Path, shape: list[int], attributes: dict[str, float], why: str
) -> None:
    node = helper.make_node("Gated", ["x"], ["y"], "gate", domain="com.acme", **attributes)
    with pytest.raises(ModelError) as e:
        tapestry.compile(model(tmp_path / "m.onnx", [node], {"x": shape}, ["y"]), ops=operators)
    assert "gate" in e.value.where and why in e.value.why and "acme.tap" in e.value.why


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("x * T(alpha)", "x * T(alphq)", "expected a number"),
        ("input x: T[B, N]", "input x: t[B, N]", "that begins with a capital"),
        ("reads x[b, h + H]", "reads x[b, h + N]", "reads_inside"),
        ("output y\n\n", "output x\n\n", "block operations over its inputs"),
        ('"com.acme" Extent', '"ai.onnx.ml" Extent', "not a domain of your own"),
        ("size H = N // 2", "size H = N // 0", "division by 0"),
    ],
)
def test_a_file_that_is_wrong(mlp: Path, tmp_path: Path, old: str, new: str, what: str) -> None:
    bad = tmp_path / "bad.tap"
    bad.write_text(GATED.replace(old, new, 1))
    assert bad.read_text() != GATED
    with pytest.raises(TapestryError, match=r"bad\.tap") as e:
        tapestry.compile(mlp, ops=bad)
    assert what in str(e.value)


def test_a_python_function(tmp_path: Path) -> None:
    @tapestry.operator("com.acme", "Rotate")
    def rotate(x, by=1):
        (n,) = x.shape
        return f"""graph rotate
            input x: {x.dtype}[{n}]
            y: {x.dtype}[{n}] = op [i: {n}] reads x[((i + {by}) mod {n})] body x
            output y"""

    node = helper.make_node("Rotate", ["x"], ["y"], "turn", domain="com.acme", by=2)
    build = tapestry.compile(model(tmp_path / "m.onnx", [node], {"x": [5]}, ["y"]), devices=2)
    np.testing.assert_array_equal(build.run({"x": np.arange(5, dtype=np.float32)})["y"], np.roll(np.arange(5), -2))
    with pytest.raises(ModelError, match="unexpected keyword argument 'away'"):
        other = helper.make_node("Rotate", ["x"], ["y"], "turn", domain="com.acme", away=2)
        tapestry.compile(model(tmp_path / "n.onnx", [other], {"x": [5]}, ["y"]))


def test_another_definition_takes_the_place(operators: Path, tmp_path: Path) -> None:
    """The reference of an operator that was defined anew is the new one, also where it was asked before."""
    node = helper.make_node("Gated", ["x"], ["y"], "scale", domain="com.acme")
    path = model(tmp_path / "row.onnx", [node], {"x": [6]}, ["y"])
    build = tapestry.compile(path, ops=operators)
    operators.write_text(GATED.replace("body x * T(alpha)", "body x + T(alpha)"))
    own_operators.load_operators(operators)
    with pytest.raises(TapestryError, match="not the model's"):
        build.verify()
    assert tapestry.compile(path).verify()["model"] > 0


@pytest.mark.slow
def test_the_command_line(mlp: Path, operators: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.plan"
    status, _, said = run("compile", mlp, "-o", out)
    assert status == 2 and "unknown operator domain" in said and "--ops FILE" in said
    assert run("compile", mlp, "-o", out, "--devices", "2", "--ops", operators, "-q")[0] == 0
    own_operators.OWN.clear()
    own_nodes.EVALUATORS.clear()
    assert run("run", out, "--check")[0] == 2  # nothing says what the nodes are
    assert document("verify", out, "--ops", operators)["laws"]["model"] > 0
    checked = document("run", out, "--check", "--ops", operators)
    assert checked["passed"] and "onnx.reference" in checked["reference"]
    assert run("doctor", mlp, "--ops", operators)[0] == 0


def test_a_node_in_a_loop_is_evaluated_with_the_domain_of_its_own(operators, tmp_path):
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("OneMore", ["v"], ["w"], "more", domain="com.acme")], "body",
        [info("i", TensorProto.INT64, []), info("c", TensorProto.BOOL, []), info("v", TensorProto.FLOAT, [4, 6])],
        [info("d", TensorProto.BOOL, []), info("w", TensorProto.FLOAT, [4, 6])],
    )  # fmt: skip
    operators.write_text(
        'operator "com.acme" OneMore\ngraph more\ninput x: T[B, N]\ny: T[B, N] = op [b: B, n: N]\n'
        "  reads x[b, n]\n  body x * T(2.0)\noutput y\n"
    )
    three = helper.make_node("Constant", [], ["k"], value_int=3)
    path = model(
        tmp_path / "l.onnx", [three, helper.make_node("Loop", ["k", "", "x"], ["y"], "loop", body=body)], {"x": [4, 6]}, ["y"]
    )
    plan = tapestry.compile(path, ops=str(operators))
    x = RNG.standard_normal((4, 6)).astype(np.float32)
    np.testing.assert_allclose(plan.run({"x": x})["y"], 8 * x)


def test_an_input_that_is_left_out_before_another_one_is_refused(operators, tmp_path):
    operators.write_text(
        'operator "com.acme" Minus\ngraph minus\ninput x: T[N]\ninput w: T[N]\ny: T[N] = op [n: N]\n'
        "  reads x[n], w[n]\n  body x - w\noutput y\n"
    )
    nodes = [helper.make_node("Minus", ["x", "", "x"], ["y"], "minus", domain="com.acme")]
    with pytest.raises(ModelError, match=r"'minus'.*left out before another"):
        tapestry.compile(model(tmp_path / "m.onnx", nodes, {"x": [6]}, ["y"]), ops=str(operators))


@pytest.mark.parametrize("domain", ["", "ai.onnx", "ai.onnx.ml", "com.microsoft", "tapestry.vendor"])
def test_domains_of_others_are_refused(domain, operators):
    operators.write_text(GATED.replace("com.acme", domain))
    with pytest.raises(TapestryError, match="not a domain of your own"):
        own_operators.load_operators(operators)
