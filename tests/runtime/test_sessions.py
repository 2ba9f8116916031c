"""Sessions: weights loaded once, callers in turns, ranks that stay, and their failures."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tapestry
from tapestry.errors import RunError, TapestryError
from tapestry.onnx_eval.ort_session import ort_session
from tests.support.paths import ROOT
from tests.support.small_models import N, T, f32, net, save

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def compiled(name: str = "mlp", devices: int = 2):
    return tapestry.compile(save(name), devices=devices)


def same(found, expected) -> bool:
    return list(found) == list(expected) and all(np.array_equal(found[n], a) for n, a in expected.items())


def engine(s) -> Any:
    return s._engine


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def gone(pid: int) -> bool:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


# --- in this process


def test_a_session_gives_what_a_run_gives_and_only_what_is_asked_for(tmp_path):
    plan = compiled("branches")
    plan.save(tmp_path / "plan")
    feeds = plan.random_feeds(1)
    expected = plan.run(feeds)
    with tapestry.Session(tmp_path / "plan") as s:
        assert same(s.run(feeds), expected)
        assert {n: shape for n, (_, shape) in s.inputs.items()} == {n: a.shape for n, a in feeds.items()}
        first = list(expected)[:1]
        assert same(s.run(feeds, first), {n: expected[n] for n in first})
        assert s.run(feeds, []) == {}
        with pytest.raises(TapestryError, match="no output 'nothing'"):
            s.run(feeds, ["nothing"])
    with pytest.raises(TapestryError, match="closed"):
        s.run(feeds)
    s.close()


class Speaks:
    """Something that speaks DLPack and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **more):
        return self.tensor.__dlpack__(**more)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_inputs_are_read_where_they_lie(monkeypatch):
    plan = compiled(devices=1)
    feeds = plan.random_feeds(2)
    expected = plan.run(feeds)
    seen = []
    executor = plan.session.executor
    run = executor.run
    monkeypatch.setattr(
        executor,
        "run",
        lambda f, *rest: (seen.append({n: f(n, tuple((0, k) for k in a.shape)) for n, a in feeds.items()}), run(f, *rest))[1],
    )
    torches = {n: torch.from_numpy(a) for n, a in feeds.items()}
    for given in (feeds, torches, {n: Speaks(t) for n, t in torches.items()}):
        assert same(plan.run(given), expected)
        assert all(t.data_ptr() == feeds[n].ctypes.data for n, t in seen[-1].items())
    strided = {n: np.asfortranarray(a) for n, a in feeds.items()}
    assert same(plan.run(strided), expected)
    frozen = {n: a.copy() for n, a in feeds.items()}
    for a in frozen.values():
        a.flags.writeable = False
    assert same(plan.run(frozen), expected)


def test_an_input_that_is_an_output_is_handed_out_as_a_copy():
    model = net([N("Identity", ["x"], ["y"])], {"x": (T.FLOAT, [3, 4])}, {"y": T.FLOAT})
    path = save_as(model, "passes")
    x = f32(3, 4)
    with tapestry.Session(tapestry.compile(path, devices=1)) as s:
        y = s.run({"x": x})["y"]
        assert np.array_equal(x, y)
        x[:] = 0
        assert not np.array_equal(x, y)


def save_as(model, name: str) -> Path:
    from tests.support.small_models import FOLDER

    path = FOLDER / f"{name}.onnx"
    path.write_bytes(model.SerializeToString())
    return path


# --- callers in turns


def test_concurrent_callers_each_get_their_own_result():
    plan = compiled()
    cases = [plan.random_feeds(k) for k in range(12)]
    expected = [plan.run(f) for f in cases]
    with tapestry.Session(plan) as s:
        found: list = [None] * len(cases)

        def call(k: int) -> None:
            for _ in range(5):
                found[k] = s.run(cases[k])

        threads = [threading.Thread(target=call, args=(k,)) for k in range(len(cases))]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    assert all(same(f, e) for f, e in zip(found, expected, strict=True))


# --- ranks


