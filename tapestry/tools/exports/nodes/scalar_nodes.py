"""How ONNX says each scalar primitive (`ir.expr.PRIMITIVES`), and expressions of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, Let, call, distinct, number
from tapestry.ir.types import FLOATS
from tapestry.lift.operators.elementwise import PRIMITIVES, gelu
from tapestry.tools.exports.nodes.onnx_nodes import Nodes, NotExpressible, Value
from tapestry.tools.exports.nodes.read_nodes import NOWHERE, Frame, index_value

PLAIN = {op.lower(): op for op in PRIMITIVES} | {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "pow": "Pow",
    "min": "Min",
    "max": "Max",
    "isinf": "IsInf",
    "eq": "Equal",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "where": "Where",
}
_LOGICAL = {"and": "And", "or": "Or", "xor": "Xor", "not": "Not"}
_BITWISE = {"and": "BitwiseAnd", "or": "BitwiseOr", "xor": "BitwiseXor", "not": "BitwiseNot"}
_TESTS = frozenset({"isnan", "isinf", "eq", "ne", "lt", "le", "gt", "ge"})


def primitive(nodes: Nodes, fn: str, args: Sequence[Value], dtype: str) -> Value:
    """One primitive of values that broadcast.

    Raises:
        NotExpressible: ONNX has no such function.
    """
    if fn in _FORMULAS:
        formula = _FORMULAS[fn](*(Arg(k, v.dtype) for k, v in enumerate(args)))
        return Expressions(nodes, NOWHERE, args.__getitem__)(formula)
    if fn in _SPECIAL:
        return _SPECIAL[fn](nodes, args)
    if fn == "cast":
        return nodes.cast(args[0], dtype)
    if fn == "mul" and (one := nodes.scalar(1, dtype)) in args:
        return args[args[0] == one]
    if fn in _LOGICAL:
        return nodes.apply((_LOGICAL if args[0].dtype == "bool" else _BITWISE)[fn], args)
    if fn not in PLAIN:
        raise NotExpressible(f"ONNX has no operator for '{fn}'")
    if fn in ("min", "max") and dtype == "bool":
        return nodes.apply("And" if fn == "min" else "Or", args)
    return nodes.apply(PLAIN[fn], args, "bool" if fn in _TESTS else "")


def _divided(nodes: Nodes, args: Sequence[Value]) -> Value:
    """A quotient; of integers by zero it is 0."""
    a, b = args
    if b.dtype in FLOATS:
        return nodes.apply("Div", args)
    zero, one = nodes.scalar(0, b.dtype), nodes.scalar(1, b.dtype)
    none = nodes.apply("Equal", [b, zero], "bool")
    return nodes.apply("Where", [none, zero, nodes.apply("Div", [a, nodes.apply("Where", [none, one, b])])])


def _rest(nodes: Nodes, args: Sequence[Value], *, of_divisor: bool) -> Value:
    """A remainder with the sign of the divisor, or of the dividend; of integers by zero it is 0."""
    a, b = args
    if b.dtype not in FLOATS:
        none = nodes.apply("Equal", [b, nodes.scalar(0, b.dtype)], "bool")
        return nodes.apply("Mod", [a, nodes.apply("Where", [none, nodes.scalar(1, b.dtype), b])], fmod=0 if of_divisor else 1)
    rest = nodes.apply("Mod", args, fmod=1)
    if not of_divisor:
        return rest
    zero = nodes.scalar(0, b.dtype)
    wrong = nodes.apply("Less", [nodes.apply("Mul", [nodes.apply("Sign", [rest]), nodes.apply("Sign", [b])]), zero], "bool")
    return nodes.apply("Where", [wrong, nodes.apply("Add", [rest, b]), rest])


def _not_equal(a: Expr, b: Expr) -> Expr:
    return call("not", call("eq", a, b))


def _log1p(x: Expr) -> Expr:
    """``x * log(u) / (u - 1)`` for u = 1 + x, which loses nothing near 0 (Kahan; Goldberg 1991, theorem 4)."""
    zero, one = number(0, x.dtype), number(1, x.dtype)
    u = call("add", x, one)
    less, log = call("sub", u, one), call("log", u)
    tiny = call("eq", less, zero)
    share = call("div", x, call("where", tiny, one, less))
    plain = call("or", call("isinf", u), call("le", u, zero))
    return call("where", tiny, x, call("where", plain, log, call("mul", log, share)))


def _expm1(x: Expr) -> Expr:
    """``(u - 1) * x / log(u)`` for u = exp(x), which loses nothing near 0 (Kahan)."""
    zero, one = number(0, x.dtype), number(1, x.dtype)
    u = call("exp", x)
    less = call("sub", u, one)
    tiny = call("eq", less, zero)
    inside = call("and", call("lt", call("abs", x), one), call("not", tiny))
    log = call("log", call("where", inside, u, number(2, x.dtype)))
    return call("where", inside, call("mul", less, call("div", x, log)), call("where", tiny, x, less))


def _shifted(nodes: Nodes, args: Sequence[Value], direction: str) -> Value:
    if not args[0].dtype.startswith("u"):
        raise NotExpressible("ONNX shifts unsigned integers alone")
    return nodes.apply("BitShift", args, direction=direction)


_FORMULAS: dict[str, Callable[..., Expr]] = {"log1p": _log1p, "expm1": _expm1, "ne": _not_equal}
_SPECIAL: dict[str, Callable[[Nodes, Sequence[Value]], Value]] = {
    "div": _divided,
    "mod": lambda nodes, args: _rest(nodes, args, of_divisor=True),
    "fmod": lambda nodes, args: _rest(nodes, args, of_divisor=False),
    "shl": lambda nodes, args: _shifted(nodes, args, "LEFT"), "shr": lambda nodes, args: _shifted(nodes, args, "RIGHT"),
}  # fmt: skip


def _gelu(e: Call) -> tuple[str, Expr] | None:
    """What ``approximate`` is, and the argument, of a GELU whose constants no f32 is: that of a node, not of its formula."""
    half = e.args[0]
    if e.fn != "mul" or e.dtype != "f32" or not isinstance(half, Call):
        return None
    exact = all(float(np.float32(c.value)) == c.value for c in distinct((e,)) if isinstance(c, Const) and c.dtype == "f32")
    tried = ((a, x) for x in half.args for a in ("none", "tanh")) if not exact else ()
    return next(((a, x) for a, x in tried if gelu(x, a) == e), None)


class Expressions:
    """Values of expressions over a frame; what is shared is computed once."""

    def __init__(
        self,
        nodes: Nodes,
        frame: Frame,
        read: Callable[[int], Value],
        states: Sequence[Value] = (),
        lets: Sequence[Value] = (),
    ) -> None:
        self.nodes, self.frame, self.read, self.states, self.lets = nodes, frame, read, states, lets
        self.known: dict[int, tuple[Expr, Value]] = {}  # by identity: a tree of shared parts is not gone through twice

    def __call__(self, e: Expr) -> Value:
        """The value of an expression: a number, or an array that broadcasts to the frame."""
        if id(e) not in self.known:
            self.known[id(e)] = e, self._value(e)
        return self.known[id(e)][1]

    def _value(self, e: Expr) -> Value:
        match e:
            case Const():
                return self.nodes.scalar(e.value, e.dtype)
            case Arg():
                return self.read(e.pos)
            case Acc():
                return self.states[e.field]
            case Let():
                return self.lets[e.pos]
            case Index():
                return self.nodes.cast(index_value(self.nodes, e.aff, self.frame), e.dtype)
            case Call():
                gelu = _gelu(e)
                if gelu is not None:
                    return self.nodes.apply("Gelu", [self(gelu[1])], approximate=gelu[0])
                return primitive(self.nodes, e.fn, [self(a) for a in e.args], e.dtype)
