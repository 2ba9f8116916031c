"""Models that are IR text, for what only looks like what a target has a kernel for.

A product, a convolution, a pool, a row's statistics or a table lookup, and in it up to three things that nobody means: an
axis read along another dimension, twice, backwards, in steps or with gaps, a cell outside of the tensor, a guard, a
dimension more. Numbers are small multiples of a half, so that sums are exact and compared bit by bit, but for exponentials
and variances. The results are numpy's over the whole index space at once.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.fuzz.generate.evaluate import Array
from tests.fuzz.generate.random_projections import Grid, Index, Projection, Term, along, grid_of, settled, varied

NAMES = {"f32": "float32", "f64": "float64", "f16": "float16", "i32": "int32", "i64": "int64", "i8": "int8", "u8": "uint8"}
NARROW = ("i8", "u8")  # computed in i32
POINTS = 30_000  # of an index space

Value = Callable[[Sequence[Array], tuple[int, ...], Grid], Array]  # of what is read, reduced axes, places


@dataclass(slots=True)
class Sketch:
    """A block before it is text.

    Attributes:
        value: the result, from what is read at every point (all of one shape, the reduced axes last).
        loose: its numbers are real ones, in a type that has enough of them.
    """

    dims: dict[str, int]
    reduce: dict[str, int]
    monoid: str
    reads: list[Projection]
    body: tuple[str, ...]
    value: Value
    then: str = ""
    loose: bool = False


@dataclass(slots=True)
class Written:
    """A model so far: inputs, values of every tensor, lines of text."""

    rng: random.Random
    data: np.random.Generator
    dtype: str
    inputs: dict[str, Array] = field(default_factory=dict[str, Array])
    values: dict[str, Array] = field(default_factory=dict[str, Array])
    lines: list[str] = field(default_factory=list[str])

    def numbers(self, shape: tuple[int, ...]) -> Array:
        """Small ones of this model's type."""
        low, high = {"u8": (0, 4), "f16": (-1, 2)}.get(self.dtype, (-3, 4))
        whole = self.data.integers(low, high, shape)
        return (whole / 2 if self.dtype in ("f32", "f64") else whole).astype(NAMES[self.dtype])


# what there is


def _sizes(rng: random.Random, *names: str) -> dict[str, int]:
    return {n: rng.choice([1, 2, 2, 3, 4, 5, 8]) for n in names}


def _mixed(rng: random.Random, *names: str) -> list[str]:
    return rng.sample(names, len(names)) if rng.random() < 0.4 else list(names)


Pointwise = Callable[[Array, Array], Array] | Callable[[Array], Array]  # of what is read, element by element


REDUCED: dict[str, Callable[[Array, tuple[int, ...]], Array]] = {
    "sum": lambda x, axes: x.sum(axes, dtype=x.dtype),
    "max": lambda x, axes: x.max(axes),
    "min": lambda x, axes: x.min(axes),
}
PAIRS: dict[str, Callable[[Array, Array], Array]] = {
    "x * w": lambda x, w: x * w,
    "w * x": lambda x, w: x * w,
    "max((x * w), x)": lambda x, w: np.maximum(x * w, x),
    "abs((x * w))": lambda x, w: np.abs(x * w),
    "(x * w) * w": lambda x, w: x * w * w,
    "(x * w) + w": lambda x, w: x * w + w,
    "x + w": lambda x, w: x + w,
    "abs(x) * w": lambda x, w: np.abs(x) * w,
}
ALONE: dict[str, Callable[[Array], Array]] = {
    "x": lambda x: x,
    "abs(x)": np.abs,
    "neg(x)": np.negative,
    "x * x": lambda x: x * x,
}


def _reduced(monoid: str, f: Pointwise) -> Value:
    return lambda xs, axes, _: REDUCED[monoid](f(*xs), axes) if axes else f(*xs)


def _pair(rng: random.Random) -> str:
    return "x * w" if rng.random() < 0.7 else rng.choice(list(PAIRS))


def product(rng: random.Random) -> Sketch:
    """Matrices, in batches or not."""
    batch = rng.choice([(), ("b",), ("b", "h")])
    reads = [
        Projection("x", along(*batch, "i", "m")),
        Projection("w", along(*_mixed(rng, *batch[rng.randint(0, 2) :], "m", "n"))),
    ]
    body = _pair(rng)
    return Sketch(_sizes(rng, *batch, "i", "n"), _sizes(rng, "m"), "sum", reads, (body,), _reduced("sum", PAIRS[body]))


def convolution(rng: random.Random) -> Sketch:
    """Along one or two axes, plain or depthwise, strided or dilated."""
    axes, depth = [("h", "r"), ("v", "s")][: rng.choice([1, 2, 2])], rng.random() < 0.3
    places = tuple(Index((Term(rng.choice([1, 1, 2, 3]), a), Term(rng.choice([1, 1, 2]), t))) for a, t in axes)
    taps = [t for _, t in axes]
    x = Projection("x", (*along("b", "o" if depth else "c"), *places))
    w = Projection("w", along(*(("o",) if depth else ("o", "c")), *taps))
    reduce = ({} if depth else _sizes(rng, "c")) | {t: rng.choice([1, 2, 3, 3]) for t in taps}
    body = _pair(rng)
    return Sketch(_sizes(rng, "b", "o", *(a for a, _ in axes)), reduce, "sum", [x, w], (body,), _reduced("sum", PAIRS[body]))


