"""Models of an outside generator (nnsmith) under random plans: whether any goes wrong.

    .venv/bin/python -m bench outside_models --folder DIR [--seed S] [--first N] [--count N] [--minutes M]

Every .onnx file of the folder, and the same in float64, gets inputs of its own and a recipe of the fuzzer (mesh, moves,
strategies, way of running). Its outputs are judged as a fuzz case's are: exact ones exactly, floats to what noise in the last
places explains (`tests.fuzz.trial.judge`); then it runs again with infinities and NaNs in its inputs, against the
interpreter of the lifted graph (`tests.fuzz.awkward`). Counted apart: ``rounding``, a value that noise in the last places
moves as far as ours is off; ``not finite``, a model whose outputs are infinite or NaN already, which the second run alone
judges; ``unfit``, a model that onnxruntime does not run. Writes bench/results/outside_models.json as it goes, and a later call
with the same seed goes on where that ends; exits 1 where a value is wrong.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bench.support import record
from tests.fuzz import awkward
from tests.fuzz.generate.evaluate import Array, Unfit, replay
from tests.fuzz.generate.random_model import Model
from tests.fuzz.recipe import random_recipe
from tests.fuzz.trial import Failure, Prepared, Refused, attempt, prepare

DOUBLE = {TensorProto.FLOAT: TensorProto.DOUBLE}
RIGHT = ("right", "unfit", "refused", "rounding", "not finite")
EVERY = 20.0  # seconds after which what was found is written


def widened(model: ModelProto) -> ModelProto:
    """The model with float64 for every float32."""
    out = ModelProto()
    out.CopyFrom(model)
    for t in out.graph.initializer:
        if t.data_type == TensorProto.FLOAT:
            t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t).astype(np.float64), t.name))
    for v in (*out.graph.input, *out.graph.output):
        kind = v.type.tensor_type
        kind.elem_type = DOUBLE.get(kind.elem_type, kind.elem_type)
    del out.graph.value_info[:]
    for n in out.graph.node:
        for a in n.attribute:
            if n.op_type == "Cast" and a.name == "to":
                a.i = DOUBLE.get(a.i, a.i)
            elif a.type == onnx.AttributeProto.TENSOR and a.t.data_type == TensorProto.FLOAT:
                a.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(a.t).astype(np.float64), a.t.name))
    return out


def values(shape: list[int], dtype: np.dtype[Any], rng: np.random.Generator) -> Array:
    """Random values of an input."""
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    return (rng.integers(0, 6, shape) if dtype.kind in "iu" else rng.uniform(-2, 2, shape)).astype(dtype)


def subject(proto: ModelProto, rng: np.random.Generator) -> Model:
    """A model with inputs, and outputs as onnxruntime finds them without optimisations, node by node.

    Raises:
        Unfit: it runs none of them.
    """
    weights = {t.name: np.array(numpy_helper.to_array(t)) for t in proto.graph.initializer}
    inputs: dict[str, Array] = {}
    for i in proto.graph.input:
        if i.name not in weights:
            kind = i.type.tensor_type
            shape = [d.dim_value for d in kind.shape.dim]
            inputs[i.name] = values(shape, helper.tensor_dtype_to_np_dtype(kind.elem_type), rng)
    opset = next(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
    nodes = tuple(proto.graph.node)
    found = replay(nodes, {**inputs, **weights}, opset)
    outputs = {o.name: found[o.name] for o in proto.graph.output}
    return Model(nodes=nodes, inputs=inputs, weights=weights, outputs=outputs, exact=frozenset(), opset=opset)


def judged(name: str, proto: ModelProto, seed: int, folder: Path) -> tuple[str, str]:
    """``right``, ``unfit``, ``refused``, or what failed, with its detail."""
    rng = random.Random(f"{seed} {name}")
    try:
        prepared = prepare(subject(proto, np.random.default_rng([seed, len(name)])), folder / "model.onnx")
    except (Unfit, ValueError) as e:
        return "unfit", str(e)[:120]
    except Refused as e:
        return "refused", e.message[:120]
    if isinstance(prepared, Failure):
        return f"{prepared.kind}: {prepared.what}", prepared.detail[-600:]
    recipe = random_recipe(prepared.lifted.graph, rng)[0]
    recipe = replace(recipe, via="strategies" if recipe.via in ("processes", "build") else recipe.via)
    recipe = replace(recipe, cells=awkward.draw(prepared.lifted.graph, rng))
    failed = attempt(prepared, recipe)
    if failed and failed.what == "exact values" and (policy := by_interpreter(prepared)):
        failed = attempt(policy, recipe)
        if not failed:
            return "not finite", "a NaN on the way: whole numbers behind it are the lifted graph's, by the interpreter"
    if failed:
        return f"{failed.kind}: {failed.what}", failed.detail[-600:]
    moved = [r.spread for r in prepared.referee.values()]  # asked only where a value was farther off than its type allows
    if prepared.free.total():
        return "not finite", "noise makes cells of an output infinite, NaN or finite"
    if prepared.turned:
        return "rounding", f"noise in the last places turns {', '.join(prepared.turned)}, a whole number behind a float"
    return ("rounding", f"noise moves it by {max(moved):.3g}") if moved else ("right", "")


def by_interpreter(p: Prepared) -> Prepared | None:
    """The model with results that are no floats as the interpreter of its lifted graph has them, where a NaN is on the way:
    what the place of a maximum is then is a policy (docs/decisions.md). None where there is no NaN."""
    found = replay(p.model.nodes, p.model.given, p.model.opset)
    if not any(a.dtype.kind == "f" and np.isnan(a).any() for a in found.values()):
        return None
    values = awkward.wanted(p.lifted.graph, {**p.model.inputs, **p.data})
    outputs = {t: a if a.dtype.kind == "f" else values[t][0] for t, a in p.model.outputs.items()}
    return replace(p, model=replace(p.model, outputs=outputs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--again", action="store_true", help="also what the results have already")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    end, kept = time.monotonic() + 60 * args.minutes, time.monotonic()
    series = series_of(args.seed, args.again)
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(args.folder.glob("*.onnx"))[args.first :][: args.count]:
            if time.monotonic() > end:
                break
            if path.name in series.done:
                continue
            asked(path, args.seed, Path(folder), series)
            if time.monotonic() > kept + EVERY:
                keep(series, args.seed)
                kept = time.monotonic()
    keep(series, args.seed)
    wrong = [r for r in series.rows if r["verdict"] not in RIGHT]
    for r in wrong:
        print(r)
    print(len(series.done), "models", dict(series.counts))
    return int(bool(wrong))


@dataclass(slots=True)
class Series:
    """What is known: names of models, counts of verdicts, and a row for each that is not ``right``."""

    done: set[str] = field(default_factory=set[str])
    counts: Counter[str] = field(default_factory=Counter[str])
    rows: list[record.Row] = field(default_factory=list[record.Row])


def series_of(seed: int, again: bool) -> Series:
    """What earlier calls with this seed found."""
    done = record.read_more("outside_models", "done", "")
    if again or not done or record.read_more("outside_models", "seed", 0) != seed:  # (of what, without names, is not known)
        return Series()
    counts = record.read_more("outside_models", "counts", dict[str, int]())
    names = (n.strip() for n in re.findall(r"[^/]+?\.onnx(?=[/ ]|$)", done))  # earlier files have spaces between them
    return Series(set(names), Counter(counts), record.read("outside_models"))


def keep(series: Series, seed: int) -> None:
    """Write down what is known."""
    record.write("outside_models", series.rows, counts=dict(series.counts), seed=seed, done="/".join(sorted(series.done)))


def asked(path: Path, seed: int, folder: Path, series: Series) -> None:
    """One file, as it is and in float64."""
    proto = onnx.load(path)
    for kind, model in (("float32", proto), ("float64", widened(proto))):
        verdict, detail = judged(f"{path.name} {kind}", model, seed, folder)
        series.counts[f"{kind} {verdict}"] += 1
        if verdict != "right":
            series.rows.append({"model": path.name, "type": kind, "verdict": verdict, "detail": detail})
    series.done.add(path.name)


if __name__ == "__main__":
    sys.exit(main())