def test_ranks_stay_answer_and_leave_nothing():
    plan = compiled("attention")
    cases = [plan.random_feeds(k) for k in range(4)]
    expected = [plan.run(f) for f in cases]
    before = descriptors()
    with tapestry.Session(plan, processes=2, threads=1) as s:
        pids = [engine(s).process.pid, *engine(s).pids]
        assert len(pids) == 3
        held = descriptors()
        for _ in range(10):
            for f, e in zip(cases, expected, strict=True):
                assert same(s.run(f), e)
        assert s.run(cases[0], []) == {}
        with pytest.raises(TapestryError, match="is missing"):
            s.run({})
        assert same(s.run(cases[0]), expected[0]), "a refused input ends nothing"
        assert [engine(s).process.pid, *engine(s).pids] == pids
        assert descriptors() == held
    assert all(gone(p) for p in pids)
    assert descriptors() == before


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_session_or_is_started_again():
    plan = compiled()
    feeds = plan.random_feeds(0)
    expected = plan.run(feeds)
    with tapestry.Session(plan, processes=2, threads=1, restart=True) as s:
        before = engine(s).pids
        os.kill(before[1], signal.SIGKILL)
        assert same(s.run(feeds), expected), "the request is not lost"
        assert s.restarts == 1 and all(gone(p) for p in before)
        s._restart = False
        child = os.fork()
        if not child:  # whatever a forked process does with its copy, the ranks are not its own
            engine(s).close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert same(s.run(feeds), expected)
        pids = engine(s).pids
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(RunError, match="rank 0 was killed by SIGKILL") as e:
            s.run(feeds)
        assert "restart=True" in str(e.value)
        with pytest.raises(RunError, match="the session has ended: rank 0 was killed"):
            s.run(feeds)
    assert all(gone(p) for p in pids)


@pytest.mark.slow
def test_an_interrupt_in_the_middle_of_a_step_ends_the_session(monkeypatch):
    plan = compiled()
    with tapestry.Session(plan, processes=2, threads=1) as s:
        pids, answers = engine(s).pids, engine(s)._answers

        def interrupted():
            answers()
            raise KeyboardInterrupt

        monkeypatch.setattr(engine(s), "_answers", interrupted)
        with pytest.raises(KeyboardInterrupt):
            s.run(plan.random_feeds(0))
        with pytest.raises(RunError, match="interrupted in the middle of a step"):
            s.run(plan.random_feeds(0))
    assert all(gone(p) for p in pids)


@pytest.mark.slow
def test_ranks_that_cannot_start_say_why(tmp_path):
    plan = compiled()
    plan.save(tmp_path / "plan")
    before = descriptors()
    with pytest.raises(TapestryError, match="3"):
        tapestry.Session(tmp_path / "plan", processes=3)
    assert descriptors() == before


@pytest.mark.slow
def test_ranks_end_with_the_program_that_forgot_them(tmp_path):
    compiled().save(tmp_path / "plan")
    for end in ("", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"):
        script = "import sys, tapestry\ns = tapestry.Session(sys.argv[1], processes=2, threads=1)\ne = s._engine\n"
        script += f"print(e.process.pid, *e.pids, flush=True)\n{end}\n"
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", script, tmp_path / "plan"], capture_output=True, text=True, env=env, timeout=90
        )
        pids = [int(p) for p in done.stdout.split()]
        assert len(pids) == 3 and all(gone(p) for p in pids), done.stderr


# --- the example


@pytest.mark.slow
def test_the_decoder_of_the_examples_gives_onnxruntimes_tokens(tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "decode.py"], cwd=tmp_path, capture_output=True, text=True, env=env
    )
    theirs, tokens = ort_session(str(tmp_path / "decoder.onnx")), [0]
    past = [np.zeros((1, 1, 32), np.float32)] * 2
    for _ in range(12):
        feeds = {"token": np.array([tokens[-1:]]), "past_key": past[0], "past_value": past[1]}
        scores, *past = theirs.run(["scores", "present_key", "present_value"], feeds)
        tokens.append(int(scores.argmax()))
    assert list(map(int, done.stdout.split())) == tokens[1:], done.stderr
