"""Operators of the user's own domain, as classes of the ONNX reference evaluator."""
# pyright: basic

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnx import NodeProto

# onnx comes without complete types


EVALUATORS: dict[tuple[str, str], Callable[[NodeProto, Sequence[Any]], tuple[Any, ...]]] = {}
"""What gives a node's outputs for arrays, by the operator's domain and name."""


def classes() -> list[type]:
    """Classes for ``ReferenceEvaluator(new_ops=…)``; they ask for what evaluates them when they run."""
    from onnx.reference.op_run import OpRun

    def run(self: Any, *arrays: Any, **_: Any) -> tuple[Any, ...]:
        return EVALUATORS[self.op_domain, type(self).__name__](self.onnx_node, arrays)

    return [type(name, (OpRun,), {"op_domain": domain, "_run": run}) for domain, name in EVALUATORS]


# Nodes on floats of 16 bits: computed in float32, and rounded once, at each output, as hardware does.
#
# onnx's reference evaluator computes in the type of the numbers: a sum of bfloat16 stands still once it is 256 times what is
# added, and a product of matrices takes a hundred times as long. onnxruntime has few such kernels on the CPU.


# onnx comes without complete types
