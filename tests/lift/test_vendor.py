"""Operators that onnxruntime's optimiser and quantiser write: each alone, on one device and two, against onnxruntime itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tapestry import api
from tapestry.errors import ModelError
from tapestry.lift.operators.contrib.microsoft import DEFINITIONS
from tapestry.onnx_eval.ort_session import ort_session

RNG = np.random.default_rng(11)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def u8(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def i8(*shape: int) -> np.ndarray:
    return RNG.integers(-100, 100, shape).astype(np.int8)


def scale(value: float, zero: int = 128, dtype: type = np.uint8) -> list[np.ndarray]:
    return [np.array(value, np.float32), np.array(zero, dtype)]


def case(op: str, *ins: np.ndarray | None, outs: int = 1, domain: str = "com.microsoft", opset: int = 18, **attributes):
    attributes |= {"opset": opset} if op == "QLinearSoftmax" else {}
    label = "-".join([op, *(f"{k}={v}" for k, v in attributes.items()), *(["f16"] if ins[0].dtype == np.float16 else [])])
    return pytest.param(
        op, ins, outs, domain, opset, attributes, id=f"{label}-{len([i for i in ins if i is not None])}in-{opset}"
    )


X, G = f32(2, 3, 8), f32(8)
Q = {"num_heads": 2}
MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], np.int32)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


PLACES, TABLES = np.array([[3, 1, 8], [0, 9, 2]]), (f32(10, 4), f32(10, 4))
ROTARY = [
    case("RotaryEmbedding", f32(2, 3, 16), PLACES, *TABLES),
    case("RotaryEmbedding", f32(2, 5, 3, 8), PLACES, *TABLES, interleaved=1),
    case("RotaryEmbedding", f32(2, 3, 20), np.array([4]), *TABLES, num_heads=2, rotary_embedding_dim=8),
    case("RotaryEmbedding", f32(2, 3, 20), np.array([4]), *TABLES, num_heads=2, rotary_embedding_dim=8, interleaved=1),
]


def grouped(
    length: int, cache: int, last: np.ndarray, total: int, *more: np.ndarray | None, packed=False, width: int = 16, **attributes
):
    """GroupQueryAttention of four heads in two groups."""
    batch = len(last)
    given = [f32(batch, length, 8 * width), None, None] if packed else [f32(batch, length, n * width) for n in (4, 2, 2)]
    past = [f32(batch, 2, cache, width) for _ in range(2)]
    if attributes.pop("half", False):
        given, past, more = (
            [a if a is None or a.dtype.kind == "i" else a.astype(np.float16) for a in v] for v in (given, past, more)
        )
    heads = {"num_heads": 4, "kv_num_heads": 2}
    return case("GroupQueryAttention", *given, *past, last, np.array(total, np.int32), *more, outs=3, **heads, **attributes)


NONE4, TURNS = (None, None, None, None), (f32(12, 8), f32(12, 8))
GROUPED = [
    grouped(5, 0, i32(4, 4), 5),
    grouped(5, 0, i32(2, 4), 5, *TURNS, do_rotary=1),  # padded at its end
    grouped(1, 6, i32(6, 6), 7, *TURNS, do_rotary=1, packed=True),
    grouped(1, 6, i32(3, 6), 7, *TURNS, do_rotary=1, rotary_interleaved=1),  # rows of other lengths
    grouped(1, 10, i32(3, 6), 7, *TURNS, do_rotary=1, scale=0.3, width=32),  # a cache that is longer than what is in it
    grouped(4, 10, i32(3, 3), 4, softcap=2.0),
    grouped(3, 4, i32(6), 7, local_window_size=3),
    grouped(3, 4, i32(6), 7, *TURNS, np.array([[4, 5, 6]]), f32(1, 4, 3, 7), do_rotary=1),
    grouped(3, 4, i32(6), 7, *NONE4, f32(4)),  # a sink
    grouped(3, 4, i32(6), 7, smooth_softmax=1),
    grouped(1, 4, i32(4, 4), 5, *TURNS, do_rotary=1, half=True),
]

CASES = [
    case("LayerNormalization", X, G, f32(8), domain="", opset=13, epsilon=1e-3),
    case("SimplifiedLayerNormalization", X, G, domain="", opset=17, epsilon=1e-3),
    case("SimplifiedLayerNormalization", X.astype(np.float16), G.astype(np.float16), domain="", opset=17, epsilon=1e-3),
    case("SkipLayerNormalization", X, f32(2, 3, 8), G, f32(8), f32(8), outs=4, epsilon=1e-3),
    case("SkipLayerNormalization", X, f32(2, 3, 8), G),
    case("SkipSimplifiedLayerNormalization", X, f32(2, 3, 8), G, outs=4),
    case("SkipSimplifiedLayerNormalization", X, f32(2, 3, 8), G, f32(8), epsilon=1e-2),
    case(
        "EmbedLayerNormalization", *(RNG.integers(0, n, (2, 3)).astype(np.int32) for n in (9, 2)),
        f32(9, 8), f32(6, 8), f32(2, 8), G, f32(8), outs=2, epsilon=1e-3,
    ),
    case("Gelu", X), case("BiasGelu", X, G), case("FastGelu", X), case("FastGelu", X, G), case("QuickGelu", X, alpha=1.5),
    case("FusedConv", f32(2, 4, 6, 5), f32(6, 2, 3, 3), f32(6), activation="LeakyRelu", activation_params=[0.2], group=2),
    case("FusedConv", f32(1, 4, 6, 5), f32(6, 4, 3, 3), f32(6), f32(1, 6, 4, 3), activation="Relu"),
    case("FusedConv", f32(1, 4, 6, 5), f32(6, 4, 3, 3), activation="Clip", activation_params=[-0.5, 1.5], pads=[1, 1, 1, 1]),
    case("FusedGemm", f32(3, 4), f32(5, 4), f32(5), activation="HardSigmoid", activation_alpha=0.3, activation_beta=0.4, transB=1),
    case("Range", np.array(1.5, np.float32), np.array([7], np.float32), np.array([0.5], np.float32)),
    case("Range", np.array(2), np.array(7)), case("Range", np.array(2, np.int32), np.array([7], np.int32), opset=13),
    case("Trilu", f32(2, 4, 5), np.array(1), upper=0, opset=14), case("GatherND", f32(3, 4), np.array([[2, 1], [0, 3]]), opset=12),
    case("GridSample", f32(1, 2, 4, 5), f32(1, 3, 6, 2), padding_mode="border", opset=20), case("GridSample", f32(1, 2, 4, 5), f32(1, 3, 6, 2), opset=16),
    case("FusedMatMul", f32(2, 4, 3), f32(2, 5, 4), transA=1, transB=1, alpha=0.3),
    case("FusedMatMul", f32(2, 3, 4), f32(4, 5), alpha=2.0),
    case("Attention", f32(2, 5, 8), f32(8, 24), f32(24), MASK, **Q),
    case("Attention", f32(2, 5, 8), f32(8, 24), f32(24), unidirectional=1, scale=0.3, **Q),
    case("Attention", f32(2, 5, 8), f32(8, 20), f32(20), None, None, f32(1, 2, 5, 5), qkv_hidden_sizes=[8, 8, 4], **Q),
    case("MultiHeadAttention", f32(2, 3, 8), f32(2, 5, 8), f32(2, 5, 8), f32(24), MASK, f32(1, 2, 3, 5), outs=3, **Q),
    case("MultiHeadAttention", f32(2, 3, 8), f32(2, 2, 5, 4), f32(2, 2, 5, 4), **Q),
    case(
        "MultiHeadAttention", f32(2, 3, 8), f32(2, 3, 8), f32(2, 3, 8), None, None, None, f32(2, 2, 2, 4), f32(2, 2, 2, 4), outs=3,
        unidirectional=1, **Q,
    ),
    case("Attention", f32(2, 5, 8), f32(8, 24), f32(24), np.tril(np.ones((2, 5, 5), np.int32)), **Q),
    case("Attention", f32(2, 2, 8), f32(8, 24), f32(24), MASK, f32(2, 2, 2, 3, 4), outs=2, unidirectional=1, **Q),
    *ROTARY,
    *GROUPED,
    case("QLinearAdd", u8(3, 4), *scale(0.1), u8(4), *scale(0.03, 7), *scale(0.2, 100)),
    case("QLinearMul", i8(3, 4), *scale(0.1, -3, np.int8), i8(3, 4), *scale(0.03, 7, np.int8), *scale(0.2, 0, np.int8)),
    case("QLinearSigmoid", u8(3, 4), *scale(0.05), *scale(1 / 256, 0)),
    case("QLinearLeakyRelu", u8(3, 4), *scale(0.05), *scale(0.05, 90), alpha=0.2),
    case("QLinearSoftmax", u8(3, 4), *scale(0.05), *scale(1 / 256, 0), axis=-1),
    case("QLinearGlobalAveragePool", u8(2, 3, 4, 5), *scale(0.05), *scale(0.02)),
    case("QLinearAveragePool", u8(2, 3, 4, 6), *scale(0.05), *scale(0.04), kernel_shape=[2, 2], strides=[2, 2]),
    case("QLinearConcat", *scale(0.1), u8(3, 4), *scale(0.1), u8(3, 2), *scale(0.07, 3), axis=1),
    case("QLinearWhere", f32(3, 4) > 0, u8(3, 4), *scale(0.1), u8(3, 4), *scale(0.07, 3), *scale(0.1)),
    case(
        "QGemm", u8(3, 4), *scale(0.1), i8(5, 4), f32(5) ** 2 / 50, np.zeros(5, np.int8), RNG.integers(-99, 99, 5).astype(np.int32),
        *scale(0.3), transB=1,
    ),
    case("QGemm", u8(3, 4), *scale(0.1), i8(4, 5), *scale(0.02, 3, np.int8), alpha=1.0),
    case("MatMulIntegerToFloat", u8(3, 4), i8(4, 5), *(np.array(v, np.float32) for v in (0.1, 0.2)), np.uint8(7), np.int8(3), f32(5)),
    case("DynamicQuantizeMatMul", f32(3, 4), i8(4, 5), f32(5) ** 2, np.zeros(5, np.int8), f32(5)),
    case("DynamicQuantizeLinear", f32(3, 4), domain="", outs=3), case("DynamicQuantizeLinear", np.abs(f32(3, 4)), domain="", outs=3),
    case("DynamicQuantizeLinear", np.zeros((3, 4), np.float32), domain="", outs=3, opset=13),
    case("DequantizeLinear", RNG.integers(0, 65535, (3, 4)).astype(np.uint16), *scale(0.1, 700, np.uint16)),
    case("QuantizeLinear", f32(3, 4), *scale(0.001, 700, np.uint16)),
    case("MatMulNBits", f32(3, 20), u8(6, 2, 8), f32(12) / 9, K=20, N=6, bits=4, block_size=16),
    case("MatMulNBits", f32(2, 3, 48), u8(6, 3, 8), f32(18) / 9, u8(12), None, f32(6), K=48, N=6, bits=4, block_size=16),
    case("MatMulNBits", f32(3, 32), u8(6, 2, 16), f32(12) / 99, u8(12), K=32, N=6, bits=8, block_size=16),
    case("MatMulNBits", f32(3, 32), u8(6, 2, 8), f32(12) / 9, f32(12), K=32, N=6, bits=4, block_size=16),
]  # fmt: skip


def fed_to(op: str, ins) -> list[int]:
    """Which inputs are the model's."""
    count = {"Attention": 3, "MultiHeadAttention": 3, "RotaryEmbedding": 2, "GroupQueryAttention": 6}.get(op, 1)
    past = [4] if op == "Attention" else []
    return [k for k, a in enumerate(ins) if a is not None and (k < count or k in past)]


