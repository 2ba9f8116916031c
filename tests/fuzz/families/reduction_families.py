"""Families that reduce: every reduction, arg-reductions, softmaxes, normalisations, prefix sums."""

from __future__ import annotations

import numpy as np

from tests.fuzz.generate.draw import Draw, Value
from tests.fuzz.generate.evaluate import need

REDUCTIONS = (
    "ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceLogSumExp",
    "ReduceSumSquare",
)  # fmt: skip


def reduce(d: Draw) -> None:
    """Over any axes, all of them or none, keeping them or not."""
    op = d.rng.choice(REDUCTIONS)
    whole = op in ("ReduceSum", "ReduceMax", "ReduceMin") and d.chance(0.3)
    x = d.pick(dtypes=("int32", "int64"), floating=False) if whole else d.pick(rank=range(1, 5))
    axes = [a - (x.rank if d.chance(0.3) else 0) for a in d.rng.sample(range(x.rank), d.rng.randint(0, x.rank))]
    ins = [x, d.ints(*axes)] if axes or d.chance(0.5) else [x]
    noop = 1 if not axes and d.chance(0.3) else None
    exact = op in ("ReduceMax", "ReduceMin") or not x.floating
    d.add(op, ins, exact=exact, keepdims=d.rng.randrange(2), noop_with_empty_axes=noop)


def arg(d: Draw) -> None:
    """ArgMax and ArgMin of exact values (eighths have ties), either end of a tie."""
    x = d.pick(rank=range(1, 5), exact=True, dtypes=("float32", "int32", "float32"))
    op = d.rng.choice(["ArgMax", "ArgMin"])
    d.add(op, [x], exact=True, axis=d.axis(x), keepdims=d.rng.randrange(2), select_last_index=d.rng.randrange(2))


def softmax(d: Draw) -> None:
    """Softmax, LogSoftmax, and Hardmax of exact values."""
    op = d.rng.choice(["Softmax", "Softmax", "LogSoftmax", "Hardmax"])
    x = d.pick(rank=range(1, 5), exact=op == "Hardmax")
    d.add(op, [x], exact=op == "Hardmax", axis=d.axis(x))


def masked(d: Draw) -> None:
    """A softmax under a mask of minus infinity (no row is wholly masked)."""
    x = d.pick(rank=range(1, 5))
    n = x.shape[-1]
    keep = d.data(x.shape[-2:], "bool")
    need(n, "no columns")
    keep[..., d.rng.randrange(n)] = True
    fill = d.weight(np.asarray(-np.inf if d.chance(0.7) else -1e4, x.dtype))
    (hidden,) = d.add("Where", [d.weight(keep), x, fill], exact=True, loud=True)
    if d.chance(0.7):
        d.add("Softmax", [hidden], axis=-1)
    else:
        d.add(d.rng.choice(["ReduceLogSumExp", "ReduceMax"]), [hidden, d.ints(-1)], keepdims=d.rng.randrange(2))
    d.forget(hidden)


def scan(d: Draw) -> None:
    """CumSum: either direction, exclusive or not."""
    x = d.pick(rank=range(1, 4))
    at = d.weight(np.asarray(d.axis(x), "int64"))
    d.add("CumSum", [x, at], exclusive=d.rng.randrange(2), reverse=d.rng.randrange(2))


def _channels(d: Draw, x: Value, n: int, positive: bool = False) -> Value:
    a = d.data((n,), x.dtype)
    return d.weight(np.abs(a) + np.asarray(0.5, x.dtype) if positive else a)


def layer_norm(d: Draw) -> None:
    """Over the last axes, with and without bias and the statistics; RMSNormalization where the opset has it."""
    x = d.pick(rank=range(1, 5), dtypes=("float32",))
    at = d.rng.randrange(x.rank)
    scale = d.weight(d.data(x.shape[at:]))
    if d.opset >= 23 and d.chance(0.3):
        d.add("RMSNormalization", [x, scale], axis=at)
        return
    bias = [d.weight(d.data(x.shape[at:]))] if d.chance(0.6) else []
    d.add("LayerNormalization", [x, scale, *bias], d.rng.choice([1, 1, 3]), axis=at - (x.rank if d.chance(0.5) else 0))


def channel_norm(d: Draw) -> None:
    """Batch, instance and group normalisation, LpNormalization, LRN, MeanVarianceNormalization."""
    kind = d.rng.randrange(6)
    if kind == 0:
        x = d.pick(rank=range(1, 5), dtypes=("float32",))
        d.add("LpNormalization", [x], axis=d.axis(x), p=d.rng.choice([1, 2]))
        return
    x = d.pick(rank=range(3, 5), dtypes=("float32",))
    c = x.shape[1]
    if kind == 1:
        need(x.rank == 4, "LRN wants images")
        d.add("LRN", [x], size=d.rng.choice([1, 3, 5]), alpha=0.1, beta=0.5, bias=1.5)
    elif kind == 2:
        d.add("InstanceNormalization", [x, _channels(d, x, c), _channels(d, x, c)])
    elif kind == 3 and d.opset >= 21 and c:
        groups = d.rng.choice([g for g in range(1, c + 1) if c % g == 0])
        d.add("GroupNormalization", [x, _channels(d, x, c), _channels(d, x, c)], num_groups=groups)
    elif kind == 4:
        d.add("MeanVarianceNormalization", [x], axes=sorted(d.rng.sample(range(x.rank), d.rng.randint(1, x.rank))))
    else:
        more = [_channels(d, x, c) for _ in range(3)]
        d.add("BatchNormalization", [x, *more, _channels(d, x, c, positive=True)])


FAMILIES = {f.__name__: f for f in (reduce, arg, softmax, masked, scan, layer_norm, channel_norm)}
