"""Run the ONNX node inside an opaque operation, exact and unhurried, by onnxruntime or the ONNX reference evaluator.

The CPU target asks onnxruntime first, the verifier's interpreter (``independent``) the reference evaluator, so that a mistake
of either shows. Where only one of them can run a node, or one is known to be wrong, both ask the same one: `_evaluators`
says where that is, and why.
"""
# pyright: basic

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from tapestry.errors import TapestryError
from tapestry.ir.graph import Opaque
from tapestry.ir.types import HOST, STORED, Array, numpy_dtype
from tapestry.onnx_eval.ort_session import Guarded, OrtError, apart
from tapestry.onnx_eval.reference_evaluator import SHORT, once, reference_evaluator

# onnx and onnxruntime come without complete types


Evaluator = Callable[[Mapping[str, Any]], Sequence[Any]]
Types = tuple[tuple[str, Any, tuple[int | None, ...] | None], ...]
Expected = tuple[str, tuple[int, ...]]  # dtype ("" for any) and shape of a result; a host value may have any
RELEASED = 26  # the newest opset that onnxruntime takes
NAMES = {"_onnxruntime": "onnxruntime", "_reference": "onnx.reference"}
RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}
)
IR_VERSION = 10  # onnxruntime reads no model newer than 13
ACCURATE = frozenset({"DFT", "STFT", "MelWeightMatrix"})  # the reference computes in float64, onnxruntime is off by 1e-4
WRONG_IN_ORT = frozenset({"MaxUnpool"})  # it ignores the strides implied by output_shape
ASKED_APART = WRONG_IN_ORT | {"NonZero"}  # (it gives places in a scalar a coordinate) no model with these is run as a whole
WRONG_IN_REFERENCE = frozenset({"Resize"})  # linear and cubic ones, at the borders
MOST_SAMPLES = 1 << 24  # of a region of RoiAlign
RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
SIMPLE = frozenset({"hidden_size", "direction", "linear_before_reset"})  # attributes of recurrences that the reference heeds


@dataclass(frozen=True, slots=True)
class HostValue:
    """A value of the host (`Tensor.on_host`): an array of any shape, a list for a sequence, a dictionary for a map,
    None for an empty optional."""

    value: Any


@dataclass(slots=True)
class Asked:
    """Which libraries ran nodes, and what onnxruntime said of those that it has and refused, where another one ran them."""

    libraries: list[str] = field(default_factory=list[str])
    refused: list[str] = field(default_factory=list[str])


class Refused(TapestryError):
    """onnxruntime implements a node, and neither it nor another evaluator runs it on some inputs."""


def run(
    op: Opaque,
    arrays: Sequence[Array | HostValue | None],
    expected: Sequence[Expected],
    *,
    independent: bool = False,
    names: Sequence[str] = (),
    by: Asked | None = None,
    double: bool = False,
) -> list[Any]:
    """Outputs of the node for whole inputs, or for blocks along the dimensions it commutes with.

    Args:
        arrays: one per ``op.ins`` (``None`` where the input is absent), in the order of the node's inputs.
        expected: dtype and shape of each output as the graph has it; results are held to it.
        independent: ask the reference evaluator first, where it is known to be right, to check on what a target asks.
        names: of the arrays, where a node's own are not those that a lifted one has.
        by: notes who ran it; nothing is then run but what cannot end this process.
        double: floats of fewer bits are widened to float64, and results rounded once.

    Raises:
        Refused: onnxruntime has the operator, and nobody runs it on these inputs.
        TapestryError: no evaluator runs the node, or its result is not of the shape that the model declares.
    """
    given = _named(op, arrays, names)
    feeds = _values(given)
    if op.kind == "RoiAlign" and _samples(op.node, list(feeds.values())[1]) > MOST_SAMPLES:
        what = f"a region is so large that its mean is over more than {MOST_SAMPLES:,} samples"
        raise TapestryError(what, where=f"node '{', '.join(op.source)}' (RoiAlign)", hint="set sampling_ratio")
    failures, where, refused = list[str](), f"node '{', '.join(op.source)}'", False
    for make in _evaluators(op, feeds, expected, independent):
        made = make.__wrapped__ if _kinds(op.node) & RANDOM else make  # a generator's state must not go on from run to run
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                results = _asked(made, op, given, by is not None, double)
        except Exception as e:  # both libraries raise many kinds
            failures.append(_evaluator_error(e))
            refused |= isinstance(e, OrtError) and e.refused
            continue
        if by is not None:
            by.libraries.append(NAMES[make.__name__])
            by.refused += [f"{where}: {text}" for text in failures if refused]
        return [_held_to(op, _plain(x), e) for x, e in zip(results, expected, strict=True)]
    raise (Refused if refused else TapestryError)(f"no evaluator runs {op.kind}", where=where, why="; ".join(failures))


