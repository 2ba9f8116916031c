"""The parser of IR text; every error names the line, the column and what was expected."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, replace

from tapestry.errors import TextError
from tapestry.ir.expr import PRIMITIVES, Acc, Arg, Const, Expr, Index, Let, call, cast, number
from tapestry.ir.graph import Block, Dim, Graph, Guard, Inner, Op, Opaque, Read, Split
from tapestry.ir.index import Aff, const, dim, floordiv, modulo
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.syntax.printer import INFIX
from tapestry.ir.syntax.tokens import TOKEN, WIDTH
from tapestry.ir.types import DTYPES, FLOATS, HOST, Tensor, Weight
from tapestry.system.quoting import printable


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of text: its kind (string, number, ident, group ``b..``, punct or end) and where it starts."""

    kind: str
    text: str
    at: int


class Tokens:
    """A text as a list of tokens, with the position of a reader in it.

    Args:
        text: what is read. White space and comments (from ``#`` to the end of a line) separate tokens.
        file: the file's name, for errors.
        groups: whether ``b..`` is a group of dimensions, as in rules, rather than a name with two dots.

    Raises:
        TextError: some character starts no token.
    """

    def __init__(self, text: str, file: str = "", *, groups: bool = False) -> None:
        self.text, self.file = text, file
        self.at: int = 0
        self.tokens: list[Token] = []
        pos = 0
        while pos < len(text):
            m = TOKEN.match(text, pos)
            if not m:
                raise self.error(f"unexpected character {text[pos]!r}", pos)
            if m.lastgroup:
                kind = "ident" if m.lastgroup == "group" and not groups else m.lastgroup
                self.tokens.append(Token(kind, m.group(), pos))
            pos = m.end()
        self.tokens.append(Token("end", "end of text", len(text)))

    @property
    def next(self) -> Token:
        """The token that is read next."""
        return self.tokens[self.at]

    @property
    def last(self) -> Token:
        """The token that was read last."""
        return self.tokens[max(0, self.at - 1)]

    def error(self, what: str, at: int) -> TextError:
        """An error at a position of the text, with its line and a caret under its column."""
        start = self.text.rfind("\n", 0, at) + 1
        line, column = self.text.count("\n", 0, at) + 1, at - start + 1
        left = max(0, column - WIDTH)  # of a line of thousands of characters, what is around the place
        shown = self.text[start + left : start + left + 2 * WIDTH].split("\n", 1)[0]
        caret = re.sub(r"[^\t]", " ", shown[: column - 1 - left]) + "^"
        where = f"{self.file}:{line}:{column}" if self.file else f"line {line}, column {column}"
        return TextError(f"{what}\n    {shown}\n    {caret}", where=where)

    def fail(self, expected: str) -> TextError:
        """The error that the next token is not what was expected."""
        found = self.next.text if len(self.next.text) <= 40 else self.next.text[:37] + "..."
        return self.error(f"expected {expected}, found '{found}'", self.next.at)

    def wrong(self, what: str) -> TextError:
        """An error of the token that was read last."""
        return self.error(what, self.last.at)

    def peek(self, text: str) -> bool:
        """Whether the next token is this word or sign (a string never is)."""
        return self.next.text == text and self.next.kind != "string"

    def take(self, text: str) -> bool:
        """Read the next token if it is this word or sign."""
        if self.peek(text):
            self.at += 1
            return True
        return False

    def need(self, text: str) -> None:
        """Read this word or sign.

        Raises:
            TextError: the next token is another one.
        """
        if not self.take(text):
            raise self.fail(f"'{text}'")

    def kind(self, kind: str, what: str) -> str:
        """Read a token of a kind, which errors call ``what``."""
        if self.next.kind != kind:
            raise self.fail(what)
        self.at += 1
        return self.last.text

    def string(self) -> str:
        """Read a quoted string."""
        text = self.kind("string", "a string")
        try:
            return str(json.loads(text))
        except json.JSONDecodeError as e:
            raise self.wrong(f"the string does not read: {e.msg}") from None

    def printable(self) -> str:
        """Read a quoted string that is one line on any terminal."""
        text = self.string()
        if not text.isprintable():
            raise self.wrong(f"a text with signs that cannot be printed: {printable(text)}")
        return text

    def integer(self) -> int:
        """Read an integer, with a sign or without."""
        sign = -1 if self.take("-") else 1
        if self.next.kind != "number" or not self.next.text.isdigit():
            raise self.fail("an integer")
        self.at += 1
        return sign * int(self.last.text)

    def name(self) -> str:
        """Read a name, quoted or plain."""
        return self.printable() if self.next.kind == "string" else self.kind("ident", "a name")

    def literal(self) -> float | int | bool:
        """Read a number, ``true``, ``false``, ``inf`` or ``nan``."""
        if self.peek("true") or self.peek("false"):
            self.at += 1
            return self.last.text == "true"
        sign = -1 if self.take("-") else 1
        if self.take("inf"):
            return sign * float("inf")
        if self.take("nan"):
            return float("nan")
        text = self.kind("number", "a number")
        return sign * (int(text) if text.isdigit() else float(text))


