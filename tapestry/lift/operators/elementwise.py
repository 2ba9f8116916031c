"""Element-wise operators: one expression per operator, operands broadcast as numpy does."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np

from tapestry.ir.expr import Arg, Expr, call, cast
from tapestry.ir.types import FLOATS, INTEGERS
from tapestry.lift.builder import DTYPE_OF, Body, Node, Operand
from tapestry.lift.registry import Declined, lifts


def emit_map(n: Node, body: Body, count: int | None = None) -> None:
    """Emit output 0 as ``body`` over the node's first ``count`` inputs (all when None), broadcast to its shape."""
    dims, reads = n.out_dims(), list[Operand]()
    operands = [n.operand(k, dims, reads) for k in range(len(n.ins) if count is None else count)]
    n.block(n.out(), dims, reads, body(*operands))


def _primitive(fn: str) -> Body:
    def body(*xs: Expr) -> Expr:
        return call(fn, *xs)

    return body


def relu(x: Expr) -> Expr:
    """max(x, 0); a NaN stays one."""
    return call("max", x, 0)


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + exp(-x))."""
    return call("sigmoid", x)


def softplus(x: Expr) -> Expr:
    """log(1 + exp(x)), without overflow: max(x, 0) + log1p(exp(-|x|))."""
    return relu(x) + call("log1p", call("exp", -call("abs", x)))


SIXTH = float(np.float32(1 / 6))  # as an attribute in the body that ONNX gives a HardSwish of any type
PRIMITIVES = (  # those of the same name
    "Abs",
    "Neg",
    "Exp",
    "Log",
    "Sqrt",
    "Sin",
    "Cos",
    "Tan",
    "Asin",
    "Acos",
    "Atan",
    "Sinh",
    "Cosh",
    "Asinh",
    "Acosh",
    "Atanh",
    "Erf",
    "Tanh",
    "Sigmoid",
    "Floor",
    "Ceil",
    "Round",
    "Sign",
    "Not",
    "IsNaN",
)
UNARY: dict[str, Body] = {
    **{op: _primitive(op.lower()) for op in PRIMITIVES},
    "BitwiseNot": _primitive("not"),
    "Relu": relu,
    "Softplus": softplus,
    "Softsign": lambda x: x / (1 + call("abs", x)),
    "Mish": lambda x: x * call("tanh", softplus(x)),
    "Reciprocal": lambda x: 1 / x,
    "HardSwish": lambda x: x * _hard_sigmoid(x, SIXTH, 0.5),
}


@lifts(*UNARY)
def lift_unary(n: Node) -> None:
    """One input, one primitive or short formula."""
    emit_map(n, UNARY[n.kind], 1)


BINARY = {
    "Sub": "sub", "Div": "div", "Equal": "eq", "Greater": "gt", "Less": "lt", "GreaterOrEqual": "ge",
    "LessOrEqual": "le", "BitwiseAnd": "and", "BitwiseOr": "or", "BitwiseXor": "xor", "And": "and", "Or": "or", "Xor": "xor",
    "Where": "where",
}  # fmt: skip
MOST_OPERANDS = 64  # of one expression, which is as deep as they are many
VARIADIC = {"Add": "add", "Mul": "mul", "Sum": "add", "Max": "max", "Min": "min", "Mean": "add"}


@lifts(*BINARY)
def lift_binary(n: Node) -> None:
    """Two inputs (a Where has three), one primitive."""
    if n.attr("broadcast", 0) and n.version < 7:
        raise Declined  # the old, axis-based broadcasting
    emit_map(n, _primitive(BINARY[n.kind]))


@lifts(*VARIADIC)
def lift_variadic(n: Node) -> None:
    """Any number of inputs, merged from the left; Mean divides by their number."""
    fn, count = VARIADIC[n.kind], len(n.ins)
    if (n.attr("broadcast", 0) and n.version < 7) or count > MOST_OPERANDS:
        raise Declined

    def body(*xs: Expr) -> Expr:
        total = reduce(lambda a, b: call(fn, a, b), xs)
        return total / count if n.kind == "Mean" else total

    emit_map(n, body)


@lifts("Pow")
def lift_pow(n: Node) -> None:
    """x ** y in the dtype of x; squares and square roots become what they are."""
    if n.attr("broadcast", 0) and n.version < 7:
        raise Declined
    power = n.const(1)
    exponent = float(power.reshape(-1)[0]) if power is not None and power.size == 1 else math.nan
    if exponent == 2 and len(n.shape(1)) <= len(n.shape(0)):
        emit_map(n, lambda x: x * x, 1)
    elif exponent == 0.5 and n.dtype(0) in FLOATS and len(n.shape(1)) <= len(n.shape(0)):
        emit_map(n, lambda x: call("sqrt", x), 1)
    else:
        wide = "f64" if n.dtype(0) in INTEGERS and n.dtype(1) in FLOATS else n.dtype(0)
        emit_map(n, lambda x, y: cast(call("pow", cast(x, wide), cast(y, wide)), n.dtype(0)))


@lifts("Mod")
def lift_mod(n: Node) -> None:
    """Sign of the divisor, or of the dividend with ``fmod=1``."""
    emit_map(n, _primitive("fmod" if n.attr("fmod", 0) else "mod"))


@lifts("BitShift")
def lift_shift(n: Node) -> None:
    """Shifts of unsigned integers; a shift by the width or more gives 0 on every target."""
    emit_map(n, _primitive("shl" if n.attr("direction") == "LEFT" else "shr"))


@lifts("Cast", since=6)
def lift_cast(n: Node) -> None:
    """Conversion between supported dtypes (strings stay with ONNX)."""
    if int(n.attr("to")) not in DTYPE_OF:
        raise Declined
    emit_map(n, lambda x: cast(x, n.out().dtype), 1)


@lifts("IsInf")
def lift_isinf(n: Node) -> None:
    """Infinities of the signs asked for."""
    positive, negative = n.attr("detect_positive", 1), n.attr("detect_negative", 1)

    def body(x: Expr) -> Expr:
        if positive and negative:
            return call("isinf", x)
        if not (positive or negative):
            return call("isinf", x) & 0
        return call("isinf", x) & call("gt" if positive else "lt", x, 0)

    emit_map(n, body, 1)


@lifts("Clip")
def lift_clip(n: Node) -> None:
    """min(max(x, low), high); bounds are attributes before opset 11, optional scalar inputs after."""
    dims = n.out_dims()
    reads, e = [n.read(n.ins[0], dims)], Arg(0, n.dtype(0))
    for k, (fn, name) in enumerate((("max", "min"), ("min", "max")), start=1):
        if n.has(k):
            e = call(fn, e, n.operand(k, dims, reads))
        elif n.version < 11 and n.attr(name) is not None:
            e = call(fn, e, float(n.attr(name)))
    n.block(n.out(), dims, reads, e)


def _hard_sigmoid(x: Expr, alpha: float, beta: float) -> Expr:
    line = alpha * x + beta
    return call("max", 0, call("min", 1, line))


def _steps(x: Expr, below: Expr, above: Expr) -> Expr:
    return call("where", call("lt", x, 0), below, above)


def _f32(value: float) -> float:
    """ONNX attributes are f32: defaults must be rounded as the attributes are."""
    return float(np.float32(value))


@lifts("LeakyRelu", "Elu", "Selu", "Celu", "ThresholdedRelu", "HardSigmoid", "Shrink", "Swish")
def lift_activation(n: Node) -> None:
    """Activations with parameters in attributes."""
    defaults = {"LeakyRelu": 0.01, "HardSigmoid": 0.2, "Selu": 1.67326319217681884765625}
    a = float(n.attr("alpha", _f32(defaults.get(n.kind, 1.0))))

    def body(x: Expr) -> Expr:
        expm1 = call("exp", x) - 1 if n.dtype(0) in FLOATS else x
        if n.kind == "LeakyRelu":
            return _steps(x, a * x, x)
        if n.kind == "Elu":
            return _steps(x, a * expm1, x)
        if n.kind == "Selu":
            gamma = float(n.attr("gamma", 1.05070102214813232421875))
            return gamma * call("where", call("gt", x, 0), x, a * expm1)
        if n.kind == "Celu":
            bent = call("exp", x / a) - 1
            return relu(x) + call("min", 0, a * bent)
        if n.kind == "ThresholdedRelu":
            return call("where", call("gt", x, a), x, 0)
        if n.kind == "Swish":
            return x * sigmoid(a * x if a != 1 else x)
        if n.kind == "Shrink":
            edge, bias = (float(n.attr(k, v)) for k, v in (("lambd", 0.5), ("bias", 0.0)))
            high = call("where", call("gt", x, edge), x - bias, 0)
            return call("where", call("lt", x, -edge), x + bias, high)
        return _hard_sigmoid(x, a, float(n.attr("beta", 0.5)))

    emit_map(n, body, 1)


@lifts("PRelu", since=7)
def lift_prelu(n: Node) -> None:
    """x or slope * x; the slope broadcasts to x."""
    emit_map(n, lambda x, s: _steps(x, s * x, x))


def gelu(x: Expr, approximate: str) -> Expr:
    """0.5 x (1 + erf(x / sqrt 2)), or its tanh form (Hendrycks and Gimpel 2016)."""
    half = 0.5 * x
    if approximate == "none":
        return half * (1 + call("erf", x * math.sqrt(0.5)))
    return half * (1 + call("tanh", math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))


@lifts("Gelu")
def lift_gelu(n: Node) -> None:
    """`gelu` of each element."""
    emit_map(n, lambda x: gelu(x, n.attr("approximate", "none")), 1)
