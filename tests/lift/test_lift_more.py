"""Resize, Einsum, and opaque operators that commute with some axes, against onnxruntime; each under splits as well."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import tapestry
from tapestry.errors import ModelError
from tapestry.ir.graph import Block, Opaque
from tapestry.onnx_eval.ort_session import ort_session
from tests.support.lifting import agree, build, data, evaluate, lift_model, node

RESIZE = [
    {"mode": "linear"}, {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}, {"mode": "nearest"},
    {"mode": "linear", "coordinate_transformation_mode": "align_corners"}, {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}, {"mode": "nearest", "nearest_mode": "round_prefer_ceil"},
]  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("attributes", RESIZE, ids=lambda a: "-".join(a.values()))
@pytest.mark.parametrize("height, width", [(14, 10), (9, 17), (5, 4), (7, 5)])
def test_resize_to_any_size_is_affine(tmp_path, attributes, height, width):
    consts = {"sizes": np.array([2, 3, height, width], np.int64)}
    agree(node("Resize", "x _ _ sizes", **attributes), {"x": data(2, 3, 7, 5)}, ["y"], consts, folder=tmp_path, rtol=1e-5)


@pytest.mark.parametrize("scale", [2.0, 1.5, 3.0])
def test_resize_by_scales(tmp_path, scale):
    consts = {"scales": np.array([1, 1, scale, 2], np.float32)}
    for mode in ("linear", "nearest"):
        agree(node("Resize", "x _ scales", mode=mode), {"x": data(1, 2, 6, 5)}, ["y"], consts, folder=tmp_path, rtol=1e-5)


# size and scale: in float64 the product is just below a whole number, in float32 (onnxruntime, exporters) it is that number
ROUNDED_UP = [(5, 1.4), (10, 2.3)]


def _rounded_up(opset, mode):
    """A Resize by such scales and a pool of its result. (onnxruntime's own Shape of it, folded, is wrong.)"""
    (h, a), (w, b) = ROUNDED_UP[0], ROUNDED_UP[1]
    scales = np.array([1, 1, a, b], np.float32)
    assert np.floor(h * np.float64(scales[2])) < np.float32(h) * scales[2] and np.float32(w) * scales[3] % 1 == 0
    if opset < 9:
        how, ins = {"scales": scales.tolist()}, ""
    else:
        how, ins = {}, "scales" if opset < 11 else "roi scales"
    op = "Upsample" if opset < 10 else "Resize"
    nodes = [
        node(op, f"x {ins}", "y", mode=mode, **how),
        node("MaxPool", "y", "p", kernel_shape=[2, 2], strides=[2, 2]),
    ]
    return nodes, {"x": data(1, 2, h, w)}, {"scales": scales, "roi": np.zeros(0, np.float32)} if opset >= 9 else {}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("opset", [7, 9, 10, 11, 13, 18])
def test_resize_by_a_scale_that_rounds_up_has_the_size_that_float32_gives(tmp_path, opset, mode):
    nodes, feeds, consts = _rounded_up(opset, mode)
    graph = agree(nodes, feeds, ["y", "p"], consts, opset=opset, folder=tmp_path, rtol=1e-5)
    assert graph.tensors["y"].shape == (1, 2, 7, 23) and graph.tensors["p"].shape == (1, 2, 3, 11)


def test_one_resize_after_another_by_such_scales(tmp_path):
    consts = {"a": np.array([1, 1, 1.4, 1], np.float32), "b": np.array([1, 1, 1, 2.3], np.float32)}
    nodes = [
        node("Resize", "x _ a", "m"),
        node("Resize", "m _ b", "n"),
        node("AveragePool", "n", "y", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    ]
    graph = agree(nodes, {"x": data(1, 2, 5, 10)}, ["y"], consts, opset=13, folder=tmp_path)
    assert graph.tensors["y"].shape == (1, 2, 4, 12)


def test_nearest_cells_of_tensorflow_at_any_opset(tmp_path):
    """`tf_half_pixel_for_nn` belongs to opset 11; tf2onnx writes it at every later one, and onnxruntime runs it."""
    how = {"mode": "nearest", "coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor"}
    none = {"none": np.zeros(0, np.float32)}
    for sizes in ([1, 2, 9, 11], [1, 2, 4, 3]):
        agree(
            node("Resize", "x none none sizes", **how),
            {"x": data(1, 2, 6, 5)},
            ["y"],
            {"sizes": np.array(sizes, np.int64), **none},
            opset=11,
            folder=tmp_path,
        )
    graph = lift_model(
        build(
            [node("Resize", "x _ _ sizes", **how)],
            {"x": data(1, 2, 6, 5)},
            ["y"],
            {"sizes": np.array(sizes, np.int64)},
            opset=18,
        ),
        tmp_path,
    ).graph
    assert all(isinstance(op, Block) for op in graph.ops)


def test_resize_that_floor_cannot_say_stays_opaque_and_splits_by_channel(tmp_path):
    consts = {"scales": np.array([1, 1, 2, 2], np.float32)}
    graph = agree(
        node("Resize", "x _ scales", mode="linear", antialias=1),
        {"x": data(2, 3, 6, 5)},
        ["y"],
        consts,
        folder=tmp_path,
        native=False,
    )
    (op,) = graph.ops
    assert isinstance(op, Opaque) and [d.name for d in op.dims] == ["b", "c"]


def split(tmp_path, model_node, feeds, outputs=("y",), consts=None, pins=(), devices=3):
    """Compiled with a split forced, a model gives what it gives on one device."""
    path = tmp_path / "m.onnx"
    path.write_bytes(build([model_node], feeds, outputs, consts).SerializeToString())
    alone, cut = tapestry.compile(path, devices=1), tapestry.compile(path, devices=devices, pins=pins)
    a, b = alone.run(feeds), cut.run(feeds)
    for name in outputs:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6)
    return cut


def test_resize_split_by_rows_exchanges_a_halo(tmp_path):
    consts = {"sizes": np.array([1, 2, 24, 10], np.int64)}
    cut = split(
        tmp_path,
        node("Resize", "x _ _ sizes", mode="linear"),
        {"x": data(1, 2, 12, 5)},
        consts=consts,
        pins=["y:x2=3@d0"],
        devices=3,
    )
    assert all(isinstance(op, Block) for op in cut.build.plan.graph.ops)


@pytest.mark.parametrize(
    "equation, shapes",
    [
        ("ij,jk->ik", [(4, 5), (5, 6)]), ("ii->i", [(4, 4)]), ("ii", [(4, 4)]), ("i,j->ij", [(3,), (4,)]), ("bij,bjk->bki", [(2, 3, 4), (2, 4, 5)]),
        ("...ij,...jk->...ik", [(2, 3, 4), (1, 4, 5)]), ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]), ("ij->ji", [(3, 4)]), ("ab,aB->bB", [(3, 4), (3, 5)]),
    ],
)  # fmt: skip
def test_einsum_is_a_product_under_a_sum(tmp_path, equation, shapes):
    names = "xyz"[: len(shapes)]
    feeds = {n: data(*s, seed=k) for k, (n, s) in enumerate(zip(names, shapes, strict=True))}
    agree(node("Einsum", " ".join(names), "out", equation=equation), feeds, ["out"], folder=tmp_path)


