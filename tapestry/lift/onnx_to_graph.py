"""ONNX file to Graph: the one function that runs every step of lifting, in order."""

from __future__ import annotations

import hashlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto

from tapestry.errors import LawError, ModelError, refusing
from tapestry.ir import laws
from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block, Dim, Graph, Read
from tapestry.ir.types import PACKED, Tensor, Weight
from tapestry.lift import microsoft, movement, operators, recurrences
from tapestry.lift.building.builder import DTYPE_OF, Builder, here
from tapestry.lift.building.nodes import SUSPECT, Prepared, lift_nodes
from tapestry.lift.file.diagnosis import complete
from tapestry.lift.file.external_data import dtype_name, parse_place
from tapestry.lift.file.structure import check_attributes, check_structure, load
from tapestry.lift.file.symbols import Given, bind, dims_of, rewrite, unbound, unify
from tapestry.lift.file.weight_data import read_weight
from tapestry.lift.microsoft import contrib
from tapestry.lift.normalize import opset_upgrade
from tapestry.lift.normalize.function_opsets import align_functions
from tapestry.lift.normalize.prepare import infer, prepare, take_out_weights
from tapestry.lift.recurrences.loop_body import step_types

for room in (operators, movement, recurrences, microsoft):  # their modules register lifters and definitions of operators
    for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
        import_module(module.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifted:
    """A model as a Graph.

    Attributes:
        graph: the Graph; weights are references into the model's files.
        model: absolute path of the .onnx file.
        constants: data of small derived constants, whose references have an empty ``file``.
        nodes: ONNX nodes in the file (top-level graph).
        shapes: the size of every symbol; ``unified`` says which were equated with which other one.
    """

    graph: Graph
    model: Path
    constants: dict[str, np.ndarray]
    nodes: int
    shapes: dict[str, int] = field(default_factory=dict[str, int])
    unified: dict[str, str] = field(default_factory=dict[str, str])


def lift(path: str | Path, shapes: Given = {}, *, weights: bool = True, seed: int = 0, steps: bool = True) -> Lifted:  # noqa: B006
    """Read an ONNX file into a Graph.

    Args:
        shapes: sizes of symbolic dimensions, by symbol (``{"batch": 8}``) or by input (``{"x": "8x3x224x224"}``).
        weights: whether external data must be there; without it, a model can be planned but not run.
        seed: session seed of the random operators.
        steps: whether recurrences and loops of few steps are lifted step by step, so that what they do in a step can be
            split; else they are one operation.

    Raises:
        ModelError: the file is malformed, unsafe or not supported; each says where, why and what to try.
    """
    path = Path(path).absolute()
    model = load(path)
    with refusing(ModelError, "the model cannot be read", str(path), SUSPECT):
        try:
            lifted = _lift(model, path, shapes, weights, seed, steps)
        except UnicodeDecodeError as e:
            what = "a name in the model is not text"
            raise ModelError(what, where=str(path), why=str(e), hint="the file is damaged") from None
        except ModelError as e:
            raise complete(e, model) from e.__cause__
        try:
            laws.check(lifted.graph)
        except LawError as e:
            where = f"{path}, {e.where}" if e.where else str(path)
            raise ModelError("the model contradicts itself", where=where, why=f"{e.what} {e.why}".strip(), hint=SUSPECT) from e
        return lifted


def _lift(model: ModelProto, path: Path, shapes: Given, weights: bool, seed: int, steps: bool) -> Lifted:
    nodes = len(model.graph.node)
    contrib.define(model)
    check_structure(model, path.parent, weights=weights)
    stored = take_out_weights(model)
    check_attributes(model)
    align_functions(model)
    opset_upgrade.upgrade(model)
    inputs = input_dims(model, set(stored))
    env = bind(inputs, shapes)
    unified = {}
    if any(isinstance(d, str) and d not in env for dims in inputs.values() for d in dims):
        unified = unify(inputs, env, lambda trial: _consistent(model, trial))
        unbound(inputs, env)
    rewrite(model, env)
    names = [i.name for i in model.graph.input if i.name not in stored]
    prepared = prepare(model, step_types, steps=steps, bound=bool(env))
    builder = lift_nodes(prepared, seed, steps)
    graph, constants = _assemble(builder, prepared, names, stored, path, weights)
    return Lifted(graph=graph, model=path, constants=constants, nodes=nodes, shapes=env, unified=unified)


def input_dims(model: ModelProto, weights: set[str]) -> dict[str, list[int | str]]:
    """Declared dimensions of every input that lives on devices: sizes, and symbols for the rest."""
    out: dict[str, list[int | str]] = {}
    for i in model.graph.input:
        if i.name in weights:
            continue
        where = f"input '{i.name}'"
        if i.type.WhichOneof("value") in ("sequence_type", "optional_type"):
            continue  # values of the host need no size
        if not i.type.HasField("tensor_type"):
            kind = str(i.type.WhichOneof("value") or "none").removesuffix("_type")
            what = f"inputs of type {kind} are not supported"
            raise ModelError(what, where=where, hint="tensors, sequences and optionals are")
        if i.type.tensor_type.elem_type == TensorProto.STRING:
            continue
        if i.type.tensor_type.elem_type not in DTYPE_OF:
            dtype = dtype_name(i.type.tensor_type.elem_type)
            raise ModelError(f"{dtype} is not supported", where=where, why="it is the input's dtype")
        if not i.type.tensor_type.HasField("shape"):
            raise ModelError("an input has no shape", where=where, why="not even its rank is declared")
        out[i.name] = dims_of(i)
    return out


def _consistent(model: ModelProto, env: Mapping[str, int]) -> bool:
    trial = ModelProto()
    trial.CopyFrom(model)
    rewrite(trial, env)
    try:
        infer(trial)
    except ModelError:
        return False
    return True


def _assemble(
    b: Builder, prepared: Prepared, inputs: list[str], stored: Mapping[str, TensorProto], path: Path, weights: bool
) -> tuple[Graph, dict[str, np.ndarray]]:
    """The Graph, with every tensor that is read and not written as an input, a weight or a derived constant."""
    outputs = [o.name for o in prepared.model.graph.output]
    _pass_outputs_through(b, outputs, set(inputs))
    written = {t for op in b.ops for t in op.outs}
    used = dict.fromkeys([*inputs, *(t for op in b.ops for t in op.inputs), *outputs])
    table: dict[str, Tensor] = {}
    refs: dict[str, Weight] = {}
    constants: dict[str, np.ndarray] = {}
    for name in used:
        t = b.tensor(name)
        if name in inputs:
            table[name] = replace(t, kind="input")
        elif name in written:
            continue
        else:
            table[name] = replace(t, kind="weight")
            if name in stored:
                refs[name] = _reference(stored[name], table[name], path, weights)
            else:
                value = b.value(name)
                assert value is not None, f"tensor '{name}' comes from nowhere"
                constants[name] = np.ascontiguousarray(value).reshape(value.shape)
                refs[name] = Weight(file="", offset=0, length=t.nbytes, sha256=_sha256(constants[name]))
    for op in b.ops:
        for name in op.outs:
            table[name] = b.tensors[name]
    name = prepared.model.graph.name or path.stem
    graph = Graph(name=name, tensors=table, ops=tuple(b.ops), inputs=tuple(inputs), outputs=tuple(outputs), weights=refs)
    return graph, constants


def _pass_outputs_through(b: Builder, outputs: list[str], inputs: set[str]) -> None:
    """Give graph outputs that are constants a view of their own, so that every output but an input is written."""
    written = {t for op in b.ops for t in op.outs}
    for k, name in enumerate(outputs):
        if name in written or name in inputs:
            continue
        t = b.tensor(name)
        value = b.value(name)
        if value is None:
            continue  # a weight as it is in the file
        inner = b.constant(b.fresh(f"{name}.constant"), value, t.dtype)
        dims = tuple(Dim(f"x{a}", s) for a, s in enumerate(t.shape))
        read = Read(tensor=inner, index=tuple(here(dims)))
        b.emit(Block(outs=(name,), dims=dims, reads=(read,), body=(Arg(0, t.dtype),), source=(outputs[k],)), [t])
        b.ops.insert(0, b.ops.pop())  # before its readers


def _reference(t: TensorProto, tensor: Tensor, path: Path, weights: bool) -> Weight:
    if t.data_location == TensorProto.EXTERNAL:
        place = parse_place(t)
        ref = Weight(file=place.file, offset=place.offset, length=place.length)
        return replace(ref, sha256=_sha256(read_weight(path, ref, tensor))) if weights else ref
    # raw_data is little-endian and row-major already, but packed where several elements share a byte
    plain = t.HasField("raw_data") and tensor.dtype not in PACKED
    digest = hashlib.sha256(t.raw_data).hexdigest() if plain else _sha256(onnx.numpy_helper.to_array(t))
    return Weight(file=path.name, offset=0, length=tensor.nbytes, name=tensor.name, sha256=digest)


def _sha256(value: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data).hexdigest()
