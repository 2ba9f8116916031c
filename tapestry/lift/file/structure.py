"""Structural checks of an ONNX file: what parsers let pass (cycles, duplicate names, unknown operators, bad tensors)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from copy import deepcopy
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TensorShapeProto, TypeProto

from tapestry.errors import ModelError
from tapestry.ir.graph import Graph
from tapestry.ir.syntax.parser import parse
from tapestry.lift.file.external_data import check_file, check_inline, check_overlaps, parse_place, tensor_bytes
from tapestry.lift.file.protos import captured, model_nodes, nested, node_name, replace_nodes, subgraphs
from tapestry.lift.file.read_author_names import name_printably
from tapestry.lift.file.sparse import densify
from tapestry.onnx_eval.ort_session import foreign
from tapestry.onnx_eval.own_nodes import EVALUATORS

TEXT = ".tap"  # files of IR text
MAX_BYTES = (1 << 31) - 1  # of one protobuf message
MAX_VERSION = (1 << 31) - 1
LARGEST = float(np.finfo(np.float32).max)
MAX_NODES = 250_000  # of a model, and of one function with all that it calls (Llama-70B: 19,186)


def load(path: Path) -> ModelProto:
    """Parse a model file without touching its external data.

    Raises:
        ModelError: not there, not a protobuf, truncated, or without a graph.
    """
    try:
        data = file_bytes(path)
    except (OSError, ValueError) as e:  # a ValueError of a NUL in the path
        why = str(e.strerror) if isinstance(e, OSError) else str(e)
        raise ModelError("cannot read the model", where=str(path), why=why, hint="check the path") from None
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except Exception:
        raise ModelError(
            "not an ONNX model",
            where=str(path),
            why=f"its {len(data)} bytes do not parse as a protobuf (truncated?)",
            hint="export or download the file again",
        ) from None
    if not model.HasField("graph") or not model.graph.output:
        raise ModelError(
            "the model has no graph",
            where=str(path),
            why=f"{len(data)} bytes, {len(model.graph.node)} nodes and no output",
            hint="export or download the file again",
        )
    if not model.opset_import and model.ir_version < 3:  # which had no place to say it
        model.opset_import.add(version=1)
    if not model.opset_import:
        raise ModelError("the model does not say its opset", where=str(path), why="opset_import is empty")
    opsets_of(model)
    name_printably(model)
    _clear_sizes(model)
    densify(model)
    return model


def load_text(path: Path) -> Graph:
    """Parse a file of IR text.

    Raises:
        ModelError: not there, or not text; TextError: it is no graph.
    """
    try:
        return parse(file_bytes(path).decode(), str(path))
    except (OSError, ValueError) as e:  # no text; or a NUL in the path
        why = str(e.strerror) if isinstance(e, OSError) else str(e)
        raise ModelError("cannot read the model", where=str(path), why=why, hint="check the path") from None


def file_bytes(path: Path) -> bytes:
    """A model file's bytes: of a regular file (a pipe or a device has no end) of a size that a protobuf may have."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as f:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError("cannot read the model", where=str(path), why="it is not a regular file", hint="check the path")
        if status.st_size > MAX_BYTES:
            why = f"{status.st_size:,} bytes, where a protobuf has at most {MAX_BYTES:,}"
            raise ModelError("not an ONNX model", where=str(path), why=why, hint="keep weights as external data")
        return f.read()


def check_structure(model: ModelProto, folder: Path, *, weights: bool) -> None:
    """Refuse a model that is malformed or whose external data is unsafe; sorts its nodes if they are not in order.

    Raises:
        ModelError: naming the node or tensor, the reason, and what to try.
    """
    functions = {(f.domain, f.name) for f in model.functions}
    if len(model.graph.node) > MAX_NODES:
        why = f"{len(model.graph.node):,} nodes, and at most {MAX_NODES:,} are read"
        raise ModelError(
            "the model is too large", where="the graph", why=why, hint="export repeated layers as functions or loops"
        )
    if len({(f.domain, f.name, f.overload) for f in model.functions}) < len(model.functions):
        raise ModelError("duplicate function", why="two functions have the same domain, name and overload")
    opsets = opsets_of(model)
    for f in model.functions:
        check_operators(f.node, functions, {**opsets, **opsets_of(f)})
    _check_recursion(model)
    check_operators(model.graph.node, functions, opsets)
    _check_references(model.graph.node)
    _check_splits(model)
    _check_draws(model)
    _check_names(model.graph, [])
    for t in tensors(model):
        check_tensor(t, folder, weights=weights)
    if weights:  # a plan without data may have places that stand for nothing
        check_overlaps(model.graph.initializer)


def opsets_of(owner: ModelProto | FunctionProto) -> dict[str, int]:
    """The version of every operator domain that a model or a function imports ("" is ONNX's own).

    Raises:
        ModelError: a version that is none, or two for one domain.
    """
    out: dict[str, int] = {}
    newest = onnx.defs.onnx_opset_version()
    for o in owner.opset_import:
        domain = "" if o.domain == "ai.onnx" else o.domain
        known = newest if not domain else MAX_VERSION
        if not 1 <= o.version <= known:
            where = f"domain '{domain or 'ai.onnx'}'"
            raise ModelError("unknown opset", where=where, why=f"the model asks for {o.version}, this onnx knows 1 to {known}")
        if out.setdefault(domain, o.version) != o.version:
            raise ModelError("two opsets of one domain", where=f"domain '{domain}'", why=f"{out[domain]} and {o.version}")
    return out