def pool(rng: random.Random) -> Sketch:
    """Windows of one tensor."""
    axes = [("h", "r"), ("v", "s")][: rng.randint(1, 2)]
    places = tuple(Index((Term(rng.choice([1, 2, 2]), a), Term(rng.choice([1, 1, 2]), t))) for a, t in axes)
    monoid, body = rng.choice(list(REDUCED)), rng.choice(list(ALONE))
    dims, reduce = _sizes(rng, "b", "c", *(a for a, _ in axes)), {t: rng.choice([1, 2, 3]) for _, t in axes}
    return Sketch(dims, reduce, monoid, [Projection("x", (*along("b", "c"), *places))], (body,), _reduced(monoid, ALONE[body]))


def elements(rng: random.Random) -> Sketch:
    """Two tensors, element by element."""
    names = "ijk"[: rng.randint(1, 3)]
    body = rng.choice(list(PAIRS))
    reads = [Projection("x", along(*_mixed(rng, *names))), Projection("w", along(*(n for n in names if rng.random() < 0.7)))]
    return Sketch(_sizes(rng, *names), {}, "", reads, (body,), lambda xs, _, __: PAIRS[body](*xs))


def lookup(rng: random.Random) -> Sketch:
    """Rows of a table by their numbers: a sum over all rows, of which one is taken."""

    def value(xs: Sequence[Array], axes: tuple[int, ...], grid: Grid) -> Array:
        return np.where(xs[1] == grid["m"], xs[0], np.zeros_like(xs[0])).sum(axes, dtype=xs[0].dtype)

    reads = [Projection("x", along("m", "n")), Projection("at", along("i"))]
    return Sketch(_sizes(rng, "i", "n"), _sizes(rng, "m"), "sum", reads, ("where(eq(at, index(m)), x, ZERO)",), value)


def weighted(rng: random.Random) -> Sketch:
    """Values weighted by a softmax."""

    def value(xs: Sequence[Array], axes: tuple[int, ...], _: Grid) -> Array:
        e = np.exp(xs[0].astype(np.float64))
        return (e * xs[1]).sum(axes) / e.sum(axes)

    batch = rng.choice([(), ("b",)])
    reads = [Projection("x", along(*batch, "i", "m")), Projection("w", along(*batch, *_mixed(rng, "m", "n")))]
    sizes = _sizes(rng, *batch, "i", "n")
    return Sketch(sizes, _sizes(rng, "m"), "softsum", reads, ("x", "ONE", "w"), value, "acc2 / acc1", loose=True)


def variance(rng: random.Random) -> Sketch:
    """Of rows."""
    names = "bi"[: rng.randint(0, 2)]

    def value(xs: Sequence[Array], axes: tuple[int, ...], _: Grid) -> Array:
        return xs[0].astype(np.float64).var(axes)

    reads = [Projection("x", along(*names, "m"))]
    return Sketch(
        _sizes(rng, *names), _sizes(rng, "m"), "moments", reads, ("ONE", "x", "ZERO"), value, "acc2 / acc0", loose=True
    )


KINDS = (product, product, convolution, convolution, convolution, pool, elements, lookup, weighted, variance)
AFTER: dict[str, Callable[[Array, Array], Array]] = {
    "max(acc0, ZERO)": lambda a, _: np.maximum(a, 0), "abs(acc0)": lambda a, _: np.abs(a), "neg(acc0)": lambda a, _: -a,
    "acc0 + t": lambda a, t: a + t, "acc0 * t": lambda a, t: a * t, "max(t, acc0)": np.maximum,
}  # fmt: skip


# the model


def blocks(rng: random.Random) -> tuple[str, dict[str, Array], dict[str, Array], bool]:
    """(text, inputs, outputs, whether they are exact)."""
    while True:
        s = rng.choice(KINDS)(rng)
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            if rng.random() < 0.15:
                (s.reduce if s.reduce and rng.random() < 0.5 else s.dims)[f"z{len(s.dims)}{len(s.reduce)}"] = rng.choice(
                    [1, 2, 3]
                )
            elif names := [*s.dims, *s.reduce]:
                k = rng.randrange(len(s.reads))
                s.reads[k] = varied(s.reads[k], names, rng)
        if s.dims and rng.random() < 0.04:
            s.dims[rng.choice(list(s.dims))] = 0
        if np.prod([*s.dims.values(), *s.reduce.values()], dtype=float) <= POINTS:
            break
    dtype = rng.choice(["f32", "f64"] if s.loose else ["f32", "f32", "f32", "f32", "f64", "f16", "i32", "i64", "i8", "u8"])
    m = Written(rng, np.random.default_rng(rng.getrandbits(32)), dtype)
    _block(m, s)
    out = _map_behind(m) if rng.random() < 0.3 else "y"
    head = [f"input {n}: {_sized(a)}" for n, a in m.inputs.items()]
    return "\n".join(["graph block", *head, *m.lines, f"output {out}"]) + "\n", m.inputs, {out: m.values[out]}, not s.loose