def test_einsum_splits_its_summed_label(tmp_path):
    split(
        tmp_path,
        node("Einsum", "x w", "y", equation="bij,jk->bik"),
        {"x": data(2, 3, 8), "w": data(8, 5)},
        pins=["y:j=2@d0"],
        devices=2,
    )


BATCHED = {
    "DFT": (node("DFT", "x", onesided=1, axis=1), {"x": data(4, 8, 3, 1)}, "x0"),
    "Det": (node("Det", "x"), {"x": data(4, 3, 3)}, "x0"),
    "ReverseSequence": (node("ReverseSequence", "x n"), {"x": data(5, 4, 2), "n": np.array([1, 5, 2, 3])}, "x1"),
    "RoiAlign": (node("RoiAlign", "x r i", output_height=2, output_width=2), {"x": data(2, 4, 8, 8), "r": np.array([[0, 0, 4, 4], [1, 1, 6, 7], [2, 0, 5, 5]], np.float32), "i": np.array([0, 1, 1])}, "r"),
    "ConvInteger": (node("ConvInteger", "x w z", pads=[1, 1, 1, 1]), {"z": np.array(3, np.uint8), "x": np.arange(98, dtype=np.uint8).reshape(2, 1, 7, 7), "w": np.arange(27, dtype=np.uint8).reshape(3, 1, 3, 3)}, "o"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BATCHED))
