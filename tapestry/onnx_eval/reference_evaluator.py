"""onnx's reference evaluator with its faults mended, operators of plug-ins, and one rounding a node."""
# pyright: basic

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tapestry.onnx_eval.own_nodes import classes
from tapestry.onnx_eval.reference_fixes import corrected

SHORT = frozenset({"float16", "bfloat16"})
HALVES = frozenset(name.upper() for name in SHORT)  # as ONNX writes them
SUMMING = ("Reduce", "Sum", "Mean", "MatMul", "Gemm", "Einsum", "Softmax", "Norm", "Det", "Cum", "Attention", "Loss")
"""Parts of the names of operators that add or multiply many numbers, each time rounding, where nobody widens them."""
AS_TOLD = frozenset({"CastLike"})  # of any type to any other: by way of float32 it would be rounded twice


def reference_evaluator(proto: Any, **more: Any) -> Any:
    """onnx's reference evaluator of a model, with its faults mended, operators of plug-ins, and one rounding a node."""
    return _class()(proto, **more)


def once(
    operator: str, version: int, arrays: Sequence[Any], compute: Callable[[list[Any]], Sequence[Any]], *, double: bool = False
) -> list[Any]:
    """What ``compute`` gives for the inputs of an operator of ONNX's own, those of 16 bits in float32, rounded to the types
    that the results have; ``double``: these, and float32, in float64."""
    wide = np.float64 if double else np.float32

    def narrow(a: Any) -> bool:
        return is_short(a) or (double and getattr(a, "dtype", None) == np.float32)

    ins, outs = _type_variables(operator, version)
    ins = [*ins, *ins[-1:] * (len(arrays) - len(ins))]  # the last one may be there many times
    short = {v: a.dtype for v, a in zip(ins, arrays, strict=False) if narrow(a)}
    if short.keys().isdisjoint(outs):
        return list(compute(list(arrays)))
    results = list(compute([a.astype(wide) if narrow(a) else a for a in arrays]))
    names = [*outs, *outs[-1:] * (len(results) - len(outs))][: len(results)]
    types = [short.get(v) for v in names]
    given = {v for v, a in zip(ins, arrays, strict=False) if a is not None}
    if any(v not in given and getattr(r, "dtype", None) == wide for v, r in zip(names, results, strict=True)):
        own = compute(list(arrays))  # no input says these results' types: they are those of the operator on what is given
        types = [o.dtype if v not in given and narrow(o) else t for v, o, t in zip(names, own, types, strict=True)]
    with np.errstate(all="ignore"):
        return [r if t is None or r is None else np.asarray(r).astype(t) for r, t in zip(results, types, strict=False)]


def is_short(a: Any) -> bool:
    """Whether something is a tensor of 16-bit floats, or is said to be one."""
    return getattr(getattr(a, "dtype", None), "name", "") in SHORT


@lru_cache(maxsize=1024)
def _type_variables(operator: str, version: int) -> tuple[list[str], list[str]]:
    """Names of the types of an operator's inputs and outputs; none where a type is not its inputs' alone, or it has bodies."""
    from onnx import defs

    if operator in AS_TOLD or not defs.has(operator, version, ""):
        return [], []
    schema = defs.get_schema(operator, version, "")
    if any(a.type == defs.OpSchema.AttrType.GRAPH for a in schema.attributes.values()):
        return [], []
    return [i.type_str for i in schema.inputs], [o.type_str for o in schema.outputs]


@lru_cache(maxsize=1)
def _class() -> Any:
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpFunction

    class OneRounding(ReferenceEvaluator):
        def __init__(self, proto: Any, new_ops: Any = None, **more: Any) -> None:  # (functions are not given their caller's)
            super().__init__(proto, new_ops=[*corrected(), *classes()], **more)

        def _load_impl(self, node: Any, input_types: Any = None) -> Any:
            make = super()._load_impl(node, input_types)
            return make if node.domain not in ("", "ai.onnx") else lambda *given: self._rounded(make(*given))

        def _rounded(self, made: Any) -> Any:
            if not isinstance(made, OpFunction):  # (a function's nodes are rounded each)
                run, version = made.run, self.opsets[made.onnx_node.domain]
                made.run = lambda *ins, **k: tuple(once(made.onnx_node.op_type, version, ins, lambda wide: run(*wide, **k)))
            return made

    return OneRounding
