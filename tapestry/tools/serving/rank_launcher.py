"""``python -m tapestry.tools.serving.rank_launcher ORDER``: starts the ranks of a session, watches them, says why they ended.

An entry point, which nothing imports. What each rank does there is `answer`: load the builds, and take requests until it is
told to end or the session is gone.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tapestry import launch
from tapestry.build.sized_builds import SizedBuild
from tapestry.build.store import Build
from tapestry.errors import RunError, TapestryError
from tapestry.ir.kernel import Box
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.runtime.session import Session, SizedSessions
from tapestry.runtime.target_protocol import Array
from tapestry.tools.serving import frames
from tapestry.tools.serving.engines import Loader, Member, SharedPlaces, held, members
from tapestry.tools.serving.rank_engine import Answer, Failure, Order, Request

if TYPE_CHECKING:
    from tapestry.runtime.processes.worker import Rank

IDLE_SECONDS = 0.5  # after which a rank without a request says that it lives


def main() -> int:
    """See the ranks of a session to their end."""
    order = msgspec.json.decode(sys.argv[1], type=Order)
    try:
        of = members([Path(f) for f in order.folders])
        request = launch.Request(
            folder=Path(order.folders[0]), timeout=order.timeout, threads=order.threads,
            weights=None if order.weights is None else Path(order.weights),
        )  # fmt: skip
        job = launch.job_of(request, order.processes, (), of[0].compiled)
        from tapestry.runtime.processes.supervisor import supervise

        loader = Loader(of, held(of, carry))
        supervise(replace(job, serve=partial(answer, order, of, loader)), order.processes, loader)
    except TapestryError as e:
        with suppress(BrokenPipeError):  # the session is gone
            os.write(order.report, msgspec.json.encode(Failure(what=e.what, where=e.where, why=e.why, hint=_hint(e))))
        return 1
    return 0


def _hint(e: TapestryError) -> str:
    """What to try, in a session's terms."""
    return "a session with restart=True (serve --restart) starts the ranks again" if isinstance(e, RunError) else e.hint


def answer(order: Order, of: Sequence[Member], loader: Loader, me: Rank, first: Session, wire: Any) -> None:
    """One rank: load what is not loaded yet, and answer until it is told to end."""
    mine: int = order.sockets[me.rank]
    for fd in order.sockets:
        if fd != mine:
            os.close(fd)
    os.close(order.report)
    places = SharedPlaces([m.widest for m in of], order.memory)
    sessions, state = [first], loader.state
    sessions += _others(of[1:], loader, wire, order.timeout)
    sizes = None if of[0].compiled.sized is None else _of_sizes(of[0].compiled.sized, loader, wire, order.timeout)
    with socket.socket(fileno=mine) as s, suppress(frames.Closed):  # without a word: the session is gone
        frames.send(s, Answer())
        while (request := _next(s, wire)) is not None and request.member is not None:
            state.clear(request.fresh)
            state.at = tuple(request.at)
            wire.batch += 1
            wire.heartbeat.batch(wire.batch)
            session = sessions[request.member] if sizes is None else sizes.at(request.sizes)
            frames.send(s, _step(session, request, places, request.member))


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


def carry(values: Array | None, there: Array | None, sender: int, receiver: int) -> None:
    """Move what is appended to a cache between ranks, all of which come here in one order."""
    import torch
    import torch.distributed as dist

    if values is not None:
        dist.send(values.contiguous(), receiver)
    if there is not None:
        came = torch.empty_like(there, memory_format=torch.contiguous_format)
        dist.recv(came, sender)
        there.copy_(came)


def _next(s: socket.socket, wire: Any) -> Request | None:
    """The next request; a rank that waits for one says that it lives."""
    from tapestry.runtime.processes.wire import IDLE

    wire.heartbeat.at(-1, IDLE)
    while not select.select([s], [], [], IDLE_SECONDS)[0]:
        wire.heartbeat.at(-1, IDLE)
    return frames.receive(s, Request)


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
