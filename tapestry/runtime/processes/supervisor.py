"""Starts the ranks of a run on this host, watches them, and ends all of them when one fails.

Ranks are forked after torch is imported, which takes a tenth of a second where starting Python takes four. Each has a slot
in shared memory that says what it is doing. A rank that ends is seen at once; one that stands still is seen by its slot.
Others' errors are heard for a tenth of a second more, because who notices first is seldom who is to blame. The kernel kills
the ranks when this process dies.

The rendezvous store opens after the last fork: its thread takes locks of the C library for every rank that connects, and a
process forked in that moment would inherit a lock that nobody opens.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from tapestry import flags
from tapestry.errors import RunError
from tapestry.ir.program import Launch, Program, Reduce
from tapestry.runtime.processes.heartbeat import CHANGED, DONE, IDLE, PHASE, STEP, WAIT, Slots, describe, guilty, shared
from tapestry.runtime.processes.rendezvous import LOOPBACK, connected, listening
from tapestry.runtime.processes.worker import Job, Open, Rank, cause, work

GRACE = 0.1  # seconds in which ranks may still say what happened to them
TICK = 0.05
MARGIN = 1.5  # seconds before the timeout (at most half of it) at which standing still is enough, so that all is over in time
HERE = "127.0.0.1"
PR_SET_PDEATHSIG = 1
LOADER = 127  # how glibc's loader ends a process that has no memory for a thread's data


class Interrupted(Exception):
    """The launcher was told to end."""


@dataclass(slots=True)
class Child:
    """A rank's process, the pipe it reports through, and how it went."""

    process: Any
    pipe: Connection
    rank: int
    said: tuple[str, Any] | None = None
    stopped: float = 0.0
    listening: bool = True


