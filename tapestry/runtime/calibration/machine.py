"""This machine, as far as measurements depend on it. Light: it does not import torch."""

from __future__ import annotations

import os
from pathlib import Path

LAST_CACHE = 32 << 20


def memory_bytes() -> int:
    """Bytes of its memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def last_cache() -> int:
    """Bytes of the largest cache of a core, as Linux says it; 32 MiB where it says nothing."""
    try:
        found = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
        return max((int(t.removesuffix("K")) << 10 for t in found if t.endswith("K")), default=LAST_CACHE)
    except (OSError, ValueError):
        return LAST_CACHE
