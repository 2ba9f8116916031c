"""Linear recurrences found in Scan and Loop: a Mamba block's selective scan, cut in time, with one state per block travelling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from lifting import data, evaluate, lift_model
from onnx import TensorProto as T
from onnx import helper, numpy_helper

import tapestry
from tapestry.ir.graph import Block
from tapestry.ir.scan import as_scan

info, make = helper.make_tensor_value_info, helper.make_node
F = T.FLOAT


def graph_of(nodes, ins, outs, inits, opset=18):
    stored = [numpy_helper.from_array(np.asarray(a), n) for n, a in inits.items()]
    made = helper.make_graph(nodes, "g", ins, [info(o, F, None) for o in outs], stored)
    return helper.make_model(made, ir_version=10, opset_imports=[helper.make_opsetid("", opset)])


def step(batch, inner, states):
    """h' = dA * h + dBx, y = sum over the states of h' * C."""
    nodes = [
        make("Mul", ["h", "da"], ["kept"]), make("Add", ["kept", "dbx"], ["h2"]), make("Unsqueeze", ["c", "one"], ["c3"]),
        make("Mul", ["h2", "c3"], ["hc"]), make("ReduceSum", ["hc", "last"], ["y"], keepdims=0),
    ]  # fmt: skip
    full = [batch, inner, states]
    ins = [info(n, F, full) for n in ("h", "da", "dbx")] + [info("c", F, [batch, states])]
    inits = [numpy_helper.from_array(np.array([k]), n) for n, k in (("one", 1), ("last", 2))]
    return helper.make_graph(nodes, "step", ins, [info("h2", F, full), info("y", F, [batch, inner])], inits)


def mamba(batch, length, model, inner, states, rank, seed=0):
    """A Mamba block (Gu and Dao 2023): projections, causal depthwise convolution, selective scan, skip, gate."""
    w = {
        "w_in": data(model, 2 * inner, seed=seed) / model**0.5, "w_conv": data(inner, 1, 4, seed=seed + 1) / 2,
        "b_conv": data(inner, seed=seed + 2), "w_x": data(inner, rank + 2 * states, seed=seed + 3) / inner**0.5,
        "w_dt": data(rank, inner, seed=seed + 4), "b_dt": data(inner, seed=seed + 5),
        "a": -np.exp(data(inner, states, seed=seed + 6)), "d": data(inner, seed=seed + 7),
        "w_out": data(inner, model, seed=seed + 8) / inner**0.5, "h0": np.zeros((batch, inner, states), np.float32),
        "halves": np.array([inner, inner]), "thirds": np.array([rank, states, states]), "m1": np.array([-1]), "m2": np.array([-2]),
    }  # fmt: skip
    nodes = [
        make("MatMul", ["x", "w_in"], ["xz"]), make("Split", ["xz", "halves"], ["u", "z"], axis=-1),
        make("Transpose", ["u"], ["ut"], perm=[0, 2, 1]),
        make("Conv", ["ut", "w_conv", "b_conv"], ["ct"], group=inner, pads=[3, 0]),
        make("Transpose", ["ct"], ["cc"], perm=[0, 2, 1]), make("Sigmoid", ["cc"], ["cs"]), make("Mul", ["cc", "cs"], ["v"]),
        make("MatMul", ["v", "w_x"], ["dbc"]), make("Split", ["dbc", "thirds"], ["dt", "b", "c"], axis=-1),
        make("MatMul", ["dt", "w_dt"], ["dw"]), make("Add", ["dw", "b_dt"], ["db"]), make("Softplus", ["db"], ["delta"]),
        make("Unsqueeze", ["delta", "m1"], ["delta4"]), make("Mul", ["delta4", "a"], ["la"]), make("Exp", ["la"], ["da"]),
        make("Unsqueeze", ["b", "m2"], ["b4"]), make("Mul", ["delta", "v"], ["dv"]), make("Unsqueeze", ["dv", "m1"], ["dv4"]),
        make("Mul", ["dv4", "b4"], ["dbx"]),
        make("Scan", ["h0", "da", "dbx", "c"], ["h", "ys"], name="ssm", num_scan_inputs=3, body=step(batch, inner, states),
             scan_input_axes=[1, 1, 1], scan_output_axes=[1]),
        make("Mul", ["v", "d"], ["skip"]), make("Add", ["ys", "skip"], ["yd"]), make("Sigmoid", ["z"], ["zs"]),
        make("Mul", ["z", "zs"], ["gate"]), make("Mul", ["yd", "gate"], ["yg"]), make("MatMul", ["yg", "w_out"], ["y"]),
    ]  # fmt: skip
    return graph_of(nodes, [info("x", F, [batch, length, model])], ["y", "h"], w)


def reference(made, feeds):
    names = [o.name for o in made.graph.output]
    return dict(zip(names, onnxruntime.InferenceSession(made.SerializeToString()).run(names, feeds), strict=True))


def close(found, want, limit=1e-5):
    for name, a in want.items():
        assert found[name].dtype == a.dtype
        assert np.abs(found[name] - a).max() <= limit * max(1.0, np.abs(a).max()), name


def scans(graph):
    return [op for op in graph.ops if as_scan(op)]


@pytest.mark.parametrize("length", [17, 64, 130])
def test_a_mamba_block_is_blocks_with_one_scan(length: int, tmp_path: Path) -> None:
    made = mamba(3, length, 6, 7, 5, 2)
    x = {"x": data(3, length, 6, seed=9)}
    lifted = lift_model(made, tmp_path)
    assert all(isinstance(op, Block) for op in lifted.graph.ops)
    (scan,) = scans(lifted.graph)
    assert scan.monoid == "affine" and scan.dims[0].size == length
    close(evaluate(lifted, x), reference(made, x))


@pytest.mark.parametrize("length", [17, 64])
def test_a_mamba_block_runs_on_any_number_of_devices(length: int, tmp_path: Path) -> None:
    made = mamba(3, length, 6, 7, 5, 2)
    x = {"x": data(3, length, 6, seed=9)}
    onnx.save(made, path := tmp_path / "mamba.onnx")
    want = reference(made, x)
    for devices in (1, 2, 3):
        close(tapestry.compile(path, devices=devices).run(x), want)
