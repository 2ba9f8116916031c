"""A product by the vendor's library (cuBLAS through torch), for where the user asks for it and it was measured to be faster.

The library computes the sum, a generated kernel what follows it (``finish``). The sum is a buffer beyond the plan's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tapestry.codegen.blocks.forms import bare_read, contraction
from tapestry.codegen.blocks.lowered import Access, lower, points
from tapestry.codegen.blocks.operands import HALVES
from tapestry.codegen.torch_cpu.base.scalars import TORCH_DTYPES
from tapestry.codegen.triton.emit.source import generate
from tapestry.codegen.triton.run.launcher import Call, Tensor, bind
from tapestry.ir.expr import Acc
from tapestry.ir.graph import Block, Dim, Graph
from tapestry.ir.kernel import Kernel, shape


def bind_library(graph: Graph, kernel: Kernel, ins: Sequence[Tensor | None], outs: Sequence[Tensor]) -> Call | None:
    """A function that computes a block; ``None`` where it is no plain product of two buffers."""
    op = graph.ops[kernel.op]
    if kernel.mode != "full" or not isinstance(op, Block) or op.inner or 0 in shape(kernel.block):
        return None
    task = lower(graph, kernel)
    c = contraction(task)
    if c is None or c.more or c.operand not in (*HALVES, "f32"):
        return None
    reduced = (*c.k, *c.taps)
    views: list[Tensor] = []
    for e, dims in ((c.a, (*c.batch, *c.m, *reduced)), (c.b, (*c.batch, *reduced, *c.n))):
        p = bare_read(e)
        x, access = (None, None) if p is None else (ins[p], task.reads[p])
        if x is None or access is None or access.checks or not access.offset.is_affine or access.dtype != c.operand:
            return None
        views.append(_strided(x, access, dims))
    batch, m, n, k = points(c.batch), points(c.m), points(c.n), points(reduced)
    a, b = views[0].reshape(batch, m, k), views[1].reshape(batch, k, n)
    if a.data_ptr() != views[0].data_ptr() or b.data_ptr() != views[1].data_ptr():  # a copy would have to be made at every run
        return None
    return _calls(graph, kernel, ins, outs, (a, b), (*c.batch, *c.m, *c.n))


def _calls(
    graph: Graph,
    kernel: Kernel,
    ins: Sequence[Tensor | None],
    outs: Sequence[Tensor],
    pair: tuple[Tensor, Tensor],
    order: tuple[Dim, ...],
) -> Call:
    """The product into a state, and the kernel that finishes it."""
    op = graph.ops[kernel.op]
    assert isinstance(op, Block)
    a, b = pair
    dtype = TORCH_DTYPES[op.body[0].dtype]
    names = [d.name for d in order]
    plain = not op.then or op.then == (Acc(0, op.body[0].dtype),)
    state = outs[0] if plain else torch.empty(shape(kernel.outs[0]), dtype=dtype, device=a.device)
    permuted = state.permute([[d.name for d in op.dims].index(n) for n in names])  # in the product's order
    direct = permuted.is_contiguous()
    flat = permuted.view(a.shape[0], a.shape[1], b.shape[2]) if direct else None

    def multiply() -> None:
        product = _product(a, b, dtype, flat)
        if not direct:
            permuted.copy_(product.view(permuted.shape))

    if plain:
        return multiply
    used = op.then_reads()
    ins_of_then = tuple(box if p in used else None for p, box in enumerate(kernel.ins))
    finish = Kernel(op=kernel.op, mode="finish", block=kernel.block[: len(op.dims)], ins=ins_of_then, outs=kernel.outs)
    made = generate(graph, finish)
    rest = bind(made, [*(x for p in made.reads if (x := ins[p]) is not None), state, *outs])

    def both() -> None:
        multiply()
        rest()

    return both


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """The batched product in a dtype; into ``out`` where it is given."""
    if a.dtype == dtype:
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    if a.device.type == "cuda":  # 16-bit operands, an f32 sum
        return torch.bmm(a, b, out_dtype=dtype) if out is None else torch.bmm(a, b, out_dtype=dtype, out=out)
    found = torch.bmm(a.to(dtype), b.to(dtype))
    return found if out is None else out.copy_(found)


def _strided(x: Tensor, access: Access, dims: tuple[Dim, ...]) -> Tensor:
    steps = [access.offset.coef(d.name) for d in dims]
    return x.as_strided([d.size for d in dims], steps, x.storage_offset() + access.offset.const)
