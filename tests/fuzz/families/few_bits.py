"""Families of few bits (quantised operators, bfloat16), and operators that only exporters of whole models write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from onnx import numpy_helper

from tests.fuzz.generate.draw import Draw, Value
from tests.fuzz.generate.evaluate import Array, need, onnx_type

NO_CHANNELS = "onnxruntime leaves what was in the memory where a convolution of integers has no channels"
BYTES = ("uint8", "int8")
QUANTISED = (*BYTES * 3, "int16", "uint16", "int4", "uint4", "float8_e4m3fn", "float8_e5m2")
LETTERS = (
    "...ij,...jk->...ik", "...ij->...ji", "...i,...i->...", "i...->...", "...ij->...", "ij...,jk...->ik...", "...i,ij->...j",
    "ii->i", "ii->", "iij->j", "ii,i->i", "iji->ij", "ij,ji->", "ij,jk", "ba", "ij,ji", "bij,bjk", "...ii->...i", "ij,,jk->ik",
)  # fmt: skip


def _kind(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def _scales(d: Draw, shape: tuple[int, ...]) -> Array:
    """Powers of two, through which rounding stays where it is."""
    return 2.0 ** d.data(shape, "int32", lo=-4, hi=-1).astype(np.float32)


def _zeros(d: Draw, shape: tuple[int, ...], kind: str) -> Array:
    near = 0 if kind.startswith("float8") else 7 if kind.endswith("4") else 60
    signed = not kind.startswith("u")
    return np.asarray(d.data(shape, "int32", lo=-min(near, 8) if signed else 0, hi=near)).astype(_kind(kind))


def _granular(d: Draw, x: Value) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The shape of the scales, and the attributes that say where they are: one, one per position, one per block."""
    how = d.rng.randrange(3)
    if how == 0 or not x.rank:
        return d.rng.choice([(), (1,)]) if d.opset >= 13 and x.rank > 1 else (), {}
    at = d.axis(x)
    n = x.shape[at]
    if how == 1 or d.opset < 21:
        return (n,), {"axis": at}
    block = d.rng.randint(1, max(1, n))
    shape = list(x.shape)
    shape[at] = -(-n // block)
    return tuple(shape), {"axis": at, "block_size": block}


def quantise(d: Draw) -> None:
    """To 4, 8 and 16 bits and back: per tensor, per axis and by blocks; scales and zero points as weights or as inputs."""
    x = d.pick(exact=True, dtypes=("float32",))
    kind = d.rng.choice(QUANTISED if d.opset >= 21 else BYTES)
    shape, where = _granular(d, x)
    s = _scales(d, shape)
    scale = d.weight(s) if d.chance(0.8) else d.input(s)
    zero: list[Value] = []
    if d.chance(0.7) or kind != "uint8":
        z = _zeros(d, shape, kind)
        zero = [d.weight(z) if d.chance(0.8) or kind not in BYTES else d.input(z)]
    (q,) = d.add("QuantizeLinear", [x, scale, *zero], exact=True, **where)
    if kind in BYTES and not d.chance(0.7):
        return
    (y,) = d.add("DequantizeLinear", [q, scale, *zero], exact=True, **where)
    if kind not in BYTES and d.chance(0.8):
        d.forget(q)
    if d.chance(0.4) and y.rank >= 2:
        d.add("MatMul", [y, _stored(d, (y.shape[-1], d.size()))])


def _stored(d: Draw, shape: tuple[int, ...], axis: int | None = None) -> Value:
    """A weight kept in few bits."""
    kind = d.rng.choice(["int8", "uint8", "int4", "uint4"] if d.opset >= 21 else BYTES)
    w = d.weight(_zeros(d, shape, kind))
    per = d.chance(0.6) and d.opset >= 13
    axis = len(shape) - 1 if axis is None else axis
    sizes = (shape[axis],) if per else ()
    where: dict[str, Any] = {"axis": axis} if per else {}
    if d.opset >= 21 and d.chance(0.3):
        block = d.rng.randint(1, max(1, shape[axis]))
        sizes = tuple(-(-n // block) if k == axis else n for k, n in enumerate(shape))
        where = {"axis": axis, "block_size": block}
    zero = [d.weight(_zeros(d, sizes, kind))] if d.chance(0.6) else []
    return d.add("DequantizeLinear", [w, d.weight(_scales(d, sizes)), *zero], exact=True, **where)[0]


def qdq(d: Draw) -> None:
    """Stored weights of few bits before MatMul, Gemm and Conv, whose results are quantised if they are exact."""
    kind = d.rng.randrange(3)
    if kind == 0:
        x = d.pick(rank=range(1, 4), dtypes=("float32",))
        (y,) = d.add("MatMul", [x, _stored(d, (x.shape[-1], d.size()))])
    elif kind == 1:
        x = d.pick(rank=2, dtypes=("float32",))
        need(x.shape[1], "onnxruntime forgets beta over nothing")
        (y,) = d.add("Gemm", [x, _stored(d, (d.size(), x.shape[1]), 0)], transB=1)
    else:
        x = d.pick(rank=range(3, 5), dtypes=("float32",))
        (y,) = d.add("Conv", [x, _stored(d, (d.size(4), x.shape[1], *(min(n, 2) for n in x.shape[2:])), 0)])
    if d.chance(0.4):
        d.add("Relu", [y])


def integer_products(d: Draw) -> None:
    """MatMulInteger and ConvInteger with zero points, of one, of every row and of every column."""
    one, two = d.rng.choice(BYTES), d.rng.choice(BYTES)
    conv = d.chance(0.35)
    x = d.pick(rank=range(3, 5) if conv else range(1, 4), floating=False, dtypes=(one,))
    if conv:
        need(x.array.size, NO_CHANNELS)
        w = d.fresh((d.size(4), x.shape[1], *(min(n, d.rng.choice([1, 2, 3])) for n in x.shape[2:])), two)
        columns = w.shape[0]
    else:
        batch = x.shape[:-2] if d.chance(0.3) else ()
        w = d.fresh((*batch, x.shape[-1], d.size()), two)
        columns = w.shape[-1]
    square = x.rank == 2 and x.shape[0] == x.shape[1]  # the ONNX reference takes a zero point per row for one per column
    rows = (x.shape[-2],) if not square and not conv and x.rank == 2 and d.chance(0.3) else ()
    zero: list[Value | None] = [d.weight(_zeros(d, rows, one)) if d.chance(0.7) else None]
    if d.chance(0.7):
        zero.append(d.weight(_zeros(d, (columns,) if d.chance(0.5) else (), two)))
    more: dict[str, Any] = {"pads": [d.rng.randrange(2) for _ in range(2 * (x.rank - 2))]} if conv and d.chance(0.4) else {}
    (y,) = d.add("ConvInteger" if conv else "MatMulInteger", [x, w, *zero], exact=True, **more)
    if d.chance(0.5):
        d.add("Cast", [y], exact=True, to=onnx_type(np.dtype("float32")))


def quantised_products(d: Draw) -> None:
    """QLinearMatMul and QLinearConv, per tensor and per column; DynamicQuantizeLinear. Scales are powers of two."""
    kind = d.rng.choice(BYTES)
    if d.chance(0.25):
        x = d.pick(exact=True, dtypes=("float32",))
        need(x.array.size, "nothing to measure")
        d.add("DynamicQuantizeLinear", [x], 3, exact=True)
        return
    conv = d.chance(0.4)
    x = d.pick(rank=range(3, 5) if conv else range(2, 4), floating=False, dtypes=(kind,))
    need(not (conv and not x.array.size), NO_CHANNELS)
    if conv:
        w = d.weight(d.data((d.size(4), x.shape[1], *(min(n, 2) for n in x.shape[2:])), kind))
        per = (w.shape[0],) if d.chance(0.5) else ()
        bias = [d.weight(d.data((w.shape[0],), "int32"))] if d.chance(0.5) else []
    else:
        w = d.weight(d.data((x.shape[-1], d.size()), kind))
        per, bias = (w.shape[1],) if d.chance(0.3) else (), []
    out = [d.weight(np.float32(2.0 ** d.rng.randint(-4, 3))), d.weight(_zeros(d, (), kind))]
    zero = d.weight(np.zeros(per, _kind(kind))) if conv else d.weight(_zeros(d, per, kind))
    ins = [x, d.weight(_scales(d, ())), d.weight(_zeros(d, (), kind)), w, d.weight(_scales(d, per)), zero, *out, *bias]
    d.add("QLinearConv" if conv else "QLinearMatMul", ins, exact=True)


def short_floats(d: Draw) -> None:
    """A chain in bfloat16 or float16: casts, arithmetic, products, sums."""
    need(d.opset >= 14, "bfloat16 was not of arithmetic")
    kind = d.rng.choice(["bfloat16", "bfloat16", "float16"])
    x = d.pick(rank=range(1, 4), dtypes=("float32",))
    (y,) = d.add("Cast", [x], to=onnx_type(_kind(kind)))
    for _ in range(d.rng.randint(1, 3)):
        op = d.rng.choice(["Mul", "Add", "Relu", "MatMul", "ReduceSum", "ReduceMax", "Transpose", "Tanh", "Concat", "Softmax"])
        if op in ("Mul", "Add"):
            (y,) = d.add(op, [y, d.weight(d.data(y.shape[d.rng.randrange(y.rank + 1) :]).astype(_kind(kind)))])
        elif op == "MatMul" and y.rank >= 2:
            (y,) = d.add(op, [y, d.weight(d.data((y.shape[-1], d.size())).astype(_kind(kind)))])
        elif op.startswith("Reduce"):
            (y,) = d.add(op, [y, d.ints(d.axis(y))], keepdims=1)
        elif op == "Concat":
            (y,) = d.add(op, [y, y], axis=d.axis(y))
        elif op in ("Relu", "Transpose", "Tanh", "Softmax"):
            (y,) = d.add(op, [y])
    d.add("Cast", [y], to=onnx_type(np.dtype("float32")))


def made_up(d: Draw) -> None:
    """Range, ConstantOfShape, EyeLike, Shape with bounds, and a Reshape to a shape computed of sizes."""
    kind = d.rng.randrange(5)
    if kind == 0:
        dtype = d.rng.choice(["int64", "int32", "float32"])
        a, by = d.rng.randint(-4, 4), d.rng.choice([1, 2, 3, -1, -2])
        ends = [np.asarray(v, dtype) for v in (a, a + by * d.rng.randint(1, 9) - d.rng.randrange(abs(by)) * (by > 0), by)]
        d.add("Range", [d.weight(e) if d.chance(0.8) else d.input(e) for e in ends], exact=True)
    elif kind == 1:
        x = d.pick(floating=False)
        (s,) = d.add("Shape", [x], exact=True)
        fill = d.data((1,), d.rng.choice(["float32", "int64", "int32", "bool", "float16", "uint8"]))
        d.add("ConstantOfShape", [s], exact=True, value=numpy_helper.from_array(fill))
    elif kind == 2:
        x = d.pick(rank=2, floating=False)
        need(x.dtype != "bfloat16", "no EyeLike has it")
        to = d.rng.choice([None, "float32", "int64", "int32"])
        d.add("EyeLike", [x], exact=True, k=d.rng.randint(-4, 4), dtype=to and onnx_type(np.dtype(to)))
    elif kind == 3 and d.opset >= 15:
        x = d.pick(floating=False)
        bounds: dict[str, Any] = {k: d.rng.randint(-x.rank - 1, x.rank + 1) for k in ("start", "end") if d.chance(0.7)}
        d.add("Shape", [x], exact=True, **bounds)
    else:
        x = d.pick(rank=range(2, 5))
        (s,) = d.add("Shape", [x], exact=True)
        order = d.rng.sample(range(x.rank), x.rank)
        (s,) = d.add("Gather", [s, d.ints(*order)], exact=True)
        if d.chance(0.5):
            (first,) = d.add("Gather", [s, d.ints(0)], exact=True)
            (s,) = d.add("Concat", [first, d.ints(-1)], exact=True, axis=0)
        d.add("Reshape", [x, s], exact=True)


def moved(d: Draw) -> None:
    """ReverseSequence, BitShift, Trilu of integers, Compress without an axis, GatherND with batches, CumSum of integers."""
    x = d.pick(rank=range(2, 5), floating=False, dtypes=("float32", "int64", "int32", "float32"))
    kind = d.rng.randrange(6)
    if kind == 0:
        time = d.rng.randrange(2)
        lengths = d.data((x.shape[1 - time],), "int64", lo=1, hi=max(1, x.shape[time]))
        ins = [x, d.weight(lengths) if d.chance(0.5) else d.input(lengths)]
        d.add("ReverseSequence", ins, exact=True, batch_axis=1 - time, time_axis=time)
    elif kind == 1:
        u = d.pick(floating=False, dtypes=("uint8", "uint32", "uint64", "uint16"))
        amount = d.fresh(u.shape[d.rng.randrange(u.rank + 1) :], u.dtype, hi=7)
        d.add("BitShift", [u, amount], exact=True, direction=d.rng.choice(["LEFT", "RIGHT"]))
    elif kind == 2:
        k = [d.weight(np.int64(d.rng.randint(-3, 3)))] if d.chance(0.7) else []
        d.add("Trilu", [x, *k], exact=True, upper=d.rng.randrange(2))
    elif kind == 3:
        d.add("Compress", [x, d.fresh((d.rng.randint(1, max(1, x.array.size)),), "bool")], exact=True)
    elif kind == 4:
        batch = d.rng.randint(1, x.rank - 1)
        last = d.rng.randint(1, x.rank - batch)
        rows = (*x.shape[:batch], *d.shape(d.rng.randint(0, 1)))
        sizes = x.shape[batch : batch + last]
        need(all(sizes), "nothing to gather")
        index = np.stack([d.data(rows, "int64", lo=-s, hi=s - 1) for s in sizes], -1)
        d.add("GatherND", [x, d.weight(index) if d.chance(0.5) else d.input(index)], exact=True, batch_dims=batch)
    else:
        at = d.weight(np.asarray(d.axis(x), d.rng.choice(["int64", "int32"])))
        more: dict[str, Any] = {"exclusive": d.rng.randrange(2), "reverse": d.rng.randrange(2)}
        d.add("CumSum", [x, at], exact=not x.floating, **more)


def letters(d: Draw) -> None:
    """Einsum with an ellipsis, with letters that repeat in a term, without an arrow, and with a term of nothing."""
    equation = d.rng.choice(LETTERS)
    sizes, dots = dict[str, int](), d.shape(d.rng.choice([0, 1, 2]))[:2]
    ins: list[Value] = []
    dtype = d.rng.choice(["float32", "float32", "int32", "float64"])
    for term in equation.split("->")[0].split(","):
        left, _, right = term.partition("...") if "..." in term else (term, "", "")
        front, back = ([sizes.setdefault(c, d.size(4)) for c in part] for part in (left, right))
        mine = tuple(1 if d.chance(0.15) else n for n in dots)
        ins.append(d.mate(d.fresh((1,), dtype), (*front, *(mine if "..." in term else ()), *back)))
    d.add("Einsum", ins, exact=dtype == "int32", equation=equation)


def ranked(d: Draw) -> None:
    """TopK from either end, Hardmax and ArgMax, among ties."""
    x = d.pick(rank=range(1, 4), exact=True, dtypes=("float32", "int64", "int32", "float32"))
    at, kind = d.axis(x), d.rng.randrange(3)
    need(x.array.size, "nothing to rank")
    if kind == 0:
        k = d.ints(d.rng.randint(1, x.shape[at]))
        y, place = d.add("TopK", [x, k], 2, exact=True, axis=at, largest=d.rng.randrange(2), sorted=1)
        if len(np.unique(x.array)) < x.array.size:  # which of equal values comes first is nobody's promise
            d.forget(place)
        if d.chance(0.3):
            d.add("ReduceSum", [y, d.ints(at)], exact=not y.floating)
    elif kind == 1 and x.floating:
        d.add("Hardmax", [x], exact=True, axis=at)
    else:
        last = d.rng.randrange(2) if d.opset >= 12 else None
        d.add(d.rng.choice(["ArgMax", "ArgMin"]), [x], exact=True, axis=at, keepdims=0, select_last_index=last)


def loss(d: Draw) -> None:
    """NegativeLogLikelihoodLoss and SoftmaxCrossEntropyLoss: weights, ignored classes, every reduction."""
    need(d.opset >= 12, "there were no losses")
    x = d.pick(rank=range(2, 5), dtypes=("float32",))
    classes, shape = x.shape[1], (x.shape[0], *x.shape[2:])
    need(x.array.size, "no class")
    label = d.data(shape, d.rng.choice(["int64", "int32"]), lo=0, hi=classes - 1)
    ignored = d.rng.choice([None, None, 0, classes - 1, -1, 255])
    if ignored is not None and d.chance(0.5):
        label = np.where(d.data(shape, "bool"), np.asarray(ignored, label.dtype), label)
    weight = [d.weight(np.abs(d.data((classes,))) + np.float32(0.25))] if d.chance(0.5) else []
    how: dict[str, Any] = {"reduction": d.rng.choice(["mean", "sum", "none", None]), "ignore_index": ignored}
    y = d.weight(label) if d.chance(0.5) else d.input(label)
    if d.chance(0.5):
        d.add("SoftmaxCrossEntropyLoss", [x, y, *weight], d.rng.choice([1, 2]), **how)
    else:
        d.add("NegativeLogLikelihoodLoss", [x, y, *weight], **how)


def signals(d: Draw) -> None:
    """Windows, a mel matrix, DFT and STFT of few samples, Det."""
    kind = d.rng.randrange(5)
    if kind == 0:
        n = d.weight(np.asarray(d.rng.randint(1, 12), d.rng.choice(["int64", "int32"])))
        op = d.rng.choice(["HannWindow", "HammingWindow", "BlackmanWindow"])
        d.add(op, [n], periodic=d.rng.randrange(2))
    elif kind == 1:
        bins, length = d.rng.randint(1, 6), d.rng.choice([8, 9, 16])
        ends = [d.weight(np.float32(v)) for v in (d.rng.choice([0, 20, 100]), d.rng.choice([3000, 4000]))]
        ins = [d.weight(np.int64(v)) for v in (bins, length, 8000)]
        d.add("MelWeightMatrix", [*ins, *ends])
    elif kind == 2:
        n = d.rng.randint(1, 4)
        d.add("Det", [d.mate(d.fresh((1,)), (*d.shape(d.rng.randrange(2)), n, n))])
    elif kind == 3 and d.opset >= 20:
        x = d.fresh((d.rng.randint(1, 3), d.size(5), d.rng.choice([1, 2])))
        one = 1 if x.shape[-1] == 1 and d.chance(0.4) else 0
        length = [d.weight(np.int64(d.rng.randint(1, 9)))] if d.chance(0.4) else [None]
        at = d.weight(np.int64(d.rng.choice([1, -2])))
        inverse = 1 if not one and d.chance(0.4) else 0
        d.add("DFT", [x, *length, at], inverse=inverse, onesided=one)
    else:
        n, width = d.rng.randint(6, 14), d.rng.randint(2, 5)
        x = d.fresh((d.rng.randint(1, 2), n, 1))
        window = d.weight(np.abs(d.data((width,))))
        d.add(
            "STFT", [x, d.weight(np.int64(d.rng.randint(1, 3))), window, d.weight(np.int64(width))], onesided=d.rng.randrange(2)
        )


FAMILIES: dict[str, Callable[[Draw], None]] = {
    f.__name__: f
    for f in (
        quantise, qdq, integer_products, quantised_products, short_floats, made_up, moved, letters, ranked, loss, signals,
    )
}  # fmt: skip
