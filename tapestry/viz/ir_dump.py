"""The IR between two passes: as text that `ir.syntax.parser` reads back, and as sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import onnx.printer

from tapestry.errors import some
from tapestry.ir.graph import Graph, Op, Opaque
from tapestry.ir.plan import Plan
from tapestry.ir.program import Program, Reduce, Transfer, peak_bytes, transfer_bytes
from tapestry.ir.syntax.printer import to_text
from tapestry.lift.examine import Examined
from tapestry.lift.normalize.prepare import Prepared
from tapestry.lift.onnx_to_graph import Lifted, ModelSource
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.plan.search.problem import Problem
from tapestry.plan.search_passes import Candidate, Form
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.split import splittable
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
            return _program_sizes(value.plan, value.program)
        case list():
            problems = [p for p in cast("list[object]", value) if isinstance(p, Problem)]
            return {"strategies": sum(sum(p.sizes) for p in problems), "topologies": len(problems)} if problems else {}
        case dict():
            return _table_sizes(list(cast("dict[str, object]", value).values()))
        case _:
            return {}


def _table_sizes(rows: Sequence[object]) -> Sizes:
    """Of kernels how many and how long, of laws how many checks."""
    texts, counts = [r for r in rows if isinstance(r, str)], [r for r in rows if isinstance(r, int)]
    return {"kernels": len(texts), "bytes": sum(map(len, texts))} if texts else {"checks": sum(counts)} if counts else {}


def _program_sizes(plan: Plan, program: Program) -> Sizes:
    wire = sum(transfer_bytes(s, program) for s in program.steps if isinstance(s, Transfer | Reduce))
    return {"devices": plan.devices, "steps": len(program.steps), "wire_bytes": wire, "peak_bytes": max(peak_bytes(program)[0])}


# ``tapestry doctor``: what of a model can be split, what is opaque and why, what is unbound, what is unsupported.


Document = dict[str, Any]
SHOWN = 12  # rows of a long list on a terminal


def dump_document(model: Path, examined: Examined) -> Document:
    """Everything as data."""
    graph = simplify(examined.lifted.graph) if examined.lifted is not None else None
    problems = [{"where": e.where, "what": e.what, "why": e.why, "hint": e.hint} for e in examined.problems]
    return {
        "model": str(model), "nodes": examined.nodes, "opset": examined.opset, "inputs": dict(examined.inputs),
        "bound": dict(examined.bound), "unbound": _unbound(examined), "unsupported": problems,
        "operations": [] if graph is None else [_operation_row(op) for op in graph.ops],
        "host_values": {} if graph is None else {t.name: t.about for t in graph.tensors.values() if t.on_host},
        "summary": {} if graph is None else _summary(graph),
    }  # fmt: skip


def _unbound(examined: Examined) -> list[Document]:
    """Symbols without a size: where they stand, and how to bind them."""
    rows: list[Document] = []
    for symbol, size in examined.assumed.items():
        places = [f"{n}[{a}]" for n, dims in examined.inputs.items() for a, d in enumerate(dims) if d == symbol]
        name = places[0].rpartition("[")[0]
        shape = "x".join(str(size) if isinstance(d, str) else str(d) for d in examined.inputs[name])
        bind = f"--shape {name}={shape}" if "[" in symbol else f"--shape {symbol}={size}"
        rows.append({"symbol": symbol, "where": places, "assumed": size, "bind": bind})
    return rows


def _operation_row(op: Op) -> Document:
    reduced = set[str]() if isinstance(op, Opaque) else {d.name for d in op.reduce}
    dims = [{"name": d.name, "size": d.size, "kind": "monoid" if d.name in reduced else "map"} for d in splittable(op)]
    row: Document = {"output": op.outs[0], "nodes": list(op.source), "class": _class(op), "dims": dims}
    return {**row, "operator": op.kind, "why": op.why} if isinstance(op, Opaque) else row


def _class(op: Op) -> str:
    if not isinstance(op, Opaque):
        return "affine"
    return "partly" if op.dims else "opaque"


def _summary(graph: Graph) -> dict[str, int]:
    counts = Counter(_class(op) for op in graph.ops)
    can = sum(bool(splittable(op)) for op in graph.ops)
    return {"operations": len(graph.ops), **{k: counts[k] for k in ("affine", "partly", "opaque")}, "splittable": can}


def dump_text(facts: Mapping[str, Any], *, all_nodes: bool = False) -> str:
    """The document as a person reads it."""
    return "\n".join(_lines(facts, all_nodes)) + "\n"


def _lines(facts: Mapping[str, Any], all_nodes: bool) -> Iterator[str]:
    yield f"{facts['model']}: {some(facts['nodes'], 'node')}, opset {facts['opset']}"
    for row in facts["unbound"]:
        places = ", ".join(row["where"])
        yield f"  unbound: {row['symbol']} in {places}; bind it with {row['bind']} (taken as {row['assumed']} here)"
    for row in facts["unsupported"]:
        yield f"  unsupported: {row['where']}: {row['what']}" if row["where"] else f"  unsupported: {row['what']}"
        yield from (f"    {k}: {v}" for k, v in (("because", row["why"]), ("try", row["hint"])) if v)
    if not facts["summary"]:
        yield "  fix these first: only then can splitting be examined"
        return
    s = facts["summary"]
    counts = ", ".join(f"{s[k]} {k}" for k in ("affine", "partly", "opaque"))
    yield f"  {some(s['operations'], 'operation')}: {counts}; {s['splittable']} can be split"
    opaque = [o for o in facts["operations"] if o["class"] != "affine"]
    if opaque:
        yield f"  not affine, run on onnxruntime or the ONNX reference: {len(opaque) / s['operations']:.0%} of the operations"
        yield from _first_rows(
            [f"    {_node_name(o)} ({o['operator']}): {o['why']}; {_dims_line(o)}" for o in opaque], all_nodes
        )
    for p in facts.get("plugins", ()):
        yield f"  plug-in: '{p['name']}' (tapestry.{p['kind']}) of {p['package']} {p['version']}"
    if facts["host_values"]:
        yield "  kept on the host, as the size is known only at run time:"
        yield from _first_rows([f"    {name}: {about}" for name, about in facts["host_values"].items()], all_nodes)
    alike: dict[str, list[str]] = {}
    for o in facts["operations"]:
        if o["class"] == "affine" and o["dims"]:
            alike.setdefault(_dims_line(o), []).append(_node_name(o))
    rows = [f"    {dims} – {', '.join(n[:3])}{f' and {len(n) - 3} more' if len(n) > 3 else ''}" for dims, n in alike.items()]
    yield from ["  can be split; (monoid) marks reduced dimensions:", *_first_rows(rows, all_nodes)] if rows else []


def _node_name(o: Mapping[str, Any]) -> str:
    return o["nodes"][0] if o["nodes"] else o["output"]


def _dims_line(o: Mapping[str, Any]) -> str:
    if not o["dims"]:
        return "no dimension can be split"
    return ", ".join(f"{d['name']}:{d['size']}{' (monoid)' if d['kind'] == 'monoid' else ''}" for d in o["dims"])


def _first_rows(rows: list[str], everything: bool) -> list[str]:
    return rows if everything or len(rows) <= SHOWN else [*rows[:SHOWN], f"    … and {len(rows) - SHOWN} more (-v)"]
