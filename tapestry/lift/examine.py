"""A look at a model before anything is compiled: every problem that can be found, not only the first one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto

from tapestry.errors import ModelError, refusing
from tapestry.ir.graph import Graph, Opaque
from tapestry.ir.types import HOST, Tensor, numpy_dtype
from tapestry.lift.file.diagnosis import complete
from tapestry.lift.file.protos import standard_opset
from tapestry.lift.file.structure import check_operators, check_tensor, load, opsets_of, tensors
from tapestry.lift.file.symbols import Given
from tapestry.lift.file.weight_data import stored_tensors
from tapestry.lift.nodes import SUSPECT
from tapestry.lift.onnx_to_graph import Lifted, input_dims, lift
from tapestry.lift.operators.contrib import microsoft
from tapestry.lift.sizes.model_sizes import follow, given_sizes
from tapestry.onnx_eval import opaque_node

TRIAL = 8  # the size that an unbound symbol has in the report


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What there is to say of a model.

    Attributes:
        nodes, opset: of the file.
        inputs: dimensions of every tensor input as declared, symbols by name.
        bound: symbols with the size that was given or follows from another one.
        assumed: symbols that nobody gave a size, with the size they have in this report.
        problems: what keeps the model from being compiled or run; each says where, why and what to do.
        lifted: the model as a Graph (of the assumed sizes), if it lifts at all.
    """

    nodes: int
    opset: int
    inputs: Mapping[str, list[int | str]]
    bound: Mapping[str, int]
    assumed: Mapping[str, int]
    problems: tuple[ModelError, ...]
    lifted: Lifted | None


def examine(path: Path, shapes: Given = {}, *, weights: bool = True) -> Examined:  # noqa: B006
    """Look at a model file.

    Args:
        weights: whether external data must be there.

    Raises:
        ModelError: the file is no ONNX model at all, or ``shapes`` contradict it.
    """
    path = path.absolute()
    with refusing(ModelError, "the model cannot be read", str(path), SUSPECT):
        return _examine(path, load(path), shapes, weights)


def _examine(path: Path, model: ModelProto, shapes: Given, weights: bool) -> Examined:
    nodes = len(model.graph.node)
    microsoft.define(model)
    problems = [*_operators(model), *_data(model, path.parent, weights)]
    stored = set(stored_tensors(model))
    inputs: Mapping[str, list[int | str]] = {}
    bound: dict[str, int] = {}
    lifted: Lifted | None = None
    assumed: dict[str, int] = {}
    try:
        inputs = input_dims(model, stored)
    except ModelError as e:
        problems.append(e)
    else:
        bound, rules = given_sizes(model, inputs, shapes)
        follow(rules, bound)
        symbols = dict.fromkeys(d for dims in inputs.values() for d in dims if isinstance(d, str))
        sizes = dict(bound)
        for s in symbols:
            sizes.setdefault(s, TRIAL)
            follow(rules, sizes)
        assumed = {s: n for s, n in sizes.items() if s not in bound}
        lifted = None if problems else _lifted(path, inputs, sizes, problems)
    if lifted is not None:
        problems += _evaluators(lifted.graph)
    return Examined(
        nodes=nodes,
        opset=standard_opset(model),
        inputs=inputs,
        bound=bound,
        assumed=assumed,
        problems=tuple(complete(e, model) for e in problems),
        lifted=lifted,
    )


def _lifted(
    path: Path, inputs: Mapping[str, list[int | str]], sizes: Mapping[str, int], problems: list[ModelError]
) -> Lifted | None:
    static = {n: [sizes.get(d, 0) if isinstance(d, str) else d for d in dims] for n, dims in inputs.items()}
    given = {n: static[n] for n, dims in inputs.items() if any(isinstance(d, str) for d in dims)}
    try:
        return lift(path, given, weights=False)
    except ModelError as e:
        problems.append(e)
        return None


def _operators(model: ModelProto) -> list[ModelError]:
    """Every node whose operator nobody knows."""
    functions = {(f.domain, f.name) for f in model.functions}
    opsets = opsets_of(model)
    nodes = (*model.graph.node, *(n for f in model.functions for n in f.node))
    return [e for node in nodes for e in _refusal(partial(check_operators, [node], functions, opsets))]


def _data(model: ModelProto, folder: Path, weights: bool) -> list[ModelError]:
    """Every tensor whose data is missing, unsafe or of the wrong size; those with one reason together."""
    try:
        stored = list(tensors(model))
    except ModelError as e:
        return [e]
    alike: dict[str, list[ModelError]] = {}
    for t in stored:
        for e in _refusal(partial(check_tensor, t, folder, weights=weights)):
            alike.setdefault(e.why, []).append(e)
    for first, *more in alike.values():
        first.where += f" and {len(more)} more" if more else ""
    return [some[0] for some in alike.values()]


def _refusal(check: Callable[[], None]) -> list[ModelError]:
    """What a check has to say, if it does not pass."""
    try:
        check()
    except ModelError as e:
        return [e]
    return []


def _evaluators(graph: Graph) -> list[ModelError]:
    """Every opaque node that no evaluator can be made for."""
    out: list[ModelError] = []
    for op in graph.ops:
        if isinstance(op, Opaque):
            why = opaque_node.unsupported(op, [_array(graph.tensors[t]) if t else None for t in op.ins])
            if why:
                where = f"node '{', '.join(op.source)}' ({op.kind})"
                hint = "replace the node, or give the model a function for it"
                out.append(ModelError("no evaluator has this operator", where=where, why=why, hint=hint))
    return out


def _array(t: Tensor) -> tuple[Any, tuple[int, ...] | None] | None:
    """Element type and shape as far as they are known before the run; None of a sequence or an optional."""
    if t.dtype != HOST:
        return numpy_dtype(t.dtype), t.shape
    typed = re.fullmatch(r"(\w+)\[.*\]", t.about)  # float[?, 3]
    return (onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(typed[1].upper())), None) if typed else None
