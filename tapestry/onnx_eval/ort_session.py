"""Sessions of onnxruntime on the CPU, of which we want values and not speed.

It ends its process on some models that onnx's checker accepts. What has not run before is therefore run by a process of its
own, which is started when it is first needed, and ends with ours. Arrays go there and back in memory that both map.
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
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx.defs
import onnx.inliner
from onnx import GraphProto, ModelProto, NodeProto

from tapestry.system import processes

NO_ENTRIES: Mapping[str, str] = MappingProxyType({})
NOWHERE, LINE = subprocess.DEVNULL, 64  # an array begins with a line of the cache
_lock = threading.RLock()
_helper: tuple[int, subprocess.Popen[bytes], Connection] | None = None  # whose it is, and the line to it


class OrtError(Exception):
    """What onnxruntime said.

    Attributes:
        refused: it implements the model, but does not run inputs of these sizes, or these inputs.
    """

    def __init__(self, text: str, made: bool = False) -> None:
        super().__init__(text)
        self.refused = "NOT_IMPLEMENTED" not in text and (made or "ShapeInference" in text)


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


def foreign(node: NodeProto) -> bool:
    """Whether an operator is onnxruntime's own: it runs on the CPU, and ONNX does not define it."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    vendor = not domain or domain.startswith("com.microsoft")
    return vendor and not onnx.defs.has(node.op_type, domain) and (domain, node.op_type) in _kernels()


@cache
def _kernels() -> frozenset[tuple[str, str]]:
    """The operators that onnxruntime computes on the CPU."""
    state: Any = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    return frozenset((k.domain, k.op_name) for k in state.get_all_opkernel_def() if k.provider == "CPUExecutionProvider")


def _session_outputs(session: Any, feeds: Mapping[str, Any], names: Sequence[str] | None = None) -> list[Any]:
    known = {i.name for i in session.get_inputs()}
    return session.run(names, {n: a for n, a in feeds.items() if n in known})


def apart(model: bytes, feeds: Mapping[str, Any] | None, names: Sequence[str] | None = None, **options: Any) -> Any:
    """Outputs of a model that onnxruntime runs in its own process; without ``feeds``, where a session is only made, their
    types and sizes as far as it infers them.

    Raises:
        OrtError: it cannot, or its process ended.
    """
    with _lock:
        line = ready()
        try:
            _send(line, (model, None if feeds is None else dict(feeds), names, options))
            done, found = _receive(line)
        except (EOFError, OSError):
            raise OrtError(f"onnxruntime ended its process ({_end()})") from None
        except BaseException:  # half an answer is on the line
            _end()
            raise
    if not done:
        raise OrtError(*found)
    return found


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
        self.session = self.session or ort_session(self.model)
        try:
            return _session_outputs(self.session, feeds)
        except Exception as e:  # it raises many kinds
            raise OrtError(str(e), made=True) from None

    def apart(self, feeds: Mapping[str, Any]) -> list[Any]:
        """What it gives, without a risk."""
        found = apart(self.model, feeds)
        self.tried = True
        return found


def ready() -> Connection:
    """The line to the other process; called early, it starts that while nobody waits for it."""
    global _helper
    if _helper is not None and _helper[0] == os.getpid() and _helper[1].poll() is None:
        return _helper[2]
    ours, theirs = Pipe()
    code = f"import sys; sys.path[:] = {sys.path!r}; from tapestry.onnx_eval.ort_session import serve; serve({theirs.fileno()})"
    with theirs:  # (in a group of its own: an interrupt is for us to answer)
        process = processes.started(
            [sys.executable, "-c", code],
            stdin=NOWHERE,
            stdout=NOWHERE,
            stderr=NOWHERE,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
        )
    _helper = os.getpid(), process, ours
    return ours


@atexit.register
def _end() -> str:
    """End the other process; says how it ended."""
    global _helper
    if _helper is None or _helper[0] != os.getpid():
        return ""
    (_, process, line), _helper = _helper, None
    line.close()
    try:
        status = process.wait(0.2)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def serve(number: int) -> None:
    """The other process: answer requests until the other side closes the line."""
    line = Connection(number)
    with suppress(ImportError):
        importlib.import_module("onnxruntime")
    while True:
        try:
            model, feeds, names, options = _receive(line)
        except (EOFError, OSError):
            return
        session: Any = None
        try:
            session = ort_session(model, **options)
            types = [(o.type, o.shape) for o in session.get_outputs()]
            answer: Any = True, types if feeds is None else _session_outputs(session, feeds, names)
        except Exception as e:  # it raises many kinds
            answer = False, (str(e), session is not None)
        _send(line, answer)


def _send(line: Connection, message: Any) -> None:
    arrays: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, 5, buffer_callback=arrays.append if hasattr(os, "memfd_create") else None)
    line.send([a.raw().nbytes for a in arrays])
    if any(a.raw().nbytes for a in arrays):
        with open(os.memfd_create("arrays"), "wb") as f:
            for a in arrays:
                f.write(a)
                f.write(bytes(-a.raw().nbytes % LINE))
            f.flush()
            send_handle(line, f.fileno(), 0)
    line.send_bytes(body)


def _receive(line: Connection) -> Any:
    sizes: list[int] = line.recv()
    memory, at, arrays = memoryview(bytearray()), 0, list[memoryview]()
    if any(sizes):
        number = recv_handle(line)
        memory = memoryview(mmap.mmap(number, 0))
        os.close(number)
    for n in sizes:
        arrays.append(memory[at : at + n])
        at += n + -n % LINE
    return pickle.loads(line.recv_bytes(), buffers=arrays)  # noqa: S301 (of our own process)


# Models with functions of their own, these written out as nodes: what every evaluator, and the lift, is to read.
#
# onnx's inliner and its reference forget the value that a function gives an attribute which a call leaves out; the operator
# inside then takes its own.


# pyright: basic
# onnx comes without complete types


def inlined(model: ModelProto) -> ModelProto:
    """A model without functions of its own; attributes that calls leave out are what the functions say."""
    if not model.functions:
        return model
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    if not any(f.attribute_proto for f in functions.values()):
        return onnx.inliner.inline_local_functions(model)
    out = deepcopy(model)
    while calls := [n for n in _nested(out.graph) if (n.domain, n.op_type, n.overload) in functions]:
        for node in calls:  # (an attribute that is handed on from a call is there or not only now)
            given = {a.name for a in node.attribute}
            function = functions[node.domain, node.op_type, node.overload]
            node.attribute.extend(a for a in function.attribute_proto if a.name not in given)
        out = onnx.inliner.inline_selected_functions(out, list({(n.domain, n.op_type) for n in calls}))
    del out.functions[:]
    return out


def _nested(graph: GraphProto) -> list[NodeProto]:
    """The nodes of a graph and of the bodies in them."""
    found = list(graph.node)
    for node in found:  # grows
        for a in node.attribute:
            found += [n for g in (a.g, *a.graphs) for n in g.node]
    return found
