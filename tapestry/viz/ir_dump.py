"""The IR between two passes: as text that `ir.syntax.parser` reads back, and as sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import onnx.printer

from tapestry.ir.graph import Graph
from tapestry.ir.program import moved_bytes, peak_bytes
from tapestry.ir.syntax.printer import to_text
from tapestry.lift.nodes import Prepared
from tapestry.lift.onnx_to_graph import Lifted, ModelSource
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.plan.search.problem import Problem
from tapestry.plan.search_passes import Candidate, Form
from tapestry.viz.format import step_text

Sizes = dict[str, int | float]


def graph_of(value: object) -> Graph | None:
    """The graph that a value of a pass holds, with the splits of its plan where it has one."""
    match value:
        case Graph():
            return value
        case Lifted() | Form():
            return value.graph
        case Candidate():
            return graph_of(value.result) or value.form.graph
        case PricedPlan():
            return value.plan.annotated()
        case _:
            return None


def dump(name: str, values: Iterable[object]) -> str:
    """The IR after a pass, of the first value that has one: a graph (or a plan, whose program is in comments), which parses
    again, or the ONNX model in ONNX's own text where there is no graph yet."""
    for value in values:
        graph = graph_of(value)
        if graph is not None:
            result = value.result if isinstance(value, Candidate) else value
            more = list(_plan_lines(result)) if isinstance(result, PricedPlan) else []
            return "\n".join([f"# after {name}", *more, to_text(graph)])
        if isinstance(value, ModelSource | Prepared):
            return f"# after {name}\n{onnx.printer.to_text(value.model)}\n"
    return f"# after {name}: no IR yet\n"


def _plan_lines(priced: PricedPlan) -> Iterator[str]:
    """A plan's cost and program, as comments."""
    plan = priced.plan
    yield f"# mesh {', '.join(f'{a.name}={a.size}' for a in plan.mesh)}"
    yield f"# objective {priced.objective:.6g} s, lower bound {priced.bound:.6g} s, gap {priced.gap:.2%}"
    for i, step in enumerate(priced.program.steps):
        yield f"# step {i}: {' '.join(step_text(step, priced.program, plan.graph.ops).split())}"


def sizes(values: Iterable[object]) -> Sizes:
    """How large what a pass gave is, by what is counted."""
    out: Sizes = {}
    for value in values:
        graph = graph_of(value)
        if graph is not None:
            out |= {"operations": len(graph.ops), "tensors": len(graph.tensors)}
        out |= _own_sizes(value)
    return out


def _own_sizes(value: object) -> Sizes:
    match value:
        case ModelSource():
            return {"nodes": value.nodes}
        case Prepared():
            return {"nodes": len(value.model.graph.node)}
        case Candidate():
            return _own_sizes(value.result)
        case PricedPlan():
            wire, peak = moved_bytes(value.program), max(peak_bytes(value.program)[0])
            return {"devices": value.plan.devices, "steps": len(value.program.steps), "wire_bytes": wire, "peak_bytes": peak}
        case list():
            problems = [p for p in cast("list[object]", value) if isinstance(p, Problem)]
            return {"strategies": sum(sum(p.sizes) for p in problems), "topologies": len(problems)} if problems else {}
        case dict():
            rows = [*cast("dict[str, object]", value).values()]  # kernels, as text, or counts of checks by law
            texts, counts = [r for r in rows if isinstance(r, str)], [r for r in rows if isinstance(r, int)]
            return (
                {"kernels": len(texts), "bytes": sum(map(len, texts))} if texts else {"checks": sum(counts)} if counts else {}
            )
        case _:
            return {}
