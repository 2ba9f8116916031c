"""``python -m tapestry.tools.sessions.rank_server ORDER``: starts the ranks of a session, watches them, says why they ended.

An entry point, which nothing imports. What each rank does there is `answer`: load the build, and take requests until it is told
to end or the session is gone.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tapestry import api, launch
from tapestry.build.sized_builds import SizedBuild
from tapestry.build.store import Build
from tapestry.errors import RunError, TapestryError
from tapestry.ir.kernel import Box, slices
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.runtime.session import MakeExecutor, Session
from tapestry.runtime.sized_sessions import SizedSessions
from tapestry.runtime.target_protocol import Target
from tapestry.sizes.sized_opener import SizedOpener
from tapestry.tools.sessions import frames
from tapestry.tools.sessions.frames import Fault
from tapestry.tools.sessions.rank_requests import Answer, Order, Request
from tapestry.tools.sessions.shared_places import SharedPlaces, places_of

if TYPE_CHECKING:
    from tapestry.runtime.processes.worker import Rank

IDLE_SECONDS = 0.5  # after which a rank without a request says that it lives


def main() -> int:
    """See the ranks of a session to their end."""
    order = msgspec.json.decode(sys.argv[1], type=Order)
    try:
        compiled = api.load(order.folder)
        request = launch.Request(folder=Path(order.folder), timeout=order.timeout, threads=order.threads)
        job = launch.job_of(request, order.processes, compiled)
        from tapestry.runtime.processes.supervisor import supervise

        loader = Loader(compiled)
        supervise(replace(job, serve=partial(answer, order, loader)), order.processes, loader)
    except TapestryError as e:
        with suppress(BrokenPipeError):  # the session is gone
            again = "a session with restart=True starts the ranks again"
            fault = Fault(e.what, e.where, e.why, again if isinstance(e, RunError) else e.hint)
            os.write(order.report, msgspec.json.encode(fault))
        return 1
    return 0


class Loader:
    """Opens the build in this process, at one size or at several on one copy of the weights."""

    def __init__(self, compiled: api.Compiled) -> None:
        self.compiled, self.opener = compiled, SizedOpener()

    def __call__(self, build: Build, constants: bytes, *, make: MakeExecutor[Target] | None = None) -> Session:
        """A session; see `api.open_session`. Of a build for several sizes at those at which it was made."""
        if self.compiled.sized is None:
            return api.open_session(build, constants, make=make)
        self.opener.make = make
        return self.opener(build, constants, True, {})

    def sizes(self, sized: SizedBuild, wire: Any, timeout: float) -> SizedSessions:
        """The sessions of a build for several sizes on this rank: all ranks bind the same ones, in the order of requests."""
        from tapestry.runtime.processes.distributed import RankExecutor

        class Executor(RankExecutor):
            reads_late = True

        self.opener.make = partial(Executor, wire=wire)

        def opened(build: Build, constants: bytes, compiles: bool, equal: Mapping[tuple[int, int], int]) -> Session:
            session = self.opener(build, constants, compiles, equal)
            if not compiles:
                assert isinstance(session.executor, RankExecutor)
                session.executor.connect([a.size for a in build.plan.mesh], timedelta(seconds=timeout + 2))
            return session

        found = SizedSessions(sized, opened)
        found.prepare()
        return found


def answer(order: Order, loader: Loader, me: Rank, first: Session, wire: Any) -> None:
    """One rank: load what is not loaded yet, and answer until it is told to end."""
    mine: int = order.sockets[me.rank]
    for fd in order.sockets:
        if fd != mine:
            os.close(fd)
    os.close(order.report)
    places, sized = places_of(loader.compiled, order.memory), loader.compiled.sized
    sizes = None if sized is None else loader.sizes(sized, wire, order.timeout)
    with socket.socket(fileno=mine) as s, suppress(frames.Closed):  # without a word: the session is gone
        frames.send(s, Answer())
        while (request := _next(s, wire)) is not None and not request.end:
            wire.batch += 1
            wire.heartbeat.batch(wire.batch)
            session = first if sizes is None else sizes.at(request.sizes)
            frames.send(s, _step(session, request, places))


def _next(s: socket.socket, wire: Any) -> Request | None:
    """The next request; a rank that waits for one says that it lives."""
    from tapestry.runtime.processes.heartbeat import IDLE

    wire.heartbeat.at(-1, IDLE)
    while not select.select([s], [], [], IDLE_SECONDS)[0]:
        wire.heartbeat.at(-1, IDLE)
    return frames.receive(s, Request)


def _step(session: Session, request: Request, places: SharedPlaces) -> Answer:
    """One step: inputs are read where they lie, this rank's parts of outputs written where they are to be."""
    from tapestry.runtime.processes import host_values
    from tapestry.runtime.processes.distributed import RankExecutor

    executor, tensors = session.executor, session.build.plan.graph.tensors
    assert isinstance(executor, RankExecutor)
    there = {n: places.part(a, tensors[n].shape) for n, a in places.outputs.items()}

    def put(name: str, box: Box, array: Any) -> None:
        part = session.target.to_numpy(array, tensors[name].dtype)
        np.copyto(there[name][slices(box)], part)

    executor.put = put
    feeds: dict[str, Any] = {n: places.part(a, tensors[n].shape) for n, a in places.inputs.items()}
    feeds |= {n: HostValue(host_values.decode(v.encode())) for n, v in request.hosted.items()}
    result = session.compute(feeds, wanted=request.wanted)
    return Answer(hosted={n: host_values.encode(v).decode() for n, v in result.outputs.items() if v is not None})


if __name__ == "__main__":
    try:
        status = main()
    except RunError:
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no thread or destructor of torch's may keep it
