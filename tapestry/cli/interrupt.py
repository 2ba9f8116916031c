"""Ctrl-C in two steps: the first one during the search asks it to end with the best plan so far, the second one aborts.

Outside the search the first one aborts already. What is aborted has written nothing: build directories appear in one step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

MESSAGE = b"\ninterrupted: ending the search with the best plan so far (Ctrl-C again to abort)\n"


class Interrupts:
    """Tell it each stage as it begins; `asked` is set by the first Ctrl-C during the search."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._searching = False

    def stage(self, name: str) -> None:
        """A stage begins."""
        self._searching = name == "search"

    @contextmanager
    def listening(self) -> Generator[Interrupts]:
        """Handle SIGINT until the end of the block (only the main thread can; elsewhere nothing changes)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if not self._searching or self.asked.is_set():
            raise KeyboardInterrupt
        self.asked.set()
        os.write(2, MESSAGE)
