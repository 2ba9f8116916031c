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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tapestry import launch
from tapestry.build.sized_builds import SizedBuild
from tapestry.build.store import Build
from tapestry.errors import RunError, TapestryError
from tapestry.ir.kernel import Box
from tapestry.ir.symbolic_plan import Sizes
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.runtime.processes import distributed
from tapestry.runtime.session import KEPT, Session, SizedSessions, shapes_of
from tapestry.system.processes import started
from tapestry.tools.serving import engines
from tapestry.tools.serving.engines import Fault, Loader, Member, SharedPlaces, members

if TYPE_CHECKING:
    from tapestry.runtime.processes.worker import Rank


PARTING = 10.0  # seconds in which ranks that were told to end are gone


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """What the launcher is to start; descriptors by number."""

    folders: list[str]
    processes: int
    threads: int | None
    timeout: float
    sockets: list[int]
    memory: int
    report: int


class Request(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One step of a member; values of the host are in it, arrays in the shared memory. Without a member: end.

    ``sizes`` says what symbols with several are.
    """

    member: int | None = None
    sizes: tuple[int, ...] = ()
    wanted: list[str] = []
    hosted: dict[str, str] = {}


class Answer(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A rank has done its part; rank 0 has the values of the host."""

    hosted: dict[str, str] = {}


class Ranks:
    """Ranks on this host, from their start to their end.

    Args:
        folders: of the builds, one per member.
        timeout: seconds of silence that are a failure.

    Raises:
        RunError: a rank did not come up, and why.
    """

    def __init__(
        self, members: Sequence[Member], folders: Sequence[Path], processes: int, *, threads: int | None = None,
        timeout: float = 30.0,
    ) -> None:  # fmt: skip
        memory = os.memfd_create("tapestry session", os.MFD_CLOEXEC)
        ends = [socket.socketpair() for _ in range(processes)]
        report, tell = os.pipe()
        given = (memory, tell, *(theirs.fileno() for _, theirs in ends))
        order = Order(
            folders=[str(f.resolve()) for f in folders], processes=processes, threads=threads, timeout=timeout,
            sockets=[t.fileno() for _, t in ends], memory=memory,
            report=tell,
        )  # fmt: skip
        try:
            self.places = SharedPlaces([m.widest for m in members], memory)
            command = [sys.executable, "-m", "tapestry.tools.serving.rank_engine", msgspec.json.encode(order).decode()]
            process = started(command, pass_fds=given, start_new_session=True, stdin=subprocess.DEVNULL)
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
        self.members = members

        @lru_cache(KEPT)
        def planned(member: int, sizes: Sizes) -> Member:
            return Member(members[member].compiled.planned(sizes))

        self._planned = planned
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

    def step(self, member: int, feeds: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
        """Outputs by name, copied out of the shared memory.

        Raises:
            RunError: a rank failed, now or before: no process is left.
        """
        if self.failed:
            raise RunError(f"the session has ended: {self.failed}")
        if not self.close.alive:
            raise TapestryError("the session is closed")
        one, sizes = self.members[member], ()
        if one.compiled.sized is not None:
            sizes = one.compiled.sized.sizes_of(shapes_of(feeds))
            one = self._planned(member, sizes)
        hosted: dict[str, str] = {}
        for name, value in (one.checked(feeds) if sizes else feeds).items():
            if isinstance(value, HostValue):
                hosted[name] = distributed.encode(value.value).decode()
            else:
                np.copyto(self.places.part(self.places.inputs[member][name], value.shape), value)
        request = Request(member=member, sizes=sizes, wanted=list(wanted), hosted=hosted)
        try:
            for s in self.sockets:
                with suppress(engines.Closed):  # the report says why
                    engines.send(s, request)
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
                    answer = engines.receive(by_fd[fd], Answer)
                except engines.Closed:
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
            fault = msgspec.json.decode(data, type=Fault)
        except msgspec.MsgspecError:
            fault = Fault("the process that watches the ranks was ended")
        self.failed = fault.what
        self.close()
        raise fault.error


def _end(process: subprocess.Popen[bytes], sockets: Sequence[socket.socket], report: int, owner: int) -> None:
    """Tell the ranks to end, and see that they do; a process forked from the session's own leaves them alone."""
    if os.getpid() != owner:
        return
    for s in sockets:
        with suppress(TapestryError):
            engines.send(s, Request())
        s.close()
    os.close(report)
    try:
        process.wait(PARTING)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel ends the ranks with it
        process.wait()


# ``python -m tapestry.tools.serving.rank_engine ORDER``: starts the ranks of a session, watches them, says why they ended.
#
# An entry point, which nothing imports. What each rank does there is `answer`: load the builds, and take requests until it is
# told to end or the session is gone.


IDLE_SECONDS = 0.5  # after which a rank without a request says that it lives


def main() -> int:
    """See the ranks of a session to their end."""
    order = msgspec.json.decode(sys.argv[1], type=Order)
    try:
        of = members([Path(f) for f in order.folders])
        request = launch.Request(
            folder=Path(order.folders[0]), timeout=order.timeout, threads=order.threads,
        )  # fmt: skip
        job = launch.job_of(request, order.processes, (), of[0].compiled)
        from tapestry.runtime.processes.supervisor import supervise

        loader = Loader(of)
        supervise(replace(job, serve=partial(answer, order, of, loader)), order.processes, loader)
    except TapestryError as e:
        with suppress(BrokenPipeError):  # the session is gone
            again = "a session with restart=True starts the ranks again"
            fault = Fault(e.what, e.where, e.why, again if isinstance(e, RunError) else e.hint)
            os.write(order.report, msgspec.json.encode(fault))
        return 1
    return 0


def answer(order: Order, of: Sequence[Member], loader: Loader, me: Rank, first: Session, wire: Any) -> None:
    """One rank: load what is not loaded yet, and answer until it is told to end."""
    mine: int = order.sockets[me.rank]
    for fd in order.sockets:
        if fd != mine:
            os.close(fd)
    os.close(order.report)
    places = SharedPlaces([m.widest for m in of], order.memory)
    sessions = [first]
    sessions += _others(of[1:], loader, wire, order.timeout)
    sizes = None if of[0].compiled.sized is None else _of_sizes(of[0].compiled.sized, loader, wire, order.timeout)
    with socket.socket(fileno=mine) as s, suppress(engines.Closed):  # without a word: the session is gone
        engines.send(s, Answer())
        while (request := _next(s, wire)) is not None and request.member is not None:
            wire.batch += 1
            wire.heartbeat.batch(wire.batch)
            session = sessions[request.member] if sizes is None else sizes.at(request.sizes)
            engines.send(s, _step(session, request, places, request.member))


def _others(of: Sequence[Member], loader: Loader, wire: Any, timeout: float) -> Iterator[Session]:
    """The sessions of further members on this rank."""
    from tapestry.runtime.processes.distributed import RankExecutor

    for m in of:
        build, constants = m.compiled.build, b"".join(m.compiled.constants.values())
        session = loader(build, constants, make=partial(RankExecutor, wire=wire))
        assert isinstance(session.executor, RankExecutor)
        session.executor.connect([a.size for a in build.plan.mesh], timedelta(seconds=timeout + 2))
        yield session


def _of_sizes(sized: SizedBuild, loader: Loader, wire: Any, timeout: float) -> SizedSessions:
    """The sessions of a build for several sizes on this rank: all ranks bind the same ones, in the order of requests."""
    from tapestry.runtime.processes.distributed import RankExecutor

    class Executor(RankExecutor):
        reads_late = True

    opener = loader.opener(partial(Executor, wire=wire))

    def opened(build: Build, constants: bytes, compiles: bool, equal: Mapping[tuple[int, int], int]) -> Session:
        session = opener(build, constants, compiles, equal)
        if not compiles:
            assert isinstance(session.executor, RankExecutor)
            session.executor.connect([a.size for a in build.plan.mesh], timedelta(seconds=timeout + 2))
        return session

    found = SizedSessions(sized, opened)
    found.prepare()
    return found


def _next(s: socket.socket, wire: Any) -> Request | None:
    """The next request; a rank that waits for one says that it lives."""
    from tapestry.runtime.processes.wire import IDLE

    wire.heartbeat.at(-1, IDLE)
    while not select.select([s], [], [], IDLE_SECONDS)[0]:
        wire.heartbeat.at(-1, IDLE)
    return engines.receive(s, Request)


def _step(session: Session, request: Request, places: SharedPlaces, member: int) -> Answer:
    """One step: inputs are read where they lie, this rank's parts of outputs written where they are to be."""
    from tapestry.runtime.processes import distributed
    from tapestry.runtime.processes.distributed import RankExecutor

    executor, tensors = session.executor, session.build.plan.graph.tensors
    assert isinstance(executor, RankExecutor)
    there = {n: places.part(a, tensors[n].shape) for n, a in places.outputs[member].items()}

    def put(name: str, box: Box, array: Any) -> None:
        part = session.target.to_numpy(array, tensors[name].dtype)
        np.copyto(there[name][tuple(slice(lo, hi) for lo, hi in box)], part)

    executor.put = put
    feeds: dict[str, Any] = {n: places.part(a, tensors[n].shape) for n, a in places.inputs[member].items()}
    feeds |= {n: HostValue(distributed.decode(v.encode())) for n, v in request.hosted.items()}
    result = session.compute(feeds, wanted=request.wanted)
    return Answer(hosted={n: distributed.encode(v).decode() for n, v in result.outputs.items() if v is not None})


if __name__ == "__main__":
    try:
        status = main()
    except RunError:
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no thread or destructor of torch's may keep it
