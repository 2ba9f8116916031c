"""Small models of convolutions, compiled and run, beside torch in double precision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

import tapestry
from tapestry.codegen.torch_cpu.base import contract
from tapestry.codegen.torch_cpu.base.epilogue import Epilogue
from tapestry.codegen.torch_cpu.c import conv_c

N = helper.make_node
DRAW = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return DRAW.standard_normal(shape).astype(np.float32)


def model(nodes: list, x: np.ndarray, outs: Sequence[str], given: dict[str, np.ndarray]) -> ModelProto:
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)]
    results = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outs]
    graph = helper.make_graph(nodes, "g", ends, results, [numpy_helper.from_array(a, n) for n, a in given.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def convolved(x: np.ndarray, w: np.ndarray, pads: Sequence[int], strides: Sequence[int], groups: int = 1) -> np.ndarray:
    """By torch, in double precision, of an image with its padding written out."""
    function = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[x.ndim - 2]
    around = [n for p in reversed(pads) for n in (p, p)]
    image, weight = torch.from_numpy(x).double(), torch.from_numpy(w).double()
    return function(torch.nn.functional.pad(image, around), weight, stride=list(strides), groups=groups).numpy()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", ["", "Add", "Mul"])
@pytest.mark.parametrize(
    ("image", "weight", "groups"), [((8, 9, 11), (8, 1, 5, 5), 8), ((3, 17), (5, 3, 3), 1), ((16, 12), (16, 1, 3), 16)]
)
def test_two_convolutions_of_one_image(image: tuple[int, ...], weight: tuple[int, ...], groups: int, op: str) -> None:
    """Weights are packed to other sizes than they have, and by views that see one of them alone."""
    x, ws, pads = normal(1, *image), [normal(*weight) for _ in range(2)], [n // 2 for n in weight[2:]]
    nodes = [N("Conv", ["x", f"w{k}"], [f"y{k}"], pads=[*pads, *pads], group=groups) for k in range(2)]
    nodes += [N(op, ["y0", "y1"], ["y"])] if op else []
    both = [convolved(x, w, pads, [1] * len(pads), groups) for w in ws]
    expected = {"y": both[0] + both[1] if op == "Add" else both[0] * both[1]} if op else {"y0": both[0], "y1": both[1]}
    got = tapestry.compile(model(nodes, x, list(expected), {f"w{k}": w for k, w in enumerate(ws)}), topology="cpu").run(
        {"x": x}
    )
    for name, want in expected.items():
        np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize(("kernel", "pads"), [((3, 1), (1, 0)), ((2, 1), (1, 0)), ((1, 3), (0, 1)), ((3, 3), (1, 1))])
def test_windows_over_rows_alone_of_an_image_that_is_tokens(
    kernel: tuple[int, int], pads: tuple[int, int], groups: int
) -> None:
    """Columns become images of a batch then, whose results do not lie as tokens do."""
    x, w = normal(1, 24, 8), normal(8, 8 // groups, *kernel)
    given = {"to": np.array([1, 8, 6, 4]), "w": w, "back": np.array([1, 8, -1])}
    nodes = [
        N("Transpose", ["x"], ["t"], perm=[0, 2, 1]), N("Reshape", ["t", "to"], ["image"]),
        N("Conv", ["image", "w"], ["c"], pads=[*pads, *pads], group=groups), N("Reshape", ["c", "back"], ["f"]),
        N("Transpose", ["f"], ["y"], perm=[0, 2, 1]),
    ]  # fmt: skip
    plan = tapestry.compile(model(nodes, x, ["y"], given), topology="cpu")
    image = x.transpose(0, 2, 1).reshape(1, 8, 6, 4)
    expected = convolved(image, w, pads, (1, 1), groups).reshape(1, 8, -1).transpose(0, 2, 1)
    for _ in range(3):
        np.testing.assert_allclose(plan.run({"x": x})["y"], expected, rtol=1e-4, atol=1e-4)


def test_a_library_is_not_asked_where_no_window_reads_the_image() -> None:
    """oneDNN ends the process where strides step over all of an axis."""
    x, w, b, pads, strides = normal(3, 20, 4, 7, 1), normal(4, 5, 1, 3, 1), normal(4), (1, 0, 2), (1, 3, 3)
    node = N("Conv", ["x", "w", "b"], ["y"], pads=[*pads, *pads], strides=strides, group=4)
    got = tapestry.compile(model([node], x, ["y"], {"w": w, "b": b}), topology="cpu").run({"x": x})["y"]
    np.testing.assert_allclose(got, convolved(x, w, pads, strides, 4) + b.reshape(1, -1, 1, 1, 1), rtol=1e-4, atol=1e-4)


def test_taps_are_listed_on_the_stack_up_to_a_number() -> None:
    assert not conv_c.too_deep([1 << 10, 32, 32]) and conv_c.too_deep([1 << 11, 32, 32]) and conv_c.too_deep([1, 65, 65])
    parts = contract.Call((slice(None),) * 5, (), (1, 1, 2, 70, 70), (1, 1, 1), (1, 0, 0), (1, 1, 1), 1)
    assert not conv_c.convolve(parts, [1, 1, 3, 65, 65], [1, 1, 2, 6, 6], Epilogue())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("image", "weight", "groups"),
    [((8, 7, 9), (8, 8, 3, 3), 1), ((8, 7, 9), (8, 1, 3, 3), 8), ((4, 5, 5, 5), (4, 4, 3, 3, 3), 1)],
)
def test_padding_meets_weights_that_are_not_finite(
    image: tuple[int, ...], weight: tuple[int, ...], groups: int, value: float
) -> None:
    """0 times infinity is NaN: padding is cells like any other."""
    x, w, pads = normal(1, *image), normal(*weight), [1] * (len(weight) - 2)
    w[(0, 0, *[0] * len(pads))] = value
    node = N("Conv", ["x", "w"], ["y"], pads=[*pads, *pads], group=groups)
    got = tapestry.compile(model([node], x, ["y"], {"w": w}), topology="cpu").run({"x": x})["y"]
    expected = convolved(x, w, pads, [1] * len(pads), groups)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


# (channels, features, window, stride, groups, side): panels, those whose pixels are more than stay in cache, few channels, taps, Winograd
FOLLOWED = {
    "panels": (17, 40, 3, 2, 1, 19), "many pixels": (16, 96, 1, 1, 1, 53), "few channels": (3, 24, 3, 2, 1, 37),
    "taps": (40, 40, 5, 1, 40, 15), "winograd": (64, 64, 3, 1, 1, 13), "winograd, by features": (64, 96, 3, 1, 1, 9),
}  # fmt: skip


@pytest.mark.usefixtures("c_compiler", "threads")
@pytest.mark.parametrize("kind", FOLLOWED)
def test_what_follows_is_done_once_to_each_cell(kind: str) -> None:
    """Also where a value is not finite, and Winograd's tiles are computed again."""
    channels, features, window, stride, groups, side = FOLLOWED[kind]
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Conv2d(channels, features, window, stride, window // 2, groups=groups)
    w, b = (torch.randn(p.shape, generator=generator) / 4 for p in (layer.weight, layer.bias))
    nodes = [
        N("Conv", ["x", "w", "b"], ["c"], strides=[stride] * 2, pads=[window // 2] * 4, group=groups),
        N("Sigmoid", ["c"], ["s"]), N("Mul", ["c", "s"], ["m"]), N("Tanh", ["m"], ["y"]),
    ]  # fmt: skip
    example = np.zeros((2, channels, side, side + 2), np.float32)
    made = tapestry.compile(model(nodes, example, ["y"], {"w": w.numpy(), "b": b.numpy()}), mesh="1")
    for broken in (False, True):
        x = torch.randn(2, channels, side, side + 2, generator=generator)
        x[1, 0, 3, 5] = float("nan") if broken else 1.0
        sums = torch.nn.functional.conv2d(x.double(), w.double(), b.double(), stride, window // 2, groups=groups)
        got = torch.from_numpy(np.array(made.run({"x": x.numpy()})["y"]))
        want = torch.tanh(sums * torch.sigmoid(sums)).float()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.usefixtures("c_compiler", "threads")
@pytest.mark.parametrize("channels", [20, 67])
@pytest.mark.parametrize(
    "pool",
    [{"pads": [1, 1, 1, 1], "strides": [2, 2]}, {"pads": [2, 0, 1, 1]}, {"strides": [3, 1], "dilations": [2, 2]}],
    ids=str,
)
def test_pooling_behind_a_convolution(channels: int, pool: dict[str, list[int]]) -> None:
    """Neighbouring channels side by side; what is outside counts for nothing, NaN and infinities for what they are."""
    nodes = [
        N("Conv", ["x", "w"], ["c"]),
        N("MaxPool", ["c"], ["m"], kernel_shape=[3, 3], **pool),
        N("Conv", ["m", "v"], ["y"]),
    ]
    w, v = (np.eye(channels, dtype=np.float32)[:, :, None, None] for _ in range(2))
    x = normal(2, channels, 12, 9)
    made = tapestry.compile(model(nodes, x, ["m"], {"w": w, "v": v}), mesh="1")
    pads = pool.get("pads", [0] * 4)
    for value in (0.0, -np.inf, np.inf):
        x[1, 0, 3, 4], x[0, :, 0, 0] = value, -np.inf if value else -9.0
        image = torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(w))
        around = torch.nn.functional.pad(image, (pads[1], pads[3], pads[0], pads[2]), value=-np.inf)
        want = torch.max_pool2d(around, 3, pool.get("strides", [1, 1]), 0, pool.get("dilations", [1, 1]))
        np.testing.assert_array_equal(made.run({"x": x})["m"], want.numpy())


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("kind", ["Sqrt", "Exp", "Neg"])
def test_a_product_of_what_is_computed_is_computed_at_every_run(kind: str) -> None:
    w = normal(40, 48)
    made = tapestry.compile(
        model([N(kind, ["x"], ["e"]), N("MatMul", ["e", "w"], ["y"])], w[:24, :40], ["y"], {"w": w}), mesh="1"
    )
    for _ in range(3):
        x = np.abs(normal(24, 40))
        e = {"Sqrt": np.sqrt, "Exp": np.exp, "Neg": np.negative}[kind](x.astype(np.float64))
        np.testing.assert_allclose(made.run({"x": x})["y"], e @ w, rtol=1e-4, atol=1e-4)
