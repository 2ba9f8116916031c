"""Prompts that share the rows of a build: one that is finished gives its row to the next at once, while others go on.

Callers share it as well. Whoever waits for tokens and finds nobody computing does the next step, for all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import Condition, Lock

from tapestry.serving.generation import Cached, CachesLost, Request, Sequences, Step, Whole
from tapestry.serving.members import Member
from tapestry.serving.turns import Busy, Turns


class ContinuousBatch:
    """The rows of a batch, and requests that wait for one.

    Attributes:
        callers: how many take part.
        failed: why no step follows.
    """

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        self.rows: list[Request | None] = [None] * sequences.batch
        self.waiting: deque[Request] = deque()
        self.changed, self.stepping = Condition(Lock()), False
        self.callers = 0
        self.failed: Exception | None = None

    def free(self) -> bool:
        """Whether a request that comes now gets a row in the next step."""
        return len(self.waiting) < sum(q is None or q.ended for q in self.rows)

    def run(self, requests: Sequence[Request], until: float | None = None) -> None:
        """Go on until all of some requests, which wait here, have ended.

        Args:
            until: when the first of them must have a row, as `time.monotonic` counts.

        Raises:
            Busy: it has none by then.
            TapestryError: the scores of one are NaN or infinite.
        """
        try:
            while self._mine(requests, until):
                try:
                    self._step()
                except Exception as e:
                    self.failed = e
                    raise
                finally:
                    with self.changed:
                        self.stepping = False
                        self.changed.notify_all()
            for q in requests:
                if q.refused is not None:
                    raise q.refused
        finally:
            with self.changed:
                for q in requests:
                    q.ended = True

    def _mine(self, requests: Sequence[Request], until: float | None) -> bool:
        """Wait for what others compute; whether this caller computes the next step."""
        with self.changed:
            while not all(q.ended for q in requests):
                if self.failed is not None:
                    raise self.failed
                if not self.stepping:
                    self.stepping = True
                    self._admit()
                    return True
                left = None if until is None or any(q in self.rows or q.fed for q in requests) else until - time.monotonic()
                if left is not None and left <= 0:
                    raise Busy("no row of the batch came free in time", hint="a longer timeout=, or fewer callers")
                self.changed.wait(left)
            return False

    def _admit(self) -> None:
        """Give rows that nobody has to those who wait."""
        for r, q in enumerate(self.rows):
            if q is not None and not q.ended:
                continue
            self.rows[r] = None
            while self.waiting and self.rows[r] is None:
                one = self.waiting.popleft()
                self.rows[r] = None if one.ended else one

    def _step(self) -> None:
        """One step for all rows."""
        try:
            found = self.sequences.advance(self.rows)
        except CachesLost:
            for q in self.rows:
                if q is not None:
                    q.fed = 0
            return
        for q, scores in found:
            q.take(scores)


class SharedGeneration:
    """Generation of a session's callers: the first takes the session's turn, others join its batch until the last is through.

    Args:
        empty: is called before the first step and after the last: what the caches have is nobody's.
    """

    def __init__(self, turns: Turns, empty: Callable[[], None]) -> None:
        self._turns, self._empty, self._lock = turns, empty, Lock()
        self._line = Turns(turns.limit)
        self._batch: ContinuousBatch | None = None
        self._turn = ExitStack()

    def run(self, members: Sequence[Member], step: Step, requests: Sequence[Request], timeout: float | None) -> None:
        """Generate, in rows of a batch that other callers may have a part in.

        Raises:
            TapestryError: the builds are no causal decoder of tokens, or the tokens do not fit. Busy: as `Turns`, and where no
                row comes free in time.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._line.turn(timeout):
            batch = self._joined(requests) or self._begun(members, step, requests, timeout)
        try:
            batch.run(requests, until)
        finally:
            with self._lock:
                batch.callers -= 1
                if not batch.callers:
                    self._batch = None
                    self._empty()
                    self._turn.close()

    def _begun(
        self, members: Sequence[Member], step: Step, requests: Sequence[Request], timeout: float | None
    ) -> ContinuousBatch:
        """A batch, once it is the session's turn for it."""
        with ExitStack() as turn:
            turn.enter_context(self._turns.turn(timeout))
            batch = ContinuousBatch((Cached if members[0].caches else Whole)(members, step))
            for q in requests:
                batch.sequences.check(q)
            self._empty()
            batch.waiting.extend(requests)
            batch.callers = 1
            with self._lock:
                self._batch, self._turn = batch, turn.pop_all()
        return batch

    def _joined(self, requests: Sequence[Request]) -> ContinuousBatch | None:
        """The batch that runs, with these requests in line; not if somebody waits for the session's turn.

        Raises:
            Busy: as many callers as may wait have no row.
        """
        with self._lock:
            batch = self._batch
            if batch is None or batch.failed is not None or self._turns.waiting:
                return None
            for q in requests:
                batch.sequences.check(q)
            with batch.changed:
                if batch.callers > self._turns.limit and not batch.free():
                    raise Busy(f"{self._turns.limit} callers wait already", hint="fewer callers at a time, or a larger queue=")
                batch.waiting.extend(requests)
                batch.callers += 1
            return batch
