"""Two defects of Triton's interpreter (3.6 to 3.9) that would make right kernels come out wrong on the CPU, put right.

It keeps bf16 as the 16-bit integers that hold the bits, and multiplies those integers in ``tl.dot``. It labels the result
of a comparison with the dtype of what was compared, and so turns a scalar's truth value into a float when it spreads it
over a tile.
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
    dot, splat = builder.create_dot, builder.create_splat

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

    builder.create_dot, builder.create_splat = create_dot, create_splat
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
            yield
    finally:
        builder.create_dot, builder.create_splat = dot, splat
