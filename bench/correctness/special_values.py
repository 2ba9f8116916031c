"""Every operator on awkward values: infinities, NaN, zeros of both signs, denormal and huge numbers, against two references.

    .venv/bin/python -m bench special_values [--only REGEX] [--values NAME …] [--seed S] [--share K/N] [--engines NAME …]

The cases are onnx's own of one node, each as it comes and with its parameters (sizes, axes) as constants.
A value is written into the first cell, the last, one at random and a whole row of each
floating-point input. The model runs on one device, two, four and 2x2, each under a random legal plan, and in the verifier's
interpreter; with ``--engines triton`` in generated kernels, on two devices.

Right is what onnxruntime or the ONNX reference evaluator gives, to a tolerance where both are finite; infinities and NaNs must
stand in the same cells (but where a huge number makes them, which the order of sums may do). Where neither is right, or a value
has no one meaning, `ALLOWED` says so with the reason. Writes bench/results/special_values.json; exits 1 where a value is wrong
and not allowed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import sys
import unittest
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto
from onnx.backend.test.runner import _normalize_tensor

from bench.support import onnx_suite as suite
from bench.support import record
from bench.support.random_plan import random_plan
from bench.support.record import Row
from tapestry.errors import TapestryError
from tapestry.onnx_eval.opaque_node import RANDOM
from tapestry.plan.lower import lower
from tapestry.plan.topology import parse_mesh
from tapestry.verify import interp
from tests.fuzz.trial import execute

VALUES = ("inf", "-inf", "nan", "-0", "denormal", "huge")
ENGINES = ("1", "2", "4", "2x2", "interpreter")
TOLERANCE = {"float16": 4e-3, "float32": 1e-4, "float64": 1e-7, "bfloat16": 3e-2}
ALLOWED = {
    r"(Flex)?Attention .*": "a key behind a mask is not read, so nothing in it is seen; the references add -inf to its score "
    "and multiply its value by 0, which gives NaN for an infinity",
    r"QuantizeLinear (nan|.* y_scale)": "what a NaN becomes as an integer is not defined, nor what a scale of no size does",
    r"DynamicQuantizeLinear .*": "the range of what is not finite is not defined",
    r"ConvTranspose .* W": "a weight that is not finite, times the 0 of a place without input; the references leave it out",
    r"Resize .* X": "a cell that is hit, and one between equal cells, is that cell; onnxruntime multiplies the other by 0, the "
    "evaluator has no infinities (`nan_to_num`)",
    r"OneHot .* indices": "a float index is cast to an integer, as ONNX says; the references compare it as it is",
}
"""What may differ from both references, by ``operator value input``, and why.

