"""Element-wise families: unary, binary with broadcasting, selections, casts, integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.fuzz.generate.draw import Draw, Value
from tests.fuzz.generate.evaluate import need, onnx_type

SMOOTH = (
    "Sigmoid", "Tanh", "Erf", "Softplus", "Softsign", "Sin", "Cos", "Atan", "Asinh", "Gelu", "HardSwish", "Mish", "Exp",
)  # fmt: skip
SLOPED = (
    ("LeakyRelu", "alpha"), ("Elu", "alpha"), ("Celu", "alpha"), ("Selu", "alpha", "gamma"), ("ThresholdedRelu", "alpha"),
    ("HardSigmoid", "alpha", "beta"), ("Shrink", "lambd", "bias"),
)  # fmt: skip
SELECTING = ("Relu", "Neg", "Abs", "Identity")
STEPS = ("Floor", "Ceil", "Round", "Sign", "IsNaN", "IsInf")
INTEGERS = ("int32", "int64", "int8", "uint8", "int16", "uint16", "uint32")


def unary(d: Draw) -> None:
    """A smooth function, one with a slope, or one that selects."""
    x = d.pick()
    kind = d.rng.randrange(4)
    if kind == 0:
        d.add(d.rng.choice(SELECTING), [x], exact=True)
    elif kind == 1:
        op, *names = d.rng.choice(SLOPED)
        if op in ("ThresholdedRelu", "Shrink"):
            x = d.pick(exact=True)
        if op == "Celu" and x.dtype != "float32":  # the only type it has
            (x,) = d.add("Cast", [x], to=onnx_type(np.dtype("float32")))
        slopes: dict[str, Any] = {n: d.rng.choice([0.25, 0.5, 1.5]) for n in names}
        d.add(op, [x], **slopes)
    elif kind == 2:
        (a,) = d.add("Abs", [x], exact=True)
        (b,) = d.add("Add", [a, d.weight(np.asarray(0.75, a.dtype))])
        d.add(d.rng.choice(["Sqrt", "Log", "Reciprocal"]), [b])
    else:
        op = d.rng.choice(SMOOTH)
        if op in ("Gelu", "Erf") and x.dtype == "float64":  # the evaluators' are good to single precision only
            (x,) = d.add("Cast", [x], to=onnx_type(np.dtype("float32")))
        d.add(op, [x])


def steps(d: Draw) -> None:
    """Functions that jump: of exact values only."""
    x, op = d.pick(exact=True), d.rng.choice(STEPS)
    need(not (op == "IsInf" and x.dtype == "float16" and d.opset < 20), "not of this opset, whatever the ONNX reference does")
    d.add(op, [x], exact=True)


def binary(d: Draw) -> None:
    """Arithmetic with broadcasting, residual additions among it."""
    x = d.pick()
    y = d.mate(x)
    ins = [x, y] if d.chance(0.6) else [y, x]
    op = d.rng.choice(["Add", "Add", "Sub", "Mul", "Max", "Min", "Div", "Pow", "PRelu", "Mod"])
    if op in ("Div", "Pow"):
        (a,) = d.add("Abs", [ins[1 if op == "Div" else 0]], exact=True)
        (b,) = d.add("Add", [a, d.weight(np.asarray(0.75, a.dtype))])
        d.add(op, [ins[0], b] if op == "Div" else [b, ins[1]])
    elif op == "PRelu":
        d.add(op, [x, d.fresh(x.shape[1:], x.dtype)])
    elif op == "Mod":
        a = d.pick(exact=True)
        d.add(op, [a, d.weight(np.asarray(d.rng.choice([0.75, -1.25]), a.dtype))], fmod=1)
    else:
        d.add(op, ins, exact=op in ("Max", "Min"))


def variadic(d: Draw) -> None:
    """Sum, Mean, Max and Min of one to four tensors."""
    x = d.pick()
    op = d.rng.choice(["Sum", "Mean", "Max", "Min"])
    d.add(op, [x, *(d.mate(x) for _ in range(d.rng.randrange(4)))], exact=op in ("Max", "Min"))


def choose(d: Draw) -> None:
    """Where and Clip."""
    x = d.pick(exact=d.chance(0.5))
    if d.chance(0.5):
        lo, hi = (d.weight(np.asarray(c, x.dtype)) if d.chance(0.8) else None for c in (-0.5, 0.75))
        d.add("Clip", [x, lo, hi], exact=True)
        return
    y = d.mate(x)
    test = d.fresh(x.shape[d.rng.randrange(x.rank + 1) :], "bool")
    d.add("Where", [test, x, y] if d.chance(0.5) else [test, y, x], exact=True)


def compare(d: Draw) -> None:
    """Comparisons of exact values, and what may follow: logic, a mask, a selection."""
    x = d.pick(exact=True, dtypes=("float32", "int32", "int64", "float32"))
    y = d.fresh(x.shape[d.rng.randrange(x.rank + 1) :], x.dtype)
    (test,) = d.add(d.rng.choice(["Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"]), [x, y], exact=True)
    kind = d.rng.randrange(4)
    if kind == 0:
        (test,) = d.add("Not", [test], exact=True)
    elif kind == 1:
        (test,) = d.add(d.rng.choice(["And", "Or", "Xor"]), [test, d.mate(test)], exact=True)
    elif kind == 2:
        d.add("Where", [test, x, d.mate(x, test.shape)], exact=True)
        return
    d.add("Cast", [test], exact=True, to=onnx_type(np.dtype(d.rng.choice(["float32", "int32", "int64", "uint8"]))))


def cast(d: Draw) -> None:
    """Between floats; and from exact values (which are small) to integers and back."""
    if d.chance(0.5):
        x = d.pick()
        kind = d.rng.choice(["float32", "float64", "float16", "float32"])
    else:
        x = d.pick(exact=True, dtypes=("float32", "int32", "int64", "bool", "uint8", "int8"))
        kind = d.rng.choice(["float32", "int32", "int64", "int8", "bool", "float64"])
        if x.floating and kind != "bool":
            (x,) = d.add("Clip", [x, d.weight(np.asarray(-9, x.dtype)), d.weight(np.asarray(9, x.dtype))], exact=True)
    d.add(
        "Cast", [x], exact=not x.floating or kind in ("float64", "bool", "int32", "int64", "int8"), to=onnx_type(np.dtype(kind))
    )


def integers(d: Draw) -> None:
    """Arithmetic of integers, with divisors of both signs, and of their bits."""
    x = d.pick(floating=False, dtypes=INTEGERS)
    bits = ["BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot"]
    op = d.rng.choice(["Add", "Sub", "Mul", "Div", "Div", "Div", "Mod", "Mod", *bits, "Abs", "Max"])
    if op in ("BitwiseNot", "Abs"):
        d.add(op, [x], exact=True)
        return
    y: Value = d.mate(x)
    if op in ("Div", "Mod"):
        a = d.data(x.shape[d.rng.randrange(x.rank + 1) :], x.dtype, lo=0)
        sign = -1 if a.dtype.kind == "i" and d.chance(0.3) else 1
        zero = 3 if d.chance(0.8) else 0  # over 0 the ONNX reference gives 0
        y = d.weight(np.where(a == 0, np.asarray(zero, a.dtype), a) * np.asarray(sign, a.dtype))
    d.add(op, [x, y], exact=True)


def quantised(d: Draw) -> None:
    """Quantise (of exact values), a product of integers, and back."""
    x = d.pick(exact=True, dtypes=("float32",))
    scale, zero = d.weight(np.float32(0.125)), d.weight(np.asarray(d.rng.randrange(100), "uint8"))
    (q,) = d.add("QuantizeLinear", [x, scale, zero], exact=True)
    if q.rank >= 2 and d.chance(0.6):
        w = d.weight(d.data((q.shape[-1], d.size()), "uint8"))
        (p,) = d.add("MatMulInteger", [q, w, zero], exact=True)
        d.add("Cast", [p], exact=True, to=onnx_type(np.dtype("float32")))
    else:
        d.add("DequantizeLinear", [q, scale, zero], exact=True)


FAMILIES = {f.__name__: f for f in (unary, steps, binary, variadic, choose, compare, cast, integers, quantised)}
