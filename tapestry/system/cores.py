"""How many threads may compute at a time, and why: never more than the process may use.

torch knows of ``OMP_NUM_THREADS``, of the cores that a process is bound to, and of those that are two threads of one core; what
it does not know is the share of time that a container has (cgroup: ``cpu.max``).
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


@functools.cache
def quota() -> int:
    """Cores' worth of time that the control groups of this process leave it, rounded up; its cores where nothing is said."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([there, *map(_of_group, _folders())])))


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
        if root is None:
            continue
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
        return float(limit) / float(period) if limit not in ("max", "-1") else float("inf")
    except (OSError, ValueError):
        return float("inf")
