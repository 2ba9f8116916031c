"""A process that infers shapes for another one: what `inference` starts, by its path and with nothing else of Tapestry.

It loads onnx's compiled module alone, so it starts in a few hundredths of a second and is small however large its starter is. A
request on standard input is a length, three options and a model's bytes. An answer on standard output is a length, and ``m``
with the model and its types or ``e`` with onnx's message. The process ends where its input does.
"""

from __future__ import annotations

import os
import resource
import struct
import sys
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from typing import Any, BinaryIO

HEAD = struct.Struct("<Q???")
"""A request's length in bytes, and onnx's ``check_type``, ``strict_mode`` and ``data_prop``."""
LENGTH = struct.Struct("<Q")


def compiled_module(path: str) -> Any:
    """onnx's module in C++ at a path, without the package around it."""
    name = "onnx_cpp2py_export"
    loader = ExtensionFileLoader(name, path)
    module = module_from_spec(ModuleSpec(name, loader, origin=path))
    loader.exec_module(module)
    return module


def serve(inference: Any, asked: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    while len(head := asked.read(HEAD.size)) == HEAD.size:
        length, *options = HEAD.unpack(head)
        model = asked.read(length)
        try:
            answer = b"m" + inference.infer_shapes(model, *options)
        except Exception as e:
            answer = b"e" + str(e).encode(errors="replace")
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a model that brings it down leaves no core file
    with os.fdopen(os.dup(1), "wb") as pipe:
        os.dup2(2, 1)  # what onnx prints is no answer
        serve(compiled_module(sys.argv[1]).shape_inference, sys.stdin.buffer, pipe)
