"""Operators that the ONNX reference evaluator has, but wrong: they take the places of its own, inside of bodies as well."""
# pyright: basic

from __future__ import annotations

import importlib.util
import math
import re
from functools import cache
from typing import Any

import numpy as np
from onnx import TensorProto, helper

# onnx comes without complete types


@cache
def corrected() -> list[type]:
    """Classes for ``ReferenceEvaluator(new_ops=…)``, under the operators' names."""
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops.op_loop import Loop as Theirs

    class SequenceInsert(OpRun):
        """Theirs takes places modulo the length, so that the end is the beginning, and divides by 0."""

        def _run(self, held: Any, tensor: Any, place: Any = None) -> tuple[Any, ...]:
            items, length = list(held), len(held)
            at = length if place is None else int(np.asarray(place).item())
            if not -length <= at <= length:
                raise ValueError(f"place {at} in a sequence of {length}")
            items.insert(at, tensor)  # a negative place counts from the end, as in Python
            return (items,)

    class Loop(Theirs):
        """Theirs takes no steps without a condition, and concatenates what it should stack."""

        def _run(self: Any, M: Any, cond: Any = None, *first: Any, context: Any = None, **more: Any) -> tuple[Any, ...]:
            names, body = self.body.input_names, {k: more.get(k) for k in ("attributes", "bindings")}
            values = {**(context or {}), **dict(zip(names[2:], first, strict=True))}
            going, step = cond is None or bool(np.asarray(cond).item()), 0
            seen: list[list[Any]] = [[] for _ in range(self.K)]
            while going and (M is None or step < int(np.asarray(M).item())):
                values |= {names[0]: np.array(step, np.int64), names[1]: np.array(True)}
                results = self._run_body(values, **body)
                going, step = bool(np.asarray(results[0]).item()), step + 1
                values |= dict(zip(names[2:], results[1 : 1 + self.N], strict=True))
                for rows, a in zip(seen, results[1 + self.N :], strict=True):
                    rows.append(a)
            return self._check_and_fix_outputs((*(values[n] for n in names[2:]), *map(np.stack, seen)))

    class NonZero(OpRun):
        """Theirs gives the places in a scalar a coordinate, as numpy does."""

        def _run(self, x: Any) -> tuple[Any, ...]:
            return (np.array(np.nonzero(x), np.int64) if x.ndim else np.zeros((0, int(x != 0)), np.int64),)

    return [SequenceInsert, Loop, NonZero, *_casts(), *_of_tensors(), *_of_rows(), *_of_doubles()]


def _casts() -> list[type]:
    """Casts to 4 bits."""
    from onnx.reference.ops.op_cast import Cast_24 as TheirCast

    class Cast(TheirCast):
        """Theirs cuts fractions off where 4 bits are to be rounded to the nearest number, the even one of two."""

        def _run(self: Any, x: Any, to: Any = None, saturate: Any = None, round_mode: Any = None) -> tuple[Any, ...]:
            short = to in (TensorProto.INT4, TensorProto.UINT4) and x.dtype.kind not in "biuUSO"
            x, saturate = np.rint(x.astype(np.float64)) if short else x, True if saturate is None else saturate
            return super()._run(x, to=to, saturate=saturate, round_mode=round_mode or "up")

    class CastLike(Cast):
        """A Cast to the second operand's type."""

        def _run(self: Any, x: Any, y: Any, saturate: Any = None, round_mode: Any = None) -> tuple[Any, ...]:
            to = helper.np_dtype_to_tensor_dtype(y.dtype)
            return super()._run(x, to=to, saturate=saturate, round_mode=round_mode)

    return [Cast, CastLike]


def _of_doubles() -> list[type]:
    """Theirs compute these in float32, also where the numbers are float64."""
    from onnx.reference.op_run import OpRun

    class Erf(OpRun):
        def _run(self, x: Any) -> tuple[Any, ...]:
            return (np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype),)

    return [Erf, *(_doubled(name) for name in ("AffineGrid", "GridSample"))]


class _Double:
    """numpy, for a module that says float32 where it means the type of its numbers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, "float64" if name == "float32" else name)


def _doubled(name: str) -> type:
    """An operator of the reference's that computes on float64 in float64, and on other types as it did."""
    place = "onnx.reference.ops.op_" + re.sub("(?<!^)([A-Z])", r"_\1", name).lower()
    theirs, spec = getattr(importlib.import_module(place), name), importlib.util.find_spec(place)
    assert spec is not None and spec.loader is not None
    own = importlib.util.module_from_spec(spec)  # a second copy of the module: the first one is everyone's
    spec.loader.exec_module(own)
    vars(own)["np"], wide = _Double(), getattr(own, name)

    def run(self: Any, *arrays: Any, **more: Any) -> tuple[Any, ...]:
        if not any(getattr(a, "dtype", None) == np.float64 for a in arrays):
            return theirs._run(self, *arrays, **more)
        made = wide.__new__(wide)
        vars(made).update(vars(self))
        return made._run(*arrays, **more)

    return type(name, (theirs,), {"_run": run})


