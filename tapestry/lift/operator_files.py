"""Files of operators: definitions in IR text in which the names of sizes, of types and of attributes are open.

They are bound by a node's inputs and attributes, token by token; what comes of it is read as any graph. The grammar is in
docs/howto/operator.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from tapestry.ir.graph import Graph
from tapestry.ir.syntax.parser import Token, Tokens, parse_tokens
from tapestry.ir.types import DTYPES, Tensor

Number = int | float
_SIGNS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
}


@dataclass(frozen=True, slots=True)
class Template:
    """A definition in a file: the tokens of its parts, in which names of sizes, types and attributes are open."""

    domain: str
    name: str
    text: str
    file: str
    attributes: Mapping[str, Number | None]
    inputs: tuple[tuple[str, str, tuple[str | int, ...]], ...]
    sizes: tuple[tuple[str, list[Token]], ...]
    tests: tuple[tuple[list[Token], list[Token]], ...]
    graph: list[Token]

    def define(self, inputs: Sequence[Tensor], attributes: Mapping[str, Number]) -> Graph | str:
        """The graph for some inputs and attributes, or why it is not for these."""
        bound: dict[str, Number | str] = {}
        if len(inputs) != len(self.inputs):
            return f"it has {len(self.inputs)} inputs, the node {len(inputs)}"
        for (name, dtype, shape), t in zip(self.inputs, inputs, strict=True):
            pairs = [(dtype, t.dtype), *zip(shape, t.shape, strict=False)]
            fits = len(shape) == len(t.shape) and all(
                (w if w in DTYPES else bound.setdefault(w, g)) == g if isinstance(w, str) else w == g for w, g in pairs
            )
            if not fits:
                known = f" with {', '.join(f'{k} = {v}' for k, v in bound.items())}" if bound else ""
                return f"its '{name}' is {dtype}[{', '.join(map(str, shape))}]{known}, the node's {t.dtype}{list(t.shape)}"
        odd = next((a for a in attributes if a not in self.attributes), None)
        missing = next((a for a, v in self.attributes.items() if v is None and a not in attributes), None)
        if odd is not None or missing is not None:
            return f"it has no attribute '{odd}'" if odd is not None else f"the node lacks '{missing}'"
        bound |= {a: v for a, v in {**self.attributes, **attributes}.items() if v is not None}
        for name, tokens in self.sizes:
            bound[name] = _Sum(tokens, bound, self).value()
        for sides in self.tests:
            a, b = (_Sum(s, bound, self).value() for s in sides)
            if a != b:
                return f"it is for {' == '.join(' '.join(t.text for t in s[:-1]) for s in sides)}, and these are {a} and {b}"
        return parse_tokens([x for t in self.graph for x in _filled(t, bound)], self.text, self.file)


def _filled(t: Token, bound: Mapping[str, Number | str]) -> list[Token]:
    """A token, or those of what it stands for."""
    if t.kind != "ident" or t.text not in bound:
        return [t]
    value = bound[t.text]
    text = value if isinstance(value, str) else repr(abs(value))
    kind = "ident" if text[0].isalpha() else "number"
    sign = [Token("punct", "-", t.at)] if not isinstance(value, str) and value < 0 else []
    return [*sign, Token(kind, text, t.at)]


class _Sum(Tokens):
    """Arithmetic on sizes: ``H // 2 + 1``."""

    def __init__(self, tokens: list[Token], bound: Mapping[str, Number | str], of: Template) -> None:
        super().__init__("", of.file)
        self.text, self.tokens, self.bound = of.text, tokens, bound

    def value(self) -> int:
        """What it is.

        Raises:
            TextError: it is no arithmetic on whole numbers.
        """
        out = self.some("+", "-", lambda: self.some("*", "//", self.atom))
        if self.next.kind != "end":
            raise self.fail("a sign, or the end")
        return out

    def some(self, a: str, b: str, part: Callable[[], int]) -> int:
        """Terms between two signs."""
        out = part()
        while self.peek(a) or self.peek(b):
            sign = a if self.take(a) else b
            self.take(sign)
            other = part()
            if sign == "//" and other == 0:
                raise self.wrong("division by 0")
            out = _SIGNS[sign](out, other)
        return out

    def atom(self) -> int:
        """A number, a name or a sum in parentheses."""
        if self.take("("):
            out = self.some("+", "-", lambda: self.some("*", "//", self.atom))
            self.need(")")
            return out
        if self.next.kind == "ident":
            value = self.bound.get(self.next.text)
            if type(value) is not int:
                raise self.fail("a size")
            self.at += 1
            return value
        return self.integer()


class File(Tokens):
    """Definitions, one after another."""

    def template(self) -> Template:
        """``operator "com.example" Name {alpha = 1.0} size H = N // 2 when N == 2 * H``, and a graph."""
        self.need("operator")
        domain, name = self.string(), self.name()
        attributes: dict[str, Number | None] = {}
        if self.take("{"):
            while not self.take("}"):
                a = self.kind("ident", "an attribute")
                attributes[a] = self.literal() if self.take("=") else None
                self.take(",")
        sizes: list[tuple[str, list[Token]]] = []
        tests: list[tuple[list[Token], list[Token]]] = []
        while self.take("size"):
            size = self.open("a size")
            self.need("=")
            sizes.append((size, self.until("size", "when", "graph")))
        while self.take("when") or (tests and self.take(",")):
            left = self.until("==")
            self.need("==")
            tests.append((left, self.until(",", "when", "graph")))
        start = self.at
        inputs = self.inputs()
        while self.next.kind != "end" and not self.begins():
            self.at += 1
        graph = [*self.tokens[start : self.at], Token("end", "end of the definition", self.next.at)]
        opened = {w for _, dtype, shape in inputs for w in (dtype, *shape) if isinstance(w, str)} | {s for s, _ in sizes}
        twice = ({n for n, _, _ in inputs} & (opened | attributes.keys())) | (opened & attributes.keys())
        if twice:
            raise self.error(f"'{sorted(twice)[0]}' stands for two things", self.tokens[start].at)
        return Template(domain, name, self.text, self.file, attributes, tuple(inputs), tuple(sizes), tuple(tests), graph)

    def begins(self) -> bool:
        """Whether a definition begins here."""
        return self.peek("operator") and self.tokens[self.at + 1].kind == "string"

    def until(self, *ends: str) -> list[Token]:
        """The tokens before a word or sign."""
        start = self.at
        while self.next.kind != "end" and not any(map(self.peek, ends)):
            self.at += 1
        return [*self.tokens[start : self.at], Token("end", "end", self.next.at)]

    def open(self, what: str, known: Collection[str] = ()) -> str:
        """A known word, or a name in capitals that stands for any."""
        word = self.kind("ident", what)
        if word not in known and not word[0].isupper():
            raise self.wrong(f"expected {what}, or a name for it that begins with a capital, found '{word}'")
        return word

    def inputs(self) -> list[tuple[str, str, tuple[str | int, ...]]]:
        """The inputs' names, and their types and sizes as far as they are said."""
        self.need("graph")
        self.name()
        out: list[tuple[str, str, tuple[str | int, ...]]] = []
        while self.take("input"):
            name = self.name()
            self.need(":")
            dtype, shape = self.open("a dtype", DTYPES), list[str | int]()
            self.need("[")
            while not self.take("]"):
                shape.append(self.open("a size") if self.next.kind == "ident" else self.integer())
                self.take(",")
            out.append((name, dtype, tuple(shape)))
        return out
