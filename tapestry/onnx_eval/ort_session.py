"""Sessions of onnxruntime on the CPU, of which we want values and not speed.

It ends its process on some models that onnx's checker accepts. What has not run before is therefore run by a process of its
own, which is started when it is first needed and ends with ours. Arrays go to it and come back in memory that both map.
"""

from __future__ import annotations

import atexit
import importlib
import mmap
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import MappingProxyType
from typing import Any

NO_ENTRIES: Mapping[str, str] = MappingProxyType({})
SHARED = hasattr(os, "memfd_create")
KEPT, SMALL = 256, 1 << 16  # sessions that the other process keeps, of models of so many bytes
ALIGNED = 64
NOWHERE = subprocess.DEVNULL
_LOCK = threading.RLock()


class OrtError(Exception):
    """What onnxruntime said.

    Attributes:
        refused: it implements the model, but does not run inputs of these sizes, or these inputs.
    """

    def __init__(self, text: str, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


def ort_session(
    model: Path | str | bytes, *, optimized: bool = True, threads: int = 0, entries: Mapping[str, str] = NO_ENTRIES
) -> Any:
    """A session in this process that prints nothing and whose threads sleep while they wait: by default they spin, each on a
    core of its own.

    Args:
        optimized: nodes may be fused and moved.
        threads: how many compute an operator; 0: as many as there are cores.
        entries: further settings, as onnxruntime names them.
    """
    ort: Any = importlib.import_module("onnxruntime")  # (it has no types)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    given = str(model) if isinstance(model, Path) else model
    return ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def apart(
    model: bytes, feeds: Mapping[str, Any] | None, names: Sequence[str] | None = None, **options: Any
) -> Any:  # fmt: skip
    """Outputs of a model that onnxruntime runs in its own process; none without ``feeds``, where a session is only made.

    Raises:
        OrtError: it cannot, or its process ended.
    """
    global _helper
    with _LOCK:
        if _helper is None or _helper.owner != os.getpid() or _helper.process.poll() is not None:
            _helper = _start()
        try:
            _send(_helper.line, (model, None if feeds is None else dict(feeds), names, options))
            done, found = _receive(_helper.line)
        except (EOFError, OSError):
            raise OrtError(f"onnxruntime ended its process ({_end()})") from None
        except BaseException:  # half an answer is on the line
            _end()
            raise
    if not done:
        raise OrtError(*found)
    return found


def _refuses(text: str, made: bool) -> bool:
    return "NOT_IMPLEMENTED" not in text and (made or "ShapeInference" in text)


@dataclass(slots=True)
class Guarded:
    """A model of one node: run apart until that went well, and then, unless it is asked for `apart`, by a session here. What
    such a session does with values that were not tried apart is not guarded against."""

    model: bytes
    tried: bool = False
    session: Any = None

    def __call__(self, feeds: Mapping[str, Any]) -> list[Any]:
        if not self.tried:
            return self.apart(feeds)
        if self.session is None:
            self.session = ort_session(self.model)
        known = {i.name for i in self.session.get_inputs()}
        try:
            return self.session.run(None, {n: a for n, a in feeds.items() if n in known})
        except Exception as e:  # it raises many kinds
            raise OrtError(str(e), _refuses(str(e), True)) from None

    def apart(self, feeds: Mapping[str, Any]) -> list[Any]:
        """What it gives, without a risk."""
        found = apart(self.model, feeds)
        self.tried = True
        return found


# the other process


@dataclass(frozen=True, slots=True)
class _Helper:
    owner: int
    process: subprocess.Popen[bytes]
    line: Connection


_helper: _Helper | None = None


def _start() -> _Helper:
    ours, theirs = Pipe()
    code = f"import sys; sys.path[:] = {sys.path!r}; from tapestry.onnx_eval.ort_session import serve; serve({theirs.fileno()})"
    with theirs:  # (in a group of its own: an interrupt is for us to answer)
        process = subprocess.Popen(  # noqa: S603 (our own words)
            [sys.executable, "-c", code], stdin=NOWHERE, stdout=NOWHERE, stderr=NOWHERE, start_new_session=True,
            pass_fds=[theirs.fileno()],
        )  # fmt: skip
    return _Helper(os.getpid(), process, ours)


@atexit.register
def _end() -> str:
    """End the other process; how it ended, if it had."""
    global _helper
    if _helper is None or _helper.owner != os.getpid():
        return ""
    helper, _helper = _helper, None
    helper.line.close()
    try:
        status = helper.process.wait(0.2)
    except subprocess.TimeoutExpired:
        helper.process.kill()
        status = helper.process.wait()
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def serve(number: int) -> None:
    """Answer requests on a socket until the other side closes it."""
    line, sessions = Connection(number), dict[bytes, Any]()
    while True:
        try:
            model, feeds, names, options = _receive(line)
        except (EOFError, OSError):
            return
        session: Any = None
        try:
            session = sessions[model] if model in sessions and not options else ort_session(model, **options)
            if not options and len(model) <= SMALL:
                sessions[model] = session
                for old in list(sessions)[:-KEPT]:
                    del sessions[old]
            known = {i.name for i in session.get_inputs()}
            answer: Any = True, None if feeds is None else session.run(names, {n: a for n, a in feeds.items() if n in known})
        except Exception as e:  # it raises many kinds
            answer = False, (str(e), _refuses(str(e), session is not None))
        _send(line, answer)


def _send(line: Connection, message: Any) -> None:
    """A message; the numbers of its arrays in memory that the receiver maps."""
    views: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, 5, buffer_callback=views.append if SHARED else None)
    parts = [v.raw() for v in views]
    line.send([p.nbytes for p in parts])
    if any(p.nbytes for p in parts):
        with open(os.memfd_create("arrays"), "wb") as f:
            for p in parts:
                f.write(p)
                f.write(bytes(-p.nbytes % ALIGNED))
            f.flush()
            send_handle(line, f.fileno(), os.getpid())
    line.send_bytes(body)


def _receive(line: Connection) -> Any:
    """A message. Raises EOFError where the other side is gone."""
    sizes: list[int] = line.recv()
    memory, at = memoryview(bytearray()), 0
    if any(sizes):
        number = recv_handle(line)
        memory = memoryview(mmap.mmap(number, 0))
        os.close(number)
    views = list[memoryview]()
    for n in sizes:
        views.append(memory[at : at + n])
        at += n + -n % ALIGNED
    return pickle.loads(line.recv_bytes(), buffers=views)  # noqa: S301 (of our own process)
