"""Resize, Einsum, and opaque operators that commute with some axes, against onnxruntime; each under splits as well."""

from __future__ import annotations

import numpy as np
import pytest
from lifting import agree, build, data, node

import tapestry
from tapestry.ir.graph import Block, Opaque

RESIZE = [
    {"mode": "linear"}, {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}, {"mode": "nearest"},
    {"mode": "linear", "coordinate_transformation_mode": "align_corners"}, {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}, {"mode": "nearest", "nearest_mode": "round_prefer_ceil"},
]  # fmt: skip


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


def test_resize_that_floor_cannot_say_stays_opaque_and_splits_by_channel(tmp_path):
    consts = {"scales": np.array([1, 1, 2, 2], np.float32)}
    graph = agree(
        node("Resize", "x _ scales", mode="cubic"), {"x": data(2, 3, 6, 5)}, ["y"], consts, folder=tmp_path, native=False
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
    "QLinearMatMul": (
        node("MatMulInteger", "x w"), {"x": np.arange(24, dtype=np.uint8).reshape(4, 6), "w": np.arange(30, dtype=np.uint8).reshape(6, 5)}, "n",
    ),
    "ConvInteger": (node("ConvInteger", "x w"), {"x": np.arange(98, dtype=np.uint8).reshape(2, 1, 7, 7), "w": np.arange(27, dtype=np.uint8).reshape(3, 1, 3, 3)}, "o"),
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