It is then what our own evaluator gives, or, where that is not among the engines, the same on every mesh.
"""


def number(name: str, dtype: np.dtype[Any]) -> float:
    """A value of a floating-point type."""
    given = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan, "-0": -0.0}
    if name in given:
        return given[name]
    info = ml_dtypes.finfo(dtype)
    return float(info.max) / 64 if name == "huge" else float(info.smallest_subnormal) * 3  # some of them still have a sum


def floating(a: Any) -> bool:
    """Whether a value of a case can hold an infinity."""
    return isinstance(a, np.ndarray) and a.dtype.name in TOLERANCE and a.size > 0


def changed(a: np.ndarray, name: str, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """An array with the value in its first cell, in its last, in any, and in a row."""
    value = a.dtype.type(number(name, a.dtype))
    for cell in dict.fromkeys((0, a.size - 1, int(rng.integers(a.size)))):
        out = a.copy()
        out.reshape(-1)[cell] = value
        yield out
    if a.ndim and 1 < a.shape[-1] < a.size:
        out = a.copy()
        rows = out.reshape(-1, a.shape[-1])
        rows[int(rng.integers(len(rows)))] = value
        yield out


def plain(a: Any) -> Any:
    """An array that numpy computes with: float8, bfloat16 and 4-bit numbers as float32, which holds each of them."""
    return a.astype(np.float32) if isinstance(a, np.ndarray) and a.dtype.kind == "V" else a


def same(ours: Any, theirs: Any, *, overflows: bool = False) -> bool:
    """Whether two outputs agree: non-finite cells exactly, others to a tolerance of the largest finite value.

    Below the least normal number nothing is compared: how many digits are left there depends on the order of a product.
    With ``overflows``, theirs may be anything where it is not finite: an intermediate result was too large, and which one is
    depends on the order.
    """
    if not (isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray)):
        return type(ours) is type(theirs)
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    tolerance = TOLERANCE.get(ours.dtype.name)
    ours, theirs = plain(ours), plain(theirs)
    if tolerance is None:
        return bool(np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f"))
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(b)
    if not np.isfinite(a[finite]).all() or not (overflows or np.array_equal(a[~finite], b[~finite], equal_nan=True)):
        return False
    scale = np.maximum(np.abs(b[finite]), min(1.0, np.abs(b[finite]).max(initial=0.0)))
    least = float(ml_dtypes.finfo(ours.dtype).smallest_normal) if ours.dtype.kind == "f" else 0.0
    return bool((np.abs(a[finite] - b[finite]) <= np.maximum(tolerance * scale, least)).all())


Feeds = dict[str, Any]
Runner = Callable[[Feeds], Feeds]
SIZES = ("scales", "roi")
BEYOND = 1e30  # stands for a NaN that must win


def defined(kind: str, theirs: Sequence[Runner]) -> list[Runner]:
    """What ONNX's text says where both references say otherwise, by way of them.

    A maximum with a NaN is one (both drop it; torch and numpy keep it). What is beyond an integer type is its end, whatever it
    is in 32 bits.
    """

    def of_maximum(run: Runner, feeds: Feeds) -> Feeds:
        def without(a: Any) -> Any:
            return np.where(np.isnan(a), a.dtype.type(BEYOND), a) if floating(a) else a

        def back(a: Any) -> Any:
            return np.where(a == a.dtype.type(BEYOND), a.dtype.type(np.nan), a) if floating(a) else a

        return {n: back(a) for n, a in run({n: without(a) for n, a in feeds.items()}).items()}

    def of_ends(run: Runner, feeds: Feeds) -> Feeds:
        x, *scale = feeds  # where the scale is a constant of the model, it is not far from 1
        most = np.float32(1e6) * (float(np.abs(feeds[scale[0]]).min()) if scale else 1.0)
        return run({**feeds, x: np.clip(feeds[x], -most, most).astype(feeds[x].dtype)})

    how = {"MaxPool": of_maximum, "QuantizeLinear": of_ends}.get(kind)
    return [partial(how, run) for run in theirs] if how else []


@dataclass(slots=True)
class Subject:
    """A case, compiled for every mesh, and the references that run it."""

    name: str
    kind: str
    outputs: list[str]
    feeds: Feeds
    ours: dict[str, Runner]
    theirs: list[Runner]
    held: suite.Sharded  # its files live as long as it does


def references(model: ModelProto, feeds: Feeds) -> list[Runner]:
    """Those of the two evaluators that run a model."""
    names, out = [o.name for o in model.graph.output], list[Runner]()

    def run(prepared: Any, given: Feeds) -> Feeds:
        with np.errstate(all="ignore"):
            found = prepared.run([given.get(i) for i in prepared.names])
        return dict(zip(names, (a if isinstance(a, list) else np.asarray(a) for a in found), strict=True))

    for backend in (suite.OnnxRuntime, suite.Reference):
        try:
            runner = partial(run, backend.prepare(model))
            runner(feeds)
        except Exception as e:  # a reference that cannot is no reference
            logging.debug("%s", e)
        else:
            out.append(runner)
    return out


def subject(name: str, model: ModelProto, feeds: Feeds, seed: int, engines: Sequence[str]) -> Subject:
    """A case, ready to run."""
    one = suite.Sharded(model, list(feeds.values()))
    graph, ours = one.graph, dict[str, Runner]()
    for mesh in (e for e in engines if e[0].isdigit()):
        ours[mesh] = one.under(random_plan(graph, parse_mesh(mesh), seed)).run
    if "interpreter" in engines and not any(t.on_host for t in graph.tensors.values()):
        ours["interpreter"] = lambda feeds: interp.run(graph, {**one.weights(), **feeds})
    if "triton" in engines:
        plan = random_plan(graph, parse_mesh("2"), seed)
        from tapestry.codegen.triton.run.device_target import TritonTarget

        ours["triton"] = lambda feeds: execute(plan, lower(plan), feeds, one.weights(), TritonTarget())[0]
    outputs, kind = [o.name for o in model.graph.output], model.graph.node[0].op_type
    theirs = references(model, feeds)
    return Subject(name, kind, outputs, feeds, ours, [*theirs, *defined(kind, theirs)], one)


def cases(pattern: str) -> list[Any]:
    """onnx's cases of one node whose result is known: no random numbers."""
    found = [c for c in suite.node_cases() if re.search(pattern, c.name) and not c.name.endswith("_expanded")]
    return [c for c in found if (node := suite.operator_of(c.model)) is not None and node.op_type not in RANDOM]


