"""Convolutions that run one behind the other: the bits of one after another, whatever is kept of what lies between."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto as T

from tapestry import api
from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base import contract
from tapestry.codegen.torch_cpu.base.epilogue import Epilogue
from tapestry.codegen.torch_cpu.c import c_calls, conv_c, conv_chain
from tapestry.runtime.one_process.arena import Slot
from tapestry.runtime.one_process.static_schedule import StagedInput, together
from tests.support.small_models import N, f32, net

pytestmark = [
    pytest.mark.usefixtures("c_compiler"),
    pytest.mark.usefixtures("one_thread"),
]


def layer(x, features, kernel, stride, pad, dilation, depthwise, added, g):
    """A convolution's call and its result, which nothing has computed yet."""
    n, c, h, w = x.shape
    groups = c if depthwise else 1
    weight = torch.randn(features, c // groups, kernel, kernel, generator=g) / kernel
    size = [(k + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for k in (h, w)]
    parts = contract.Call((), (), tuple(x.shape), (stride,) * 2, (pad,) * 2, (dilation,) * 2, groups)
    shape = (n, features, *size)
    more = torch.randn(n, *size, features, generator=g).permute(0, 3, 1, 2) if added else None
    then = Epilogue(bias=0, residual=1 if added else None, low=-1.0, high=6.0)
    made = conv_c.convolve(parts, tuple(weight.shape), shape, then)
    assert made and made.link
    memory = torch.full((n * size[0] * size[1] * features,), float("nan"))
    call = made.call(x, made.pack(weight), torch.randn(features, generator=g), more, memory)
    return call, memory.view(n, *size, features).permute(0, 3, 1, 2)


NETS = {
    "planes, taps, single": [(20, 3, 2, 1, 1, False), (20, 3, 1, 1, 1, True), (33, 1, 1, 0, 1, False)],
    "single, taps down, single": [(48, 1, 1, 0, 1, False), (48, 3, 2, 1, 1, True), (7, 1, 1, 0, 1, False)],
    "wide windows": [(24, 5, 1, 2, 1, False), (24, 5, 2, 2, 2, True), (24, 3, 1, 2, 2, True), (16, 1, 1, 0, 1, False)],
    "holes": [(16, 1, 1, 0, 1, False), (16, 1, 2, 0, 1, True), (16, 1, 1, 0, 1, False), (16, 3, 3, 0, 1, True)],
    "padding beyond": [(17, 1, 1, 0, 1, False), (17, 3, 2, 3, 1, True), (17, 3, 1, 4, 1, True)],
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [(17, 11), (30, 9)])
@pytest.mark.parametrize("added", [False, True])
def test_chains_give_the_bits_of_their_parts(name, rows, size, added, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_chain, "MOST_ROWS", rows)
    monkeypatch.setattr(conv_chain, "CACHE", 1 << 40)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, *size, generator=g)
    x[1, 1, 4, 4] = float("nan")
    parts, outs = [], [x if name.startswith("planes") else x.contiguous(memory_format=torch.channels_last)]
    for k, one in enumerate(NETS[name]):
        call, out = layer(outs[-1], *one, added and k != 1, g)
        parts.append(call)
        outs.append(out)
    for c in parts:
        c.run()
    want = outs[-1].clone()
    assert bool(want.isnan().any()) and not bool(want.isnan().all())
    for out in outs[1:]:
        out.fill_(float("nan"))
    one = conv_chain.chain(parts)
    assert one
    one.run()
    assert outs[-1].contiguous().numpy().tobytes() == want.contiguous().numpy().tobytes()
    kept = conv_chain.rows_held(parts, rows)
    if size[0] == 30 and rows == 1 and "beyond" not in name:  # what lies between never was there whole
        assert kept[0] < parts[0].sizes.out_h and bool(outs[1][:, :, kept[0] :].isnan().all())


def test_only_what_follows_is_a_chain() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 8, 12, 12, generator=g).contiguous(memory_format=torch.channels_last)
    a, y = layer(x, 8, 1, 1, 0, 1, False, False, g)
    b, _ = layer(y, 8, 3, 1, 1, 1, True, False, g)
    other, _ = layer(y.clone(memory_format=torch.channels_last), 8, 3, 1, 1, 1, True, False, g)
    assert (
        conv_chain.chain([a, b])
        and not conv_chain.chain([a, other])
        and not conv_chain.chain([b, a])
        and not conv_chain.chain([a])
    )
    foreign = c_calls.CCall(native.library().tapestry_mean, a.sizes, a.buffers, ())  # type: ignore[union-attr]
    assert not conv_chain.chain([foreign, b])


