"""Every ONNX file below a folder, as it comes: planned, run on random inputs, and held against onnxruntime.

    python -m bench wild FOLDER [--devices N …] [--limit SECONDS] [--runs N] [--json]

Of unknown sizes, batches are 1, and what onnxruntime runs first is taken of some edges of images, lengths of texts and of
sounds; values follow from what an input is (pixels, samples, tokens, lengths). A row for each file and number of devices:
whether the plan's outputs are right (as `Compiled.check` judges them), or why there are none, and the wall time of a run beside
onnxruntime's, both at their defaults, in stretches with a pause between them, as in `bench cpu`. Each is a process of its own.
Writes bench/results/wild.json, where earlier rows stay; exits 1 if one is wrong or ends in a traceback (``refused`` says a
message of ours; ``unfit`` that onnxruntime does not run the file either).
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ValueInfoProto, helper
from rich.console import Console
from rich.table import Table

from bench.doors import apart
from bench.speed.cpu import TURNS, stretch
from bench.support import record
from bench.support.record import Row
from tapestry import TapestryError

EDGES = (224, 320, 48, 64, 640)  # of images
LENGTHS = (16, 64, 512, 2048)  # of texts
SAMPLES = (16000, 512, 576, 1600)  # of sounds
RATE = 16000
BATCH = re.compile(r"batch", re.IGNORECASE)
SOUND = re.compile(r"wav|audio|sound|speech|pcm|sample|signal", re.IGNORECASE)
LENGTH = re.compile(r"len", re.IGNORECASE)
SAMPLING = re.compile(r"^sr$|rate", re.IGNORECASE)
BAD = ("wrong", "traceback", "crash")
Sizes = dict[str, tuple[int, ...]]
Values = dict[str, Any]


def inputs_of(model: onnx.ModelProto) -> list[ValueInfoProto]:
    """Inputs without data of their own."""
    stored = {t.name for t in model.graph.initializer}
    return [v for v in model.graph.input if v.name not in stored]


def candidates(inputs: list[ValueInfoProto]) -> Iterator[Sizes]:
    """Sizes that may do, those that are likelier first; an unknown size has the same in all inputs that name it."""
    kinds = {_symbol(v, k): _kind(v, k) for v in inputs for k, d in enumerate(_dims(v)) if d.dim_value <= 0}
    choices = {"batch": (1,), "channel": (3, 1), "edge": EDGES, "length": LENGTHS, "sound": SAMPLES}
    used = [k for k in choices if k in kinds.values()]
    for chosen in itertools.product(*(choices[k] for k in used)):
        of = dict(zip(used, chosen, strict=True))
        yield {
            v.name: tuple(d.dim_value if d.dim_value > 0 else of[kinds[_symbol(v, k)]] for k, d in enumerate(_dims(v)))
            for v in inputs
        }


def _dims(v: ValueInfoProto) -> Any:
    return v.type.tensor_type.shape.dim


def _symbol(v: ValueInfoProto, k: int) -> str:
    name = _dims(v)[k].dim_param
    return name if name and name != "?" else f"{v.name}.{k}"


def _kind(v: ValueInfoProto, k: int) -> str:
    """What an unknown size is likely to be of."""
    rank, name = len(_dims(v)), _dims(v)[k].dim_param
    floats = v.type.tensor_type.elem_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    state = rank == 3 and k == 1 and _dims(v)[0].dim_value > 0  # of a recurrent network: layers × batch × units
    if BATCH.search(name) or (k == 0 and rank > 1) or state:
        return "batch"
    if rank == 4 and floats:
        return "channel" if k == 1 else "edge"
    if floats and rank <= 2 and (SOUND.search(v.name) or v.name == "input"):
        return "sound"
    return "batch" if rank == 1 and LENGTH.search(v.name) else "length"


def values(inputs: list[ValueInfoProto], sizes: Sizes, below: int) -> Values:
    """Random values of what inputs are; ``below``: of whole numbers that nothing is known of."""
    rng, out = np.random.default_rng(0), Values()
    longest = max((s[-1] for n, s in sizes.items() if len(s) > 1 and not LENGTH.search(n)), default=1)
    for v in inputs:
        shape, kind = sizes[v.name], v.type.tensor_type.elem_type
        if kind == onnx.TensorProto.STRING:
            out[v.name] = np.full(shape, "a word", object)
            continue
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        if dtype == np.bool_:
            a = rng.integers(0, 2, shape)
        elif dtype.kind in "iu":
            one = RATE if SAMPLING.search(v.name) else longest if LENGTH.search(v.name) else 0
            a = np.full(shape, one) if one else rng.integers(0, below, shape)
        else:
            a = rng.random(shape) if len(shape) == 4 and shape[1] in (1, 3) else 0.3 * rng.standard_normal(shape)
        out[v.name] = np.asarray(a).astype(dtype)
    return out


def fitting(path: str) -> tuple[ort.InferenceSession, Values, str]:
    """A session of onnxruntime and inputs that it runs; what it says where there are none."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        inputs, said = inputs_of(onnx.load(path, load_external_data=False)), "an input is no tensor"
        tensors = all(v.type.HasField("tensor_type") for v in inputs)
    except Exception as e:  # whatever it raises: the file is not for it
        return None, {}, _line(e)  # pyright: ignore[reportReturnType]
    for sizes, below in itertools.product(candidates(inputs) if tensors else (), (200, 20, 2)):
        feeds = values(inputs, sizes, below)
        try:
            session.run(None, feeds)
            return session, feeds, ""
        except Exception as e:
            said = _line(e)
    return session, {}, said


