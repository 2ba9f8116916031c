"""``shardy``: a StableHLO function with the plan's layouts in Shardy's words, for XLA to partition.

The mesh is ``sdy.mesh``, arguments and results have ``sdy.sharding``, and the result of every operation of the plan an
``sdy.sharding_constraint`` (github.com/openxla/shardy, sdy dialect). The function is the graph after every rewrite; its
arguments are the model's inputs and its weights, with their names as locations. Collectives are the partitioner's choice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tapestry.build.atomic import new_file
from tapestry.build.store import Build
from tapestry.exports.fused_onnx import graph_nodes
from tapestry.exports.layouts import as_partition_spec, places
from tapestry.exports.onnx_blocks.onnx_nodes import NotExpressible, live
from tapestry.exports.stablehlo_nodes import Ref, Text, body
from tapestry.exports.xla_faults import wrong_in_xla
from tapestry.ir.graph import Graph, Opaque
from tapestry.ir.naming.author_names import operation_names
from tapestry.ir.plan import Layout, Mesh
from tapestry.ir.program import Reduce, Transfer, transfer_bytes


def export(build: Build, target: Path, *, nearest: bool) -> dict[str, Any]:
    """Write the text; returns the names of the function's arguments and results, in order, and what it costs.

    Raises:
        NotExpressible: an operation has no form in StableHLO, or a tensor no layout and the nearest is not asked for.
    """
    graph, mesh = build.plan.graph, build.plan.mesh
    for op, name in zip(graph.ops, operation_names(graph), strict=True):
        if isinstance(op, Opaque):
            raise NotExpressible(f"StableHLO cannot express the opaque node {op.kind}", where=f"'{name}'", hint="onnx-ranks")
    placed = places(build, "shardy", nearest_will_do=nearest)

    def said(t: str, layout: Layout) -> str:
        return _sharding(layout, len(graph.tensors[t].shape), mesh)

    marks, ends = ({t: said(t, layout) for t, layout in some.items()} for some in (placed.first, placed.last))
    copies = {(k, t): f"{t}/{said(t, layout)}" for (k, t), layout in placed.reads.items()}
    nodes, values = graph_nodes(graph, copies)
    kept = live(nodes.nodes, [values[t].name for t in graph.outputs])
    read = {t for op in graph.ops for t in op.inputs} | set(graph.outputs)
    given = [*graph.inputs, *(t for t in graph.weights if t in read)]
    arguments = {
        t: Ref(f"%arg{k}", placed.padded.get(t, graph.tensors[t].shape), graph.tensors[t].dtype) for k, t in enumerate(given)
    }
    text = Text(nodes.constants, nodes.values, dict(arguments))
    for t in (t for t in given if t in placed.padded):
        text.held[t] = text.placed(text.slice(arguments[t], [(0, n, 1) for n in graph.tensors[t].shape]), marks[t])
    shardings = {t: s for t, s in marks.items() if t not in arguments}
    body(text, kept, shardings | {name: said(t, placed.reads[k, t]) for (k, t), name in copies.items()})
    results = {t: _filled(text, text.held[t], ends.get(t, ""), placed.padded.get(t)) for t in graph.outputs}
    with new_file(target) as path:
        path.write_text(_module(graph, mesh, text.lines, arguments, results, (marks, ends)))
    planned = sum(transfer_bytes(s, build.program) for s in build.program.steps if isinstance(s, Transfer | Reduce))
    return {
        "file": str(target), "arguments": given, "results": list(graph.outputs),
        "constraints": sum(" sdy.sharding_constraint " in line for line in text.lines), "operations": len(text.lines),
        "plan_bytes": planned, "extra_bytes": sum(placed.extra.values()), "extra": placed.extra, "padded": placed.padded,
        "wrong_in_xla": wrong_in_xla(build, placed.read),
    }  # fmt: skip


def _filled(text: Text, x: Ref, sharding: str, shape: tuple[int, ...] | None) -> Ref:
    """A result that is cut unevenly, filled up with zeros until its parts are equal."""
    if shape is None or shape == x.shape:
        return x
    more = [n - m for n, m in zip(shape, x.shape, strict=True)]
    return text.pad(text.placed(x, sharding), [0] * len(more), more, text.number(0, x.dtype))


def _sharding(layout: Layout, rank: int, mesh: Mesh) -> str:
    """``<@mesh, [{"dp", "tp"}, {}]>``: for each tensor axis the mesh axes that cut it, the major one first."""
    cut = as_partition_spec(layout, rank, mesh)
    axes = [[] if c is None else [c] if isinstance(c, str) else c for c in cut]
    return f"<@mesh, [{', '.join('{' + ', '.join(map(quoted, names)) + '}' for names in axes)}]>"


def _module(
    graph: Graph, mesh: Mesh, lines: list[str], arguments: dict[str, Ref], results: dict[str, Ref],
    shardings: tuple[dict[str, str], dict[str, str]],
) -> str:  # fmt: skip
    """The whole text; ``shardings`` are those of tensors as they begin and end."""
    marks, ends = shardings
    name, axes = quoted(graph.name or "model"), ", ".join(f"{quoted(a.name)}={a.size}" for a in mesh)
    given = [f"      {v.ssa}: {v.type}{_attribute(marks.get(t))} loc({quoted(t)})" for t, v in arguments.items()]
    ending = ", ".join(x.type + _attribute(ends.get(t)) for t, x in results.items())
    last = f"    return {', '.join(x.ssa for x in results.values())} : {', '.join(x.type for x in results.values())}"
    head = [f"module @{name} {{", f"  sdy.mesh @mesh = <[{axes}]>", "  func.func public @main("]
    return "\n".join([*head, ",\n".join(given), f"  ) -> ({ending}) {{", *lines, last, "  }", "}", ""])


def quoted(name: str) -> str:
    """A string as MLIR writes it: what is no printable ASCII by its bytes (mlir.llvm.org/docs/LangRef, string-literal)."""
    plain = (chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:02X}" for b in name.encode())
    return f'"{"".join(plain)}"'


def _attribute(sharding: str | None) -> str:
    return "" if sharding is None else f" {{sdy.sharding = #sdy.sharding{sharding}}}"
