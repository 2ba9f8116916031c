"""Reference outputs of an ONNX file: onnxruntime's, or node by node where that cannot run the model; and how far others are."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tapestry.errors import ModelError
from tapestry.ir.expr import Call, walk
from tapestry.ir.graph import Block, Graph
from tapestry.ir.types import FLOATS, Array, numpy_dtype
from tapestry.verify.model.model_values import ModelFile, ReferenceValues

# pyright: basic
# onnx comes without complete types


SPREAD_FACTOR = 4.0  # a result may be this many times as far from the exact one as onnxruntime is
SPREAD_LIMIT = 2e-2  # but not farther than this
SECONDS = 60.0  # for the exact one
NUDGE, NUDGES = 2.0**-20, 3  # relative: some roundings of float32
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}  # rel_err; what is no float exactly
UNROUNDED = frozenset({"where", "max", "min", "neg", "abs"})


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an output is from its reference: ``rel_err`` is ``‖out − ref‖ / ‖ref‖``; NaN where either has one."""

    max_abs_err: float
    rel_err: float
    passed: bool


def reference(model: Path | ModelFile, feeds: Mapping[str, Array]) -> tuple[str, dict[str, Array]]:
    """(which evaluator, outputs by name) of a model.

    Raises:
        ModelError: no evaluator runs the model.
    """
    file = ModelFile(onnx.load(model, load_external_data=False), model.parent) if isinstance(model, Path) else model
    names = [o.name for o in file.proto.graph.output]
    try:
        run = ReferenceValues(file, feeds, names)
    except Exception as e:  # the libraries raise many kinds; the message is passed on
        hint = "for operators of a domain of your own: --ops FILE"
        raise ModelError(f"no reference evaluator runs the model: {e}", where=str(file.folder), hint=hint) from None
    return run.by, {n: run.get(n) for n in names}


def exact(model: ModelFile, feeds: Mapping[str, Array], names: Sequence[str]) -> dict[str, Any]:
    """Outputs by the ONNX reference evaluator in float64; none where it does not run the model in reasonable time."""
    try:
        other = ReferenceValues(model, feeds, names, independent=True, until=time.monotonic() + SECONDS)
    except Exception:  # any failure of the second opinion leaves the first one alone
        return {}
    return {n: other.get(n) for n in names}


def sensitivity(model: ModelFile, feeds: Mapping[str, Array], expected: Mapping[str, Array]) -> dict[str, float]:
    """How far the reference's outputs move (``rel_err``) where its float inputs do by what sums of float32 round by.

    No evaluator of a model that amplifies its roundings, as one that quantises what it computes, can be held to less.
    """
    rng, out = np.random.default_rng(0), dict.fromkeys(expected, 0.0)

    def nudged(a: Any) -> Any:
        floats = isinstance(a, np.ndarray) and a.dtype in (np.float32, np.float64)
        return (a * (1 + NUDGE * rng.standard_normal(a.shape))).astype(a.dtype) if floats else a

    for _ in range(NUDGES):
        _, others = reference(model, {n: nudged(a) for n, a in feeds.items()})
        out = {n: max(e, compare_outputs(others[n], expected[n], 0.0).rel_err) for n, e in out.items()}
    return out


def settle(out: Any, ref: Any, between: Any, tolerance: float) -> tuple[bool, float]:
    """Whether an output is as good as the reference that it differs from, and how far that one is from the exact values.

    Some models amplify rounding (an encoder-decoder with unscaled scores and random weights by 10^4 and more); there no two
    correct evaluators agree to 1e-4. And onnxruntime's own functions have errors that are large beside small results.
    """
    if isinstance(between, np.ndarray) and isinstance(out, np.ndarray) and between.dtype == np.float64:
        between = between.astype(out.dtype)
    ours, theirs = compare_outputs(out, between, tolerance), compare_outputs(ref, between).rel_err
    return ours.passed or ours.rel_err <= min(SPREAD_FACTOR * theirs, SPREAD_LIMIT), theirs


def tolerances(graph: Graph) -> dict[str, float]:
    """Per tensor, the ``rel_err`` that rounding explains: of the coarsest float in which anything it depends on is computed.

    A model of bfloat16 whose logits are cast to float32 is as near to its reference as bfloat16 is. What is merely read or
    moved in a short type (a weight, an input, rows of a table) has not been rounded by anyone, and does not count.
    """
    out: dict[str, float] = {}
    for op in graph.ops:
        if isinstance(op, Block):
            calls = (x for e in (*op.point, *op.then) for x in walk(e) if isinstance(x, Call))
            dtypes = {x.dtype for x in calls if x.fn not in UNROUNDED}
        else:
            dtypes = {graph.tensors[t].dtype for t in op.outs}
        own = max((TOLERANCE.get(numpy_dtype(d).name, 0.0) for d in dtypes & FLOATS), default=0.0)
        level = max([own, *(out.get(t, 0.0) for t in op.inputs)])
        out.update((t, level) for t in op.outs)
    return out


def compare_outputs(out: Any, ref: Any, tolerance: float = 0.0) -> Difference:
    """Compare an output with its reference. A NaN never passes, an infinity only where both have the same one.

    Floats may be as far away as their type allows, or ``tolerance`` where that is more.

    Of a sequence the worst element counts, of a map the worst value, if the keys are the same; text and absent optionals
    are equal or not.
    """
    if isinstance(out, dict) and isinstance(ref, dict) and out.keys() == ref.keys():
        return compare_outputs([out[k] for k in out], [np.asarray(ref[k]) for k in out], tolerance)
    if isinstance(out, list) and isinstance(ref, list) and len(out) == len(ref):
        rows = [compare_outputs(a, b, tolerance) for a, b in zip(out, ref, strict=True)]
        return max(rows, key=lambda d: (not d.passed, d.rel_err), default=Difference(0.0, 0.0, True))
    if not isinstance(out, np.ndarray) or not isinstance(ref, np.ndarray):
        same = out is None and ref is None
        return Difference(0.0, 0.0, True) if same else Difference(float("nan"), float("nan"), False)
    if out.dtype == object or ref.dtype.kind in "OUS":
        same = out.shape == ref.shape and bool(np.all(out == ref.astype(object)))
        return Difference(0.0, 0.0, True) if same else Difference(float("nan"), float("nan"), False)
    if out.shape != ref.shape or out.dtype.name != ref.dtype.name:
        return Difference(float("nan"), float("nan"), False)
    if out.size == 0:
        return Difference(0.0, 0.0, True)
    a, b = out.astype(np.float64), ref.astype(np.float64)
    if np.isnan(a).any() or np.isnan(b).any() or not np.array_equal(np.isinf(a), np.isinf(b)):
        return Difference(float("nan"), float("nan"), False)
    same = a == b
    a, b = np.where(same, 0.0, a), np.where(same & np.isinf(b), 0.0, b)
    gap = np.where(same, 0.0, a - b)
    norm = float(np.linalg.norm(b))
    worst, total = float(np.abs(gap).max()), float(np.linalg.norm(gap))
    rel = total / norm if norm > 0 else (0.0 if total == 0 else float("inf"))
    floating = out.dtype.kind == "f" or out.dtype.name == "bfloat16"
    limit = max(TOLERANCE.get(out.dtype.name, 1e-4), tolerance)
    return Difference(worst, rel, rel <= limit if floating else total == 0)
