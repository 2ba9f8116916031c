"""Processes that lead a session of their own, and what is left of it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

HANG = 90.0


@dataclass
class Run:
    """A launcher: a session of processes, and a file for what it says."""

    pid: int
    said: Path
    status: int | None = None

    def poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def finish(self, since: float) -> tuple[float, int, str]:
        """(seconds, exit status, what it said); a hang is killed, and told by the status 999."""
        while self.poll() is None:
            if time.monotonic() - since > HANG:
                for p in session(self.pid):
                    os.kill(p, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                return HANG, 999, "hang"
            time.sleep(0.005)
        return time.monotonic() - since, self.status or 0, self.said.read_text()


def children(pid: int) -> list[int]:
    """Living children, oldest first: forked ranks come in order."""
    try:
        return sorted(int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    except OSError:
        return []


def session(leader: int) -> list[int]:
    """Living processes of a session."""
    found: list[int] = []
    for p in Path("/proc").iterdir():
        try:
            fields = (p / "stat").read_text().rpartition(")")[2].split() if p.name.isdigit() else []
        except OSError:
            continue
        if len(fields) > 3 and int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(p.name))
    return found


def gone(leader: int) -> bool:
    """Whether nothing of a session is left within two seconds."""
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        if not session(leader):
            return True
        time.sleep(0.02)
    return False
