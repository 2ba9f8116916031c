"""Operations printed as C: what torch computes, on odd sizes, NaN and infinities included; and torch where there is no compiler."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

from tapestry import api
from tapestry.codegen.torch_cpu.c import generated_c
from tests.support.programs.unrecorded import unrecorded
from tests.support.small_models import N, f32, i64, net

pytestmark = pytest.mark.usefixtures("one_thread")
needed = pytest.mark.usefixtures("c_compiler")
EDGES = np.array(
    [np.nan, np.inf, -np.inf, 0, -0.0, 1e-40, -1e-40, 88.7, 88.73, 89, -87.3, -88, -103.9, -104.1, 3e38, -3e38, 0.5, 1.5, -2.5],
    np.float32,
)


def compiled(model: onnx.ModelProto, folder: Path) -> tuple[api.Compiled, list[object]]:
    """A model, and the kernels that its schedule uses in C."""
    onnx.save(model, folder / "m.onnx")
    c = api.compile(folder / "m.onnx", mesh="1")
    c.run(c.random_feeds(0))
    executor = c.session.executor
    return c, [run for run, _ in executor.launches.values() if (run.functions or len(run.parts) > 1)]


def both(c: api.Compiled, feeds: dict[str, np.ndarray], tolerance: float) -> dict[str, np.ndarray]:
    """The outputs, equal to those of torch's operators."""
    executor = c.session.executor
    ours = c.run(feeds)
    assert executor.schedule
    with unrecorded(executor):
        theirs = c.run(feeds)
    for t, a in ours.items():
        np.testing.assert_array_equal(np.isnan(a), np.isnan(theirs[t]))
        np.testing.assert_allclose(a, theirs[t], rtol=tolerance, atol=tolerance if tolerance else 0)
    return ours


def values(seed: int, *shape: int) -> np.ndarray:
    out = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 20
    out.reshape(-1)[: len(EDGES)] = EDGES
    out.reshape(-1)[-len(EDGES) :] = EDGES[::-1]
    return out


@needed
@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [(k, 0.0) for k in ("Neg", "Abs", "Sqrt", "Floor", "Ceil", "Relu", "Reciprocal", "Clip")]
    + [(k, 1e-6) for k in ("Exp", "Sigmoid", "Sin", "Cos", "Log")],
)
def test_unary(kind: str, tolerance: float, tmp_path: Path) -> None:
    more = ["lo", "hi"] if kind == "Clip" else []
    weights = {"lo": np.float32(-1), "hi": np.float32(2)} if more else {}
    model = net([N(kind, ["x", *more], ["y"])], {"x": (T.FLOAT, (3, 17, 37))}, {"y": T.FLOAT}, weights)
    c, ours = compiled(model, tmp_path)
    assert ours
    both(c, {"x": values(1, 3, 17, 37)}, tolerance)


@needed
@pytest.mark.parametrize(
    "kind", ["Add", "Sub", "Mul", "Div", "Min", "Max", "Where", "Less", "Equal", "GreaterOrEqual", "IsNaN"]
)
def test_binary_by_rows_and_columns(kind: str, tmp_path: Path) -> None:
    test = kind in ("Less", "Equal", "GreaterOrEqual", "IsNaN")
    if kind == "Where":
        nodes = [N("Where", ["m", "x", "r"], ["y"])]
    elif test:
        nodes = [N(kind, ["x", "r"][: 1 if kind == "IsNaN" else 2], ["t"]), N("Where", ["t", "r", "x"], ["y"])]
    else:
        nodes = [N(kind, ["x", "r"], ["s"]), N(kind, ["s", "c"], ["y"])]
    ins = {"x": (T.FLOAT, (5, 7, 33)), "r": (T.FLOAT, (33,)), "c": (T.FLOAT, (7, 1)), "m": (T.BOOL, (5, 1, 33))}
    used = {k: v for k, v in ins.items() if any(k in n.input for n in nodes)}
    c, ours = compiled(net(nodes, used, {"y": T.FLOAT}, {}), tmp_path)
    assert ours
    feeds = {"x": values(1, 5, 7, 33), "r": values(2, 1, 66)[0, :33], "c": values(3, 7, 33)[:, :1]}
    feeds["m"] = np.random.default_rng(4).random((5, 1, 33)) < 0.5
    both(c, {k: feeds[k] for k in used}, 0.0)


