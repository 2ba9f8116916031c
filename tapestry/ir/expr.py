"""Scalar bodies: a small expression tree, evaluated in the order written.

Never rewritten algebraically: ``x - x`` is not 0 for an infinity, ``0 * x`` is not 0 for a NaN. `PRIMITIVES` is the one
list of primitives. The verifier and each target spell them for themselves (`verify.interp`, `codegen.torch_cpu.base.scalars`,
`codegen.torch_cpu.c.print_c`, `codegen.triton.task.primitives`), so that no mistake is shared; a test holds the spellings
complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapestry.ir.index import Aff
from tapestry.ir.types import DTYPES, FLOATS


def _sign(fn: str, *, turned: bool = False) -> Callable[..., Call]:
    """What a sign between expressions does; ``turned``, where the expression is on its right."""
    return lambda *args: call(fn, *(args[::-1] if turned else args))


class Operators:
    """Python's signs as primitives; a number beside an expression is a literal of its dtype, as in `call`."""

    __slots__ = ()
    __add__, __radd__ = _sign("add"), _sign("add", turned=True)
    __sub__, __rsub__ = _sign("sub"), _sign("sub", turned=True)
    __mul__, __rmul__ = _sign("mul"), _sign("mul", turned=True)
    __truediv__, __rtruediv__ = _sign("div"), _sign("div", turned=True)
    __and__, __or__ = _sign("and"), _sign("or")
    __neg__, __invert__ = _sign("neg"), _sign("not")


@dataclass(frozen=True, slots=True)
class Const(Operators):
    """A literal of a dtype."""

    value: float | int | bool
    dtype: str


@dataclass(frozen=True, slots=True)
class Arg(Operators):
    """The value of read number ``pos`` at this point."""

    pos: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Acc(Operators):
    """Field number ``field`` of the reduced monoid state; only in ``then``."""

    field: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Index(Operators):
    """The value of an index expression at this point, in the coordinates of the whole, unsplit index space."""

    aff: Aff
    dtype: str = "i64"


@dataclass(frozen=True, slots=True)
class Call(Operators):
    """A primitive applied to arguments."""

    fn: str
    args: tuple[Expr, ...]
    dtype: str
    known: tuple[frozenset[Leaf], int, int] | None = field(
        default=None, init=False, compare=False, repr=False
    )  # see `_summary`


@dataclass(frozen=True, slots=True)
class Let(Operators):
    """The value of inner reduction number ``pos`` of the operation at this point."""

    pos: int
    dtype: str


Leaf = Arg | Acc | Index | Let
Expr = Const | Leaf | Call


@dataclass(frozen=True, slots=True)
class Primitive:
    """What every target must know of a scalar primitive.

    Attributes:
        arity: number of arguments.
        result: its dtype: ``same`` as the arguments', ``bool``, ``i64``, or ``float`` (the same, and they must be floats);
            ``where`` and ``cast`` have rules of their own.
        commutative: whether the two arguments may change places.
        flops: counted for one application.
    """

    arity: int
    result: str = "same"
    commutative: bool = False
    flops: int = 1


_BOTH = Primitive(2, commutative=True)
_TEST = Primitive(2, "bool")
_ALIKE = Primitive(2, "bool", commutative=True)
_CURVE = Primitive(1, "float")
_CURVES = (
    "exp",
    "log",
    "erf",
    "tanh",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "asinh",
    "acosh",
    "atanh",
    "sigmoid",
    "log1p",
    "expm1",
)
PRIMITIVES: dict[str, Primitive] = {
    "add": _BOTH, "mul": _BOTH, "and": _BOTH, "or": _BOTH, "xor": _BOTH, "min": _BOTH, "max": _BOTH,
    "sub": Primitive(2), "div": Primitive(2), "shl": Primitive(2), "shr": Primitive(2),
    "mod": Primitive(2), "fmod": Primitive(2), "pow": Primitive(2),
    "neg": Primitive(1), "abs": Primitive(1), "sign": Primitive(1), "not": Primitive(1), **dict.fromkeys(_CURVES, _CURVE),
    "sqrt": Primitive(1, "float"), "floor": Primitive(1, "float"), "ceil": Primitive(1, "float"),
    "round": Primitive(1, "float"), "isnan": Primitive(1, "bool"), "isinf": Primitive(1, "bool"), "eq": _ALIKE, "ne": _ALIKE,
    "lt": _TEST, "le": _TEST, "gt": _TEST, "ge": _TEST, "where": Primitive(3, "where"), "cast": Primitive(1, "cast", flops=0),
    "philox": Primitive(5, "i64"),
}  # fmt: skip
"""The primitives by name.

``philox(key, stream, draw, word, index)`` is output word 0..3 of Philox4x32-10 (Salmon et al., SC'11) with counter
``(index lo, index hi, draw, stream)`` and the 64-bit key as (lo, hi), as an i64 in [0, 2^32). ``div`` of integers truncates
towards zero, ``mod`` has the sign of the divisor, ``fmod`` of the dividend, and all three are 0 where an integer divisor is 0
(as numpy's); ``min`` and ``max`` propagate NaN; ``round`` is half to even.
"""


