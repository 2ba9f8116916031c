"""What ONNX's operators on sizes give at all sizes at once: tensors of a constant shape, behind an axis for each symbol.

The same numbers in the same types as at one size: numpy's arithmetic is what folding does there. An operator, or a case of one,
that is not here is run size by size (`model_sizes`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from tapestry.ir.types import Array

CELLS = 1 << 16  # of a value at one size
NUMBERS = 1 << 25  # of a value at all sizes
Operator = Callable[["Call"], Array | None]


class Call:
    """A node on tensors that are known at all sizes.

    Attributes:
        ins: values, None for an input that is left out.
        axes: how many axes stand for symbols.
        given: the node's attributes.
    """

    def __init__(self, kind: str, ins: Sequence[Array | None], axes: int, given: Mapping[str, Any], version: int) -> None:
        self.kind, self.ins, self.axes, self.given, self.version = kind, ins, axes, given, version
        self.needs: list[Array] = []

    def need(self, mask: Array) -> None:
        """Note the sizes at which all cells of a mask are set; at the others the node has no value."""
        held = np.asarray(mask.all(axis=tuple(range(self.axes, mask.ndim))))
        if not held.all():
            self.needs.append(held)

    def fixed(self, k: int, attribute: str = "") -> list[int] | None:
        """An input of integers, or an attribute, that is the same at all sizes."""
        value = self.ins[k] if k < len(self.ins) else None
        if value is None:
            given: Any = self.given.get(attribute)
            return None if given is None else [int(v) for v in np.atleast_1d(given)]
        return [int(v) for v in value.reshape(-1)] if all(n == 1 for n in value.shape[: self.axes]) else None

    def has(self, k: int) -> bool:
        """Whether there is such an input."""
        return k < len(self.ins) and self.ins[k] is not None

    def x(self, k: int = 0) -> Array:
        """An input that is there."""
        value = self.ins[k]
        assert value is not None
        return value

    def rank(self, k: int = 0) -> int:
        """Of an input."""
        return self.x(k).ndim - self.axes

    def axis(self, a: int, rank: int) -> int:
        """Where an axis of a tensor is."""
        return self.axes + (a + rank if a < 0 else a)

    def aligned(self) -> list[Array]:
        """The inputs with as many axes, as numpy aligns them."""
        rank = max(v.ndim for v in self.ins if v is not None)
        out: list[Array] = []
        for v in self.ins:
            if v is not None:
                out.append(v.reshape(*v.shape[: self.axes], *(1,) * (rank - v.ndim), *v.shape[self.axes :]))
        self.bounded(np.broadcast_shapes(*(v.shape for v in out)))
        return out

    def bounded(self, shape: Sequence[int]) -> None:
        """Refuse to make more numbers than are kept.

        Raises:
            ValueError: it is more.
        """
        if math.prod(shape[self.axes :]) > CELLS or math.prod(shape) > NUMBERS:
            raise ValueError(f"{shape} are too many numbers")


def evaluated(call: Call) -> Array | None:
    """What a node gives at all sizes; None where it is not known here, is no tensor of one shape, or is a large one."""
    found = OPERATORS.get(call.kind)
    if found is None or not call.ins or any(v is None for v in call.ins[:1]):
        return None
    try:
        with np.errstate(all="ignore"):
            out = found(call)
        if out is not None:
            call.bounded(out.shape)
    except (ValueError, IndexError, TypeError):  # as numpy has it: what is wrong with it is said where it is lifted
        return None
    return out


def _cellwise(f: Callable[..., Array]) -> Operator:
    def done(c: Call) -> Array:
        ins = c.aligned()
        out = f(*ins)
        return out if out.dtype == bool or ins[0].dtype == bool else out.astype(ins[0].dtype)

    return done


def _folded(f: Callable[[Array, Array], Array]) -> Operator:
    return lambda c: functools.reduce(f, c.aligned())


def _divisor(c: Call, b: Array) -> Array:
    if b.dtype.kind in "iu":
        c.need(b != 0)
    return np.where(b == 0, 1, b) if b.dtype.kind in "iu" else b


def _div(c: Call) -> Array:
    a, b = c.aligned()
    safe = _divisor(c, b)
    if a.dtype.kind not in "iu":
        return (a / b).astype(a.dtype)
    return np.where((a < 0) != (safe < 0), -(np.abs(a) // np.abs(safe)), np.abs(a) // np.abs(safe))


def _mod(c: Call) -> Array:
    a, b = c.aligned()
    safe = _divisor(c, b)
    return (np.fmod(a, safe) if c.given.get("fmod", 0) else np.mod(a, safe)).astype(a.dtype)


def _cast(c: Call) -> Array | None:
    code = int(c.given["to"])
    if code in (onnx.TensorProto.BFLOAT16, onnx.TensorProto.STRING) or code > onnx.TensorProto.BFLOAT16:
        return None
    return c.x().astype(onnx.helper.tensor_dtype_to_np_dtype(code))


def _where_values(c: Call) -> Array:
    test, a, b = c.aligned()
    return np.where(test, a, b)


def _clip(c: Call) -> Array:
    x = c.x()
    for k, name, f in ((1, "min", np.maximum), (2, "max", np.minimum)):
        if c.has(k):
            end = c.x(k)
            x = f(x, end.reshape(*end.shape[: c.axes], *(1,) * c.rank()))
        elif name in c.given:
            x = f(x, x.dtype.type(c.given[name]))
    return x


def _concat(c: Call) -> Array:
    ins = [c.x(k) for k in range(len(c.ins))]
    sizes = np.broadcast_shapes(*(v.shape[: c.axes] for v in ins))
    for v in ins:
        c.bounded((*sizes, *v.shape[c.axes :]))
    whole = [np.broadcast_to(v, (*sizes, *v.shape[c.axes :])) for v in ins]
    return np.concatenate(whole, axis=c.axis(int(c.given["axis"]), c.rank()))


def _unsqueeze(c: Call) -> Array | None:
    where = c.fixed(1, "axes")
    return None if where is None else np.expand_dims(c.x(), tuple(c.axis(a, c.rank() + len(where)) for a in where))


def _squeeze(c: Call) -> Array | None:
    where = c.fixed(1, "axes")
    if where is None:
        if c.has(1):
            return None
        where = [a for a, n in enumerate(c.x().shape[c.axes :]) if n == 1]
    return np.squeeze(c.x(), tuple(c.axis(a, c.rank()) for a in where))


def _gather(c: Call) -> Array | None:
    data, at = c.x(), c.x(1)
    axis = c.axis(int(c.given.get("axis", 0)), c.rank())
    size = data.shape[axis]
    c.need((-size <= at) & (at < size))
    at = np.clip(np.where(at < 0, at + size, at), 0, size - 1)
    c.bounded((*data.shape[:axis], *data.shape[axis + 1 :], *at.shape[c.axes :]))
    if all(n == 1 for n in at.shape[: c.axes]):
        return np.take(data, at.reshape(at.shape[c.axes :]), axis=axis)
    if c.rank() != 1:
        return None
    sizes = np.broadcast_shapes(data.shape[: c.axes], at.shape[: c.axes])
    flat = np.broadcast_to(at, (*sizes, *at.shape[c.axes :])).reshape(*sizes, -1)
    found = np.take_along_axis(np.broadcast_to(data, (*sizes, size)), flat, axis=-1)
    return found.reshape(*sizes, *at.shape[c.axes :])


def _slice(c: Call) -> Array | None:
    starts, ends = c.fixed(1, "starts"), c.fixed(2, "ends")
    if starts is None or ends is None:
        return None
    which, steps = c.fixed(3, "axes"), c.fixed(4)
    index = [slice(None)] * c.x().ndim
    steps = steps or [1] * len(starts)
    for a, start, end, step in zip(which or range(len(starts)), starts, ends, steps, strict=True):
        n = c.x().shape[c.axis(a, c.rank())]
        stop = None if step < 0 and end < -n else end
        index[c.axis(a, c.rank())] = slice(start, stop, step)
    return c.x()[tuple(index)]


def _reduced(f: Callable[..., Array]) -> Operator:
    def done(c: Call) -> Array | None:
        which = c.fixed(1, "axes")
        if which is None and c.has(1):
            return None
        if not which and c.given.get("noop_with_empty_axes", 0):
            return c.x()
        axes = tuple(c.axis(a, c.rank()) for a in which or range(c.rank()))
        return f(c.x(), axis=axes, keepdims=bool(c.given.get("keepdims", 1))).astype(c.x().dtype)

    return done


def _transpose(c: Call) -> Array:
    perm = c.given.get("perm", reversed(range(c.rank())))
    return c.x().transpose(*range(c.axes), *(c.axes + int(a) for a in perm))


def _reshape(c: Call) -> Array | None:
    shape = c.fixed(1, "shape")
    if shape is None:
        return None
    own = c.x().shape[c.axes :]
    wanted = [own[k] if n == 0 and not c.given.get("allowzero", 0) else n for k, n in enumerate(shape)]
    return c.x().reshape(*c.x().shape[: c.axes], *wanted)


def _range(c: Call) -> Array | None:
    if c.x().dtype.kind not in "iu":
        return None
    start, limit, delta = (c.x(k).reshape(c.x(k).shape[: c.axes]) for k in range(3))
    lengths = np.maximum(0, -((start - limit) // np.where(delta == 0, 1, delta)))
    if lengths.min() != lengths.max() or (delta == 0).any():
        return None
    c.bounded((*lengths.shape, int(lengths.flat[0])))
    return start[..., None] + delta[..., None] * np.arange(int(lengths.flat[0]), dtype=c.x().dtype)


def _expand(c: Call) -> Array | None:
    shape = c.fixed(1)
    return None if shape is None else _filled(c, c.x(), shape)


def _filled(c: Call, x: Array, shape: Sequence[int]) -> Array:
    rank = max(x.ndim - c.axes, len(shape))
    x = x.reshape(*x.shape[: c.axes], *(1,) * (rank - (x.ndim - c.axes)), *x.shape[c.axes :])
    wide = np.broadcast_shapes(x.shape[c.axes :], tuple(shape))
    return np.broadcast_to(x, (*x.shape[: c.axes], *wide))


def _constant_of_shape(c: Call) -> Array | None:
    shape = c.fixed(0)
    if shape is None:
        return None
    value = c.given.get("value")
    number = np.zeros(1, np.float32) if value is None else numpy_helper.to_array(value)
    return np.broadcast_to(number.reshape(-1)[0], (*(1,) * c.axes, *shape))


OPERATORS: dict[str, Operator] = {
    **{k: _cellwise(f) for k, f in {
        "Neg": np.negative, "Abs": np.abs, "Floor": np.floor, "Ceil": np.ceil, "Round": np.rint, "Sqrt": np.sqrt,
        "Sign": np.sign, "Not": np.logical_not, "Add": np.add, "Sub": np.subtract, "Mul": np.multiply,
        "Pow": np.power, "Equal": np.equal, "Greater": np.greater, "Less": np.less, "GreaterOrEqual": np.greater_equal,
        "LessOrEqual": np.less_equal, "And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor,
    }.items()},
    **{k: _reduced(f) for k, f in {
        "ReduceProd": np.prod, "ReduceSum": np.sum, "ReduceMax": np.max, "ReduceMin": np.min,
    }.items()},
    "Max": _folded(np.maximum), "Min": _folded(np.minimum), "Identity": lambda c: c.x(), "Cast": _cast, "Div": _div,
    "Mod": _mod, "Where": _where_values, "Clip": _clip, "Concat": _concat, "Unsqueeze": _unsqueeze, "Squeeze": _squeeze,
    "Gather": _gather, "Slice": _slice, "Transpose": _transpose, "Reshape": _reshape, "Range": _range, "Expand": _expand,
    "ConstantOfShape": _constant_of_shape,
}  # fmt: skip