def _check_references(nodes: Iterable[NodeProto]) -> None:
    """Refuse attributes that refer to a function's, outside any function."""
    for node in nested(nodes):
        for a in node.attribute:
            if a.ref_attr_name:
                why = f"'{a.name}' refers to '{a.ref_attr_name}', and the node is in no function"
                raise ModelError("an attribute without a value", where=f"node '{node_name(node)}'", why=why)


def _check_splits(model: ModelProto) -> None:
    """Refuse a Split that says another number of outputs, or of sizes, than it has: onnx's inference aborts the process."""
    for node in model_nodes(model):
        for a in node.attribute if node.op_type == "Split" else ():
            said = a.i if a.name == "num_outputs" else len(a.ints) if a.name == "split" else len(node.output)
            if said != len(node.output) and not a.ref_attr_name:
                why = f"{a.name} is for {said}, the node has {len(node.output)} outputs"
                raise ModelError("a Split of another number of outputs", where=f"node '{node_name(node)}'", why=why)


def _check_draws(model: ModelProto) -> None:
    """Refuse random numbers of no distribution: onnxruntime aborts the process on some of these."""
    for node in model_nodes(model):
        if node.op_type.removesuffix("Like") not in ("RandomUniform", "RandomNormal"):
            continue
        given = {a.name: a.f for a in node.attribute if not a.ref_attr_name}
        if "Uniform" in node.op_type:
            low, high = given.get("low", 0.0), given.get("high", 1.0)
            right, why = 0 <= high - low <= LARGEST, f"low is {low:g}, high is {high:g}"
        else:
            mean, scale = given.get("mean", 0.0), given.get("scale", 1.0)
            right, why = abs(mean) <= LARGEST and 0 < scale <= LARGEST, f"mean is {mean:g}, scale is {scale:g}"
        if not right:
            where, hint = f"node '{node_name(node)}' ({node.op_type})", "finite numbers, low <= high and scale > 0"
            raise ModelError("random numbers of no distribution", where=where, why=why, hint=hint)


def _clear_sizes(model: ModelProto) -> None:
    """Make negative sizes of declared types unknown ones, which they mean to onnxruntime (a text classifier's -1); onnx's
    inference aborts the process on a Slice of such a value."""
    owners: list[GraphProto | FunctionProto] = [model.graph, *model.functions]
    while owners:
        g = owners.pop()
        owners.extend(sub for n in g.node for sub in subgraphs(n))
        ends = (*g.input, *g.output) if isinstance(g, GraphProto) else ()
        for d in (d for v in (*ends, *g.value_info) for d in _sizes(v.type)):
            if d.dim_value < 0:
                d.Clear()


def _sizes(t: TypeProto) -> Iterator[TensorShapeProto.Dimension]:
    """Every size that a type says, however deep."""
    kind = t.WhichOneof("value")
    while kind in ("sequence_type", "optional_type", "map_type"):
        held = getattr(t, kind)
        t = held.value_type if kind == "map_type" else held.elem_type
        kind = t.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        yield from getattr(t, kind).shape.dim


def check_attributes(model: ModelProto) -> None:
    """Check every node's inputs, outputs and attributes against its schema; the model has no large data any more.

    Raises:
        ModelError: what onnx's own checker says.
    """
    trial = deepcopy(model)
    for o in trial.graph.output:
        if o.type.WhichOneof("value") is None:
            o.type.tensor_type.elem_type = TensorProto.FLOAT
        if o.type.HasField("tensor_type"):
            o.type.tensor_type.shape.SetInParent()  # the checker wants one there; inference finds it when there is none
    try:
        cast(Any, onnx.checker).check_model(trial)  # (its types are incomplete)
    except onnx.checker.ValidationError as e:
        text = " ".join(str(e).split())
        raise ModelError("the model breaks ONNX's rules", why=text[:300], hint="export or download the file again") from None


