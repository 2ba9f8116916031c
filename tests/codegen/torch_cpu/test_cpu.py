"""The torch-cpu target's fast ways: packed weights, windows, pieces, views that are remembered."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto as T

from tapestry import api
from tapestry.codegen.torch_cpu import TorchCpu, kernels
from tapestry.codegen.torch_cpu.base.closures import compile_value
from tapestry.ir.expr import Acc, Const, Expr, call
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Kernel
from tapestry.ir.program import Launch
from tapestry.ir.syntax.parser import parse
from tapestry.lift import read_weight
from tapestry.verify import interp
from tests.support.attention.attention_runs import run_ops
from tests.support.small_models import N, f32, i64, net

X = Acc(0, "f32")


def number(v: float) -> Const:
    return Const(float(np.float32(v)), "f32")


def erf_gelu(x: Expr) -> Expr:
    return call("mul", x, call("mul", number(0.5), call("add", call("erf", call("div", x, number(math.sqrt(2)))), number(1))))


def tanh_gelu(x: Expr) -> Expr:
    cubic = call("mul", call("pow", x, number(3)), number(0.044715))
    curve = call("tanh", call("mul", call("add", x, cubic), number(math.sqrt(2 / math.pi))))
    return call("mul", call("mul", x, number(0.5)), call("add", curve, number(1)))


def silu(x: Expr) -> Expr:
    return call("mul", x, call("sigmoid", x))


def relu6(x: Expr) -> Expr:
    return call("min", call("max", x, number(0)), number(6))


@pytest.mark.parametrize("formula", [erf_gelu, tanh_gelu, silu, relu6])
def test_compiled_values_are_those_of_the_table_and_keep_nan(formula: Callable[[Expr], Expr]) -> None:
    x = torch.tensor([-30.0, -1.5, -0.0, 0.0, 1e-20, 0.7, 5.9, 6.1, 30.0, float("nan")])
    e = formula(call("add", X, number(0.25)))
    expected = torch.from_numpy(interp.value(e, [], [x.numpy()], {}, False))
    given = x.clone()
    found = compile_value(e, {})({}, [given])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(given.nan_to_num(), x.nan_to_num())


def packs(c: api.Compiled) -> list[dict[int, dict[int, str]]]:
    return [p.names for p in c.session.executor.packing]


def compiled(m: onnx.ModelProto, folder: Path, mesh: str = "1", memory: str | None = None) -> api.Compiled:
    path = folder / "m.onnx"
    onnx.save(m, path)
    return api.compile(path, mesh=mesh, memory=memory)


def check(c: api.Compiled, seed: int = 0) -> dict[str, np.ndarray]:
    """Run twice: equal to the interpreter in double precision, peaks as planned, outputs that later runs leave alone."""
    graph, feeds = c.build.plan.graph, c.random_feeds(seed)
    first = c.session.run(feeds)
    kept = {t: a.copy() for t, a in first.outputs.items()}
    again = c.session.run(c.random_feeds(seed + 1))
    assert first.measured.peak == again.measured.peak == list(c.build.peak_bytes)
    weights = {t: weight(c, t) for t in graph.weights}
    want = interp.run(graph, {**feeds, **weights}, wide=True)
    for t, a in first.outputs.items():
        np.testing.assert_array_equal(a, kept[t])
        assert a.flags.c_contiguous
        np.testing.assert_allclose(a, want[t], rtol=1e-4, atol=1e-5)
    return first.outputs


def weight(c: api.Compiled, t: str) -> np.ndarray:
    offset, n = c.build.constants.get(t, (0, 0))
    tensor = c.build.plan.graph.tensors[t]
    if n:
        data = b"".join(c.constants.values())[offset : offset + n]
        return np.frombuffer(data, np.dtype(tensor.dtype.replace("f", "float").replace("i", "int"))).reshape(tensor.shape)
    return read_weight(Path(c.build.model), c.build.plan.graph.weights[t], tensor)


def conv_net(stride: int, pads: list[int], kernel: int, group: int, size: int) -> onnx.ModelProto:
    nodes = [
        N("Conv", ["x", "w", "b"], ["y"], strides=[stride] * 2, pads=pads, group=group),
        N("Relu", ["y"], ["z"]),
        N("Conv", ["z", "v"], ["u"]),
        N("Clip", ["u", "lo", "hi"], ["out"]),
    ]
    weights = {
        "w": f32(8, 8 // group, kernel, kernel), "b": f32(8), "v": f32(6, 8, 1, 1),
        "lo": np.float32(-0.5), "hi": np.float32(0.5),
    }  # fmt: skip
    return net(nodes, {"x": (T.FLOAT, (2, 8, size, size + 1))}, {"out": T.FLOAT}, weights)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("pads", [[0] * 4, [1] * 4, [0, 1, 1, 0], [1, 0, 2, 1]])
@pytest.mark.parametrize(("kernel", "group"), [(1, 1), (3, 1), (3, 8), (2, 2)])
def test_packed_convolutions(stride: int, pads: list[int], kernel: int, group: int, tmp_path: Path) -> None:
    c = compiled(conv_net(stride, pads, kernel, group, 7), tmp_path)
    check(c)
    assert sum(len(n) for n in packs(c)) == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["1", "2", "3"])
def test_packed_linear_layers(mesh: str, tmp_path: Path) -> None:
    nodes = [
        N("MatMul", ["x", "w"], ["a"]), N("Add", ["a", "b"], ["c"]), N("Gelu", ["c"], ["d"]),
        N("MatMul", ["d", "v"], ["e"]), N("Add", ["e", "x"], ["f"]), N("Gemm", ["g", "u"], ["h"], transB=1),
    ]  # fmt: skip
    weights = {"w": f32(12, 30), "b": f32(30), "v": f32(30, 12), "u": f32(9, 4)}
    ins = {"x": (T.FLOAT, (2, 5, 12)), "g": (T.FLOAT, (3, 4))}
    c = compiled(net(nodes, ins, {"f": T.FLOAT, "h": T.FLOAT}, weights, opset=20), tmp_path, mesh)
    check(c)
    assert all(len(n) >= 2 for n in packs(c))
    executor = c.session.executor
    assert all(set(p.arrays).isdisjoint(r) for p, r in zip(executor.packing, executor.weights_held, strict=True))


def tied() -> onnx.ModelProto:
    nodes = [N("Gather", ["w", "i"], ["e"]), N("Transpose", ["w"], ["t"], perm=[1, 0]), N("MatMul", ["e", "t"], ["y"])]
    return net(nodes, {"i": (T.INT64, (2, 3))}, {"y": T.FLOAT}, {"w": f32(64, 32)})


def test_a_weight_with_other_readers_is_copied_where_there_is_room_and_counted(tmp_path: Path) -> None:
    c = compiled(tied(), tmp_path)
    outs = check(c)
    used = c.session.run(c.random_feeds(0)).measured
    assert used.packed == [64 * 32 * 4]
    c.session.executor.packing.clear()
    c.session.executor.kept.clear()
    c.session.executor.launches.clear()
    c.session.executor.room = [64 * 32 * 4 - 1]
    assert c.session.run(c.random_feeds(0)).measured.packed == [0]
    np.testing.assert_allclose(check(c)["y"], outs["y"], rtol=1e-5, atol=1e-6)
    tight = compiled(tied(), tmp_path, memory=str(c.build.peak_bytes[0]))
    check(tight)
    assert tight.session.run(c.random_feeds(0)).measured.packed == [0]


PARTS = {  # dimensions i, n, m of a product with w[n, m, 1], of 9 x 7 x 2 cells
    "columns": ((0, 3), (2, 9), (0, 7)),
    "columns and depth": ((0, 3), (1, 6), (2, 5)),
    "all of a layer": ((1, 3), (0, 9), (0, 7)),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mode", ["full", "partial"])
def test_a_part_of_a_weight_is_packed_alone(part: str, mode: str) -> None:
    """The rest of the buffer is NaN; another part has another key, so that no device takes what was packed for one beside it."""
    block = PARTS[part]
    text = """graph g\ninput x: f32[3, 7]\nweight w: f32[9, 7, 2] at "" 0 0 "" ""
        y: f32[3, 9] = op [i: 3, n: 9 | m: 7 sum]\n  reads x[i, m], w = w[n, m, 1]\n  body x * w\noutput y\n"""
    (i0, i1), (n0, n1), (m0, m1) = block
    boxes = (((0, 3), (0, 7)), ((0, 9), (0, 7), (0, 2)))
    made = [Kernel(op=0, mode=mode, block=b, ins=boxes, outs=(b[:2],)) for b in (block, ((0, 3), (0, 9), (0, 6)))]
    runs = [kernels.build(parse(text), k) for k in made]
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(n).astype(np.float32) for n in ((3, 7), (9, 7, 2)))
    want = x[i0:i1, m0:m1] @ w[n0:n1, m0:m1, 1].T
    lonely = np.full_like(w, np.nan)
    lonely[n0:n1, m0:m1, 1] = w[n0:n1, m0:m1, 1]
    run = runs[0]
    assert run.packs
    assert runs[1].packs
    assert run.packs[1].key != runs[1].packs[1].key
    given = [torch.from_numpy(x), torch.from_numpy(lonely)]
    packed = [given[0], run.packs[1].run(given[1])]
    for got in (run.plain(given, []), run.packed(packed, [])):
        np.testing.assert_allclose(got[0].numpy(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("pads", [[0] * 4, [1] * 4])
@pytest.mark.parametrize("more", [0, 1])
def test_transposed_convolutions(stride: int, pads: list[int], more: int, tmp_path: Path) -> None:
    node = N(
        "ConvTranspose", ["x", "w", "b"], ["y"], strides=[stride] * 2, pads=pads, output_padding=[0, min(more, stride - 1)]
    )
    c = compiled(net([node], {"x": (T.FLOAT, (1, 4, 5, 6))}, {"y": T.FLOAT}, {"w": f32(4, 3, 3, 2), "b": f32(3)}), tmp_path)
    check(c)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cut", ["b", "o", "c", "r", "s"])
def test_a_part_of_a_transposed_convolution_is_only_that_part(cut: str, tmp_path: Path) -> None:
    """What a rewrite cut runs over fewer points than its tensors have, and must not compute the rest."""
    node = N("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2])
    c = compiled(net([node], {"x": (T.FLOAT, (2, 4, 3, 3))}, {"y": T.FLOAT}, {"w": f32(4, 3, 3, 2)}), tmp_path)
    graph = c.build.plan.graph
    op = next(o for o in graph.ops if isinstance(o, Block) and len(o.reduce) == 3)
    dims, reduce = (tuple(replace(d, size=d.size - (d.name == cut)) for d in ds) for ds in (op.dims, op.reduce))
    part, out = replace(op, dims=dims, reduce=reduce), op.outs[0]
    shape = tuple(d.size for d in dims)
    tensors = {**graph.tensors, out: replace(graph.tensors[out], shape=shape)}
    graph = replace(graph, tensors=tensors, ops=(part,), outputs=(out,))
    values = {"x": c.random_feeds(0)["x"], "w": weight(c, "w")}
    ins = tuple(tuple((0, n) for n in graph.tensors[r.tensor].shape) for r in part.reads)
    block = tuple((0, d.size) for d in part.space)
    kernel = Kernel(op=0, mode="full", block=block, ins=ins, outs=(block[: len(dims)],))
    (got,) = TorchCpu().kernel(graph, kernel)([torch.from_numpy(values[r.tensor].copy()) for r in part.reads], [])
    np.testing.assert_allclose(got.numpy(), interp.run(graph, values, wide=True)[out], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pads", [[0] * 4, [1] * 4, [0, 1, 1, 0]])
@pytest.mark.parametrize("stride", [1, 2])
def test_pooling_keeps_nan(pads: list[int], stride: int, tmp_path: Path) -> None:
    node = N("MaxPool", ["x"], ["y"], kernel_shape=[3, 2], strides=[stride] * 2, pads=pads)
    c = compiled(net([node], {"x": (T.FLOAT, (1, 3, 8, 8))}, {"y": T.FLOAT}), tmp_path)
    check(c)
    x = np.zeros((1, 3, 8, 8), np.float32)
    x[0, 1, 4, 4] = np.nan
    assert np.isnan(c.run({"x": x})["y"]).any(axis=(2, 3)).tolist() == [[False, True, False]]


def test_a_clamp_keeps_nan_behind_packed_weights(tmp_path: Path) -> None:
    c = compiled(conv_net(1, [1] * 4, 3, 1, 7), tmp_path)
    x = c.random_feeds(0)["x"]
    x[1, 0, 3, 3] = np.nan
    y = c.run({"x": x})["out"]
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).any()


def test_pieces_digits_and_norms(tmp_path: Path) -> None:
    nodes = [
        N("LayerNormalization", ["x", "s", "t"], ["n"], epsilon=1e-5), N("Reshape", ["n", "r"], ["h"]),
        N("Transpose", ["h"], ["g"], perm=[0, 2, 1, 3]), N("Concat", ["g", "z"], ["c"], axis=3), N("Sin", ["g"], ["g2"]),
        N("Transpose", ["g2"], ["back"], perm=[0, 2, 1, 3]), N("Reshape", ["back", "q"], ["m"]), N("MatMul", ["m", "w"], ["y"]),
    ]  # fmt: skip
    weights = {"s": f32(12), "t": f32(12), "r": i64(2, 5, 3, 4), "q": i64(2, 5, 12), "w": f32(12, 16)}
    ins = {"x": (T.FLOAT, (2, 5, 12)), "z": (T.FLOAT, (2, 3, 5, 2))}
    c = compiled(net(nodes, ins, {"c": T.FLOAT, "y": T.FLOAT}, weights), tmp_path)
    check(c)
    graph, program = c.build.plan.graph, c.build.program
    launches = [(s, graph.ops[s.op]) for s in program.steps if isinstance(s, Launch)]
    assert any(isinstance(op, Block) and op.monoid == "moments" for _, op in launches)


LONE = """graph g
    input x: {0}[4, 3, 2]
    input w: {0}[3, 5]
    y: {0}[4] = op [i: 4 | r: 3 sum, s: 5 sum, z: 2 sum] reads x[i, r, z], w[r, s] body {1}
    output y"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("body", ["x * w", "w * x"])
@pytest.mark.parametrize("dtype", ["f16", "f32", "f64"])
def test_a_sum_of_one_factor_alone_is_not_taken_out_of_infinities(dtype: str, body: str) -> None:
    """``inf·1 + inf·(-1)`` is NaN, as are ``inf·0 + inf·1``; ``inf·(1 - 1)`` and ``inf·(0 + 1)`` are something else."""
    graph, kind = parse(LONE.format(dtype, body)), np.dtype(f"f{int(dtype[1:]) // 8}")
    rng = np.random.default_rng(3)
    for case in range(60):
        x, w = rng.integers(-2, 3, (4, 3, 2)).astype(kind), rng.integers(-2, 3, (3, 5)).astype(kind)
        for a in [x, w] if case % 3 else [w]:
            a.reshape(-1)[rng.integers(a.size)] = rng.choice([np.inf, -np.inf, np.nan])
        with np.errstate(invalid="ignore"):
            wanted = (x[:, :, None, :] * w[None, :, :, None]).astype(np.float64).sum((1, 2, 3))
        np.testing.assert_array_equal(run_ops(graph, {"x": x, "w": w}, 1)["y"].double().numpy(), wanted)
