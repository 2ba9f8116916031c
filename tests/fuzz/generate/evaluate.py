"""Values of single ONNX nodes: onnxruntime without optimisations, or the ONNX reference evaluator where that cannot."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper

from tapestry.onnx_eval.ort_session import ort_session

Array = np.ndarray[Any, Any]
KNOWN = 18  # the first opset whose nodes the reference evaluator has been compared with
IR_VERSION = 10  # the newest that every opset used here goes with and onnxruntime reads
BODIES = ("If", "Loop", "Scan")  # the reference evaluator takes no steps of a Loop without a condition, and stacks nothing


class Unfit(Exception):
    """A node that the generator had better leave out: no evaluator runs it, or its values are of no use to compare."""


def need(fact: object, why: str) -> None:
    """Leave a node out unless this holds.

    Raises:
        Unfit: it does not.
    """
    if not fact:
        raise Unfit(why)


def onnx_type(dtype: np.dtype[Any]) -> int:
    """ONNX's number for a numpy type."""
    return int(helper.np_dtype_to_tensor_dtype(dtype))


def model_of(
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, Array],
    outputs: Mapping[str, int],
    opset: int,
    weights: Sequence[TensorProto] = (),
    symbols: Mapping[tuple[str, int], str] | None = None,
    ranks: Mapping[str, int] | None = None,
) -> ModelProto:
    """A model of some nodes.

    Args:
        inputs: values, whose shapes and dtypes are declared.
        outputs: name to ONNX element type; their sizes are left to inference.
        symbols: (input, axis) to the name of a symbolic size declared there.
        ranks: of outputs, declared where known.
    """
    names, known = symbols or {}, ranks or {}
    ins = [
        helper.make_tensor_value_info(n, onnx_type(a.dtype), [names.get((n, k), s) for k, s in enumerate(a.shape)])
        for n, a in inputs.items()
    ]
    outs = [helper.make_tensor_value_info(n, t, [None] * known[n] if n in known else None) for n, t in outputs.items()]
    graph = helper.make_graph(list(nodes), "fuzz", ins, outs, list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR_VERSION)


def reads(node: NodeProto) -> list[str]:
    """Names that a node reads, once each: its inputs, and what the bodies of its control flow capture."""
    found = dict.fromkeys(i for i in node.input if i)
    for a in node.attribute:
        if a.HasField("g"):
            inside = {i.name for i in a.g.input} | {t.name for t in a.g.initializer} | {o for n in a.g.node for o in n.output}
            inner = [i for n in a.g.node for i in reads(n)] + [o.name for o in a.g.output]
            found |= dict.fromkeys(i for i in inner if i not in inside)
    return list(found)


def node_values(node: NodeProto, inputs: Mapping[str, Array], opset: int) -> dict[str, Array]:
    """What a node's outputs are.

    Raises:
        Unfit: neither evaluator runs it.
    """
    used = {n: np.asarray(inputs[n]) for n in reads(node)}
    wanted = {o: TensorProto.UNDEFINED for o in node.output if o}
    model = model_of(_known_form(node), used, wanted, opset)
    try:
        _trust(node, used)
        return _onnxruntime(model, used)
    except Exception as first:  # both libraries raise many kinds
        if opset < KNOWN or node.op_type in BODIES:
            raise Unfit(f"{node.op_type}: {first}") from None
        try:
            _trust_reference(node, used)
            return _evaluator(model, used)
        except Exception as second:
            raise Unfit(f"{node.op_type}: {first}; {second}") from None


def _known_form(node: NodeProto) -> list[NodeProto]:
    """A recurrence whose batch comes first as one whose time does (onnxruntime has no other), between transpositions.

    `onnx_eval.opaque_node` does the same for what is judged here, and is not asked: a mistake in common would not be found.
    """
    if not any(a.name == "layout" and a.i for a in node.attribute):
        return [node]
    swap = {0: (1, 0, 2), 5: (1, 0, 2), 6: (1, 0, 2)}
    back = {0: (2, 0, 1, 3), 1: (1, 0, 2), 2: (1, 0, 2)}
    core = NodeProto()
    core.CopyFrom(node)
    del core.attribute[:]
    core.attribute.extend(a for a in node.attribute if a.name != "layout")
    first: list[NodeProto] = []
    last: list[NodeProto] = []
    for k, name in enumerate(node.input):
        if name and k in swap:
            core.input[k] = f"{name}/time{k}"
            first.append(helper.make_node("Transpose", [name], [core.input[k]], perm=swap[k]))
    for k, name in enumerate(node.output):
        if name:
            core.output[k] = f"{name}/time"
            last.append(helper.make_node("Transpose", [core.output[k]], [name], perm=back[k]))
    return [*first, core, *last]


def _trust(node: NodeProto, used: Mapping[str, Array]) -> None:
    if node.op_type == "Einsum" and any(a.size == 0 for a in used.values()):
        raise Unfit("onnxruntime divides by a size of zero, which ends the process")
    if node.op_type.startswith(("Reduce", "Arg")) and not used[node.input[0]].size:
        raise Unfit("onnxruntime keeps axes of nothing that it should reduce")
    if node.op_type == "Shrink" and any(a.dtype == np.float64 for a in used.values()):
        raise Unfit("onnxruntime computes a Shrink of float64 in float32")