def parse(text: str, file: str = "") -> Graph:
    """The graph that a text describes; its grammar is in docs/grammar.md.

    Args:
        file: the name that errors give the text.

    Raises:
        TextError: naming the line and column, what was found and what was expected.
    """
    parser = Parser(text, file)
    try:
        return parser.graph()
    except RecursionError:
        where = f"{file + ', ' if file else ''}line {text.count(chr(10), 0, parser.next.at) + 1}"
        hint = "write its inner part as an operation of its own"
        raise TextError("an expression is nested too deeply", where=where, hint=hint) from None


def parse_tokens(tokens: list[Token], text: str, file: str) -> Graph:
    """The graph of some tokens, which ``text`` has, or others in the place of which they stand.

    Raises:
        TextError: as `parse`.
    """
    parser = Parser("", file)
    parser.text, parser.tokens = text, tokens
    return parser.graph()


class Parser(Tokens):
    """Recursive descent over the tokens of a graph."""

    def __init__(self, text: str, file: str) -> None:
        super().__init__(text, file)
        self.tensors: dict[str, Tensor] = {}
        self.lets: tuple[str, ...] = ()

    # graph
    def graph(self) -> Graph:
        self.need("graph")
        title = self.name()
        inputs: list[str] = []
        weights: dict[str, Weight] = {}
        while True:
            if self.take("input"):
                inputs.append(self.tensor("input").name)
            elif self.take("weight"):
                t = self.tensor("weight")
                self.need("at")
                weights[t.name] = Weight(
                    file=self.string(), offset=self.integer(), length=self.integer(), name=self.string(), sha256=self.string()
                )
            else:
                break
        ops: list[Op] = []
        while not self.take("output"):
            ops.append(self.op())
        outputs: list[str] = []
        while self.next.kind != "end":
            outputs.append(self.name())
            self.take(",")
        return Graph(
            name=title, tensors=self.tensors, ops=tuple(ops), inputs=tuple(inputs), outputs=tuple(outputs), weights=weights
        )

    def tensor(self, kind: str) -> Tensor:
        start, name = self.next.at, self.name()
        self.need(":")
        dtype = self.kind("ident", "a dtype")
        if dtype not in DTYPES:
            self.at -= 1
            raise self.fail("a dtype")
        shape: list[int] = []
        about = self.printable() if dtype == HOST else ""
        if dtype != HOST:
            self.need("[")
            while not self.take("]"):
                shape.append(self.integer())
                self.take(",")
        if name in self.tensors:
            raise self.error(f"tensor '{name}' is declared twice", start)
        self.tensors[name] = Tensor(name=name, dtype=dtype, shape=tuple(shape), kind=kind, about=about)
        return self.tensors[name]

    def op(self) -> Op:
        outs = [self.tensor("value").name]
        while self.take(","):
            outs.append(self.tensor("value").name)
        self.need("=")
        if self.take("opaque"):
            return self.opaque(tuple(outs))
        self.need("op")
        return self.block(tuple(outs))

    def dims(self, end: tuple[str, ...]) -> tuple[tuple[Dim, str], ...]:
        out: list[tuple[Dim, str]] = []
        while not any(self.peek(e) for e in end):
            name = self.kind("ident", "a dimension")
            self.need(":")
            size = self.integer()
            monoid = "" if self.next.kind != "ident" else self.kind("ident", "a monoid")
            out.append((Dim(name, size), monoid))
            self.take(",")
        return tuple(out)

    def block(self, outs: tuple[str, ...]) -> Block:
        self.need("[")
        dims = tuple(d for d, _ in self.dims(("|", "]")))
        reduce, monoid = self.reduced() if self.take("|") else ((), None)
        self.need("]")
        names: dict[str, Arg] = {}
        reads: list[Read] = []
        if self.take("reads"):
            while True:
                start = self.next.at
                alias, r = self.read()
                if r.tensor not in self.tensors:
                    raise self.error(f"tensor '{r.tensor}' is not declared", start)
                names[alias] = Arg(len(reads), self.tensors[r.tensor].dtype)
                reads.append(r)
                if not self.take(","):
                    break
        inner = self.inner(names)
        self.need("body")
        body = self.exprs(names, ())
        self.lets = ()
        then = self.exprs(names, tuple(e.dtype for e in body)) if self.take("then") else ()
        source, splits = self.tail()
        return Block(
            outs=outs,
            dims=dims,
            reduce=reduce,
            monoid=monoid,
            reads=tuple(reads),
            body=body,
            then=then,
            inner=inner,
            source=source,
            splits=splits,
        )

    def reduced(self) -> tuple[tuple[Dim, ...], str]:
        """``m: 3 sum, k: 4 sum``; or the monoid alone, where the one element is all that is reduced."""
        reduce = self.dims(("]",)) if self.tokens[min(self.at + 1, len(self.tokens) - 1)].text == ":" else ()
        monoids = {m for _, m in reduce} or {self.kind("ident", "a monoid")}
        if len(monoids) > 1 or any(m not in MONOIDS for m in monoids):
            raise self.fail("one known monoid for all reduced dimensions")
        return tuple(d for d, _ in reduce), monoids.pop()

    def inner(self, names: dict[str, Arg]) -> tuple[Inner, ...]:
        """``let [m: 64 sum] q * k`` lines; the body may then use ``let0``, …"""
        out: list[Inner] = []
        while self.take("let"):
            self.need("[")
            dims = self.dims(("]",))
            monoid = dims[-1][1] if dims else ""
            if monoid not in MONOIDS or len(MONOIDS[monoid].fields) != 1 or {m for _, m in dims} - {monoid, ""}:
                raise self.fail("one known monoid of one field for the inner dimensions")
            self.need("]")
            out.append(Inner(dims=tuple(d for d, _ in dims), monoid=monoid, body=self.expr(names, ())))
        self.lets = tuple(s.body.dtype for s in out)
        return tuple(out)

    def tail(self) -> tuple[tuple[str, ...], tuple[Split, ...]]:
        source: list[str] = []
        splits: list[Split] = []
        if self.take("from"):
            source.append(self.printable())
            while self.take(","):
                source.append(self.printable())
        if self.take("split"):
            while True:
                dim_name = self.kind("ident", "a dimension")
                self.need("/")
                parts = self.integer()
                splits.append(Split(dim_name, parts, self.kind("ident", "a resource")))
                if not self.take(","):
                    break
        return tuple(source), tuple(splits)

    def read(self) -> tuple[str, Read]:
        alias = tensor = self.name()
        if self.take("="):
            tensor = self.name()
        self.need("[")
        index: list[Aff] = []
        while not self.take("]"):
            index.append(self.aff())
            self.take(",")
        when: list[Guard] = []
        while self.take("when"):
            when.append(guard(self))
        other = self.literal() if self.take("else") else None
        return alias, Read(tensor=tensor, index=tuple(index), other=other, when=tuple(when))

    # index expressions
    def aff(self) -> Aff:
        out = self.aff_term() * -1 if self.take("-") else self.aff_term()
        while self.peek("+") or self.peek("-"):
            sign = 1 if self.take("+") else -1 if self.take("-") else 0
            out = out + self.aff_term() * sign
        return out

    def aff_term(self) -> Aff:
        if self.next.kind == "number":
            value = self.integer()
            return self.aff_atom() * value if self.take("*") else const(value)
        return self.aff_atom()

    def aff_atom(self) -> Aff:
        if self.take("floor"):
            self.need("(")
            self.need("(")
            inner = self.aff()
            self.need(")")
            self.need("/")
            out = floordiv(inner, self.integer())
            self.need(")")
            return out
        if self.take("("):
            self.need("(")
            inner = self.aff()
            self.need(")")
            self.need("mod")
            out = modulo(inner, self.integer())
            self.need(")")
            return out
        return dim(self.kind("ident", "a dimension"))

    # expressions
    def exprs(self, names: dict[str, Arg], acc: tuple[str, ...]) -> tuple[Expr, ...]:
        out = [self.expr(names, acc)]
        while self.take(","):
            out.append(self.expr(names, acc))
        return tuple(out)

    def expr(self, names: dict[str, Arg], acc: tuple[str, ...]) -> Expr:
        start, left = self.next.at, self.primary(names, acc)
        for fn, sign in INFIX.items():
            if self.take(sign):
                return self.checked(start, fn, left, self.primary(names, acc))
        return left

    def checked(self, start: int, fn: str, *args: Expr) -> Expr:
        try:
            return call(fn, *args)
        except AssertionError as e:
            raise self.error(str(e), start) from None

    def primary(self, names: dict[str, Arg], acc: tuple[str, ...]) -> Expr:
        kind, text = self.next.kind, self.next.text
        if self.take("("):
            out = self.expr(names, acc)
            self.need(")")
            return out
        if kind == "number":
            self.at += 1
            return Const(int(text), "i64") if text.isdigit() else Const(float(text), "f32")
        if text in ("true", "false"):
            self.at += 1
            return Const(text == "true", "bool")
        if kind == "ident" and text not in names:
            self.at += 1
            return self.word(text, names, acc)
        found = names.get(self.name())
        if found is None:
            self.at -= 1
            raise self.fail("the name of a read")
        return found

    def word(self, text: str, names: dict[str, Arg], acc: tuple[str, ...]) -> Expr:
        """A primitive, a typed literal, an index, a cast or a reduced state."""
        start = self.last.at
        if re.fullmatch(r"acc\d+", text) and int(text[3:]) < len(acc):
            return Acc(int(text[3:]), acc[int(text[3:])])
        if re.fullmatch(r"let\d+", text) and int(text[3:]) < len(self.lets):
            return Let(int(text[3:]), self.lets[int(text[3:])])
        if text not in PRIMITIVES and text not in DTYPES and text not in ("index", "cast"):
            self.at -= 1
            raise self.fail("the name of a read or of a primitive")
        self.need("(")
        if text == "index":
            out: Expr = Index(self.aff())
        elif text in DTYPES:
            value = self.literal()
            out = replace(number(0, text), value=value if text not in FLOATS else float(value))
        elif text == "cast":
            inner = self.expr(names, acc)
            self.need(",")
            dtype = self.kind("ident", "a dtype")
            if dtype not in DTYPES:
                raise self.wrong(f"expected a dtype, found '{dtype}'")
            out = cast(inner, dtype)
        else:
            out = self.checked(start, text, *self.exprs(names, acc))
        self.need(")")
        return out

    def opaque(self, outs: tuple[str, ...]) -> Opaque:
        kind = self.name()
        self.need("[")
        dims = tuple(d for d, _ in self.dims(("]",)))
        self.need("]")
        self.need("reads")
        ins = [] if self.peek("writes") else self.axes()
        self.need("writes")
        writes = self.axes()
        self.need("node")
        node = base64.b64decode(self.string())
        self.need("opsets")
        opsets = [(self.printable(), self.integer())]
        while self.take(","):
            opsets.append((self.printable(), self.integer()))
        self.need("why")
        why = self.printable()
        source, splits = self.tail()
        return Opaque(
            outs=outs,
            ins=tuple(t for t, _ in ins),
            kind=kind,
            node=node,
            opsets=tuple(opsets),
            dims=dims,
            why=why,
            in_axes=tuple(a for _, a in ins),
            out_axes=tuple(a for _, a in writes),
            source=source,
            splits=splits,
        )

    def axes(self) -> list[tuple[str, tuple[int | None, ...]]]:
        out: list[tuple[str, tuple[int | None, ...]]] = []
        while True:
            tensor = self.name()
            self.need("[")
            axes: list[int | None] = []
            while not self.take("]"):
                axes.append(None if self.take("_") else self.integer())
                self.take(",")
            out.append((tensor, tuple(axes)))
            if not self.take(","):
                return out


def guard(p: Parser) -> Guard:
    """Read ``aff >= 0`` or ``aff == 0``."""
    aff = p.aff()
    op = "ge" if p.take(">=") else "eq"
    if op == "eq":
        p.need("==")
    p.need("0")
    return Guard(aff, op)
