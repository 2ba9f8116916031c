"""Four defects of Triton's interpreter (3.6 to 3.9) that would make right kernels come out wrong on the CPU, put right.

It keeps bf16 as the 16-bit integers that hold the bits, and multiplies those integers in ``tl.dot``. It labels the result
of a comparison with the dtype of what was compared, and so turns a scalar's truth value into a float when it spreads it
over a tile. It cuts f32 off to bf16 where a GPU rounds to the nearest. In 3.6, bounds of loops are arrays of one element,
which numpy since 2.4 does not take for numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def corrected() -> Iterator[None]:
    """Run kernels in the interpreter as a GPU would: see above; and no numpy warnings of overflow or 0/0."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    dot, splat, cast = builder.create_dot, builder.create_splat, builder.cast_impl
    patch_tensor = interpreter._patch_lang_tensor

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def create_splat(self: Any, *args: Any) -> Any:
        *head, arg = args
        return splat(self, *head, interpreter.TensorHandle(arg.data, tl.int1) if arg.data.dtype == np.bool_ else arg)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        bits = np.ascontiguousarray(src.data, np.float32).view(np.uint32).reshape(np.shape(src.data))
        near = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16  # to the nearest, ties to even
        quiet = (bits >> 16) | np.uint32(0x40)
        return interpreter.TensorHandle(np.where(np.isnan(src.data), quiet, near).astype(np.uint16), tl.bfloat16)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda value: int(value.handle.data.item()))

    builder.create_dot, builder.create_splat, builder.cast_impl = create_dot, create_splat, cast_impl
    interpreter._patch_lang_tensor = patch_lang_tensor
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
            yield
    finally:
        interpreter._patch_lang_tensor = patch_tensor
        builder.create_dot, builder.create_splat, builder.cast_impl = dot, splat, cast
