"""This machine, as far as measurements depend on it. Light: it does not import torch."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def memory_bytes() -> int:
    """Bytes of its memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
