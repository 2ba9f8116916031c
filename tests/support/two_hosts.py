"""Two hosts on one machine: network namespaces joined by a pair of virtual interfaces. Needs root, ip and tc."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 29611
TOKEN = "an open secret of the tests"


class NotPermitted(Exception):
    """This machine makes no namespaces."""


def ip(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=20)


@dataclass(frozen=True, slots=True)
class Hosts:
    """Names of the namespaces, and of the interface in each."""

    names: tuple[str, str]
    devices: tuple[str, str]

    def inside(self, host: int) -> tuple[str, ...]:
        """The beginning of a command line there."""
        return ("ip", "netns", "exec", self.names[host])

    def slow_down(self, milliseconds: int, mbit: int) -> float:
        """Limit what leaves either host, with a delay where the kernel knows how; seconds of delay."""
        for host, dev in enumerate(self.devices):
            root = (*self.inside(host), "tc", "qdisc", "add", "dev", dev, "root")
            try:
                ip(*root, "netem", "delay", f"{milliseconds}ms", "rate", f"{mbit}mbit")
                delay = milliseconds / 1e3
            except subprocess.CalledProcessError:
                ip(*root, "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "2s")
                delay = 2e-4
        return delay

    def cut(self) -> None:
        """The link goes down at one end; connections stay open, and nothing comes through."""
        ip(*self.inside(1), "ip", "link", "set", self.devices[1], "down")

    def pids(self, host: int) -> list[int]:
        """Processes there."""
        done = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=False)
        return [int(p) for p in done.stdout.split()]

    def ranks(self, host: int) -> list[int]:
        """Those that are ranks, not their launchers."""
        return [p for p in self.pids(host) if b"\0tapestry.runtime\0" in _line(p) and b"torch.distributed.run" not in _line(p)]

    def start(self, host: int, module: Sequence[object], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """``python -m …`` there."""
        more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TAPESTRY_TOKEN": TOKEN} | dict(env or {})
        command = [*self.inside(host), sys.executable, "-m", *map(str, module)]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | more, start_new_session=True
        )

    def rank(
        self, host: int, *argv: object, slow: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A rank for each host, as whoever sets torchrun's variables starts it; ``slow``: with this mark (`slow_ranks`)."""
        place = {"RANK": str(host), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
        return self.start(host, [*_module(slow), *argv], place | dict(env or {}))

    def agent(self, host: int, restarts: int, *argv: object, slow: Path) -> subprocess.Popen[str]:
        """torchrun with one slow rank on a host."""
        options = [
            "--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}",
            "--rdzv-id", "hosts", "--max-restarts", restarts, "--local-addr", ADDRESSES[host],
            "--rdzv-conf", f"is_host={int(host == 0)}",
        ]  # fmt: skip
        return self.start(host, ["torch.distributed.run", *options, "-m", *_module(slow), *argv])

    def gone(self, seconds: float) -> bool:
        """Whether no process is left on either host within some seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self.pids(0) and not self.pids(1):
                return True
            time.sleep(0.1)
        return False


def _module(slow: Path | None) -> list[object]:
    return ["tapestry.runtime"] if slow is None else ["tests.support.programs.slow_ranks", slow, 0.2, "tapestry.runtime"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def listening(pids: list[int]) -> set[str]:
    """Addresses on which processes listen, in hexadecimal as the kernel tells them."""
    found: set[str] = set()
    for pid in pids:
        sockets = {os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir() if f.is_symlink()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    found.add(fields[1].split(":")[0])
    return found


def _line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def hosts() -> Iterator[Hosts]:
    """Two namespaces and a link between them; all that runs there ends with them.

    Raises:
        NotPermitted: root, ip or tc is missing.
    """
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise NotPermitted("no ip or tc")
    own = os.getpid()
    h = Hosts((f"tapestry-{own}-a", f"tapestry-{own}-b"), (f"tap{own}a", f"tap{own}b"))
    try:
        try:
            for n in h.names:
                ip("ip", "netns", "add", n)
            ends = [("netns", n) for n in h.names]
            ip("ip", "link", "add", h.devices[0], *ends[0], "type", "veth", "peer", "name", h.devices[1], *ends[1])
            for k, (dev, address) in enumerate(zip(h.devices, ADDRESSES, strict=True)):
                ip(*h.inside(k), "ip", "addr", "add", f"{address}/24", "dev", dev)
                ip(*h.inside(k), "ip", "link", "set", dev, "up")
                ip(*h.inside(k), "ip", "link", "set", "lo", "up")
        except (subprocess.CalledProcessError, OSError) as e:
            raise NotPermitted(f"not permitted: {getattr(e, 'stderr', e)}") from None
        yield h
    finally:
        for k, n in enumerate(h.names):
            for p in h.pids(k):
                os.kill(p, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", n], capture_output=True, check=False)
