"""The search ends when it is told to: budgets, time limits, Ctrl-C at any moment; what is written is whole and verified."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

import tapestry
from tapestry.errors import PlanError
from tapestry.ir.program import peak_bytes
from tapestry.plan.search.planner import search
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.topology import parse_mesh, topology
from tapestry.system.interrupts import Interrupts
from tests.support.command_line import document, run
from tests.support.paths import ROOT
from tests.support.small_models import FOLDER, case, save


def test_a_part_ends_with_the_whole():
    whole = Budget.of(100.0)
    part, share = whole.part(1000.0 * SECOND), whole.share(0.5)
    assert (part.deadline, part.until) == (whole.deadline, whole.until)
    assert 40 * SECOND < share.left() < 51 * SECOND
    assert not part.over() and not share.interrupted()
    whole.interrupt.set()
    for b in (whole, part, share, part.part(5.0 * SECOND)):
        assert b.over() and b.interrupted() and b.left() == 0.0


def test_no_seconds_are_over_at_once():
    assert Budget.of(0.0).over() and Budget.of(0.0).left() == 0.0 and not Budget.of(0.0).interrupted()
    same = Budget.of(3.0)
    assert Budget.of(same) is same
    assert Budget.of(float("inf")).share(0.3).left() == float("inf")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("limit", ["0", "0.05", "0.5"])
@pytest.mark.parametrize("name", ["attention", "conv_chain", "reductions"])
def test_any_time_limit_gives_a_verified_plan(name, limit, tmp_path):
    best = document("compile", save(name), "-o", tmp_path / "b", "--mesh", "2x2")
    d = document("compile", save(name), "-o", tmp_path / "b", "--mesh", "2x2", "--time-limit", limit)
    assert d["certificate"]["passed"]
    assert d["lower_bound_s"] <= best["objective_s"] * (1 + 1e-9) <= d["objective_s"] * (1 + 2e-9)
    assert document("verify", tmp_path / "b")["passed"]
    assert d["search"]["ended"] in ("proved", "time", "work", "stalled")


@pytest.mark.parametrize("limit", ["-1", "nan", "-inf"])
def test_bad_time_limits(limit, tmp_path):
    status, _, err = run("compile", save("attention"), "-o", tmp_path / "b", "--devices", "2", f"--time-limit={limit}")
    assert status == 2 and "--time-limit" in err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_search_gives_a_verified_plan(late):
    stop = threading.Event()
    if late:
        threading.Timer(0.05, stop.set).start()
    else:
        stop.set()
    build = tapestry.compile(save("attention"), mesh="2x2", interrupt=stop, pareto=True)
    assert build.laws and build.report["lower_bound_s"] <= build.report["objective_s"]
    if not late:
        assert build.report["search"]["interrupted"]


@pytest.mark.slow
def test_memory_without_time_fits_or_says_so():
    graph, topo = case("attention").graph, topology(parse_mesh("2x2"))
    free = search(graph, topo)
    peak = max(peak_bytes(free.program)[0])
    for limit in (peak, peak * 9 // 10, peak // 2, 64):
        small = topology(parse_mesh("2x2"), memory=limit)
        try:
            found = search(graph, small, time_limit=0.0)
        except PlanError as e:
            assert "of " in str(e) and "bytes" in str(e)
            continue
        assert max(peak_bytes(found.program)[0]) <= limit
        assert found.bound <= found.objective
    stop = Budget.of(10.0)
    stop.interrupt.set()
    with pytest.raises(PlanError, match="interrupted"):
        search(graph, topology(parse_mesh("2x2"), memory=64), time_limit=stop)


# --- Ctrl-C


def test_the_first_signal_asks_and_the_second_aborts(capfd):
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    with interrupts.listening():
        interrupts.stage("search")
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.asked.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert "best plan so far" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("stage", ["lift", "verify", "codegen", "write"])
def test_outside_the_search_the_first_signal_aborts(stage):
    interrupts = Interrupts()
    with interrupts.listening(), pytest.raises(KeyboardInterrupt):
        interrupts.stage("search")
        interrupts.stage(stage)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    assert not interrupts.asked.is_set()


SIGNALS = """
import os, signal, sys
from tapestry import cli
from tapestry.plan import search_passes
real, times, calls = search_passes.cheapest, int(sys.argv[1]), []
def cheapest(*args, **kwargs):
    if not calls:
        calls.append(1)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
    return real(*args, **kwargs)
search_passes.cheapest = cheapest
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_during_the_search(times, tmp_path):
    out = tmp_path / "b"
    command = [sys.executable, "-c", SIGNALS, str(times), "compile", save("attention"), "-o", out, "--mesh", "2x2", "--json"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    if times == 2:
        assert done.returncode == 130
        assert not out.exists() and list(tmp_path.iterdir()) == []
        return
    assert done.returncode == 0, done.stderr
    assert "interrupted" in done.stderr and "gap" in done.stderr and "--resume" in done.stderr
    d = json.loads(done.stdout)
    assert d["search"]["ended"] in ("interrupted", "proved") and d["search"]["interrupted"]
    assert document("verify", out)["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_signals_at_random_moments_leave_a_whole_build_or_none(seed, tmp_path):
    rng = random.Random(seed)
    out = tmp_path / "b"
    command = [
        sys.executable,
        "-m",
        "tapestry",
        "compile",
        str(save("conv_chain")),
        "-o",
        str(out),
        "--mesh",
        "2x4",
        "--pareto",
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    for _ in range(rng.choice([1, 1, 2])):
        time.sleep(rng.uniform(0.6, 2.5))  # after Python's own start
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert "Traceback" not in err or child.returncode < 0, err
    assert child.returncode in (0, 130, -signal.SIGINT), err
    if child.returncode == 0:
        assert document("verify", out)["passed"]
    else:
        assert not out.exists()
    assert FOLDER.is_dir()
