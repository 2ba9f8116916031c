"""onnx's shape inference, in a process of its own.

Sizes that it finds negative (a window larger than what it slides over, pads that take away more than there is) reach assertions
of its C++ code, which end the process that runs them: a Slice of such a value does. So another process runs it; if it dies, the
next model gets a new one.

A model in bf16 is inferred as one in another type where ONNX's operators of its opset do not name bf16: exporters write them so
(Conv, Sin, MaxPool, SplitToSequence, … of opset 20), and sizes do not depend on it.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import onnx
from google.protobuf.message import Message
from onnx import ModelProto, TensorProto, onnx_cpp2py_export

from tapestry.errors import ModelError, TapestryError
from tapestry.lift.file.protos import node_name
from tapestry.lift.normalize import inference_process
from tapestry.lift.normalize.inference_process import HEAD, LENGTH
from tapestry.system import processes

HIDDEN = "tapestry.hidden"
STAND_INS: tuple[int, ...] = (TensorProto.FLOAT16, TensorProto.DOUBLE)  # operators that are written in bf16 take one of them
TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "otype", "stash_type", "softmax_precision"})


class InferenceError(Exception):
    """What onnx says is wrong with a model."""


def infer_shapes(model: ModelProto, **options: bool) -> ModelProto:
    """``onnx.shape_inference.infer_shapes``, which a model cannot bring down with it.

    Raises:
        InferenceError: onnx's own message.
        ModelError: a size would be negative, or the inference ended its process.
    """
    status, answer = _apart(model, options)
    if answer[:1] == b"e":
        message = answer[1:].decode()
        free = set(STAND_INS) - set(_types_used(model)) if re.search(r"unsupported type: \S*bfloat16", message) else set[int]()
        if not free:
            raise InferenceError(message)
        return _as_another_type(model, min(free), options)
    if answer[:1] == b"m":
        return _with_sizes(answer, model)
    trial = deepcopy(model)
    for node in trial.graph.node:
        if node.op_type == "Slice":
            node.domain = HIDDEN
    trial.opset_import.append(onnx.helper.make_opsetid(HIDDEN, 1))
    without = _apart(trial, {})[1]
    if without[:1] == b"m":
        _with_sizes(without, model)
    why = f"it ended with signal {-status}" if status < 0 else f"its process ended with status {status}"
    raise ModelError("onnx's shape inference does not survive this model", where="shape inference", why=why)


def _as_another_type(model: ModelProto, other: int, options: Mapping[str, bool]) -> ModelProto:
    """Infer with ``other``, a type that the model does not have, wherever the model has bf16."""
    bf16 = TensorProto.BFLOAT16
    trial = deepcopy(model)
    for owner, field in _places_of_types(trial):
        if getattr(owner, field) == bf16:
            setattr(owner, field, other)
    try:
        done = infer_shapes(trial, **options)
    except InferenceError as e:
        name = f"tensor({TensorProto.DataType.Name(other).lower()})"
        raise InferenceError(str(e).replace(name, "tensor(bfloat16)")) from None
    for owner, field in _places_of_types(done):
        if getattr(owner, field) == other:
            setattr(owner, field, bf16)
    return done


def _types_used(model: ModelProto) -> Iterator[int]:
    return (getattr(owner, field) for owner, field in _places_of_types(model))


def _places_of_types(proto: Message) -> Iterator[tuple[Any, str]]:
    """Every field that holds an element type, as (its message, its name): types, tensors, and attributes such as ``to``."""
    if isinstance(proto, onnx.TypeProto.Tensor | onnx.TypeProto.SparseTensor):
        yield proto, "elem_type"
    elif isinstance(proto, TensorProto):
        yield proto, "data_type"
    elif isinstance(proto, onnx.AttributeProto) and proto.name in TYPE_ATTRIBUTES:
        yield proto, "i"
    else:
        for field, value in proto.ListFields():
            if field.message_type is not None:
                inner: Iterable[Message] = (value,) if isinstance(value, Message) else value
                for message in inner:
                    yield from _places_of_types(message)


def _with_sizes(answer: bytes, model: ModelProto) -> ModelProto:
    """What a child found, unless a node's result has a negative size in it."""
    done = ModelProto()
    done.ParseFromString(answer[1:])
    makers = {o: n for n in model.graph.node for o in n.output}
    for v in (*done.graph.value_info, *done.graph.output):
        dims = v.type.tensor_type.shape.dim
        if any(d.dim_value < 0 for d in dims) and v.name in makers:
            sizes = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in dims]
            raise ModelError(
                "a negative size",
                where=f"node '{node_name(makers[v.name])}' ({makers[v.name].op_type})",
                why=f"its result '{v.name}' would have the sizes {sizes}",
                hint="check kernels, pads and slices against the sizes of the inputs (--shape)",
            )
    return done


def _apart(model: ModelProto, options: Mapping[str, bool]) -> tuple[int, bytes]:
    """The inference process's exit status, 0 while it lives, and its answer: nothing where it died."""
    try:
        request = model.SerializeToString()
    except Exception as e:  # more than protobuf writes, or text that is none
        return 0, b"e" + str(e).encode(errors="replace")
    head = HEAD.pack(len(request), *(options.get(name, False) for name in ("check_type", "strict_mode", "data_prop")))
    return INFERRING.ask(head, request)


class Inferring:
    """The process that infers shapes for this one: started when it is first wanted, and again after it died."""

    def __init__(self) -> None:
        self.running: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self.lock = threading.Lock()

    def ask(self, *request: bytes) -> tuple[int, bytes]:
        """See `_apart`."""
        with self.lock:
            if self.running is None or self.running[0].poll() is not None:
                self.end()
                self.running = _started()
            process, end = self.running
            try:
                for part in request:
                    end.sendall(part)
                length = _received(end, LENGTH.size)
                answer = _received(end, *LENGTH.unpack(length)) if len(length) == LENGTH.size else b""
            except ConnectionError:
                answer = b""
            except BaseException:  # an interrupt: an answer would come to nobody, or to the next one who asks
                process.kill()
                self.end()
                raise
            return (0, answer) if answer else (self.end(), b"")

    def end(self) -> int:
        """Let the process end; its exit status."""
        if self.running is None:
            return 0
        (process, end), self.running = self.running, None
        end.close()
        return process.wait()

    def forget(self) -> None:
        """In a fork of this process: the inference process is its parent's."""
        if self.running is not None:
            process, end = self.running
            process.returncode = 0  # there is nothing to wait for
            end.close()
        self.__init__()


def _received(end: socket.socket, size: int) -> bytes:
    """That many bytes, or as many as came before the other end was closed."""
    out = bytearray()
    while len(out) < size and (part := end.recv(min(size - len(out), 1 << 20))):
        out += part
    return bytes(out)


def _started() -> tuple[subprocess.Popen[bytes], socket.socket]:
    here, there = socket.socketpair()
    command = [sys.executable, "-I", "-S", inference_process.__file__, onnx_cpp2py_export.__file__]
    with there:
        try:  # a session of its own: what a terminal interrupts is the user's command
            process = processes.started(
                command, stdin=there.fileno(), stdout=there.fileno(), stderr=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as e:
            here.close()
            raise TapestryError(
                "no process could be started", where="shape inference", why=str(e), hint="end other processes; try again"
            ) from None
    return process, here


INFERRING = Inferring()
atexit.register(INFERRING.end)
os.register_at_fork(after_in_child=INFERRING.forget)