def draws(op: Opaque) -> bool:
    """Whether a node, or one in its bodies, draws random numbers: two evaluators give different ones."""
    return bool(_kinds(op.node) & RANDOM)


def engine(op: Opaque, arrays: Sequence[Array | HostValue | None], expected: Sequence[Expected]) -> str:
    """The evaluator that a target's run of a node asks first."""
    feeds = _values(_named(op, arrays, ()))
    first = _evaluators(op, feeds, expected, False)[0].__name__
    return NAMES.get(str(first), str(first))


def asked_of(
    name: str, op: Opaque, arrays: Sequence[Array | HostValue | None], expected: Sequence[Expected]
) -> list[Any] | None:
    """Outputs of a node by one evaluator; None where it cannot run it, draws numbers of its own, or is known to be wrong."""
    wrong = WRONG_IN_REFERENCE if name == NAMES["_reference"] else WRONG_IN_ORT | ACCURATE
    if _kinds(op.node) & (RANDOM | wrong):
        return None
    feeds = _values(given := _named(op, arrays, ()))
    make = _reference if name == NAMES["_reference"] else _onnxruntime
    if make is _onnxruntime and make not in _evaluators(op, feeds, expected, False):
        return None
    if op.kind == "RoiAlign" and _samples(op.node, list(feeds.values())[1]) > MOST_SAMPLES:
        return None
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return [_held_to(op, _plain(x), e) for x, e in zip(_asked(make, op, given, True), expected, strict=True)]
    except Exception:  # both libraries raise many kinds
        return None


def _named(op: Opaque, arrays: Sequence[Array | HostValue | None], names: Sequence[str]) -> dict[str, Array | HostValue]:
    """A node's inputs by name, and after them what its subgraphs read of the graph around it."""
    declared = _inputs(op.node)
    names = names or [declared[k] if k < len(declared) else f"in{k}" for k in range(len(arrays))]
    return {n: a for n, a in zip(names, arrays, strict=True) if a is not None}


def _values(given: Mapping[str, Array | HostValue]) -> dict[str, Any]:
    return {n: a.value if isinstance(a, HostValue) else a for n, a in given.items()}


def _evaluator_error(e: Exception) -> str:
    """What went wrong, without the places in onnxruntime's own sources."""
    said = " ".join(str(e).split())
    return (
        re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : |Non-zero status.*Message: |/onnx\S+:\d+ .* was false\. ", "", said)[:200]
        or type(e).__name__
    )


def _asked(
    make: Callable[..., Evaluator], op: Opaque, given: Mapping[str, Array | HostValue], alone: bool, double: bool = False
) -> list[Any]:
    """What an evaluator gives for a node's inputs, as `once` has it."""
    feeds, names = _values(given), _inputs(op.node)
    bodies = len(_kinds(op.node)) > 1

    def compute(wide: Sequence[Any]) -> Sequence[Any]:
        values = {**feeds, **{n: a for n, a in zip(names, wide, strict=True) if n in feeds}}
        types = tuple((n, *_type(values[n], isinstance(a, HostValue), bodies)) for n, a in given.items())
        evaluate = make(op.node, op.opsets, types)
        return evaluate.apart(values) if alone and isinstance(evaluate, Guarded) else evaluate(values)

    kind = op.kind if _standard(op.node) else ""
    return once(kind, dict(op.opsets).get("", 1), [feeds.get(n) for n in names], compute, double=double)


