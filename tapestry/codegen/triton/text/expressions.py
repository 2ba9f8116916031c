"""Expressions as Triton source: shared sub-expressions once, in a line of their own, and no line too long to read."""

from __future__ import annotations

from collections.abc import Callable

from tapestry.codegen.triton.task.primitives import TRITON_TYPES, cast_text, literal, row, typed
from tapestry.codegen.triton.text.axes import Namer
from tapestry.ir.expr import Arg, Call, Const, Expr, Index
from tapestry.ir.syntax.printer import bare

_LONG = 88
# operators and these functions give a bare literal the dtype of the other operands
_LITERALS_IN = frozenset({"min", "max", "where"})
_NATURAL = frozenset({"f32", "f16", "bf16", "i32", "i64"})
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


class Printer:
    """Prints expressions into ``lines``, with ``leaf`` giving the text of Arg, Acc and Index.

    Attributes:
        helpers: names of the helper functions used (`device_functions.HELPERS`).
        native: floats of 8 bits that the chip converts.
    """

    def __init__(
        self,
        leaf: Callable[[Expr], str],
        lines: list[str],
        namer: Namer,
        helpers: set[str],
        native: frozenset[str] = frozenset(),
    ) -> None:
        self.leaf, self.lines, self.namer, self.helpers, self.native = leaf, lines, namer, helpers, native
        self._same: dict[tuple[object, ...], int] = {}  # structure -> number of the distinct expression
        self._number: dict[int, int] = {}  # id of an Expr object -> the same (objects are kept alive by _kept)
        self._kept: list[Expr] = []
        self._uses: dict[int, int] = {}
        self._text: dict[int, str] = {}

    def all(self, exprs: tuple[Expr, ...]) -> list[str]:
        """Text of several expressions, which may share parts; literals come out typed."""
        for e in exprs:
            number = self._resolve(e)
            self._uses[number] = self._uses.get(number, 0) + 1
        return [typed(e.value, e.dtype) if isinstance(e, Const) else bare(self._print(e)) for e in exprs]

    def _resolve(self, e: Expr) -> int:
        """Number of the distinct expression that e is, by structure; a new one counts one use of each of its parts."""
        if id(e) in self._number:
            return self._number[id(e)]
        parts: list[int] = []
        if isinstance(e, Call):
            parts = [self._resolve(a) for a in e.args]
            key: tuple[object, ...] = (e.fn, e.dtype, *parts)
        else:  # repr tells 0.0 from -0.0 and finds nan equal to itself
            key = (type(e).__name__, repr(e))
        if key not in self._same:
            self._same[key] = len(self._same)
            for p in parts:
                self._uses[p] = self._uses.get(p, 0) + 1
        self._number[id(e)] = self._same[key]
        self._kept.append(e)
        return self._same[key]

    def _print(self, e: Expr) -> str:
        number = self._number[id(e)]
        if number not in self._text:
            text = self._call(e) if isinstance(e, Call) else self.leaf(e)
            if isinstance(e, Call) and (self._uses[number] > 1 or len(text) > _LONG):
                name = self.namer.take("v")
                self.lines.append(f"{name} = {bare(text)}")
                text = name
            self._text[number] = text
        return self._text[number]

    def _call(self, e: Call) -> str:
        if e.fn == "cast":
            return self.helped(cast_text(self._argument(e.args[0]), e.args[0].dtype, e.dtype, self.native))
        if e.fn == "pow" and (power := _small_power(e.args[1])):
            return "(" + " * ".join([self._argument(e.args[0], named=True)] * power) + ")"
        operands = list(e.args[1:] if e.fn == "where" else e.args)
        text = row(e.fn, operands[0].dtype)
        operator = text.startswith("(") and len(operands) > 1
        takes = operator or (e.fn in _LITERALS_IN and operands[0].dtype in _NATURAL)
        bare = takes and any(not isinstance(a, Const) for a in operands)
        heads = [self._argument(a) for a in e.args[: len(e.args) - len(operands)]]
        tails = [self._argument(a, bare=bare, named=text.count("{0}") > 1) for a in operands]
        if e.fn in _COMPARISONS and all(map(_is_index, operands)):  # in as many bits as indices have: half the registers of i64
            tails = [t.removesuffix(f".to({TRITON_TYPES['i64']})") for t in tails]
        return self.helped(text.format(*heads, *tails))

    def helped(self, text: str) -> str:
        """A text with the helper that it begins with noted."""
        if not text.startswith("@"):
            return text
        self.helpers.add(text[1 : text.index("(")])
        return text[1:]

    def _argument(self, e: Expr, *, bare: bool = False, named: bool = False) -> str:
        """Text of an argument: a bare literal where the operator gives it its dtype, a variable where it stands twice."""
        if isinstance(e, Const):
            return literal(e.value, e.dtype) if bare else typed(e.value, e.dtype)
        if named:
            self._uses[self._number[id(e)]] += 1
        return self._print(e)


def _is_index(e: Expr) -> bool:
    """Whether an expression is an index, or a number that indices may be compared with."""
    return isinstance(e, Index) or (isinstance(e, Const) and e.dtype == "i64" and abs(int(e.value)) < 1 << 31)


def _small_power(e: Expr) -> int:
    """2 or 3 where the exponent is that literal: a product, far cheaper than pow; else 0."""
    return int(e.value) if isinstance(e, Const) and e.value in (2, 3) else 0


def combine_source(state: tuple[Expr, ...], dtypes: tuple[str, ...], helpers: set[str]) -> str:
    """A monoid's merge of two states as a function ``combine(a0, .., b0, ..)``."""
    namer, lines = Namer(), list[str]()
    k = len(dtypes)
    names = [namer.take(f"{side}{i}") for side in "ab" for i in range(k)]

    def leaf(e: Expr) -> str:
        assert isinstance(e, Arg), e
        return names[e.pos]

    printer = Printer(leaf, lines, namer, helpers)
    out = ", ".join(printer.all(state))
    body = "".join(f"    {line}\n" for line in lines)
    return f"@triton.jit\ndef combine({', '.join(names)}):\n{body}    return {out}"