def save(folder: Path, op: str, ins, outs: int, domain: str, opset: int, attributes) -> Path:
    """The first float or activation is the input; the rest are initializers, as in a model that was saved."""
    names = ["" if a is None else f"i{k}" for k, a in enumerate(ins)]
    fed = fed_to(op, ins)
    arrays = {n: np.asarray(a) for n, a in zip(names, ins, strict=True) if n}
    info = lambda n: helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(arrays[n].dtype), arrays[n].shape)  # noqa: E731
    given = [info(names[k]) for k in fed]
    inits = [numpy_helper.from_array(a, n) for n, a in arrays.items() if n not in {i.name for i in given}]
    wanted = [f"o{k}" for k in range(outs)]
    if op == "SkipLayerNormalization" and outs == 4:  # onnxruntime's kernel for processors does not write the two between
        wanted[1:3] = ["", ""]
    if op == "SkipSimplifiedLayerNormalization" and outs == 4:
        wanted[1:3] = ["", ""]
    node = helper.make_node(op, names, wanted, "node", domain=domain, **attributes)
    results = [helper.make_value_info(o, onnx.TypeProto()) for o in wanted if o]
    graph = helper.make_graph([node], "g", given, results, inits)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=opsets), folder / "model.onnx")
    return folder / "model.onnx"


