"""Runs on several processes: the same bits, bytes and peaks as planned; failures end the run, named."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tapestry import api
from tapestry.build import store
from tapestry.build.packed_program import Packed, pack, unpack
from tapestry.errors import TapestryError
from tapestry.ir.graph import Block
from tapestry.ir.program import Reduce, Transfer, transfer_bytes
from tapestry.plan.lower import lower
from tapestry.runtime.step_messages import owners
from tests.support.command_line import attention_build, document, run
from tests.support.paths import ROOT
from tests.support.small_models import case, mesh_of, random_plan, save

pytestmark = pytest.mark.usefixtures("one_thread")  # as the ranks have: kernels round by the number of threads
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def tapestry(*argv: object, program: Sequence[object] = ("tapestry",)) -> subprocess.Popen:
    command = [sys.executable, "-m", *map(str, program), *map(str, argv)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)


def finished(p: subprocess.Popen, seconds: float = 120) -> tuple[int, str, str]:
    out, err = p.communicate(timeout=seconds)
    assert "Traceback" not in err, err
    return p.returncode, out, err


# --- the same as in one process


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        {
            "models": ["mlp", "attention", "norms", "reductions", "branches"],
            "meshes": ["2", "3", "2x2"],
            "seeds": 2,
            "worlds": [2, 3, 4],
        },
        {
            "models": ["halves", "integers", "bfloats", "selections", "scalars", "opaques", "noise"],
            "meshes": ["5", "3x2"],
            "seeds": 1,
            "worlds": [1, 2, 5],
        },
    ],
    ids=["floats", "others"],
)
def test_random_plans_give_the_same_bits_bytes_and_peaks(asked):
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.programs.ranks", json.dumps(asked)],
        capture_output=True,
        text=True,
        env=ENV,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tried"] >= 28 and found["wrong"] == []
    assert len(found["rounded"]) < found["tried"] / 3  # most are held to the same bits


def test_a_build_on_processes_is_the_build_in_one(tmp_path):
    build = attention_build()
    program = store.read(build)[0].program
    planned = sum(transfer_bytes(s, program) for s in program.steps if isinstance(s, Transfer | Reduce))
    trace = tmp_path / "t.json"
    status, out, err = finished(
        tapestry("run", build, "--processes", 2, "--check", "--output", tmp_path / "two", "--trace", trace, "--json")
    )
    assert status == 0, err
    found = json.loads(out)
    assert found["passed"] and found["outputs"]["y"]["rel_err"] < 1e-5
    assert found["peak_bytes"] == list(store.read(build)[0].peak_bytes)
    assert sum(r["payload_bytes"] for r in found["ranks"]) == planned == sum(t["bytes"] for t in found["transfers"])
    assert [r["devices"] for r in found["ranks"]] == [[0], [1]]
    document("run", build, "--output", tmp_path / "one")
    assert (tmp_path / "one" / "y.npy").read_bytes() == (tmp_path / "two" / "y.npy").read_bytes()
    check_trace(json.loads(trace.read_text()), 2)


def check_trace(trace: dict, ranks: int) -> None:
    """Every rank has its tracks, and slices on a track do not overlap."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in trace["traceEvents"]:
        if e["ph"] == "X":
            tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert {p for p, _ in tracks} == set(range(ranks)) and len(trace["otherData"]["steps"]) > 0
    for spans in tracks.values():
        for (_, end), (begin, _) in pairwise(sorted(spans)):
            assert begin >= end - 1e-3


@pytest.mark.slow
def test_messages_that_are_checked(tmp_path):
    """Headers beside every message and every call: the same results, by the same calls."""
    model, build, found = save("attention"), tmp_path / "build", []
    whole = api.compile(model, devices=1).build.plan.graph.ops
    summed = next(o for o in whole if isinstance(o, Block) and o.monoid == "sum" and o.reduce[0].size % 2 == 0)
    api.compile(model, devices=2, pins=[f"{summed.source[-1]}:{summed.reduce[0].name}=2@d0"]).save(build)
    for checks in ("0", "1"):
        env = ENV | {"TAPESTRY_CHECK_MESSAGES": checks}
        argv = [sys.executable, "-m", "tapestry", "run", str(build), "--processes", "2", "--check", "--json"]
        done = subprocess.run([*argv, "--output", str(tmp_path / checks)], capture_output=True, text=True, env=env, timeout=120)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert [f["passed"] for f in found] == [True, True]
    assert (tmp_path / "0" / "y.npy").read_bytes() == (tmp_path / "1" / "y.npy").read_bytes()
    calls = [[r["backend_calls"] for r in f["ranks"]] for f in found]
    assert calls[0] == calls[1] and sum(calls[0][0].values()) > 0