def test_opaque_operators_split_where_they_commute(tmp_path, name):
    model_node, feeds, dim = BATCHED[name]
    cut = split(tmp_path, model_node, feeds, pins=[f"y:{dim}=2@d0"], devices=2)
    (op,) = [op for op in cut.build.plan.graph.ops if isinstance(op, Opaque)]
    assert dim in [d.name for d in op.dims]


def test_dropout_told_at_run_time_to_train_or_not(tmp_path):
    feeds = {"x": data(40, 50), "t": np.array(True)}
    drop = node("Dropout", "x r t", "y mask")
    cut = split(tmp_path, drop, feeds, ("y", "mask"), {"r": np.array(0.25, np.float32)}, ["y:x0=3@d0"], 3)
    found = cut.run(feeds)
    assert abs(found["mask"].mean() - 0.75) < 0.05
    np.testing.assert_allclose(found["y"], np.where(found["mask"], feeds["x"] / 0.75, 0), rtol=1e-6)
    idle = cut.run({**feeds, "t": np.array(False)})
    assert np.array_equal(idle["y"], feeds["x"]) and idle["mask"].all()


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_padding_may_be_wider_than_the_tensor(tmp_path, mode, size):
    """As numpy does it: a reflection goes back and forth."""
    x, pads = data(size, 3), (2 * size + 1, 1, size + 2, 0)
    model = build([node("Pad", "x pads", mode=mode)], {"x": x}, ["y"], {"pads": np.array(pads, np.int64)}, opset=19)
    lifted = lift_model(model, tmp_path)
    assert all(isinstance(op, Block) for op in lifted.graph.ops)
    want = np.pad(x, ((pads[0], pads[2]), (pads[1], pads[3])), mode=mode)
    assert np.array_equal(evaluate(lifted, {"x": x})["y"], want)


def test_padding_that_reflects_the_tensor_without_end_is_refused(tmp_path):
    model = build([node("Pad", "x pads", mode="reflect")], {"x": data(2)}, ["y"], {"pads": np.array([1 << 20, 0], np.int64)})
    with pytest.raises(ModelError, match="too often"):
        lift_model(model, tmp_path)


def test_a_constant_may_be_an_output_and_be_read(tmp_path):
    """Folding makes it an initializer; onnx's inference must not lose its type."""
    nodes = [node("Abs", "w", "a"), node("Pow", "a x", "p"), node("Clip", "p low", "y")]
    consts = {"w": data(3) - 1, "low": np.float32(0.5)}
    agree(nodes, {"x": data(3, seed=1)}, ["a", "y"], consts, folder=tmp_path, native=False)


