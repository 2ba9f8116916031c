"""The topology ``auto``: what a quick ``tapestry calibrate`` said of this machine, measured once and kept.

It is kept in the user's cache folder (`flags.cache_folder`) for the processor, the cores, the version of torch, and the number
of processes and of their threads. Plans are equal only under equal costs, so it is never measured again while it is there;
two processes that want it at the same time measure it once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from tapestry import flags
from tapestry.runtime.calibration.machine import versions

log = logging.getLogger("tapestry")
AUTO = "auto"
FORMAT = 3  # of what is kept
SECONDS, PATIENCE = 3, 120  # about how long to measure; how long to wait for it


def automatic(devices: int) -> str:
    """The file of this machine's topology for so many devices; the preset ``cpu`` where it cannot be measured.

    ``TAPESTRY_TOPOLOGY`` says what else ``auto`` stands for: then nothing is measured.
    """
    if fixed := flags.topology():
        return fixed
    cores = os.cpu_count() or 1
    processes = max(1, min(devices, 2 * cores))  # more only wait for each other
    threads = max(1, cores // processes)
    about = {**versions(), "processes": processes, "threads": threads, "format": FORMAT}
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    path = flags.cache_folder() / "topologies" / f"{key}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                _measure(path, processes, threads)
    except OSError:  # no place to keep it: what is not kept would be measured anew, and otherwise, each time
        return "cpu"
    return str(path) if path.is_file() else "cpu"


def _measure(path: Path, processes: int, threads: int) -> None:
    """Run ``tapestry calibrate``, which writes the file whole or not at all."""
    log.warning("measuring this machine once, for --topology %s (%s)", AUTO, path)
    command = [sys.executable, "-m", "tapestry", "calibrate", "-o", str(path), "--processes", str(processes), "-q"]
    command += ["--threads", str(threads), "--seconds", str(SECONDS)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=flags.alone())  # noqa: S603
        why = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired:
        why = [f"nothing after {PATIENCE} s"]
    if why:
        log.warning("it could not be measured, so --topology cpu is taken: %s", why[0])