def number(value: float, dtype: str) -> Const:
    """A literal with the Python type that fits the dtype."""
    return Const(float(value) if dtype in FLOATS else bool(value) if dtype == "bool" else int(value), dtype)


def literal(value: Any, dtype: str) -> Expr:
    """A constant expression; a NaN is written as 0/0, because texts with a NaN literal do not compare equal."""
    if dtype in FLOATS and value != value:
        return number(0, dtype) / number(0, dtype)
    return number(value, dtype)


def call(fn: str, *given: Expr | float) -> Call:
    """Apply a primitive, inferring and checking dtypes (an assertion failure here is a bug of the lifter or rule).

    A number is a literal of the dtype of the last expression.
    """
    like = next(a for a in reversed(given) if isinstance(a, Operators)).dtype
    args = tuple(a if isinstance(a, Operators) else literal(a, like) for a in given)
    result = PRIMITIVES[fn].result
    assert result != "cast", "use cast()"
    assert len(args) == PRIMITIVES[fn].arity, f"{fn} takes {PRIMITIVES[fn].arity} arguments, not {len(args)}"
    operands = args[1:] if result == "where" else args
    kinds = {a.dtype for a in operands}
    assert len(kinds) == 1, f"{fn}: arguments differ in dtype: {[a.dtype for a in args]}"
    dtype = operands[0].dtype
    assert result != "where" or args[0].dtype == "bool", "where: the condition is not bool"
    assert result != "float" or dtype in FLOATS, f"{fn} needs floats, not {dtype}"
    return Call(fn, args, result if result in ("bool", "i64") else dtype)


