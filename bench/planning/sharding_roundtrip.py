"""ONNX's multi-device annotations: export → check → compile again for whole models, wrong annotations, and bytes of tilings.

.venv/bin/python -m bench sharding_roundtrip [MODEL …]      light models, by name
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

import tapestry
from bench.support.record import WORK, Row, write
from examples import light
from tapestry.interop.tile_changes import exact, naive
from tapestry.interop.tile_patterns import parse
from tapestry.sharding.check_sharding import check_file
from tapestry.sharding.export_sharding import export
from tests.support.faults import sharding_faults

MODELS = ("squeezenet", "resnet50", "shufflenet")
TILINGS = [
    ("broadcast, then tile", (1024, 1024), "{1:0}", "{4,1}"),
    ("all-gather", (1024, 1024), "{4,1}", "{1:0,1,2,3}"),
    ("rows to columns", (1024, 1024), "{4,1}", "{1,4}"),
    ("rows to rows on other instances", (1024, 1024), "{4,1}", "{4,1:1,2,3,0}"),
    ("2 parts to 4", (1024, 1024), "{2,1}", "{4,1}"),
    ("3-D", (30, 64, 64), "{3,2,1:5,4,3,2,1,0}", "{1,2,3:0,1,2,3,4,5}"),
    ("uneven", (7, 4), "{5,1:3,2,4,1,0}", "{1,4}"),
]
CONSOLE = Console(highlight=False, width=200)


def round_trip(name: str, mesh: str) -> Row:
    """One model on one mesh."""
    source = light.write(name, WORK / "sharding")
    target = source.with_suffix(f".{mesh}.sharded.onnx")
    before = tapestry.compile(source, mesh=mesh)
    start = time.perf_counter()
    done = export(before.build, target)
    exported = time.perf_counter() - start
    start = time.perf_counter()
    found = check_file(target)
    checked = time.perf_counter() - start
    onnx.checker.check_model(str(target))
    runs = _runs(target)
    after = tapestry.compile(target)
    a, b = before.build.plan, after.build.plan
    given, seconds = after.report["requests"]["sharding"], [x.report["seconds"]["total"] for x in (before, after)]
    return {
        "model": name, "mesh": mesh, "specs": done["specs"], "partial": done["partial"],
        "cut": sum(d is not None for s in a.strategies for d in s.dims),
        "errors": sum(f.level == "error" for f in found), "warnings": sum(f.level != "error" for f in found),
        "onnxruntime": runs, "same_placements": a.strategies == b.strategies and a.graph.ops == b.graph.ops,
        "same_program": before.build.program == after.build.program, "notes": len(given["notes"]),
        "seconds": {"export": exported, "check": checked, "compile": seconds[0], "again": seconds[1]},
    }  # fmt: skip


def _runs(path: Path) -> bool:
    import onnxruntime as ort

    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = session.get_inputs()[0]
    return bool(np.isfinite(session.run(None, {x.name: np.ones(x.shape, np.float32)})[0]).all())


def faults() -> list[Row]:
    """Every wrong annotation with the message that it gets."""
    rows: list[Row] = []
    path = WORK / "fault.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    for what, code, change in sharding_faults.FAULTS:
        m = sharding_faults.model()
        change(m)
        path.write_bytes(m.SerializeToString())
        found = next((f for f in check_file(path) if f.level == "error" and f.code == code), None)
        try:
            onnx.checker.check_model(m)
            peer = "accepts"
        except Exception:
            peer = "refuses"
        rows.append({"fault": what, "code": code, "refused": found is not None, "message": str(found), "onnx.checker": peer})
    return rows


def tilings() -> list[Row]:
    """Bytes that a change of tiling moves, float32."""
    rows: list[Row] = []
    for what, shape, before, after in TILINGS:
        a, b = parse(before), parse(after)
        slow, fast = naive(a, b, shape), exact(a, b, shape)
        sizes = {"naive_bytes": 4 * slow.cells(), "exact_bytes": 4 * fast.cells()}
        rows.append({"case": what, "from": before, "to": after, "naive": slow.kind, **sizes})
    return rows


def show(title: str, rows: list[Row]) -> None:
    """Rows as a table."""
    table = Table(title=title, title_justify="left")
    for k in rows[0]:
        table.add_column(k, overflow="fold")
    for r in rows:
        table.add_row(*(_text(v) for v in r.values()))
    CONSOLE.print(table)


def _text(v: object) -> str:
    if isinstance(v, dict):
        return ", ".join(f"{k} {x:.2f}" for k, x in v.items())
    return f"{v:,}" if isinstance(v, int) and not isinstance(v, bool) else str(v)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="of onnx's light models; all that are listed without")
    trips = [round_trip(name, mesh) for name in parser.parse_args().models or MODELS for mesh in ("4", "2x4")]
    show("Round trip: compile → export → check-sharding → compile", trips)
    wrong, moved = faults(), tilings()
    show(f"Wrong annotations: {sum(r['refused'] for r in wrong)} of {len(wrong)} refused", wrong)
    show("Changes of tiling", moved)
    print(write("sharding_roundtrip", trips, faults=wrong, tilings=moved))
    good = all(r["same_placements"] and r["same_program"] and not r["errors"] and r["onnxruntime"] for r in trips)
    return 0 if good and all(r["refused"] for r in wrong) else 1


if __name__ == "__main__":
    sys.exit(main())