@needed
def test_pieces_of_odd_sizes(tmp_path: Path) -> None:
    """Rotary halves, concatenation and padding, with digits of an axis."""
    nodes = [
        N("Reshape", ["x", "shape"], ["h"]), N("Transpose", ["h"], ["t"], perm=[0, 2, 1, 3]),
        N("Slice", ["t", "k0", "k5", "k3"], ["a"]), N("Slice", ["t", "k5", "k10", "k3"], ["b"]), N("Neg", ["b"], ["n"]),
        N("Concat", ["n", "a"], ["r"], axis=3), N("Mul", ["t", "cos"], ["p"]), N("Mul", ["r", "sin"], ["q"]),
        N("Add", ["p", "q"], ["y"]), N("Pad", ["x", "pads"], ["w"]), N("Exp", ["w"], ["z"]),
    ]  # fmt: skip
    weights = {
        "shape": i64(2, 13, 7, 10), "k0": i64(0), "k5": i64(5), "k10": i64(10), "k3": i64(3), "cos": f32(13, 10), "sin": f32(13, 10),
        "pads": i64(0, 1, 3, 0, 2, 0),
    }  # fmt: skip
    c, ours = compiled(net(nodes, {"x": (T.FLOAT, (2, 13, 70))}, {"y": T.FLOAT, "z": T.FLOAT}, weights), tmp_path)
    assert ours
    both(c, c.random_feeds(1), 1e-6)


@needed
def test_rows_of_a_table(tmp_path: Path) -> None:
    nodes = [N("Gather", ["table", "i"], ["g"]), N("Add", ["g", "b"], ["y"])]
    model = net(nodes, {"i": (T.INT64, (3, 19))}, {"y": T.FLOAT}, {"table": f32(41, 37), "b": f32(37)})
    c, ours = compiled(model, tmp_path)
    assert ours
    i = np.random.default_rng(0).integers(-41, 41, (3, 19))
    both(c, {"i": i}, 0.0)


@needed
@pytest.mark.parametrize("rows", [1, 50, 131])
def test_gated_and_parallel_sums(rows: int, tmp_path: Path) -> None:
    nodes = [
        N("MatMul", ["x", "g"], ["a"]), N("MatMul", ["x", "u"], ["b"]), N("Sigmoid", ["a"], ["s"]), N("Mul", ["a", "s"], ["m"]),
        N("Mul", ["m", "b"], ["h"]), N("MatMul", ["h", "k"], ["p"]), N("MatMul", ["h", "v"], ["q"]), N("Exp", ["p"], ["y"]),
    ]  # fmt: skip
    weights = {"g": f32(24, 70), "u": f32(24, 70), "k": f32(70, 33), "v": f32(70, 33)}
    model = net(nodes, {"x": (T.FLOAT, (rows, 24))}, {"y": T.FLOAT, "q": T.FLOAT, "p": T.FLOAT}, weights)
    c, ours = compiled(model, tmp_path)
    assert ours
    feeds = {"x": np.random.default_rng(0).standard_normal((rows, 24)).astype(np.float32) / 8}
    both(c, feeds, 1e-5)
    used = c.session.run(feeds).measured
    assert used.peak == list(c.build.peak_bytes)
    feeds["x"][0, 0] = np.nan
    assert np.isnan(both(c, feeds, 1e-5)["q"][0]).all()


@needed
def test_what_was_compiled_with_others_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPESTRY_CACHE", str(tmp_path))
    given: list[list[str]] = []
    made = generated_c._make
    monkeypatch.setattr(generated_c, "_make", lambda bodies, places: (given.append(list(bodies)), made(bodies, places)))
    for numbers in ((1, 2, 3), (2, 4), (4, 1)):
        monkeypatch.setattr(generated_c, "_known", {})
        monkeypatch.setattr(generated_c, "_texts", {})
        names = {k: generated_c.register(f"*(int64_t *)p[0] = {k};") for k in numbers}
        for k, name in names.items():
            out = ctypes.c_int64()
            generated_c.function(name)(None, (ctypes.c_void_p * 1)(ctypes.addressof(out)))
            assert out.value == k
    assert [len(g) for g in given] == [3, 1]
    next(p for p in tmp_path.rglob("*.so")).unlink()  # a cache that somebody cleaned
    monkeypatch.setattr(generated_c, "_known", {})
    assert all(generated_c.function(n) for n in names.values())


@needed
def test_where_a_compiler_fails_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_c, "FLAGS", ("--no-such-option",))
    model = net([N("Exp", ["x"], ["a"]), N("Floor", ["a"], ["y"])], {"x": (T.FLOAT, (41, 43))}, {"y": T.FLOAT}, {})
    c, ours = compiled(model, tmp_path)
    assert ours and all(k.functions and k.recorder() is None for k in ours)
    x = np.random.default_rng(0).standard_normal((41, 43)).astype(np.float32)
    np.testing.assert_allclose(c.run({"x": x})["y"], np.floor(np.exp(x)), rtol=1e-6)
    assert c.session.executor.schedule is None