def unsupported(op: Opaque, arrays: Sequence[tuple[Any, tuple[int, ...] | None] | None]) -> str:
    """Why no evaluator can be made for a node whose inputs have these dtypes and shapes; "" when one can."""
    declared = _inputs(op.node)
    names = [declared[k] if k < len(declared) else f"in{k}" for k in range(len(arrays))]
    types = tuple((n, *(a or (np.dtype(object), None))) for n, a in zip(names, arrays, strict=True) if n)
    wide = tuple((n, np.dtype(np.float32) if str(t) in SHORT else t, shape) for n, t, shape in types)
    failures: list[str] = []
    for make, given in ((_onnxruntime, types), (_reference, types), (_onnxruntime, wide)):
        try:
            made = make(op.node, op.opsets, given)
            if isinstance(made, Guarded):
                apart(made.model, None)
        except Exception as e:  # both libraries raise many kinds
            failures.append(_evaluator_error(e))
        else:
            return ""
    return "; ".join(failures[:2])


_STORED_NAMES = STORED | {numpy_dtype(d).name for d in STORED}


def _evaluators(op: Opaque, feeds: Mapping[str, Any], expected: Sequence[Expected], independent: bool) -> list[Any]:
    """The evaluators to try, the one to trust first."""
    dtypes = {d for d, _ in expected} | {a.dtype.name for a in feeds.values() if isinstance(a, np.ndarray)}
    if not dtypes.isdisjoint(_STORED_NAMES) or any(not isinstance(a, np.ndarray) for a in feeds.values()):
        return [_reference]  # onnxruntime's Python interface takes none of these, or gives other types back
    if op.kind == "NonZero" and any(a.ndim == 0 for a in feeds.values()):
        return [_reference]  # onnxruntime's places in a scalar have one coordinate, ONNX's none
    kinds, corners = _kinds(op.node), op.kind == "Resize" and b"align_corners" in op.node
    if kinds & (ACCURATE | WRONG_IN_ORT) or corners:  # corners: onnxruntime rounds the length first when shrinking
        return [_reference, _onnxruntime]
    if not independent or kinds & (WRONG_IN_REFERENCE | RANDOM):  # two evaluators draw different numbers
        return [_onnxruntime, _reference]
    return [_reference, _onnxruntime]


def _samples(node: bytes, regions: Array) -> float:
    """Samples of the largest region of a RoiAlign. Without a ``sampling_ratio`` there is one for each pixel of the region, and
    both evaluators write down all of them before they add; NaN has none."""
    from onnx import NodeProto, helper

    given = {a.name: helper.get_attribute_value(a) for a in NodeProto.FromString(node).attribute}
    if given.get("sampling_ratio", 0) > 0 or not regions.size:
        return 0.0
    with np.errstate(all="ignore"):
        sides = np.maximum(np.abs(regions[:, 2:4].astype(np.float64) - regions[:, :2]) * given.get("spatial_scale", 1.0), 1.0)
        return float(np.nan_to_num(np.prod(sides, axis=1), nan=0.0, posinf=np.inf).max())


def _type(value: Any, on_host: bool, bodies: bool) -> tuple[Any, tuple[int | None, ...] | None]:
    """Element type and shape for an evaluator. What depends on the data is left open, so that sessions are shared; of a node
    with bodies all is, because what is known of its inputs may not suit a branch that is not taken."""
    if not isinstance(value, np.ndarray):
        return np.dtype(object), None
    return value.dtype, None if bodies else (None,) * value.ndim if on_host else value.shape


def _plain(x: Any) -> Any:
    """Arrays as arrays (evaluators give scalars at times), sequences as lists, maps as they are, an empty optional as None."""
    if x is None:
        return None
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(y) for y in x]
    a = np.asarray(x)
    return a.astype(object) if a.dtype.kind in "US" else a


def _held_to(op: Opaque, result: Any, expected: Expected) -> Any:
    """The result, if it is what the graph says of it."""
    dtype, shape = expected
    if dtype == HOST:
        return result
    is_array = isinstance(result, np.ndarray)
    if is_array and result.shape == shape and (not dtype or result.dtype == numpy_dtype(dtype)):
        return result
    what = f"{result.dtype.name}{list(result.shape)}" if is_array else type(result).__name__
    raise TapestryError(
        "the result is not what the model declares",
        where=f"node '{', '.join(op.source)}' ({op.kind})",
        why=f"it is {what}, declared {dtype}{list(shape)}",
        hint="these inputs ask for another shape; leave it undeclared",
    )


