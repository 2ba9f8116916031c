"""Smaller cases that still fail the same way: fewer moves, splits, devices, nodes, cells."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from onnx import NodeProto

from tapestry.ir.plan import Layout, Strategy
from tests.fuzz.generate.evaluate import Array, Unfit, reads, replay
from tests.fuzz.generate.random_model import Model
from tests.fuzz.recipe import Recipe
from tests.fuzz.trial import Failure, Prepared, Refused, attempt, prepare

Case = tuple[Model, Recipe]
Fails = Callable[[Case], bool]


def shrink(case: Case, failure: Failure, folder: Path, seconds: float = 30.0) -> Case:
    """The smallest case found that fails with the same kind and ``what``; deterministic but for the time limit."""
    until = time.monotonic() + seconds

    def fails(c: Case) -> bool:
        if time.monotonic() > until:
            return False
        found = outcome(c, folder)
        return found is not None and (found.kind, found.what) == (failure.kind, failure.what)

    smaller = True
    while smaller and time.monotonic() < until:
        smaller = False
        for step in (_recipes,) if case[0].text else (_recipes, _models, _extents):
            found = next((c for c in step(case) if fails(c)), None)
            while found is not None:
                case, smaller = found, True
                found = next((c for c in step(case) if fails(c)), None)
    return case


def outcome(case: Case, folder: Path) -> Failure | None:
    """What a case does."""
    try:
        p = prepare(case[0], folder / "shrink.onnx")
    except Refused:
        return None
    return attempt(p, case[1], lenient=True) if isinstance(p, Prepared) else p


def _recipes(case: Case) -> Iterator[Case]:
    model, r = case
    for k in range(len(r.moves)):
        yield model, replace(r, moves=r.moves[:k] + r.moves[k + 1 :])
    for k in range(len(r.mesh) if not r.stages else 0):
        if len(r.mesh) > 1:
            yield model, _without_axis(r, k)
        elif r.mesh[k].size > 2:
            smaller = replace(r.mesh[k], size=2, weights=r.mesh[k].weights[:2])
            yield model, replace(r, mesh=(*r.mesh[:k], smaller, *r.mesh[k + 1 :]))
        if r.mesh[k].weights:
            yield model, replace(r, mesh=(*r.mesh[:k], replace(r.mesh[k], weights=()), *r.mesh[k + 1 :]))
    if any(r.simplified):
        yield model, replace(r, simplified=(False, False))
        yield model, replace(r, simplified=(r.simplified[0], False)) if r.simplified[1] else replace(r, streamed=frozenset())
    for t in r.strategies:
        yield model, replace(r, strategies={k: s for k, s in r.strategies.items() if k != t})
    for name in ("inputs", "outputs"):
        for t in getattr(r, name):
            yield model, replace(r, **{name: {k: x for k, x in getattr(r, name).items() if k != t}})
    for t in sorted(r.streamed):
        yield model, replace(r, streamed=r.streamed - {t})
    for t in r.arrivals:
        yield model, replace(r, arrivals={k: x for k, x in r.arrivals.items() if k != t})
    if r.via in ("triton", "processes") and not r.stages:
        yield model, replace(r, via="strategies")


def _without_axis(r: Recipe, k: int) -> Recipe:
    def less(x: Layout) -> Layout:
        return x[:k] + x[k + 1 :]

    kept = {t: Strategy(s.dims[:k] + s.dims[k + 1 :], less(s.out)) for t, s in r.strategies.items()}
    return replace(
        r, mesh=r.mesh[:k] + r.mesh[k + 1 :], strategies=kept, inputs={t: less(x) for t, x in r.inputs.items()},
        outputs={t: less(x) for t, x in r.outputs.items()},
    )  # fmt: skip


def _models(case: Case) -> Iterator[Case]:
    """One output less; a value made an input, and what only led to it dropped; no symbols; a weight made an input."""
    model, r = case
    if len(model.outputs) > 1:
        for t in model.outputs:
            yield trimmed(model, {t}), r
        for t in model.outputs:
            yield trimmed(model, set(model.outputs) - {t}), r
    values = replay(model.nodes, model.given, model.opset)
    for node in reversed(model.nodes):
        for t in node.output:
            if t in values and t not in model.outputs:
                yield trimmed(model, set(model.outputs), {t: values[t]}), r
    for node in reversed(model.nodes):  # an earlier value as the only output
        for t in node.output:
            if t in values and t not in model.outputs and np.isfinite(values[t].astype(np.float64)).all():
                yield trimmed(replace(model, outputs={t: values[t]}), {t}), r
    if model.part != (0, 0):
        yield replace(model, part=(0, 0)), r
    if model.symbols:
        yield replace(model, symbols={}), r


def trimmed(model: Model, outputs: set[str], cut: dict[str, Array] | None = None) -> Model:
    """The model with some outputs only, values of ``cut`` as inputs, and nothing that neither needs."""
    cut = cut or {}
    needed, nodes = set(outputs), list[NodeProto]()
    for node in reversed(model.nodes):
        if any(o in needed and o not in cut for o in node.output):
            nodes.append(node)
            needed.update(reads(node))
    inputs = {**model.inputs, **cut}
    return replace(
        model, nodes=tuple(reversed(nodes)), outputs={t: a for t, a in model.outputs.items() if t in outputs},
        inputs={t: a for t, a in inputs.items() if t in needed}, exact=model.exact & outputs,
        weights={t: a for t, a in model.weights.items() if t in needed},
        symbols={k: s for k, s in model.symbols.items() if k[0] in needed},
    )  # fmt: skip


def _extents(case: Case) -> Iterator[Case]:
    """All axes of one extent made shorter together; the outputs are evaluated again."""
    model, r = case
    extents = sorted({s for a in model.given.values() for s in a.shape if s > 1}, reverse=True)
    for n, less in itertools.product(extents, (0.5, None)):
        to = max(1, n // 2) if less else n - 1
        try:
            inputs, weights = ({t: _shortened(a, n, to) for t, a in x.items()} for x in (model.inputs, model.weights))
            values = replay(model.nodes, {**inputs, **weights}, model.opset)
        except (Unfit, ValueError):
            continue
        if all(np.isfinite(values[t].astype(np.float64)).all() for t in model.outputs):
            yield replace(model, inputs=inputs, weights=weights, outputs={t: values[t] for t in model.outputs}), r


def _shortened(a: Array, n: int, to: int) -> Array:
    return a[tuple(slice(0, to if s == n else s) for s in a.shape)]
