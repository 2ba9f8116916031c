"""MatMul and Gemm: sums of products, ``i, n | m`` with batch dimensions ``b0, b1, …``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tapestry.ir.expr import Acc, Arg, Expr, cast
from tapestry.ir.graph import Dim
from tapestry.ir.index import dim
from tapestry.ir.types import Tensor
from tapestry.lift.builder import Node, Operand, accumulator, axes, broadcast
from tapestry.lift.registry import lifts


def product(a: Tensor, b: Tensor) -> Expr:
    """``Arg(0) * Arg(1)`` in the dtype that sums over them accumulate in."""
    wide = accumulator(a.dtype)
    return cast(Arg(0, a.dtype), wide) * cast(Arg(1, b.dtype), wide)


def contract(
    n: Node,
    out: str | Tensor,
    dims: Sequence[Dim],
    reduced: Sequence[Dim],
    a: Operand,
    b: Operand,
    *,
    scale: float = 1.0,
    bias: Operand | None = None,
    bias_scale: float = 1.0,
    dtype: str = "",
    more: Sequence[Operand] = (),
    after: Callable[[Expr], Expr] | None = None,
) -> str:
    """Emit ``scale * sum(a * b) + bias_scale * bias``; scales of 1 leave no trace, 16-bit floats accumulate in f32.

    Args:
        more: further reads, by map dimensions alone, for ``after``: ``Arg(2)`` on (``Arg(3)`` on with a bias).
        after: what to do with the sum before it is cast to the result's dtype.
    """
    body = product(a[1], b[1])
    result = dtype or a[1].dtype
    total: Expr = Acc(0, body.dtype)
    if scale != 1.0:
        total *= scale
    reads = [a, b]
    if bias is not None:
        reads.append(bias)
        shift = cast(Arg(2, bias[1].dtype), body.dtype)
        total += shift * bias_scale if bias_scale != 1.0 else shift
    reads += more
    total = cast(after(total) if after else total, result)
    then = () if isinstance(total, Acc) else (total,)
    name = out.name if isinstance(out, Tensor) else out
    return n.reduce([name], dims, reduced, "sum", reads, [body], then)[0]


@lifts("MatMul")
def lift_matmul(n: Node) -> None:
    """numpy's matmul: vectors lose their dimension, leading axes broadcast."""
    a, b = n.tensor(0), n.tensor(1)
    batch = axes(n.out().shape[: len(n.out().shape) - (len(a.shape) > 1) - (len(b.shape) > 1)], "b")
    m = Dim("m", a.shape[-1])
    rows = [Dim("i", a.shape[-2])] if len(a.shape) > 1 else []
    columns = [Dim("n", b.shape[-1])] if len(b.shape) > 1 else []
    left = [*broadcast(a.shape[:-2], batch), *(dim(d.name) for d in rows), dim("m")]
    right = [*broadcast(b.shape[:-2], batch), dim("m"), *(dim(d.name) for d in columns)]
    contract(n, n.out(), [*batch, *rows, *columns], [m], n.read(a.name, left), n.read(b.name, right))


@lifts("Gemm")
def lift_gemm(n: Node) -> None:
    """alpha * A' B' + beta * C, with transposition as a projection."""
    i, k = ("m", "i") if n.attr("transA", 0) else ("i", "m")
    a = n.read(n.ins[0], [dim(i), dim(k)])
    b = n.read(n.ins[1], [dim("n"), dim("m")] if n.attr("transB", 0) else [dim("m"), dim("n")])
    rows, columns = n.out().shape
    dims = (Dim("i", rows), Dim("n", columns))
    m = Dim("m", a[1].shape[1 if k == "m" else 0])
    beta = float(n.attr("beta", 1.0))
    bias = n.read(n.ins[2], broadcast(n.shape(2), dims)) if n.has(2) and beta != 0.0 else None
    contract(n, n.out(), dims, [m], a, b, scale=float(n.attr("alpha", 1.0)), bias=bias, bias_scale=beta)