def feeds_of(op: str, ins) -> dict[str, np.ndarray]:
    return {f"i{k}": ins[k] for k in fed_to(op, ins)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("op", "ins", "outs", "domain", "opset", "attributes"), CASES)
def test_an_operator_of_onnxruntime_is_what_it_computes(tmp_path, op, ins, outs, domain, opset, attributes):

    path, feeds = save(tmp_path, op, ins, outs, domain, opset, attributes), feeds_of(op, ins)
    session = ort_session(str(path))
    wanted = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    for mesh in ("1", "2"):
        found = api.compile(path, mesh=mesh, time_limit=5).run(feeds)
        for name, expected in wanted.items():
            got = found[name]
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype), name
            if got.dtype.kind in "iu":  # a sum rounded differently may be one step away, no more
                gap = np.abs(got.astype(np.int64) - expected.astype(np.int64))
                assert gap.max() <= 1 and (gap > 0).sum() <= max(1, gap.size // 10), name
            else:
                half = got.dtype == np.float16
                assert np.allclose(got, expected, rtol=1e-2 if half else 1e-5, atol=1e-2 if half else 2e-6), name


def test_every_definition_has_a_case():
    tried = {(c.values[3], c.values[0]) for c in CASES}
    for domain, op in DEFINITIONS:
        assert any(o == op for _, o in tried) or op == "TransposeMatMul", (domain, op)


def test_what_is_not_defined_is_refused_by_name(tmp_path):
    path = save(tmp_path, "MatMulNBits", (f32(3, 32), u8(6, 2, 8), f32(12), None, np.zeros(32, np.int32)), 1, "com.microsoft", 18,
                {"K": 32, "N": 6, "bits": 4, "block_size": 16})  # fmt: skip
    assert "Opaque" in {type(op).__name__ for op in api.compile(path).build.plan.graph.ops}  # onnxruntime has it
    path = save(tmp_path, "BiasGelu", (X, G), 1, "com.microsoft", 18, {})
    model = onnx.load(path)
    model.graph.node[0].op_type = "NoSuchThing"
    onnx.save(model, path)
    with pytest.raises(ModelError, match=r"NoSuchThing is in domain 'com\.microsoft'"):
        api.compile(path)
    with pytest.raises(ModelError, match=r"'LayerNormalization' is not in 'ai\.onnx' opset 13"):
        api.compile(save(tmp_path, "LayerNormalization", (X, f32(3, 8)), 1, "", 13, {"axis": 1}))


def test_attention_of_onnxruntime_is_one_pass_over_the_keys(tmp_path):
    case = next(c for c in CASES if c.values[0] == "Attention" and "unidirectional" in str(c.id))
    op, ins, outs, domain, opset, attributes = case.values
    graph = api.compile(save(tmp_path, op, ins, outs, domain, opset, attributes), mesh="1").build.plan.graph
    assert [op for op in graph.ops if getattr(op, "monoid", None) == "softsum"], graph.ops


def test_nodes_inside_branches_are_defined_too(tmp_path):
    """Both branches of an If whose condition is known at run time only."""

    def branch(op: str) -> onnx.GraphProto:
        node = helper.make_node(op, ["x", "bias"], ["y"], op, domain="com.microsoft")
        return helper.make_graph([node], op, [], [helper.make_value_info("y", onnx.TypeProto())])

    choose = helper.make_node("If", ["c"], ["z"], then_branch=branch("BiasGelu"), else_branch=branch("FastGelu"))
    ins = [helper.make_tensor_value_info("x", 1, X.shape), helper.make_tensor_value_info("c", 9, [])]
    outs = [helper.make_tensor_value_info("z", 1, X.shape)]
    graph = helper.make_graph([choose], "g", ins, outs, [numpy_helper.from_array(G, "bias")])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=opsets), tmp_path / "model.onnx")
    build = api.compile(tmp_path / "model.onnx", mesh="2")
    for c in (True, False):
        assert api.run_checked(build, {"x": X, "c": np.array(c)}, check=True)[1]["passed"]


@pytest.mark.parametrize("attributes", [{"bits": "four"}, {"bits": 5}, {"K": -1}, {"block_size": 0}, {"N": [1, 2]}])
def test_nonsense_in_attributes_is_refused(tmp_path, attributes):
    given = {"K": 32, "N": 6, "bits": 4, "block_size": 16} | attributes
    path = save(tmp_path, "MatMulNBits", (f32(3, 32), u8(6, 2, 8), f32(12)), 1, "com.microsoft", 18, given)
    with pytest.raises(ModelError):
        api.compile(path)
