"""Tasks in a random legal order, each of them twice.

A value is held from when it is made until its last reader is done.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapestry.runtime.block_tasks import Task, Value

Array = Any


Compute = Callable[[int, Mapping[Value, Array]], Sequence[Array]]
"""A task by its position, and the values that it reads, to those that it makes."""


@dataclass(slots=True)
class Told:
    """What happened.

    Attributes:
        order: tasks in the order in which they were done, each as often as it was.
        second: tasks that were done a second time to compare.
        differ: values that were not the same bits another time.
        peak: the most bytes that each device held.
    """

    order: list[int] = field(default_factory=list[int])
    second: int = 0
    differ: list[Value] = field(default_factory=list[Value])
    peak: list[int] = field(default_factory=list[int])

    def document(self) -> dict[str, Any]:
        """For the JSON of ``run``."""
        differ = [f"{n} of device {d}" for d, n in self.differ]
        return {"computed": len(self.order), "twice": self.second, "peak_bytes": self.peak, "differ": differ}


class Drawn:
    """A set from which an element is drawn at random; the same draws give the same elements on every machine."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.items, self.place = list[Any](), dict[Any, int]()
        for x in items:
            self.add(x)

    def __contains__(self, x: Any) -> bool:
        return x in self.place

    def __len__(self) -> int:
        return len(self.items)

    def add(self, x: Any) -> None:
        """Put one in that is not there."""
        self.place[x] = len(self.items)
        self.items.append(x)

    def discard(self, x: Any) -> None:
        """Take one out, if it is there."""
        at = self.place.pop(x, None)
        if at is None:
            return
        last = self.items.pop()
        if at < len(self.items):
            self.items[at], self.place[last] = last, at


class BlockWalk:
    """One run of all tasks.

    Attributes:
        held: values that are there.
        ready: tasks that can be done for the first time; ``second`` those that can be done for the second time.
        told: what has happened so far.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        ends: Iterable[Value],
        devices: int,
        seed: int,
        compute: Compute,
        digest: Callable[[Array], bytes],
        size: Callable[[Array], int],
    ) -> None:
        self.tasks, self.ends = tasks, set(ends)
        self.compute, self.digest, self.size = compute, digest, size
        self.random = random.Random(seed)  # noqa: S311
        self.readers: dict[Value, list[int]] = {v: [] for t in tasks for v in t.outs}
        for k, t in enumerate(tasks):
            for v in t.reads:
                self.readers[v].append(k)
        self.left = Counter({v: len(r) for v, r in self.readers.items()})
        self.missing = [len(t.reads) for t in tasks]
        self.ready = Drawn(k for k, n in enumerate(self.missing) if n == 0)
        self.second = Drawn()
        self.held: dict[Value, Array] = {}
        self.digests: dict[Value, bytes] = {}
        self.alive = [0] * devices
        self.told = Told(peak=[0] * devices)

    def run(self, tell: Callable[[int, int], None]) -> None:
        """Do everything; afterwards all of ``ends`` are held."""
        while len(self.ready) or len(self.second):
            k = self._draw()
            if k in self.ready:
                self._do(k)
            else:
                self._compare(k)
            tell(len(self.told.order) - self.told.second, len(self.tasks))

    def _draw(self) -> int:
        """A task that can be done: one that is to be done, or, before or after the last of these, one for the second time."""
        at = self.random.randrange(len(self.ready) + len(self.second))
        return self.ready.items[at] if at < len(self.ready) else self.second.items[at - len(self.ready)]

    def _outs(self, k: int) -> list[tuple[Value, Array]]:
        """Do a task; what it makes is compared with what it made before."""
        t = self.tasks[k]
        self.told.order.append(k)
        made = list(zip(t.outs, self.compute(k, {v: self.held[v] for v in t.reads}), strict=True))
        for v, a in made:
            found = self.digest(a)
            if self.digests.setdefault(v, found) != found:
                self.told.differ.append(v)
        return made

    def _do(self, k: int) -> None:
        """Do a task for the first time."""
        made = self._outs(k)
        self.second.add(k)
        self.ready.discard(k)
        for v, a in made:
            if self.left[v] or v in self.ends:
                self._hold(v, a)
        for v in self.tasks[k].reads:
            self.left[v] -= 1
            self._release(v)

    def _compare(self, k: int) -> None:
        """Do a task for the second time."""
        self.second.discard(k)
        self._outs(k)
        self.told.second += 1

    def _hold(self, v: Value, array: Array) -> None:
        self.held[v], device = array, v[0]
        self.alive[device] += self.size(array)
        self.told.peak[device] = max(self.told.peak[device], self.alive[device])
        for r in self.readers[v]:
            self.missing[r] -= 1
            if not self.missing[r]:
                self.ready.add(r)

    def _release(self, v: Value) -> None:
        """A value that nobody waits for goes; who is to read it a second time does so before."""
        if self.left[v] or v in self.ends:
            return
        for r in self.readers[v]:
            if r in self.second:
                self._compare(r)
        self.alive[v[0]] -= self.size(self.held.pop(v))
