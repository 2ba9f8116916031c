"""Run the ONNX node inside an opaque operation: exact, unhurried, and the same for every part of Tapestry."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tapestry.ir.graph import Opaque


@lru_cache(maxsize=512)
def _evaluator(node: bytes, opsets: tuple[tuple[str, int], ...], count: int) -> Any:
    from onnx import NodeProto, TypeProto, helper
    from onnx.reference import ReferenceEvaluator

    proto = NodeProto.FromString(node)
    captured = [f"in{k}" for k in range(len(proto.input), count)]  # what its subgraphs read of the graph around it
    inputs = [helper.make_value_info(n, TypeProto()) for n in dict.fromkeys([*proto.input, *captured]) if n]
    outputs = [helper.make_value_info(n, TypeProto()) for n in proto.output if n]
    graph = helper.make_graph([proto], "node", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(d, v) for d, v in opsets])
    return ReferenceEvaluator(model), [i.name for i in inputs]


def run(op: Opaque, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    """Outputs of the node for whole inputs, or for blocks along the dimensions it commutes with.

    Args:
        arrays: one per ``op.ins`` (``None`` where the input is absent), in the order of the node's inputs.
    """
    evaluator, names = _evaluator(op.node, op.opsets, len(op.ins))
    given = dict(zip(names, (a for a in arrays if a is not None), strict=True))
    return [np.asarray(x) for x in evaluator.run(None, given)]
