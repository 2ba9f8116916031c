"""This machine, as far as measurements depend on it. Light: it does not import torch."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

LAST_CACHE = 32 << 20


def memory_bytes() -> int:
    """Bytes of its memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def versions() -> dict[str, str]:
    """What measurements depend on beside the number of processes and threads."""
    return {"torch": version("torch"), "cpu": cpu_model(), "cores": str(os.cpu_count() or 1)}


def last_cache() -> int:
    """Bytes of the largest cache of a core, as Linux says it; 32 MiB where it says nothing."""
    try:
        found = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
        return max((int(t.removesuffix("K")) << 10 for t in found if t.endswith("K")), default=LAST_CACHE)
    except (OSError, ValueError):
        return LAST_CACHE


def cpu_model() -> str:
    """The processor's name, as Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (v.strip() for k, _, v in (x.partition(":") for x in lines) if k.strip() == "model name")
    return next(named, platform.machine())
