"""LSTM, GRU and RNN as steps: against onnxruntime in every form, and cut along the hidden dimension."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

import tapestry
from tapestry.errors import TapestryError
from tapestry.ir.graph import Opaque
from tapestry.lift.operators.recurrent import rnn
from tapestry.onnx_eval.ort_session import ort_session
from tests.support.lifting import agree, build, data, evaluate, lift_model, node

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
T, B, X, H = 5, 3, 4, 6
WAYS = ("forward", "reverse", "bidirectional")


def given(
    kind: str, ways: int, *, bias=True, initial=True, peep=True, lengths=None, hidden=H, steps=T
) -> dict[str, np.ndarray]:
    """Inputs of a recurrent node by name; what is not given is left out."""
    g = GATES[kind] * hidden
    out = {"x": data(steps, B, X), "w": data(ways, g, X, seed=1) / 2, "r": data(ways, g, hidden, seed=2) / 2}
    out |= {"b": data(ways, 2 * g, seed=3)} if bias else {}
    out |= {"lengths": np.array(lengths, np.int32)} if lengths else {}
    out |= {"h": data(ways, B, hidden, seed=4)} if initial else {}
    out |= {"c": data(ways, B, hidden, seed=5)} if initial and kind == "LSTM" else {}
    return out | ({"p": data(ways, 3 * hidden, seed=6)} if peep and kind == "LSTM" else {})


def cell(kind: str, feeds: dict[str, np.ndarray], outs: str = "", **attributes) -> onnx.NodeProto:
    order = ("x", "w", "r", "b", "lengths", "h") + (("c", "p") if kind == "LSTM" else ())
    names = outs or ("y y_h y_c" if kind == "LSTM" else "y y_h")
    return node(kind, " ".join(n if n in feeds else "_" for n in order), names, hidden_size=feeds["r"].shape[2], **attributes)


def check(folder, kind: str, way: str, attributes=None, native=True, **options):
    feeds = given(kind, 2 if way == "bidirectional" else 1, **options)
    made = cell(kind, feeds, direction=way, **(attributes or {}))
    return agree(made, feeds, list(made.output), folder=folder, native=native, opset=14)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind, way", list(itertools.product(GATES, WAYS)))
@pytest.mark.parametrize("lengths", [None, (5, 2, 4)])
def test_every_direction_with_and_without_lengths(tmp_path, kind, way, lengths):
    check(tmp_path, kind, way, lengths=lengths)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", GATES)
def test_without_bias_initial_state_and_peepholes(tmp_path, kind):
    check(tmp_path, kind, "forward", bias=False, initial=False, peep=False)
    check(tmp_path, kind, "bidirectional", initial=False, steps=1)


@pytest.mark.slow
def test_attributes_of_the_gates(tmp_path):
    check(tmp_path, "GRU", "bidirectional", {"linear_before_reset": 1})
    check(tmp_path, "GRU", "reverse", {"linear_before_reset": 1}, bias=False, lengths=(1, 5, 3))
    check(tmp_path, "LSTM", "forward", {"input_forget": 1}, peep=False)
    check(tmp_path, "LSTM", "bidirectional", {"activations": ["Sigmoid", "Relu", "Tanh", "Tanh", "Tanh", "Relu"]})
    check(tmp_path, "RNN", "reverse", {"activations": ["Relu"]})


def test_only_the_last_state_is_asked_for(tmp_path):
    feeds = given("LSTM", 1)
    graph = agree(cell("LSTM", feeds, "_ y_h"), feeds, ["y_h"], folder=tmp_path, opset=14)
    assert not any(op.outs[0] == "y" for op in graph.ops)


@pytest.mark.parametrize(
    "why, attributes, options",
    [
        ("at most", {}, {"steps": rnn.STEPS + 1}),
        ("clipped", {"clip": 0.5}, {}),
        ("parameters", {"activations": ["Elu"], "activation_alpha": [0.5]}, {}),
    ],
)
def test_what_is_not_written_out_keeps_its_batch_and_says_why(tmp_path, why, attributes, options):
    graph = check(tmp_path, "RNN", "forward", attributes, native=False, **options)
    (op,) = graph.ops
    assert isinstance(op, Opaque) and why in op.why and [d.name for d in op.dims] == ["b"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("dim", ["h", "b", "k"])
@pytest.mark.parametrize("devices", [2, 3])
def test_batch_and_hidden_dimensions_are_cut(tmp_path, kind, dim, devices):
    """With the hidden dimension cut each device holds its rows of the gates' weights, and gathers one state per step."""
    feeds = given(kind, 2, lengths=(5, 2, 4))
    made = cell(kind, feeds, direction="bidirectional")
    made.name = "cell"
    stored = {k: feeds.pop(k) for k in ("w", "r", "b")}
    path = tmp_path / "m.onnx"
    path.write_bytes(build([made], feeds, list(made.output), stored, opset=14).SerializeToString())
    alone = tapestry.compile(path, devices=1).run(feeds)
    cut = tapestry.compile(path, devices=devices, pins=[f"cell:{dim}={devices}@d0"])
    plan = cut.build.plan
    assert any(s.dims == (dim,) for s in plan.strategies)
    found = cut.run(feeds)
    for name, a in alone.items():
        np.testing.assert_allclose(found[name], a, rtol=1e-5, atol=1e-6)
    if dim == "h":
        assert {row["kind"] for row in cut.report["transfers"]} == {"all_gather"}


@pytest.mark.parametrize("kind, way", list(itertools.product(GATES, WAYS)))
def test_batch_first_with_activations_that_have_parameters(tmp_path, kind, way):
    """What neither onnxruntime (no ``layout`` 1) nor the ONNX reference evaluator (no parameters) runs."""
    ways = 2 if way == "bidirectional" else 1
    feeds, count = given(kind, ways), {"LSTM": 3, "GRU": 2, "RNN": 1}[kind] * ways
    acts = {"activations": ["Affine"] * count, "activation_alpha": [0.25] * count, "activation_beta": [0.5] * count}
    later = cell(kind, feeds, direction=way, **acts)
    session = ort_session(build([later], feeds, list(later.output), opset=14).SerializeToString())
    want = [np.moveaxis(a, -2, 0) for a in session.run(None, feeds)]
    first = feeds | {k: np.swapaxes(feeds[k], 0, 1) for k in ("x", "h", "c") if k in feeds}
    made = cell(kind, first, direction=way, layout=1, **acts)
    lifted = lift_model(build([made], first, list(made.output), opset=14), tmp_path)
    found = evaluate(lifted, first)
    for name, a in zip(made.output, want, strict=True):
        np.testing.assert_allclose(found[name], a, rtol=1e-4, atol=1e-5)


def test_the_reference_evaluator_is_not_asked_for_what_it_ignores(tmp_path):
    """It runs an RNN of float64 with a clip as one without."""
    feeds = {k: a.astype(np.float64) for k, a in given("LSTM", 1).items()}
    made = cell("LSTM", feeds, clip=0.1)
    lifted = lift_model(build([made], feeds, list(made.output), opset=14), tmp_path)
    with pytest.raises(TapestryError, match="ignores clip"):
        evaluate(lifted, feeds)
