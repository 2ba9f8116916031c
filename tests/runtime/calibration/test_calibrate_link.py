"""Calibration between two hosts sees the link between them: both directions of it at once, and its rate in every call.
Skipped where namespaces or tc are not permitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tapestry.ir.collective_calls import ALL_REDUCE, BROADCAST, CALLS, EXCHANGE
from tapestry.plan.topology import parse_mesh, topology
from tests.support import two_hosts
from tests.support.two_hosts import ADDRESSES, PORT, NotPermitted, ip

MBIT, BYTES = 200, 1 << 20
WIRE = BYTES * 8 / (MBIT * 1e6)  # seconds of so many bytes in one direction


@pytest.mark.slow
def test_a_slow_link_is_seen_and_is_used_both_ways_at_once(tmp_path: Path):
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
    argv = ["tapestry", "calibrate", "-o", tmp_path / "link.json", "--device", "cpu", "--seconds", "3", "--threads", "1"]
    try:
        with two_hosts.hosts() as h:
            for host, dev in enumerate(h.devices):
                shape = ("rate", f"{MBIT}mbit", "burst", "16kb", "latency", "2s")
                ip(*h.inside(host), "tc", "qdisc", "add", "dev", dev, "root", "tbf", *shape)
            runs = [h.start(r, argv, {**place, "RANK": str(r), "GLOO_SOCKET_IFNAME": h.devices[r]}) for r in (0, 1)]
            ended = [p.communicate(timeout=60) for p in runs]
    except NotPermitted as e:
        pytest.skip(str(e))
    assert [p.returncode for p in runs] == [0, 0], ended
    assert json.loads((tmp_path / "link.json").read_text())["measured"]["hosts"] in ("1", "2")
    topo = topology(parse_mesh("2"), str(tmp_path / "link.json"))
    for call in CALLS:
        small, large = (topo.call_seconds(call, 2, n) for n in (8, BYTES))
        assert small < 0.3 * large, call
    one_way = topo.call_seconds(BROADCAST, 2, BYTES)
    for call in (ALL_REDUCE, EXCHANGE):  # as much leaves each host as there is in the buffer, while as much comes
        assert 0.8 * WIRE < topo.call_seconds(call, 2, BYTES) < 1.6 * one_way, call