def fed(case: Any) -> Feeds:
    """The inputs of a case, by name."""
    names = [i.name for i in case.model.graph.input]
    return {n: _normalize_tensor(v) for n, v in zip(names, case.data_sets[0][0], strict=False)}


def forms(case: Any) -> Iterator[tuple[str, ModelProto, Feeds]]:
    """A case as it comes, and with its parameters as constants where that is another model."""
    feeds, fixed = fed(case), suite.fixed_parameters(case.model, case.data_sets[0][0])
    yield case.name, case.model, feeds
    left = [i.name for i in fixed.graph.input]
    if len(left) < len(feeds):
        yield f"{case.name}/fixed", fixed, {n: feeds[n] for n in left if n in feeds}


def judge(s: Subject, feeds: Feeds, value: str, may: str) -> str:
    """``right``, or where it is wrong; `ALLOWED` says what one that may differ from the references is held to."""
    wanted = list[Feeds]()
    for run in s.theirs:
        with contextlib.suppress(Exception):  # a reference that cannot is no reference
            wanted.append(run(feeds))
    if wanted and may and "interpreter" in s.ours:
        wanted.append(s.ours["interpreter"](feeds))
    for name, run in s.ours.items() if wanted else ():
        try:
            found = run(feeds)
        except TapestryError as e:
            return f"refused on {name}: {e}"
        if not any(all(same(found[n], w[n], overflows=value == "huge") for n in s.outputs) for w in wanted):
            if not may or name != next(iter(s.ours)):
                return f"wrong on {name}"
            wanted.append(found)
    return "right" if wanted else "no reference"


def trials(s: Subject, values: Sequence[str], seed: int, every: bool = True) -> Iterator[tuple[str, str, Feeds]]:
    """(value, input, inputs with the value somewhere in it): each input and each place in turn, or one at random per value."""
    for value in values:
        rng = np.random.default_rng([seed, zlib.crc32(f"{s.name} {value}".encode())])
        names = [n for n, a in s.feeds.items() if floating(a) and n not in SIZES]
        for n in names if every or not names else [str(rng.choice(names))]:
            places = list(changed(s.feeds[n], value, rng))
            for b in places if every else [places[int(rng.integers(len(places)))]]:
                yield value, n, {**s.feeds, n: b}


def sweep(s: Subject, values: Sequence[str], seed: int, every: bool = True) -> Iterator[tuple[str, str, Feeds, str]]:
    """Every trial with its verdict."""
    for value, name, feeds in trials(s, values, seed, every):
        yield value, name, feeds, judge(s, feeds, value, allowed(f"{s.kind} {value} {name}", f"{s.kind} {value}"))


def rows(chosen: Sequence[Any], values: Sequence[str], seed: int, engines: Sequence[str]) -> Iterator[Row]:
    """What every trial of some cases comes to."""
    for name, model, feeds in (form for case in chosen for form in forms(case)):
        if not any(map(floating, feeds.values())):
            continue
        try:
            s = subject(name, model, feeds, seed, engines)
        except unittest.SkipTest as e:
            yield {"case": name, "verdict": f"refused: {' '.join(str(e).split())[:120]}"}
            continue
        for value, of, _, verdict in sweep(s, values, seed):
            yield {"case": name, "value": value, "input": of, "verdict": verdict[:160]}


def allowed(*keys: str) -> str:
    """Why a case may differ from the references; "" where it may not."""
    return next((why for pattern, why in ALLOWED.items() if any(re.fullmatch(pattern, k) for k in keys)), "")


def main() -> int:
    """Run, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--values", nargs="+", choices=list(VALUES), default=list(VALUES), metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", default="0/1", metavar="K/N", help="every N-th case, from the K-th on")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=[*ENGINES, "triton"])
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    first, step = map(int, args.share.split("/"))
    counts, kept = Counter[str](), list[Row]()
    for r in rows(cases(args.only)[first::step], args.values, args.seed, args.engines):
        counts[r["verdict"].split(" ")[0].rstrip(":")] += 1
        if r["verdict"] != "right":
            kept.append(r)
            print(*r.values(), flush=True)
    wrong = [r for r in kept if r["verdict"].startswith("wrong")]
    if not args.only and step == 1:
        record.write("special_values", kept, counts=dict(counts), seed=args.seed, engines=args.engines, allowed=ALLOWED)
    print(dict(counts), f"{len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
