"""ONNX files of our own making: nodes with their inputs, outputs and weights, whose data lies in one file beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from onnx import ModelProto, TensorProto, helper
from onnx import checker as onnx_checker

from tapestry.build.store import Build
from tapestry.errors import BuildError, TapestryError
from tapestry.ir.graph import Op
from tapestry.ir.kernel import Box, slices
from tapestry.ir.types import numpy_dtype
from tapestry.runtime.session import NO_WEIGHTS, ModelFiles
from tapestry.tools.exports.nodes.onnx_nodes import Nodes, NotExpressible, Value, live, onnx_type, stored_array

ALIGN = 64  # bytes: where the data of a weight begins
INLINE = 64  # cells of a weight that stands in the model's file itself: sizes and places, which readers look at
IR_VERSION = 10
WeightData = Callable[[str, Box], np.ndarray[Any, Any]]
checker = cast(Any, onnx_checker)  # (its types are incomplete)


def weights_of(build: Build, constants: bytes) -> WeightData:
    """What reads boxes of a build's weights, each held to its hash.

    Raises:
        BuildError: the build was made without them.
    """
    graph, files = build.plan.graph, ModelFiles(build)
    missing = next((t for t, w in graph.weights.items() if w.file and not w.sha256), None)
    if missing is not None:
        raise BuildError(f"compiled without its weights ('{missing}', …)", hint=NO_WEIGHTS)

    def read(tensor: str, box: Box) -> np.ndarray[Any, Any]:
        if graph.weights[tensor].file:
            return files(tensor, box)
        t, (offset, length) = graph.tensors[tensor], build.constants[tensor]
        data = np.frombuffer(constants[offset : offset + length], numpy_dtype(t.dtype)).reshape(t.shape)
        return np.array(data[slices(box)])

    return read


@dataclass(slots=True)
class DataFile:
    """The file that holds weights: every box of every weight once, written as it is asked for."""

    name: str
    file: BinaryIO
    read: WeightData
    places: dict[tuple[str, Box], tuple[int, int]] = field(default_factory=dict[tuple[str, Box], tuple[int, int]])

    def place(self, tensor: str, box: Box) -> tuple[int, int]:
        """Offset and length of a box."""
        if (tensor, box) not in self.places:
            data = np.ascontiguousarray(self.read(tensor, box)).tobytes()
            offset = -(-self.file.tell() // ALIGN) * ALIGN
            self.file.write(b"\0" * (offset - self.file.tell()))
            self.file.write(data)
            self.places[tensor, box] = offset, len(data)
        return self.places[tensor, box]


def stored(data: DataFile, name: str, tensor: str, box: Box, dtype: str) -> TensorProto:
    """A weight under a name, with its data in a file, or in its own place where there is little of it."""
    if prod(hi - lo for lo, hi in box) <= INLINE:
        array = np.ascontiguousarray(data.read(tensor, box)).reshape([hi - lo for lo, hi in box])
        return stored_array(array, dtype, name)
    offset, length = data.place(tensor, box)
    out = TensorProto(name=name, data_type=onnx_type(dtype, name), dims=[hi - lo for lo, hi in box])
    out.data_location = TensorProto.EXTERNAL
    for key, value in (("location", data.name), ("offset", str(offset)), ("length", str(length))):
        out.external_data.add(key=key, value=value)
    return out


def info(v: Value) -> Any:
    """A value's name and type."""
    return helper.make_tensor_value_info(v.name, onnx_type(v.dtype, v.name), list(v.shape))


def model_of(
    nodes: Nodes,
    name: str,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    weights: Sequence[TensorProto],
    opset: int,
    described: Sequence[Value] = (),
) -> ModelProto:
    """A model of nodes; nodes and constants that nothing reads are left out.

    Args:
        described: values whose types the file states.
    """
    kept = live(nodes.nodes, [v.name for v in outputs])
    read = {i for n in kept for i in n.input}
    stated = {v.name for v in (*inputs, *outputs)} | {t.name for t in weights} | set(nodes.constants)
    constants = [t for t in nodes.constants.values() if t.name in read]
    graph = helper.make_graph(
        kept,
        name,
        [info(v) for v in inputs],
        [info(v) for v in outputs],
        [*weights, *constants],
        value_info=[info(v) for v in dict.fromkeys(map(nodes.named, described)) if v.name not in stated],
    )
    domains = {n.domain for n in kept} - {"", "ai.onnx"}
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in sorted(domains))]
    out = helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION, producer_name="tapestry")
    return out


def checked(path: Path) -> None:
    """Let onnx check a file that was written.

    Raises:
        TapestryError: it refuses it.
    """
    try:
        checker.check_model(str(path))
    except Exception as e:
        raise TapestryError("onnx refuses the file", where=str(path), why=" ".join(str(e).split())[:300]) from e


def refused(op: Op, name: str, e: NotExpressible) -> NotExpressible:
    """A refusal that names the operation and the model's node."""
    where = f"operation '{name}'" + (f" (node '{op.source[-1]}')" if op.source and op.source[-1] != name else "")
    why = f"{e.what}" + (f": {e.why}" if e.why else "")
    return NotExpressible("plain ONNX cannot say it", where=where, why=why, hint=e.hint or "tapestry run runs it")
