"""The session's side of its ranks: they are started once, get a request at a time, and are ended with it.

A process of its own starts and watches them (`rank_launcher`): one that has run nothing yet, so that it may fork. Requests and
answers go over a socket to each rank, arrays through memory that all share.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tapestry.errors import RunError, TapestryError
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.runtime.processes import distributed
from tapestry.tools.serving import frames
from tapestry.tools.serving.engines import KnownSizes, Member, SharedPlaces, new_memory

if TYPE_CHECKING:
    from tapestry.runtime.one_process.held_state import Places

PARTING = 10.0  # seconds in which ranks that were told to end are gone


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """What the launcher is to start; descriptors by number."""

    folders: list[str]
    processes: int
    threads: int | None
    timeout: float
    weights: str | None
    sockets: list[int]
    memory: int
    report: int


class Request(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One step of a member; values of the host are in it, arrays in the shared memory. Without a member: end.

    ``at`` says where caches are appended to, ``fresh`` which rows are emptied first, ``sizes`` what symbols with several are.
    """

    member: int | None = None
    sizes: tuple[int, ...] = ()
    wanted: list[str] = []
    at: list[tuple[int, int]] = []
    fresh: list[int] = []
    hosted: dict[str, str] = {}


class Answer(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A rank has done its part; rank 0 has the values of the host."""

    hosted: dict[str, str] = {}


class Failure(msgspec.Struct, forbid_unknown_fields=True):
    """Why the ranks have ended."""

    what: str
    where: str = ""
    why: str = ""
    hint: str = ""


class Ranks:
    """Ranks on this host, from their start to their end.

    Args:
        folders: of the builds, one per member.
        timeout: seconds of silence that are a failure.
        weights: a folder of ``tapestry shard-weights``.

    Raises:
        RunError: a rank did not come up, and why.
    """

    def __init__(
        self, members: Sequence[Member], folders: Sequence[Path], processes: int, *, threads: int | None = None,
        timeout: float = 30.0, weights: Path | None = None,
    ) -> None:  # fmt: skip
        memory = new_memory()
        ends = [socket.socketpair() for _ in range(processes)]
        report, tell = os.pipe()
        given = (memory, tell, *(theirs.fileno() for _, theirs in ends))
        order = Order(
            folders=[str(f.resolve()) for f in folders], processes=processes, threads=threads, timeout=timeout,
            weights=None if weights is None else str(weights.resolve()), sockets=[t.fileno() for _, t in ends], memory=memory,
            report=tell,
        )  # fmt: skip
        try:
            self.places = SharedPlaces([m.widest for m in members], memory)
            command = [sys.executable, "-m", "tapestry.tools.serving.rank_launcher", msgspec.json.encode(order).decode()]
            process = subprocess.Popen(command, pass_fds=given, start_new_session=True, stdin=subprocess.DEVNULL)  # noqa: S603
        except BaseException:
            os.close(report)
            for ours, _ in ends:
                ours.close()
            raise
        finally:
            os.close(memory)
            os.close(tell)
            for _, theirs in ends:
                theirs.close()
        self.members, self._sizes = members, KnownSizes()
        self.sockets = [ours for ours, _ in ends]
        self.process, self.failed = process, ""
        self.close = weakref.finalize(self, _end, process, self.sockets, report, os.getpid())
        self._report, self._poll = report, select.poll()
        for fd in (report, *(s.fileno() for s in self.sockets)):
            self._poll.register(fd, select.POLLIN)
        self._answers()

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as f:
            return [int(p) for p in f.read().split()]

    def step(
        self, member: int, feeds: Mapping[str, Any], wanted: Collection[str], at: Places, fresh: Collection[int]
    ) -> dict[str, Any]:
        """Outputs by name, copied out of the shared memory.

        Raises:
            RunError: a rank failed, now or before: no process is left.
        """
        if self.failed:
            raise RunError(f"the session has ended: {self.failed}")
        if not self.close.alive:
            raise TapestryError("the session is closed")
        one, sizes = self._sizes.of(self.members[member], feeds)
        hosted: dict[str, str] = {}
        for name, value in (one.checked(feeds) if sizes else feeds).items():
            if isinstance(value, HostValue):
                hosted[name] = distributed.encode(value.value).decode()
            else:
                np.copyto(self.places.part(self.places.inputs[member][name], value.shape), value)
        request = Request(member=member, sizes=sizes, wanted=list(wanted), at=list(at), fresh=list(fresh), hosted=hosted)
        try:
            for s in self.sockets:
                with suppress(frames.Closed):  # the report says why
                    frames.send(s, request)
            back = self._answers()
        except BaseException:  # an interrupt: nobody knows whose answers would come next
            if not self.failed:
                self.failed = "it was interrupted in the middle of a step"
                self.close()
            raise
        there = {n: self.places.part(a, one.outputs[n].shape) for n, a in self.places.outputs[member].items() if n in wanted}
        return {n: there[n].copy() if n in there else distributed.decode(back[n].encode()) for n in wanted}

    def _answers(self) -> dict[str, str]:
        """Wait for every rank; the values of the host that came back."""
        by_fd = {s.fileno(): s for s in self.sockets}
        hosted: dict[str, str] = {}
        while by_fd:
            ready = [fd for fd, _ in self._poll.poll()]
            if self._report in ready:
                self._fail()
            for fd in ready:
                if fd not in by_fd:
                    continue
                try:
                    answer = frames.receive(by_fd[fd], Answer)
                except frames.Closed:
                    answer = None
                if answer is None:
                    self._fail()
                else:
                    hosted |= answer.hosted
                    del by_fd[fd]
        return hosted

    def _fail(self) -> None:
        """Everything has ended: say why.

        Raises:
            RunError: always.
        """
        data = b""
        while part := os.read(self._report, 1 << 16):
            data += part
        try:
            e = msgspec.json.decode(data, type=Failure)
        except msgspec.MsgspecError:
            e = Failure(what="the process that watches the ranks was ended")
        self.failed = e.what
        self.close()
        raise RunError(e.what, where=e.where, why=e.why, hint=e.hint)


def _end(process: subprocess.Popen[bytes], sockets: Sequence[socket.socket], report: int, owner: int) -> None:
    """Tell the ranks to end, and see that they do; a process forked from the session's own leaves them alone."""
    if os.getpid() != owner:
        return
    for s in sockets:
        with suppress(TapestryError):
            frames.send(s, Request())
        s.close()
    os.close(report)
    try:
        process.wait(PARTING)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel ends the ranks with it
        process.wait()
