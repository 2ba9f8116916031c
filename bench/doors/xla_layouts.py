"""Plans given to XLA as ``jax`` says them: a constraint for every tensor of the graph.

The graphs of `bench communication`, planned for 8 devices; JAX compiles them with the plan's layouts, and the bytes of the
collectives in the compiled HLO are compared with those that the plan moves. XLA's pipeline for CPU forms no reduce-scatter, so
that ``without_scatter`` counts an all-reduce for each of the plan's: twice its bytes. A row is equal with either.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

import tapestry
from bench.planning import xla
from bench.planning.partitioner_cases import Case, all_cases
from tapestry.ir.plan import Layout
from tapestry.tools.exports import layouts

Row = dict[str, Any]
TWICE = {"reduce_scatter": 2}
CLOSE = 1e-3


def planned(name: str, case: Case, folder: Path) -> tuple[Row, Row]:
    """What the plan moves, and what JAX is to compile: the graph with the plan's layouts."""
    path = folder / "case.onnx"
    onnx.save(case.model(), path)
    mesh = "x".join(map(str, case.mesh))
    c = tapestry.compile(path, mesh=mesh, layouts=case.texts(), topology="a100-pcie", weights=False, stages=1)
    graph = c.build.plan.graph

    def said(layout: Layout) -> dict[str, list[str]]:
        axes = [a.name for a in c.build.plan.mesh]
        return {str(k): [a for a, j in zip(axes, layout, strict=True) if j == k] for k in layout if k is not None}

    placed = layouts.places(c.build, "jax", nearest_will_do=True)
    ends = {t: at for t, at in placed.first.items() if t in case.inputs} | placed.last
    made = {o for n in case.nodes for o in n.output}
    inner = {t: said(at) for t, at in placed.first.items() if t in made}
    reads = dict[str, dict[str, Any]]()
    for (k, t), at in placed.reads.items():
        for n in (n for n in case.nodes if n.name in graph.ops[k].source and t in n.input):
            reads.setdefault(n.output[0], {})[t] = said(at)
    moved = c.report["transfers"]
    row = {
        "name": name, "plan_bytes": sum(t["bytes"] for t in moved), "moved": [[t["kind"], t["bytes"]] for t in moved],
        "without_scatter": sum(t["bytes"] * TWICE.get(t["kind"], 1) for t in moved),
        "extra_bytes": sum(placed.extra.values()),
        "not_the_models": [t for op in graph.ops for t in op.outs if t not in made],
    }  # fmt: skip
    given = case.document(f"{name}, jax") | {"layouts": {t: said(at) for t, at in ends.items()}, "inner": inner, "reads": reads}
    return row, given


def rows(python: str, names: list[str]) -> list[Row]:
    """A row for each graph."""
    found, given = list[Row](), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        for name, case in all_cases().items():
            if names and name not in names:
                continue
            row, laid_out = planned(name, case, Path(folder))
            found.append(row)
            given.append(laid_out)
    done = xla.measure(given, python)["cases"]
    out = list[Row]()
    for row in found:
        peer = done[f"{row['name']}, jax"]
        moved = Counter[str]()
        for c in peer["collectives"]:
            moved[c["kind"]] += c["bytes"]
        same = any(abs(peer["bytes"] - n) <= CLOSE * max(n, 1) for n in (row["plan_bytes"], row["without_scatter"]))
        out.append({"door": "jax", **row, "xla_bytes": peer["bytes"], "xla_moved": sorted(moved.items()), "equal": same})
    return out


def line(row: Row) -> str:
    """A row as a line."""

    def kinds(moved: Sequence[tuple[str, int]]) -> str:
        return ", ".join(f"{kind} {n:,}" for kind, n in moved) or "nothing"

    extra = f"; {row['extra_bytes']:,} bytes more are held" if row["extra_bytes"] else ""
    return f"plan: {kinds(row['moved'])}; XLA: {kinds(row['xla_moved'])}{extra}"
