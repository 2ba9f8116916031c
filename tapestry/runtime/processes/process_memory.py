"""What the kernel counts of this process's memory."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

STATUS, REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def kernel_count(name: str) -> int:
    """Bytes under a name of ``/proc/self/status``: ``VmRSS`` (resident), ``VmHWM`` (the most that was), ``RssAnon`` (not shared
    with a file); 0 where there is none."""
    try:
        text = STATUS.read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{name}:")), 0)


def trim() -> None:
    """Give freed memory back to the system (glibc keeps the holes that weights leave when they are packed), and let ``VmHWM``
    begin again at what is resident now, where the kernel allows it (`proc(5)`, clear_refs)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        REFS.write_text("5")
    except OSError:
        return