@pytest.mark.slow
def test_torchrun_runs_it(tmp_path):
    build = attention_build()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tapestry.runtime"]
    more = [build, "--output", tmp_path / "out", "--json"]
    done = subprocess.run([*map(str, command), *map(str, more)], capture_output=True, text=True, env=ENV, timeout=180)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["ranks"]) == 2
    expected = api.load(build).run(api.load(build).random_feeds(0))
    assert np.array_equal(np.load(tmp_path / "out" / "y.npy"), expected["y"])


@pytest.mark.slow
def test_another_build_on_one_rank_is_found_before_the_first_step(tmp_path):
    other = tmp_path / "other"
    assert run("compile", save("attention"), "-o", other, "--devices", "2", "--seed", "7", "--memory", "1GiB", "-q")[0] == 0
    with __import__("socket").socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = []
    for r, build in enumerate((attention_build(), other)):
        env = ENV | {"RANK": str(r), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "tapestry.runtime", str(build)]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
    ended = [finished(p) for p in ranks]
    assert [e[0] for e in ended] == [1, 1]
    assert "rank 1 has another build than rank 0" in ended[0][2] + ended[1][2]


def test_devices_are_shared_evenly():
    assert owners(4, 2) == (0, 0, 1, 1) and owners(5, 3) == (0, 1, 1, 2, 2) and owners(3, 3) == (0, 1, 2)
    with pytest.raises(TapestryError, match="5 processes for the 4 devices"):
        owners(4, 5)
    status, _, err = run("run", attention_build(), "--processes", "3")
    assert status == 2 and "3 processes for the 2 devices of the plan" in err


def test_a_build_on_disk_keeps_the_counts_that_are_not_sent():
    """What is read back is the program that was planned, fields that are known included."""
    graph, found = case("norms").graph, 0
    for seed in range(20):
        plan = random_plan(graph, mesh_of("3"), random.Random(seed))
        program = lower(plan)
        found += any(isinstance(s, Reduce) and any(s.known) for s in program.steps)
        assert unpack(msgspec.json.decode(msgspec.json.encode(pack(program)), type=Packed)) == program
    assert found


@pytest.mark.slow
def test_an_input_that_does_not_fit_is_the_inputs_fault(tmp_path):
    """PricedPlan before ranks are started: exit status 2, as in one process, and no rank is blamed."""
    name = api.load(attention_build()).build.plan.graph.inputs[0]
    np.save(tmp_path / "x.npy", np.zeros((1, 1), np.float32))
    asked = ("run", attention_build(), "--processes", 2, "--input", f"{name}={tmp_path / 'x.npy'}", "-q")
    status, _, err = finished(tapestry(*asked))
    assert status == 2 and f"input '{name}' is float32[1, 1]" in err and "rank" not in err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--threads", 0), "argument --threads: 0 is not 1 or more"),
        (("--processes", 3), "3 processes for the 2 devices"),
        (("--processes", "two"), "argument --processes: invalid integer value: 'two'"),
        (("--seed", -1), "argument --seed: -1 is not 0 or more"),
        (("--processes", 2, "--port", 65536), "argument --port: 65536 is not 0 to 65535"),
        (("--timeout", "nan"), "argument --timeout: nan: seconds must be ≥ 0"),
        (("--processes", 2, "--library"), "--library: a run by ranks uses no vendor library"),
    ],
)
def test_numbers_that_no_run_has(given, said):
    status, _, err = finished(tapestry("run", attention_build(), *given))
    assert status == 2 and said in err


@pytest.mark.slow
def test_threads_of_a_run_in_one_process():
    status, text, err = finished(tapestry("run", attention_build(), "--threads", 1, "--json"))
    assert status == 0 and [r["rank"] for r in json.loads(text)["ranks"]] == [0], err


# --- failures


