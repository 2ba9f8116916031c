"""onnx's shape inference, in a process of its own.

Sizes that it finds negative (a window larger than what it slides over, pads that take away more than there is) reach assertions
of its C++ code, which end the process that runs them: a Slice of such a value does. So a child runs it, and answers by a pipe.
"""

from __future__ import annotations

import os
import resource
import signal
import warnings
from typing import Any, NoReturn

import onnx
from onnx import ModelProto, shape_inference

from tapestry.errors import ModelError, TapestryError
from tapestry.lift.file.protos import node_name

HIDDEN = "tapestry.hidden"


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
        raise InferenceError(answer[1:].decode())
    if answer[:1] == b"m":
        return _with_sizes(answer, model)
    trial = ModelProto()
    trial.CopyFrom(model)
    for node in trial.graph.node:
        if node.op_type == "Slice":
            node.domain = HIDDEN
    trial.opset_import.append(onnx.helper.make_opsetid(HIDDEN, 1))
    without = _apart(trial, {})[1]
    if without[:1] == b"m":
        _with_sizes(without, model)
    why = f"it ended with signal {os.WTERMSIG(status)}"
    raise ModelError("onnx's shape inference does not survive this model", where="shape inference", why=why)


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
                "a negative size", where=f"node '{node_name(makers[v.name])}' ({makers[v.name].op_type})",
                why=f"its result '{v.name}' would have the sizes {sizes}",
                hint="check kernels, pads and slices against the sizes of the inputs (--shape)",
            )  # fmt: skip
    return done


def _apart(model: ModelProto, options: dict[str, Any]) -> tuple[int, bytes]:
    """The child's exit status and answer: nothing where it died."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child runs nothing that other threads hold locks of
        try:
            child = os.fork()
        except OSError as e:
            os.close(reading)
            os.close(writing)
            raise TapestryError(
                "no process could be started", where="shape inference", why=str(e), hint="end other processes; try again"
            ) from None
    if child == 0:
        os.close(reading)
        _answer(model, options, writing)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as f:
            answer = f.read()
    finally:
        _, status = os.waitpid(child, 0)
    return status, answer


def _answer(model: ModelProto, options: dict[str, Any], writing: int) -> NoReturn:
    """The child: writes what it found and ends, without a word or a core file if it is brought down."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGFPE):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            answer = b"m" + shape_inference.infer_shapes(model, **options).SerializeToString()
        except Exception as e:
            answer = b"e" + str(e).encode(errors="replace")
        with os.fdopen(writing, "wb") as f:
            f.write(answer)
    finally:
        os._exit(0)