def check_tensor(t: TensorProto, folder: Path, *, weights: bool) -> None:
    """Check one tensor's sizes and, when external, its path and (with ``weights``) its file."""
    if t.HasField("segment"):
        raise ModelError("tensors in segments are not supported", where=f"initializer '{t.name}'")
    if t.data_location == TensorProto.EXTERNAL:
        place = parse_place(t)
        if weights:
            check_file(folder, place, t.name)
    else:
        tensor_bytes(t)
        check_inline(t)


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor with data in a model: initializers, attributes, and those of subgraphs."""
    yield from model.graph.initializer
    for node in model_nodes(model):
        for a in node.attribute:
            for t in [a.t] if a.type == AttributeProto.TENSOR else a.tensors:
                if t.data_location == TensorProto.EXTERNAL and t.external_data:
                    hint = "keep the attribute's data inside the model, or make it an initializer"
                    where = f"node '{node_name(node)}' ({node.op_type})"
                    raise ModelError("external data in an attribute is not supported", where=where, hint=hint)
                yield t
        for g in subgraphs(node):
            for t in g.initializer:
                if t.data_location == TensorProto.EXTERNAL:
                    raise ModelError("external data in a subgraph is not supported", where=f"initializer '{t.name}'")
                yield t


def check_operators(nodes: Iterable[NodeProto], functions: set[tuple[str, str]], opsets: dict[str, int]) -> None:
    """Refuse the first node, here or in a subgraph, whose operator nobody knows."""
    for node in nested(nodes):
        domain = "" if node.domain == "ai.onnx" else node.domain
        if (node.domain, node.op_type) in functions or (domain, node.op_type) in EVALUATORS:
            continue
        if domain in opsets and (onnx.defs.has(node.op_type, opsets[domain], domain) or foreign(node)):
            continue
        if domain not in {s.domain for s in onnx.defs.get_all_schemas()}:  # (all schemas take long to make)
            raise ModelError(
                "unknown operator domain",
                where=f"node '{node_name(node)}'",
                why=f"{node.op_type} is in domain '{node.domain}', for which the model has no function",
                hint="--ops FILE or a plug-in says what it computes (docs/howto/operator.md), or export it as a function",
            )
        raise ModelError(
            "unknown operator",
            where=f"node '{node_name(node)}'",
            why=f"'{node.op_type}' is not in '{domain or 'ai.onnx'}' opset {opsets.get(domain, 'unset')}",
            hint="check the model's opset_import",
        )


def _check_recursion(model: ModelProto) -> None:
    """No function calls itself, and all calls written out are not too many nodes."""
    bodies = {(f.domain, f.name): [(n.domain, n.op_type) for n in f.node] for f in model.functions}
    nodes: dict[tuple[str, str], int] = {}

    def visit(key: tuple[str, str], path: tuple[tuple[str, str], ...]) -> int:
        if key in path or len(path) > 100:
            loop = " -> ".join(k[1] for k in (*path, key))
            raise ModelError("a function calls itself", where=f"function '{key[1]}'", why=loop)
        if key not in nodes:
            nodes[key] = sum(visit(k, (*path, key)) if k in bodies else 1 for k in bodies[key])
        return nodes[key]

    for key in bodies:
        if visit(key, ()) > MAX_NODES:
            why = f"written out it is {nodes[key]:,} nodes"
            raise ModelError("a function is too large", where=f"function '{key[1]}'", why=why, hint=f"at most {MAX_NODES:,}")


def _check_names(graph: GraphProto, outer: list[set[str]]) -> None:
    """Every name is defined once and before its use (nodes are sorted in place when they are not in order)."""
    given = [i.name for i in graph.input]
    weights = [t.name for t in graph.initializer]
    own = set(given) | set(weights)
    if len(set(given)) < len(given) or len(set(weights)) < len(weights):
        twice = next(n for names in (given, weights) for n in names if names.count(n) > 1)
        raise ModelError("duplicate value name", where=f"'{twice}'", why="two inputs or two initializers have it")
    maker: dict[str, int] = {}
    for k, node in enumerate(graph.node):
        for o in node.output:
            if not o:
                continue
            if o in own or o in maker:
                other = f"node '{node_name(graph.node[maker[o]])}'" if o in maker else "an input or initializer"
                raise ModelError(
                    "duplicate value name",
                    where=f"node '{node_name(node)}'",
                    why=f"'{o}' is also written by {other}",
                    hint="ONNX graphs are in single-assignment form; rename one of them",
                )
            maker[o] = k
    needs: list[list[int]] = []
    for node in graph.node:
        names = [i for i in (*node.input, *captured(node)) if i]
        for i in names:
            if i not in own and i not in maker and not any(i in s for s in outer):
                where = f"node '{node_name(node)}'"
                raise ModelError("undefined value name", where=where, why=f"nothing defines its input '{i}'")
        needs.append([maker[i] for i in names if i in maker])
    for o in graph.output:
        if o.name not in own and o.name not in maker and not any(o.name in s for s in outer):
            raise ModelError("undefined value name", where=f"graph output '{o.name}'", why="nothing defines it")
    _sort(graph, needs)
    scope = [*outer, own | set(maker)]
    for node in graph.node:
        for g in subgraphs(node):
            _check_names(g, scope)


def _sort(graph: GraphProto, needs: list[list[int]]) -> None:
    if all(k > j for k, row in enumerate(needs) for j in row):
        return
    sorter = TopologicalSorter[int](dict.fromkeys(range(len(needs)), ()))  # all of them first: ties keep the file's order
    for k, row in enumerate(needs):
        sorter.add(k, *row)
    try:
        order = list(sorter.static_order())
    except CycleError as e:
        cycle: list[int] = e.args[1]
        loop = [node_name(graph.node[k]) for k in cycle]
        hint = "ONNX graphs are acyclic; export the model again"
        raise ModelError("the graph has a cycle", where=f"node '{loop[0]}'", why=" -> ".join(loop), hint=hint) from None
    replace_nodes(graph, [graph.node[k] for k in order])
