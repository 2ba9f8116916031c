"""Plans given to XLA: ``jax`` (a constraint for every tensor of the graph) and ``shardy`` (StableHLO text).

The graphs of `bench communication`, planned for 8 devices; JAX compiles them with the plan's layouts, and the bytes of the
collectives in the compiled HLO are compared with those that the plan moves. XLA's pipeline for CPU forms no reduce-scatter, so
that ``without_scatter`` counts an all-reduce for each of the plan's: twice its bytes. A row is equal with either.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnx

import tapestry
from bench.planning import xla
from bench.planning.partitioner_cases import Case, all_cases
from tapestry.build.store import Build
from tapestry.exports import layouts, shardy
from tapestry.exports.onnx_blocks.onnx_nodes import NotExpressible
from tapestry.ir.plan import Layout

Row = dict[str, Any]
TWICE = {"reduce_scatter": 2}
CLOSE = 1e-3


def planned(name: str, case: Case, folder: Path) -> tuple[Row, list[Row]]:
    """What the plan moves, and what JAX is to compile: the graph with the plan's layouts, and the text."""
    path = folder / "case.onnx"
    onnx.save(case.model(), path)
    mesh = "x".join(map(str, case.mesh))
    c = tapestry.compile(path, mesh=mesh, layouts=case.texts(), topology="a100-pcie", weights=False, stages=1)

    def said(layout: Layout) -> dict[str, list[str]]:
        axes = [a.name for a in c.build.plan.mesh]
        return {str(k): [a for a, j in zip(axes, layout, strict=True) if j == k] for k in layout if k is not None}

    text, why = _text(c.build, folder / "case.mlir")
    placed = layouts.places(c.build, "jax", nearest_will_do=True)
    ends = {t: at for t, at in placed.first.items() if t in case.inputs} | placed.last
    made = {o for n in case.nodes for o in n.output}
    inner = {t: said(at) for t, at in placed.first.items() if t in made}
    moved = c.report["transfers"]
    row = {
        "name": name, "plan_bytes": sum(t["bytes"] for t in moved), "moved": [[t["kind"], t["bytes"]] for t in moved],
        "without_scatter": sum(t["bytes"] * TWICE.get(t["kind"], 1) for t in moved),
        "extra_bytes": sum(placed.extra.values()), "refused": why,
    }  # fmt: skip
    graph = case.document(f"{name}, jax") | {"layouts": {t: said(at) for t, at in ends.items()}, "inner": inner}
    return row, [graph, *([] if why else [{"name": f"{name}, shardy", "mesh": case.mesh, "text": text}])]


def _text(build: Build, path: Path) -> tuple[str, str]:
    """The text, or why there is none."""
    try:
        shardy.export(build, path, nearest=True)
    except NotExpressible as e:
        return "", " ".join(str(e).split())
    return path.read_text(), ""


def rows(python: str, names: list[str]) -> list[Row]:
    """A row for each graph and format."""
    found, given = list[Row](), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        for name, case in all_cases().items():
            if names and name not in names:
                continue
            row, cases = planned(name, case, Path(folder))
            found.append(row)
            given += cases
    done = xla.measure(given, python)["cases"]
    out = list[Row]()
    for row in found:
        for door in ("jax", "shardy"):
            peer = done.get(f"{row['name']}, {door}")
            if peer is None:
                out.append({"door": door, **row, "equal": False, "error": row["refused"]})
                continue
            kinds = sorted({c["kind"] for c in peer["collectives"]})
            same = any(abs(peer["bytes"] - n) <= CLOSE * max(n, 1) for n in (row["plan_bytes"], row["without_scatter"]))
            out.append({"door": door, **row, "xla_bytes": peer["bytes"], "xla_collectives": kinds, "equal": same})
    return out


def line(row: Row) -> str:
    """A row as a line."""
    if "error" in row:
        return row["error"]
    kinds = ", ".join(k for k, _ in row["moved"]) or "nothing"
    theirs = ", ".join(row["xla_collectives"]) or "nothing"
    extra = f"; {row['extra_bytes']:,} bytes more are held" if row["extra_bytes"] else ""
    return f"plan {row['plan_bytes']:,} ({kinds}), XLA {row['xla_bytes']:,} ({theirs}){extra}"
