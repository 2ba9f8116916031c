"""Lifting: what ONNX says is what the Graph computes, in the names and forms that the other stages count on."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block
from tapestry.ir.index import Aff
from tapestry.ir.syntax.printer import op_text, to_text
from tapestry.lift.affine_values import fit
from tapestry.lift.operators.shape import regroup
from tests.support.lifting import agree, build, data, evaluate, lift_model, node, space

# --- names and forms that other stages count on


@pytest.mark.parametrize("rank, names", [(1, "b, o, w | c, s"), (2, "b, o, h, w | c, r, s"), (3, "b, o, t, h, w | c, q, r, s")])
def test_names_of_a_convolution(tmp_path, rank, names):
    spatial, kernel = (7, 6, 5)[:rank], (3, 2, 2)[:rank]
    graph = agree(
        node("Conv", "x w b"),
        {"x": data(2, 3, *spatial)},
        ["y"],
        {"w": data(4, 3, *kernel, seed=1), "b": data(4, seed=2)},
        folder=tmp_path,
    )
    (op,) = graph.ops
    assert space(op) == names
    assert isinstance(op, Block) and op.monoid == "sum"
    assert [type(a) for a in op.body[0].args] == [Arg, Arg]  # type: ignore[union-attr]
    assert all(r.other is None for r in op.reads)


def test_text_of_a_padded_convolution(tmp_path):
    graph = agree(
        node("Conv", "x w", pads=[3, 3, 3, 3], strides=[2, 2]),
        {"x": data(1, 3, 12, 12)},
        ["y"],
        {"w": data(4, 3, 7, 7, seed=1)},
        folder=tmp_path,
    )
    assert "x[b, c, 2*h + r - 3, s + 2*w - 3] else 0.0" in op_text(graph.ops[0], graph)


def test_names_of_products(tmp_path):
    graph = agree(node("MatMul", "x w"), {"x": data(2, 3, 4, 5), "w": data(3, 5, 6)}, ["y"], folder=tmp_path)
    assert space(graph.ops[0]) == "b0, b1, i, n | m"
    gemm = node("Gemm", "x w c", transA=1, transB=1, alpha=0.5, beta=2.0)
    graph = agree(gemm, {"x": data(5, 4), "w": data(6, 5), "c": data(6)}, ["y"], folder=tmp_path)
    assert space(graph.ops[0]) == "i, n | m"
    plain = agree(node("Gemm", "x w c"), {"x": data(4, 5), "w": data(5, 6), "c": data(6)}, ["y"], folder=tmp_path)
    assert "then acc0 + c" in to_text(plain)


def test_names_of_reductions(tmp_path):
    graph = agree(node("ReduceSum", "x a"), {"x": data(2, 3, 4)}, ["y"], {"a": np.array([1])}, folder=tmp_path)
    reduction, view = graph.ops
    assert space(reduction) == "x0, x2 | x1" and reduction.outs == ("y.r",)
    assert is_view(view) and graph.tensors["y"].shape == (2, 1, 4)


def test_names_of_softmax(tmp_path):
    graph = agree(node("Softmax", "x", axis=1), {"x": data(2, 3, 4)}, ["y"], folder=tmp_path)
    stats, result = graph.ops
    assert isinstance(stats, Block) and stats.monoid == "logsumexp" and stats.outs == ("y.m", "y.l")
    assert space(stats) == "x0, x2 | x1" and space(result) == "x0, x1, x2 | "
    assert "exp((x - a1)) / a2" in op_text(result, graph)


def is_view(op: object) -> bool:
    return isinstance(op, Block) and op.monoid is None and len(op.reads) == 1 and op.body == (Arg(0, op.body[0].dtype),)


def test_views_are_views(tmp_path):
    x = {"x": data(2, 6, 4)}
    consts = {
        "s": np.array([2, 2, 3, 4]),
        "a": np.array([0]),
        "e": np.array([5, 2, 6, 4]),
        "st": np.array([-1]),
        "en": np.array([-9]),
    }
    consts |= {
        "ax": np.array([1]),
        "sp": np.array([-2]),
        "t": np.array([1, 2, 3]),
        "p": np.array([0, 1, 2, 0, 0, 1]),
        "i": np.array([1, 3, 5]),
    }
    for one in (
        node("Reshape", "x s"),
        node("Transpose", "x", perm=[2, 0, 1]),
        node("Unsqueeze", "x a"),
        node("Expand", "x e"),
        node("Slice", "x st en ax sp"),
        node("Tile", "x t"),
        node("Pad", "x p"),
        node("Flatten", "x"),
        node("Identity", "x"),
        node("Gather", "x i", axis=1),
    ):
        used = {n: consts[n] for n in one.input if n in consts}
        graph = agree(one, x, ["y"], used, folder=tmp_path)
        assert len(graph.ops) == 1 and is_view(graph.ops[0]), one.op_type


def test_aligned_reshapes_stay_affine(tmp_path):
    shape = {"s": np.array([2, 5, 12, 64])}
    graph = agree(node("Reshape", "x s"), {"x": data(2, 5, 768)}, ["y"], shape, folder=tmp_path)
    assert "x[x0, x1, 64*x2 + x3]" in to_text(graph)
    graph = agree(node("Reshape", "x s"), {"x": data(2, 5, 4, 3)}, ["y"], {"s": np.array([2, 5, 12])}, folder=tmp_path)
    assert "x[x0, x1, floor((x2)/3), ((x2) mod 3)]" in to_text(graph)


def test_regroup_is_numpys_reshape():
    rng = np.random.default_rng(0)
    for _ in range(60):
        factors = [int(f) for f in rng.choice([1, 2, 3, 4], 4)]
        source = tuple(factors)
        target = tuple(int(np.prod(factors[:k])) for k in (2,)) + tuple(reversed(factors[2:]))
        place = {f"x{k}": v for k, v in enumerate(np.indices(target))}
        index = regroup(source, target, [Aff(((n, 1),)) for n in place], {f"x{k}": s for k, s in enumerate(target)})
        from tapestry.ir.index import evaluate as value

        want = np.arange(np.prod(source)).reshape(source)
        got = want[tuple(np.broadcast_to(value(e, place), target) for e in index)]
        assert np.array_equal(got, want.reshape(target))


def test_concat_is_guarded_reads(tmp_path):
    feeds = {"a": data(2, 3), "b": data(2, 1, seed=1), "c": data(2, 4, seed=2)}
    graph = agree(node("Concat", "a b c", axis=1), feeds, ["y"], folder=tmp_path)
    (op,) = graph.ops
    assert isinstance(op, Block) and [r.other for r in op.reads] == [0.0, 0.0, 0.0]
    assert "lt(index(x1), 3)" in to_text(graph)


def test_depthwise_reads_its_own_channel(tmp_path):
    graph = agree(
        node("Conv", "x w", group=4, pads=[1, 1, 1, 1]),
        {"x": data(1, 4, 5, 5)},
        ["y"],
        {"w": data(4, 1, 3, 3, seed=1)},
        folder=tmp_path,
    )
    op = graph.ops[0]
    assert isinstance(op, Block) and str(op.reads[0].index[1]) == "o"


def test_sources_are_node_names(tmp_path):
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Softmax", ["h"], ["y"], name="soft")]
    graph = agree(nodes, {"x": data(2, 3)}, ["y"], folder=tmp_path)
    assert [op.source for op in graph.ops] == [("h",), ("soft",), ("soft",)]


# --- numbers, over many configurations


def window(rng: np.random.Generator, rank: int) -> dict:
    auto = rng.random() < 0.3
    attributes = {"strides": rng.integers(1, 4, rank).tolist()}
    if auto:  # (onnxruntime refuses a stride beyond the kernel here)
        attributes["strides"] = [min(v, 2) for v in attributes["strides"]]
        attributes["auto_pad"] = str(rng.choice(["SAME_UPPER", "SAME_LOWER", "VALID"]))
    else:
        attributes["dilations"] = rng.integers(1, 3, rank).tolist()
        attributes["pads"] = rng.integers(0, 2, 2 * rank).tolist()
    return attributes


@pytest.mark.parametrize("seed", range(24))
def test_convolutions(tmp_path, seed):
    rng = np.random.default_rng(seed)
    rank, groups = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 3]))
    kernel = rng.integers(1, 4, rank).tolist()
    x = data(2, 6, *rng.integers(7, 10, rank), seed=seed)
    w = data(6, 6 // groups, *kernel, seed=seed + 1)
    agree(
        node("Conv", "x w", group=groups, kernel_shape=kernel, **window(rng, rank)), {"x": x}, ["y"], {"w": w}, folder=tmp_path
    )


@pytest.mark.parametrize("seed", range(24))
def test_transposed_convolutions(tmp_path, seed):
    rng = np.random.default_rng(seed)
    rank, groups = int(rng.integers(1, 4)), int(rng.choice([1, 2]))
    kernel = rng.integers(1, 4, rank).tolist()
    attributes = window(rng, rank)
    if "pads" in attributes and min(attributes["strides"]) > 1 and rng.random() < 0.5:
        attributes["output_padding"] = [1] * rank
    attributes["pads" if "pads" in attributes else "auto_pad"] = attributes.get("pads", "SAME_UPPER")
    x, w = data(2, 4, *rng.integers(3, 6, rank), seed=seed), data(4, 3, *kernel, seed=seed + 1)
    agree(
        node("ConvTranspose", "x w", group=groups, kernel_shape=kernel, **attributes),
        {"x": x},
        ["y"],
        {"w": w},
        folder=tmp_path,
    )


@pytest.mark.parametrize("seed", range(24))
def test_pools(tmp_path, seed):
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(1, 4))
    attributes = window(rng, rank)
    op = str(rng.choice(["MaxPool", "AveragePool"]))
    attributes |= {"kernel_shape": rng.integers(2, 4, rank).tolist()}
    if "pads" in attributes:
        attributes["ceil_mode"] = int(rng.integers(2))
    if op == "AveragePool":
        attributes["count_include_pad"] = int(rng.integers(2))
    agree(
        node(op, "x", **attributes), {"x": data(2, 3, *rng.integers(7, 10, rank), seed=seed)}, ["y"], opset=19, folder=tmp_path
    )


def test_old_softmax_flattens(tmp_path):
    for axis in (0, 1, 2):
        agree(node("Softmax", "x", axis=axis), {"x": data(2, 3, 4)}, ["y"], opset=11, folder=tmp_path)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "op",
    [
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSum",
        "ReduceLogSumExp",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceProd",
        "ReduceSum",
        "ReduceSumSquare",
    ],
)
@pytest.mark.parametrize("keep", [0, 1])
def test_reductions(tmp_path, op, keep):
    x = np.abs(data(2, 3, 4)) + 0.1
    agree(node(op, "x a", keepdims=keep), {"x": x}, ["y"], {"a": np.array([0, -1])}, folder=tmp_path)
    agree(node(op, "x", keepdims=keep), {"x": x}, ["y"], folder=tmp_path)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_arg(tmp_path, op, last):
    x = np.random.default_rng(1).integers(0, 3, (4, 5)).astype(np.float32)
    agree(node(op, "x", axis=1, select_last_index=last, keepdims=0), {"x": x}, ["y"], folder=tmp_path)


def test_gathers(tmp_path):
    x = data(5, 4)
    index = np.array([[0, -1, 2], [4, 1, -5]])
    graph = agree(node("Gather", "x i", axis=0), {"x": x, "i": index}, ["y"], folder=tmp_path)
    assert "v: 5 sum" in to_text(graph)
    agree(node("Gather", "x i", axis=1), {"x": x, "i": np.array(-1)}, ["y"], folder=tmp_path)
    graph = agree(node("Gather", "x i", axis=0), {"x": x}, ["y"], {"i": index}, folder=tmp_path)
    assert "v: 5 sum" in to_text(graph)
    graph = agree(node("Gather", "x i", axis=0), {"x": x}, ["y"], {"i": np.array(-2)}, folder=tmp_path)
    assert is_view(graph.ops[0])
    agree(node("GatherND", "x i"), {"x": x, "i": np.array([[0, 1], [4, -1]])}, ["y"], folder=tmp_path, native=False)


def test_gather_by_computed_positions_is_a_view(tmp_path):
    """What exporters write for a position embedding, and for reading an attention mask."""
    nodes = [
        node("Range", "zero n one", "r"),
        node("Unsqueeze", "r ax0", "row"),
        node("Unsqueeze", "r ax1", "col"),
        node("Expand", "row shape", "rows"),
        node("Expand", "col shape", "cols"),
        node("Unsqueeze", "cols last", "a"),
        node("Unsqueeze", "rows last", "b"),
        node("Concat", "a b", "ab", axis=-1),
        node("GatherND", "x ab", "y"),
    ]
    consts = {"zero": np.array(0), "n": np.array(20), "one": np.array(1), "ax0": np.array([0]), "ax1": np.array([1])}
    consts |= {"shape": np.array([20, 20]), "last": np.array([-1])}
    graph = agree(nodes, {"x": data(20, 20)}, ["y"], consts, folder=tmp_path)
    assert is_view(graph.ops[-1]) and "x[x0, x1]" in op_text(graph.ops[-1], graph)


def test_affine_fit():
    a = 7 + 3 * np.arange(4)[:, None] - 2 * np.arange(5)
    assert fit(a) == (7, [3, -2])
    a[2, 2] += 1
    assert fit(a) is None


@pytest.mark.parametrize(
    "op, attributes",
    [
        ("LeakyRelu", {}),
        ("Elu", {"alpha": 0.5}),
        ("Selu", {}),
        ("HardSigmoid", {}),
        ("Softplus", {}),
        ("Softsign", {}),
        ("Celu", {}),
        ("ThresholdedRelu", {}),
        ("Shrink", {"bias": 0.2}),
        ("HardSwish", {}),
        ("Mish", {}),
        ("Erf", {}),
        ("Sign", {}),
        ("Round", {}),
        ("Reciprocal", {}),
    ],
)
def test_activations(tmp_path, op, attributes):
    agree(node(op, "x", **attributes), {"x": 3 * data(4, 5)}, ["y"], folder=tmp_path)


def test_integer_arithmetic(tmp_path):
    a, b = np.array([7, -7, 7, -7]), np.array([2, 2, -2, -2])
    for one in (node("Div", "a b"), node("Mod", "a b"), node("Mod", "a b", fmod=1)):
        agree(one, {"a": a, "b": b}, ["y"], folder=tmp_path)


def test_half_precision_accumulates_wide(tmp_path):
    model = build([node("MatMul", "x w")], {"x": np.ones((1, 4096), np.float16), "w": np.ones((4096, 1), np.float16)}, ["y"])
    graph = lift_model(model, tmp_path).graph
    (op,) = graph.ops
    assert isinstance(op, Block) and op.body[0].dtype == "f32" and op.then[0].dtype == "f16"


@pytest.mark.parametrize(
    "op, extra",
    [
        ("LayerNormalization", "s b"),
        ("InstanceNormalization", "c d"),
        ("BatchNormalization", "c d m v"),
        ("GroupNormalization", "c d"),
    ],
)
def test_norms(tmp_path, op, extra):
    consts = {
        "s": data(5),
        "b": data(5, seed=1),
        "c": data(4),
        "d": data(4, seed=1),
        "m": data(4, seed=2),
        "v": np.abs(data(4, seed=3)),
    }
    attributes = {"num_groups": 2} if op == "GroupNormalization" else {}
    used = {k: consts[k] for k in extra.split()}
    agree(node(op, f"x {extra}", **attributes), {"x": 5 + data(2, 4, 3, 5)}, ["y"], used, opset=21, folder=tmp_path)


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
def test_pads(tmp_path, mode):
    pads = {"p": np.array([1, 0, 2, 2, 1, 0])}
    agree(node("Pad", "x p", mode=mode), {"x": data(3, 4, 5)}, ["y"], pads, opset=19, folder=tmp_path)


@pytest.mark.parametrize("three", [False, True])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("mask", ["", "bool", "float"])
def test_attention(tmp_path, three, causal, mask):
    """Grouped heads, a cache, a softcap; against the ONNX reference, which a group of several heads separates from a bug."""
    b, h, g, s, t, d = 2, 4, 2, 3, 5, 6
    shape = (lambda n, p: (b, p, n * d)) if three else (lambda n, p: (b, n, p, d))
    feeds = {"q": data(*shape(h, s)), "k": data(*shape(g, t), seed=1), "v": data(*shape(g, t), seed=2)}
    feeds |= {"pk": data(b, g, 2, d, seed=3), "pv": data(b, g, 2, d, seed=4)}
    if mask:
        allowed = np.random.default_rng(5).random((s, t + 2)) < 0.7
        feeds["mask"] = allowed if mask == "bool" else np.where(allowed, 0, -2).astype(np.float32)
    heads = {"q_num_heads": h, "kv_num_heads": g} if three else {}
    one = node("Attention", f"q k v {'mask' if mask else '_'} pk pv", "y k2 v2", is_causal=causal, softcap=2.0, **heads)
    model = build([one], feeds, ["y", "k2", "v2"], opset=23, ir=10)
    want = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
    lifted = lift_model(model, tmp_path)
    got = evaluate(lifted, feeds)
    for name, array in zip(("y", "k2", "v2"), want, strict=True):
        np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-5)
    assert all(isinstance(op, Block) for op in lifted.graph.ops)
    scores = next(op for op in lifted.graph.ops if isinstance(op, Block) and op.monoid == "sum")
    assert space(scores) == "b0, b1, i, n | m"


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("partial", [0, 4])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("three", [False, True])
def test_rotary(tmp_path, interleaved, partial, ids, three):
    b, h, s, d = 2, 3, 4, 8
    half = (partial or d) // 2
    table = (10, half) if ids else (b, s, half)
    feeds = {"x": data(b, s, h * d) if three else data(b, h, s, d), "c": data(*table, seed=1), "n": data(*table, seed=2)}
    if ids:
        feeds["p"] = np.random.default_rng(0).integers(0, 10, (b, s))
    attributes = {"interleaved": interleaved, "rotary_embedding_dim": partial} | ({"num_heads": h} if three else {})
    model = build([node("RotaryEmbedding", "x c n p" if ids else "x c n", **attributes)], feeds, ["y"], opset=23, ir=10)
    want = onnx.reference.ReferenceEvaluator(model).run(None, feeds)[0]
    np.testing.assert_allclose(evaluate(lift_model(model, tmp_path), feeds)["y"], want, rtol=1e-5, atol=1e-6)
