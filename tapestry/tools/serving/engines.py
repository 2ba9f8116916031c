"""What runs the builds of a session: this process, where weights are loaded once for all of them."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Collection, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from tapestry import api, flags
from tapestry.build.store import Build
from tapestry.errors import RunError, TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.types import Tensor, numpy_dtype
from tapestry.runtime.feeds import check_indices, index_bounds
from tapestry.runtime.session import MakeExecutor, OnceRead, Session, as_numpy, check_feeds
from tapestry.runtime.target_protocol import Target
from tapestry.sizes.sized_opener import SizedOpener

Array = np.ndarray[Any, Any]


# The builds of one session: one model at one or more sizes, of which the inputs' sizes choose one.


Given = str | Path | api.Compiled
"""A build directory, or what was compiled."""


@dataclass(frozen=True)
class Member:
    """One build."""

    compiled: api.Compiled

    @property
    def graph(self) -> Graph:
        """What it computes."""
        return self.compiled.build.plan.graph

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """What a caller gives."""
        return {t: self.graph.tensors[t] for t in self.graph.inputs}

    @cached_property
    def outputs(self) -> dict[str, Tensor]:
        """What a caller may ask for."""
        return {t: self.graph.tensors[t] for t in self.compiled.build.program.outputs}

    @cached_property
    def widest(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Inputs and outputs with as many cells along each axis as at any size."""
        if (sized := self.compiled.sized) is None:
            return self.inputs, self.outputs

        def most(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            shapes = {n: zip(*(r.widest(n) for r in sized.regions), strict=True) for n in tensors}
            return {n: replace(t, shape=tuple(max(some) for some in shapes[n])) for n, t in tensors.items()}

        return most(self.inputs), most(self.outputs)

    @cached_property
    def bounds(self) -> Any:
        """What its indices may be."""
        return index_bounds(self.graph)

    def checked(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs, over the caller's memory where that can be. Of a build for several sizes as they are: they say which.

        Raises:
            TapestryError: one is missing, unknown, or of another shape or dtype, or has an index outside its table.
        """
        if self.compiled.sized is not None:
            return dict(feeds)
        checked = check_feeds(feeds, list(self.inputs.values()))
        check_indices(checked, self.bounds)
        return checked

    def wanted(self, names: Sequence[str] | None) -> tuple[str, ...]:
        """The outputs of those names, by default all.

        Raises:
            TapestryError: there is no such output.
        """
        unknown = next((n for n in names or () if n not in self.outputs), None)
        if unknown is not None:
            raise TapestryError(f"there is no output '{unknown}'", hint=f"the outputs are {', '.join(self.outputs)}")
        return tuple(self.outputs) if names is None else tuple(names)


def members(builds: Sequence[Given]) -> list[Member]:
    """The builds of a session.

    Raises:
        TapestryError: they are not of one model.
    """
    out = [Member(b if isinstance(b, api.Compiled) else api.load(b)) for b in builds]
    if not out:
        raise TapestryError("a session of no build")
    first = out[0].compiled.build
    for m in out[1:]:
        build = m.compiled.build
        if build.model_sha256 != first.model_sha256 or build.program.devices != first.program.devices:
            what = "the builds of a session are of one model, on as many devices"
            raise TapestryError(what, where=build.model, why=f"another one is of {first.model}")
    return out


def chosen(of: Sequence[Member], feeds: Mapping[str, Any]) -> int:
    """The member whose inputs have these sizes; of one alone, that one.

    Raises:
        TapestryError: none has; the sizes that there are, are said.
    """
    if len(of) == 1:
        return 0
    try:
        given = {n: tuple(as_numpy(v).shape) for n, v in feeds.items()}
    except (ValueError, TypeError, RuntimeError, BufferError) as e:
        raise TapestryError(f"an input is no array: {e}") from None
    for k, m in enumerate(of):
        if all(given.get(n) == t.shape for n, t in m.inputs.items() if not t.on_host):
            return k
    sizes = "; ".join(", ".join(f"{n} {list(t.shape)}" for n, t in m.inputs.items()) for m in of)
    said = ", ".join(f"{n} {list(s)}" for n, s in given.items())
    raise TapestryError(f"no build of this session takes {said}", hint=f"the sizes are: {sizes}")


class Engine(Protocol):
    """Runs one member of a session at a time."""

    def step(self, member: int, feeds: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
        """Outputs by name, from inputs that were checked."""
        ...

    def close(self) -> None:
        """Give everything back; called again it does nothing."""
        ...


class Loader:
    """Opens sessions of builds of one model, in this process; a weight that several read in one form is there once."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.once = OnceRead()
        self.packed: dict[Hashable, Array] = {}

    def opener(self, make: MakeExecutor[Target] | None) -> SizedOpener:
        """What opens a build for several sizes, on the same weights."""
        found = SizedOpener(make)
        found.once, found.packed = self.once, self.packed
        return found

    def __call__(self, build: Build, constants: bytes, *, make: MakeExecutor[Target] | None = None) -> Session:
        """A session; see `api.open_session`. Of a build for several sizes at those at which it was made."""
        from tapestry.runtime.one_process.logical_devices import LocalExecutor

        slices = self.once.of(build)
        member = next(m for m in self.members if m.compiled.build is build)
        if member.compiled.sized is not None:
            return self.opener(make)(build, constants, True, {})
        session = api.open_session(build, constants, weights=slices, make=make)
        if isinstance(session.executor, LocalExecutor):
            session.executor.packed = self.packed
        return session


class InProcess:
    """Everything in this process."""

    def __init__(self, members: Sequence[Member]) -> None:
        flags.before_torch()
        from tapestry.runtime.one_process.logical_devices import LocalExecutor

        loader = Loader(members)
        self.sessions = [loader(m.compiled.build, b"".join(m.compiled.constants.values())) for m in members]
        for s in self.sessions:
            if isinstance(s.executor, LocalExecutor):
                s.executor.bind()

    def step(self, member: int, feeds: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
        """Outputs by name."""
        return self.sessions[member].compute(feeds, wanted=wanted).outputs

    def close(self) -> None:
        """Nothing is held but memory."""
        self.sessions.clear()


class AnySize:
    """A build for several sizes, in this process: the inputs of a step say which."""

    def __init__(self, member: Member) -> None:
        self.compiled = member.compiled
        self.compiled.prepare()

    def step(self, member: int, feeds: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
        """Outputs by name, from inputs that are checked here, where their sizes are known."""
        one = Member(self.compiled.at_inputs(feeds))
        return one.compiled.session.compute(one.checked(feeds), wanted=wanted).outputs

    def close(self) -> None:
        """Nothing is held but memory."""


# Callers of a session take turns, in the order in which they came; how many may wait is limited.


class Busy(TapestryError):
    """More callers than may wait, or one has waited for longer than it wanted."""


class Turns:
    """One caller at a time, first come first served.

    Args:
        limit: how many may wait beside the one whose turn it is; one more is refused at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = Lock()
        self._taken = False
        self._waiting: deque[Lock] = deque()

    @property
    def waiting(self) -> int:
        """How many callers wait."""
        return len(self._waiting)

    @contextmanager
    def turn(self, timeout: float | None = None) -> Generator[None]:
        """A turn.

        Args:
            timeout: seconds that the caller waits for it at most.

        Raises:
            Busy: too many wait, or the time is over.
        """
        self._take(timeout)
        try:
            yield
        finally:
            with self._lock:
                if self._waiting:
                    self._waiting.popleft().release()  # it is that caller's turn: it stays taken
                else:
                    self._taken = False

    def _take(self, timeout: float | None) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            if len(self._waiting) >= self.limit:
                raise Busy(f"{self.limit} callers wait already", hint="fewer callers at a time, or a larger queue=")
            place = Lock()
            place.acquire()
            self._waiting.append(place)
        began = time.monotonic()
        if place.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            return
        with self._lock:
            if place in self._waiting:
                self._waiting.remove(place)
                raise Busy(f"no turn within {time.monotonic() - began:.3g} s", hint="a longer timeout=, or fewer callers")
        # the turn came in the moment in which the time was over


# Memory that a session shares with its ranks: a place for every input and output, the same at every step.
#
# The caller's arrays are copied into it once; ranks read their parts where they lie, and write their parts of outputs.


Tensors = Mapping[str, Tensor]
ALIGNMENT = 64


class SharedPlaces:
    """Arrays over one piece of anonymous shared memory.

    Args:
        members: inputs and outputs of each.
        file: a descriptor of a file in memory.

    Attributes:
        inputs, outputs: for each member, arrays by name; values of the host have none.
        nbytes: of the memory, at least one.
    """

    def __init__(self, members: Sequence[tuple[Tensors, Tensors]], file: int) -> None:
        tensors = [[[t for t in ts.values() if not t.on_host] for ts in member] for member in members]
        flat = [t for member in tensors for group in member for t in group]
        cells = (-(-t.size * numpy_dtype(t.dtype).itemsize // ALIGNMENT) * ALIGNMENT for t in flat)
        *starts, end = accumulate(cells, initial=0)
        self.nbytes = max(end, 1)
        try:
            os.ftruncate(file, self.nbytes)
            self._memory = mmap.mmap(file, self.nbytes)
        except (OSError, OverflowError) as e:
            raise RunError(f"no memory for {self.nbytes:,} bytes of inputs and outputs: {e}") from None
        places = zip(flat, starts, strict=True)
        found = (np.frombuffer(self._memory, numpy_dtype(t.dtype), t.size, at).reshape(t.shape) for t, at in places)
        named = [[{t.name: next(found) for t in group} for group in member] for member in tensors]
        self.inputs, self.outputs = [ins for ins, _ in named], [outs for _, outs in named]

    @staticmethod
    def part(place: Array, shape: Sequence[int]) -> Array:
        """The beginning of a place as an array of a shape that it has room for."""
        return place.reshape(-1)[: prod(shape)].reshape(shape)


# Frames on a stream socket: ``u32`` length of the header, little-endian; the header, in JSON; then the data of arrays, one
# after another in the header's order, without gaps. Nothing that is read is executed, and nothing is allocated before its
# size is known to be right.


T = TypeVar("T", bound=msgspec.Struct)
LENGTH = struct.Struct("<I")
MAX_HEADER = 1 << 20  # bytes


class Closed(TapestryError):
    """The other side has gone, or what it sends is no frame."""


class Fault(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What went wrong, as a `TapestryError` says it."""

    what: str
    where: str = ""
    why: str = ""
    hint: str = ""

    @property
    def error(self) -> RunError:
        """The same as an error."""
        return RunError(self.what, where=self.where, why=self.why, hint=self.hint)


def send(to: socket.socket, header: msgspec.Struct, arrays: Sequence[Array] = ()) -> None:
    """Send a frame.

    Raises:
        Closed: nobody is there.
    """
    text = msgspec.json.encode(header)
    if len(text) > MAX_HEADER:
        raise TapestryError(f"a header of {len(text):,} bytes, where {MAX_HEADER:,} are allowed")
    try:
        to.sendall(LENGTH.pack(len(text)) + text)
        for a in arrays:
            if a.nbytes:
                to.sendall(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data)
    except OSError as e:
        raise Closed(f"the other side has gone: {e.strerror or e}") from None


def receive(at: socket.socket, kind: type[T]) -> T | None:
    """The next header; ``None`` where the other side has closed between two frames.

    Raises:
        Closed: it is not such a header, or ends in the middle.
    """
    length = bytearray(LENGTH.size)
    if not fill(at, memoryview(length), may_end=True):
        return None
    (count,) = LENGTH.unpack(length)
    if not 0 < count <= MAX_HEADER:
        raise Closed(f"a header of {count:,} bytes, where {MAX_HEADER:,} are allowed")
    text = bytearray(count)
    fill(at, memoryview(text))
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as e:
        raise Closed(f"not a header of this protocol: {e}") from None


def fill(at: socket.socket, there: memoryview, may_end: bool = False) -> bool:
    """Receive exactly so many bytes; False where there is none, and none need be.

    Raises:
        Closed: there are fewer.
    """
    done = 0
    while done < len(there):
        try:
            count = at.recv_into(there[done:])
        except OSError as e:
            raise Closed(f"the other side has gone: {e.strerror or e}") from None
        if not count:
            if may_end and not done:
                return False
            raise Closed("the other side has closed in the middle of a frame")
        done += count
    return True
