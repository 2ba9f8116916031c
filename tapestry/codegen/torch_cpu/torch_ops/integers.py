"""Products of integers of 8 bits, summed in i32 by torch's integer matrix product (oneDNN), exact for any zero points.

``sum (a - p)(b - q) = sum ab - q sum a - p sum b + k p q``, where sums that would be multiplied by 0 are not made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod

import torch

from tapestry.codegen.torch_cpu.base import contract
from tapestry.codegen.torch_cpu.base.point_values import Expressions
from tapestry.codegen.torch_cpu.base.strided_reads import Frame, Tensor
from tapestry.codegen.torch_cpu.base.torch_api import int_mm
from tapestry.ir.expr import Expr
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel
from tapestry.ir.recognise.contraction import dims_read, factors, narrow

_MANY = 16  # matrices of a batch that are multiplied one by one; more, in floats that hold the sums exactly
_SUMMED = 1 << 14  # values: the sums of fewer take no time


def product(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> Callable[[Sequence[Tensor | None]], list[Tensor]] | None:
    """States of a sum of products of integers of 8 bits over the block; ``None`` when the operation is none."""
    both = factors(op)
    if both is None or op.body[0].dtype != "i32" or any(d.size == 0 for d in op.space):
        return None
    a, b = narrow(both[0]), narrow(both[1])
    reduced = {d.name for d in op.reduce if d.size > 1}
    if a is None or b is None:
        return None
    dims = dims_read(op, a.value), dims_read(op, b.value)
    zeros = tuple(z for z in (a.shift, b.shift) if z is not None)
    if not all(reduced <= d for d in dims) or any(dims_read(op, z) & reduced for z in zeros):
        return None
    values = Expressions(op, graph, kernel, (a.value, b.value), frame)
    shifts = [shift_of(op, graph, kernel, frame, z) for z in (a.shift, b.shift)]
    run = contract.matmul(op, frame, *dims, multiply=_multiply)
    maps = len(op.dims)
    depth = prod(frame.extents[maps:])
    axes = tuple(range(maps, len(frame.extents)))

    def states(ins: Sequence[Tensor | None]) -> list[Tensor]:
        x, y = (v.expand([*v.shape[:maps], *frame.extents[maps:]]) if v.dim() else v for v in values.values(ins, []))
        total = run(x, y)
        p, q = (None if s is None else s(ins) for s in shifts)
        if q is not None:
            total = total - q * _sums(x, axes)
        if p is not None:
            total = total - p * _sums(y, axes)
        if p is not None and q is not None:
            total = total + p * q * depth
        return [total]

    return states


def _sums(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Over the last axes: of many values, a product with ones."""
    if axes and x.numel() >= _SUMMED:
        rows = x.reshape(prod(x.shape[: axes[0]]), -1)
        return one_product(torch.ones(1, rows.shape[1], dtype=torch.int8), rows.t()).view(x.shape[: axes[0]])
    return torch.sum(x, dim=axes, dtype=torch.int32) if axes else x.to(torch.int32)


def shift_of(
    op: Block, graph: Graph, kernel: Kernel, frame: Frame, zero: Expr | None
) -> Callable[[Sequence[Tensor | None]], Tensor] | None:  # fmt: skip
    """A zero point over the map dimensions."""
    if zero is None:
        return None
    found, maps = Expressions(op, graph, kernel, (zero,), frame), len(op.dims)

    def value(ins: Sequence[Tensor | None]) -> Tensor:
        (v,) = found.values(ins, [])
        v = v.to(torch.int32)
        return v.reshape(v.shape[:maps]) if v.dim() > maps else v

    return value


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """A batch of products, rows by k times k by columns."""
    batch = left.shape[0]
    if batch > _MANY:
        return _in_floats(left, right)
    return torch.stack([one_product(x, y) for x, y in zip(left, right, strict=True)])


def one_product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """One product, into ``out`` if given; unsigned bytes that the integer product does not take are 128 and a signed one."""
    if not exact():
        found = _in_floats(left, right)
        return found if out is None else out.copy_(found)
    more: Tensor | None = None
    if right.dtype == torch.uint8:
        more = 128 * torch.sum(left, dim=1, keepdim=True, dtype=torch.int32)
        right = signed(right)
    if left.dtype == torch.uint8 and not takes_unsigned():
        columns = 128 * torch.sum(right, dim=0, keepdim=True, dtype=torch.int32)
        more, left = columns if more is None else more + columns, signed(left)
    left, right = _matrix(left), _matrix(right)
    found = int_mm(left, right, out)
    return found if more is None else found.add_(more)


def _in_floats(left: Tensor, right: Tensor) -> Tensor:
    """Products in floats that hold every sum; what is beyond i32 wraps around, as it does in the integer product."""
    largest = prod(255 if x.dtype == torch.uint8 else 128 for x in (left, right))
    if left.shape[-1] * largest <= 1 << 24:
        return torch.matmul(left.to(torch.float32), right.to(torch.float32)).to(torch.int32)
    return torch.matmul(left.to(torch.float64), right.to(torch.float64)).to(torch.int64).to(torch.int32)


def _matrix(x: Tensor) -> Tensor:
    """The matrix in rows, or in columns if it lies so: oneDNN takes any other strides for one of the two, those of an axis of
    one element as well, which torch does not look at."""
    rows, columns = x.shape
    if x.t().is_contiguous() and not x.is_contiguous():
        return x.as_strided((rows, columns), (1, rows))
    return x.contiguous().as_strided((rows, columns), (columns, 1))


def signed(x: Tensor) -> Tensor:
    return torch.bitwise_xor(x, 128).view(torch.int8)


@cache
def exact() -> bool:
    """Whether torch's integer product is one: oneDNN adds pairs in 16 bits, and cuts what those do not hold, on processors that
    cannot multiply and add bytes in one instruction (VNNI; AVX2 and the first AVX-512 cannot)."""
    a, b = torch.full((4, 64), 127, dtype=torch.int8), torch.full((64, 16), 127, dtype=torch.int8)
    mixed = [(a, b), (-a, b)] + ([(a.view(torch.uint8) + 128, b)] if takes_unsigned() else [])
    return all(torch.equal(int_mm(x, y).long(), x.long() @ y.long()) for x, y in mixed)


@cache
def takes_unsigned() -> bool:
    """Whether this torch multiplies unsigned bytes by signed ones."""
    try:
        found = int_mm(torch.full((1, 1), 200, dtype=torch.uint8), torch.ones(1, 1, dtype=torch.int8))
    except RuntimeError:
        return False
    return int(found) == 200
