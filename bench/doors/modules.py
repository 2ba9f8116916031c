"""A module as its user has it: imported, planned for two devices, run and taken out in every format; in f32 and in bf16.

    python -m bench doors --modules [NAME ...] [--module PACKAGE:FUNCTION ...]

Small configurations of transformers' architectures and models of torchvision (`bench.exporters.author_nets`); FUNCTION makes a
module and its inputs, (nn.Module, {name: tensor}). A row is right where

- what comes out is the module's own output: within 1e-4 of its norm, in bf16 within 3e-2 of what the module gives in f32;
- no operation is opaque that torch's optimised export does not have as a node of that kind;
- every matrix of more than 256 bytes is a weight of the plan, under a name that the module has for it (smaller ones and vectors
  take part in constant folding);
- every format is written, or refused with a reason (which is in the JSON);
- the folder that transformers saves is planned by `tapestry.from_pretrained` to the same outputs.
"""

from __future__ import annotations

import importlib
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

import tapestry
from bench.exporters.author_nets import TRANSFORMERS, Made, nets
from bench.support import record
from tapestry.errors import TapestryError
from tapestry.frontends import torch_export
from tapestry.ir.graph import Opaque
from tapestry.lift.normalize.prepare import SMALL_FLOATS
from tapestry.plugins import offered, tool
from tapestry.viz.tool_kinds import ExportFormat

CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
Inputs = dict[str, torch.Tensor]


def rows(names: list[str], more: list[str]) -> Iterator[record.Row]:
    """A row for each module and type."""
    made: dict[str, Callable[[], Made]] = {m: _named(m) for m in more} or nets()
    for name, make in made.items():
        for dtype in CLOSE if not names or name in names else ():
            torch.manual_seed(0)
            try:
                module, inputs = make()
            except ModuleNotFoundError as e:
                print(f"{name} is left out: {e}")
                break
            row = {"door": "module", "name": f"{name} {str(dtype)[6:]}", "family": TRANSFORMERS.get(name, ["other"])[0]}
            try:
                yield row | _row(module, inputs, dtype)
            except TapestryError as e:
                yield row | {"equal": False, "refused": str(e)}


def _named(place: str) -> Callable[[], Made]:
    package, _, function = place.partition(":")
    return getattr(importlib.import_module(package), function)


def _row(module: torch.nn.Module, inputs: Inputs, dtype: torch.dtype) -> dict[str, Any]:
    want = _first(module, inputs)
    module = module.to(dtype)
    inputs = {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}
    start = time.process_time()
    plan = tapestry.compile(module, inputs, devices=2, topology="cpu")
    seconds = time.process_time() - start
    graph = plan.build.plan.graph
    opaque = Counter(op.kind for op in graph.ops if isinstance(op, Opaque))
    names: dict[int, list[str]] = {}
    for n, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).extend([n] * (p.dim() > 1 and p.nbytes > SMALL_FLOATS))
    unnamed = [ns[0] for ns in names.values() if ns and not graph.weights.keys() & ns]
    error = _error(plan.run(_arrays(inputs)), want)
    checkpoint = _checkpoint(module, inputs, want) if hasattr(module, "save_pretrained") else 0.0
    beyond = _beyond(opaque, module, inputs)
    close = error <= CLOSE[dtype] and isinstance(checkpoint, float) and checkpoint <= CLOSE[dtype]
    return {
        "operations": len(graph.ops), "opaque": dict(opaque), "opaque_only_here": beyond, "unnamed": unnamed,
        "formats": _formats(plan),
        "rel_err": error, "checkpoint": checkpoint, "cpu_s": seconds, "equal": close and not beyond and not unnamed,
    }  # fmt: skip


def _first(module: torch.nn.Module, inputs: Inputs) -> np.ndarray:
    with torch.no_grad():
        given = module(**inputs)
    return (given if isinstance(given, torch.Tensor) else given[0]).float().numpy()


def _arrays(inputs: Inputs) -> dict[str, np.ndarray]:
    import ml_dtypes

    return {
        n: t.float().numpy().astype(ml_dtypes.bfloat16) if t.dtype == torch.bfloat16 else t.numpy() for n, t in inputs.items()
    }


def _error(outputs: dict[str, np.ndarray], want: np.ndarray) -> float:
    got = np.asarray(next(iter(outputs.values())), np.float32)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want)) if got.shape == want.shape else float("inf")


def _checkpoint(module: Any, inputs: Inputs, want: np.ndarray) -> float | str:
    """The error of the plan of the folder that transformers saves, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        try:
            plan = tapestry.from_pretrained(folder, example_inputs=inputs, devices=2, topology="cpu")
            return _error(plan.run(_arrays(inputs)), want)
        except TapestryError as e:
            return str(e)


def _formats(plan: Any) -> dict[str, str]:
    """For each format: "written", or why not."""
    out: dict[str, str] = {}
    for form in offered(ExportFormat):
        with tempfile.TemporaryDirectory() as folder:
            try:
                plan.export(Path(folder) / "out", form, nearest=tool(ExportFormat, form).nearest, copy_data=form == "onnx")
                out[form] = "written"
            except TapestryError as e:
                out[form] = str(e)
    return out


def _beyond(opaque: Counter[str], module: torch.nn.Module, inputs: Inputs) -> dict[str, int]:
    """Opaque operations of kinds of which torch's optimised export has fewer nodes."""
    if not opaque:
        return {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "optimised.onnx"
        torch.onnx.export(torch_export.exported(module, inputs), f=str(path), dynamo=True, optimize=True, verbose=False)
        there = Counter(n.op_type for n in onnx.load(path, load_external_data=False).graph.node)
    return dict(opaque - there)


def line(row: record.Row) -> str:
    """A row as a line."""
    if "refused" in row:
        return f"refused: {row['refused']}".replace("\n", " ")
    kept = [f for f, said in row["formats"].items() if said != "written"]
    checkpoint = row["checkpoint"]
    parts = [
        f"{row['operations']} operations, {sum(row['opaque'].values())} opaque",
        f"rel. error {row['rel_err']:.1e}",
        f"checkpoint {checkpoint:.1e}" if isinstance(checkpoint, float) else f"checkpoint refused: {checkpoint}",
        f"{len(row['formats']) - len(kept)} of {len(row['formats'])} formats" + (f" (not {', '.join(kept)})" if kept else ""),
        *(f"{what.replace('_', ' ')}: {row[what]}" for what in ("opaque_only_here", "unnamed") if row[what]),
    ]
    return "; ".join(parts).replace("\n", " ")
