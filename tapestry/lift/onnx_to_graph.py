"""ONNX file to Graph: the four passes of lifting, and the one function that runs them in order."""

from __future__ import annotations

import pkgutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto

from tapestry.build import weight_tiles
from tapestry.errors import LawError, ModelError, refusing
from tapestry.ir import laws
from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block, Dim, Graph, Names, Read
from tapestry.ir.many_sizes.size_formula import Formula, Sizes
from tapestry.ir.types import Tensor, Weight
from tapestry.lift import operators
from tapestry.lift.builder import DTYPE_OF, Builder, here
from tapestry.lift.file.diagnosis import Contradiction, complete, name_symbols
from tapestry.lift.file.external_data import dtype_name, parse_place
from tapestry.lift.file.read_author_names import read_names
from tapestry.lift.file.structure import check_attributes, check_structure, load, load_text
from tapestry.lift.file.symbols import Given, dims_of, rewrite_file, unbound
from tapestry.lift.file.weight_data import read_weight
from tapestry.lift.nodes import SUSPECT, Prepared
from tapestry.lift.nodes import lift_nodes as build_nodes
from tapestry.lift.normalize import opset_six
from tapestry.lift.normalize.function_opsets import align_functions
from tapestry.lift.normalize.prepare import prepare, take_out_weights
from tapestry.lift.operators.contrib import microsoft as contrib
from tapestry.lift.operators.recurrent.loop_body import step_types
from tapestry.lift.sizes.model_sizes import Dims, Sum, follow, given_sizes

