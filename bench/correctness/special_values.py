"""Every operator on awkward values: infinities, NaN, zeros of both signs, denormal and huge numbers, against two references.

    .venv/bin/python -m bench special_values [--only REGEX] [--values NAME …] [--seed S] [--share K/N]

The cases are onnx's own of one node. A value is written into one cell of one floating-point input (not into parameters such as
sizes), at random by the seed; the model runs unsplit and under a random legal plan on 3 devices. Right is what onnxruntime or
the ONNX reference evaluator gives, to a tolerance where both are finite; infinities and NaNs must stand in the same cells. If
neither runs the model, the case is counted as ``no reference``. Writes bench/results/special_values.json; exits 1 where a value
is wrong that is not listed, with the reason, in `KNOWN`.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx.backend.test.runner import _normalize_tensor

from bench.support import onnx_suite as suite
from bench.support import record
from bench.support.record import Row

VALUES = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan, "-0": -0.0, "denormal": 1e-40, "huge": 3e38}
TOLERANCE = {"float16": 4e-3, "float32": 1e-4, "float64": 1e-7}
KNOWN: dict[str, str] = {
    r"maxpool.*: nan": "a NaN is never lost, as in torch; both references compare with it, and drop it",
}
"""Cases (``test: value``) in which ours differs from both, and why it may."""


def cells(case: Any, value: float, rng: np.random.Generator) -> list[Any] | None:
    """The inputs of a case with one cell of one of them changed; None where there is none to change."""
    fixed = {t.name for t in suite.fixed_parameters(case.model, case.data_sets[0][0]).graph.initializer}
    inputs = [_normalize_tensor(v) for v in case.data_sets[0][0]]
    names = [i.name for i in case.model.graph.input]
    open_ = [
        k for k, (n, v) in enumerate(zip(names, inputs, strict=False))
        if n not in fixed and isinstance(v, np.ndarray) and v.dtype.name in TOLERANCE and v.size
    ]  # fmt: skip
    if not open_:
        return None
    k = int(rng.choice(open_))
    changed = inputs[k].copy()
    with np.errstate(over="ignore"):
        changed.flat[int(rng.integers(changed.size))] = changed.dtype.type(value)
    return [changed if j == k else v for j, v in enumerate(inputs)]


def same(ours: Any, theirs: Any) -> bool:
    """Whether two outputs agree: non-finite cells exactly, others to a tolerance of the largest finite value."""
    if not (isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray)):
        return type(ours) is type(theirs)
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if ours.dtype.name not in TOLERANCE:
        return bool(np.array_equal(ours, theirs))
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    scale = np.maximum(np.abs(b[finite]), min(1.0, np.abs(b[finite]).max(initial=0.0)))
    return bool((np.abs(a[finite] - b[finite]) <= TOLERANCE[ours.dtype.name] * scale).all())


def answers(case: Any, inputs: list[Any]) -> Iterator[list[Any]]:
    """What the references give, one after another, as far as they run the model."""
    for backend in (suite.OnnxRuntime, suite.Reference):
        try:
            with np.errstate(all="ignore"):
                yield [np.asarray(a) if not isinstance(a, list) else a for a in backend.prepare(case.model).run(inputs)]
        except Exception as e:  # a reference that cannot is no reference
            logging.debug("%s: %s", case.name, e)


def judge(case: Any, inputs: list[Any], seed: int) -> str:
    """``right``, ``wrong …``, ``refused …`` or ``no reference`` for a case with its inputs."""
    try:
        one = suite.Sharded(case.model, inputs)
    except Exception as e:
        return f"refused: {type(e).__name__}: {' '.join(str(e).split())[:120]}"
    names = [o.name for o in case.model.graph.output]
    ours = [one.alone[n] for n in names]
    agree = [all(same(a, b) for a, b in zip(ours, theirs, strict=True)) for theirs in answers(case, inputs)]
    if not any(agree):
        return "wrong unsplit" if agree else "no reference"
    try:
        one.split(3, seed)
    except AssertionError as e:
        return f"wrong on 3 devices: {' '.join(str(e).split())[:120]}"
    return "right"


def main() -> int:
    """Run, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--values", nargs="+", choices=list(VALUES), default=list(VALUES), metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", default="0/1", metavar="K/N", help="every N-th case, from the K-th on")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    first, step = map(int, args.share.split("/"))
    rows: list[Row] = []
    cases = [c for c in suite.node_cases() if re.search(args.only, c.name) and not c.name.endswith("_expanded")]
    for case in cases[first::step]:
        if suite.operator_of(case.model) is None:
            continue
        for name in args.values:
            rng = np.random.default_rng([args.seed, zlib.crc32(f"{case.name} {name}".encode())])
            inputs = cells(case, VALUES[name], rng)
            if inputs is None:
                break
            verdict = judge(case, inputs, args.seed)
            rows.append({"case": case.name, "value": name, "verdict": verdict})
            if verdict.startswith("wrong"):
                print(f"{case.name} {name}: {verdict}", flush=True)
    counts = Counter(r["verdict"].partition(":")[0] for r in rows)
    bad = [
        r
        for r in rows
        if r["verdict"].startswith("wrong") and not any(re.search(k, f"{r['case']}: {r['value']}") for k in KNOWN)
    ]
    if not args.only and step == 1:
        record.write("special_values", [r for r in rows if r["verdict"] != "right"], counts=dict(counts), seed=args.seed)
    print(dict(counts), f"{len(bad)} wrong and not known")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
