"""Convolutions of 8-bit integers on the torch-cpu target: bit for bit, whole and in parts, with and without our kernels in C."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import tapestry
from tapestry.codegen.torch_cpu import TorchCpu, native
from tapestry.codegen.torch_cpu.c.c_calls import CpuKernel
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Box, Kernel, whole
from tests.support.block_buffers import read_box
from tests.support.lifting import build, evaluate, lift_model, node
from tests.support.small_models import N, net

CASES = {  # channels, features, groups, sizes, kernel, attributes
    "plain": (5, 7, 1, (9, 11), (3, 3), {"pads": [1, 1, 1, 1]}),
    "strides": (4, 6, 1, (13, 10), (3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "uneven": (3, 5, 1, (11, 8), (5, 2), {"pads": [2, 0, 1, 3], "strides": [3, 2]}),
    "dilated": (6, 4, 1, (12, 9), (3, 2), {"dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    "pixels": (37, 33, 1, (5, 7), (1, 1), {}),
    "pixels apart": (8, 3, 1, (7, 7), (1, 1), {"strides": [2, 3]}),
    "groups": (8, 12, 4, (7, 6), (3, 3), {"pads": [1, 1, 1, 1]}),
    "many groups": (36, 72, 36, (6, 5), (3, 3), {"pads": [1, 1, 1, 1]}),
    "depthwise": (37, 37, 37, (9, 14), (3, 3), {"pads": [1, 1, 1, 1]}),
    "depthwise strides": (16, 16, 16, (11, 13), (5, 3), {"pads": [2, 1, 2, 1], "strides": [2, 2], "dilations": [1, 2]}),
    "one axis": (5, 4, 1, (17,), (4,), {"pads": [2, 1], "strides": [2]}),
    "one axis depthwise": (6, 6, 6, (17,), (3,), {"pads": [2, 1]}),
    "three axes": (3, 4, 1, (5, 4, 6), (2, 3, 2), {"pads": [1, 1, 0, 0, 1, 1], "strides": [1, 2, 1]}),
}
pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ["uint8 int8", "uint8 uint8", "int8 int8", "int8 uint8"]


@pytest.fixture(params=["native", "torch"])
def compiler(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setenv("TAPESTRY_NATIVE", "0")
    native.library.cache_clear()
    yield request.param
    monkeypatch.undo()
    native.library.cache_clear()


def some(rng: np.random.Generator, kind: str, *s: int) -> np.ndarray:
    """Bytes, the extremes among them."""
    info = np.iinfo(kind)
    out = rng.integers(info.min, info.max + 1, s).astype(kind)
    out.reshape(-1)[:2] = [info.min, info.max][: out.size]
    return out


def model(case: str, kinds: str, zeros: str, kind: str = "QLinearConv", out: str = "uint8", scale: float = 0.002):
    """(model, feeds): zero points none, of the whole, or one for each filter."""
    channels, features, groups, sizes, window, attributes = CASES[case]
    rng, (a, b) = np.random.default_rng(len(case)), kinds.split()
    x, w = some(rng, a, 2, channels, *sizes), some(rng, b, features, channels // groups, *window)
    p = np.array({"none": 0, "whole": 77, "filters": -3 if a == "int8" else 255}[zeros], a)
    q = {"none": np.zeros((), b), "whole": np.array(128 if b == "uint8" else -7, b), "filters": some(rng, b, features)}[zeros]
    if kind == "ConvInteger":
        return build([node(kind, "x w p q", group=groups, **attributes)], {"x": x}, ["y"], {"w": w, "p": p, "q": q}), {"x": x}
    consts = {
        "xs": np.float32(0.05), "p": p, "w": w, "q": q, "ys": np.float32(0.9), "yz": np.array(11, out),
        "ws": (rng.random(features).astype(np.float32) + 0.5) * scale if zeros == "filters" else np.float32(scale * 3),
        "b": rng.integers(-(2**20), 2**20, features).astype(np.int32),
    }  # fmt: skip
    made = node(kind, "x xs p w ws q ys yz b", group=groups, **attributes)
    return build([made], {"x": x}, ["y"], consts, opset=21, ir=10), {"x": x}


def by_numpy(feeds: dict[str, np.ndarray], case: str, consts: dict[str, np.ndarray]) -> np.ndarray:
    """The sums by the definition, in i64."""
    _, features, groups, sizes, window, attributes = CASES[case]
    rank = len(sizes)
    pads, strides, dilations = (
        attributes.get(k, [d] * n) for k, d, n in (("pads", 0, 2 * rank), ("strides", 1, rank), ("dilations", 1, rank))
    )
    x = np.pad(feeds["x"].astype(np.int64) - int(consts["p"]), [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    q = consts["q"].astype(np.int64).reshape(-1, *[1] * (rank + 1))
    w = consts["w"].astype(np.int64) - q
    outs = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], window, strides, dilations, strict=True)]
    total = np.zeros((x.shape[0], features, *outs), np.int64)
    per, own = features // groups, w.shape[1]
    for tap in np.ndindex(*window):
        cut = tuple(slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in zip(tap, dilations, outs, strides, strict=True))
        part = x[(slice(None), slice(None), *cut)]
        for o in range(features):
            g = o // per
            total[:, o] += np.einsum("bc...,c->b...", part[:, g * own : (g + 1) * own], w[(o, slice(None), *tap)])
    return total


def initials(m) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in m.graph.initializer}


@pytest.mark.sampled(13)
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("zeros", ["none", "whole", "filters"])
@pytest.mark.parametrize("case", CASES)
def test_sums(case: str, zeros: str, kinds: str, compiler: str, tmp_path: Path) -> None:
    m, feeds = model(case, kinds, zeros, "ConvInteger")
    want = by_numpy(feeds, case, initials(m)).astype(np.int32)
    graph = lift_model(m, tmp_path).graph
    for packed in (False, True):
        (found,) = run(graph, {**initials(m), **feeds}, packed)
        assert found.dtype == np.int32 and np.array_equal(found, want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("zeros", ["none", "filters"])
@pytest.mark.parametrize("case", CASES)
def test_parts(case: str, zeros: str, kinds: str, tmp_path: Path) -> None:
    """Blocks of every dimension, on buffers of what they read: whole reductions, and parts of them that are added up."""
    m, feeds = model(case, kinds, zeros, "ConvInteger")
    want, graph = by_numpy(feeds, case, initials(m)).astype(np.int32), lift_model(m, tmp_path).graph
    op, arrays = graph.ops[0], {**initials(m), **feeds}
    assert isinstance(op, Block)
    space = whole(tuple(d.size for d in op.space))
    for axis, (_, n) in enumerate(space):
        for edges in {(0, n // 2, n), (0, n // 3, n)}:
            cuts = [(*space[:axis], (lo, hi), *space[axis + 1 :]) for lo, hi in itertools.pairwise(edges) if lo < hi]
            if axis < len(op.dims):
                for block in cuts:
                    place = tuple(slice(lo, hi) for lo, hi in block[: len(op.dims)])
                    for packed in (False, True):
                        (found,) = run(graph, arrays, packed, block)
                        assert np.array_equal(found, want[place])
            else:
                parts = [run(graph, arrays, False, block, "partial")[0] for block in cuts]
                assert np.array_equal(sum(parts), want)


def run(
    graph: Graph, arrays: dict[str, np.ndarray], packed: bool, block: Box | None = None, mode: str = "full"
) -> list[np.ndarray]:
    """A block of the only operation, with its weight as it is or packed, if it may be."""
    op = graph.ops[0]
    assert isinstance(op, Block)
    block = block or whole(tuple(d.size for d in op.space))
    boxes = [read_box(op, graph, k, block) for k in range(len(op.reads))]
    made = kernel_of(graph, block, mode)
    cells = [tuple(slice(lo, hi) for lo, hi in box) for box in boxes]
    ins = [torch.from_numpy(np.array(arrays[r.tensor][c])) for r, c in zip(op.reads, cells, strict=True)]
    if packed:
        ins = [made.packs[k].run(x) if k in made.packs else x for k, x in enumerate(ins)]
        made = made.packed
    return [x.numpy() for x in made(ins, [])]


def kernel_of(graph: Graph, block: Box, mode: str = "full") -> CpuKernel:
    """What computes a block of the only operation."""
    op = graph.ops[0]
    assert isinstance(op, Block)
    boxes = tuple(read_box(op, graph, k, block) for k in range(len(op.reads)))
    return TorchCpu().kernel(graph, Kernel(op=0, mode=mode, block=block, ins=boxes, outs=(block[: len(op.dims)],)))


@pytest.mark.parametrize("case", CASES)
def test_cases_are_convolutions(case: str, tmp_path: Path) -> None:
    """All of these are convolved by packed weights, or are products with them."""
    m, _ = model(case, "uint8 int8", "none", "ConvInteger")
    graph = lift_model(m, tmp_path).graph
    op = graph.ops[0]
    assert isinstance(op, Block)
    made = kernel_of(graph, whole(tuple(d.size for d in op.space)))
    assert made.packs


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kinds", "zeros", "out"),
    [("uint8 int8", "none", "uint8"), ("uint8 uint8", "whole", "int8"), ("int8 uint8", "filters", "uint8")],
)
@pytest.mark.parametrize("case", ["plain", "groups", "depthwise", "one axis"])
def test_requantised(case: str, zeros: str, kinds: str, out: str, compiler: str, tmp_path: Path) -> None:
    """A bias, scales, rounding half to even and saturation, in one pass and in torch's operators; on two devices as on one."""
    for size in (0.002, 1e30):  # past f32 in the end: saturated all the same
        m, feeds = model(case, kinds, zeros, "QLinearConv", out, size)
        graph, c = lift_model(m, tmp_path), initials(m)
        bias = c["b"].reshape(-1, *[1] * (feeds["x"].ndim - 2))
        total = (by_numpy(feeds, case, c) + bias).astype(np.int32)
        by = (c["xs"] * c["ws"] / c["ys"]).reshape(-1, *[1] * (feeds["x"].ndim - 2)).astype(np.float32)
        with np.errstate(over="ignore"):
            scaled = np.rint(total.astype(np.float32) * by) + np.float32(11)
        info = np.iinfo(out)
        want = np.clip(np.where(np.isnan(scaled), 0, scaled), info.min, info.max).astype(out)
        assert np.array_equal(evaluate(graph, feeds)["y"], want)
        for packed in (False, True):
            assert np.array_equal(run(graph.graph, {**c, **feeds}, packed)[0], want)
        for devices in (1, 2) if size < 1 else ():
            assert np.array_equal(tapestry.compile(tmp_path / "model.onnx", devices=devices).run(feeds)["y"], want)


