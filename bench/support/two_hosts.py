"""Two hosts of one machine with a link of some rate between them, and what runs on both."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.support.record import ROOT
from tests.support.two_hosts import ADDRESSES, Hosts, NotPermitted, hosts, ip

__all__ = ("Hosts", "NotPermitted", "Ranks", "joined", "on_both")

BURST = "16kb"  # what the link takes at once after a pause: little, for a cable takes nothing at once
PORT, SECONDS = 29617, 600
SECRET = secrets.token_hex(32)


@contextmanager
def joined(megabits: int) -> Iterator[Hosts]:
    """Two hosts and a link between them of so many Mbit/s each way.

    Raises:
        NotPermitted: with what was refused.
    """
    with hosts() as h:
        for host, dev in enumerate(h.devices):
            shape = ("rate", f"{megabits}mbit", "burst", BURST, "latency", "2s")
            try:
                ip(*h.inside(host), "tc", "qdisc", "add", "dev", dev, "root", "tbf", *shape)
            except (subprocess.CalledProcessError, OSError) as e:
                raise NotPermitted(f"no rate for a link: {getattr(e, 'stderr', e)}") from None
        yield h


def _started(h: Hosts, module: Sequence[object], port: int) -> list[subprocess.Popen[str]]:
    """A Python module as a rank on each host."""
    out = list[subprocess.Popen[str]]()
    for r in (0, 1):
        ranks = {"RANK": str(r), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": h.devices[r]}
        more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TAPESTRY_TOKEN": SECRET}
        argv = [*h.inside(r), sys.executable, "-m", *map(str, module)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        out.append(subprocess.Popen(argv, text=True, cwd=ROOT, env={**os.environ, **ranks, **place, **more}, **pipes))
    return out


def on_both(h: Hosts, module: Sequence[object]) -> str:
    """Run a Python module as a rank on each host; what rank 0 printed.

    Raises:
        RuntimeError: a rank failed.
    """
    runs = _started(h, module, PORT)
    ended = [p.communicate(timeout=SECONDS) for p in runs]
    if any(p.returncode for p in runs):
        raise RuntimeError("; ".join(err.strip()[-400:] for _, err in ended))
    return ended[0][0]


class Ranks:
    """A build with a rank on each host, which stay and run a batch when they are told to (`bench.support.rank_turns`).

    Args:
        inputs: a folder of batches.
        number: of these ranks among those that are there at the same time.
    """

    def __init__(self, h: Hosts, build: Path, inputs: Path, number: int) -> None:
        self._runs = _started(h, ["bench.support.rank_turns", build, inputs], PORT + 1 + number)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for p in self._runs:
            if p.stdin is not None:
                p.stdin.close()
        for p in self._runs:
            try:
                p.wait(30)
            except subprocess.TimeoutExpired:
                p.kill()

    def ready(self) -> None:
        """Wait until both have loaded the build.

        Raises:
            RuntimeError: a rank failed.
        """
        self._answers()

    def run(self, batch: int) -> None:
        """One batch by its number; outputs stay on the ranks.

        Raises:
            RuntimeError: a rank failed.
        """
        for p in self._runs:
            assert p.stdin is not None
            p.stdin.write(f"{batch}\n")
            p.stdin.flush()
        self._answers()

    def _answers(self) -> None:
        for p in self._runs:
            assert p.stdout is not None and p.stderr is not None
            if not p.stdout.readline():
                raise RuntimeError(p.stderr.read().strip()[-400:] or "a rank has ended")