def choose(place: Expr, starts: Sequence[int], values: Sequence[Expr]) -> Expr:
    """``values[k]`` for the last k with ``starts[k] <= place``, as a balanced tree of choices."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    low, high = choose(place, starts[:half], values[:half]), choose(place, starts[half:], values[half:])
    return call("where", call("lt", place, starts[half]), low, high)


def cast(x: Expr, dtype: str) -> Expr:
    """Convert x to another dtype as ONNX Cast does (no call when it has it already)."""
    assert dtype in DTYPES, dtype
    return x if x.dtype == dtype else Call("cast", (x,), dtype)


def uncast(e: Expr) -> Expr:
    """The expression inside any casts."""
    while isinstance(e, Call) and e.fn == "cast":
        e = e.args[0]
    return e


def walk(e: Expr) -> Iterator[Expr]:
    """e and all its sub-expressions, depth first."""
    yield e
    if isinstance(e, Call):
        for a in e.args:
            yield from walk(a)


def distinct(exprs: Iterable[Expr]) -> Iterator[Expr]:
    """What `walk` gives, but every object once: sub-expressions are shared, and a chain of quantisers, where each reads
    its value twice, is exponentially larger as a tree."""
    seen: set[int] = set()
    stack = list(exprs)[::-1]
    while stack:
        e = stack.pop()
        if id(e) not in seen:
            seen.add(id(e))
            yield e
            if isinstance(e, Call):
                stack.extend(reversed(e.args))


def count(exprs: Iterable[Expr], holds: Callable[[Expr], bool]) -> int:
    """How many of all the sub-expressions that `walk` gives something holds for, in time of the distinct ones."""
    known: dict[int, int] = {}

    def of(e: Expr) -> int:
        if id(e) not in known:
            known[id(e)] = holds(e) + (sum(map(of, e.args)) if isinstance(e, Call) else 0)
        return known[id(e)]

    return sum(map(of, exprs))


def depth(exprs: Iterable[Expr]) -> int:
    """How many calls stand inside each other at most."""
    return max((_summary(e)[1] for e in exprs), default=0)


def size(exprs: Iterable[Expr]) -> int:
    """How many sub-expressions `walk` gives."""
    return sum(_summary(e)[2] for e in exprs)


def leaves(exprs: Iterable[Expr]) -> frozenset[Leaf]:
    """The distinct leaves of some expressions, literals aside."""
    found = [_summary(e)[0] for e in exprs]
    return found[0] if len(found) == 1 else frozenset[Leaf]().union(*found)


def _summary(e: Expr) -> tuple[frozenset[Leaf], int, int]:
    """What `leaves`, `depth` and `size` say of an expression; a call notes it for those put around it."""
    if not isinstance(e, Call):
        return frozenset([] if isinstance(e, Const) else [e]), 0, 1
    if e.known is None:
        found, done, stack = set[Leaf](), dict[int, tuple[int, int]](), [(e, False)]
        while stack:
            x, ready = stack.pop()
            if x.known is not None:
                found |= x.known[0]
                done[id(x)] = x.known[1:]
            elif ready:
                inner = [done[id(a)] if isinstance(a, Call) else (0, 1) for a in x.args]
                done[id(x)] = 1 + max(d for d, _ in inner), 1 + sum(n for _, n in inner)
            elif id(x) not in done:
                stack.append((x, True))
                stack.extend((a, False) for a in x.args if isinstance(a, Call))
                found.update(a for a in x.args if not isinstance(a, Call | Const))
        object.__setattr__(e, "known", (frozenset(found), *done[id(e)]))
    assert e.known is not None
    return e.known


def rewrite(e: Expr, leaf: Callable[[Expr], Expr]) -> Expr:
    """Rebuild e with every leaf (Const, Arg, Acc, Index, Let) replaced by ``leaf(it)``; what is shared stays shared."""
    known: dict[int, Expr] = {}

    def of(e: Expr) -> Expr:
        if id(e) not in known:
            known[id(e)] = _with_args(e, tuple(map(of, e.args))) if isinstance(e, Call) else leaf(e)
        return known[id(e)]

    return of(e)


def replaced(e: Expr, old: Expr, new: Expr) -> Expr:
    """Rebuild e with ``new`` wherever ``old`` stands in it; what is shared stays shared."""
    known: dict[int, Expr] = {}

    def of(e: Expr) -> Expr:
        if id(e) not in known:
            known[id(e)] = new if e == old else _with_args(e, tuple(map(of, e.args))) if isinstance(e, Call) else e
        return known[id(e)]

    return of(e)


def _with_args(e: Call, args: tuple[Expr, ...]) -> Call:
    same = all(a is b or (not isinstance(a, Call) and a == b) for a, b in zip(args, e.args, strict=True))
    return e if same else Call(e.fn, args, e.dtype)


def arg_positions(exprs: tuple[Expr, ...]) -> frozenset[int]:
    """Which reads these expressions use."""
    return frozenset(x.pos for x in leaves(exprs) if isinstance(x, Arg))


def count_calls(exprs: tuple[Expr, ...]) -> int:
    """Number of primitive applications: the FLOPs per point."""
    return count(exprs, lambda x: isinstance(x, Call) and PRIMITIVES[x.fn].flops > 0)


# instructions that an element takes on a GPU, of primitives that take far more than one
LONG = {
    "erf": 30,
    "tanh": 16,
    "sin": 60,
    "cos": 60,
    "tan": 90,
    "pow": 90,
    "log1p": 24,
    "expm1": 24,
    "exp": 4,
    "log": 8,
    "sqrt": 8,
    "div": 10,
    "sigmoid": 12,
}


def instructions(exprs: tuple[Expr, ...]) -> int:
    """About how many instructions an element of some expressions takes."""
    return sum(LONG.get(x.fn, 1) for x in distinct(exprs) if isinstance(x, Call))
