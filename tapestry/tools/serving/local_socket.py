"""The protocol of ``tapestry serve``: a local (unix) socket, on which frames (`frames`) ask and answer in turns.

A request's header is an `Ask`, the answer's a `Reply`; docs/serving.md has them in words. Arrays follow their header as their
bytes, row-major and little-endian. The server reads an array only where its name, dtype and shape are an input's, so that
nobody can make it take more memory than the build's inputs need.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from tapestry.errors import RunError, TapestryError
from tapestry.ir.types import DTYPES, numpy_dtype
from tapestry.runtime.session import as_numpy
from tapestry.tools.serving.engines import Closed, Fault, fill_array, receive, send
from tapestry.tools.serving.generation import Seeded, prompts_of
from tapestry.tools.serving.sessions import Session

Array = np.ndarray[Any, Any]
PROTOCOL = 1
MAX_CALLERS = 64  # connections at a time
MAX_TOKENS = 1 << 16  # that one request may make: they are in the header of the answer
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_DTYPES = {numpy: ours for ours, (_, numpy) in DTYPES.items()}


class Piece(msgspec.Struct, forbid_unknown_fields=True):
    """An array that follows: its name, numpy's name of its dtype, its sizes."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def numpy(self) -> np.dtype[Any]:
        """Its dtype."""
        if self.dtype not in _DTYPES:
            raise Closed(f"there is no dtype '{self.dtype[:40]}'")
        return numpy_dtype(_DTYPES[self.dtype])