def _of_rows() -> list[type]:
    """Before opset 13 these go over rows of all axes from one on; theirs goes over that axis alone."""
    from onnx.reference.ops.op_hardmax import Hardmax as TheirHardmax
    from onnx.reference.ops.op_softmax import Softmax as TheirSoftmax

    def rows(self: Any, x: Any, axis: int | None) -> tuple[Any, int]:
        at = self.axis if axis is None else axis
        if self.run_params["opsets"].get("", 13) >= 13 or not x.size or not x.ndim:
            return x, at
        if not any(a.name == "axis" for a in self.onnx_node.attribute):
            at = 1  # theirs has the default of the newest opset
        return x.reshape(int(np.prod(x.shape[: at + x.ndim if at < 0 else at])), -1), -1

    class Softmax(TheirSoftmax):
        def _run(self: Any, X: Any, axis: int | None = None) -> tuple[Any, ...]:
            x, at = rows(self, X, axis)
            return (x if not x.size else self.of(x, x - x.max(axis=at, keepdims=True), at).reshape(X.shape).astype(X.dtype),)

        def of(self, x: Any, less: Any, at: int) -> Any:
            return np.exp(less) / np.exp(less).sum(axis=at, keepdims=True)

    class LogSoftmax(Softmax):
        def of(self, x: Any, less: Any, at: int) -> Any:
            return less - np.log(np.exp(less).sum(axis=at, keepdims=True))

    class Hardmax(TheirHardmax):
        def _run(self: Any, x: Any, axis: int | None = None) -> tuple[Any, ...]:
            y, at = rows(self, x, axis)
            found = np.zeros_like(y)
            if y.size:
                np.put_along_axis(found, np.expand_dims(np.argmax(y, axis=at), axis=at), 1, axis=at)
            return (found.reshape(x.shape),)

    return [Softmax, LogSoftmax, Hardmax]


def _of_tensors() -> list[type]:
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops.op_average_pool import AveragePool_19
    from onnx.reference.ops.op_batch_normalization import BatchNormalization_14
    from onnx.reference.ops.op_lp_pool import LpPool as TheirLpPool
    from onnx.reference.ops.op_one_hot import OneHot as TheirOneHot

    class AveragePool(AveragePool_19):
        """Theirs forgets the dilations where it pads by itself."""

        def _run(self: Any, x: Any, auto_pad: str = "NOTSET", pads: Any = None, **more: Any) -> tuple[Any, ...]:
            return super()._run(x, auto_pad="NOTSET", pads=_pads(x.shape[2:], auto_pad, pads, **more), **more)

    class LpPool(TheirLpPool):
        """As AveragePool."""

        def _run(self: Any, x: Any, auto_pad: str = "NOTSET", pads: Any = None, **more: Any) -> tuple[Any, ...]:
            return super()._run(x, auto_pad="NOTSET", pads=_pads(x.shape[2:], auto_pad, pads, **more), **more)

    class OneHot(TheirOneHot):
        """Theirs compares fractions with places; they are to be cast to int64 first."""

        def _run(self: Any, indices: Any, *rest: Any, **more: Any) -> tuple[Any, ...]:
            return super()._run(indices.astype(np.int64), *rest, **more)

    class LRN(OpRun):
        """Theirs sums for as many channels as the batch has, and takes images alone."""

        def _run(self, x: Any, alpha: Any = None, beta: Any = None, bias: Any = None, size: Any = None) -> tuple[Any, ...]:
            before, channels = (size - 1) // 2, x.shape[1]
            windows = [slice(max(0, c - before), c - before + size) for c in range(channels)]
            sums = [np.sum(x[:, w] ** 2, axis=1, keepdims=True) for w in windows]
            squares = np.concatenate(sums, axis=1) if sums else x
            return ((x / (bias + float(alpha) / size * squares) ** beta).astype(x.dtype),)

    class BatchNormalization(BatchNormalization_14):
        """Theirs of opsets 7 to 13 takes the batch's own mean and variance, and none for every cell (``spatial=0``)."""

        def _run(self: Any, x: Any, *of: Any, training_mode: Any = 0, is_test: Any = 1, **more: Any) -> tuple[Any, ...]:
            flat = x if more.get("spatial", 1) else x.reshape(len(x), np.prod(x.shape[1:], dtype=int))
            more = {k: more.get(k) for k in ("epsilon", "momentum")}
            y, *rest = super()._run(flat, *map(np.ravel, of), training_mode=int(training_mode or not is_test), **more)
            return (y.reshape(x.shape), *rest)

    return [AveragePool, LpPool, OneHot, LRN, BatchNormalization]


def _pads(
    shape: tuple[int, ...],
    auto_pad: str,
    pads: Any,
    kernel_shape: Any = None,
    strides: Any = None,
    dilations: Any = None,
    **_: Any,
) -> list[int]:
    """How much is put before and after each axis of a window's input, as the operators' text has it."""
    if auto_pad in ("NOTSET", "VALID", None):
        return list(pads) if pads and auto_pad != "VALID" else [0] * (2 * len(shape))
    steps, apart = strides or [1] * len(shape), dilations or [1] * len(shape)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel_shape, apart, strict=True)]
    missing = [max(0, (-(-n // s) - 1) * s + w - n) for n, s, w in zip(shape, steps, spans, strict=True)]
    before = [m - m // 2 if auto_pad == "SAME_LOWER" else m // 2 for m in missing]
    return [*before, *(m - b for m, b in zip(missing, before, strict=True))]
