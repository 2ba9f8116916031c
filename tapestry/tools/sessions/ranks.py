"""The session's side of its ranks: they are started once, get a request at a time, and are ended with it.

A process of its own starts and watches them (`rank_server`): one that has run nothing yet, so that it may fork. Requests and
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
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tapestry.api import Compiled
from tapestry.errors import RunError, TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.many_sizes.size_formula import Sizes
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.runtime.feeds import check_indices, index_bounds
from tapestry.runtime.processes import host_values
from tapestry.runtime.session import check_feeds, shapes_of
from tapestry.runtime.sized_sessions import KEPT
from tapestry.system.processes import started
from tapestry.tools.sessions import frames
from tapestry.tools.sessions.frames import Fault
from tapestry.tools.sessions.rank_requests import Answer, Order, Request
from tapestry.tools.sessions.shared_places import places_of

PARTING = 10.0  # seconds in which ranks that were told to end are gone


class Ranks:
    """Ranks on this host, from their start to their end.

    Args:
        folder: where the build is.
        timeout: seconds of silence that are a failure.

    Raises:
        RunError: a rank did not come up, and why.
    """

    def __init__(
        self, compiled: Compiled, folder: Path, processes: int, *, threads: int | None = None, timeout: float = 30.0
    ) -> None:
        memory = os.memfd_create("tapestry session", os.MFD_CLOEXEC)
        ends = [socket.socketpair() for _ in range(processes)]
        report, tell = os.pipe()
        given = (memory, tell, *(theirs.fileno() for _, theirs in ends))
        order = Order(
            folder=str(folder.resolve()),
            processes=processes,
            threads=threads,
            timeout=timeout,
            sockets=[t.fileno() for _, t in ends],
            memory=memory,
            report=tell,
        )
        try:
            self.places = places_of(compiled, memory)
            command = [sys.executable, "-m", "tapestry.tools.sessions.rank_server", msgspec.json.encode(order).decode()]
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
        self.compiled = compiled

        @lru_cache(KEPT)
        def planned(sizes: Sizes) -> tuple[Graph, Any]:
            graph = (compiled.planned(sizes) if sizes else compiled).build.plan.graph
            return graph, index_bounds(graph)

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

    def step(self, feeds: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
        """Outputs by name, copied out of the shared memory.

        Raises:
            TapestryError: an input is not as the build takes it. RunError: a rank failed, now or before: no process is left.
        """
        if self.failed:
            raise RunError(f"the session has ended: {self.failed}")
        if not self.close.alive:
            raise TapestryError("the session is closed")
        sizes = () if self.compiled.sized is None else self.compiled.sized.sizes_of(shapes_of(feeds))
        graph, bounds = self._planned(sizes)
        checked = check_feeds(feeds, graph)
        check_indices(checked, bounds)
        hosted: dict[str, str] = {}
        for name, value in checked.items():
            if isinstance(value, HostValue):
                hosted[name] = host_values.encode(value.value).decode()
            else:
                np.copyto(self.places.part(self.places.inputs[name], value.shape), value)
        request = Request(sizes=sizes, wanted=list(wanted), hosted=hosted)
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
        there = {n: self.places.part(a, graph.tensors[n].shape) for n, a in self.places.outputs.items() if n in wanted}
        return {n: there[n].copy() if n in there else host_values.decode(back[n].encode()) for n in wanted}

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
            frames.send(s, Request(end=True))
        s.close()
    os.close(report)
    try:
        process.wait(PARTING)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel ends the ranks with it
        process.wait()
