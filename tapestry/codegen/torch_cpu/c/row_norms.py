"""Root-mean-square norms and means of whole images by our own kernels, found by structure."""

from __future__ import annotations

from tapestry.codegen.torch_cpu import native
from tapestry.codegen.torch_cpu.base.point_values import held
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.codegen.torch_cpu.c import conv_c
from tapestry.codegen.torch_cpu.c.blocks_c import Tensor
from tapestry.codegen.torch_cpu.c.c_calls import CCall, CpuKernel, Ins, recorded, shares
from tapestry.ir.expr import Acc, Arg, Const, Expr
from tapestry.ir.expr import Call as Apply
from tapestry.ir.graph import Block
from tapestry.ir.index import dim, substitute
from tapestry.ir.kernel import Kernel, size, whole


def rms_norm(op: Block, kernel: Kernel) -> CpuKernel | Refusal:
    """``scale * (x / sqrt(sum(x^2) / n + eps))`` over the last dimension, on whole rows."""
    lib = native.library()
    single = len(op.body) == len(op.reduce) == len(op.then) == 1
    if lib is None:
        return conv_c.NO_LIBRARY
    if op.monoid != "sum" or not single or op.inner or not op.dims:
        return Refusal("it is no sum over one dimension")
    square, found = op.body[0], _scaled(op.then[0])
    if found is None or not isinstance(square, Apply) or square.fn != "mul" or square.args[0] != square.args[1]:
        return Refusal("it is no root mean square of a row, times a scale")
    scale, value, count, epsilon = found
    x, last, row = square.args[0], op.dims[-1], op.reduce[0]
    if not isinstance(x, Arg) or x.dtype != "f32" or last.size != row.size or not row.size:
        return Refusal("what is squared is no row of f32")
    r, v, q = op.reads[x.pos], op.reads[value], op.reads[scale]
    moved = tuple(substitute(e, {row.name: dim(last.name)}) for e in r.index)
    names = [d.name for d in op.dims]
    plain = not any(y.when or y.other is not None for y in (r, v, q))
    if not plain or r.tensor != v.tensor or moved != v.index or [str(e) for e in v.index] != names:
        return Refusal("what is squared and what is scaled are not the same rows, read as they lie")
    if [str(e) for e in q.index] != [last.name] or kernel.ins[scale] != whole((row.size,)):
        return Refusal("the scale is no vector along the row")
    rows = kernel.block[: len(op.dims)]
    if kernel.ins[x.pos] != rows or kernel.ins[value] != rows or kernel.block[-1] != (0, row.size):
        return Refusal("the block has parts of rows")
    shape, n = [hi - lo for lo, hi in rows], size(rows)
    sizes = native.Rows(n // row.size, row.size, count, epsilon)

    def record(ins: Ins, memory: Tensor) -> CCall:
        given = held(ins[value]).contiguous()
        weight = held(ins[scale])
        buffers = native.RowBuffers(given.data_ptr(), weight.data_ptr(), memory.data_ptr())
        return CCall(lib.tapestry_rms_norm, sizes, buffers, (given, weight, memory), shares(given, held(ins[value])))

    return recorded(lambda memory: memory.view(shape), record, n)


def _scaled(e: Expr) -> tuple[int, int, float, float] | None:
    """(scale's read, the row's, count, epsilon) of ``scale * (x * (1 / sqrt(sum / count + epsilon)))``."""
    match e:
        case Apply(
            "mul",
            (
                Arg(pos=scale),
                Apply(
                    "mul",
                    (Arg(pos=x), Apply("div", (Const(value=1.0), Apply("sqrt", (Apply("add", (mean, Const() as eps)),))))),
                ),
            ),
        ):
            pass
        case _:
            return None
    match mean:
        case Apply("div", (Acc(), Const() as count)):
            return scale, x, float(count.value), float(eps.value)
        case _:
            return None


def mean(op: Block, kernel: Kernel) -> CpuKernel | Refusal:
    """Sums over the last two axes of images with adjacent channels, perhaps divided by a number."""
    lib = native.library()
    if lib is None:
        return conv_c.NO_LIBRARY
    if op.monoid != "sum" or len(op.body) != 1 or len(op.dims) != 2 or len(op.reduce) != 2 or op.inner:
        return Refusal("it is no sum over two axes of images")
    x, then = op.body[0], op.then[0] if len(op.then) == 1 else None
    if not isinstance(x, Arg) or x.dtype != "f32":
        return Refusal("what is summed is no tensor of f32 as it is")
    match then:
        case Apply("div", (Acc(), Const() as divisor)):
            count = float(divisor.value)
        case Acc():
            count = 1.0
        case _:
            return Refusal("more follows the sum than a division by a number")
    r = op.reads[x.pos]
    if (
        r.when
        or r.other is not None
        or [str(e) for e in r.index] != [d.name for d in op.space]
        or kernel.ins[x.pos] != kernel.block
    ):
        return Refusal("it does not read whole images as they lie")
    b, c, h, w = (hi - lo for lo, hi in kernel.block)

    def record(ins: Ins, memory: Tensor) -> CCall:
        given = conv_c.last(held(ins[x.pos]))
        s = given.stride()
        sizes = native.Conv(b, c, c, h, w, *(1,) * 10, s[0], s[2], s[3], *(0,) * 6, 0, 0.0, count)
        buffers = native.Buffers(given.data_ptr(), None, None, None, None, memory.data_ptr())
        return CCall(lib.tapestry_mean, sizes, buffers, (given, memory), shares(given, held(ins[x.pos])))

    return recorded(lambda memory: memory.view(b, c), record, b * c)
