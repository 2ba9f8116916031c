"""Tasks in a random legal order, some of them twice, some results lost on the way and made again of what is still held.

A value is held from when it is made until its last reader is done. When one is lost that somebody still needs, its task is to
be done again; when an input of that is gone as well, so is the one that makes it, and so on: never more than that.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tapestry.ir.expr import count_calls
from tapestry.ir.graph import Graph, Opaque
from tapestry.ir.kernel import Box, intersect, size
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.program import Free, Launch, Load, Program, Reduce, Transfer
from tapestry.ir.types import itemsize
from tapestry.plan.cost.compute import arithmetic

Array = Any


# A Program as blocks that depend on nothing but what they read: one task per step and device, in no order of their own.


Value = tuple[int, str]
"""What a device holds in a buffer by the plan: (device, buffer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One step of a program on one device.

    Attributes:
        step: position in ``program.steps``.
        device: the one that the plan has it on.
        reads: the values that it reads, and how many bytes of each.
        outs: the values that it makes.
        flops: of the cost model, exact for contractions; a merge of states counts, moving does not.
        loaded: bytes that come from the host: of a weight, or of an input.
    """

    step: int
    device: int
    reads: Mapping[Value, int]
    outs: tuple[Value, ...]
    flops: int = 0
    loaded: int = 0

    def fetched(self, where: Mapping[Value, int], device: int) -> int:
        """Bytes that come to a device, from the host and from others, when it does this and values are where they are."""
        return self.loaded + sum(n for v, n in self.reads.items() if where[v] != device)

    @property
    def planned(self) -> int:
        """Bytes that come to its own device where every value is where the plan has it."""
        return self.loaded + sum(n for v, n in self.reads.items() if v[0] != self.device)


def tasks_of(graph: Graph, program: Program) -> list[Task]:
    """Every task, in an order in which they can be done."""
    return [t for at in range(len(program.steps)) for t in _tasks(graph, program, at)]


def _tasks(graph: Graph, program: Program, at: int) -> Iterator[Task]:
    step, buffers = program.steps[at], program.buffers
    match step:
        case Load():
            for d in _devices(buffers[step.buffer].boxes):
                yield Task(step=at, device=d, reads={}, outs=((d, step.buffer),), loaded=buffers[step.buffer].nbytes(d))
        case Launch():
            for d in _devices(step.blocks):
                names = [n for n in (*step.ins, *step.states) if n]
                reads = {(d, n): buffers[n].nbytes(d) for n in names if buffers[n].boxes[d] is not None}
                yield Task(
                    step=at, device=d, reads=reads, outs=_device_values(d, step.outs), flops=_flops(graph, program, step, d)
                )
        case Transfer():
            for d in _devices(buffers[step.dst].boxes):
                yield Task(step=at, device=d, reads=_received(program, step, d), outs=((d, step.dst),))
        case Reduce():
            for group in step.groups:
                for d in group:
                    work = (len(group) - 1) * _merge(graph, step.op) * max(_cells(program, n, d) for n in step.dsts)
                    reads = _merged(program, step, group, d)
                    yield Task(step=at, device=d, reads=reads, outs=_device_values(d, step.dsts), flops=work)
        case Free():
            pass


def _devices(boxes: tuple[Box | None, ...]) -> Iterator[int]:
    return (d for d, box in enumerate(boxes) if box is not None)


def _device_values(device: int, names: tuple[str, ...]) -> tuple[Value, ...]:
    return tuple((device, n) for n in names)


def _received(program: Program, step: Transfer, device: int) -> dict[Value, int]:
    """What a device puts together: parts of others' buffers, and of its own."""
    src, dst = program.buffers[step.src], program.buffers[step.dst]
    out: dict[Value, int] = {}
    for m in step.messages:
        if m.dst == device:
            out[m.src, step.src] = out.get((m.src, step.src), 0) + size(m.box) * itemsize(src.dtype)
    held, box = src.boxes[device], dst.boxes[device]
    own = intersect(held, box) if held is not None and box is not None else None
    return out if own is None else {**out, (device, step.src): size(own) * itemsize(src.dtype)}


def _merged(program: Program, step: Reduce, group: tuple[int, ...], device: int) -> dict[Value, int]:
    """What a device merges: of every member's states the part that it ends with."""
    out: dict[Value, int] = {}
    for src, dst in zip(step.srcs, step.dsts, strict=True):
        if src in step.sent:
            nbytes = program.buffers[dst].nbytes(device)
            out |= {(e, src): nbytes for e in group}
    return out


def _cells(program: Program, name: str, device: int) -> int:
    box = program.buffers[name].boxes[device]
    return 0 if box is None else size(box)


def _merge(graph: Graph, at: int) -> int:
    """Primitives of one merge of two states of an operation."""
    op = graph.ops[at]
    assert not isinstance(op, Opaque)
    assert op.monoid is not None
    return max(1, count_calls(MONOIDS[op.monoid].combiner(tuple(e.dtype for e in op.body))))


def _flops(graph: Graph, program: Program, step: Launch, device: int) -> int:
    op, block = graph.ops[step.op], step.blocks[device]
    assert block is not None
    cells = sum(_cells(program, n, device) for n in step.outs)
    if isinstance(op, Opaque):
        return 10 * cells
    if step.mode == "finish":
        return size(block) * count_calls(op.then)
    computed = op if step.mode == "full" else replace(op, then=())
    boxes = np.array(block, np.int64).reshape(1, -1, 2)
    heavy, light = arithmetic(computed, boxes, boxes[:, : len(op.dims)])
    return int(heavy[0] + light[0]) + (_merge(graph, step.op) * cells if step.mode == "partial" and step.states else 0)


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


# What is to be done when devices are lost in the middle of a run: from what the others still hold, and no more than that.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """The tasks that are left after a loss.

    Attributes:
        tasks: in an order in which they can be done.
        lost: values that were there, are gone, and are to be made again.
        again: of the tasks, those that had been done before; ``restart``: all that had been, which a restart does again.
    """

    tasks: tuple[Task, ...]
    lost: int
    again: Work
    restart: Work

    def document(self) -> dict[str, Any]:
        """For the JSON of ``run``."""
        rows = {"again": self.again, "restart": self.restart}
        return {
            "lost_blocks": self.lost, "left_blocks": len(self.tasks),
            **{name: {"blocks": w.tasks, "flops": w.flops, "bytes": w.nbytes} for name, w in rows.items()},
        }  # fmt: skip


def rest_of(
    tasks: Sequence[Task], program: Program, ends: Collection[Value], held: Set[Value], reached: Sequence[int], gone: Set[int],
    weights: Collection[str],
) -> Rest:  # fmt: skip
    """What is left to do so that all of ``ends`` are held.

    Args:
        held: values that are there.
        reached: for each device the step that it was at.
        gone: devices that are lost; their tasks are done elsewhere. The others have their ``weights`` loaded.
    """
    maker = {v: k for k, t in enumerate(tasks) for v in t.outs}
    todo, stack, missing = set[int](), [v for v in ends if v not in held], set[Value]()
    while stack:
        v = stack.pop()
        missing.add(v)
        k = maker[v]
        if k not in todo:
            todo.add(k)
            stack += [r for r in tasks[k].reads if r not in held]
    again, restart = Work(), Work()
    for k, t in enumerate(tasks):
        if t.step >= reached[t.device]:
            continue
        restart.add(1, t.flops, t.planned)
        if k in todo:
            step = program.steps[t.step]
            loaded = isinstance(step, Load) and program.buffers[step.buffer].tensor in weights and t.device not in gone
            again.add(1, t.flops, 0 if loaded else t.planned)
    lost = sum(tasks[maker[v]].step < reached[v[0]] for v in missing if v[0] in gone)
    return Rest(tasks=tuple(tasks[k] for k in sorted(todo)), lost=lost, again=again, restart=restart)


def adopted(hosts: Sequence[int], survivors: Sequence[int]) -> tuple[int, ...]:
    """The rank of each device when some ranks are lost: devices of those go to the ranks that have fewest."""
    out = [r if r in survivors else -1 for r in hosts]
    for d, r in enumerate(out):
        if r < 0:
            out[d] = min(survivors, key=lambda s: (out.count(s), s))
    return tuple(out)
