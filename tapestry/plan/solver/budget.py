"""How long a search may go on: until a deadline, or until somebody interrupts it.

One budget is passed down through everything that searches. Parts of it end earlier, but all share one interrupt: when it is
set, nothing is left of any of them, and every search ends with the best it has.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field


class OutOfTime(Exception):
    """A search that nobody insists on is given up; see `Budget.check`."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A deadline on the monotonic clock (seconds), and an interrupt that any thread or signal handler may set."""

    deadline: float
    interrupt: threading.Event = field(default_factory=threading.Event)

    @staticmethod
    def of(limit: float | Budget, interrupt: threading.Event | None = None) -> Budget:
        """A budget as it is, or one of some seconds from now."""
        if isinstance(limit, Budget):
            return limit
        return Budget(time.monotonic() + limit, interrupt or threading.Event())

    def left(self) -> float:
        """Seconds, never below 0; none after an interrupt."""
        return 0.0 if self.interrupt.is_set() else max(0.0, self.deadline - time.monotonic())

    def over(self) -> bool:
        """Whether the search must end."""
        return self.interrupt.is_set() or time.monotonic() >= self.deadline

    def check(self) -> None:
        """Give up a search that has nothing to show yet.

        Raises:
            OutOfTime: it must end.
        """
        if self.over():
            raise OutOfTime

    def interrupted(self) -> bool:
        """Whether it ends because somebody asked for it."""
        return self.interrupt.is_set()

    def part(self, seconds: float) -> Budget:
        """At most so many seconds of it."""
        return Budget(min(self.deadline, time.monotonic() + seconds), self.interrupt)

    def share(self, of_it: float) -> Budget:
        """This part of what is left."""
        left = self.deadline - time.monotonic()
        return self.part(of_it * left) if math.isfinite(left) else self
