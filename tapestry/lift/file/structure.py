"""Structural checks of an ONNX file: what parsers let pass (cycles, duplicate names, unknown operators, bad tensors)."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TensorShapeProto,
    TypeProto,
    ValueInfoProto,
)

from tapestry.errors import ModelError
from tapestry.ir.graph import Graph
from tapestry.ir.syntax.parser import parse
from tapestry.lift.file.external_data import check_file, check_inline, check_overlaps, densify, parse_place, tensor_bytes
from tapestry.lift.file.protos import (
    captured,
    model_nodes,
    name_printably,
    nested,
    node_name,
    replace_nodes,
    static_shape,
    subgraphs,
)
from tapestry.onnx_eval.ort_session import foreign
from tapestry.onnx_eval.reference_fixes import EVALUATORS

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
            "not an ONNX model", where=str(path), why=f"its {len(data)} bytes do not parse as a protobuf (truncated?)",
            hint="export or download the file again",
        ) from None  # fmt: skip
    if not model.HasField("graph") or not model.graph.output:
        raise ModelError(
            "the model has no graph", where=str(path), why=f"{len(data)} bytes, {len(model.graph.node)} nodes and no output",
            hint="export or download the file again",
        )  # fmt: skip
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
    trial = ModelProto()
    trial.CopyFrom(model)
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
                "unknown operator domain", where=f"node '{node_name(node)}'",
                why=f"{node.op_type} is in domain '{node.domain}', for which the model has no function",
                hint="--ops FILE or a plug-in says what it computes (docs/howto/operator.md), or export it as a function",
            )  # fmt: skip
        raise ModelError(
            "unknown operator", where=f"node '{node_name(node)}'",
            why=f"'{node.op_type}' is not in '{domain or 'ai.onnx'}' opset {opsets.get(domain, 'unset')}",
            hint="check the model's opset_import",
        )  # fmt: skip


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
                    "duplicate value name", where=f"node '{node_name(node)}'", why=f"'{o}' is also written by {other}",
                    hint="ONNX graphs are in single-assignment form; rename one of them",
                )  # fmt: skip
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


# What every refusal of a model says: the node with its operator, or the value's maker, and what to do.


HINT = "look at this place of the model (netron shows it), and check it with onnx.checker.check_model; then export it again"


def complete(e: ModelError, model: ModelProto) -> ModelError:
    """The same refusal, with the operator of the node that it names and a hint, where it lacked them."""
    e.hint = e.hint or HINT
    match = re.fullmatch(r"(?:node )?'([^']*)'", e.where)
    if match and not e.where.startswith("node"):  # a value: whoever makes it
        maker = next((n for n in model_nodes(model) if match[1] in n.output), None)
        if maker is not None:
            e.where = f"node '{node_name(maker)}' ({maker.op_type}), result '{match[1]}'"
    elif match or re.fullmatch(r"[^' ]+", e.where):
        name = match[1] if match else e.where
        node = next((n for n in model_nodes(model) if node_name(n) == name), None)
        if node is not None:
            e.where = f"node '{name}' ({node.op_type})"
    return e


class Contradiction(ModelError):
    """Inputs of a node whose types do not go together; ``shapes`` are theirs, by name, as far as they are known."""

    shapes: Mapping[str, list[int]]


def contradiction(message: str, model: ModelProto, types: Mapping[str, TypeProto]) -> Contradiction:
    """What onnx's inference says of a node, with the shapes that meet there.

    Args:
        types: those that could be inferred before it.
    """
    name = re.search(r"node name: ([^)]*)\)", message) or re.search(r"input '?([^' ]+)'? of node", message)
    text = re.sub(r"\s+", " ", re.sub(r"\[\w+Error\]|Inference error\(s\):", " ", message)).strip()
    node = next((n for n in model.graph.node if name and node_name(n) == name[1]), None)
    known = {t: static_shape(types.get(t)) for t in (node.input if node else ())}
    shapes = {t: s for t, s in known.items() if s is not None}
    sizes = ", ".join(f"'{t}' is {'x'.join(map(str, s)) or 'a scalar'}" for t, s in shapes.items())
    out = Contradiction(
        "shapes or dtypes contradict each other", where=f"node '{name[1]}'" if name else "shape inference",
        why=f"{text[:300]}{f': {sizes}' if sizes else ''}",
        hint="check the sizes given with --shape; otherwise the model itself is at fault",
    )  # fmt: skip
    out.shapes = shapes
    return out


def name_symbols(e: Contradiction, sizes: Mapping[str, int]) -> None:
    """Say which symbol's size meets one that the model has of its own, if any does.

    Args:
        sizes: that were given or found for the symbols of the model's inputs.
    """
    for tensor, size, other in _meetings(e.shapes):
        symbol = next((s for s, n in sizes.items() if n == other), None)
        if symbol and size not in sizes.values():
            e.why += f"; {symbol} is {other}, and '{tensor}' has {size} there, whatever {symbol} is"
            e.hint = f"--shape {symbol}={size}{' or less: the file holds no more' if other > size else ''}"
            return


def _meetings(shapes: Mapping[str, list[int]]) -> Iterator[tuple[str, int, int]]:
    """(tensor, its size, another's size) along axes that broadcast onto each other and do not go together."""
    for (a, one), (b, other) in combinations(shapes.items(), 2):
        for m, n in zip(reversed(one), reversed(other), strict=False):
            if m != n and 1 not in (m, n):
                yield a, m, n
                yield b, n, m


# Binding of symbolic input dimensions: by symbol, by input, and by what follows from others.


Given = Mapping[str, int | str | Sequence[int]]


def dims_of(value: ValueInfoProto) -> list[int | str]:
    """Dimensions of a declared tensor: sizes, and symbols for the rest (``input[axis]`` for an anonymous one)."""
    out: list[int | str] = []
    for k, d in enumerate(value.type.tensor_type.shape.dim):
        out.append(d.dim_value if d.HasField("dim_value") else d.dim_param or f"{value.name}[{k}]")
    return out


def bind(inputs: Mapping[str, Sequence[int | str]], given: Given) -> dict[str, int]:
    """Symbol values from the user's ``shapes``.

    Raises:
        ModelError: unknown name, not an integer of at least 0, or a contradiction.
    """
    symbols = {s for dims in inputs.values() for s in dims if isinstance(s, str)}
    env: dict[str, int] = {}
    for name, value in given.items():
        sizes = _sizes_of_symbols(name, value)
        if name in symbols and len(sizes) == 1:
            _set(env, name, sizes[0], name)
        elif name in inputs:
            dims = inputs[name]
            if len(sizes) != len(dims):
                raise ModelError("wrong rank in --shape", where=f"input '{name}'", why=f"got {sizes}, the model has {dims}")
            for size, d in zip(sizes, dims, strict=True):
                if isinstance(d, str):
                    _set(env, d, size, name)
                elif d != size:
                    raise ModelError("--shape contradicts the model", where=f"input '{name}'", why=f"got {sizes}, has {dims}")
        else:
            there = f"symbols: {', '.join(sorted(symbols)) or 'none, all sizes are fixed'}; inputs: {', '.join(sorted(inputs))}"
            close = get_close_matches(name, [*symbols, *inputs], 1)
            raise ModelError(
                "unknown name in --shape", where=f"'{name}'", why=there,
                hint=f"--shape {close[0]}={value}" if close else "--shape with one of these names",
            )  # fmt: skip
    return env


def _sizes_of_symbols(name: str, value: int | str | Sequence[int]) -> list[int]:
    parts: Sequence[int | str] = [value] if isinstance(value, int) else value
    if isinstance(value, str):
        parts = value.lower().replace(",", "x").split("x")
    try:
        sizes = [int(p) for p in parts]
    except (TypeError, ValueError):
        sizes = [-1]
    if any(s < 0 for s in sizes):  # 0 is a size too: the first step of a decoder has a past without positions
        raise ModelError(
            "sizes are integers of at least 0", where=f"--shape {name}={value}",
            hint=f"for example --shape {name}=8 or {name}=8x3x224x224",
        )  # fmt: skip
    return sizes


def _set(env: dict[str, int], symbol: str, size: int, by: str) -> None:
    if env.setdefault(symbol, size) != size:
        raise ModelError("--shape contradicts itself", where=f"'{by}'", why=f"{symbol} is both {env[symbol]} and {size}")


def unbound(inputs: Mapping[str, list[int | str]], env: Mapping[str, int]) -> None:
    """Raise a ModelError that lists every symbol whose size is not known, where it occurs, and an example."""
    where: dict[str, list[str]] = {}
    for name, dims in inputs.items():
        for axis, d in enumerate(dims):
            if isinstance(d, str) and d not in env:
                where.setdefault(d, []).append(f"{name}[{axis}]")
    if not where:
        return
    listing = "; ".join(s if places == [s] else f"{s} in {', '.join(places)}" for s, places in where.items())
    example = " ".join(f"--shape {s}={8 if k == 0 else 128}" for k, s in enumerate(where) if "[" not in s)
    example += f"; or --shape {next(iter(where))}={next(iter(env))}, if they are always the same" if example and env else ""
    first = next(iter(where.values()))[0].rpartition("[")[0]
    by_input = f"--shape {first}={'x'.join('8' if isinstance(d, str) else str(d) for d in inputs[first])}"
    what = f"the size of {' and of '.join(where)} is not given{', and does not follow from the others' if env else ''}"
    raise ModelError(what, where="inputs", why=listing, hint=example or by_input)


def rewrite_file(model: ModelProto, env: Mapping[str, int]) -> None:
    """Put sizes in the place of symbols, in inputs, outputs and declared values."""
    for group in (model.graph.input, model.graph.output, model.graph.value_info):
        for value in group:
            if not value.type.HasField("tensor_type"):
                continue
            for k, d in enumerate(value.type.tensor_type.shape.dim):
                symbol = d.dim_param or f"{value.name}[{k}]"
                if not d.HasField("dim_value") and symbol in env:
                    d.dim_value = env[symbol]
