"""Steps that are recorded once and replayed: what a step gives is the caller's own, whoever calls next."""

from __future__ import annotations

import threading
from functools import cache

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto as T

import tapestry
from tapestry import api
from tapestry.runtime.one_process.logical_devices import LocalExecutor
from tapestry.runtime.one_process.static_schedule import Inputs, Placed, Segment
from tests.support.programs.unrecorded import unrecorded
from tests.support.small_models import FOLDER, N, f32, i64, net

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.usefixtures("c_compiler"),
]


def network() -> onnx.ModelProto:
    """Small operations of many kinds: none is one that has a kernel of its own."""
    nodes = [
        N("Gather", ["table", "i"], ["g"]), N("Add", ["g", "x"], ["a"]), N("LayerNormalization", ["a", "s", "b"], ["l"]),
        N("Tanh", ["l"], ["t"]), N("MatMul", ["t", "w"], ["m"]), N("Softmax", ["m"], ["p"], axis=-1),
        N("ReduceMax", ["p", "axes"], ["top"], keepdims=0), N("ReduceSum", ["l", "axes"], ["sum"], keepdims=0),
        N("Erf", ["a"], ["e"]), N("Mul", ["e", "p"], ["y"]), N("Greater", ["m", "x"], ["large"]),
        N("ArgMax", ["m"], ["best"], axis=-1, keepdims=0), N("Mod", ["i", "three"], ["rest"]),
    ]  # fmt: skip
    ins = {"x": (T.FLOAT, (3, 24)), "i": (T.INT64, (3,))}
    outs = {"y": T.FLOAT, "top": T.FLOAT, "sum": T.FLOAT, "large": T.BOOL, "best": T.INT64, "rest": T.INT64}
    weights = {"table": f32(11, 24), "s": f32(24), "b": f32(24), "w": f32(24, 24), "axes": i64(1), "three": i64(3)}
    return net(nodes, ins, outs, weights)


@cache
def built() -> api.Compiled:
    path = FOLDER / "recorded.onnx"
    onnx.save(network(), path)
    return api.compile(path, mesh="1")


def feeds(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((3, 24)).astype(np.float32), "i": rng.integers(-11, 11, 3)}


def executor_of(session: tapestry.Session) -> LocalExecutor:
    out = session._engine.session.executor  # type: ignore[union-attr]
    assert isinstance(out, LocalExecutor)
    return out


def operations(session: tapestry.Session, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the same step gives operation by operation, on torch's operators where an operation has them."""
    with unrecorded(executor_of(session)):
        return session.run(given)


def test_a_step_of_a_small_model_is_one_call() -> None:
    with tapestry.Session(built()) as s:
        schedule = executor_of(s).schedule
        assert schedule and [type(a) for a in schedule.actions] == [Inputs, Segment]
        for seed in range(3):  # the first run counts, the others do not
            peaks = s._engine.session.run(feeds(seed)).measured.peak  # type: ignore[union-attr]
            assert peaks == list(built().build.peak_bytes)


def test_what_others_compute_is_where_kernels_read_it() -> None:
    """A determinant is no kernel's of ours; what follows it is, and is bound once: to a position, not to what was there."""
    nodes = [
        N("Mul", ["x", "x"], ["square"]),
        N("Det", ["square"], ["det"]),
        N("Add", ["det", "b"], ["a"]),
        N("Tanh", ["a"], ["y"]),
    ]
    model = net(nodes, {"x": (T.FLOAT, (5, 3, 3))}, {"y": T.FLOAT}, {"b": f32(5)})
    with tapestry.Session(api.compile(model, mesh="1")) as s:
        for seed in range(3):
            given = {"x": np.random.default_rng(seed).standard_normal((5, 3, 3)).astype(np.float32)}
            for name, a in operations(s, given).items():
                np.testing.assert_allclose(s.run(given)[name], a, rtol=1e-5, atol=1e-6)
        schedule = executor_of(s).schedule
        assert schedule and [type(a) for a in schedule.actions] == [Inputs, Segment, int, Placed, Segment]


def test_steps_give_what_operations_give() -> None:
    with tapestry.Session(built()) as s:
        for seed in range(4):
            given = feeds(seed)
            if seed:
                given["x"][0, :3] = np.nan, np.inf, -np.inf
                given["x"][seed % 3] *= 10.0 ** (6 * seed)
            for name, a in operations(s, given).items():
                np.testing.assert_allclose(s.run(given)[name], a, rtol=1e-5, atol=1e-6, err_msg=name)


def test_what_a_step_gave_stays_as_it_is() -> None:
    """By later steps, by the caller's writes to what it has given or got, and by another session of the same build."""
    with tapestry.Session(built()) as s, tapestry.Session(built()) as other:
        given = feeds(0)
        first = s.run(given)
        kept = {n: a.copy() for n, a in first.items()}
        for a in given.values():
            a[:] = 1
        for seed in range(1, 4):
            other.run(feeds(seed))
            s.run(feeds(seed), ["top"])
            for n, a in first.items():
                np.testing.assert_array_equal(a, kept[n])
        for a in first.values():
            a[:] = 0
        again = s.run(feeds(0))
        for n, a in again.items():
            np.testing.assert_array_equal(a, kept[n])
            assert not any(np.shares_memory(a, b) for m, b in again.items() if m != n)


def test_inputs_and_outputs_are_the_callers_own_memory() -> None:
    """Read and written where they are, if they lie row-major; pixels of a convolution's result do not, and are copied."""
    nodes = [
        N("Conv", ["x", "w"], ["pixels"], pads=[1, 1, 1, 1]),
        N("Tanh", ["rows"], ["t"]),
        N("Add", ["t", "rows"], ["large"]),
    ]
    ins = {"x": (T.FLOAT, (1, 3, 30, 31)), "rows": (T.FLOAT, (601, 600))}
    model = net(nodes, ins, {"pixels": T.FLOAT, "large": T.FLOAT, "t": T.FLOAT}, {"w": f32(8, 3, 3, 3)})
    rng = np.random.default_rng(0)
    x, rows = (rng.standard_normal(shape).astype(np.float32) for _, shape in ins.values())
    fixed = rows.copy()
    fixed.flags.writeable = False
    shifted = np.frombuffer(bytearray(b"_" + rows.tobytes()), np.float32, offset=1).reshape(rows.shape)  # no cell's own address
    with tapestry.Session(api.compile(model, mesh="1")) as s:
        wanted = operations(s, {"x": x, "rows": rows})
        found = [s.run({"x": x, "rows": r}) for r in (rows, rows, np.asfortranarray(rows), fixed, shifted)]
        schedule = executor_of(s).schedule
        assert schedule and schedule.at_once and {*schedule.at_once.moved} == {"x", "rows", "large", "t"}
        kept = [g.of(torch.from_numpy(shifted)) for n, g, _ in schedule.at_once.given if n == "rows"]  # type: ignore[attr-defined]
        assert all(a.data_ptr() % a.itemsize == 0 for a in kept)
        for outs in found:
            for name, a in wanted.items():
                np.testing.assert_allclose(outs[name], a, rtol=1e-5, atol=1e-5, err_msg=name)


def test_callers_at_once_get_their_own() -> None:
    with tapestry.Session(built()) as s, tapestry.Session(built()) as other:
        wanted = [s.run(feeds(k)) for k in range(4)]
        wrong: list[int] = []

        def work(k: int) -> None:
            for n in range(20):
                found = (s, other)[n % 2].run(feeds(k))
                if any(not np.array_equal(a, wanted[k][t]) for t, a in found.items()):
                    wrong.append(k)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong
