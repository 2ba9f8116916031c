"""The text of a file in C as functions: by pycparser, behind the few lines for the preprocessor that our files have."""

from __future__ import annotations

import importlib
import re
from functools import lru_cache
from typing import Any

from tapestry.verify.kernels.term_arithmetic import Kind
from tapestry.verify.kernels.terms import Unsupported

KINDS = {
    "float": Kind("real", 32), "double": Kind("real", 64), "int": Kind("int", 32),
    **{f"int{b}_t": Kind("int", b) for b in (8, 16, 32, 64)}, **{f"uint{b}_t": Kind("int", b, False) for b in (8, 16, 32, 64)},
}  # fmt: skip
STRUCTS = ("Conv", "Buffers", "Attention", "Heads", "Rows", "RowBuffers", "Taps")
_DIRECTIVES = frozenset({
    "#include <math.h>", "#include <stdint.h>", '#include "../conv.h"', '#include "../norm.h"', '#include "../attention.h"',
    "#define INLINE static inline __attribute__((always_inline))",
})  # fmt: skip
_SIMD = re.compile(r"#pragma omp simd reduction\(\+:(\w+(?:,\w+)*)\)")
_OF_A_SUM = re.compile(r"(?P<declared>const \w+ \w+ = [^;{}]*;)|(?P<sum>\w+) \+= (?P<term>[^;{}]*);")
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


@lru_cache(maxsize=64)
def functions(source: str) -> dict[str, Any]:
    """The functions of a file by name, each a tree of pycparser's.

    Raises:
        Unsupported: it is not a file of functions, or has a directive that may change what the rest says.
    """
    try:
        parser: Any = importlib.import_module("pycparser.c_parser").CParser()
    except ImportError:
        raise Unsupported("pycparser is not there to read C: pip install pycparser") from None
    text = _COMMENT.sub(lambda m: "\n" * m[0].count("\n"), source)
    lines = text.split("\n")
    for k, line in enumerate(lines):
        if line.lstrip().startswith("#"):
            if line.strip() not in _DIRECTIVES and not _adds_alone(line.strip(), lines[k + 1 :]):
                raise Unsupported(f"line {k + 1}: the directive '{line.strip()}'")
            lines[k] = ""
    types = [*(n for n in KINDS if n.endswith("_t")), *STRUCTS]
    known = "".join(f"typedef int {n};" for n in types)
    try:
        found = parser.parse(known + re.sub(r"\bINLINE\b", "static inline", "\n".join(lines)), "")
    except Exception as e:  # of pycparser's lexer and parser, whose errors have no common base
        raise Unsupported(f"not C: {e}") from None
    own = found.ext[len(types) :]
    rest = [n for n in own if kind_of_node(n) != "FuncDef" and not _is_struct(n)]
    if rest:
        raise Unsupported(f"line {line_of(rest[0])}: a {kind_of_node(rest[0])} outside of functions")
    return {n.decl.name: n for n in own if kind_of_node(n) == "FuncDef"}


def _adds_alone(directive: str, rest: list[str]) -> bool:
    """Whether a directive lets the steps of a loop be added in any order, and the loop does nothing but add to what it names.

    Then the loop is the sum that it is without the directive, but for the order; else its steps might not be independent.
    """
    found = _SIMD.fullmatch(directive)
    if found is None or not rest or not re.fullmatch(r"for \([^;{}]*;[^;{}]*;[^;{}]*\) \{", rest[0].strip()):
        return False
    names = set(found[1].split(","))
    for line in rest[1:]:
        if line.strip().startswith("}"):
            return True
        m = _OF_A_SUM.fullmatch(line.strip())
        words = set(re.findall(r"\w+", (m["declared"] or m["term"]) if m else ""))
        if m is None or words & names or (m["sum"] and m["sum"] not in names):
            return False
    return False


def _is_struct(node: Any) -> bool:
    """Whether a declaration gives a struct the name of one that is known, and no number another meaning."""
    return kind_of_node(node) == "Typedef" and node.name in STRUCTS and kind_of_node(node.type.type) == "Struct"


def kind_of_node(node: Any) -> str:
    """The name of a node's class, such as ``For``."""
    return type(node).__name__


def line_of(node: Any) -> int:
    """Where a node begins; 0 where that is not known."""
    return node.coord.line if getattr(node, "coord", None) else 0


def type_name(node: Any) -> tuple[str, int]:
    """The name of a declared type, and how many stars it has."""
    stars = 0
    while kind_of_node(node) != "IdentifierType":
        if kind_of_node(node) not in ("TypeDecl", "PtrDecl", "Typename", "Decl"):
            raise Unsupported(f"a {kind_of_node(node)} as a type")
        stars += kind_of_node(node) == "PtrDecl"
        node = node.type
    return " ".join(node.names), stars


def parameters(function: Any) -> list[tuple[str, tuple[str, int]]]:
    """The parameters of a function: name, and type with its stars."""
    args = function.decl.type.args
    return [(p.name, type_name(p.type)) for p in (listed(args.params) if args else [])]


def listed(nodes: Any) -> list[Any]:
    """Nodes of a list that may not be there."""
    found: list[Any] = nodes or []
    return found


def number(node: Any) -> int | float:
    """A literal.

    Raises:
        Unsupported: it is a text, or of a type that our files do not have.
    """
    text: str = node.value
    if node.type in ("float", "double"):
        text = text.rstrip("fF") if not text.lower().startswith("0x") or "p" in text.lower() else text
        return float.fromhex(text) if text.lower().startswith("0x") else float(text)
    if "int" not in node.type:
        raise Unsupported(f"a literal of {node.type}")
    return int(text.rstrip("uUlL"), 0)
