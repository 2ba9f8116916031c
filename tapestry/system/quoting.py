"""Names of a model as text of another language. A file's author chose them: they may hold anything, and none of it is obeyed.

Whoever reads a file makes its names `printable`, once: then none ends a line, a comment or a terminal's mood. What else means
something in a language is quoted where that is written: `docstring` here, ``repr`` for strings of Python, ``json.dumps`` for
those of JSON, MLIR and dot, ``html.escape``, `codegen.triton.text.axes.identifier`. Consoles of rich take no markup
(`viz.tables.console`). Our C has numbers alone.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """A text in one line: what no printer shows as a sign (controls, ends of lines, marks of direction) is escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(c: str) -> str:
    return c.encode("unicode_escape").decode()


def lines(text: str) -> str:
    """A text of several lines, each of them printable."""
    return "\n".join(map(printable, text.split("\n")))


def docstring(text: str) -> str:
    """A text inside of three double quotes in Python."""
    return lines(text).replace("\\", "\\\\").replace('"', '\\"')
