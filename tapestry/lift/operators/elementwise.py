"""Element-wise operators: one expression per operator, operands broadcast as numpy does."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import reduce

import numpy as np

from tapestry.ir.expr import Arg, Const, Expr, Index, call, cast
from tapestry.ir.graph import Dim
from tapestry.ir.index import Aff, const, dim
from tapestry.ir.monoid import number
from tapestry.ir.types import FLOATS, INTEGERS
from tapestry.lift.builder import DTYPE_OF, Body, Declined, Node, Operand, axes, here, lifts, literal
from tapestry.lift.file.protos import SOURCE


def c(value: float, like: Expr) -> Expr:
    """A literal of the same dtype as an expression."""
    return literal(value, like.dtype)


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
    return call("max", x, c(0, x))


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + exp(-x))."""
    return call("sigmoid", x)


def softplus(x: Expr) -> Expr:
    """log(1 + exp(x)), without overflow: max(x, 0) + log1p(exp(-|x|))."""
    return call("add", relu(x), call("log1p", call("exp", call("neg", call("abs", x)))))


SIXTH = float(np.float32(1 / 6))  # as an attribute in the body that ONNX gives a HardSwish of any type
PRIMITIVES = (  # those of the same name
    "Abs", "Neg", "Exp", "Log", "Sqrt", "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh",
    "Erf", "Tanh", "Sigmoid", "Floor", "Ceil", "Round", "Sign", "Not", "IsNaN",
)  # fmt: skip
UNARY: dict[str, Body] = {
    **{op: _primitive(op.lower()) for op in PRIMITIVES},
    "BitwiseNot": _primitive("not"),
    "Relu": relu,
    "Softplus": softplus,
    "Softsign": lambda x: call("div", x, call("add", c(1, x), call("abs", x))),
    "Mish": lambda x: call("mul", x, call("tanh", softplus(x))),
    "Reciprocal": lambda x: call("div", c(1, x), x),
    "HardSwish": lambda x: call("mul", x, _hard_sigmoid(x, SIXTH, 0.5)),
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
        return call("div", total, c(count, total)) if n.kind == "Mean" else total

    emit_map(n, body)


@lifts("Pow")
def lift_pow(n: Node) -> None:
    """x ** y in the dtype of x; squares and square roots become what they are."""
    if n.attr("broadcast", 0) and n.version < 7:
        raise Declined
    power = n.const(1)
    exponent = float(power.reshape(-1)[0]) if power is not None and power.size == 1 else math.nan
    if exponent == 2 and len(n.shape(1)) <= len(n.shape(0)):
        emit_map(n, lambda x: call("mul", x, x), 1)
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
            return call("and", call("isinf", x), number(0, "bool"))
        return call("and", call("isinf", x), call("gt" if positive else "lt", x, c(0, x)))

    emit_map(n, body, 1)


@lifts("Clip")
def lift_clip(n: Node) -> None:
    """min(max(x, low), high); bounds are attributes before opset 11, optional scalar inputs after."""
    dims = n.out_dims()
    reads, e = [n.read(n.ins[0], here(dims))], Arg(0, n.dtype(0))
    for k, (fn, name) in enumerate((("max", "min"), ("min", "max")), start=1):
        if n.has(k):
            e = call(fn, e, n.operand(k, dims, reads))
        elif n.version < 11 and n.attr(name) is not None:
            e = call(fn, e, c(float(n.attr(name)), e))
    n.block(n.out(), dims, reads, e)


def _hard_sigmoid(x: Expr, alpha: float, beta: float) -> Expr:
    line = call("add", call("mul", c(alpha, x), x), c(beta, x))
    return call("max", c(0, x), call("min", c(1, x), line))


def _steps(x: Expr, below: Expr, above: Expr) -> Expr:
    return call("where", call("lt", x, c(0, x)), below, above)


def _f32(value: float) -> float:
    """ONNX attributes are f32: defaults must be rounded as the attributes are."""
    return float(np.float32(value))


@lifts("LeakyRelu", "Elu", "Selu", "Celu", "ThresholdedRelu", "HardSigmoid", "Shrink", "Swish")
def lift_activation(n: Node) -> None:
    """Activations with parameters in attributes."""
    defaults = {"LeakyRelu": 0.01, "HardSigmoid": 0.2, "Selu": 1.67326319217681884765625}
    a = float(n.attr("alpha", _f32(defaults.get(n.kind, 1.0))))

    def body(x: Expr) -> Expr:
        expm1 = call("sub", call("exp", x), c(1, x)) if n.dtype(0) in FLOATS else x
        if n.kind == "LeakyRelu":
            return _steps(x, call("mul", c(a, x), x), x)
        if n.kind == "Elu":
            return _steps(x, call("mul", c(a, x), expm1), x)
        if n.kind == "Selu":
            gamma = float(n.attr("gamma", 1.05070102214813232421875))
            return call("mul", c(gamma, x), call("where", call("gt", x, c(0, x)), x, call("mul", c(a, x), expm1)))
        if n.kind == "Celu":
            bent = call("sub", call("exp", call("div", x, c(a, x))), c(1, x))
            return call("add", relu(x), call("min", c(0, x), call("mul", c(a, x), bent)))
        if n.kind == "ThresholdedRelu":
            return call("where", call("gt", x, c(a, x)), x, c(0, x))
        if n.kind == "Swish":
            return call("mul", x, sigmoid(call("mul", c(a, x), x) if a != 1 else x))
        if n.kind == "Shrink":
            edge, bias = (float(n.attr(k, v)) for k, v in (("lambd", 0.5), ("bias", 0.0)))
            high = call("where", call("gt", x, c(edge, x)), call("sub", x, c(bias, x)), c(0, x))
            return call("where", call("lt", x, c(-edge, x)), call("add", x, c(bias, x)), high)
        return _hard_sigmoid(x, a, float(n.attr("beta", 0.5)))

    emit_map(n, body, 1)


@lifts("PRelu", since=7)
def lift_prelu(n: Node) -> None:
    """x or slope * x; the slope broadcasts to x."""
    emit_map(n, lambda x, s: _steps(x, call("mul", s, x), x))


@lifts("Gelu")
def lift_gelu(n: Node) -> None:
    """0.5 x (1 + erf(x / sqrt 2)), or its tanh form."""

    def body(x: Expr) -> Expr:
        half = call("mul", c(0.5, x), x)
        if n.attr("approximate", "none") == "none":
            return call("mul", half, call("add", c(1, x), call("erf", call("mul", x, c(math.sqrt(0.5), x)))))
        cube = call("mul", call("mul", x, x), x)
        inner = call("mul", c(math.sqrt(2 / math.pi), x), call("add", x, call("mul", c(0.044715, x), cube)))
        return call("mul", half, call("add", c(1, x), call("tanh", inner)))

    emit_map(n, body, 1)


# Random operators, counter-based: a value is a function of a key and the element's row-major index, nothing else.
#
# Any split, order or device gives the same bits, and so do all targets: logarithm and cosine are built here from
# exactly rounded primitives alone, because no two libraries' agree. Sub-results that are used several times are tensors
# of their own, since bodies are trees.


BITS = 24  # of a uniform number: what an f32 holds exactly


def key_of(n: Node) -> int:
    """The node's key: 63 bits from the session's seed, the node's name and its ``seed`` attribute."""
    text = f"{n.b.seed}|{n.attr(SOURCE, n.source)}|{n.attr('seed', None)!r}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def row_major(dims: Sequence[Dim]) -> Aff:
    """Index of an element in the whole tensor."""
    flat = const(0)
    for d in dims:
        flat = flat * d.size + dim(d.name)
    return flat


def bits(n: Node, dims: Sequence[Dim], word: int = 0) -> Expr:
    """The top bits of one output word of Philox for an element, as an i64 in [0, 2^BITS)."""
    key, zero, stream, shift = (number(v, "i64") for v in (key_of(n), 0, word, 32 - BITS))
    return call("shr", call("philox", key, zero, zero, stream, Index(row_major(dims))), shift)


def uniform(n: Node, dims: Sequence[Dim]) -> Expr:
    """An f32 in [0, 1), a multiple of 2^-24."""
    return call("mul", cast(bits(n, dims), "f32"), number(2.0**-BITS, "f32"))


def _polynomial(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Horner's rule, from the highest coefficient (given last)."""
    total: Expr = number(coefficients[-1], x.dtype)
    for c in reversed(coefficients[:-1]):
        total = call("add", call("mul", total, x), number(c, x.dtype))
    return total


def _exponent(x: Expr) -> Expr:
    """The k in [0, BITS] for which x / 2^k is in [sqrt(1/2), sqrt(2)), by counting thresholds below an i64."""
    total: Expr = number(0, "i64")
    for k in range(1, BITS + 1):
        edge = number(math.ceil(2**k * math.sqrt(0.5)), "i64")
        total = call("add", total, cast(call("ge", x, edge), "i64"))
    return total


def _atanh_argument(x: Expr, k: Expr) -> Expr:
    """(f - 1) / (f + 1) for f = x / 2^k; the division by a power of two is exact."""
    power = call("shl", number(1, "i64"), call("sub", number(BITS, "i64"), k))
    f = call("mul", cast(call("mul", x, power), "f32"), number(2.0**-BITS, "f32"))
    one = number(1, "f32")
    return call("div", call("sub", f, one), call("add", f, one))


def _log(t: Expr, k: Expr) -> Expr:
    """ln(2^(k - BITS) * f) from t = (f - 1) / (f + 1): 2 atanh(t) + (k - BITS) ln 2; |t| <= 0.172."""
    series = call("mul", call("mul", number(2, "f32"), t), _polynomial(call("mul", t, t), [1 / (2 * i + 1) for i in range(6)]))
    whole = call("mul", cast(call("sub", k, number(BITS, "i64")), "f32"), number(math.log(2), "f32"))
    return call("add", whole, series)


def _cosine(quadrant: Expr, a: Expr) -> Expr:
    """cos(quadrant * pi/2 + a) for |a| <= pi/4."""
    square = call("mul", a, a)
    cos = _polynomial(square, [(-1) ** i / math.factorial(2 * i) for i in range(6)])
    sin = call("mul", a, _polynomial(square, [(-1) ** i / math.factorial(2 * i + 1) for i in range(5)]))
    turn = call("and", quadrant, number(3, "i64"))
    flat = call("eq", call("and", turn, number(1, "i64")), number(0, "i64"))
    value = call("where", flat, cos, sin)
    sign = call("or", call("eq", turn, number(1, "i64")), call("eq", turn, number(2, "i64")))
    return call("where", sign, call("neg", value), value)


def emit_uniform(n: Node, dims: Sequence[Dim]) -> None:
    """low + u * (high - low)."""
    low, high, out = float(n.attr("low", 0.0)), float(n.attr("high", 1.0)), n.out()
    u = uniform(n, dims)
    value = u if (low, high) == (0.0, 1.0) else call("add", literal(low, "f32"), call("mul", u, literal(high - low, "f32")))
    n.block(out, dims, [], cast(value, out.dtype))


def emit_normal(n: Node, dims: Sequence[Dim]) -> None:
    """Box-Muller on words 0 and 1 of one counter: mean + scale * sqrt(-2 ln u) * cos(2 pi v), u in (0, 1]."""
    base, out, spots = n.outs[0], n.out(), here(dims)
    first = n.block(n.temp("u"), dims, [], call("add", bits(n, dims, 0), number(1, "i64")))
    second = n.block(n.temp("v"), dims, [], bits(n, dims, 1))
    read = n.read(first, spots)
    k = n.block(n.b.fresh(f"{base}.k"), dims, [read], _exponent)
    t = n.block(n.b.fresh(f"{base}.t"), dims, [read, n.read(k, spots)], _atanh_argument)
    quarter = BITS - 2

    def nearest(v: Expr) -> Expr:
        return call("shr", call("add", v, number(1 << (quarter - 1), "i64")), number(quarter, "i64"))

    def angle(v: Expr) -> Expr:
        rest = call("sub", v, call("shl", nearest(v), number(quarter, "i64")))
        return call("mul", cast(rest, "f32"), number(2 * math.pi * 2.0**-BITS, "f32"))

    a = n.block(n.temp("a"), dims, [n.read(second, spots)], angle)
    mean, scale = float(n.attr("mean", 0.0)), float(n.attr("scale", 1.0))

    def value(t: Expr, k: Expr, v: Expr, a: Expr) -> Expr:
        radius = call("sqrt", call("mul", number(-2, "f32"), _log(t, k)))
        z = call("mul", radius, _cosine(nearest(v), a))
        z = z if scale == 1.0 else call("mul", literal(scale, "f32"), z)
        return cast(z if mean == 0.0 else call("add", literal(mean, "f32"), z), out.dtype)

    n.block(out, dims, [n.read(name, spots) for name in (t, k, second, a)], value)


@lifts("RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike")
def lift_random(n: Node) -> None:
    """A tensor of random numbers; the -Like forms take shape (and dtype, unless given) from their input."""
    (emit_uniform if "Uniform" in n.kind else emit_normal)(n, n.out_dims())


def _below(n: Node, dims: Sequence[Dim], p: Expr) -> Expr:
    """True with probability p: an integer comparison where p is known, an exact one of floats where it is not."""
    if isinstance(p, Const):
        return call("lt", bits(n, dims), number(math.ceil(float(p.value) * 2**BITS), "i64"))
    u = uniform(n, dims)
    return call("lt", u, cast(p, "f32")) if p.dtype != "f64" else call("lt", cast(u, "f64"), p)


@lifts("Bernoulli", since=15)
def lift_bernoulli(n: Node) -> None:
    """1 with the probability given at each element."""
    dims, reads = n.out_dims(), list[Operand]()
    p = n.operand(0, dims, reads)
    n.block(n.out(), dims, reads, cast(_below(n, dims, p), n.out().dtype))


@lifts("Dropout")
def lift_dropout(n: Node) -> None:
    """The identity, unless training: then elements are dropped with probability ``ratio`` and the rest scaled up."""
    x, dims = n.tensor(0), axes(n.shape(0))
    flag = n.const(2) if n.version >= 12 and n.has(2) else None
    asked = n.version >= 12 and n.has(2) and flag is None  # at run time
    training = (n.version < 7 and not n.attr("is_test", 0)) or asked or (flag is not None and bool(flag.reshape(-1)[0]))
    reads = [n.read(x.name, here(dims))]
    given = n.version >= 12 and n.has(1)
    ratio = n.operand(1, dims, reads) if given else literal(float(n.attr("ratio", 0.5)), x.dtype)
    if not training or (isinstance(ratio, Const) and ratio.value == 0):
        n.view(n.out(), x.name, dims, here(dims))
        if n.wants(1):
            n.block(n.out(1), dims, [], number(1, n.out(1).dtype))
        return
    keep, scale = call("not", _below(n, dims, ratio)), _kept_scale(ratio, x.dtype)
    if asked:
        reads.append(n.read(n.ins[2], [const(0)] * len(n.shape(2))))
        idle = call("not", Arg(len(reads) - 1, "bool"))
        keep, scale = call("or", keep, idle), call("where", idle, number(1, x.dtype), scale)
    n.block(n.out(), dims, reads, call("where", keep, call("mul", Arg(0, x.dtype), scale), number(0, x.dtype)))
    if n.wants(1):
        n.block(n.out(1), dims, reads, cast(keep, n.out(1).dtype))


def _kept_scale(ratio: Expr, dtype: str) -> Expr:
    """1 / (1 - ratio)."""
    if isinstance(ratio, Const):
        return literal(1 / (1 - float(ratio.value)), dtype)
    return cast(call("div", number(1, ratio.dtype), call("sub", number(1, ratio.dtype), ratio)), dtype)
