"""What a plan is like, in a few lines: how long it takes, what of that is communication, and what its layers cut.

The kind of parallelism is read off the strategies themselves. A product with a weight is cut along the weight's own output
(by columns), along what it sums over (by rows), or along an axis that it only carries. Which axis that is follows from the
graph, as every dimension is traced back to the axes of the inputs that it runs along: one that exponential weights are summed
over (attention's keys) has tokens, one on which windows lie is space, the first axis of an input is its batch, and any other
one is a sequence, too. Where several are one axis (rows and tokens as one), the batch is cut first, if it has enough rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tapestry.build.store import Build
from tapestry.ir.graph import Block, Graph, Op, reduced_names
from tapestry.ir.index import dims_of
from tapestry.ir.plan import Plan
from tapestry.ir.provenance import operation_names
from tapestry.ir.recognition.contraction import only_sums
from tapestry.ir.recognition.exponential import exponential
from tapestry.ir.recognition.input_axes import NONE, input_axes
from tapestry.viz.format import duration, human, layer_of, times

NAMES = {
    "columns": "column parallel", "rows": "row parallel", "data": "data parallel", "sequence": "sequence parallel",
    "space": "spatial parallel", "other": "parallel over an axis of no input", "whole": "replicated",
}  # fmt: skip


def likeness(plan: Plan) -> list[str]:
    """What kind of plan it is along each mesh axis: ``Megatron tensor parallel over tp in 31 of 32 layers``."""
    out: list[str] = []
    carried, sources = _carried(plan.graph), _sources(plan.graph)
    for axis in plan.mesh:
        layers = _layers(plan, axis.name, carried)
        for kind, n in Counter(_kind(ways, sources) for ways in layers.values()).most_common():
            of = f" in {n} of {len(layers)} layers" if len(layers) > 1 else ""
            out.append(f"{kind} over {axis.name}{of}")
    return out


def _layers(plan: Plan, axis: str, carried: Callable[[int, str, int], str]) -> dict[str, dict[int, str]]:
    """How a mesh axis cuts the products with weights of each layer that has several devices along it; of a model without
    layers, of all of it."""
    layers: dict[str, dict[int, str]] = {}
    for i, (s, name, at) in enumerate(zip(plan.strategies, operation_names(plan.graph), plan.places, strict=True)):
        cuts = [(d, a.size) for d, a in zip(s.dims, at.mesh, strict=True) if a.name == axis and a.size > 1]
        if cuts and (weight := _weight(plan.graph.ops[i], plan.graph)):
            cut, parts = cuts[0]
            own = cut in weight and ("columns" if cut in {d.name for d in plan.graph.ops[i].dims} else "rows")
            layers.setdefault(layer_of(name), {})[i] = "whole" if cut is None else own or carried(i, cut, parts)
    return {layer: ways for layer, ways in layers.items() if layer or len(layers) == 1}


def _weight(op: Op, graph: Graph) -> frozenset[str]:
    """The dimensions of the weight that an operation is a product with; none where it is no such product."""
    if not isinstance(op, Block) or not only_sums(op.monoid):
        return frozenset[str]()
    weights = [r for r in op.reads if r.tensor in graph.weights and graph.weights[r.tensor].file and len(r.index) > 1]
    summed = {d.name for d in op.reduce}
    read = [frozenset[str]().union(*map(dims_of, r.index)) for r in weights]
    return next((dims for dims in read if dims & summed and dims - summed), frozenset[str]())


def _carried(graph: Graph) -> Callable[[int, str, int], str]:
    """What a dimension of an operation is that a product with a weight only carries, and that is cut into parts."""
    runs, tokens, windows = input_axes(graph), set[tuple[str, int]](), set[tuple[str, int]]()
    for op, along in zip(graph.ops, runs, strict=True):
        summed = reduced_names(op)
        if isinstance(op, Block) and exponential(op.monoid):
            tokens.update(*(along.get(d, ()) for d in summed))
        for dims in (dims_of(index) for r in op.reads for index in r.index) if isinstance(op, Block) else ():
            own, theirs = ({a for d in ds for a in along.get(d, ())} for ds in (dims & summed, dims - summed))
            windows |= own & theirs

    def kind(op: int, cut: str, parts: int) -> str:
        axes = runs[op].get(cut, NONE)
        if any(k == 0 and (t, k) not in tokens | windows and graph.tensors[t].shape[0] >= parts for t, k in axes):
            return "data"
        return "other" if not axes else "space" if axes & windows - tokens else "sequence"

    return kind


def _sources(graph: Graph) -> list[set[int]]:
    """For each operation: the products with weights that what it multiplies or sums was made of, and no other product since."""
    of: dict[str, set[int]] = {}
    out: list[set[int]] = []
    for i, op in enumerate(graph.ops):
        product = bool(_weight(op, graph))
        reads = [op.reads[k].tensor for k in op.body_reads()] if product and isinstance(op, Block) else op.inputs
        out.append(set[int]().union(*(of.get(t, ()) for t in reads)))
        of |= dict.fromkeys(op.outs, {i} if product else out[-1])
    return out


def _kind(ways: dict[int, str], sources: list[set[int]]) -> str:
    """What one layer is called in the field. Megatron-LM cuts pairs: what columns give, and nothing else, is summed by rows."""
    found = set(ways.values())
    if len(found) == 1:
        return NAMES[found.pop()]
    ends = {(ways.get(i, ""), way) for k, way in ways.items() for i in sources[k] or {-1}}
    gathered = ("columns", "columns") in ends
    if found == {"columns", "rows"} and {a for a, b in ends if b == "rows"} == {"columns"} and not gathered:
        return "Megatron tensor parallel"
    return "mixed (" + ", ".join(sorted(found)) + ")"


def beside_one_device(report: Mapping[str, Any]) -> Iterator[str]:
    """How much faster than the best plan for one device; nothing where there is none to compare with."""
    one = report.get("one_device")
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
    if before := build.report.get("waited_s"):
        yield f"operations next to transfers are run in parts; whole, it waited for {duration(before)}"
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
