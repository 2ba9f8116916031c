"""Two hosts on one machine: network namespaces joined by a pair of virtual interfaces with a rate. Needs root, ip and tc."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.support.record import ROOT

NAMES, ADDRESSES, DEVICES = ("clock-a", "clock-b"), ("10.213.78.1", "10.213.78.2"), ("tapca", "tapcb")
PORT, SECONDS = 29617, 600


class NotPermitted(Exception):
    """This machine has no namespaces, or nobody here may make any."""


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=20)


@contextmanager
def joined(megabits: int) -> Iterator[None]:
    """Two namespaces and a link between them of so many Mbit/s each way.

    Raises:
        NotPermitted: with what was refused.
    """
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise NotPermitted("no ip or tc")
    try:
        for n in NAMES:
            _run("ip", "netns", "add", n)
        a, b = DEVICES
        _run("ip", "link", "add", a, "netns", NAMES[0], "type", "veth", "peer", "name", b, "netns", NAMES[1])
        for n, dev, address in zip(NAMES, DEVICES, ADDRESSES, strict=True):
            inside = ("ip", "netns", "exec", n)
            _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", dev)
            _run(*inside, "ip", "link", "set", dev, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            shape = ("rate", f"{megabits}mbit", "burst", "128kb", "latency", "2s")
            _run(*inside, "tc", "qdisc", "add", "dev", dev, "root", "tbf", *shape)
        yield
    except (subprocess.CalledProcessError, OSError) as e:
        raise NotPermitted(str(getattr(e, "stderr", e))) from None
    finally:
        for n in NAMES:
            subprocess.run(["ip", "netns", "del", n], capture_output=True, timeout=20)


def on_both(command: Sequence[object], hosts: int = 2) -> str:
    """Run a Python command as a rank in each namespace (or in the first alone); what rank 0 printed.

    Raises:
        RuntimeError: a rank failed.
    """
    runs, token = list[subprocess.Popen[str]](), secrets.token_hex(32)
    for r in range(hosts):
        ranks = {"RANK": str(r), "WORLD_SIZE": str(hosts), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": DEVICES[r]}
        env = (
            os.environ
            | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TAPESTRY_TOKEN": token}
            | (ranks | place if hosts > 1 else {})
        )
        argv = ["ip", "netns", "exec", NAMES[r], sys.executable, "-m", *map(str, command)]
        runs.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
    ended = [p.communicate(timeout=SECONDS) for p in runs]
    if any(p.returncode for p in runs):
        raise RuntimeError("; ".join(err.strip()[-400:] for _, err in ended))
    return ended[0][0]
