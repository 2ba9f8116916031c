"""Two hosts on one machine: the plan for a slow link is another one than for a fast link, and faster there; torchrun starts
again after a kill on either; nobody stays when the link is down. Skipped where namespaces or tc are not permitted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from bench.support import two_hosts as clock_hosts
from tapestry import api
from tests.support import two_hosts
from tests.support.command_line import attention_build, document
from tests.support.two_hosts import Hosts, NotPermitted

pytestmark = pytest.mark.slow
DELAY_MS, RATE_MBIT = 5, 50


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two namespaces and a link between them."""
    try:
        with two_hosts.hosts() as h:
            yield h
    except NotPermitted as e:
        pytest.skip(str(e))


def model(path: Path) -> Path:
    """Squares of a matrix: whoever computes some rows needs all of it, in every layer."""
    n, nodes, last = 1024, [], "x"
    for k in range(4):
        nodes += [helper.make_node("MatMul", [last, last], [f"m{k}"]), helper.make_node("Tanh", [f"m{k}"], [f"s{k}"])]
        last = f"s{k}"
    info = [helper.make_tensor_value_info(t, TensorProto.FLOAT, [n, n]) for t in ("x", last)]
    graph = helper.make_graph(nodes, "hosts", info[:1], info[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def on_two_hosts(hosts: Hosts, build: Path, file: Path, out: Path) -> dict:
    """Run on a rank in each namespace; the document of rank 0."""
    argv = [build, "--input", f"x={file}", "--output", out, "--threads", "1", "--json", "--timeout", "60"]
    runs = [hosts.rank(r, *argv) for r in range(2)]
    ended = [p.communicate(timeout=180) for p in runs]
    assert [p.returncode for p in runs] == [0, 0], ended
    return json.loads(ended[0][0])


def test_the_plan_for_a_slow_link_is_faster_there(hosts, tmp_path, record_property):
    here = document("calibrate", "-o", tmp_path / "fast.json", "--threads", "1")
    delay = hosts.slow_down(DELAY_MS, RATE_MBIT)
    slow = here | {"levels": [{"alpha": delay, "beta": 8 / (RATE_MBIT * 1e6)}]}
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    path, found = model(tmp_path / "model.onnx"), {}
    for name in ("fast", "slow"):
        made = document("compile", path, "-o", tmp_path / name, "--devices", "2", "--topology", tmp_path / f"{name}.json")
        np.save(tmp_path / "x.npy", api.load(tmp_path / name).random_feeds(0)["x"])
        runs = [on_two_hosts(hosts, tmp_path / name, tmp_path / "x.npy", tmp_path / f"out-{name}") for _ in range(3)]
        for ran in runs:
            assert sum(r["payload_bytes"] for r in ran["ranks"]) == sum(t["bytes"] for t in made["transfers"])
        measured = float(np.median([ran["seconds"] for ran in runs]))
        found[name] = {
            "bytes": sum(t["bytes"] for t in made["transfers"]),
            "predicted": made["simulated_s"],
            "measured": measured,
        }
    print(found)
    record_property("two hosts", json.dumps(found))
    assert found["fast"]["bytes"] > found["slow"]["bytes"]
    assert found["slow"]["measured"] < found["fast"]["measured"]
    a, b = (np.load(tmp_path / f"out-{n}" / "s3.npy") for n in ("fast", "slow"))
    assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(a)


def wait_for(mark: Path, runs: list[subprocess.Popen[str]]) -> None:
    while not mark.exists():
        assert all(p.poll() is None for p in runs), [p.communicate() for p in runs]
        time.sleep(0.02)


@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_starts_again_after_a_kill_on_either_host(hosts, tmp_path, victim):
    mark, out = tmp_path / "mark", tmp_path / "out"
    runs = [hosts.agent(k, 2, attention_build(), "--output", out, "--threads", 1, slow=mark) for k in range(2)]
    wait_for(mark, runs)
    (rank,) = hosts.ranks(victim)
    os.kill(rank, signal.SIGKILL)
    ended = [p.communicate(timeout=240) for p in runs]
    assert [p.returncode for p in runs] == [0, 0], ended
    assert len(mark.read_text().splitlines()) == 2
    compiled = api.load(attention_build())
    assert np.allclose(np.load(out / "y.npy"), compiled.run(compiled.random_feeds(0))["y"], rtol=1e-5, atol=1e-6)


def test_nobody_stays_when_the_link_is_down(hosts, tmp_path):
    mark = tmp_path / "mark"
    argv = (attention_build(), "--output", tmp_path / "out", "--threads", 1, "--timeout", 5)
    runs = [hosts.rank(k, *argv, slow=mark) for k in range(2)]
    wait_for(mark, runs)
    hosts.cut()
    assert hosts.gone(5 + 12)  # the timeout, and twelve seconds
    said = [p.communicate(timeout=5)[1] for p in runs]
    # of one name both, so that rank 0 takes rank 1 for a stopped process of its own host, and ends it
    assert runs[0].returncode == 1 and runs[1].returncode in (1, -9) and "rank 1" in said[0], said


def test_other_hosts_reach_nothing_without_the_token(hosts, tmp_path):
    runs = [hosts.rank(k, attention_build(), "--timeout", 10, env={"TAPESTRY_TOKEN": ""}) for k in range(2)]
    said = [p.communicate(timeout=60)[1] for p in runs]
    assert [p.returncode for p in runs] == [2, 2] and all("without a token" in err for err in said), said
    runs = [hosts.rank(k, attention_build(), "--timeout", 10, env={"TAPESTRY_TOKEN": "x" * (16 + k)}) for k in range(2)]
    said = [p.communicate(timeout=60)[1] for p in runs]
    assert [p.returncode for p in runs] == [1, 1] and any("has another token" in err for err in said), said


def test_the_clocks_ranks_are_one_world_and_its_link_carries_the_plan(tmp_path):
    """Each host once ran a whole copy of the plan by itself, and `bench clock` compared plans by that."""
    device = {"memory": 1 << 34, "bandwidth": 1e11, "flops": {"other": 1e9}}
    (tmp_path / "t.json").write_text(json.dumps({"device": device, "levels": [{"alpha": 1e-6, "beta": 1e-10}]}))
    argv = [model(tmp_path / "m.onnx"), "-o", tmp_path / "p", "--mesh", "2", "--topology", tmp_path / "t.json"]
    made = document("compile", *argv)
    moved = sum(t["bytes"] for t in made["transfers"])
    assert moved > 1 << 20
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "b0.npz", **api.load(tmp_path / "p").random_feeds(0))

    def sent(h: Hosts) -> int:
        files = [f"/sys/class/net/{dev}/statistics/tx_bytes" for dev in h.devices]
        said = [subprocess.run([*h.inside(k), "cat", f], capture_output=True, check=True).stdout for k, f in enumerate(files)]
        return sum(map(int, said))

    try:
        with clock_hosts.joined(1000) as h, clock_hosts.Ranks(h, tmp_path / "p", tmp_path / "in", 0) as both:
            both.ready()
            before = sent(h)
            both.run(0)
            assert moved <= sent(h) - before < 1.3 * moved
    except NotPermitted as e:
        pytest.skip(str(e))
