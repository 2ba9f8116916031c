"""A build that is damaged and signed again: program, kernels, report and hashes are made anew around the damage."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tapestry import api
from tapestry.build import store
from tapestry.codegen import kernel_sources
from tapestry.compiler import build_report
from tapestry.ir.expr import Call, Const, Expr, distinct, rewrite
from tapestry.ir.graph import Block, Graph, Op, Opaque, map_exprs
from tapestry.ir.program import peak_bytes
from tapestry.ir.types import Tensor, numpy_dtype
from tapestry.plan.pipelines.staged_plan import lower_plan
from tapestry.plan.simulate import simulate
from tapestry.plan.topology import from_data
from tapestry.verify import interp
from tapestry.verify.model.cell_values import CellValues

MOST = 1 << 21  # index points of an operation that is tried as a whole
SHARES = (0.0, 0.5, 0.2, 0.1, 0.01, 0.001)  # of numbers that are special
SOME = 256  # cells of a larger one


@dataclass(slots=True)
class Edited:
    """A build under the knife; ``again`` is whether its program is lowered and its report made anew."""

    build: store.Build
    constants: dict[str, bytes]
    rng: random.Random
    again: bool = True

    @property
    def graph(self) -> Graph:
        return self.build.plan.graph

    def put(self, graph: Graph) -> bool:
        self.build = replace(self.build, plan=replace(self.build.plan, graph=graph))
        return True

    def op(self, at: int, op: Op) -> bool:
        return self.put(replace(self.graph, ops=(*self.graph.ops[:at], op, *self.graph.ops[at + 1 :])))

    def report(self, **changes: Any) -> bool:
        self.build = replace(self.build, report={**self.build.report, **changes})
        return True


def load(folder: Path, rng: random.Random) -> Edited:
    compiled = api.load(folder)
    return Edited(compiled.build, dict(compiled.constants), rng)


def save(e: Edited, folder: Path) -> None:
    """Everything around the damage made right, and signed."""
    build, graph = e.build, e.graph
    if e.again:
        build = replace(build, program=lower_plan(build.plan))
        build = replace(build, peak_bytes=tuple(peak_bytes(build.program)[0]))
        offset, places = 0, dict[str, tuple[int, int]]()
        for t, w in graph.weights.items():
            if not w.file:
                places[t] = (offset, len(e.constants[t]))
                offset += len(e.constants[t])
        build = replace(build, constants=places)
        timed = simulate(build.plan, build.program, replace(from_data(build.topology), mesh=build.plan.mesh)).total
        facts = build_report.facts_of(build)
        bound = min(float(build.report["lower_bound_s"]), timed)
        facts |= {"simulated_s": timed, "objective_s": timed, "lower_bound_s": bound, "gap": (timed - bound) / timed}
        build = replace(build, report={**build.report, **facts})
    if "plan_sha256" in build.report:
        build = replace(build, report={**build.report, "plan_sha256": build_report.plan_hash(build)})
    kernels = kernel_sources.triton_sources(build.plan.graph, build.program, build.target, build.precision, build.knobs)
    held = {t: e.constants[t] for t in build.constants}
    store.write(folder, build, held, kernels, {"ssa": 1})


def alters(before: Graph, after: Graph) -> bool:
    """Whether an operation that was changed gives anything else on random numbers, or where infinities, NaN and huge numbers
    are among them; true where that cannot be told.

    A number times 0, or a value that a ``where`` never takes, may be edited without another function coming of it. So may a
    root, of a variance: the operations before the changed one are computed with it.
    """
    pairs = [(a, b) for a, b in zip(before.ops, after.ops, strict=True) if a != b]
    if (before.weights, before.inputs, before.outputs) != (after.weights, after.inputs, after.outputs) or not pairs:
        return True
    if any(not isinstance(x, Block) for pair in pairs for x in pair):
        return True
    if any(math.prod(d.size for d in x.space) > MOST for pair in pairs for x in pair):
        return any(isinstance(a, Block) and isinstance(b, Block) and _differ_somewhere(before, a, b) for a, b in pairs)
    rng, makers = np.random.default_rng(0), {t: op for op in before.ops for t in op.outs}
    for pair, special in ((p, s) for p in pairs for s in SHARES):
        first = {id(op): op for x in pair for t in x.inputs if isinstance(op := makers.get(t), Block) and op not in pair}
        known = [op for op in before.ops if id(op) in first and math.prod(d.size for d in op.space) <= MOST // 8]
        made = {t for op in known for t in op.outs}
        inputs = tuple(dict.fromkeys(t for x in (*known, *pair) for t in x.inputs if t not in made))
        feeds = {t: _numbers(before.tensors[t], rng, special) for t in inputs}
        one, two = (
            interp.run(Graph(name="", tensors=before.tensors, ops=(*known, x), inputs=inputs, outputs=x.outs), feeds)
            for x in pair
        )
        if one.keys() != two.keys() or any(not np.array_equal(one[t], two[t], equal_nan=one[t].dtype.kind == "f") for t in one):
            return True
    return False


def proved_alike(before: Graph, after: Graph) -> bool:
    """Whether the operations that were changed are the same functions by normal form: a maximum of what is no less already
    (a minimum: no more) is that, infinities and NaN too, but for the sign of a zero."""
    pairs = [(a, b) for a, b in zip(before.ops, after.ops, strict=True) if a != b]
    kept = (before.weights, before.inputs, before.outputs) == (after.weights, after.inputs, after.outputs)
    blocks = all(isinstance(a, Block) and isinstance(b, Block) and _plain(a) == _plain(b) for a, b in pairs)
    return kept and blocks


def _plain(op: Block) -> Block:
    """An operation without maxima and minima that change nothing."""
    return replace(op, body=tuple(map(_without, op.body)), then=tuple(map(_without, op.then)))


def _without(e: Expr) -> Expr:
    if not isinstance(e, Call):
        return e
    e = Call(e.fn, tuple(map(_without, e.args)), e.dtype)
    if e.fn in ("max", "min") and isinstance(c := e.args[1], Const):
        low, high = _between(e.args[0])
        if (low >= c.value) if e.fn == "max" else (high <= c.value):
            return e.args[0]
    return e


def _between(e: Expr) -> tuple[float, float]:
    """Bounds of a value that is no NaN."""
    if isinstance(e, Const) and isinstance(e.value, int | float) and not math.isnan(e.value):
        return float(e.value), float(e.value)
    if not isinstance(e, Call) or e.fn not in ("max", "min", "abs", "exp"):
        return -math.inf, math.inf
    if e.fn in ("abs", "exp"):
        return 0.0, math.inf
    (a, b), (c, d) = map(_between, e.args)
    return (max(a, c), max(b, d)) if e.fn == "max" else (min(a, c), min(b, d))


def _differ_somewhere(graph: Graph, a: Block, b: Block) -> bool:
    """Whether two large operations give different values at some cells, of random numbers, special ones among them."""
    if (a.dims, a.outs) != (b.dims, b.outs):
        return True
    rng = np.random.default_rng(0)
    points = np.stack([rng.integers(0, d.size, SOME) for d in a.dims], axis=1)
    for special in SHARES:
        feeds = {t: _numbers(graph.tensors[t], rng, special) for t in {*a.inputs, *b.inputs}}
        one, two = (CellValues(graph, feeds.get).block(x, points) for x in (a, b))
        if any(not np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for (x, _), (y, _) in zip(one, two, strict=True)):
            return True
    return False


def _numbers(t: Tensor, rng: np.random.Generator, special: float) -> np.ndarray:
    """Numbers of a type, a share of them special."""
    if numpy_dtype(t.dtype).kind in "iub":
        return rng.integers(0, 4, t.shape).astype(numpy_dtype(t.dtype))
    some = rng.standard_normal(t.shape)
    if special:
        numbers = [0.0, np.inf, -np.inf, np.nan, 1e6, -1e6, 1e35, -1e35]
        some = np.where(rng.random(t.shape) < special, rng.choice(numbers, t.shape), some)
    with np.errstate(over="ignore"):
        return some.astype(numpy_dtype(t.dtype))


# places


def blocks(e: Edited) -> Iterator[tuple[int, Block]]:
    """Block operations in a random order."""
    for i in e.rng.sample(range(len(e.graph.ops)), len(e.graph.ops)):
        op = e.graph.ops[i]
        if isinstance(op, Block):
            yield i, op


def opaques(e: Edited, *kinds: str) -> Iterator[tuple[int, Opaque]]:
    for i, op in enumerate(e.graph.ops):
        if isinstance(op, Opaque) and (not kinds or op.kind in kinds):
            yield i, op


def with_read(op: Block, k: int, **changes: Any) -> Block:
    return replace(op, reads=(*op.reads[:k], replace(op.reads[k], **changes), *op.reads[k + 1 :]))


def put_call(op: Block, at: Call, new: Expr) -> Block:
    """The operation with one call replaced, wherever it stands."""
    known: dict[int, Expr] = {}

    def of(x: Expr) -> Expr:
        if x is at:
            return new
        if not isinstance(x, Call):
            return x
        if id(x) not in known:
            known[id(x)] = Call(x.fn, tuple(map(of, x.args)), x.dtype)
        return known[id(x)]

    return map_exprs(op, of)


def put_literal(op: Block, c: Const, value: float) -> Block:
    """The operation with a number replaced, wherever it stands."""
    return map_exprs(op, lambda x: rewrite(x, lambda leaf: Const(value, c.dtype) if leaf == c else leaf))


def change_call(e: Edited, fns: dict[str, str], dtypes: tuple[str, ...] = ("f32", "f16", "f64", "i64")) -> bool:
    for i, op in blocks(e):
        calls = [x for x in distinct((*op.point, *op.then)) if isinstance(x, Call) and x.fn in fns and x.dtype in dtypes]
        if calls:
            x = e.rng.choice(calls)
            return e.op(i, put_call(op, x, Call(fns[x.fn], x.args, x.dtype)))
    return False


def other_tensor(e: Edited, name: str, before: int) -> list[str]:
    """Tensors of the same type that an operation may read as well."""
    t, made = e.graph.tensors[name], {x for op in e.graph.ops[:before] for x in op.outs}
    return [n for n in sorted(made) if n != name and (e.graph.tensors[n].dtype, e.graph.tensors[n].shape) == (t.dtype, t.shape)]
