"""``tapestry doctor``: what of a model can be split, what is opaque and why, what is unbound, what is unsupported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tapestry.errors import some
from tapestry.ir.graph import Graph, Op, Opaque, reduced_names
from tapestry.lift.examine import Examined
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.splitting.split import splittable
from tapestry.viz.format import together

Document = dict[str, Any]
SHOWN = 12  # rows of a long list on a terminal


def dump_document(model: Path, examined: Examined) -> Document:
    """Everything as data."""
    graph = simplify(examined.lifted.graph) if examined.lifted is not None else None
    problems = [{"where": e.where, "what": e.what, "why": e.why, "hint": e.hint} for e in examined.problems]
    return {
        "model": str(model),
        "nodes": examined.nodes,
        "opset": examined.opset,
        "inputs": dict(examined.inputs),
        "bound": dict(examined.bound),
        "unbound": _unbound(examined),
        "unsupported": problems,
        "operations": [] if graph is None else [_operation_row(op) for op in graph.ops],
        "host_values": {} if graph is None else {t.name: t.about for t in graph.tensors.values() if t.on_host},
        "summary": {} if graph is None else _summary(graph),
    }


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
    reduced = reduced_names(op)
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
    alike = together((o for o in facts["operations"] if o["class"] == "affine" and o["dims"]), _dims_line)
    rows = [
        f"    {dims} – {', '.join(map(_node_name, n[:3]))}{f' and {len(n) - 3} more' if len(n) > 3 else ''}"
        for dims, n in alike.items()
    ]
    yield from ["  can be split; (monoid) marks reduced dimensions:", *_first_rows(rows, all_nodes)] if rows else []


def _node_name(o: Mapping[str, Any]) -> str:
    return o["nodes"][0] if o["nodes"] else o["output"]


def _dims_line(o: Mapping[str, Any]) -> str:
    if not o["dims"]:
        return "no dimension can be split"
    return ", ".join(f"{d['name']}:{d['size']}{' (monoid)' if d['kind'] == 'monoid' else ''}" for d in o["dims"])


def _first_rows(rows: list[str], everything: bool) -> list[str]:
    return rows if everything or len(rows) <= SHOWN else [*rows[:SHOWN], f"    … and {len(rows) - SHOWN} more (-v)"]
