"""What a plan is like, in a few lines: how long it takes, what of that is communication, and what its layers cut.

The kind of parallelism is read off the strategies themselves: a product with a weight is cut along the weight's own output
(by columns), along what it sums over (by rows), or along its other operand's rows (by data). Columns followed by rows within
one layer, and nothing else, is what Megatron-LM does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tapestry.build.store import Build
from tapestry.ir.graph import Block, Op
from tapestry.ir.index import dims_of
from tapestry.ir.naming.author_names import dim_names, operation_names
from tapestry.ir.plan import MeshAxis, Plan
from tapestry.ir.recognise.contraction import only_sums
from tapestry.plan.cost.floor import least_seconds
from tapestry.plan.topology import Topology, from_data
from tapestry.viz.format import duration, human, times
from tapestry.viz.layer_folds import layer_of


def likeness(plan: Plan) -> list[str]:
    """What kind of plan it is along each mesh axis: ``Megatron tensor parallel over tp in 31 of 32 layers``."""
    out: list[str] = []
    for a, axis in enumerate(plan.mesh):
        layers = _layers(plan, a)
        kinds = Counter(kind for ways in layers.values() if (kind := _kind(ways)))
        for kind, n in kinds.most_common():
            of = f" in {n} of {len(layers)} layers" if len(layers) > 1 else ""
            out.append(f"{kind} over {axis.name}{of}" if axis.size > 1 else "")
    return [line for line in out if line]


def _layers(plan: Plan, a: int) -> dict[str, list[str]]:
    """How mesh axis ``a`` cuts the products with weights of each layer; of a model without layers, of all of it."""
    rows: list[tuple[str, str]] = []
    for op, s, name in zip(plan.graph.ops, plan.strategies, operation_names(plan.graph), strict=True):
        way = _way(op, plan, s.dims[a] if a < len(s.dims) else None)
        if way:
            rows.append((layer_of(name), way))
    inside = any(layer for layer, _ in rows)
    out: dict[str, list[str]] = {}
    for layer, way in rows:
        if layer or not inside:
            out.setdefault(layer, []).append(way)
    return out


def _way(op: Op, plan: Plan, cut: str | None) -> str:
    """How a product with a weight is cut: columns, rows, data (or sequence) or whole; "" for what is none."""
    graph = plan.graph
    if not isinstance(op, Block) or not only_sums(op.monoid):
        return ""
    weights = [r for r in op.reads if r.tensor in graph.weights and graph.weights[r.tensor].file and len(r.index) > 1]
    summed = {d.name for d in op.reduce}
    read = [frozenset[str]().union(*map(dims_of, r.index)) for r in weights]
    weight = next((dims for dims in read if dims & summed and dims - summed), None)
    if weight is None:
        return ""
    if cut is None:
        return "whole"
    if cut in summed:
        return "rows"
    if cut in weight:
        return "columns"
    return "sequence" if dim_names(op, graph).get(cut) == "sequence" else "data"


def _kind(ways: list[str]) -> str:
    """What one layer is called in the field."""
    found = set(ways)
    if found == {"columns", "rows"}:
        return "Megatron tensor parallel"
    names = {"columns": "column parallel", "rows": "row parallel", "data": "data parallel", "sequence": "sequence parallel"}
    if found == {"whole"}:
        return "replicated"
    if len(found) == 1:
        return names[found.pop()]
    return "mixed (" + ", ".join(sorted(found)) + ")"


def speed(build: Build, simulated: Mapping[str, Any]) -> Iterator[str]:
    """How much faster than one device, what communication takes of the time, and memory."""
    seconds, topo = simulated["seconds"], from_data(build.topology)
    if build.plan.devices > 1 and seconds and not topo.costs:
        alone = least_seconds(build.plan.graph, _one_device(topo))
        share = 1 - max(simulated["compute_s"]) / seconds
        yield (
            f"{times(alone / seconds)} times as fast as one device could be ({duration(alone)} at the least); "
            f"the busiest one is without a kernel for {share:.1%} of the time, by communication"
        )
    peak = max(build.peak_bytes)
    yield f"memory: at most {human(peak)} on a device, {peak / build.memory:.1%} of {human(build.memory)}"


def _one_device(topo: Topology) -> Topology:
    return replace(topo, mesh=(MeshAxis("d0", 1),), kinds=(), joined=())


def plan_lines(plan: Plan) -> Iterator[str]:
    """The kinds of parallelism, most frequent first; none for one device."""
    lines = likeness(plan)
    yield from (f"plan: {line}" for line in lines[:5])
    if len(lines) > 5:
        yield f"plan: … {len(lines) - 5} more kinds of layers"