def _line(e: Exception) -> str:
    return " ".join(str(e).split())[:200]


def worker(case: Row) -> Row:
    """One file, in this process."""
    import tapestry

    path = case["path"]
    session, feeds, said = fitting(path)
    if said:
        return {"failed": "unfit", "error": said}
    model = onnx.load(path, load_external_data=False)
    open_ones = {v.name for v in inputs_of(model) if any(d.dim_value <= 0 for d in _dims(v))}
    shapes = {n: "x".join(map(str, a.shape)) for n, a in feeds.items() if n in open_ones}
    start = time.perf_counter()
    plan = tapestry.compile(path, shapes=shapes, devices=case["devices"], topology="cpu")
    row: Row = {
        "inputs": {n: list(a.shape) for n, a in feeds.items()},
        "seconds": time.perf_counter() - start,
        **_counted(plan),
    }
    try:
        return row | _judged(plan, session, feeds) | _timed(plan, session, feeds, case["runs"])
    except TapestryError as e:
        return row | apart.failure(e)


def _counted(plan: Any) -> Row:
    from tapestry.ir.graph import Opaque

    opaque: dict[str, int] = {}
    for op in plan.build.plan.graph.ops:
        if isinstance(op, Opaque):
            opaque[op.kind] = opaque.get(op.kind, 0) + 1
    return {"operations": len(plan.build.plan.graph.ops), "opaque": opaque}


def _judged(plan: Any, session: ort.InferenceSession, feeds: Values) -> Row:
    """Our own judgement, and the farthest output from what onnxruntime gives at its defaults."""
    checked = plan.check(feeds)
    outs, names = plan.run(feeds), [o.name for o in session.get_outputs()]
    expected = dict(zip(names, session.run(None, feeds), strict=True))
    far = {n: _far(outs[n], a) for n, a in expected.items()}
    row: Row = {"rel_err": max(far.values(), default=0.0), "reference": checked["reference"], "checked": checked["outputs"]}
    if checked["passed"]:
        return row
    why = checked.get("reason") or "; ".join(f"'{n}' is {x:.2g} off" for n, x in far.items())
    return {**row, "failed": "wrong", "error": why}


def _far(got: Any, want: Any) -> float:
    """The largest difference over the largest value; infinite for other shapes, and for other values that are no numbers."""
    a, b = np.asarray(got), np.asarray(want)
    if a.shape != b.shape or a.dtype == object or b.dtype == object:
        return 0.0 if a.shape == b.shape and (a == b).all() else float("inf")
    a, b = a.astype(np.float64), b.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    off = np.abs(a - b)[~same].max() / max(np.abs(b[np.isfinite(b)]).max(initial=0.0), 1e-30)
    return float(off) if np.isfinite(off) else float("inf")


def _timed(plan: Any, session: ort.InferenceSession, feeds: Values, runs: int) -> Row:
    mine, other = list[float](), list[float]()
    for _ in range(TURNS):
        mine += [wall for _, wall in stretch(lambda: plan.run(feeds), runs)]
        other += [wall for _, wall in stretch(lambda: session.run(None, feeds), runs)]
    ours, theirs = statistics.median(mine), statistics.median(other)
    return {"ms": ours * 1e3, "ort_ms": theirs * 1e3, "ratio": ours / theirs}


def cells(r: Row) -> list[str]:
    """A row as text."""
    opaque = ", ".join(f"{n} {k}" for k, n in sorted(r.get("opaque", {}).items()))
    said = f"{r['failed']}: {r['error']}" if "failed" in r else f"right, {r['rel_err']:.0e} off"
    seconds, ratio = (f"{r[k]:.{d}f}" if k in r else "" for k, d in (("seconds", 1), ("ratio", 2)))
    return [r["file"], str(r["devices"]), str(r.get("operations", "")), opaque, seconds, ratio, said]


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 3], metavar="N")
    parser.add_argument("--limit", type=float, default=180, metavar="SECONDS", help="of a file on so many devices")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return apart.answer(worker, args.worker)
    if args.folder is None or not (files := sorted(args.folder.rglob("*.onnx"))):
        parser.error(f"no .onnx file below {args.folder}")
    rows: list[Row] = []
    for path, n in itertools.product(files, args.devices):
        case = {"path": str(path.resolve()), "devices": n, "runs": args.runs}
        row = {"file": str(path.relative_to(args.folder)), "devices": n, **apart.measured("wild", case, args.limit)}
        rows.append(row)
        if not args.json:
            print(*(c for c in cells(row) if c), sep="  ", flush=True)
        record.write("wild", record.merged("wild", [row], ("file", "devices")))
    _show(rows, as_json=args.json)
    return int(any(r.get("failed") in BAD for r in rows))


def _show(rows: list[Row], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(
        "file", "devices", "operations", "opaque", "compile, s", "ratio", "", title="files as they come", title_justify="left"
    )
    for r in rows:
        table.add_row(*cells(r))
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)
    print(f"{sum('failed' not in r for r in rows)} of {len(rows)} are right; bench/results/wild.json")


if __name__ == "__main__":
    sys.exit(main())
