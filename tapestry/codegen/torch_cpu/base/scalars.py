"""How torch computes each scalar primitive (`ir.expr`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tapestry.codegen.torch_cpu.base.torch_api import tensor_of
from tapestry.codegen.torch_cpu.native import random_words
from tapestry.ir.philox import philox
from tapestry.ir.types import FLOAT8, STORED, numpy_dtype

Tensor = torch.Tensor


TORCH_DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
    "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64, "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
TORCH_DTYPES.update({d: torch.uint8 for d in STORED if d not in TORCH_DTYPES})  # held as their bits
NAMES = {torch_dtype: name for name, torch_dtype in TORCH_DTYPES.items()}
_FLOAT8 = {d: getattr(torch, numpy_dtype(d).name) for d in FLOAT8}


def _div(a: Tensor, b: Tensor) -> Tensor:
    """Torch raises for an integer over 0, and the processor stops the process for the lowest one over -1."""
    if a.is_floating_point():
        return torch.div(a, b)
    zero = b == 0
    minus = b == -1 if b.dtype.is_signed else zero
    quotient = torch.div(a, b.masked_fill(zero | minus, 1), rounding_mode="trunc").masked_fill(zero, 0)
    return torch.where(minus, -quotient, quotient)


def _rest(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A remainder; that of an integer over 0 is 0, as over 1."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        return fn(a, b if a.is_floating_point() else b.masked_fill(b == 0, 1))

    return run


def _sign(x: Tensor) -> Tensor:
    """``torch.sign`` makes a NaN a zero."""
    return torch.where(torch.isnan(x), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)


def root(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The square root, exactly rounded (also into ``out``): MKL's, which torch calls, is off by an ulp in one value of six.

    Random numbers are the same bits on every target only if it is exact; numpy's takes as long.
    """
    if x.dtype not in (torch.float32, torch.float64) or x.device.type != "cpu":
        return torch.sqrt(x) if out is None else torch.sqrt(x, out=out)
    with np.errstate(invalid="ignore"):
        if out is not None:
            np.sqrt(x.numpy(), out=out.numpy())
            return out
        return tensor_of(np.asarray(np.sqrt(x.numpy())))


def _philox(key: Tensor, stream: Tensor, draw: Tensor, word: Tensor, index: Tensor) -> Tensor:
    """All cells of a block in one call, where they differ in their indices alone."""
    native = random_words() if index.numel() > 1 and all(x.numel() == 1 for x in (key, stream, draw, word)) else None
    if native is not None:
        at = index.contiguous()
        out = torch.empty_like(at, memory_format=torch.contiguous_format)
        counter = (int(x) for x in (key, stream, draw, word))
        native.tapestry_philox(*counter, at.numel(), at.data_ptr(), out.data_ptr())
        return out
    arrays = [np.asarray(x.numpy()) for x in (key, stream, draw, word, index)]
    return tensor_of(np.ascontiguousarray(philox(*arrays)))


def _either(logical: Callable[..., Tensor], bitwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*operands: Tensor) -> Tensor:
        return (logical if operands[0].dtype == torch.bool else bitwise)(*operands)

    return run


TABLE: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "mul": torch.mul, "div": _div, "mod": _rest(torch.remainder), "fmod": _rest(torch.fmod),
    "sub": torch.sub, "pow": torch.pow, "min": torch.minimum, "max": torch.maximum, "neg": torch.neg, "abs": torch.abs,
    "sign": _sign, "exp": torch.exp, "log": torch.log, "sqrt": root, "erf": torch.erf, "tanh": torch.tanh,
    "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "asin": torch.asin, "acos": torch.acos, "atan": torch.atan,
    "sinh": torch.sinh, "cosh": torch.cosh, "asinh": torch.asinh, "acosh": torch.acosh, "atanh": torch.atanh,
    "sigmoid": torch.sigmoid, "log1p": torch.log1p, "expm1": torch.expm1, "floor": torch.floor, "ceil": torch.ceil,
    "round": torch.round, "isnan": torch.isnan, "isinf": torch.isinf, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt,
    "le": torch.le, "gt": torch.gt, "ge": torch.ge, "and": _either(torch.logical_and, torch.bitwise_and),
    "or": _either(torch.logical_or, torch.bitwise_or), "xor": _either(torch.logical_xor, torch.bitwise_xor),
    "not": _either(torch.logical_not, torch.bitwise_not), "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift, "where": torch.where, "philox": _philox,
}  # fmt: skip


# torch has next to no operators on wide unsigned integers; numpy has them all
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
UNSIGNED_ROWS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.floor_divide, "mod": np.mod, "fmod": np.fmod,
    "pow": np.power, "min": np.minimum, "max": np.maximum, "neg": np.negative, "abs": np.abs, "sign": np.sign,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "shl": np.left_shift,
    "shr": np.right_shift, "where": np.where,
}  # fmt: skip


def apply(fn: str, operands: list[Tensor]) -> Tensor:
    """One primitive."""
    if operands[-1].dtype in UNSIGNED:
        with np.errstate(all="ignore"):
            return tensor_of(np.array(UNSIGNED_ROWS[fn](*(o.numpy() for o in operands))))
    return TABLE[fn](*operands)


def cast(x: Tensor, dtype: str, source: str = "") -> Tensor:
    """ONNX Cast: floats to integers truncate, anything to bool is ``!= 0``; a ``source`` of 8-bit floats comes as its bits."""
    if source in FLOAT8:
        x = x.contiguous().view(_FLOAT8[source]).to(torch.float32)
    return x != 0 if dtype == "bool" else x.to(TORCH_DTYPES[dtype])