def _trust_reference(node: NodeProto, used: Mapping[str, Array]) -> None:
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    need(node.op_type not in ("LSTM", "GRU", "RNN"), "the reference evaluator ignores activations, clip and lengths")
    need(not (node.op_type == "LpPool" and given.get("ceil_mode")), "the reference evaluator counts cells twice")
    need(not node.op_type.startswith("Global"), "the reference evaluator drops axes")
    apart = {*given.get("dilations", [1])} != {1} and given.get("auto_pad", b"NOTSET") != b"NOTSET"
    need(not (node.op_type.endswith("Pool") and apart), "the reference evaluator forgets dilations where it pads by itself")
    if node.op_type != "Attention":
        return
    if len(node.output) > 3 and node.output[3] and given.get("softcap") and not given.get("qk_matmul_output_mode", 0):
        raise Unfit("the reference evaluator shows capped scores as raw ones")
    mask = used[node.input[3]] if len(node.input) > 3 and node.input[3] else None
    windows = max(given.get("left_window_size", -1), given.get("right_window_size", -1)) >= 0
    if given.get("is_causal") and mask is not None and mask.shape[-2:-1] == (1,) and not windows:
        raise Unfit("the reference evaluator takes a mask's single row for all the queries that causality is about")


def _onnxruntime(model: ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array]:
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    session = ort_session(model.SerializeToString(), optimized=False, threads=1)
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, map(np.asarray, session.run(names, dict(inputs))), strict=True))


def _evaluator(model: ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array]:
    from onnx.reference import ReferenceEvaluator

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found: list[Any] = cast(Any, ReferenceEvaluator(model)).run(None, dict(inputs))
    return {o.name: np.asarray(a) for o, a in zip(model.graph.output, found, strict=True)}


def replay(
    nodes: Sequence[NodeProto],
    given: Mapping[str, Array],
    opset: int,
    *,
    plain: Mapping[str, Array] | None = None,
    noise: np.random.Generator | None = None,
) -> dict[str, Array]:
    """Every value of a model, node by node.

    Args:
        plain: the values as they are; with them floats of 32 bits and less are computed in float64, but for nodes that no
            evaluator runs so (a DequantizeLinear), which are computed as they are.
        noise: every floating-point result is moved by up to two units in its last place (Monte Carlo arithmetic); how
            far outputs move with it is what rounding may do to them.

    Raises:
        Unfit: a node does not run so.
    """
    values = {n: a if plain is None else _widened(a) for n, a in given.items()}
    for node in nodes:
        found = node_values(node, values, opset) if plain is None else _wide_values(node, values, plain, opset)
        for name, a in found.items():
            values[name] = a if noise is None else _shaken(a, noise)
    return values


def _wide_values(node: NodeProto, values: Mapping[str, Array], plain: Mapping[str, Array], opset: int) -> dict[str, Array]:
    try:
        return node_values(_wide_node(node), values, opset)
    except Unfit:
        narrow = {n: np.asarray(values[n]).astype(plain[n].dtype) for n in reads(node)}
        found = {n: _widened(a) for n, a in node_values(node, narrow, opset).items()}
        return _wide_where_alike(node, values, opset, found) if opset < KNOWN else found


def _wide_where_alike(node: NodeProto, values: Mapping[str, Array], opset: int, found: dict[str, Array]) -> dict[str, Array]:
    """What the reference evaluator says of an early node, where it is what onnxruntime found but for its rounding."""
    used = {n: np.asarray(values[n]) for n in reads(node)}
    try:
        wide = _evaluator(model_of([node], used, dict.fromkeys(found, TensorProto.UNDEFINED), opset), used)
    except Exception:  # it raises many kinds
        return found
    return {n: wide[n] if n in wide and _alike(wide[n], a) else a for n, a in found.items()}


def _alike(a: Array, b: Array) -> bool:
    scale = float(np.abs(b).max(initial=0.0)) if is_float(b) else 0.0
    return (
        a.shape == b.shape and is_float(a) and is_float(b) and np.allclose(a, b, rtol=1e-2, atol=1e-3 * scale, equal_nan=True)
    )


def _widened(a: Array) -> Array:
    return a.astype(np.float64) if is_float(a) else a


def is_float(a: Array) -> bool:
    """Whether an array is of a floating-point type (bfloat16 as well)."""
    return a.dtype.kind == "f" or a.dtype.name == "bfloat16"


def _shaken(a: Array, rng: np.random.Generator) -> Array:
    if not is_float(a):
        return a
    unit = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11}.get(a.dtype.name, 2.0**-8)
    factors: Array = 1 + np.asarray(rng.uniform(-2, 2, a.shape), np.float64) * unit
    return (a.astype(np.float64) * factors).astype(a.dtype)


def _wide_node(node: NodeProto) -> NodeProto:
    """The node with casts to a float type made casts to float64, those inside of a group norm as well."""
    if node.op_type not in ("Cast", "ConstantOfShape", "GroupNormalization"):
        return node
    out = NodeProto()
    out.CopyFrom(node)
    if node.op_type == "GroupNormalization":  # its mean and variance are of float32 whatever its input is
        out.attribute.append(helper.make_attribute("stash_type", TensorProto.DOUBLE))
    for a in out.attribute:
        if a.name == "to" and a.i in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16):
            a.i = TensorProto.DOUBLE
    return out
