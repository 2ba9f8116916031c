"""The torch-cpu target's kernels in C: what torch computes, NaN and infinities included, and no less without a compiler."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto as T

from tapestry import api
from tapestry.codegen.torch_cpu import attention_c, native
from tapestry.codegen.torch_cpu.base import contract
from tapestry.codegen.torch_cpu.base.epilogue import Epilogue
from tapestry.codegen.torch_cpu.c import conv_c
from tapestry.ir.graph import Block
from tapestry.ir.kernel import Kernel, whole
from tapestry.ir.syntax.parser import parse
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.rule_check import random_feeds
from tapestry.runtime.one_process.static_schedule import Segment
from tapestry.verify import interp
from tests.support.attention.attention_cases import GUARDED, PLAIN, attention
from tests.support.attention.attention_runs import run_ops
from tests.support.programs.unrecorded import unrecorded
from tests.support.small_models import N, f32, net

pytestmark = pytest.mark.usefixtures("threads")
needed = pytest.mark.usefixtures("c_compiler")


def convolve(x, weight, bias, residual, then, stride=1, padding=0, dilation=1, groups=1):
    want = torch.nn.functional.conv2d(x.double(), weight.double(), bias.double(), stride, padding, dilation, groups)
    want = want + residual(want.shape).double() if residual else want
    more = residual(want.shape).contiguous(memory_format=torch.channels_last) if residual else None
    parts = contract.Call((), (), tuple(x.shape), (stride,) * 2, (padding,) * 2, (dilation,) * 2, groups)
    kernel = conv_c.convolve(parts, tuple(weight.shape), tuple(want.shape), then)
    assert kernel
    memory = torch.full((want.numel(),), float("nan"))
    kernel.call(conv_c.last(x), kernel.pack(weight), bias, more, memory).run()
    n, k, h, w = want.shape
    return kernel.key, memory.view(n, h, w, k).permute(0, 3, 1, 2), want.clamp(then.low, then.high)


CASES = {
    "panels": [
        (3, 64, 7, 2, 3, 1, 1),
        (5, 17, 1, 1, 0, 1, 1),
        (40, 100, 3, 2, 1, 2, 1),
        (600, 33, 1, 2, 0, 1, 1),
        (16, 16, 3, 1, 1, 1, 1),
    ],
    "panels of 3 groups": [(15, 24, 3, 2, 1, 1, 3), (60, 33, 1, 1, 0, 1, 3), (12, 39, 5, 1, 2, 1, 3)],
    "winograd": [(64, 48, 3, 1, 1, 1, 1), (32, 64, 3, 1, 0, 1, 1), (96, 32, 3, 1, 2, 1, 1)],
    "taps": [(40, 40, 3, 1, 1, 1, 40), (16, 16, 3, 2, 1, 1, 16), (33, 33, 5, 1, 2, 2, 33)],
}


@pytest.mark.sampled(11)
@needed
@pytest.mark.parametrize(("key", "case"), [(k, c) for k, cases in CASES.items() for c in cases])
@pytest.mark.parametrize("size", [(9, 14), (23, 8)])
@pytest.mark.parametrize("added", [False, True])
def test_convolutions(key: str, case: tuple[int, ...], size: tuple[int, int], added: bool) -> None:
    channels, features, window, stride, padding, dilation, groups = case
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, *size, generator=g)
    weight = torch.randn(features, channels // groups, window, window, generator=g) / window
    residual = (lambda shape: torch.randn(shape, generator=torch.Generator().manual_seed(1))) if added else None
    then = Epilogue(bias=0, residual=1 if added else None, low=-1.0, high=6.0)
    bias = torch.randn(features, generator=g)
    found, got, want = convolve(x, weight, bias, residual, then, stride, padding, dilation, groups)
    assert found == key
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@needed
@pytest.mark.parametrize("size", [(1, 1), (2, 7), (5, 3), (7, 7), (14, 15)])
@pytest.mark.parametrize(
    ("window", "stride", "padding", "dilation"),
    [(3, 1, 1, 1), (3, 2, 1, 1), (3, 1, 2, 1), (3, 2, 2, 2), (2, 1, 1, 1), (5, 1, 2, 1), (5, 2, 4, 2), (7, 1, 3, 1)],
)
def test_depthwise_at_borders(size: tuple[int, int], window: int, stride: int, padding: int, dilation: int) -> None:
    """Rows and columns of which some taps are padding, where all are, and where images are narrower than a tile."""
    g = torch.Generator().manual_seed(0)
    x, weight, bias = torch.randn(2, 19, *size, generator=g), torch.randn(19, 1, window, window, generator=g), torch.randn(19)
    then = Epilogue(bias=0, low=-1.0, high=6.0)
    _, got, want = convolve(x, weight, bias, None, then, stride, padding, dilation, 19)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


DEEP = {  # (weight, image, stride, padding, dilation)
    "frames as images": ((20, 18, 1, 3, 3), (2, 18, 5, 7, 6), (2, 1, 1), (0, 1, 1), (1, 1, 1)),
    "tiles of frames": ((48, 32, 1, 3, 3), (1, 32, 3, 9, 6), (1, 1, 1), (0, 1, 1), (1, 1, 1)),
    "places as one axis": ((33, 17, 3, 1, 1), (2, 17, 6, 4, 5), (1, 1, 1), (1, 0, 0), (1, 1, 1)),
    "single places": ((7, 70, 1, 1, 1), (1, 70, 3, 5, 4), (1, 2, 1), (0, 0, 0), (1, 1, 1)),
    "taps": ((21, 16, 3, 3, 3), (2, 16, 7, 6, 5), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "strides": ((16, 600, 3, 2, 1), (1, 600, 8, 5, 4), (2, 1, 2), (1, 0, 0), (2, 1, 1)),
    "planes": ((19, 3, 3, 5, 5), (2, 3, 6, 11, 9), (1, 2, 2), (1, 2, 2), (1, 1, 1)),
    "one channel": ((16, 1, 5, 3, 3), (1, 1, 4, 6, 7), (1, 1, 1), (2, 1, 0), (1, 2, 1)),
    "groups": ((24, 5, 3, 2, 3), (2, 15, 5, 6, 4), (1, 2, 1), (1, 0, 1), (1, 1, 1)),
    "groups of frames": ((18, 7, 1, 3, 3), (2, 14, 5, 6, 4), (2, 1, 1), (0, 1, 1), (1, 1, 1)),
    "frames of padding alone": ((8, 4, 3, 3, 3), (1, 4, 2, 5, 5), (1, 1, 1), (5, 0, 0), (1, 1, 1)),
}


@needed
@pytest.mark.parametrize("case", DEEP)
@pytest.mark.parametrize("pixels", [False, True])
def test_convolutions_over_three_axes(case: str, pixels: bool) -> None:
    features, stride, padding, dilation = DEEP[case][0][0], *DEEP[case][2:]
    g = torch.Generator().manual_seed(len(case))
    weight, x, bias = (
        torch.randn(DEEP[case][0], generator=g) / 8,
        torch.randn(DEEP[case][1], generator=g),
        torch.randn(features),
    )
    x = x.contiguous(memory_format=torch.channels_last_3d) if pixels else x
    groups = x.shape[1] // weight.shape[1]
    want = torch.nn.functional.conv3d(x.double(), weight.double(), bias.double(), stride, padding, dilation, groups)
    more, then = torch.randn(want.shape, generator=g), Epilogue(bias=0, residual=1, low=-0.5, high=2.0)
    kernel = conv_c.convolve(
        contract.Call((), (), tuple(x.shape), stride, padding, dilation, groups), weight.shape, want.shape, then
    )
    assert kernel
    memory = torch.full((want.numel(),), float("nan"))
    call = kernel.call(x, kernel.pack(weight), bias, more, memory)
    for _ in range(2):  # what is added to is begun anew
        call.run()
    n, f, *places = want.shape
    got = memory.view(n, *places, f).movedim(-1, 1).double()
    torch.testing.assert_close(got, (want + more).clamp(then.low, then.high), rtol=1e-5, atol=2e-5)


def test_channels_by_themselves_over_three_axes_have_no_kernel_of_any_lanes() -> None:
    """What the calls say of groups of one channel and one feature is what the kernel for two axes reads."""
    parts = contract.Call((), (), (1, 8, 4, 5, 5), (1, 1, 1), (1, 1, 1), (1, 1, 1), 8)
    lib = SimpleNamespace(tapestry_lanes=lambda: 4, tapestry_conv=None)
    of = conv_c.Convolution(parts, (8, 1, 3, 3, 3), (1, 8, 4, 5, 5), Epilogue(), lib)
    assert not any(row.match(of) for row in conv_c.CONVOLUTIONS)


@needed
@pytest.mark.parametrize("key", CASES)
def test_nan_and_infinity_go_where_they_belong(key: str) -> None:
    channels, features, window, stride, padding, dilation, groups = CASES[key][0]
    x = torch.randn(1, channels, 12, 12, generator=torch.Generator().manual_seed(0))
    x[0, 1, 2, 3], x[0, 2, 9, 9], x[0, 0, 5, 10] = float("nan"), float("inf"), 1e36
    weight = torch.randn(features, channels // groups, window, window, generator=torch.Generator().manual_seed(1)) * 4
    _, got, want = convolve(x, weight, torch.zeros(features), None, Epilogue(low=0.0), stride, padding, dilation, groups)
    assert bool(want.isnan().any())
    assert torch.equal(got.isnan(), want.isnan())
    inside = ~want.isnan() & (want.abs() < 1e30)
    torch.testing.assert_close(got[inside].double(), want[inside], rtol=1e-4, atol=1e-3)


@needed
@pytest.mark.parametrize("key", CASES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_weight_that_is_not_finite_spoils_what_it_is_in_alone(key: str, bad: float) -> None:
    channels, features, window, stride, padding, dilation, groups = CASES[key][0]
    x = torch.randn(1, channels, 12, 12, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(features, channels // groups, window, window, generator=torch.Generator().manual_seed(1))
    weight[1, 0, window // 2, window // 2] = bad
    want = torch.nn.functional.conv2d(x, weight, None, stride, padding, dilation, groups)
    _, got, _ = convolve(x, weight, torch.zeros(features), None, Epilogue(), stride, padding, dilation, groups)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)


BIAS = "input c: f32[{h}, {s}, {n}]\n", ", c[h, i, n]"
ROWS = "input c: f32[{b}, {n}]\n", ", c[b, n]"


@pytest.mark.sampled(12)
@needed
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("then", ["acc0 * 0.25", "(acc0 * 0.25) + c", "acc0 + c"])
@pytest.mark.parametrize("weight", [PLAIN, GUARDED])
@pytest.mark.parametrize("bias", [BIAS, ROWS])
@pytest.mark.parametrize("bad", [0.5, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [51, 5])
def test_attention_on_buffers_as_they_are(
    heads: int, shared: int, then: str, weight: str, bias: tuple[str, str], bad: float, rows: int
) -> None:
    inputs, reads = bias if "c" in then.replace("acc", "") else ("", "")
    text = attention(then, reads=reads, inputs=inputs, weight=weight, h=heads, kv=shared, s=rows, n=35, d=20, e=20)
    graph = simplify(parse(text))
    feeds = random_feeds(graph, np.random.default_rng(heads))
    feeds["q"][1, 2, 3, 4] = bad
    if "c" in feeds:
        feeds["c"][-1, ..., 3], feeds["c"][0, ...] = bad, -np.inf if bad == -np.inf else feeds["c"][0, ...]
    if np.isnan(bad):
        feeds["v"][1, 0, 4, 2] = bad
    op = graph.ops[-1]
    assert isinstance(op, Block) and len(graph.ops) == 1 + (weight == GUARDED)
    ins, last = tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads), len(graph.ops) - 1
    kernel = Kernel(
        op=last, mode="full", block=whole(tuple(d.size for d in op.space)), ins=ins, outs=(whole((2, heads, rows, 20)),)
    )
    found = attention_c.attention_kernel(op, graph, kernel)
    assert found and not found.functions
    run = found
    before = run_ops(graph, feeds, last)
    turned = [before[r.tensor] for r in op.reads]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x for x in turned]  # heads side by side
    want = interp.run(graph, feeds, wide=True)["y"]
    for given in (turned, [x.contiguous() for x in turned], [x.mT.contiguous().mT if x.dim() == 4 else x for x in turned]):
        got = run(given, [])[0].numpy()
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@needed
@pytest.mark.parametrize("shape", [(1, 3, 224, 224), (2, 4, 7, 9), (3, 2, 5, 1), (2, 3, 1, 4), (1, 5, 6, 7)])
def test_planes_side_by_side(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for given in (x, x.flip(0)[:, :, :, ::1], x.transpose(2, 3)):
        out = conv_c.last(given)
        assert out.is_contiguous(memory_format=torch.channels_last) and torch.equal(out, given)


def network() -> onnx.ModelProto:
    nodes = [
        N("Conv", ["x", "w", "b"], ["c"], pads=[1] * 4), N("Relu", ["c"], ["d"]), N("Conv", ["d", "v"], ["e"], pads=[1] * 4),
        N("Add", ["e", "d"], ["f"]), N("Relu", ["f"], ["g"]), N("Conv", ["g", "u"], ["h"], group=32, pads=[1] * 4),
        N("Clip", ["h", "lo", "hi"], ["k"]), N("ReduceMean", ["k", "axes"], ["m"], keepdims=0), N("MatMul", ["m", "t"], ["y"]),
    ]  # fmt: skip
    weights = {
        "w": f32(32, 8, 3, 3), "b": f32(32), "v": f32(32, 32, 3, 3), "u": f32(32, 1, 3, 3), "t": f32(32, 10),
        "lo": np.float32(0), "hi": np.float32(6), "axes": np.array([2, 3], np.int64),
    }  # fmt: skip
    return net(nodes, {"x": (T.FLOAT, (2, 8, 11, 9))}, {"y": T.FLOAT, "k": T.FLOAT}, weights)


def runs(folder: Path) -> tuple[api.Compiled, dict[str, np.ndarray]]:
    path = folder / "m.onnx"
    if not path.is_file():
        onnx.save(network(), path)
    c = api.compile(path, mesh="1")
    return c, c.run(c.random_feeds(0))


@needed
def test_stretches_give_what_steps_give_and_hold_what_the_plan_says(tmp_path: Path) -> None:
    c, outs = runs(tmp_path)
    schedule = c.session.executor.schedule
    assert schedule and any(isinstance(a, Segment) and len(a.born) for a in schedule.actions) and schedule.fixed
    kept = {t: a.copy() for t, a in outs.items()}
    used = c.session.run(c.random_feeds(1)).measured
    assert used.peak == list(c.build.peak_bytes)
    with unrecorded(c.session.executor):
        again = c.session.run(c.random_feeds(0))
    assert again.measured.peak == list(c.build.peak_bytes)
    for t, a in outs.items():
        np.testing.assert_array_equal(a, kept[t])  # a later run leaves them alone
        np.testing.assert_array_equal(a, again.outputs[t])


@needed
def test_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    c, _ = runs(tmp_path)
    wanted = [c.run(c.random_feeds(s)) for s in range(4)]
    wrong: list[int] = []

    def work(s: int) -> None:
        for _ in range(10):
            if any(not np.array_equal(a, wanted[s][t]) for t, a in c.run(c.random_feeds(s)).items()):
                wrong.append(s)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [("TAPESTRY_NATIVE", "0"), ("CC", "no-such-compiler")])
def test_without_kernels_torch_does(how: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, outs = runs(tmp_path)
    monkeypatch.setenv(*how)
    monkeypatch.setenv("TAPESTRY_CACHE", str(tmp_path / "cache"))
    native.library.cache_clear()
    try:
        assert native.library() is None
        _, plain = runs(tmp_path)
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
    for t, a in outs.items():
        np.testing.assert_allclose(a, plain[t], rtol=1e-4, atol=1e-5 * float(np.abs(plain[t]).max()))


@needed
@pytest.mark.parametrize("features", [1, 2, 3])
@pytest.mark.parametrize(("channels", "taps", "stride"), [(1, 475, 3), (1, 61, 1), (1, 10, 5), (3, 7, 2), (2, 8, 4)])
def test_rows_of_samples(features: int, channels: int, taps: int, stride: int) -> None:
    """Signals are one row; few features leave lanes to the taps."""
    g = torch.Generator().manual_seed(taps)
    x = torch.randn(1, channels, 1, taps + 97 * stride, generator=g)
    x[0, 0, 0, taps + 3], x[0, 0, 0, -2] = torch.nan, torch.inf
    weight = torch.randn(features, channels, 1, taps, generator=g)
    bias = torch.randn(features, generator=g)
    for low, high in ((-torch.inf, torch.inf), (0.0, 2.0)):
        then = Epilogue(bias=0, residual=1, low=low, high=high)
        _, got, want = convolve(x, weight, bias, torch.ones, then, stride)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4, equal_nan=True)