class Wanted(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What is to be generated behind prompts; without a seed the likeliest tokens."""

    prompts: list[list[Token]]
    max_new_tokens: int
    stop: Token | None = None
    seed: Token | None = None
    temperature: float = 1.0
    top_k: Token = 0


class Ask(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a client wants: ``describe``, ``run`` with arrays, and the names of the outputs that it wants (null: all), or
    ``generate``."""

    op: Literal["describe", "run", "generate"]
    arrays: list[Piece] = []
    outputs: list[str] | None = None
    generate: Wanted | None = None
    protocol: int = PROTOCOL


class Reply(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Outputs, what the build takes and gives, new tokens of each prompt, or an error."""

    arrays: list[Piece] = []
    tokens: list[list[int]] = []
    inputs: list[list[Piece]] = []
    outputs: list[list[Piece]] = []
    error: Fault | None = None


def piece(name: str, a: np.ndarray[Any, Any]) -> Piece:
    """An array's description."""
    return Piece(name, a.dtype.name, list(a.shape))


class Server:
    """Answers on a socket with what a session computes.

    Args:
        path: of the socket, which only this user may reach (mode 0600, and the caller's user is asked of the kernel).

    Raises:
        TapestryError: there is something at that path, or the build has values that are no arrays.
    """

    def __init__(self, session: Session, path: Path) -> None:
        self.session, self.path = session, path
        self.sizes = [(list(_described(i)), list(_described(o))) for i, o in session.sizes]
        self._listening = _listen(path)
        self._mark = path.stat().st_ino
        self._callers: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.failed: RunError | None = None
        self.answered = 0

    def serve(self) -> None:
        """Take callers until `close` is called, by another thread or a signal's handler, or the ranks have failed.

        Raises:
            RunError: they have.
        """
        while True:
            try:
                caller, _ = self._listening.accept()
            except OSError:  # closed
                break
            with self._lock:
                self._threads = [t for t in self._threads if t.is_alive()]
                many = len(self._callers) >= MAX_CALLERS
                if not many:
                    self._callers.add(caller)
            if many or _user(caller) not in (os.getuid(), 0):
                self._turn_away(caller, "too many callers" if many else "another user's")
                continue
            thread = threading.Thread(target=self._answer, args=(caller,), daemon=True, name="tapestry caller")
            self._threads.append(thread)
            thread.start()
        for t in self._threads:
            t.join()
        if self.failed is not None:
            raise self.failed

    def close(self) -> None:
        """Take no more callers, and end the connections that there are."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with suppress(OSError):
            if self.path.stat().st_ino == self._mark:
                self.path.unlink()
        with self._lock:
            for c in self._callers:
                with suppress(OSError):
                    c.shutdown(socket.SHUT_RD)

    def _turn_away(self, caller: socket.socket, why: str) -> None:
        with caller, suppress(TapestryError):
            self._callers.discard(caller)
            send(caller, Reply(error=Fault("Busy", "the server takes no more callers", why=why)))

    def _answer(self, caller: socket.socket) -> None:
        """One connection: requests and answers in turns, until the other side ends it or sends what is no request."""
        try:
            with caller, suppress(Closed):
                while (ask := receive(caller, Ask)) is not None:
                    self._one(caller, ask)
        finally:
            with self._lock:
                self._callers.discard(caller)

    def _one(self, caller: socket.socket, ask: Ask) -> None:
        try:
            if ask.protocol != PROTOCOL:
                raise Closed(f"protocol {ask.protocol}, where this is {PROTOCOL}")
            if ask.op == "describe":
                send(caller, Reply(inputs=[i for i, _ in self.sizes], outputs=[o for _, o in self.sizes]))
                return
            if ask.op == "generate":
                send(caller, Reply(tokens=self._tokens(ask.generate)))
            else:
                outputs = self.session.run(self._arrays(caller, ask.arrays), ask.outputs)
                send(caller, Reply(arrays=[piece(n, a) for n, a in outputs.items()]), list(outputs.values()))
            with self._lock:
                self.answered += 1
        except Closed as e:  # what follows could be anything
            send(caller, Reply(error=_fault(e)))
            raise
        except TapestryError as e:
            send(caller, Reply(error=_fault(e)))
            if isinstance(e, RunError):
                self.failed = e
                self.close()

    def _tokens(self, w: Wanted | None) -> list[list[int]]:
        """New tokens of each prompt; callers at once share the rows of a batch."""
        if w is None or len(w.prompts) * w.max_new_tokens > MAX_TOKENS:
            what = "nothing is to be generated" if w is None else f"{len(w.prompts)} prompts of {w.max_new_tokens:,} new tokens"
            raise TapestryError(what, where="generate", hint=f"at most {MAX_TOKENS:,} in one request")
        sampler = "greedy" if w.seed is None else Seeded(w.seed, w.temperature, w.top_k)
        return self.session.generate(w.prompts, w.max_new_tokens, sampler=sampler, stop=w.stop).tolist()

    def _arrays(self, caller: socket.socket, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The inputs of a request; nothing is read before it is known to be an input of one of the builds."""
        asked = {p.name: p for p in pieces}
        if len(asked) != len(pieces):
            raise Closed("two inputs of one name")
        if all(asked != {p.name: p for p in known} for known, _ in self.sizes):
            what = ", ".join(f"{p.name} {p.dtype}{p.shape}" for p in pieces)[:500]
            known = "; ".join(", ".join(f"{p.name} {p.dtype}{p.shape}" for p in i) for i, _ in self.sizes)
            raise Closed(f"no build here takes {what or 'no input'} alone", hint=f"all inputs, and no others: {known}")
        return {p.name: fill_array(caller, p.shape, p.numpy) for p in pieces}


def _described(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Sequence[Piece]:
    other = next((n for n, (dtype, _) in tensors.items() if dtype not in _DTYPES), None)
    if other is not None:
        raise TapestryError(f"'{other}' is no array of the plan", where="serve", hint="tapestry.Session from Python takes it")
    return [Piece(n, dtype, list(shape)) for n, (dtype, shape) in tensors.items()]


def _fault(e: TapestryError) -> Fault:
    return Fault(type(e).__name__, e.what[:4000], e.where[:4000], e.why[:4000], e.hint[:4000])


def _user(caller: socket.socket) -> int:
    """The user of the process at the other end, as the kernel knows it (unix(7): SO_PEERCRED)."""
    return struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]


def _listen(path: Path) -> socket.socket:
    """A socket at a path where there is none, or one that nobody listens on any more."""
    with ExitStack() as failed:
        s = failed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            if path.exists() or path.is_symlink():
                _clear(path)
            before = os.umask(0o177)
            try:
                s.bind(str(path))
            finally:
                os.umask(before)
            s.listen(MAX_CALLERS)
        except OSError as e:
            hint = "a path of at most 107 bytes in a folder that is there"
            raise TapestryError(f"no socket there: {e.strerror or e}", where=str(path), hint=hint) from None
        failed.pop_all()
        return s


def _clear(path: Path) -> None:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise TapestryError("it exists and is not a socket", where=str(path), hint="another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise TapestryError("somebody serves there", where=str(path), hint="another --socket")


class Connection(AbstractContextManager["Connection"]):
    """A session behind a socket, as `tapestry.connect` returns it; threads share it by taking turns."""

    def __init__(self, path: str | Path) -> None:
        self._lock = threading.Lock()
        with ExitStack() as failed:
            self._socket = failed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                self._socket.connect(str(path))
            except OSError as e:
                raise TapestryError(f"nobody serves there: {e.strerror or e}", where=str(path), hint="tapestry serve") from None
            about, _ = self._ask(Ask("describe"), [])
            failed.pop_all()
        self.inputs = {p.name: (p.dtype, tuple(p.shape)) for p in about.inputs[0]}
        self.outputs = {p.name: (p.dtype, tuple(p.shape)) for p in about.outputs[0]}

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> dict[str, Any]:
        """One step, as `Session.run`.

        Raises:
            TapestryError: as the server says. Closed: it has gone.
        """
        arrays = {n: np.ascontiguousarray(a).reshape(np.shape(a)) for n, a in ((n, as_numpy(v)) for n, v in feeds.items())}
        ask = Ask("run", [piece(n, a) for n, a in arrays.items()], None if outputs is None else list(outputs))
        reply, found = self._ask(ask, list(arrays.values()))
        return {p.name: a for p, a in zip(reply.arrays, found, strict=True)}

    def generate(
        self, ids: Any, max_new_tokens: int, *, sampler: str | Seeded = "greedy", mask: Any = None, stop: int | None = None
    ) -> np.ndarray[Any, Any]:
        """New tokens, as `Session.generate`; connections at once share the rows of a batch.

        Raises:
            TapestryError: as the server says, or the sampler is one that it does not have. Closed: it has gone.
        """
        s = Seeded() if sampler == "seeded" else sampler
        if (isinstance(s, Seeded) and s.first) or (not isinstance(s, Seeded) and s != "greedy"):
            raise TapestryError(f"the server has no sampler {s}", hint="greedy, or Seeded whose first prompt is number 0")
        wanted = Wanted(prompts_of(ids, mask), max_new_tokens, stop)
        if isinstance(s, Seeded):
            wanted.seed, wanted.temperature, wanted.top_k = s.seed, s.temperature, s.top_k
        return np.array(self._ask(Ask("generate", generate=wanted), [])[0].tokens, np.int64)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _ask(self, ask: Ask, arrays: Sequence[Any]) -> tuple[Reply, list[Any]]:
        with self._lock:
            gone: Closed | None = None
            try:
                send(self._socket, ask, arrays)
            except Closed as e:  # the server may have said why before it closed
                gone = e
            reply = receive(self._socket, Reply)
            if reply is None:
                raise gone or Closed("the server has closed")
            if reply.error is not None:
                raise reply.error.error
            return reply, [fill_array(self._socket, p.shape, p.numpy) for p in reply.arrays]
