"""Callers of a session take turns, in the order in which they came; how many may wait is limited."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock

from tapestry.errors import TapestryError


class Busy(TapestryError):
    """More callers than may wait, or one has waited for longer than it wanted."""


class Turns:
    """One caller at a time, first come first served.

    Args:
        limit: how many may wait beside the one whose turn it is; one more is refused at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = Lock()
        self._taken = False
        self._waiting: deque[Lock] = deque()

    @property
    def waiting(self) -> int:
        """How many callers wait."""
        return len(self._waiting)

    @contextmanager
    def turn(self, timeout: float | None = None) -> Generator[None]:
        """A turn.

        Args:
            timeout: seconds that the caller waits for it at most.

        Raises:
            Busy: too many wait, or the time is over.
        """
        self._take(timeout)
        try:
            yield
        finally:
            with self._lock:
                if self._waiting:
                    self._waiting.popleft().release()  # it is that caller's turn: it stays taken
                else:
                    self._taken = False

    def _take(self, timeout: float | None) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            if len(self._waiting) >= self.limit:
                raise Busy(f"{self.limit} callers wait already", hint="fewer callers at a time, or a larger queue=")
            place = Lock()
            place.acquire()
            self._waiting.append(place)
        began = time.monotonic()
        if place.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            return
        with self._lock:
            if place in self._waiting:
                self._waiting.remove(place)
                raise Busy(f"no turn within {time.monotonic() - began:.3g} s", hint="a longer timeout=, or fewer callers")
        # the turn came in the moment in which the time was over
