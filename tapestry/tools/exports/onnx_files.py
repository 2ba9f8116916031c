"""ONNX files of our own making: nodes with their inputs, outputs and weights, whose data lies in one file beside them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx import checker as onnx_checker

from tapestry.build.store import Build, new_file
from tapestry.errors import BuildError, TapestryError
from tapestry.ir.author_names import operation_names
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.kernel import Box, Kernel, whole
from tapestry.ir.syntax import ir_document
from tapestry.ir.syntax.printer import to_text
from tapestry.ir.types import PACKED, Weight, numpy_dtype
from tapestry.lift.file.external_data import open_inside, safe_location
from tapestry.lift.file.structure import TEXT
from tapestry.runtime.session import NO_WEIGHTS, ModelFiles
from tapestry.tools.exports.blocks import launch, opset_of
from tapestry.tools.exports.onnx_nodes import Nodes, NotExpressible, Value, live, onnx_type, stored_array

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
        return np.array(data[tuple(slice(lo, hi) for lo, hi in box)])

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
    nodes: Nodes, name: str, inputs: Sequence[Value], outputs: Sequence[Value], weights: Sequence[TensorProto], opset: int,
    described: Sequence[Value] = (),
) -> ModelProto:  # fmt: skip
    """A model of nodes; nodes and constants that nothing reads are left out.

    Args:
        described: values whose types the file states.
    """
    kept = live(nodes.nodes, [v.name for v in outputs])
    read = {i for n in kept for i in n.input}
    stated = {v.name for v in (*inputs, *outputs)} | {t.name for t in weights} | set(nodes.constants)
    constants = [t for t in nodes.constants.values() if t.name in read]
    graph = helper.make_graph(
        kept, name, [info(v) for v in inputs], [info(v) for v in outputs], [*weights, *constants],
        value_info=[info(v) for v in dict.fromkeys(map(nodes.named, described)) if v.name not in stated],
    )  # fmt: skip
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


# ``onnx-fused``: the graph that was planned, after every rewrite, as one file of plain ONNX for one device.


def export_fused(build: Build, constants: bytes, target: Path) -> dict[str, Any]:
    """Write the rewritten graph of a build, with its weights in ``TARGET.data`` beside it; returns what was written.

    Raises:
        NotExpressible: an operation has no form in ONNX; names it.
    """
    graph = build.plan.graph
    nodes, values = graph_nodes(graph)
    data = target.with_name(f"{target.name}.data")
    used = {t for op in graph.ops for t in op.inputs} | set(graph.outputs)
    read = weights_of(build, constants)
    with new_file(target) as path:
        with new_file(data) as beside, open(beside, "wb") as file:
            store = DataFile(data.name, file, read)
            weights = [
                stored(store, t, t, whole(graph.tensors[t].shape), graph.tensors[t].dtype) for t in graph.weights if t in used
            ]
        outputs = [values[t] for t in graph.outputs]
        model = model_of(nodes, graph.name, [values[t] for t in graph.inputs], outputs, weights, opset_of(graph))
        path.write_bytes(model.SerializeToString())
        checked(path)
    return {"model": str(target), "data": str(data), "nodes": len(model.graph.node), "operations": len(graph.ops)}


def graph_nodes(graph: Graph) -> tuple[Nodes, dict[str, Value]]:
    """The nodes of a graph, and its tensors."""
    nodes = Nodes.of(graph)
    values = {t: Value(t, x.shape, x.dtype) for t, x in graph.tensors.items()}
    for k, (op, name) in enumerate(zip(graph.ops, operation_names(graph), strict=True)):
        nodes.begin(name)
        kernel = _whole_kernel(graph, op, k)
        names = [r.tensor for r in op.reads] if isinstance(op, Block) else list(op.ins)
        try:
            results = launch(nodes, graph, kernel, [values[t] if t else None for t in names])
        except NotExpressible as e:
            raise refused(op, name, e) from None
        for t, v in zip(op.outs, results, strict=True):
            values[t] = nodes.result(v, t)
    return nodes, values


def _whole_kernel(graph: Graph, op: Op, k: int) -> Kernel:
    names = [r.tensor for r in op.reads] if isinstance(op, Block) else op.ins
    ins = tuple(whole(graph.tensors[t].shape) if t else None for t in names)
    outs = tuple(whole(graph.tensors[t].shape) for t in op.outs)
    return Kernel(op=k, mode="full", block=whole(tuple(d.size for d in op.space)), ins=ins, outs=outs)


# The plan's graph, as a JSON document or as IR text that compiles again: derived constants are written beside the text, and
# the files with the model's own weights must be within reach of it.


def export_ir(build: Build, constants: bytes, target: Path, *, copy: bool) -> dict[str, Any]:
    """Write the graph; returns what was written, as data.

    Args:
        copy: whether files with weights that are out of the text's reach are copied beside it.

    Raises:
        TapestryError: the place of a file that goes beside it is taken.
    """
    graph = build.plan.graph
    if target.suffix != TEXT:
        with new_file(target) as path:
            path.write_text(json.dumps(ir_document.to_document(graph), indent=1) + "\n")
        return {"file": str(target), "operations": len(graph.ops), "beside": [], "absent": []}
    files = _files(build, target)
    beside, data = f"{target.stem}.constants.bin", bytearray()
    refs = dict[str, Weight]()
    for name, w in graph.weights.items():
        if w.file:
            refs[name] = replace(w, file=files[_of(build, w)])
            continue
        stored = _stored(build, constants, graph, name)
        refs[name] = replace(w, file=beside, offset=len(data), length=len(stored))
        data += stored
    if beside in files.values():
        raise TapestryError("the place of the constants is taken", where=str(target.parent / beside), hint="another -o")
    absent = _bring(build, files, target.parent, copy=copy)
    if data:
        with new_file(target.parent / beside) as path:
            path.write_bytes(data)
    with new_file(target) as path:
        path.write_text(to_text(replace(graph, weights=refs)))
    needed = sorted(set(files.values())) + ([beside] if data else [])
    return {"file": str(target), "operations": len(graph.ops), "beside": needed, "absent": absent}


def _of(build: Build, w: Weight) -> str:
    """The file of a weight, relative to the model's folder; the model itself, which may have another name than it had."""
    return Path(build.model).name if w.name and Path(build.model).suffix != TEXT else w.file