@lru_cache(maxsize=512)
def _inputs(node: bytes) -> tuple[str, ...]:
    from onnx import NodeProto

    return tuple(NodeProto.FromString(node).input)


@lru_cache(maxsize=512)
def _standard(node: bytes) -> bool:
    """Whether an operator is ONNX's own."""
    from onnx import NodeProto

    return NodeProto.FromString(node).domain in ("", "ai.onnx")


def _unchanged(node: Any, version: int) -> bool:
    """Whether a node, with all that is inside it, means the same at the newest opset that onnxruntime knows."""
    from onnx import defs

    if node.domain not in ("", "ai.onnx") or not defs.has(node.op_type, RELEASED, ""):
        return False
    if defs.get_schema(node.op_type, RELEASED, "").since_version != defs.get_schema(node.op_type, version, "").since_version:
        return False
    inner = [n for a in node.attribute for g in (a.g, *a.graphs) for n in g.node]
    return all(_unchanged(n, version) for n in inner)


@lru_cache(maxsize=512)
def _kinds(node: bytes) -> frozenset[str]:
    """The operators of a node and of all nodes inside it."""
    from onnx import NodeProto

    stack, kinds = [NodeProto.FromString(node)], set[str]()
    while stack:
        at = stack.pop()
        kinds.add(at.op_type)
        stack += [n for a in at.attribute for g in (a.g, *a.graphs) for n in g.node]
    return frozenset(kinds)


def _model(node: bytes, opsets: tuple[tuple[str, int], ...], types: Types) -> Any:
    from onnx import NodeProto, TypeProto, helper

    proto = NodeProto.FromString(node)
    opsets = tuple((d, RELEASED if d == "" and v > RELEASED and _unchanged(proto, v) else v) for d, v in opsets)
    inputs = [
        helper.make_value_info(n, TypeProto())
        if (dtype, shape) == (np.dtype(object), None)  # the reference asks for none
        else helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(dtype), shape)
        for n, dtype, shape in types
    ]
    outputs = [helper.make_value_info(n, TypeProto()) for n in proto.output if n]
    graph = helper.make_graph(_time_first(proto), "node", inputs, outputs)
    return helper.make_model(graph, ir_version=IR_VERSION, opset_imports=[helper.make_opsetid(d, v) for d, v in opsets])


def _time_first(node: Any) -> list[Any]:
    """A recurrence with ``layout`` 1 (batch first), which onnxruntime does not have, as one with 0 between transpositions."""
    from onnx import helper

    if node.op_type not in RECURRENT or not any(a.name == "layout" and a.i for a in node.attribute):
        return [node]
    inner = deepcopy(node)
    attributes = [a for a in node.attribute if a.name != "layout"]
    del inner.attribute[:]
    inner.attribute.extend(attributes)
    before, after = [], []
    for k, name in enumerate(node.input):
        if name and k in (0, 5, 6):  # X and the initial states; all else has no batch or nothing before it
            inner.input[k] = f"{name}/layout0/{k}"
            before.append(helper.make_node("Transpose", [name], [inner.input[k]], perm=[1, 0, 2]))
    for k, name in enumerate(node.output):
        if name:
            inner.output[k] = f"{name}/layout0"
            after.append(helper.make_node("Transpose", [inner.output[k]], [name], perm=[1, 0, 2] if k else [2, 0, 1, 3]))
    return [*before, inner, *after]


@lru_cache(maxsize=512)
def _reference(node: bytes, opsets: tuple[tuple[str, int], ...], types: Types) -> Evaluator:
    proto = _model(node, opsets, types)
    for n in proto.graph.node:
        extra = [a.name for a in n.attribute if a.name not in SIMPLE]
        if n.op_type in RECURRENT and (extra or (len(n.input) > 4 and n.input[4])):
            raise NotImplementedError(f"the reference evaluator ignores {', '.join(extra) or 'sequence_lens'} of {n.op_type}")
    evaluator = reference_evaluator(proto)
    return lambda given: list(evaluator.run(None, dict(given)))


@lru_cache(maxsize=512)
def _onnxruntime(node: bytes, opsets: tuple[tuple[str, int], ...], types: Types) -> Evaluator:
    return Guarded(_model(node, opsets, types).SerializeToString())
