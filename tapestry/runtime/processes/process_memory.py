"""What the kernel counts of this process's memory."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # malloc.h
STATUS, REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def kernel_count(name: str) -> int:
    """Bytes under a name of ``/proc/self/status``: ``VmRSS`` (resident), ``VmHWM`` (the most that was), ``RssAnon`` (not shared
    with a file); 0 where there is none."""
    try:
        text = STATUS.read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{name}:")), 0)


def before_loading() -> None:
    """Let glibc give a weight's memory back at once when the weight is dropped for its packed copy. Of its own it keeps such
    holes, once the first array of a size was freed (`mallopt(3)`, M_MMAP_THRESHOLD)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 17)


def after_loading() -> None:
    """Let glibc keep what steps of a run free, as it would have learned to; and let ``VmHWM`` begin again at what is resident
    now, where the kernel allows it (`proc(5)`, clear_refs)."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallopt(MMAP_THRESHOLD, 1 << 25)
        libc.mallopt(TRIM_THRESHOLD, 1 << 26)
    try:
        REFS.write_text("5")
    except OSError:
        return
