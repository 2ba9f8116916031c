"""The generator under a published battery; the battery itself on generators that are known to be bad."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto as T

from bench.blocks import generator, sp800_22
from tapestry import api
from tapestry.codegen.torch_cpu.base import scalars
from tapestry.ir.philox import philox
from tests.support.small_models import N, net

MEGABYTES = 1 << 20


def failed(rows) -> list[str]:
    return [f"{r['test']} on {r['stream']}: {r}" for r in rows if not r["passed"]]


def bits(words: np.ndarray) -> sp800_22.Bits:
    return np.ascontiguousarray(words.astype(np.uint32)).view(np.uint64).reshape(-1, 1 << 14)


def test_one_call_is_every_cell():
    """Whole blocks in C, by numpy and cell by cell are the same words, whatever the order of the cells."""
    for shape in ((3, 1), (1000,), (7, 65), (2, 3, 64)):
        index = (torch.randperm(int(np.prod(shape))) * 10_000_019_977).reshape(shape)
        for key, stream, draw, word in ((0, 0, 0, 0), ((1 << 63) - 1, 7, 1 << 31, 3), (12345, 1, 2, 1)):
            fields = [torch.tensor(x) for x in (key, stream, draw, word)]
            found = scalars.TABLE["philox"](*fields, index)
            assert found.shape == index.shape
            np.testing.assert_array_equal(found.numpy(), philox(key, stream, draw, word, index.numpy()))
            turned = index.permute(*reversed(range(index.ndim)))
            np.testing.assert_array_equal(scalars.TABLE["philox"](*fields, turned).numpy(), found.numpy().T)
            for k in (0, index.numel() - 1):
                cell = index.reshape(-1)[k : k + 1]
                assert int(scalars.TABLE["philox"](*fields, cell)) == int(found.reshape(-1)[k])


def by_index() -> onnx.ModelProto:
    """Distributions whose parameters are tensors: a mean by row and a deviation by column, bounds by cell, a chance by cell."""
    nodes = [
        N("RandomNormalLike", ["x"], ["z"], "z"), N("Mul", ["z", "deviation"], ["s"], "s"), N("Add", ["s", "mean"], ["normal"], "n"),
        N("RandomUniformLike", ["x"], ["u"], "u"), N("Mul", ["u", "width"], ["w"], "w"), N("Add", ["w", "x"], ["uniform"], "a"),
        N("Bernoulli", ["chance"], ["coin"], "coin"), N("Identity", ["z"], ["plain"], "plain"),
        N("Identity", ["u"], ["share"], "share"),
    ]  # fmt: skip
    shape = [24, 96]
    ins = {"x": (T.FLOAT, shape), "mean": (T.FLOAT, [24, 1]), "deviation": (T.FLOAT, [1, 96]), "width": (T.FLOAT, shape),
           "chance": (T.FLOAT, shape)}  # fmt: skip
    return net(nodes, ins, dict.fromkeys(("normal", "uniform", "coin", "plain", "share"), T.FLOAT))


@pytest.mark.slow
def test_parameters_may_depend_on_the_index():
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal((24, 96)), "mean": np.linspace(-50, 50, 24)[:, None], "deviation": np.linspace(0.1, 3, 96)[None],
        "width": rng.random((24, 96)), "chance": np.broadcast_to(np.linspace(0, 1, 96), (24, 96)),
    }  # fmt: skip
    feeds = {n: np.ascontiguousarray(a, np.float32) for n, a in feeds.items()}
    model = by_index()
    first, *others = [
        api.compile(model, topology="cpu", **how).run(feeds)
        for how in ({"devices": 1}, {"devices": 4}, {"mesh": "2x3"}, {"devices": 3, "pins": "coin:x1=3@d0"})
    ]
    for o in others:
        for n, a in first.items():
            np.testing.assert_array_equal(a, o[n], n)
    z = first["plain"]
    np.testing.assert_allclose(first["normal"], z * feeds["deviation"] + feeds["mean"], rtol=1e-6)
    np.testing.assert_allclose(first["uniform"], first["share"] * feeds["width"] + feeds["x"], rtol=1e-6, atol=1e-6)
    assert abs(z.mean()) < 4 / 48 and abs(z.std() - 1) < 0.06
    assert not first["coin"][:, 0].any() and first["coin"][:, -1].all()
    half = first["coin"][:, 24:72]
    assert abs(half.mean() - feeds["chance"][:, 24:72].mean()) < 4 * 0.5 / np.sqrt(half.size)


@pytest.mark.slow
@pytest.mark.parametrize("stream", generator.STREAMS)
def test_streams_pass_the_battery(stream):
    assert not failed(generator.sp800(stream, list(sp800_22.TESTS), 16 * MEGABYTES))


@pytest.mark.slow
def test_gigabytes_pass_the_quick_tests():
    rows = list(generator.sp800("uniform", list(sp800_22.QUICK), 1 << 31, generator.FAST))
    assert rows[0]["bytes"] == 1 << 31
    assert not failed(rows)


BAD = {
    "counter": lambda n: np.arange(n),
    "low bits of a congruence": lambda n: np.cumprod(np.full(n, 1664525, np.uint32), dtype=np.uint32),
    "biased": lambda n: np.random.default_rng(0).integers(0, 1 << 32, n, np.uint32) | (np.arange(n) % 23 == 0),
    "periodic": lambda n: np.tile(np.random.default_rng(0).integers(0, 1 << 32, 1 << 10, np.uint32), n >> 10),
    "one sequence": lambda n: np.tile(np.random.default_rng(0).integers(0, 1 << 32, 1 << 15, np.uint32), n >> 15),
    "low rank": lambda n: np.repeat(np.random.default_rng(0).integers(0, 1 << 32, n // 16, np.uint32), 16),
}
SEES = {  # tests that must see it
    "counter": set(sp800_22.TESTS), "low bits of a congruence": {"serial"}, "biased": {"frequency"}, "periodic": {"spectrum"},
    "one sequence": {"frequency"}, "low rank": {"matrix rank"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_the_battery_sees_bad_generators(name):
    text = bits(BAD[name](1 << 22))
    seen = {t for t, f in sp800_22.TESTS.items() if not sp800_22.judged(f(text))[0]}
    assert seen & SEES[name], seen


def test_the_battery_is_the_published_one():
    """Chances and p-values of examples of SP 800-22, on sequences that are repeated to our lengths where they must be."""
    np.testing.assert_allclose(sp800_22._rank_chance(32), 0.2888, atol=5e-5)  # section 3.5
    np.testing.assert_allclose(sp800_22._rank_chance(31), 0.5776, atol=5e-5)
    np.testing.assert_allclose(sp800_22._longest().sum(), 1.0)
    ones = np.full((1, 1 << 14), (1 << 64) - 1, np.uint64)
    assert sp800_22.frequency(ones)[0] == sp800_22.block_frequency(ones)[0] == 0.0
    even = np.full((1, 1 << 14), 0x5555555555555555, np.uint64)
    assert sp800_22.frequency(even)[0] == 1.0
    assert sp800_22.runs(even)[0] == 0.0
    good = bits(np.random.default_rng(3).integers(0, 1 << 32, 1 << 19, np.uint32))
    for name, test in sp800_22.TESTS.items():
        p = test(good)
        assert p.shape == (16,)
        assert ((p >= 0) & (p <= 1)).all(), name
        assert p.min() > 1e-5, name