def test_what_a_chain_touches_lives_as_long_as_it_runs(tmp_path: Path) -> None:
    program = compiled(tmp_path).build.program
    at = [i for i, s in enumerate(program.steps) if type(s).__name__ == "Launch"][:3]
    first = program.steps[at[0]]
    slots = [Slot(first.ins[0], at[0], at[0], 8), Slot(program.steps[at[2]].outs[0], at[2], at[2] + 5, 8)]
    assert [(s.first, s.last) for s in together(slots, program, [tuple(at)])] == [(at[0], at[2]), (at[0], at[2] + 5)]


def network(outputs: tuple[str, ...]) -> onnx.ModelProto:
    nodes = [
        N("Conv", ["x", "a"], ["c"], pads=[1] * 4, strides=[2, 2]), N("Clip", ["c", "lo", "hi"], ["d"]),
        N("Conv", ["d", "u"], ["e"], group=24, pads=[1] * 4), N("Clip", ["e", "lo", "hi"], ["f"]),
        N("Conv", ["f", "b"], ["g"]), N("Conv", ["g", "w"], ["h"]), N("Clip", ["h", "lo", "hi"], ["i"]),
        N("Conv", ["i", "v"], ["j"], group=40, pads=[1] * 4), N("Clip", ["j", "lo", "hi"], ["k"]),
        N("Conv", ["k", "t"], ["l"]), N("Add", ["l", "g"], ["m"]),
    ]  # fmt: skip
    weights = {
        "a": f32(24, 3, 3, 3), "u": f32(24, 1, 3, 3), "b": f32(16, 24, 1, 1), "w": f32(40, 16, 1, 1), "v": f32(40, 1, 3, 3),
        "t": f32(16, 40, 1, 1), "lo": np.float32(0), "hi": np.float32(6),
    }  # fmt: skip
    return net(nodes, {"x": (T.FLOAT, (1, 3, 50, 38))}, dict.fromkeys(outputs, T.FLOAT), weights)


def compiled(folder: Path, *outputs: str, **options) -> api.Compiled:
    path = folder / f"{''.join(outputs)}.onnx"
    if not path.is_file():  # its weights are random
        onnx.save(network(outputs or ("m",)), path)
    return api.compile(path, mesh="1", **options)


def links(c: api.Compiled, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many convolutions each chain of a session has, when it binds."""
    found: list[int] = []
    make = conv_chain.chain

    def noted(parts):
        one = make(parts)
        found.extend([len(parts)] if one else [])
        return one

    monkeypatch.setattr(conv_chain, "chain", noted)
    c.session.executor.bind()
    return found


def test_models_run_in_chains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c = compiled(tmp_path)
    feeds = c.random_feeds(0)
    feeds["x"][0, 1, 20, 20] = np.nan
    given = feeds["x"].copy()
    want = c.run(feeds)["m"]
    monkeypatch.setattr(conv_chain, "LEAST", 0)
    again = compiled(tmp_path)
    # the block's input is its residual too, so that it has another reader and ends the first chain
    assert links(again, monkeypatch) == [3, 3]
    assert any(isinstance(a, StagedInput) for a in again.session.executor.schedule.actions)
    for _ in range(2):
        result = again.session.run(feeds)
        np.testing.assert_array_equal(result.outputs["m"], want)
        assert result.measured.peak == list(again.build.peak_bytes)
    assert np.isnan(want).any() and np.array_equal(feeds["x"], given, equal_nan=True)


def test_what_others_read_is_made_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compiled(tmp_path, "f", "i", "m")
    feeds = plain.random_feeds(0)
    want = plain.run(feeds)
    monkeypatch.setattr(conv_chain, "LEAST", 0)
    c = compiled(tmp_path, "f", "i", "m")
    assert links(c, monkeypatch) == [2, 2]
    for t, a in c.run(feeds).items():
        np.testing.assert_array_equal(a, want[t])


def test_without_room_nothing_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = compiled(tmp_path)
    feeds = want.random_feeds(0)
    monkeypatch.setattr(conv_chain, "LEAST", 0)
    c = compiled(tmp_path)
    c.session.executor.room = [0]
    assert links(c, monkeypatch) == []
    result = c.session.run(feeds)
    assert result.measured.peak == list(c.build.peak_bytes) and result.measured.gaps in ([], [0])
    np.testing.assert_allclose(result.outputs["m"], want.run(feeds)["m"], rtol=1e-4, atol=1e-4)
