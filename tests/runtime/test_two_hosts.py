"""Two hosts on one machine: network namespaces joined by a pair of virtual interfaces with a delay and a rate. The plan for that link
is another one than for a fast link, and faster there. Needs root; skipped where namespaces or tc are not permitted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tapestry import api
from tests.support.command_line import document
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
DELAY_MS, RATE_MBIT = 5, 50
NAMES, ADDRESSES = ("tapestry-a", "tapestry-b"), ("10.213.77.1", "10.213.77.2")


def ip(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=20)


def slow_down(inside: tuple[str, ...], dev: str) -> float:
    """Limit what leaves a device, with a delay where the kernel knows how; seconds of delay."""
    root = (*inside, "tc", "qdisc", "add", "dev", dev, "root")
    try:
        ip(*root, "netem", "delay", f"{DELAY_MS}ms", "rate", f"{RATE_MBIT}mbit")
        return DELAY_MS / 1e3
    except subprocess.CalledProcessError:
        ip(*root, "tbf", "rate", f"{RATE_MBIT}mbit", "burst", "64kb", "latency", "2s")
        return 2e-4


@pytest.fixture
def hosts() -> Iterator[float]:
    """Two namespaces and a slow link between them; its delay in seconds."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("no ip or tc")
    try:
        for n in NAMES:
            ip("ip", "netns", "add", n)
        ip("ip", "link", "add", "tapva", "netns", NAMES[0], "type", "veth", "peer", "name", "tapvb", "netns", NAMES[1])
        for n, dev, address in zip(NAMES, ("tapva", "tapvb"), ADDRESSES, strict=True):
            inside = ("ip", "netns", "exec", n)
            ip(*inside, "ip", "addr", "add", f"{address}/24", "dev", dev)
            ip(*inside, "ip", "link", "set", dev, "up")
            ip(*inside, "ip", "link", "set", "lo", "up")
            delay = slow_down(inside, dev)
    except (subprocess.CalledProcessError, OSError) as e:
        for n in NAMES:
            subprocess.run(["ip", "netns", "del", n], capture_output=True)
        pytest.skip(f"not permitted: {getattr(e, 'stderr', e)}")
    yield delay
    for n in NAMES:
        subprocess.run(["ip", "netns", "del", n], capture_output=True)


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


def on_two_hosts(build: Path, inputs: Path, out: Path) -> dict:
    """Run on a rank in each namespace; the document of rank 0."""
    runs = []
    for r, n in enumerate(NAMES):
        env = os.environ | {
            "RANK": str(r), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29611", "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": ("tapva", "tapvb")[r],
        }  # fmt: skip
        command = ["ip", "netns", "exec", n, sys.executable, "-m", "tapestry.runtime", str(build), "--inputs", str(inputs)]
        more = ["--output", str(out), "--threads", "1", "--json", "--timeout", "60"]
        runs.append(subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
    ended = [p.communicate(timeout=180) for p in runs]
    assert [p.returncode for p in runs] == [0, 0], ended
    return json.loads(ended[0][0])


def test_the_plan_for_a_slow_link_is_faster_there(hosts, tmp_path, record_property):
    here = document("calibrate", "-o", tmp_path / "fast.json", "--threads", "1")
    slow = here | {"levels": [{"alpha": hosts, "beta": 8 / (RATE_MBIT * 1e6)}]}
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    path, found = model(tmp_path / "model.onnx"), {}
    for name in ("fast", "slow"):
        made = document("compile", path, "-o", tmp_path / name, "--devices", "2", "--topology", tmp_path / f"{name}.json")
        compiled = api.load(tmp_path / name)
        (tmp_path / "in").mkdir(exist_ok=True)
        for k in range(4):
            np.savez(tmp_path / "in" / f"b{k}.npz", **compiled.random_feeds(k))
        ran = on_two_hosts(tmp_path / name, tmp_path / "in", tmp_path / f"out-{name}")
        assert sum(r["payload_bytes"] for r in ran["ranks"]) == 4 * sum(t["bytes"] for t in made["transfers"])
        measured = float(np.median(ran["batch_seconds"][1:]))
        found[name] = {
            "bytes": sum(t["bytes"] for t in made["transfers"]),
            "predicted": made["simulated_s"],
            "measured": measured,
        }
    print(found)
    record_property("two hosts", json.dumps(found))
    assert found["fast"]["bytes"] > found["slow"]["bytes"]
    assert found["slow"]["measured"] < found["fast"]["measured"]
    for k in range(4):
        a, b = (np.load(tmp_path / f"out-{n}" / f"b{k}" / "s3.npy") for n in ("fast", "slow"))
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(a)
