"""Sizes of what ONNX's operators give, at all sizes of a region at once (the formulas of onnx's docs/Operators.md).

A rule has columns of sizes and gives columns. Where an operator has cases (an axis of 1 is broadcast, a slice ends where the
tensor does), the case is that at the sizes at which the plan is made, and the rule says at which sizes it is another one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from tapestry.ir.types import Array
from tapestry.lift.sizes.size_columns import Grid

Shape = list[Array]


class NoRule(Exception):
    """A rule does not know a case of an operator."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a value at all sizes.

    Attributes:
        shape: a column for each axis; None where the data says it, or it is no tensor.
        value: all of it, axes for the symbols first, where it follows from sizes and constants.
        data: whether what the value is depends on the inputs' data.
        sized: whether what the value is follows from sizes.
    """

    shape: tuple[Array, ...] | None
    value: Array | None = None
    data: bool = True
    sized: bool = False


class Site:
    """A node, what is known of its inputs, and at which sizes its case is another one."""

    def __init__(self, kind: str, ins: Sequence[Known | None], given: Mapping[str, Any], outputs: int, grid: Grid) -> None:
        self.kind, self.ins, self.given, self.outputs, self.grid = kind, ins, given, outputs, grid
        self.needs: list[Array] = []
        self.equal: list[tuple[Array, Array]] = []

    def need(self, mask: Array) -> None:
        """Note at which sizes the case is that of ``made_at``."""
        if not mask.all():
            self.needs.append(mask)

    def uniform(self, column: Array) -> Array:
        """The column, which one expression has to give."""
        self.need(self.grid.uniform(column))
        return column

    def steady(self, column: Array) -> Any:
        """What a column is at ``made_at``; it has to be that at all sizes."""
        here = self.grid.here(column)
        self.need(column == here)
        return here

    def has(self, k: int) -> bool:
        """Whether there is such an input."""
        return k < len(self.ins) and self.ins[k] is not None

    def dims(self, k: int = 0) -> Shape:
        """Sizes of an input's axes."""
        known = self.ins[k] if k < len(self.ins) else None
        if known is None or known.shape is None:
            raise NoRule
        return list(known.shape)

    def columns(self, k: int, attribute: str = "") -> Shape | None:
        """The elements of an input, or of an attribute, as columns; None where there is neither.

        Raises:
            NoRule: they are not known.
        """
        if self.has(k):
            value = self.ins[k].value  # type: ignore[union-attr]
            if value is None:
                raise NoRule
            flat = value.reshape(*value.shape[: len(self.grid.along)], -1)
            return [flat[..., j] for j in range(flat.shape[-1])]
        given = self.given.get(attribute)
        if given is None:
            return None
        return [self.const(v) for v in cast("Sequence[Any]", given if isinstance(given, Sequence) else [given])]

    def ints(self, k: int, attribute: str = "") -> list[int] | None:
        """Likewise, of what has to be the same at all sizes."""
        found = self.columns(k, attribute)
        return None if found is None else [int(self.steady(c)) for c in found]

    def const(self, value: Any) -> Array:
        """A column of one number."""
        return self.grid.constant(np.int64(value))

    def axis(self, rank: int, default: int | None = None) -> int:
        """The attribute ``axis``."""
        given = self.given.get("axis", default)
        if given is None or not -rank <= given < max(rank, 1):
            raise NoRule
        return int(given) % max(rank, 1)


def broadcast(s: Site, shapes: Sequence[Shape]) -> Shape:
    """Numpy's broadcasting, of axes that are 1 where they are at ``made_at``."""
    rank = max(map(len, shapes), default=0)
    out: Shape = []
    for a in range(rank):
        ends = [shape[a - rank] for shape in shapes if len(shape) >= rank - a]
        wide = next((e for e in ends if s.grid.here(e) != 1), ends[0])
        for e in ends:
            if e is not wide:
                if s.grid.here(e) != 1 or s.grid.here(wide) == 1:
                    s.equal.append((e, wide))
                else:
                    s.need(e == 1)
        out.append(wide)
    return out


