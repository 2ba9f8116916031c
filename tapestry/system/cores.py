"""How many threads may compute at a time, and why: never more than the process may use.

torch knows of ``OMP_NUM_THREADS`` and takes each physical core once; what it does not know is the share of processor time that
a container has (cgroup: ``cpu.max``).
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


@functools.cache
def usable() -> tuple[int, str]:
    """How many cores this process may use at a time, and what says so."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = min(map(_of_group, _folders()), default=math.inf)
    if quota < bound:
        return max(1, math.ceil(quota)), f"the control group has {quota:g} cores' worth of time"
    return bound, "the cores of the machine" if bound == os.cpu_count() else "the cores that the process is bound to"


def share(processes: int, asked: int | None = None) -> int:
    """Threads of each of so many processes on this host: what was asked for, or the cores shared evenly."""
    return asked or max(1, usable()[0] // processes)


def _folders() -> list[Path]:
    """This process's group and those around it (version 2), and the group of processor time (version 1)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    out: list[Path] = []
    for line in lines:
        _, names, path = line.split(":", 2)
        root = GROUPS if not names else GROUPS / "cpu" if "cpu" in names.split(",") else None
        if root is not None:
            here = root / path.lstrip("/")
            out += [here, *(p for p in here.parents if p == root or root in p.parents), root]
    return list(dict.fromkeys(out))


def _of_group(folder: Path) -> float:
    """Cores' worth of time of one group."""
    try:
        if (both := folder / "cpu.max").is_file():
            limit, period = both.read_text().split()
        else:
            limit, period = ((folder / f"cpu.cfs_{n}_us").read_text().strip() for n in ("quota", "period"))
        return float(limit) / float(period) if limit not in ("max", "-1") else math.inf
    except (OSError, ValueError):
        return math.inf