@pytest.mark.parametrize("dnn", [True, False])
@pytest.mark.parametrize(
    ("depth", "parts", "dtype"), [(57, 1, torch.float32), (58, 2, torch.float32), (1000, 1, torch.float64)]
)
def test_floats_hold_the_largest_sums(
    depth: int, parts: int, dtype: torch.dtype, dnn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one convolution of singles, in two of digits, in doubles; without oneDNN always in doubles."""
    x, w = np.full((1, depth, 4, 4), 255, np.uint8), np.full((3, depth, 3, 3), -128, np.int8)
    w[1], x[0, 0, 0, 0], w[2, ::2] = 127, 254, 77
    monkeypatch.setitem(CASES, "largest", (depth, 3, 1, (4, 4), (3, 3), {}))
    graph = lift_model(build([node("ConvInteger", "x w")], {"x": x}, ["y"], {"w": w}), tmp_path).graph
    want, all_of = by_numpy({"x": x}, "largest", {"p": np.array(0), "q": np.array(0), "w": w}), whole((1, 3, 2, 2, depth, 3, 3))
    torch._C._set_mkldnn_enabled(dnn)
    try:
        made = kernel_of(graph, all_of)
        (pack,) = made.packs.values()
        packed = pack.run(torch.from_numpy(w))
        assert (len(packed), packed.dtype) == ((parts, dtype) if dnn else (1, torch.float64))
        for given in (False, True):
            assert np.array_equal(run(graph, {"x": x, "w": w}, given)[0], want)
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_quantised_values_of_all_sorts(compiler: str, tmp_path: Path) -> None:
    """NaN becomes 0, what is infinite the nearest end; a sum before is computed once."""
    x = np.array([[np.nan, np.inf, -np.inf, 0.5, 1.5, 3e38, -7.0] * 300], np.float32)
    consts = {"s": np.float32(1), "z": np.int8(-5)}
    made = [node("MatMul", "x w", "t"), node("QuantizeLinear", "t s z", "y")]
    m = build(made, {"x": x.T.copy()}, ["y"], {**consts, "w": np.ones((1, 1), np.float32)}, opset=21, ir=10)
    want = np.array([[0, 127, -128, -5, -3, 127, -12] * 300], np.int8).T
    (tmp_path / "model.onnx").write_bytes(m.SerializeToString())
    assert np.array_equal(tapestry.compile(tmp_path / "model.onnx").run({"x": x.T.copy()})["y"], want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("scaled", [False, True])
def test_large_products(kinds: str, scaled: bool, compiler: str, tmp_path: Path) -> None:
    """Batches of matrices whose sums are products with ones; what follows is one pass over their columns."""
    rng, (a, b) = np.random.default_rng(3), kinds.split()
    x, w, p, q = some(rng, a, 2, 40, 519), some(rng, b, 519, 37), np.array(77, a), some(rng, b, 37)
    total = np.einsum("bik,kn->bin", x.astype(np.int64) - 77, w.astype(np.int64) - q.astype(np.int64)).astype(np.int32)
    scale = ((rng.random(37) + 0.5) / 900).astype(np.float32)
    consts = {"p": p, "q": q, "w": w} | (
        {"xs": np.float32(0.3), "ws": scale, "ys": np.float32(0.7), "yz": np.int8(-9)} if scaled else {}
    )
    made = node("QLinearMatMul", "x xs p w ws q ys yz") if scaled else node("MatMulInteger", "x w p q")
    m = build([made], {"x": x}, ["y"], consts, opset=21, ir=10)
    want = np.clip(np.rint(total.astype(np.float32) * (np.float32(0.3) * scale / np.float32(0.7))) - 9, -128, 127)
    want = want.astype(np.int8) if scaled else total
    assert np.array_equal(evaluate(lift_model(m, tmp_path), {"x": x})["y"], want)
    for devices in (1, 2):
        assert np.array_equal(tapestry.compile(tmp_path / "model.onnx", devices=devices).run({"x": x})["y"], want)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("zeros", ["none", "known", "given"])
@pytest.mark.parametrize("depth", [1, 255, 1301])
def test_products_on_packed_weights(kinds: str, zeros: str, depth: int) -> None:
    """Bit for bit, of extremes as well, where one sum is more than a float holds; zero points of the weight in either way."""
    first, second = kinds.split()
    rng = np.random.default_rng(depth)
    w = some(rng, second, depth, 21)
    w[:, 3], q = np.iinfo(second).max, np.array(np.iinfo(second).min + 3, second)
    names = ["x", "w", *(["p", "q"] if zeros != "none" else [])]
    ins = {
        "x": (helper.np_dtype_to_tensor_dtype(np.dtype(first)), (2, 5, depth)),
        "p": (helper.np_dtype_to_tensor_dtype(np.dtype(first)), ()),
    }
    ins |= {"q": (helper.np_dtype_to_tensor_dtype(np.dtype(second)), ())} if zeros == "given" else {}
    weights = {"w": w, **({"q": q} if zeros == "known" else {})}
    used = {n: v for n, v in ins.items() if n in names}
    made = tapestry.compile(net([N("MatMulInteger", names, ["y"])], used, {"y": TensorProto.INT32}, weights), mesh="1")
    for _ in range(2):
        x, p = some(rng, first, 2, 5, depth), np.array(rng.integers(np.iinfo(first).min, np.iinfo(first).max), first)
        x[1, 2] = np.iinfo(first).max
        got = made.run({n: a for n, a in {"x": x, "p": p, "q": q}.items() if n in used})["y"]
        off = (x.astype(np.int64) - (int(p) if zeros != "none" else 0), w.astype(np.int64) - (int(q) if zeros != "none" else 0))
        np.testing.assert_array_equal(got, (off[0] @ off[1]).astype(np.int32))