def ranks_of(launcher: subprocess.Popen, mark: Path, count: int) -> list[int]:
    """Process ids by rank, once they compute."""
    end = time.monotonic() + 60
    while time.monotonic() < end and launcher.poll() is None:
        found = sorted(map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()))
        if len(found) == count and mark.exists():
            return found
        time.sleep(0.005)
    raise AssertionError(f"no ranks: {launcher.communicate()}")


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("number", "words", "within"),
    [
        (signal.SIGKILL, "rank 1 was killed by SIGKILL", 10),
        (signal.SIGSTOP, "rank 1 is stopped", 15),
        (signal.SIGTERM, "rank 1 was killed by SIGTERM", 10),
    ],
)
def test_a_rank_that_fails_is_named_and_nothing_is_left(tmp_path, number, words, within):
    mark, out = tmp_path / "mark", tmp_path / "out"
    argv = ("run", attention_build(), "--processes", 2, "--output", out, "--timeout", 4, "-q")
    p = tapestry(*argv, program=("tests.support.programs.slow_ranks", mark, 1, "tapestry"))
    pids = ranks_of(p, mark, 2)
    since = time.monotonic()
    os.kill(pids[1], number)
    status, _, err = finished(p)
    assert (status, time.monotonic() - since < within) == (1, True), err
    assert words in err and err.count("tapestry run:") == 1
    assert not any(Path(f"/proc/{q}").exists() for q in pids)
    assert not out.exists()


FORKS = """
import json, os, sys
from pathlib import Path

forks = []  # the threads that each fork found
os.register_at_fork(
    before=lambda: forks.append([(t / "comm").read_text().strip() for t in Path("/proc/self/task").iterdir()]),
)
from tapestry.cli import main
print(json.dumps([main(sys.argv[1:]), forks]))
"""


@pytest.mark.slow
def test_no_rank_is_forked_while_the_store_is_open():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    argv = ["run", attention_build(), "--processes", 2, "--port", port, "-q"]
    command = [sys.executable, "-c", FORKS, *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=120)
    status, forks = json.loads(done.stdout)
    assert (status, len(forks)) == (0, 2), done.stderr
    assert not any("tcpstore" in name for names in forks for name in names), forks


@pytest.mark.slow
def test_a_taken_port_is_named():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        status, _, err = finished(tapestry("run", attention_build(), "--processes", 2, "--port", s.getsockname()[1]))
    assert status == 1 and f"port {s.getsockname()[1] if s.fileno() >= 0 else ''}".strip() in err and "is taken" in err


@pytest.mark.slow
def test_what_was_measured_beside_what_was_estimated():
    status, text, err = finished(tapestry("explain", attention_build(), "--analyze", "--json"))
    assert status == 0, err
    found = json.loads(text)["analysis"]
    assert found["processes"] == 2 and found["measured_s"] > 0 and found["step_error"] >= 1
    assert all(r["estimated_s"] >= 0 and r["measured_s"] > 0 for r in found["steps"]) and "compute" in found["kinds"]


# --- GPUs and several nodes


def test_a_gpu_per_rank(monkeypatch):
    from tapestry.errors import RunError
    from tapestry.runtime.processes.process_backend import BACKENDS, device_of

    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert device_of("torch-cpu", 1, 1).type == "cpu" and BACKENDS["cpu"] == "gloo" and chosen == []
    assert device_of("triton:sm90", 5, 1) == torch.device("cuda", 1) == chosen[0] and "cuda:nccl" in BACKENDS["cuda"]
    with pytest.raises(RunError, match="no GPU for rank 6"):
        device_of("triton", 6, 2)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert device_of("triton", 0, 0).type == "cpu"


@pytest.mark.slow
def test_two_agents_of_torchrun(tmp_path):
    """Two nodes, as torchrun sees them: an agent each, joined by its own rendezvous."""
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
    ]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "tapestry", "-m", "tapestry.runtime"]
    argv = [*command, str(attention_build()), "--output", str(tmp_path / "out"), "--timeout", "60", "--threads", "1", "--json"]
    agents = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV) for _ in range(2)]
    ended = [p.communicate(timeout=200) for p in agents]
    assert [p.returncode for p in agents] == [0, 0], ended
    documents = [json.loads(out) for out, _ in ended if out.strip()]
    assert len(documents) == 1 and [r["devices"] for r in documents[0]["ranks"]] == [[0], [1]]
    expected = api.load(attention_build()).run(api.load(attention_build()).random_feeds(0))
    assert np.array_equal(np.load(tmp_path / "out" / "y.npy"), expected["y"])
