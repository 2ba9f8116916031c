"""Normalisations: one pass of (n, mean, M2) moments into mean and 1/stddev, then a map."""

from __future__ import annotations

from collections.abc import Sequence

from tapestry.errors import ModelError
from tapestry.ir.expr import Acc, Arg, Expr, call, cast, number
from tapestry.ir.graph import Dim, points
from tapestry.ir.index import Aff, const, dim, floordiv
from tapestry.ir.types import Tensor
from tapestry.lift.builder import Node, Operand, accumulator, axes, broadcast, here
from tapestry.lift.operators.reduce import keep_dims, split_dims
from tapestry.lift.registry import Declined, lifts


def _statistics(n: Node, read: Operand, kept: Sequence[Dim], gone: Sequence[Dim], wide: str) -> tuple[str, str]:
    """Emit mean and 1/sqrt(variance + epsilon) over ``gone``."""
    spread = 1 / call("sqrt", Acc(2, wide) / Acc(0, wide) + float(n.attr("epsilon", 1e-5)))
    return _emit_moments(n, read, kept, gone, wide, "rstd", spread)


def _emit_moments(
    n: Node, read: Operand, kept: Sequence[Dim], gone: Sequence[Dim], wide: str, name: str, spread: Expr
) -> tuple[str, str]:
    """Emit the mean over ``gone``, and what ``spread`` makes of the moments (n, mean, M2)."""
    state = [number(1, wide), cast(Arg(0, read[1].dtype), wide), number(0, wide)]
    mean, other = n.reduce([n.temp("mean"), n.temp(name)], kept, gone, "moments", [read], state, [Acc(1, wide), spread])
    return mean, other


@lifts("LayerNormalization")
def lift_layer_norm(n: Node) -> None:
    """Over all axes from ``axis`` on; scale and bias broadcast; Mean and InvStdDev outputs on request."""
    x = n.tensor(0)
    rank, dims = len(x.shape), axes(x.shape)
    reduced = list(range(n.axis(-1, rank), rank))
    kept, gone = split_dims(x.shape, reduced)
    wide = accumulator(x.dtype)
    mean, rstd = _statistics(n, n.read(x.name, dims), kept, gone, wide)
    reads = [n.read(x.name, dims), n.read(mean, kept), n.read(rstd, kept)]
    reads += [n.read(n.ins[k], broadcast(n.shape(k), dims)) for k in (1, 2) if n.has(k)]

    def body(v: Expr, mu: Expr, spread: Expr, *affine: Expr) -> Expr:
        y = cast((cast(v, wide) - mu) * spread, x.dtype)
        for fn, p in zip(("mul", "add"), affine, strict=False):
            y = call(fn, y, p)
        return y

    n.block(n.out(), dims, reads, body)
    for k, src in ((1, mean), (2, rstd)):
        if n.wants(k):
            if src == rstd:  # NaN beside an infinite mean, whose distance from an infinite number is none
                nothing = Arg(1, wide) - Arg(1, wide)
                both = [n.read(rstd, kept), n.read(mean, kept)]
                src = n.block(n.temp("spread"), kept, both, Arg(0, wide) + nothing)
            if n.out(k).dtype != wide:
                src = n.block(n.temp(f"cast{k}"), kept, [n.read(src, kept)], cast(Arg(0, wide), n.out(k).dtype))
            keep_dims(n, n.out(k), src, reduced, x.shape)


@lifts("RMSNormalization")
def lift_rms_norm(n: Node) -> None:
    """x / sqrt(mean of squares + epsilon) * scale."""
    x = n.tensor(0)
    rank, dims = len(x.shape), axes(x.shape)
    kept, gone = split_dims(x.shape, list(range(n.axis(-1, rank), rank)))
    wide, count = accumulator(x.dtype), points(gone)
    v = cast(Arg(0, x.dtype), wide)
    square = Acc(0, wide) / count + float(n.attr("epsilon", 1e-5))
    spread = 1 / call("sqrt", square)
    (rstd,) = n.reduce([n.temp("rstd")], kept, gone, "sum", [n.read(x.name, dims)], [v * v], [spread])
    reads = [n.read(x.name, dims), n.read(rstd, kept), n.read(n.ins[1], broadcast(n.shape(1), dims))]

    def body(a: Expr, r: Expr, scale: Expr) -> Expr:
        out = n.out().dtype
        return cast(cast(cast(a, wide) * r, x.dtype), out) * cast(scale, out)

    n.block(n.out(), dims, reads, body)