@dataclass(slots=True)
class Watch:
    """All ranks of a run, from their start to their end."""

    job: Job
    children: list[Child]
    slots: Slots
    secret: bytes = field(default_factory=partial(secrets.token_bytes, 32))
    seen: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])

    def result(self) -> dict[str, Any] | str:
        """The document, or why there is none."""
        while True:
            alive = [c for c in self.children if c.process.exitcode is None]
            handles = [c.pipe for c in self.children if c.listening] + [c.process.sentinel for c in alive]
            if handles:
                wait(handles, TICK)
            self.hear()
            if any(self.failed(c) for c in self.children):
                self.listen_on()
                return self.verdict()
            if all(c.said and c.said[0] == "done" for c in self.children):
                return self.children[0].said[1]  # type: ignore[index]
            stalled = self.stalled(time.monotonic())
            if stalled:
                return stalled

    def hear(self) -> None:
        """Read what the ranks have said."""
        for c in self.children:
            while c.listening:
                try:
                    if not c.pipe.poll():
                        break
                    c.said = c.pipe.recv()
                except (EOFError, OSError):
                    c.listening = False
                    break

    def failed(self, c: Child) -> bool:
        """Whether a rank has failed: said so, or ended without a word."""
        if c.said is not None:
            return c.said[0] in ("failed", "lost")
        return c.process.exitcode is not None and not (c.listening and c.pipe.poll())

    def listen_on(self) -> None:
        """Give the other ranks time to tell what they know."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            wait([c.process.sentinel for c in self.children if c.process.exitcode is None], 0.01)
            self.hear()

    def verdict(self) -> str:
        """Who is to blame: a rank that ended without a word outranks an error, an error what it did to others."""
        for c in self.children:
            code = c.process.exitcode
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                more = " (out of memory, perhaps)" if name == "SIGKILL" else ""
                return f"rank {c.rank} was killed by {name}{more} while {self.doing(c.rank)}"
        for c in self.children:
            if c.said is None and c.process.exitcode is not None:
                more = " (out of memory, perhaps)" if c.process.exitcode == LOADER else ""
                return f"rank {c.rank} ended with exit status {c.process.exitcode}{more} while {self.doing(c.rank)}"
        for c in self.children:
            if c.said and c.said[0] == "failed":
                return f"rank {c.rank}: {c.said[1]}"
        stopped = {c.rank for c in self.children if state(c.process.pid) == "T"}
        rank = guilty(self.slots, stopped)[0]
        said = next(str(c.said[1]) for c in self.children if c.said)
        return f"rank {rank} holds up the others while {self.doing(rank)}: {said}"

    def stalled(self, now: float) -> str:
        """Who stands still for too long, and how."""
        limit = max(self.job.timeout / 2, self.job.timeout - MARGIN)
        moving = False
        for c in self.children:
            if state(c.process.pid) == "T":
                c.stopped = c.stopped or now
                if now - c.stopped >= limit:
                    return f"rank {c.rank} is stopped, for {limit:.1f} s, while {self.doing(c.rank)}"
            else:
                c.stopped = 0.0
            beat = float(self.slots[c.rank, CHANGED])
            if self.seen.get(c.rank, (0.0, -1.0))[1] != beat:
                self.seen[c.rank] = (now, beat)
            moving = moving or now - self.seen[c.rank][0] < limit
        slow = [c for c in self.children if now - self.seen[c.rank][0] >= limit and self.working(c)]
        if slow:
            rank = guilty(self.slots, {c.rank for c in slow})[0]
            return f"rank {rank} is slow: no progress for {limit:.1f} s while {self.doing(rank)}"
        if moving:
            return ""
        halted = next((c for c in self.children if c.stopped), None)
        if halted:
            return f"rank {halted.rank} is stopped, for {now - halted.stopped:.1f} s, while {self.doing(halted.rank)}"
        rank = guilty(self.slots, set())[0]
        return f"rank {rank} holds up the others: all wait, for {limit:.1f} s; it is {self.doing(rank)}"

    def working(self, c: Child) -> bool:
        """Whether a rank waits for nobody."""
        return self.slots[c.rank, PHASE] not in (WAIT, IDLE, DONE) and not c.stopped and c.said is None

    def doing(self, rank: int) -> str:
        """What a rank was doing, with the step in words."""
        step = int(self.slots[rank, STEP])
        return describe(self.slots[rank]) + step_words(self.job.build.program, self.job.build.plan.graph.ops, step)

    def end(self) -> None:
        """No process is left when this returns."""
        for c in self.children:
            if c.process.exitcode is None:
                c.process.kill()
        for c in self.children:
            c.process.join()
            c.pipe.close()


def step_words(program: Program, ops: Sequence[Any], step: int) -> str:
    """What a step is, in brackets."""
    if not 0 <= step < len(program.steps):
        return ""
    s = program.steps[step]
    what = getattr(s, "kind", "") or type(s).__name__.lower()
    if isinstance(s, Launch | Reduce):
        return f" ({what} of '{ops[s.op].outs[0]}')"
    return f" ({what} of '{getattr(s, 'dst', getattr(s, 'buffer', ''))}')"


def supervise(job: Job, world: int, open_session: Open, *, port: int = 0) -> dict[str, Any]:
    """Run a job on ``world`` processes of this host.

    Args:
        port: for the rendezvous; 0 takes a free one.

    Raises:
        RunError: who failed, at what step, and why; no process is left.
    """
    with _interruptible():
        run = Watch(job, [], shared(world))
        try:
            _fork(run, world, open_session)
            outcome = _meet(run, port)
        except Interrupted as e:
            doing = "; ".join(f"rank {c.rank} was {run.doing(c.rank)}" for c in run.children)
            ended = RunError(f"interrupted by {e}: all ranks are ended", why=doing)
            ended.status = 130
            raise ended from None
        finally:
            run.end()
    if isinstance(outcome, str):
        raise RunError(outcome)
    return outcome


def _meet(run: Watch, port: int) -> dict[str, Any] | str:
    """Open the store that the ranks wait for, tell them where, and see them to the end; the store ends with this call."""
    store = _store(port, run.job.timeout)
    for c in run.children:
        with suppress(OSError):  # a rank that is gone already, as `Watch.failed` will see
            c.pipe.send(store.port)
    return run.result()


def _store(port: int, timeout: float) -> Any:
    try:
        return listening(HERE, port, timeout)
    except (RuntimeError, OSError) as e:
        taken = isinstance(e, OSError) and e.errno == errno.EADDRINUSE
        what = f"port {port} is taken" if taken else f"no rendezvous on port {port}: {str(e).splitlines()[0]}"
        raise RunError(what, where="rank 0, before the first step", hint="--port 0 takes a free one") from None


def _fork(run: Watch, world: int, open_session: Open) -> None:
    context = multiprocessing.get_context("fork")
    for rank in range(world):
        ours, theirs = context.Pipe()
        args = (rank, world, run, theirs, open_session, os.getpid())
        process = context.Process(target=_child, args=args, name=f"tapestry rank {rank}")
        try:
            process.start()
        except OSError as e:
            raise RunError(f"no process for rank {rank}: {e.strerror}", hint="fewer --processes") from None
        theirs.close()
        run.children.append(Child(process, ours, rank))


def _child(rank: int, world: int, run: Watch, pipe: Connection, open_session: Open, parent: int) -> None:
    """The whole life of a rank."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN if name == signal.SIGINT else signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for c in run.children:
        c.pipe.close()
    gc.freeze()  # what the parent made is the parent's to end: its threads are not here
    try:
        flags.network(LOOPBACK)
        store = connected(HERE, pipe.recv(), run.job.timeout)
        me = Rank(
            rank=rank,
            world=world,
            store=PrefixStore(run.secret.hex(), store),
            slots=run.slots,
            local=rank,
            secret=run.secret,
        )
        document = work(me, run.job, open_session)
        run.slots[rank, PHASE] = DONE
        pipe.send(("done", document))
        code = 0
    except BaseException as e:
        pipe.send(cause(e, run.slots[rank]))
        code = 1
    pipe.close()
    os._exit(code)


def state(pid: int) -> str:
    """The kernel's letter for what a process does: R, S, D, T (stopped), Z; "" when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rpartition(b")")[2].split()[0].decode().upper()
    except (OSError, IndexError):
        return ""


@contextmanager
def _interruptible() -> Generator[None]:
    """SIGINT, SIGTERM and SIGHUP become `Interrupted` in here."""

    def raised(number: int, frame: Any) -> None:
        del frame
        raise Interrupted(signal.Signals(number).name)

    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, raised) for n in names}
    try:
        yield
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
