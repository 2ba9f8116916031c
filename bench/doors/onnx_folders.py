"""Plans as ONNX: ``onnx-ranks`` run file by file with the collectives done by numpy, ``onnx-fused`` run by onnxruntime.

Each model of a folder is planned for two devices on which cutting pays, written in both formats, and what these compute is
compared with what onnxruntime computes of the model itself.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import tapestry
from tapestry.tools.exports import fused_onnx, rank_onnx
from tests.support.programs import rank_files

FAST: dict[str, Any] = {  # a machine so slow at computing, and so fast between devices, that cutting a small model pays
    "device": {"memory": "1GiB", "bandwidth": 1e6, "launch": 0, "vector": 1e6, "flops": {"f32": 1e6, "other": 1e6}},
    "levels": [{"alpha": 1e-9, "beta": 1e-9}],
}
Row = dict[str, Any]
Values = dict[str, np.ndarray[Any, Any]]
CLOSE = 1e-3  # of the largest cell of an output: float32 through some hundred operations, in another order


def rows(folder: Path, names: list[str]) -> Iterator[Row]:
    """Two rows for each model."""
    for path in sorted(folder.glob("*.onnx")):
        if names and path.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as place:
            try:
                yield from _model(path, Path(place))
            except Exception as e:  # a model that has no plan is a row too
                yield {"door": "onnx-ranks", "name": path.stem, "equal": False, "error": _said(e)}


def _model(path: Path, place: Path) -> Iterator[Row]:
    (place / "fast.json").write_text(json.dumps(FAST))
    c = tapestry.compile(path, mesh={"tp": 2}, topology=str(place / "fast.json"), stages=1)
    constants, feeds = b"".join(c.constants.values()), c.random_feeds(1)
    expected = _run(path, feeds)

    def ranks() -> Row:
        done = rank_onnx.export_ranks(c.build, constants, place / "ranks", nearest=True)
        kept = {k: done[k] for k in ("nodes", "by_kind", "bytes", "plan_bytes", "extra_bytes", "extra", "whole_inputs")}
        return kept | _compared(rank_files.run(place / "ranks", feeds), expected)

    def fused() -> Row:
        done = fused_onnx.export_fused(c.build, constants, place / "fused.onnx")
        return {k: done[k] for k in ("nodes", "operations")} | _compared(_run(place / "fused.onnx", feeds), expected)

    for door, make in (("onnx-ranks", ranks), ("onnx-fused", fused)):
        yield {"door": door, "name": path.stem, **_tried(make)}


def _tried(make: Callable[[], Row]) -> Row:
    """What comes of an export, or why nothing does."""
    try:
        return make()
    except Exception as e:
        return {"equal": False, "error": _said(e)}


def _said(e: Exception) -> str:
    return " ".join(f"{type(e).__name__}: {e}".split())[:300]


def _run(path: Path, feeds: Values) -> Values:
    """What onnxruntime computes."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    given = {i.name: feeds[i.name] for i in session.get_inputs()}
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, given), strict=True))


def _compared(found: Values, expected: Values) -> Row:
    """The farthest cell of any output, as a share of that output's largest."""
    apart = 0.0
    for name, want in expected.items():
        got = found[name].astype(np.float64)
        assert got.shape == want.shape, f"'{name}' is {got.shape}, not {want.shape}"
        apart = max(apart, float(np.abs(got - want).max(initial=0) / max(np.abs(want).max(initial=0), 1e-30)))
    return {"rel_err": apart, "equal": apart <= CLOSE}  # (a NaN is not close)


def line(row: Row) -> str:
    """A row as a line."""
    if "error" in row:
        return row["error"]
    moved = f", {row['bytes']:,} bytes moved, {row['plan_bytes']:,} by the plan" if "bytes" in row else ""
    return f"{row['rel_err']:.1e}, {row['nodes']} nodes{moved}"
