"""Tokens of IR text and of rule texts, and errors that point at one: file, line, column and what was expected there."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from tapestry.errors import TextError

_TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<string>"(?:[^"\\]|\\.)*")|(?P<number>\d+\.\d+(?:[eE][+-]?\d+)?|\d+\.(?!\.)|\d+[eE][+-]?\d+|\d+)"""
    r"""|(?P<group>[A-Za-z_][A-Za-z0-9_]*\.\.(?![A-Za-z0-9_.]))|(?P<ident>[A-Za-z_][A-Za-z0-9_.]*)"""
    r"""|(?P<punct>=>|>=|<=|==|!=|//|[\[\](){}<>,:=|*/+;-])"""
)


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
            m = _TOKEN.match(text, pos)
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
        shown = self.text[start:].split("\n", 1)[0]
        caret = re.sub(r"[^\t]", " ", shown[: column - 1]) + "^"
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

    def integer(self) -> int:
        """Read an integer, with a sign or without."""
        sign = -1 if self.take("-") else 1
        if self.next.kind != "number" or not self.next.text.isdigit():
            raise self.fail("an integer")
        self.at += 1
        return sign * int(self.last.text)

    def name(self) -> str:
        """Read a name, quoted or plain."""
        return self.string() if self.next.kind == "string" else self.kind("ident", "a name")

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