def _files(build: Build, target: Path) -> dict[str, str]:
    """The model's files with weights, relative to its folder, and what the text calls them: relative to the text's own folder
    where they are inside of it, else as if they lay there. A build is not trusted: no name leads out of a folder."""
    here, there = Path(build.model).resolve().parent, target.resolve().parent
    inner = here.relative_to(there) if here.is_relative_to(there) else Path()
    found = {_of(build, w): t for t, w in build.plan.graph.weights.items() if w.file}
    return {safe_location(t, file): (inner / file).as_posix() for file, t in sorted(found.items())}


def _bring(build: Build, files: dict[str, str], folder: Path, *, copy: bool) -> list[str]:
    """The files that are not where the text looks for them; none once they have been copied."""
    here = Path(build.model).parent
    absent = {file: name for file, name in files.items() if not _equal_sizes(folder / name, here / file)}
    if not copy:
        return [*absent.values()]
    if taken := next((name for name in absent.values() if (folder / name).exists()), None):
        raise TapestryError("a weight file's place is taken", where=str(folder / taken), hint="an empty folder for -o")
    for file, name in absent.items():
        with os.fdopen(open_inside(here, file, name), "rb") as source:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with new_file(folder / name) as path, path.open("wb") as copied:
                shutil.copyfileobj(source, copied)
    return []


def _equal_sizes(a: Path, b: Path) -> bool:
    """Whether both are there and of one size; what is inside is held to its hash when the text is compiled."""
    return a.is_file() and b.is_file() and a.stat().st_size == b.stat().st_size


def _stored(build: Build, constants: bytes, graph: Graph, name: str) -> bytes:
    """A derived constant as a data file of ONNX has it: types of less than a byte are packed."""
    t, (offset, length) = graph.tensors[name], build.constants[name]
    data = constants[offset : offset + length]
    if t.dtype not in PACKED:
        return data
    return numpy_helper.from_array(np.frombuffer(data, numpy_dtype(t.dtype)).reshape(t.shape)).raw_data