def _same(s: Site) -> list[Shape]:
    if s.outputs > 1 and s.kind in FIRST_ALONE:
        raise NoRule
    return [s.dims()] * s.outputs


def _broadcast(s: Site) -> list[Shape]:
    return [broadcast(s, [s.dims(k) for k in range(len(s.ins)) if s.has(k)])]


def _matmul(s: Site) -> list[Shape]:
    a, b = s.dims(0), s.dims(1)
    left, right = ([s.const(1), *a] if len(a) == 1 else a), ([*b, s.const(1)] if len(b) == 1 else b)
    s.equal.append((left[-1], right[-2]))
    rows, columns = ([] if len(a) == 1 else [left[-2]]), ([] if len(b) == 1 else [right[-1]])
    return [[*broadcast(s, [left[:-2], right[:-2]]), *rows, *columns]]


def _gemm(s: Site) -> list[Shape]:
    a, b = (s.dims(k)[::-1] if s.given.get(name, 0) else s.dims(k) for k, name in ((0, "transA"), (1, "transB")))
    s.equal.append((a[1], b[0]))
    out = [a[0], b[1]]
    if s.has(2):
        broadcast(s, [out, s.dims(2)])
    return [out]


def _windows(s: Site) -> list[Shape]:
    """Conv and pools: how many windows fit."""
    x, pool = s.dims(), s.kind != "Conv"
    rank = len(x) - 2
    kernel = [s.const(v) for v in s.given["kernel_shape"]] if pool else s.dims(1)[2:]
    stride, dilation = (list(s.given.get(name, [1] * rank)) for name in ("strides", "dilations"))
    pads, auto = list(s.given.get("pads", [0] * 2 * rank)), s.given.get("auto_pad", b"NOTSET")
    out = [x[0], x[1] if pool else s.dims(1)[0]]
    for a in range(rank):
        n, step, reach = x[2 + a], stride[a], dilation[a] * (kernel[a] - 1) + 1
        if auto in (b"SAME_UPPER", b"SAME_LOWER"):
            count = -(-n // step)
            s.uniform(np.maximum((count - 1) * step + reach - n, 0) // 2)
        elif s.given.get("ceil_mode", 0):
            count = -(-(n + pads[a] + pads[rank + a] - reach) // step) + 1
            count = count - ((count - 1) * step >= n + pads[a])
            s.uniform(np.maximum((count - 1) * step + reach - n - pads[a], 0))
        else:
            ends = 0 if auto == b"VALID" else pads[a] + pads[rank + a]
            count = (n + ends - reach) // step + 1
        out.append(count)
    return [out] * s.outputs


def _whole_pool(s: Site) -> list[Shape]:
    return [[*s.dims()[:2], *(s.const(1) for _ in s.dims()[2:])]]


def _reduced(s: Site) -> list[Shape]:
    x, which = s.dims(), None if s.kind.startswith("Arg") else s.ints(1, "axes")
    if s.kind.startswith("Arg"):
        which = [int(s.given.get("axis", 0))]
    if not which:
        which = [] if s.given.get("noop_with_empty_axes", 0) else list(range(len(x)))
    at = {a % len(x) for a in which} if x else set[int]()
    keep = s.given.get("keepdims", 1)
    return [[s.const(1) if a in at else n for a, n in enumerate(x) if keep or a not in at]]


def _transpose(s: Site) -> list[Shape]:
    x = s.dims()
    return [[x[a] for a in s.given.get("perm", range(len(x) - 1, -1, -1))]]


def _concat(s: Site) -> list[Shape]:
    parts = [s.dims(k) for k in range(len(s.ins))]
    axis, out = s.axis(len(parts[0])), list(parts[0])
    for part in parts[1:]:
        for a, (n, m) in enumerate(zip(part, parts[0], strict=True)):
            if a != axis and n is not m:
                s.equal.append((n, m))
    out[axis] = functools.reduce(lambda a, b: a + b, (p[axis] for p in parts))
    return [out]


def _split(s: Site) -> list[Shape]:
    x = s.dims()
    axis, sizes = s.axis(len(x), 0), s.columns(1, "split")
    if sizes is None:
        each = -(-x[axis] // s.outputs)
        sizes = [each] * (s.outputs - 1) + [x[axis] - each * (s.outputs - 1)]
    return [[*x[:axis], n, *x[axis + 1 :]] for n in sizes]


def _slice(s: Site) -> list[Shape]:
    x, starts, ends = s.dims(), s.columns(1, "starts"), s.columns(2, "ends")
    if starts is None or ends is None:
        raise NoRule
    which = s.ints(3, "axes") or list(range(len(starts)))
    steps = s.ints(4) or [1] * len(starts)
    out = list(x)
    for start, end, a, step in zip(starts, ends, which, steps, strict=True):
        n = x[a]
        first, last = (np.where(v < 0, np.maximum(v, -(1 << 60)) + n, np.minimum(v, 1 << 60)) for v in (start, end))
        if step > 0:
            first, last = np.clip(first, 0, n), np.clip(last, 0, n)
        else:
            first, last = np.clip(first, 0, n - 1), np.clip(last, -1, n - 1)
        s.uniform(first)
        out[a] = np.maximum(0, -((first - last) // step))
    return [out]


def _gather(s: Site) -> list[Shape]:
    x = s.dims()
    axis = s.axis(len(x), 0)
    return [[*x[:axis], *s.dims(1), *x[axis + 1 :]]]


def _gather_nd(s: Site) -> list[Shape]:
    x, at, batch = s.dims(), s.dims(1), int(s.given.get("batch_dims", 0))
    last = int(s.steady(at[-1]))
    return [[*at[:-1], *x[batch + last :]]]


def _reshape(s: Site) -> list[Shape]:
    x, target = s.dims(), s.columns(1, "shape")
    if target is None:
        raise NoRule
    out: Shape = []
    for k, n in enumerate(target):
        sign = s.grid.here(n)
        s.need(np.sign(n) == np.sign(sign))
        out.append(x[k] if sign == 0 and not s.given.get("allowzero", 0) else n)
    total = math.prod(x, start=s.const(1))
    rest = next((k for k, n in enumerate(out) if s.grid.here(n) == -1), None)
    if rest is not None:
        known = math.prod((n for k, n in enumerate(out) if k != rest), start=s.const(1))
        out[rest] = total // np.where(known == 0, 1, known)
    s.equal.append(_uncommon(s, x, out))
    return [out]


def _uncommon(s: Site, one: Shape, other: Shape) -> tuple[Array, Array]:
    """The products of two lists of sizes, without the factors that both have."""
    rest, other = s.const(1), list(other)
    for n in one:
        k = next((k for k, m in enumerate(other) if n.all() and np.array_equal(n, m)), None)
        if k is None:
            rest = rest * n
        else:
            other.pop(k)
    return rest, math.prod(other, start=s.const(1))


def _flatten(s: Site) -> list[Shape]:
    x = s.dims()
    axis = int(s.given.get("axis", 1))
    axis = axis + len(x) if axis < 0 else axis
    return [[math.prod(x[:axis], start=s.const(1)), math.prod(x[axis:], start=s.const(1))]]


def _unsqueeze(s: Site) -> list[Shape]:
    which, out = s.ints(1, "axes") or [], s.dims()
    rank = len(out) + len(which)
    for a in sorted(a % rank for a in which):
        out.insert(a, s.const(1))
    return [out]


def _squeeze(s: Site) -> list[Shape]:
    x, which = s.dims(), s.ints(1, "axes")
    if which is None:
        for n in x:
            s.need((n == 1) == (s.grid.here(n) == 1))
        which = [a for a, n in enumerate(x) if s.grid.here(n) == 1]
    at = {a % len(x) for a in which} if x else set[int]()
    for a in at:
        s.need(x[a] == 1)
    return [[n for a, n in enumerate(x) if a not in at]]


def _expand(s: Site) -> list[Shape]:
    return [broadcast(s, [s.dims(), s.columns(1) or []])]


def _tile(s: Site) -> list[Shape]:
    repeats = s.columns(1)
    if repeats is None:
        raise NoRule
    return [[n * r for n, r in zip(s.dims(), repeats, strict=True)]]


def _pad(s: Site) -> list[Shape]:
    out, pads = s.dims(), s.columns(1, "pads")
    which = s.ints(3) if s.has(3) else list(range(len(out)))
    if pads is None or which is None:
        raise NoRule
    for k, a in enumerate(which):
        out[a] = out[a] + pads[k] + pads[k + len(which)]
    return [out]


def _range(s: Site) -> list[Shape]:
    start, limit, delta = ((s.columns(k) or [s.const(0)])[0] for k in range(3))
    if start.dtype.kind not in "iu":
        with np.errstate(all="ignore"):
            return [[np.maximum(0, np.ceil((limit - start) / delta)).astype(np.int64)]]
    return [[np.maximum(0, -((start - limit) // np.where(delta == 0, 1, delta)))]]


def _of_shape(s: Site) -> list[Shape]:
    return [s.columns(0) or []]


def _one_hot(s: Site) -> list[Shape]:
    out, depth = s.dims(), (s.columns(1) or [s.const(0)])[0]
    out.insert(s.axis(len(out) + 1, -1), depth.astype(np.int64))
    return [out]


def _top(s: Site) -> list[Shape]:
    out, count = s.dims(), (s.columns(1, "k") or [s.const(1)])[0]
    out[s.axis(len(out), -1)] = count
    return [out, out]


def _attention(s: Site) -> list[Shape]:
    q, v = s.dims(0), s.dims(2)
    if s.outputs > 3 or len(q) != len(v):
        raise NoRule
    out = [*q[:3], v[3]] if len(q) == 4 else [*q[:2], q[2]]
    if len(q) == 3:
        heads = int(s.given["q_num_heads"]), int(s.given["kv_num_heads"])
        out[2] = v[2] // heads[1] * heads[0]
    if s.outputs == 1 and not s.has(4):
        return [out]
    raise NoRule


CELLWISE = (
    "Abs Acos Acosh Asin Asinh Atan Atanh BatchNormalization Bernoulli BitwiseNot Cast CastLike Ceil Celu Clip Cos",
    "Cosh CumSum DequantizeLinear Dropout Elu Erf Exp EyeLike Floor Gelu GroupNormalization HardSigmoid HardSwish",
    "Hardmax Identity InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu Log LogSoftmax",
    "LpNormalization MeanVarianceNormalization Mish Neg Not QuantizeLinear RMSNormalization Reciprocal Relu",
    "RotaryEmbedding Round ScatterElements ScatterND Selu Shrink Sigmoid Sign Sin Sinh Softmax Softplus Softsign",
    "Sqrt Swish Tan Tanh ThresholdedRelu Trilu",
)
BROADCAST = (
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean",
    "Min Mod Mul Or PRelu Pow Sub Sum Where Xor",
)
FIRST_ALONE = frozenset({"BatchNormalization", "LayerNormalization", "RMSNormalization", "GroupNormalization"})
RULES: dict[str, Callable[[Site], list[Shape]]] = {
    **dict.fromkeys(" ".join(CELLWISE).split(), _same), **dict.fromkeys(" ".join(BROADCAST).split(), _broadcast),
    **dict.fromkeys(("Conv", "MaxPool", "AveragePool", "LpPool"), _windows),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"), _whole_pool),
    **dict.fromkeys(
        (f"Reduce{k}" for k in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")), _reduced
    ),
    "ArgMax": _reduced, "ArgMin": _reduced, "MatMul": _matmul, "Gemm": _gemm, "Transpose": _transpose, "Concat": _concat,
    "Split": _split, "Slice": _slice, "Gather": _gather, "GatherND": _gather_nd, "GatherElements": lambda s: [s.dims(1)],
    "Reshape": _reshape, "Flatten": _flatten, "Unsqueeze": _unsqueeze, "Squeeze": _squeeze, "Expand": _expand, "Tile": _tile,
    "Pad": _pad, "Range": _range, "ConstantOfShape": _of_shape, "OneHot": _one_hot, "TopK": _top, "Attention": _attention,
}  # fmt: skip