def _sized(a: Array) -> str:
    kind = next(k for k, n in NAMES.items() if n == a.dtype.name)
    return f"{kind}[{', '.join(map(str, a.shape))}]"


def _typed(text: str, kind: str) -> str:
    """Literals in the type that is computed in."""
    zero, one = ("0.0", "1.0") if kind[0] == "f" else ("0", "1")
    return text.replace("ZERO", f"{kind}({zero})").replace("ONE", f"{kind}({one})")


def _block(m: Written, s: Sketch) -> None:
    sizes = {**s.dims, **s.reduce}
    grid, kind = grid_of(sizes), "i32" if m.dtype in NARROW else m.dtype
    reads: list[str] = []
    xs: list[Array] = []
    for p in s.reads:
        q, shape = settled(p, grid, m.rng)
        number = q.tensor == "at"
        if number:
            m.inputs["at"] = m.values["at"] = m.data.integers(0, s.reduce["m"], shape)
        elif q.tensor not in m.values:
            _input(m, q.tensor, shape)
        x = q.at(m.values[q.tensor], grid)
        xs.append(np.broadcast_to(x if number else x.astype(NAMES[kind]), tuple(sizes.values())))
        reads.append(q.text(real=m.dtype[0] == "f" and not number))
    y = np.asarray(s.value(xs, tuple(range(len(s.dims), len(sizes))), grid)).astype(NAMES[kind])
    body = ", ".join(_typed(_widened(b) if kind != m.dtype else b, kind) for b in s.body)
    then = s.then
    if not then and s.reduce and m.rng.random() < 0.5:
        then, y = _epilogue(m, y, list(s.dims), reads, kind)
    m.values["y"] = y
    inner = f" | {', '.join(f'{n}: {k} {s.monoid}' for n, k in s.reduce.items())}" if s.reduce else ""
    head = f"y: {_sized(y)} = op [{', '.join(f'{n}: {k}' for n, k in s.dims.items())}{inner}]"
    m.lines.append(f"{head}\n  reads {', '.join(reads)}\n  body {body}" + (f"\n  then {then}" if then else ""))


def _widened(body: str) -> str:
    """Narrow integers are computed in i32."""
    return re.sub(r"\b([xw])\b", r"cast(\1, i32)", body)


def _input(m: Written, name: str, shape: tuple[int, ...]) -> None:
    """A tensor of the block: an input, or a view of one."""
    if not shape or m.rng.random() > 0.25:
        m.inputs[name] = m.values[name] = m.numbers(shape)
        return
    dims = {f"a{k}": n for k, n in enumerate(shape)}
    turned = along(*m.rng.sample(list(dims), len(dims)))
    p, held = settled(varied(Projection(f"{name}_", turned), list(dims), m.rng), grid_of(dims), m.rng)
    m.inputs[p.tensor] = m.numbers(held)
    x = np.broadcast_to(p.at(m.inputs[p.tensor], grid_of(dims)), shape)
    m.values[name] = np.abs(x) if (positive := m.rng.random() < 0.3) else x
    body = f"abs({p.tensor})" if positive else p.tensor
    space = ", ".join(f"{d}: {n}" for d, n in dims.items())
    m.lines.append(f"{name}: {_sized(x)} = op [{space}]\n  reads {p.text(real=m.dtype[0] == 'f')}\n  body {body}")


def _epilogue(m: Written, y: Array, dims: list[str], reads: list[str], kind: str) -> tuple[str, Array]:
    """What follows the reduction, and its result."""
    then = m.rng.choice(list(AFTER))
    grid = grid_of(dict(zip(dims, y.shape, strict=True)))
    t = np.asarray(0, y.dtype)
    if re.search(r"\bt\b", then):
        p, shape = settled(Projection("t", along(*_mixed(m.rng, *(d for d in dims if m.rng.random() < 0.7)))), grid, m.rng)
        m.inputs["t"] = m.numbers(shape).astype(y.dtype)
        reads.append(p.text(real=kind[0] == "f"))
        t = p.at(m.inputs["t"], grid)
    return _typed(then, kind), np.broadcast_to(AFTER[then](y, t), y.shape).astype(y.dtype)


def _map_behind(m: Written) -> str:
    """One more operation, which reads every cell of the result once."""
    y = m.values["y"]
    order = m.rng.sample(range(y.ndim), y.ndim)
    back = [m.rng.random() < 0.3 for _ in range(y.ndim)]
    dims = [f"o{k}: {y.shape[a]}" for k, a in enumerate(order)]
    index = [f"{y.shape[a] - 1} - o{order.index(a)}" if back[a] else f"o{order.index(a)}" for a in range(y.ndim)]
    m.values["z"] = np.abs(np.flip(y, tuple(a for a in range(y.ndim) if back[a]))).transpose(order)
    m.lines.append(f"z: {_sized(m.values['z'])} = op [{', '.join(dims)}]\n  reads y[{', '.join(index)}]\n  body abs(y)")
    return "z"
