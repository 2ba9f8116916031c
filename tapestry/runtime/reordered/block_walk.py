"""Tasks in a random legal order, some of them twice, some results lost on the way and made again of what is still held.

A value is held from when it is made until its last reader is done. When one is lost that somebody still needs, its task is to
be done again; when an input of that is gone as well, so is the one that makes it, and so on: never more than that.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapestry.runtime.reordered.block_tasks import Task, Value

Array = Any
Compute = Callable[[int, Mapping[Value, Array]], Sequence[Array]]
"""A task by its position, and the values that it reads, to those that it makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to happen in a run.

    Attributes:
        seed: of everything that is drawn.
        lose: after every task, the chance that one value that is held, and that was not lost before, is lost.
        devices: so many devices are lost in the course of the run, with all that they hold, and do not come back.
        twice: whether every task is done a second time, at another moment, on another device where there is one.
    """

    seed: int = 0
    lose: float = 0.0
    devices: int = 0
    twice: bool = True


@dataclass(slots=True)
class Work:
    """Tasks, their FLOPs, and the bytes that came to a device for them: from the host, and from other devices."""

    tasks: int = 0
    flops: int = 0
    nbytes: int = 0

    def add(self, tasks: int, flops: int, nbytes: int) -> None:
        """Some more."""
        self.tasks, self.flops, self.nbytes = self.tasks + tasks, self.flops + flops, self.nbytes + nbytes


@dataclass(slots=True)
class Told:
    """What happened.

    Attributes:
        order: tasks in the order in which they were done, each as often as it was.
        first: tasks done for the first time, as the plan has them: the work of a plain run.
        second: tasks that were done a second time to compare.
        elsewhere: tasks that were done on another device than the plan's.
        lost: values; ``gone``: devices.
        again: tasks that were done again because of a loss, and what else a loss made others fetch.
        restart: what had been done at each loss, that a restart does again, summed over all losses.
        differ: values that were not the same bits another time.
        peak: the most bytes that each device held.
    """

    order: list[int] = field(default_factory=list[int])
    first: Work = field(default_factory=Work)
    second: int = 0
    elsewhere: int = 0
    lost: int = 0
    gone: list[int] = field(default_factory=list[int])
    again: Work = field(default_factory=Work)
    restart: Work = field(default_factory=Work)
    differ: list[Value] = field(default_factory=list[Value])
    peak: list[int] = field(default_factory=list[int])

    def document(self) -> dict[str, Any]:
        """For the JSON of ``run``."""
        works = {"plan": self.first, "again": self.again, "restart": self.restart}
        rows = {name: {"blocks": w.tasks, "flops": w.flops, "bytes": w.nbytes} for name, w in works.items()}
        differ = [f"{n} of device {d}" for d, n in self.differ]
        return {
            "computed": len(self.order), "twice": self.second, "elsewhere": self.elsewhere, "lost_blocks": self.lost,
            "lost_devices": self.gone, **rows, "peak_bytes": self.peak, "differ": differ,
        }  # fmt: skip


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
        held: values that are there; ``where``: on which device.
        todo: tasks that are to be done, for the first time or again.
        told: what has happened so far.
    """

    def __init__(
        self, tasks: Sequence[Task], ends: Iterable[Value], devices: int, asked: Asked, compute: Compute,
        digest: Callable[[Array], bytes], size: Callable[[Array], int],
    ) -> None:  # fmt: skip
        self.tasks, self.ends, self.asked = tasks, set(ends), asked
        self.compute, self.digest, self.size = compute, digest, size
        self.random = random.Random(asked.seed)  # noqa: S311
        self.living = list(range(devices))
        self.maker = {v: k for k, t in enumerate(tasks) for v in t.outs}
        self.readers: dict[Value, list[int]] = {v: [] for v in self.maker}
        for k, t in enumerate(tasks):
            for v in t.reads:
                self.readers[v].append(k)
        self.left = Counter({v: len(r) for v, r in self.readers.items()})
        self.missing = [len(t.reads) for t in tasks]
        self.todo = set(range(len(tasks)))
        self.ready = Drawn(k for k, n in enumerate(self.missing) if n == 0)
        self.second = Drawn()
        self.held: dict[Value, Array] = {}
        self.where: dict[Value, int] = {}
        self.prey = Drawn()  # values that are held and were not lost yet
        self.lost = set[Value]()
        self.digests: dict[Value, bytes] = {}
        self.done: set[int] = set()
        self.alive = [0] * devices
        self.told = Told(peak=[0] * devices)
        count = min(asked.devices, max(0, len(tasks) - 1))
        self.moments = Counter(self.random.randrange(1, len(tasks)) for _ in range(count))

    def run(self, tell: Callable[[int, int], None]) -> None:
        """Do everything; afterwards all of ``ends`` are held."""
        while self.todo or len(self.second):
            k = self._draw()
            if k in self.todo:
                self._do(k)
                self._losses()
            else:
                self._compare(k)
            tell(len(self.done), len(self.tasks))

    def _draw(self) -> int:
        """A task that can be done: one that is to be done, or, before or after the last of these, one for the second time."""
        at = self.random.randrange(len(self.ready) + len(self.second))
        return self.ready.items[at] if at < len(self.ready) else self.second.items[at - len(self.ready)]

    def _place(self, task: Task, other: bool = False) -> int:
        """The plan's device, where it lives; else, or where another is wanted, one that is drawn."""
        choice = [d for d in self.living if d != task.device] if other else self.living
        if task.device in self.living and not (other and choice):
            return task.device
        return self.random.choice(choice)

    def _outs(self, k: int, device: int) -> list[tuple[Value, Array]]:
        """Do a task on a device; what it makes is compared with what it made before."""
        t = self.tasks[k]
        self.told.order.append(k)
        made = list(zip(t.outs, self.compute(k, {v: self.held[v] for v in t.reads}), strict=True))
        self.told.elsewhere += device != t.device
        for v, a in made:
            found = self.digest(a)
            if self.digests.setdefault(v, found) != found:
                self.told.differ.append(v)
        return made

    def _do(self, k: int) -> None:
        """Do a task that is to be done, for the first time or again."""
        t = self.tasks[k]
        device = self._place(t)
        nbytes = t.fetched(self.where, device)
        made = self._outs(k, device)
        if k in self.done:
            self.told.again.add(1, t.flops, nbytes)
        else:
            self.done.add(k)
            self.told.first.add(1, t.flops, t.planned)
            self.told.again.add(0, 0, max(0, nbytes - t.planned))
            if self.asked.twice:
                self.second.add(k)
        self.todo.discard(k)
        self.ready.discard(k)
        for v, a in made:
            if v not in self.held and (self.left[v] or v in self.ends):
                self._hold(v, a, device)
        for v in t.reads:
            self.left[v] -= 1
            self._release(v)

    def _compare(self, k: int) -> None:
        """Do a task for the second time."""
        self.second.discard(k)
        self._outs(k, self._place(self.tasks[k], other=True))
        self.told.second += 1

    def _hold(self, v: Value, array: Array, device: int) -> None:
        self.held[v], self.where[v] = array, device
        self.alive[device] += self.size(array)
        self.told.peak[device] = max(self.told.peak[device], self.alive[device])
        if v not in self.lost:
            self.prey.add(v)
        for r in self.readers[v]:
            if r in self.todo:
                self.missing[r] -= 1
                if not self.missing[r]:
                    self.ready.add(r)

    def _release(self, v: Value) -> None:
        """A value that nobody waits for goes; who is to read it a second time does so before."""
        if self.left[v] or v in self.ends or v not in self.held:
            return
        for r in self.readers[v]:
            if r in self.second:
                self._compare(r)
        self._drop(v)

    def _drop(self, v: Value) -> None:
        self.alive[self.where.pop(v)] -= self.size(self.held.pop(v))
        self.prey.discard(v)

    # losses

    def _losses(self) -> None:
        """What is lost after a task."""
        for _ in range(self.moments.pop(len(self.done), 0)):
            if len(self.living) > 1:
                self._lose_device(self.random.choice(self.living))
        if self.random.random() < self.asked.lose and len(self.prey):
            self._lose([self.random.choice(self.prey.items)])

    def _lose_device(self, device: int) -> None:
        self.living.remove(device)
        self.told.gone.append(device)
        self._lose([v for v, d in self.where.items() if d == device])

    def _lose(self, values: Sequence[Value]) -> None:
        """Values are gone; what is needed to have them again is to be done again."""
        self.told.lost += len(values)
        self.told.restart.add(self.told.first.tasks, self.told.first.flops, self.told.first.nbytes)
        for v in values:
            self._drop(v)
            self.lost.add(v)
            for r in self.readers[v]:
                self.second.discard(r)
                if r in self.todo:
                    self.missing[r] += 1
                    self.ready.discard(r)
        for v in values:
            if self.left[v] or v in self.ends:
                self._again(self.maker[v])

    def _again(self, first: int) -> None:
        """A task is to be done again, and before it those whose results it reads that are not there."""
        stack = [first]
        while stack:
            k = stack.pop()
            if k in self.todo:
                continue
            self.todo.add(k)
            self.missing[k] = 0
            for v in self.tasks[k].reads:
                self.left[v] += 1
                if v not in self.held:
                    self.missing[k] += 1
                    stack.append(self.maker[v])
            if not self.missing[k]:
                self.ready.add(k)
