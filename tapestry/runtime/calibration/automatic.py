"""The topology ``auto``: what ``tapestry calibrate --auto`` said of this machine, measured once and kept.

It is kept in the user's cache folder (`flags.cache_folder`) for the processor, the cores, the version of torch, and the number
of processes and of their threads. Plans are equal only under equal costs, so figures that are sure are not measured again
while they are there; those that other work disturbed are, once the machine is quiet. Two processes that want it at the same
time measure it once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from tapestry import flags
from tapestry.plan.topology import topology
from tapestry.plan.topology.measured_costs import BUSY, doubtful
from tapestry.system.cores import usable
from tapestry.system.processes import started

log = logging.getLogger("tapestry")
AUTO = "auto"
FORMAT = 4  # of what is kept
SECONDS, PATIENCE = 3.0, 120  # about how long a round takes; how long to wait for all
AGAIN = 300  # seconds from one attempt to the next, where the figures are doubtful


def place(devices: int) -> tuple[Path, int]:
    """The file, in a folder that is there, for so many devices, and the number of processes that it is of."""
    cores = usable()[0]
    processes = max(1, min(devices, 2 * cores))  # more only wait for each other
    about = {**versions(), "processes": processes, "threads": max(1, cores // processes), "format": FORMAT}
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    path = flags.cache_folder() / "topologies" / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path, processes


def automatic(devices: int) -> str:
    """The file of this machine's topology for so many devices; the preset ``cpu`` where it cannot be measured.

    ``TAPESTRY_TOPOLOGY`` says what else ``auto`` stands for: then nothing is measured.
    """
    if (fixed := flags.topology()) and fixed != "auto":
        return fixed
    try:
        path, processes = place(devices)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file() or _again(path):
                _measure(path, processes)
    except OSError:  # no place to keep it: what is not kept would be measured anew, and otherwise, each time
        return "cpu"
    return str(path) if path.is_file() else "cpu"


def _again(path: Path) -> bool:
    """Whether the figures are doubtful, the machine is quiet now, and the last attempt was not just before."""
    if time.time() - path.stat().st_mtime < AGAIN or os.getloadavg()[0] > 1 + BUSY * (os.cpu_count() or 1):  # 1: this process
        return False
    path.touch()
    return doubtful(topology((), str(path)).figures)


def _measure(path: Path, processes: int) -> None:
    """Run ``tapestry calibrate --auto``, which writes the file whole or not at all."""
    log.warning("measuring this machine for --topology %s (%s)", AUTO, path)
    command = [sys.executable, "-m", "tapestry", "calibrate", "--auto", "--processes", str(processes), "-q"]
    try:
        with started(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=flags.alone()) as process:
            try:
                said: str = process.communicate(timeout=PATIENCE)[1]
            finally:
                process.kill()
        why = said.strip().splitlines()[-1:] if process.returncode else []
    except subprocess.TimeoutExpired:
        why = [f"nothing after {PATIENCE} s"]
    if why:
        kept = path if path.is_file() else "cpu"
        log.warning("it could not be measured, so --topology %s is taken: %s", kept, why[0])


def versions() -> dict[str, str]:
    """What measurements depend on beside the number of processes and threads."""
    return {"torch": version("torch"), "cpu": cpu_model(), "cores": str(os.cpu_count() or 1)}


def cpu_model() -> str:
    """The processor's name, as Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (v.strip() for k, _, v in (x.partition(":") for x in lines) if k.strip() == "model name")
    return next(named, platform.machine())
