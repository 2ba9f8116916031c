"""What a plan is like, in a few lines: how long it takes, what of that is communication, and what its layers cut.

The kind of parallelism is read off the strategies themselves: a product with a weight is cut along the weight's own output
(by columns), along what it sums over (by rows), or along its other operand's rows (by data). Columns followed by rows within
one layer, and nothing else, is what Megatron-LM does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tapestry.build.store import Build
from tapestry.ir.graph import Block, Op
from tapestry.ir.index import dims_of
from tapestry.ir.naming.author_names import dim_names, operation_names
from tapestry.ir.plan import Plan
from tapestry.ir.recognise.contraction import only_sums
from tapestry.viz.format import duration, human, times
from tapestry.viz.layer_folds import layer_of


def likeness(plan: Plan) -> list[str]:
    """What kind of plan it is along each mesh axis: ``Megatron tensor parallel over tp in 31 of 32 layers``."""
    out: list[str] = []
    for axis in plan.mesh:
        layers = _layers(plan, axis.name)
        kinds = Counter(kind for ways in layers.values() if (kind := _kind(ways)))
        for kind, n in kinds.most_common():
            of = f" in {n} of {len(layers)} layers" if len(layers) > 1 else ""
            out.append(f"{kind} over {axis.name}{of}")
    return out


def _layers(plan: Plan, axis: str) -> dict[str, list[str]]:
    """How a mesh axis cuts the products with weights of each layer that has several devices along it; of a model without
    layers, of all of it."""
    rows: list[tuple[str, str]] = []
    for op, s, name, at in zip(plan.graph.ops, plan.strategies, operation_names(plan.graph), plan.places, strict=True):
        along = [d for d, a in zip(s.dims, at.mesh, strict=True) if a.name == axis and a.size > 1]
        if along and (way := _way(op, plan, along[0])):
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


def beside_one_device(report: Mapping[str, Any]) -> Iterator[str]:
    """How much faster than the best plan for one device; nothing where there is none to compare with."""
    one = next((a for a in report.get("alternatives", ()) if a["name"] == "one device"), None)
    if one and one["objective_s"] and report["objective_s"]:
        ratio = one["objective_s"] / report["objective_s"]
        fast, slow = f"{times(ratio)} times as fast as", f"{times(1 / ratio)} times as long as"
        what = "no faster than" if 0.995 <= ratio < 1.005 else fast if ratio > 1 else slow
        yield f"{what} one device ({duration(one['objective_s'])}{'' if one['fits'] else ', which does not fit'})"


def speed(build: Build, simulated: Mapping[str, Any]) -> Iterator[str]:
    """How long it takes, beside one device, and memory."""
    busiest = max(range(build.plan.devices), key=lambda d: simulated["compute_s"][d])
    computes, sends, waits = (duration(simulated[k][busiest]) for k in ("compute_s", "transfer_s", "exposed_s"))
    which = "the busiest device" if build.plan.devices > 1 else "the device"
    yield f"simulated {duration(simulated['seconds'])}; {which} computes for {computes}, sends for {sends}, waits for {waits}"
    yield from beside_one_device(build.report)
    peak = max(build.peak_bytes)
    yield f"memory: at most {human(peak)} on a device, {peak / build.memory:.1%} of {human(build.memory)}"


def plan_lines(plan: Plan) -> Iterator[str]:
    """How many devices work, where some do not; the kinds of parallelism, most frequent first."""
    lines, working = likeness(plan), sum(len(s.devices) for s in {*plan.places})
    if working < plan.devices:
        lines.insert(0, f"{working} of {plan.devices} devices work{'s' * (working == 1)}, the others are idle")
    yield from (f"plan: {line}" for line in lines[:5])
    if len(lines) > 5:
        yield f"plan: … {len(lines) - 5} more kinds of layers"