for module in pkgutil.walk_packages(operators.__path__, f"{operators.__name__}."):  # they register lifters and definitions
    import_module(module.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifted:
    """A model as a Graph.

    Attributes:
        graph: the Graph; weights are references into the model's files.
        model: absolute path of the .onnx file.
        constants: data of small derived constants, whose references have an empty ``file``.
        nodes: ONNX nodes in the file (top-level graph).
        shapes: the size of every symbol; ``unified`` has those that were not given, with what they follow from.
    """

    graph: Graph
    model: Path
    constants: dict[str, np.ndarray]
    nodes: int
    shapes: dict[str, int] = field(default_factory=dict[str, int])
    unified: dict[str, Sum] = field(default_factory=dict[str, Sum])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model file as it was read; the passes of lifting change ``model`` in place.

    Attributes:
        inputs: names of its inputs, without initializers.
        stored: initializers that were taken out of the model, by name.
        nodes: ONNX nodes in the file (top-level graph).
        has_weights: whether external data must be there.
        names: what its author calls things.
        kept: values that stay computed, though they are known.
    """

    model: ModelProto
    path: Path
    inputs: tuple[str, ...]
    stored: Mapping[str, TensorProto]
    nodes: int
    has_weights: bool
    names: Names
    kept: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbols:
    """The size of every symbol; ``unified`` has those that were not given, with what they follow from."""

    sizes: dict[str, int]
    unified: dict[str, Sum]


def lift(
    path: str | Path,
    shapes: Given = {},  # noqa: B006
    *,
    weights: bool = True,
    seed: int = 0,
    steps: bool = True,
    model: ModelProto | None = None,
) -> Lifted:
    """Read an ONNX file into a Graph.

    Args:
        model: what the file holds, where it was read (and may have been edited) before.
        shapes: sizes of symbolic dimensions, by symbol (``{"batch": 8}``) or by input (``{"x": "8x3x224x224"}``).
        weights: whether external data must be there; without it, a model can be planned but not run.
        seed: session seed of the random operators.
        steps: whether recurrences and loops of few steps are lifted step by step, so that what they do in a step can be
            split; else they are one operation.

    Raises:
        ModelError: the file is malformed, unsafe or not supported; each says where, why and what to try.
    """
    source = read_model(Path(path), weights) if model is None else read_proto(model, Path(path).absolute(), weights)
    symbols = bind_symbols(source, shapes)
    return lift_nodes(source, symbols, normalize(source, symbols, steps), steps, seed)


def read_model(model: Path, weights: bool, kept: frozenset[str] = frozenset()) -> ModelSource:
    """A model file, checked, its weights taken out, in the opset that the lifters know."""
    return replace(read_proto(load(model.absolute()), model.absolute(), weights), kept=kept)


def read_proto(proto: ModelProto, path: Path, weights: bool) -> ModelSource:
    """What was read from a model file, likewise."""
    nodes = len(proto.graph.node)
    with _reading(proto, path):
        contrib.define(proto)
        check_structure(proto, path.parent, weights=weights)
        names = read_names(proto)
        stored = take_out_weights(proto)
        check_attributes(proto)
        align_functions(proto)
        opset_six.upgrade(proto)
    inputs = tuple(i.name for i in proto.graph.input if i.name not in stored)
    return ModelSource(model=proto, path=path, inputs=inputs, stored=stored, nodes=nodes, has_weights=weights, names=names)


def read_text(model: Path, weights: bool) -> Lifted:
    """IR text as a graph (there is no other form of it), its laws checked; data of weights lies beside it.

    Raises:
        TapestryError: it does not parse, breaks a law, or data is missing.
    """
    graph = load_text(model)
    try:
        laws.check(graph)
    except LawError as e:
        raise ModelError("the graph breaks a law", where=f"{model}, {e.where}", why=f"{e.what} {e.why}".strip()) from None
    lost = next((t for t, w in graph.weights.items() if not w.file), None)
    if lost is not None:
        raise ModelError(f"weight '{lost}' has no file", where=str(model), hint="make it an input")
    if weights:
        refs = {t: _hashed(w, read_weight(model, w, graph.tensors[t])) for t, w in graph.weights.items()}
        other = next((t for t, w in graph.weights.items() if w.sha256 and w.sha256 != refs[t].sha256), None)
        if other is not None:
            hint = 'export the text again, or write "" for the hash if other values are wanted'
            why = f"'{refs[other].file}' has other values there"
            raise ModelError(f"weight '{other}' is not what its hash says", where=str(model), why=why, hint=hint)
        graph = replace(graph, weights=refs)
    return Lifted(graph=graph, model=model.absolute(), constants={}, nodes=len(graph.ops))


def bind_symbols(source: ModelSource, shapes: Given) -> Symbols:
    """The size of every symbolic dimension, written into the model's inputs."""
    with _reading(source.model, source.path):
        found = _sizes(source, input_dims(source.model, set(source.stored)), shapes)
        rewrite_file(source.model, found.sizes)
    return found


def _sizes(source: ModelSource, inputs: Mapping[str, list[int | str]], shapes: Given) -> Symbols:
    env, rules = given_sizes(source.model, inputs, shapes)
    unified = follow(rules, env)
    unbound(inputs, env)
    return Symbols(sizes=env, unified=unified)


def bound_inputs(source: ModelSource, symbols: Sequence[str], fixed: Given, made_at: Sizes) -> dict[str, Dims]:
    """For every axis of an input its size, or that of some symbols that it is or follows from.

    Args:
        fixed: sizes of the others, as they are asked for.
    """
    dims = input_dims(source.model, set(source.stored))
    found = _sizes(source, dims, {**fixed, **dict(zip(symbols, made_at, strict=True))})
    more = [{s: n + (s == of) for s, n in found.sizes.items()} for of in symbols]
    for sizes in more:
        sizes.update((s, what.at(sizes)) for s, what in found.unified.items())  # in the order in which they follow

    def axis(d: str | int) -> str | int | Formula:
        if isinstance(d, int) or d in symbols:
            return d
        coefs = tuple(sizes[d] - found.sizes[d] for sizes in more)
        f = Formula(coefs, found.sizes[d] - sum(c * n for c, n in zip(coefs, made_at, strict=True)))
        return f.const if not any(coefs) else f.text(symbols) if f.text(symbols) in symbols else f

    return {name: tuple(map(axis, some)) for name, some in dims.items()}


def normalize(source: ModelSource, symbols: Symbols, unroll_steps: bool) -> Prepared:
    """The model with shapes inferred, constants folded, functions, loops and branches written out."""
    with _reading(source.model, source.path):
        try:
            return prepare(source.model, step_types, steps=unroll_steps, kept=source.kept)
        except Contradiction as e:
            name_symbols(e, symbols.sizes)
            raise


def lift_nodes(source: ModelSource, symbols: Symbols, prepared: Prepared, unroll_steps: bool, seed: int) -> Lifted:
    """Every node as operations over index spaces, with laws 1 to 4 checked."""
    path = source.path
    with _reading(source.model, path):
        builder = build_nodes(prepared, seed, unroll_steps)
        graph, constants = _assemble(builder, prepared, list(source.inputs), source.stored, path, source.has_weights)
    with refusing(ModelError, "the model cannot be read", str(path), SUSPECT):
        try:
            laws.check(graph)
        except LawError as e:
            where = f"{path}, {e.where}" if e.where else str(path)
            raise ModelError("the model contradicts itself", where=where, why=f"{e.what} {e.why}".strip(), hint=SUSPECT) from e
    return Lifted(
        graph=replace(graph, names=source.names),
        model=path,
        constants=constants,
        nodes=source.nodes,
        shapes=symbols.sizes,
        unified=symbols.unified,
    )


@contextmanager
def _reading(model: ModelProto, path: Path) -> Generator[None]:
    """What reading a file may make a library say becomes a `ModelError` that names the file and the node."""
    with refusing(ModelError, "the model cannot be read", str(path), SUSPECT):
        try:
            yield
        except UnicodeDecodeError as e:
            what = "a name in the model is not text"
            raise ModelError(what, where=str(path), why=str(e), hint="the file is damaged") from None
        except ModelError as e:
            raise complete(e, model) from e.__cause__


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
                refs[name] = _hashed(Weight(file="", offset=0, length=t.nbytes), constants[name])
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
        return _hashed(ref, read_weight(path, ref, tensor)) if weights else ref
    ref = Weight(file=path.name, offset=0, length=tensor.nbytes, name=tensor.name)
    return _hashed(ref, onnx.numpy_helper.to_array(t))


def _hashed(ref: Weight, value: np.ndarray) -> Weight:
    tiles = weight_tiles.digests(value)
    return replace(ref, sha256=weight_tiles.root(tiles), tiles=tiles)
