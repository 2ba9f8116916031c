"""Losses over classes: the score of the right class is a selection along the axis that the log-sum-exp goes over."""

from __future__ import annotations

from collections.abc import Sequence

from tapestry.ir.expr import Acc, Arg, Expr, Index, call, cast
from tapestry.ir.graph import Dim
from tapestry.ir.index import dim
from tapestry.ir.monoid import number
from tapestry.lift.building.builder import Node, accumulator, axes, here
from tapestry.lift.building.registry import Declined, lifts
from tapestry.lift.operators.reduce import centre, softmax, split_dims


@lifts("SoftmaxCrossEntropyLoss")
def lift_cross_entropy(n: Node) -> None:
    """``log(sum exp x) - x[label]`` over axis 1, weighted, and reduced as asked; log-probabilities on request."""
    x = n.tensor(0)
    if len(x.shape) < 2 or not x.size:
        raise Declined
    dims, wide = axes(x.shape), accumulator(x.dtype)
    kept, gone = split_dims(x.shape, [1])
    if n.wants(1):
        softmax(n, n.out(1), x.name, dims, [1], log=True)
    read = n.read(x.name, here(dims))
    value = cast(Arg(0, x.dtype), wide)
    names = (n.temp("m"), n.temp("l"))
    m, total = n.reduce(names, kept, gone, "logsumexp", [read], [value, number(1, wide)], [centre(Acc(0, wide)), Acc(1, wide)])
    right = _right(n, kept, gone, wide)
    reads = [n.read(t, here(kept)) for t in (right, m, total)]
    lost = n.block(n.temp("lost"), kept, reads, lambda r, m, s: call("neg", call("sub", call("sub", r, m), call("log", s))))
    _reduced(n, lost, kept, wide)


@lifts("NegativeLogLikelihoodLoss")
def lift_likelihood(n: Node) -> None:
    """``-x[label]`` over axis 1, weighted, and reduced as asked."""
    x = n.tensor(0)
    if len(x.shape) < 2 or not x.size:
        raise Declined
    wide = accumulator(x.dtype)
    kept, gone = split_dims(x.shape, [1])
    right = _right(n, kept, gone, wide)
    lost = n.block(n.temp("lost"), kept, [n.read(right, here(kept))], lambda v: call("neg", v))
    _reduced(n, lost, kept, wide)


def _right(n: Node, kept: Sequence[Dim], gone: Sequence[Dim], wide: str) -> str:
    """Emit the score of the right class."""
    x, label = n.tensor(0), n.tensor(1)
    reads = [n.read(x.name, here(axes(x.shape))), n.read(label.name, here(kept))]
    hit = call("eq", cast(Arg(1, label.dtype), "i64"), Index(dim(gone[0].name)))
    picked = call("where", hit, cast(Arg(0, x.dtype), wide), number(0, wide))
    return n.reduce([n.temp("right")], kept, gone, "sum", reads, [picked])[0]


def _reduced(n: Node, lost: str, kept: Sequence[Dim], wide: str) -> None:
    """Emit the loss: each sample's times its weight (0 where it is ignored), summed or averaged by weight, or left as it is."""
    label, how = n.tensor(1), n.attr("reduction", "mean")
    ignored = n.attr("ignore_index")
    reads = [n.read(lost, here(kept))]
    if ignored is not None:
        reads.append(n.read(label.name, here(kept)))
    if n.has(2):
        classes = Dim("v", n.shape(2)[0])
        table = [n.read(n.ins[2], [dim("v")]), n.read(label.name, here(kept))]
        hit = call("eq", cast(Arg(1, label.dtype), "i64"), Index(dim("v")))
        share = call("where", hit, cast(Arg(0, n.dtype(2)), wide), number(0, wide))
        reads.append(n.read(n.reduce([n.temp("share")], kept, [classes], "sum", table, [share])[0], here(kept)))
    values = [Arg(k, t.dtype) for k, (_, t) in enumerate(reads)]
    weight: Expr = values[-1] if n.has(2) else number(1, wide)
    term: Expr = call("mul", values[0], weight) if n.has(2) else values[0]
    if ignored is not None:  # what is ignored may be infinite
        skipped = call("eq", cast(values[1], "i64"), number(int(ignored), "i64"))
        weight, term = (call("where", skipped, number(0, wide), e) for e in (weight, term))
    out = n.out().dtype
    total = Acc(0, wide)
    if how == "none":
        n.block(n.out(), kept, reads, cast(term, out))
    elif how == "sum":
        n.reduce([n.outs[0]], (), kept, "sum", reads, [term], [cast(total, out)])
    else:
        mean = call("div", total, Acc(1, wide))
        n.reduce([n.outs[0]], (), kept, "sum.sum", reads, [term, weight], [cast(mean, out)])