@lifts("MeanVarianceNormalization")
def lift_mean_variance(n: Node) -> None:
    """(x - mean) / (deviation + 1e-9) over some axes. Its function in ONNX takes E[x²] - E[x]², which cancels badly (and gives
    the root of a negative number)."""
    x = n.tensor(0)
    rank, dims, wide = len(x.shape), axes(x.shape), accumulator(x.dtype)
    kept, gone = split_dims(x.shape, sorted({int(a) % rank for a in n.attr("axes", [0, 2, 3])}))
    deviation = call("sqrt", Acc(2, wide) / Acc(0, wide))
    mean, deviations = _emit_moments(n, n.read(x.name, dims), kept, gone, wide, "std", deviation)

    def body(v: Expr, mu: Expr, std: Expr) -> Expr:
        return cast((cast(v, wide) - mu) / (std + 1e-9), x.dtype)

    n.block(n.out(), dims, [n.read(x.name, dims), n.read(mean, kept), n.read(deviations, kept)], body)


def _channelwise(n: Node, x: Tensor, mean: Operand, rstd: Operand, scale: Sequence[Aff], wide: str) -> None:
    """Emit ``(x - mean) * rstd * scale + bias`` with scale and bias read at the given index."""
    dims = axes(x.shape)
    reads = [n.read(x.name, dims), mean, rstd, n.read(n.ins[1], scale), n.read(n.ins[2], scale)]

    def body(v: Expr, mu: Expr, spread: Expr, a: Expr, b: Expr) -> Expr:
        y = (cast(v, wide) - mu) * spread
        return cast(y * cast(a, wide) + cast(b, wide), x.dtype)

    n.block(n.out(), dims, reads, body)


@lifts("InstanceNormalization")
def lift_instance_norm(n: Node) -> None:
    """Per sample and channel, over the spatial axes."""
    x = n.tensor(0)
    wide = accumulator(x.dtype)
    kept, gone = split_dims(x.shape, list(range(2, len(x.shape))))
    mean, rstd = _statistics(n, n.read(x.name, axes(x.shape)), kept, gone, wide)
    _channelwise(n, x, n.read(mean, kept), n.read(rstd, kept), [dim("x1")], wide)


@lifts("GroupNormalization", since=21)
def lift_group_norm(n: Node) -> None:
    """Per sample and group of channels; ``x0, g | c, x2, …``."""
    x, groups = n.tensor(0), int(n.attr("num_groups"))
    if groups < 1 or len(x.shape) < 2 or x.shape[1] % groups:
        why = f"num_groups is {groups}, the input {list(x.shape)}"
        raise ModelError("channels do not divide into groups", where=n.where, why=why)
    wide, size = accumulator(x.dtype), x.shape[1] // groups
    dims = axes(x.shape)
    kept, gone = [dims[0], Dim("g", groups)], [Dim("c", size), *dims[2:]]
    read = n.read(x.name, [dim("x0"), dim("g") * size + dim("c"), *here(dims[2:])])
    mean, rstd = _statistics(n, read, kept, gone, wide)
    group = [dim("x0"), floordiv(dim("x1"), size, {"x1": x.shape[1]})]
    _channelwise(n, x, n.read(mean, group), n.read(rstd, group), [dim("x1")], wide)


@lifts("BatchNormalization")
def lift_batch_norm(n: Node) -> None:
    """Inference: (x - mean) * (scale / sqrt(var + epsilon)) + bias, with statistics per channel (per cell: ``spatial=0``)."""
    training = n.attr("training_mode", 0) if n.version >= 14 else n.version < 7 and not n.attr("is_test", 0)
    if training or any(n.wants(k) for k in range(1, 5)):
        raise Declined
    x = n.tensor(0)
    dims = axes(x.shape)
    wide = accumulator(x.dtype)
    channel = [dim("x1") if len(x.shape) > 1 else const(0)] if n.attr("spatial", 1) else here(dims[1:])
    reads = [n.read(x.name, dims), *(n.read(n.ins[k], channel) for k in range(1, 5))]

    def body(v: Expr, scale: Expr, bias: Expr, mean: Expr, var: Expr) -> Expr:
        factor = cast(scale, wide) / call("sqrt", cast(var, wide) + float(n.attr("epsilon", 1e-5)))
        return cast((cast(v, wide) - cast(mean, wide)) * factor + cast(bias, wide), x.dtype)

    n.block(n.out(), dims, reads, body)
