"""Sequences that only stand between a tensor and its pieces, as torch's exporter writes ``split`` and ``unbind``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from tapestry.lift.file.protos import (
    attributes,
    captured,
    is_standard,
    replace_nodes,
    set_attributes,
    standard_opset,
    static_shape,
)

Numbers = Mapping[str, np.ndarray]
AS_INPUTS = 13  # from here on Split and Squeeze have sizes and axes as inputs


def split_sequences(model: ModelProto, types: Mapping[str, TypeProto]) -> bool:
    """Write every SplitToSequence as a Split, where sizes are known and single pieces are read; tell whether there was any."""
    graph = model.graph
    numbers = _known_integers(model)
    readers: dict[str, list[NodeProto]] = {o.name: [NodeProto()] for o in graph.output}
    for node in graph.node:
        for name in {*node.input, *captured(node)}:
            readers.setdefault(name, []).append(node)
    pieces: dict[str, list[str]] = {}
    nodes: list[NodeProto] = []
    for node in graph.node:
        sizes = _piece_sizes(node, types, numbers) if is_standard(node, "SplitToSequence") else None
        if sizes and all(_position(r, len(sizes), numbers) is not None for r in readers.get(node.output[0], [])):
            pieces[node.output[0]] = [f"{node.output[0]}/{k}" for k in range(len(sizes))]
            axis = _axis(node, len(static_shape(types[node.input[0]]) or ()))
            nodes += _split(node, sizes, pieces[node.output[0]], model, axis)
        elif is_standard(node, "SequenceAt") and node.input[0] in pieces:
            names = pieces[node.input[0]]
            at = _position(node, len(names), numbers)
            assert at is not None
            nodes.append(_like(node, helper.make_node("Identity", [names[at]], node.output, node.name)))
        else:
            nodes.append(node)
    if pieces:
        replace_nodes(graph, nodes)
    return bool(pieces)


def _known_integers(model: ModelProto) -> dict[str, np.ndarray]:
    """Integers that the graph knows, by name."""
    given = {n.output[0]: attributes(n).get("value") for n in model.graph.node if is_standard(n, "Constant")}
    tensors = {t.name: t for t in model.graph.initializer} | {k: t for k, t in given.items() if isinstance(t, TensorProto)}
    whole = {k: t for k, t in tensors.items() if t.data_type in (TensorProto.INT64, TensorProto.INT32)}
    return {k: numpy_helper.to_array(t) for k, t in whole.items() if t.data_location != TensorProto.EXTERNAL}


def _axis(node: NodeProto, rank: int) -> int:
    return int(attributes(node).get("axis", 0)) % rank


def _piece_sizes(node: NodeProto, types: Mapping[str, TypeProto], numbers: Numbers) -> list[int] | None:
    """Sizes of the pieces along the axis; None where they are not known, or do not add up to it."""
    shape = static_shape(types.get(node.input[0]))
    if not shape:
        return None
    n = shape[_axis(node, len(shape))]
    if len(node.input) < 2 or not node.input[1]:
        return [1] * n
    given = numbers.get(node.input[1])
    if given is None:
        return None
    if given.ndim:
        return [int(k) for k in given] if int(given.sum()) == n and (given > 0).all() else None
    size = int(given)
    return [min(size, n - at) for at in range(0, n, size)] if size > 0 else None


def _position(node: NodeProto, count: int, numbers: Numbers) -> int | None:
    """Which piece a node takes out of a sequence; None where it does something else with it."""
    at = numbers.get(node.input[1]) if is_standard(node, "SequenceAt") else None
    return int(at) % count if at is not None and at.size == 1 and -count <= int(at) < count else None


def _split(node: NodeProto, sizes: Sequence[int], names: Sequence[str], model: ModelProto, axis: int) -> list[NodeProto]:
    """A Split into pieces; where the file says no sizes these may lose the axis (``keepdims`` 0)."""
    dropped = len(node.input) < 2 and not attributes(node).get("keepdims", 1)
    outs = [f"{n}.kept" for n in names] if dropped else list(names)
    made = [_with_numbers(helper.make_node("Split", node.input[:1], outs, node.name, axis=axis), "split", sizes, model)]
    if dropped:
        made += [
            _with_numbers(helper.make_node("Squeeze", [o], [n], f"{node.name}/{n}"), "axes", [axis], model)
            for o, n in zip(outs, names, strict=True)
        ]
    return [_like(node, m) for m in made]


def _with_numbers(made: NodeProto, name: str, values: Sequence[int], model: ModelProto) -> NodeProto:
    """A node with integers as the model's opset has them: as an input, or as an attribute."""
    if standard_opset(model) < AS_INPUTS:
        set_attributes(made, **{name: list(values)})
        return made
    made.input.append(f"{made.output[0]}/{name}")
    model.graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), made.input[-1]))
    return made


def _like(node: NodeProto, made: NodeProto) -> NodeProto:
    made.metadata_props.extend(node.metadata_props)
    return made
