"""Five defects of Triton's interpreter (3.6 to 3.9) that would make right kernels come out wrong on the CPU, put right.

It keeps bf16 as the 16-bit integers that hold the bits, and multiplies those integers in ``tl.dot``. It labels the result
of a comparison with the dtype of what was compared, and so turns a scalar's truth value into a float when it spreads it
over a tile. It cuts f32 off to bf16 where a GPU rounds to the nearest, and takes integers for the bits of one. It takes the
NaN of an 8-bit float for a number, and multiplies such floats in f16, in which products overflow. In 3.6, bounds of loops are
arrays of one element, which numpy since 2.4 does not take for numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module as module
from typing import Any

_METHODS = ("create_dot", "create_splat", "cast_impl", "create_fp_to_fp")


@contextmanager
def corrected() -> Generator[None]:
    """Run kernels in the interpreter as a GPU would: see above; and no numpy warnings of overflow or 0/0."""
    import numpy as np

    tl: Any = module("triton.language")
    interpreter: Any = module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    dot, splat, cast, convert = plain = [getattr(builder, n) for n in _METHODS]
    patch_tensor = interpreter._patch_lang_tensor

    def widened(handle: Any) -> Any:
        floats = _floats(handle)
        return handle if floats is None else interpreter.TensorHandle(floats, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def create_splat(self: Any, *args: Any) -> Any:
        *head, arg = args
        return splat(self, *head, interpreter.TensorHandle(arg.data, tl.int1) if arg.data.dtype == np.bool_ else arg)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar.is_int() and dst_type.scalar == tl.bfloat16:
            src = cast(self, src, tl.float32)
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        return interpreter.TensorHandle(_nearest(src.data), tl.bfloat16)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        if (floats := _floats(src)) is None:
            return convert(self, src, dst_type, rounding)
        exact = interpreter.TensorHandle(floats, tl.float32)
        return exact if dst_type.scalar == tl.float32 else self.cast_impl(exact, dst_type)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", _integer)

    for name, method in zip(_METHODS, (create_dot, create_splat, cast_impl, create_fp_to_fp), strict=True):
        setattr(builder, name, method)
    interpreter._patch_lang_tensor = patch_lang_tensor
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
            yield
    finally:
        interpreter._patch_lang_tensor = patch_tensor
        for name, method in zip(_METHODS, plain, strict=True):
            setattr(builder, name, method)


def _integer(value: Any) -> int:
    return int(value.handle.data.item())


def _nearest(data: Any) -> Any:
    """The bits of f32 rounded to bf16."""
    import numpy as np

    bits = np.ascontiguousarray(data, np.float32).view(np.uint32).reshape(np.shape(data))
    near = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16  # to the nearest, ties to even
    quiet = (bits >> 16) | np.uint32(0x40)
    return np.where(np.isnan(data), quiet, near).astype(np.uint16)


def _floats(handle: Any) -> Any:
    """Floats of 8 bits and bf16, which are held as their bits, as f32; ``None`` for values of another kind."""
    import numpy as np
    import torch

    tl = module("triton.language")
    kinds: dict[Any, Any] = {
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn, tl.float8e4b8: torch.float8_e4m3fnuz, tl.float8e5: torch.float8_e5m2,
        tl.float8e5b16: torch.float8_e5m2fnuz,
    }  # fmt: skip
    kind = kinds.get(handle.dtype.scalar)
    if kind is None:
        return None
    bits = np.ascontiguousarray(handle.data).view(np.int16 if kind == torch.bfloat16 else np.uint8)
    return torch.as_tensor(bits).view(kind).float().numpy().reshape(np.shape(handle.data))