@pytest.mark.parametrize("onesided", [None, 0, 1])
def test_stft_has_one_side_unless_it_says_otherwise(tmp_path, onesided):
    consts = {"step": np.int64(4), "window": np.hanning(8).astype(np.float32)}
    model = node("STFT", "x step window", **({} if onesided is None else {"onesided": onesided}))
    out = split(tmp_path, model, {"x": data(3, 32, 1)}, consts=consts)
    assert out.build.plan.graph.tensors["y"].shape == (3, 7, 8 if onesided == 0 else 5, 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", None])
@pytest.mark.parametrize("extra", [[0, 0], [1, 0]])
def test_a_transposed_convolution_of_a_size_that_is_asked_for(tmp_path, mode, extra):
    """With ``output_padding``, and shorter than the input: onnx's inference finds other sizes, or none."""
    x, w = data(2, 3, 4, 5), data(3, 2, 3, 2, seed=1)
    attributes = {"strides": [2, 2], "output_padding": extra, **({"auto_pad": mode} if mode else {})}
    graphs = [agree(node("ConvTranspose", "x w", output_shape=[7, 9], **attributes), {"x": x, "w": w}, ["y"], folder=tmp_path)]
    if mode:
        graphs.append(agree(node("ConvTranspose", "x w", **attributes), {"x": x}, ["y"], {"w": w}, folder=tmp_path))
    assert [g.tensors["y"].shape[2:] for g in graphs] == [(7, 9), (8, 10)][: len(graphs)]
    attributes["strides"] = [1, 1]
    agree(
        node("ConvTranspose", "x w", output_shape=[3, 2], **attributes | {"output_padding": [0, 0]}),
        {"x": x, "w": w},
        ["y"],
        folder=tmp_path,
    )


def test_a_transposed_convolution_whose_padding_cannot_be_written_out_is_opaque(tmp_path):
    """onnx infers no shape behind an operator of ai.onnx.ml: when paddings are written out, the size of the image is not known."""
    nodes = [
        node("Scaler", "x", "scaled", domain="ai.onnx.ml", offset=[0.5], scale=[2.0]),
        node("Unsqueeze", "scaled axes", "image"),
        node("ConvTranspose", "image w", "y", strides=[2], auto_pad="SAME_UPPER"),
    ]
    x, w = data(2, 12), data(1, 3, 3, seed=1)
    made = build([], {"x": x}, [], {"axes": np.array([1]), "w": w})
    made.graph.node.extend(nodes)
    made.graph.output.append(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None))
    made.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    lifted = lift_model(made, tmp_path)
    assert [op.kind for op in lifted.graph.ops if isinstance(op, Opaque)] == ["Scaler", "ConvTranspose"]
    assert lifted.graph.tensors["y"].shape == (2, 3, 24)
    (want,) = ort_session(made.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(evaluate(lifted, {"x": x})["y"], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rotated", [2, 4, 6])
def test_a_rotary_embedding_of_pairs_before_an_odd_feature(tmp_path, rotated):
    feeds = {"x": data(2, 3, 4, 7), "c": data(2, 4, rotated // 2, seed=1), "s": data(2, 4, rotated // 2, seed=2)}
    made = node("RotaryEmbedding", "x c s", interleaved=1, rotary_embedding_dim=rotated)
    agree(made, feeds, ["y"], opset=23, folder=tmp_path)


@pytest.mark.parametrize("mode", range(4))
def test_attention_shows_its_scores_over_a_cache_that_it_does_not(tmp_path, mode):
    q, k, v = (data(2, 4, n, 6, seed=n) for n in (3, 2, 2))
    feeds = {"q": q, "k": k, "v": v, "a": data(2, 4, 5, 6, seed=8), "b": data(2, 4, 5, 6, seed=9)}
    made = node("Attention", "q k v _ a b", "y ka va s", qk_matmul_output_mode=mode)
    model = build([made], feeds, ["y", "s"], opset=23)
    want = ort_session(model.SerializeToString()).run(None, feeds)
    made.output[1] = made.output[2] = ""  # (which onnxruntime does not have)
    lifted = lift_model(build([made, node("Neg", "s", "z")], feeds, ["y", "s", "z"], opset=23), tmp_path)
    assert lifted.graph.tensors["z"].shape == (2, 4, 3, 7)  # what follows has the right size as well
    found = evaluate(lifted, feeds)
    for name, a in zip(("y", "s", "z"), (*want, -want[1]), strict=True):
        np.testing.assert_allclose(found[name], a, rtol=1e-4, atol=1e-5)
