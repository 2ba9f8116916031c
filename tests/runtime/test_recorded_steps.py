"""Steps that are recorded once and replayed: what a step gives is the caller's own, whoever calls next, and no past is copied."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto as T

import tapestry
from tapestry import api
from tapestry.codegen.torch_cpu import views
from tapestry.runtime.one_process.logical_devices import LocalExecutor
from tapestry.runtime.one_process.static_schedule import Segment, StagedInput
from tests.support.attention import cached_decoder
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


def executor_of(session: tapestry.Session, member: int = 0) -> LocalExecutor:
    out = session._engine.sessions[member].executor  # type: ignore[union-attr]
    assert isinstance(out, LocalExecutor)
    return out


def unrecorded(session: tapestry.Session, given: dict[str, np.ndarray], at: int | None = None) -> dict[str, np.ndarray]:
    """What the same step gives operation by operation, on torch's operators where an operation has them."""
    executor = executor_of(session)
    schedule, executor.schedule = executor.schedule, None
    try:
        return session.run(given, at=at)
    finally:
        executor.schedule = schedule


def test_a_step_of_a_small_model_is_one_call() -> None:
    with tapestry.Session(built()) as s:
        schedule = executor_of(s).schedule
        assert schedule and [type(a) for a in schedule.actions] == [StagedInput, StagedInput, Segment]
        for seed in range(3):  # the first run counts, the others do not
            peaks = s._engine.sessions[0].run(feeds(seed)).measured.peak  # type: ignore[union-attr]
            assert peaks == list(built().build.peak_bytes)


def test_steps_give_what_operations_give() -> None:
    with tapestry.Session(built()) as s:
        for seed in range(4):
            given = feeds(seed)
            if seed:
                given["x"][0, :3] = np.nan, np.inf, -np.inf
                given["x"][seed % 3] *= 10.0 ** (6 * seed)
            for name, a in unrecorded(s, given).items():
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


# --- caches


@cache
def decoder(capacity: int, new: int = 1) -> api.Compiled:
    path = FOLDER / "recorded-decoder.onnx"
    path.write_bytes(cached_decoder.decoder().SerializeToString())
    return tapestry.compile(path, devices=1, shapes=cached_decoder.sizes(2, new, capacity), state="auto")


def token(k: int, at: int, capacity: int, seen: int | None = None) -> dict[str, np.ndarray]:
    mask = np.zeros((2, capacity + 1), np.int64)
    mask[:, : at if seen is None else seen] = mask[:, capacity] = 1
    ids = np.array([[k % cached_decoder.VOCABULARY], [(3 * k + 1) % cached_decoder.VOCABULARY]])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": np.full((2, 1), at)}


def test_no_past_is_copied() -> None:
    """A step writes its own cells: twice, behind the cache and then in it, however long that is; and the present is the cache."""
    moved = []
    for capacity in (8, 40):
        with tapestry.Session(decoder(capacity)) as s:
            executor = executor_of(s)
            assert executor.schedule and all(isinstance(a, Segment | StagedInput) for a in executor.schedule.actions)
            assert len(executor.grown) == 4
            for g in executor.grown.values():
                assert g.present.data_ptr() == g.past.data_ptr() == g.memory.data_ptr()
            s.run(token(0, 0, capacity))
            before, state = executor.measured.peak[0], s._engine.state  # type: ignore[union-attr]
            moved.append((state.written, before - state.nbytes - executor.weight_bytes()))
            assert before < executor_plan(capacity), "the plan has room for a copy"
    assert moved[0][0] == moved[1][0] == sum(g.tail.nbytes for g in executor.grown.values())
    assert moved[1][1] - moved[0][1] < 4 * 1024, "but for the mask nothing grows with the cache"


def executor_plan(capacity: int) -> int:
    return decoder(capacity).build.peak_bytes[0]


@pytest.mark.parametrize("laid", ["as they are read", "by pixels"])
def test_the_new_cells_of_one_row_are_appended_as_they_lie(laid: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of one row and several heads looks like an image with channels; a kernel may make it so, the cache is not so."""
    if laid == "by pixels":  # as if the past, which no new cell is, were read
        monkeypatch.setattr(views, "cut_pieces", lambda body, op, block: [(block, body)])
    onnx.save(cached_decoder.decoder(), tmp_path / "m.onnx")
    made = api.compile(tmp_path / "m.onnx", mesh="1", shapes=cached_decoder.sizes(1, 1, 12), state="auto")
    steps = {"input_ids": np.array([[5]]), "attention_mask": np.eye(1, 13, 12, dtype=np.int64), "position_ids": np.array([[0]])}
    with tapestry.Session(made) as one, tapestry.Session(made) as other:
        got, want = one.run(steps, at=0), unrecorded(other, steps, at=0)
        np.testing.assert_allclose(got["logits"], want["logits"], rtol=1e-5, atol=1e-5)
        caches = [s._engine.state.arrays for s in (one, other)]  # type: ignore[union-attr]
        for place in caches[0]:
            torch.testing.assert_close(caches[0][place], caches[1][place])


def test_cells_that_no_row_sees_are_not_read() -> None:
    """Rubbish there changes nothing, not even a NaN; what is seen counts, also behind the place that is written."""
    capacity = 12
    plan = decoder(capacity)
    with tapestry.Session(plan) as s, tapestry.Session(plan) as rotten, tapestry.Session(plan) as plain:
        for a in rotten._engine.state.memory.values():  # type: ignore[union-attr]
            a.fill_(np.nan)
        for at in range(8):
            wanted = s.run(token(at, at, capacity))["logits"]
            assert np.isfinite(wanted).all()
            np.testing.assert_array_equal(rotten.run(token(at, at, capacity))["logits"], wanted)
            np.testing.assert_allclose(unrecorded(plain, token(at, at, capacity))["logits"], wanted, rtol=1e-5, atol=1e-6)
        for at, seen in ((3, 8), (0, 8), (5, 2), (8, 0)):
            given = token(at, at, capacity, seen)
            recorded = s.run(given, at=at)["logits"]
            np.testing.assert_allclose(unrecorded(plain, given, at)["logits"], recorded, rtol=1e-5, atol=1e-6)
        narrow = s.run(token(3, 3, capacity, 4), at=3)["logits"]
        assert np.abs(narrow - s.run(token(3, 3, capacity, 8), at=3)["logits"]).max() > 1e-3


def test_two_sizes_share_a_cache_and_two_sessions_do_not() -> None:
    capacity, ids = 12, [[5, 9, 2, 30, 7], [3]]
    both = [decoder(capacity), decoder(capacity, 4)]
    with tapestry.Session(both) as s, tapestry.Session(both) as other, tapestry.Session(decoder(capacity)) as single:
        wanted = single.generate(ids, 6)
        assert np.array_equal(s.generate(ids, 6), wanted)
        other.generate([[1, 1, 1, 1, 1, 1]], 3)
        assert np.array_equal(s.generate(ids, 6), wanted) and np.array_equal(other.generate(ids, 6), wanted)
