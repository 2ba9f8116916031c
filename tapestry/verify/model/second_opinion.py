"""Opaque nodes that a run and its reference both give to one library: they are asked of another one, or named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tapestry.ir.graph import Graph, Opaque
from tapestry.onnx_eval import opaque_node
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.verify.model.bodies import alike
from tapestry.verify.model.cell_values import CellValues
from tapestry.verify.model.model_facts import Reader
from tapestry.verify.model.model_values import ModelFile, ReferenceValues
from tapestry.verify.model.rounded_inputs import within_rounding

_Expected = list[tuple[str, tuple[int, ...]]]


def second_opinions(graph: Graph, model: ModelFile, feeds: Mapping[str, Any], read: Reader, reference: str) -> dict[str, Any]:
    """What becomes of a graph's opaque nodes when another evaluator than the reference's runs them on the model's values.

    Returns:
        ``{asked, differ, same_engine}``: how many were asked again, those whose values differ, and those that no other
        evaluator runs, which a comparison with the reference therefore says nothing of.
    """
    run = ReferenceValues(model, feeds, {t for t in graph.tensors if t not in graph.weights})

    def known(name: str) -> Any:
        value = read(name) if name in graph.weights else run.values.get(name)
        return HostValue(value) if graph.tensors[name].on_host and name in run.values else value

    values, asked = CellValues(graph, known), 0
    differ, alone = list[str](), list[str]()
    for op in (op for op in graph.ops if isinstance(op, Opaque)):
        arrays = [values.stored(t, values.whole(t)) if t else None for t in op.ins]
        expected = [(graph.tensors[t].dtype, graph.tensors[t].shape) for t in op.outs]
        engine = opaque_node.engine(op, arrays, expected)
        if engine not in reference:
            continue  # the run and the reference are two libraries
        other = next(n for n in opaque_node.NAMES.values() if n != engine)
        again = opaque_node.asked_of(other, op, arrays, expected)
        mine = opaque_node.asked_of(engine, op, arrays, expected)
        name = ", ".join(op.source) or op.outs[0]
        if again is None or mine is None:
            alone.append(name)
        elif not all(
            alike(a, b) or _rounding(engine, op, k, arrays, expected, a, b)
            for k, (a, b) in enumerate(zip(mine, again, strict=True))
        ):
            differ.append(name)
        asked += again is not None
    return {"asked": asked, "differ": differ, "same_engine": alone}


def _rounding(engine: str, op: Opaque, k: int, arrays: Sequence[Any], expected: _Expected, mine: Any, other: Any) -> bool:
    """Whether the two libraries differ by what rounding does to the node."""

    def compute(given: list[Any]) -> Any:
        found = opaque_node.asked_of(engine, op, given, expected)
        return None if found is None else found[k]

    return within_rounding(compute, arrays, mine, other)
