# pyright: basic
# onnx and onnxruntime come without complete types
"""Run the ONNX node inside an opaque operation: exact, unhurried, and the same for every part of Tapestry.

onnxruntime runs the node where it can; otherwise the ONNX reference evaluator, which has every operator but some of them
wrong (linear Resize, for one).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tapestry.errors import TapestryError
from tapestry.ir.graph import Opaque

Array = np.ndarray[Any, Any]
Evaluator = Callable[[Mapping[str, Array]], Sequence[Any]]
IR_VERSION = 10  # onnxruntime reads no model newer than 13


def run(op: Opaque, arrays: Sequence[Array | None]) -> list[Array]:
    """Outputs of the node for whole inputs, or for blocks along the dimensions it commutes with.

    Args:
        arrays: one per ``op.ins`` (``None`` where the input is absent), in the order of the node's inputs.

    Raises:
        TapestryError: no evaluator runs the node.
    """
    declared = _inputs(op.node)  # and after them what its subgraphs read of the graph around it
    names = [declared[k] if k < len(declared) else f"in{k}" for k in range(len(arrays))]
    given = {n: a for n, a in zip(names, arrays, strict=True) if a is not None}
    types = tuple((n, a.dtype.name, a.shape) for n, a in given.items())
    failures: list[str] = []
    for make in (_onnxruntime, _reference):
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                return [np.asarray(x) for x in make(op.node, op.opsets, types)(given)]
        except Exception as e:  # both libraries raise many kinds
            failures.append(str(e).splitlines()[0][:200] if str(e) else type(e).__name__)
    raise TapestryError(f"no evaluator runs {op.kind}", where=f"node '{', '.join(op.source)}'", why="; ".join(failures))


@lru_cache(maxsize=512)
def _inputs(node: bytes) -> tuple[str, ...]:
    from onnx import NodeProto

    return tuple(NodeProto.FromString(node).input)


Types = tuple[tuple[str, str, tuple[int, ...]], ...]


def _model(node: bytes, opsets: tuple[tuple[str, int], ...], types: Types) -> Any:
    from onnx import NodeProto, TypeProto, helper

    proto = NodeProto.FromString(node)
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape) for n, dtype, shape in types
    ]
    outputs = [helper.make_value_info(n, TypeProto()) for n in proto.output if n]
    graph = helper.make_graph([proto], "node", inputs, outputs)
    return helper.make_model(graph, ir_version=IR_VERSION, opset_imports=[helper.make_opsetid(d, v) for d, v in opsets])


@lru_cache(maxsize=512)
def _reference(node: bytes, opsets: tuple[tuple[str, int], ...], types: Types) -> Evaluator:
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(_model(node, opsets, types))
    return lambda given: list(evaluator.run(None, dict(given)))


@lru_cache(maxsize=512)
def _onnxruntime(node: bytes, opsets: tuple[tuple[str, int], ...], types: Types) -> Evaluator:
    import onnxruntime as ort

    model = _model(node, opsets, types)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    known = {i.name for i in session.get_inputs()}
    return lambda given: session.run(None, {n: a for n, a in given.items() if n in known})
