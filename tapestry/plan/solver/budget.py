"""How long a search may go on: so much work, until a deadline where one is given, or until somebody interrupts it.

Work is counted, not timed, so that the same search takes the same way on any machine, busy or not. A unit is about one table
cell that a vectorised pass touches. One budget is passed down through everything that searches; its parts end earlier, but all
share one meter and one interrupt.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

SECOND = 1e9  # units: what one core of 2.5 GHz does in about a second
WORK = 60 * SECOND  # of a search for which nobody sets a time limit


Found = Callable[[float, float], None]  # told of a plan: its seconds, and a lower bound


def unseen(seconds: float, bound: float) -> None:
    """Nobody watches."""


class OutOfTime(Exception):
    """A search that nobody insists on is given up; see `Budget.check`."""


@dataclass(slots=True)
class Meter:
    """Units of work that were done, the least seconds of the plans that were found, and who is told of them.

    ``history`` has the plans that were better than those before, or better bounded: (work, seconds, bound). A bound is of all
    forms of the graph that were looked at: ``floor`` is the least one of those that are done.
    """

    spent: float = 0.0
    least: float = math.inf
    floor: float = math.inf
    seen: Found = unseen
    history: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on work, and an interrupt that any thread or signal handler may set.

    Attributes:
        until: the meter's reading at which it is over.
        deadline: on the monotonic clock (seconds), of ``--time-limit``; infinite without one, and then no clock is read.
    """

    until: float
    deadline: float = math.inf
    interrupt: threading.Event = field(default_factory=threading.Event)
    meter: Meter = field(default_factory=Meter)

    @staticmethod
    def of(
        limit: float | Budget | None = None,
        interrupt: threading.Event | None = None,
        seen: Found = unseen,
    ) -> Budget:
        """A budget as it is, one of some seconds from now and about as much work, or one of `WORK` alone."""
        if isinstance(limit, Budget):
            return limit
        stop, meter = interrupt or threading.Event(), Meter(seen=seen)
        if limit is None:
            return Budget(WORK, interrupt=stop, meter=meter)
        return Budget(limit * SECOND, time.monotonic() + limit, stop, meter)

    def spend(self, units: float) -> None:
        """Count work that was done, here and in every budget that this is a part of."""
        self.meter.spent += units

    def found(self, seconds: float, bound: float) -> None:
        """Remember a plan that could be taken, and tell whoever watches."""
        self.meter.least, bound = min(self.meter.least, seconds), min(bound, self.meter.floor)
        last = self.meter.history[-1:]
        if not last or seconds < last[0][1] or (seconds == last[0][1] and bound > last[0][2]):
            self.meter.history.append((self.meter.spent, seconds, bound))
        self.meter.seen(seconds, bound)

    def left(self) -> float:
        """Units, never below 0; none when it is over."""
        return 0.0 if self.over() else self.until - self.meter.spent

    def over(self, more: float = 0.0) -> bool:
        """Whether the search must end, where ``more`` work has been done that is not counted yet."""
        return self.interrupt.is_set() or self.meter.spent + more >= self.until or self.late()

    def late(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline < math.inf and time.monotonic() >= self.deadline

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

    def part(self, units: float) -> Budget:
        """At most so many units of it."""
        return Budget(min(self.until, self.meter.spent + units), self.deadline, self.interrupt, self.meter)

    def share(self, of_it: float) -> Budget:
        """This part of the work that is left."""
        return self.part(of_it * max(0.0, self.until - self.meter.spent))

    def grace(self, units: float) -> Budget:
        """So many units and as much time, whatever is left: to end a search that has nothing to show yet."""
        deadline = time.monotonic() + units / SECOND if self.deadline < math.inf else math.inf
        return Budget(self.meter.spent + units, deadline, self.interrupt, self.meter)
