"""Linear recurrences found in Scan and Loop: a Mamba block's selective scan, cut in time, with one state per block travelling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto as T
from onnx import helper, numpy_helper

import tapestry
from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.errors import LawError
from tapestry.ir.graph import Block, Opaque
from tapestry.ir.kernel import whole
from tapestry.ir.plan import MeshAxis, Plan
from tapestry.ir.program import Reduce
from tapestry.ir.recognition.running_state import as_scan
from tapestry.ir.syntax.parser import parse
from tapestry.lift.file.weight_data import read_weight
from tapestry.onnx_eval.ort_session import ort_session
from tapestry.plan.lower import lower
from tapestry.plan.strategy import strategies
from tapestry.rewrites.core.driver import simplify
from tapestry.runtime.one_process.logical_devices import LocalExecutor
from tapestry.verify import certificate, interp
from tests.support.lifting import data, evaluate, lift_model
from tests.support.triton_kernels import compare, run_kernel

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
    return dict(zip(names, ort_session(made.SerializeToString()).run(names, feeds), strict=True))


def close(found, want, limit=1e-5):
    for name, a in want.items():
        assert found[name].dtype == a.dtype
        assert np.abs(found[name] - a).max() <= limit * max(1.0, np.abs(a).max()), name


def scans(graph):
    return [op for op in graph.ops if as_scan(op)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("length", [17, 64, 130])
def test_a_mamba_block_is_blocks_with_one_scan(length: int, tmp_path: Path) -> None:
    made = mamba(3, length, 6, 7, 5, 2)
    x = {"x": data(3, length, 6, seed=9)}
    lifted = lift_model(made, tmp_path)
    assert all(isinstance(op, Block) for op in lifted.graph.ops)
    (scan,) = scans(lifted.graph)
    assert scan.monoid == "affine" and scan.dims[0].size == length
    close(evaluate(lifted, x), reference(made, x))


@pytest.mark.slow
@pytest.mark.parametrize("length", [17, 64])
def test_a_mamba_block_runs_on_any_number_of_devices(length: int, tmp_path: Path) -> None:
    made = mamba(3, length, 6, 7, 5, 2)
    x = {"x": data(3, length, 6, seed=9)}
    onnx.save(made, path := tmp_path / "mamba.onnx")
    want = reference(made, x)
    for devices in (1, 2, 3):
        close(tapestry.compile(path, devices=devices).run(x), want)


@pytest.mark.slow
@pytest.mark.parametrize("length", [17, 64])
@pytest.mark.parametrize("devices", [2, 3])
def test_a_mamba_block_cut_in_time(length: int, devices: int, tmp_path: Path) -> None:
    made = mamba(3, length, 6, 7, 5, 2)
    x = {"x": data(3, length, 6, seed=9)}
    onnx.save(made, path := tmp_path / "mamba.onnx")
    built = tapestry.compile(path, devices=devices, pins=[f"ssm:t={devices}@d0"])
    (move,) = built.report["moves"]
    assert move.startswith("block_scan@") and move.endswith(f"{{parts={devices}}}")
    close(built.run(x), reference(made, x))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_what_travels_does_not_grow_with_the_sequence(devices: int, tmp_path: Path) -> None:
    """Totals of the blocks, factor and state of each, merged; not the sequence."""
    sent = []
    for length in (64, 256):
        onnx.save(mamba(3, length, 6, 7, 5, 2), path := tmp_path / "mamba.onnx")
        built = tapestry.compile(path, devices=devices, pins=[f"ssm:t={devices}@d0"])
        rows = built.report["transfers"]
        assert all(r["kind"] != "all_gather" or r["payload_bytes"] <= 2 * 3 * 7 * 5 * 4 * devices for r in rows)
        sent.append(sum(r["bytes"] for r in rows if r["kind"] != "halo"))
    state = 3 * 7 * 5 * 4
    assert 0 < sent[0] == sent[1] <= 2 * (devices - 1) * devices * 2 * state + devices * state


@pytest.mark.slow
def test_a_long_sequence_cut_at_both_ends_sends_states(tmp_path: Path) -> None:
    """Without a pin: the search finds the blocks by itself where the sequence lies in parts."""
    made = mamba(3, 512, 64, 128, 16, 4)
    onnx.save(made, path := tmp_path / "mamba.onnx")
    built = tapestry.compile(path, devices=4, layouts=["x:1=4@d0", "y:1=4@d0"], topology="a100-pcie")
    assert any(m.startswith("block_scan@") and "parts=4" in m for m in built.report["moves"])
    state = 3 * 128 * 16 * 4
    assert (
        sum(r["bytes"] for r in built.report["transfers"]) < 4 * 3 * 2 * state + 2 * state
    )  # totals and the convolution's halo, of 512 states
    x = {"x": data(3, 512, 64, seed=9)}
    close(built.run(x), reference(made, x))


def test_the_scan_of_a_mamba_block_in_triton(tmp_path: Path) -> None:
    in_triton(lift_model(mamba(3, 17, 6, 7, 5, 2), tmp_path), {"x": data(3, 17, 6, seed=9)})


def in_triton(lifted, feeds):
    """The scan of a graph over 17 steps, whole and on some of its places."""
    graph = simplify(lifted.graph)
    at = next(i for i, op in enumerate(graph.ops) if as_scan(op))
    stored = {n: read_weight(lifted.model, w, graph.tensors[n], constants=lifted.constants) for n, w in graph.weights.items()}
    ins = replace(graph, ops=graph.ops[:at], outputs=tuple(t for t in graph.ops[at].inputs if t not in stored))
    values = {**feeds, **stored, **interp.run(ins, {**feeds, **stored})}
    want = interp.run(replace(graph, ops=graph.ops[: at + 1], outputs=graph.ops[at].outs), {**feeds, **stored})
    box = whole(tuple(d.size for d in graph.ops[at].space))
    along = next(i for i, d in enumerate(graph.ops[at].space) if d.name == as_scan(graph.ops[at]).dim)
    for places in ((0, 17), (5, 12)):
        block = (*box[:along], places, *box[along + 1 :])
        (got,) = run_kernel(graph, at, values, block=block)
        cut = tuple(slice(*places) if i == along else slice(None) for i in range(got.ndim))
        compare(got, want[graph.ops[at].outs[0]][cut], "f32")


# bodies: h' = …, with what is scanned as a and b, w around the loop, and y = h' + h kept

LINEAR = {
    "a*h + b": [("Mul", "a h", "p"), ("Add", "p b", "n")],
    "b - h*a": [("Mul", "h a", "p"), ("Sub", "b p", "n")],
    "(h + b)*a - h": [("Add", "h b", "p"), ("Mul", "p a", "q"), ("Sub", "q h", "n")],
    "h/(1 + exp a)": [("Exp", "a", "e"), ("Add", "e one", "f"), ("Div", "h f", "n")],
    "h + (a w)": [("MatMul", "a w", "m"), ("Add", "h m", "n")],
    "h where b > 0 else a*h - b": [
        ("Greater", "b zero", "c"), ("Mul", "a h", "p"), ("Sub", "p b", "q"), ("Where", "c h q", "n"),
    ],
    "tanh a": [("Tanh", "a", "n")],
    "h": [("Identity", "h", "n")],
    "0.5*h": [("Mul", "h half", "n")],
    "-h": [("Neg", "h", "n")],
    "squeeze(unsqueeze(h)*a) + b": [
        ("Unsqueeze", "h ax", "u"), ("Mul", "u a", "v"), ("Squeeze", "v ax", "s"), ("Add", "s b", "n"),
    ],
}  # fmt: skip
OTHER = {
    "tanh(h + a)": ([("Add", "h a", "p"), ("Tanh", "p", "n")], "'tanh' of it is not linear"),
    "h*h*a + b": ([("Mul", "h h", "p"), ("Mul", "p a", "q"), ("Add", "q b", "n")], "multiplied by itself"),
    "a/h": ([("Div", "a h", "n")], "divided by it"),
    "h w + b": ([("MatMul", "h w", "p"), ("Add", "p b", "n")], "depends on several"),
    "max(h, a)": ([("Max", "h a", "n")], "'max' of it"),
    "a where h > 0 else b": ([("Greater", "h zero", "c"), ("Where", "c a b", "n")], "not linear"),
    "h transposed + a": ([("Transpose", "h", "p"), ("Add", "p a", "n")], "depends on another one"),
    "a + random": ([("RandomNormalLike", "h", "r"), ("Add", "r a", "n")], "random numbers"),
}


def body_of(steps):
    nodes = [make(op, i.split(), o.split()) for op, i, o in steps] + [make("Add", ["n", "h"], ["y"])]
    cells = [info(n, F, [4, 4]) for n in ("h", "a", "b", "n", "y")]
    return helper.make_graph(nodes, "body", cells[:3], cells[3:])


AROUND = {
    "w": data(4, 4, seed=5) / 2, "one": np.float32(1), "zero": np.float32(0), "half": np.float32(0.5), "ax": np.array([0]),
}  # fmt: skip


def scan_of(steps, length, **directions):
    one = make("Scan", ["h0", "xa", "xb"], ["last", "y"], name="scan", num_scan_inputs=2, body=body_of(steps), **directions)
    ins = [info("h0", F, [4, 4]), *(info(n, F, [length, 4, 4]) for n in ("xa", "xb"))]
    return graph_of([one], ins, ["last", "y"], AROUND)


def feeds(length):
    return {"h0": data(4, 4, seed=1), "xa": data(length, 4, 4, seed=2) / 2, "xb": data(length, 4, 4, seed=3)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", sorted(LINEAR))
def test_linear_bodies_are_lifted_over_all_steps(name: str, tmp_path: Path) -> None:
    made = scan_of(LINEAR[name], 70, scan_input_directions=[0, 1], scan_output_axes=[2], scan_output_directions=[1])
    lifted = lift_model(made, tmp_path)
    assert all(isinstance(op, Block) for op in lifted.graph.ops) and len(lifted.graph.ops) < 16
    assert len(scans(lifted.graph)) == (name not in ("tanh a", "h"))
    want = reference(made, feeds(70))
    close(evaluate(lifted, feeds(70)), want)
    close(tapestry.compile(tmp_path / "model.onnx", devices=3).run(feeds(70)), want)


@pytest.mark.parametrize("name", ["0.5*h", "a*h + b", "h + (a w)"])
def test_what_runs_in_triton_is_what_the_interpreter_computes(name: str, tmp_path: Path) -> None:
    """Also where the factor has no dimension at all, or is none."""
    in_triton(lift_model(scan_of(LINEAR[name], 17), tmp_path), feeds(17))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", sorted(OTHER))
def test_other_bodies_stay_and_say_why(name: str, tmp_path: Path) -> None:
    steps, why = OTHER[name]
    (op,) = [op for op in lift_model(scan_of(steps, 70), tmp_path).graph.ops if isinstance(op, Opaque)]
    assert op.kind == "Scan" and why in op.why
    short = lift_model(scan_of(steps, 3), tmp_path)
    if "random" not in name:
        close(evaluate(short, feeds(3)), reference(scan_of(steps, 3), feeds(3)))
        assert not scans(short.graph)


def test_factors_whose_product_overflows(tmp_path: Path) -> None:
    made = scan_of(LINEAR["a*h + b"], 70)
    values = {**feeds(70), "h0": np.zeros((4, 4), np.float32)}
    values["xa"][:] = 10.0
    values["xb"][:-5] = 0.0  # 10^65 is infinite, and infinity times zero no number
    close(evaluate(lift_model(made, tmp_path), values), reference(made, values))


def test_states_that_need_each_other_one_after_another(tmp_path: Path) -> None:
    """A Loop of 70 steps: a recurrence, the sum of its states, a delay; and a pair that turns, which is none."""
    nodes = [
        make("Gather", ["xs", "i"], ["x"], axis=0), make("Mul", ["h", "d"], ["p"]), make("Add", ["p", "x"], ["h2"]),
        make("Identity", ["keep"], ["on"]), make("Add", ["g", "h2"], ["g2"]), make("Identity", ["h"], ["s2"]),
        make("Sub", ["h2", "s"], ["seen"]),
    ]  # fmt: skip
    cell = [3, 5]
    ins = [info("i", T.INT64, []), info("keep", T.BOOL, []), *(info(n, F, cell) for n in ("h", "g", "s"))]
    outs = [info("on", T.BOOL, []), *(info(n, F, cell) for n in ("h2", "g2", "s2", "seen"))]
    body = helper.make_graph(nodes, "body", ins, outs)
    loop = make("Loop", ["n", "", "h0", "g0", "h0"], ["h", "g", "s", "all"], name="loop", body=body)
    inputs = [info("h0", F, cell), info("g0", F, cell), info("xs", F, [70, 3, 5])]
    made = graph_of([loop], inputs, ["h", "g", "s", "all"], {"n": np.array(70), "d": data(5) / 3})
    values = {"h0": data(3, 5, seed=1), "g0": data(3, 5, seed=2), "xs": data(70, 3, 5, seed=3)}
    lifted = lift_model(made, tmp_path)
    assert sorted(op.monoid for op in scans(lifted.graph)) == ["affine", "sum"]
    assert not any(op.monoid == "sum" and not as_scan(op) for op in lifted.graph.ops)  # x[i] is a view, no search for i
    close(evaluate(lifted, values), reference(made, values))
    close(tapestry.compile(tmp_path / "model.onnx", devices=3).run(values), reference(made, values))
    turning = [make("Add", ["h", "g"], ["h2"]), make("Sub", ["g", "h"], ["g2"]), make("Identity", ["keep"], ["on"])]
    body = helper.make_graph(turning, "body", ins[:4], outs[:3])
    made = graph_of([make("Loop", ["n", "", "h0", "g0"], ["h", "g"], body=body)], inputs[:2], ["h", "g"], {"n": np.array(70)})
    (op,) = lift_model(made, tmp_path).graph.ops
    assert isinstance(op, Opaque) and "depends on 'g', which is none either" in op.why


def test_states_that_merge_in_order_are_merged_over_two_mesh_axes_in_order() -> None:
    """Every strategy of a recurrence on 2x2 devices gives what one device gives; another order is refused."""
    graph = parse(
        """graph g
        input a: f32[8, 3]
        input b: f32[8, 3]
        p: f32[3], y: f32[3] = op [n: 3 | t: 8 affine] reads a[t, n], b[t, n] body a, b then acc0, acc1
        output p, y"""
    )
    mesh = (MeshAxis("d0", 2), MeshAxis("d1", 2))
    rng = np.random.default_rng(4)
    feeds = {k: (rng.integers(-8, 9, (8, 3)) / 8).astype(np.float32) for k in "ab"}
    want = interp.run(graph, feeds)

    def source(t, box):
        return torch.from_numpy(feeds[t][tuple(slice(lo, hi) for lo, hi in box)].copy())

    (op,) = graph.ops
    cut = [s for s in strategies(op, mesh) if s.dims == ("t", "t")]
    assert cut
    for s in cut:
        plan = Plan(graph=graph, mesh=mesh, strategies=(s,))
        program = lower(plan)
        certificate.check(graph, program)
        found, _ = LocalExecutor(graph, program, TorchCpu(), source).run(source)
        for t in want:
            np.testing.assert_array_equal(found[t].numpy(), want[t])
        at, step = next((i, x) for i, x in enumerate(program.steps) if isinstance(x, Reduce))
        turned = replace(step, groups=tuple(g[::-1] for g in step.groups))
        with pytest.raises(LawError, match="merged out of it"):
            certificate.check(graph, replace(program, steps=(*program.steps[:at], turned, *program.steps[at + 1 :])))
