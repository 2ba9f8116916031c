"""What follows a sum in i32 for each feature, as one pass in C over rows of features: a bias, scales, rounding, saturation."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tapestry.codegen.torch_cpu.base.point_values import held
from tapestry.codegen.torch_cpu.base.scalars import TORCH_DTYPES
from tapestry.codegen.torch_cpu.base.strided_reads import Tensor
from tapestry.codegen.torch_cpu.c import conv_c, generated_c
from tapestry.codegen.torch_cpu.c.print_c import TYPES, Writer, written
from tapestry.ir.expr import Acc, Index, arg_positions, walk
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import dims_of
from tapestry.ir.kernel import Kernel, size

Then = Callable[[Sequence[Tensor | None], Tensor, Tensor | int], Tensor | None]
LEAST = 1 << 10  # points: fewer take no time in torch's operators either


def requantised(op: Block, graph: Graph, kernel: Kernel, feature: str) -> Then | None:
    """A function of the buffers, sums (rows by features) and what is added to each row; ``None`` where it cannot be written.

    It gives ``None`` where there turns out to be no working compiler.

    Args:
        feature: the dimension along which alone what is read varies.
    """
    then, columns = op.then, [b for d, b in zip(op.dims, kernel.block, strict=False) if d.name == feature]
    small = size(kernel.block[: len(op.dims)]) < LEAST
    if conv_c.available() is None or small or len(then) != 1 or len(columns) != 1 or isinstance(then[0], Acc):
        return None
    if then[0].dtype not in TYPES or not written(then) or any(isinstance(x, Index) for x in walk(then[0])):
        return None
    used = sorted(arg_positions(then))
    boxes = {k: b for k in used if (b := kernel.ins[k]) is not None}
    reads = {k: op.reads[k] for k in used}
    along = {n for r in reads.values() for e in (*r.index, *(g.aff for g in r.when)) for n in dims_of(e)}
    if len(boxes) < len(used) or along - {feature}:
        return None
    tensors = {k: graph.tensors[r.tensor] for k, r in reads.items()}
    described = {k: (reads[k], boxes[k], t.shape, t.dtype) for k, t in tensors.items()}
    dtype = TORCH_DTYPES[then[0].dtype]
    name = generated_c.register(Writer((feature,), described, (columns[0],)).columns(then[0], then[0].dtype))

    def run(ins: Sequence[Tensor | None], total: Tensor, more: Tensor | int) -> Tensor | None:
        function: Any = generated_c.function(name)
        if function is None:
            return None
        rows, width = total.shape
        added = more.expand(width).contiguous() if isinstance(more, Tensor) else torch.full((width,), more, dtype=torch.int32)
        out = torch.empty(rows, width, dtype=dtype)
        given = (*(held(ins[k]).contiguous() for k in used), total.contiguous(), added, out)
        function((ctypes.c_int64 * 1)(rows), (ctypes.c_void_p * len(given))(*(x.data_ptr() for x in given)))
        return out

    return run
