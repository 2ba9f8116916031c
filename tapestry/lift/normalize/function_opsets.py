"""Model-local functions written for another opset than the model's: exporters take them from libraries, onnxruntime runs them.

Inlining needs one opset. A function whose operators are the same at the model's opset is said to be of that one.
"""

from __future__ import annotations

import onnx
from onnx import ModelProto

from tapestry.lift.file.protos import STANDARD, is_standard, nested


def align_functions(model: ModelProto) -> None:
    """Set the opset of such functions to the model's, in place. One that needs more than that stays, and is refused."""
    version = next((o.version for o in model.opset_import if o.domain in STANDARD), None)
    for function in model.functions:
        own = next((o for o in function.opset_import if o.domain in STANDARD), None)
        if own is None or version is None or own.version == version:
            continue
        if all(_unchanged_operator(n.op_type, own.version, version) for n in nested(function.node) if is_standard(n)):
            own.version = version


def _unchanged_operator(op: str, written: int, version: int) -> bool:
    """Whether an operator of one opset is that of another."""
    if not (onnx.defs.has(op, written, "") and onnx.defs.has(op, version, "")):
        return False
    return onnx.defs.get_schema(op, written, "").since_version == onnx.defs.get_schema(op, version, "").since_version
