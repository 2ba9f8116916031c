"""How much work a call does, counted rather than timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def calls(of: Callable[[], object], *files: str) -> int:
    """Calls of Python functions, steps of generators among them, that are written in files whose paths end so."""
    found = 0

    def seen(frame: FrameType, event: str, arg: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.endswith(files)

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        of()
    finally:
        sys.setprofile(before)
    return found
