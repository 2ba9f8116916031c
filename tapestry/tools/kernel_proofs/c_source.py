"""The source text of a kernel in C, interpreted over terms: nothing of it is compiled or run.

Loops are variables, as lanes and programs are in `triton_source`; what a loop adds up becomes a reduction. Fields of structs
are the numbers and addresses of one call. Both sides of a choice are read under its condition.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np

from tapestry.errors import LawError
from tapestry.tools.kernel_proofs import program_reading
from tapestry.tools.kernel_proofs.kernel_text import Buffer, KernelLaunch, Pointer, Tile, each, scalar
from tapestry.tools.kernel_proofs.program_reading import Program, Reading, Return, Steps
from tapestry.tools.kernel_proofs.terms import Kind, Terms, Unsupported, applied, kind_of, negative, real

Array = np.ndarray[Any, Any]


# The text of a file in C as functions: by pycparser, behind the few lines for the preprocessor that our files have.


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


# Values of small functions in C at many points, in the types that C computes in: for what is found by its values.


TYPES: dict[str, Any] = {
    "float": np.float32, "double": np.float64, "int": np.int32,
    **{f"int{b}_t": np.dtype(f"int{b}").type for b in (8, 16, 32, 64)},
}  # fmt: skip
BINARY: dict[str, Callable[..., Any]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
    "==": np.equal, "!=": np.not_equal, "&": np.bitwise_and, "|": np.bitwise_or, "^": np.bitwise_xor, "<<": np.left_shift,
    ">>": np.right_shift, "&&": np.logical_and, "||": np.logical_or,
}  # fmt: skip
WHERE: Callable[..., Any] = np.where
NUMBER_LIBRARY: dict[str, Callable[..., Any]] = {
    "sqrtf": np.sqrt, "fabsf": np.abs, "floorf": np.floor, "ceilf": np.ceil, "rintf": np.rint, "expf": np.exp,
}  # fmt: skip


def values(functions: Mapping[str, Any], name: str, args: list[Array]) -> Array:
    """What a function returns at arrays of arguments.

    Raises:
        Unsupported: it says something that is not arithmetic of numbers.
    """
    function = functions[name]
    given = parameters(function)
    if len(given) != len(args) or any(stars or t not in TYPES for _, (t, stars) in given):
        raise Unsupported("other arguments than numbers")
    env = {n: np.asarray(a).astype(TYPES[t]) for (n, (t, _)), a in zip(given, args, strict=True)}
    run = _Run(functions, env, {n: TYPES[t] for n, (t, _) in given})
    result = TYPES.get(type_name(function.decl.type.type)[0])
    try:
        with np.errstate(all="ignore"):
            for node in listed(function.body.block_items):
                run.statement(node)
    except Return as done:
        if result is None:
            raise Unsupported("a function of another type") from None
        return np.broadcast_to(np.asarray(done.value).astype(result), args[0].shape)
    raise Unsupported(f"'{name}' returns nothing")


class _Run:
    def __init__(self, functions: Mapping[str, Any], env: dict[str, Any], types: dict[str, Any]) -> None:
        self.functions, self.env, self.types = functions, env, types

    def statement(self, node: Any) -> None:
        match kind_of_node(node):
            case "Decl":
                name, stars = type_name(node.type)
                if stars or name not in TYPES:
                    raise Unsupported(f"a variable of type {name}")
                self.types[node.name] = TYPES[name]
                if node.init is not None:
                    self.env[node.name] = np.asarray(self.value(node.init)).astype(TYPES[name])
            case "Return":
                raise Return(self.value(node.expr))
            case "Assignment" | "ExprList" | "FuncCall":
                self.value(node)
            case other:
                raise Unsupported(f"a {other} in a function of numbers")

    def value(self, node: Any) -> Any:
        match kind_of_node(node):
            case "Constant":
                found, real_type = number(node), np.float32 if node.value[-1] in "fF" else np.float64
                return np.int32(found) if isinstance(found, int) else real_type(found)
            case "ID" if node.name in self.env:
                return self.env[node.name]
            case "BinaryOp":
                return self.binary(node.op, self.value(node.left), self.value(node.right))
            case "UnaryOp" if node.op in ("-", "!"):
                return -self.value(node.expr) if node.op == "-" else np.logical_not(self.value(node.expr))
            case "TernaryOp":
                a, b = self.common(self.value(node.iftrue), self.value(node.iffalse))
                return WHERE(self.value(node.cond) != 0, a, b)
            case "Cast" if type_name(node.to_type) in {(t, 0) for t in TYPES}:
                return np.asarray(self.value(node.expr)).astype(TYPES[type_name(node.to_type)[0]])
            case "ExprList":
                last: Any = None
                for e in listed(node.exprs):
                    last = self.value(e)
                return last
            case "Assignment":
                return self.assigned(node)
            case "FuncCall":
                return self.call(node.name.name, listed(node.args.exprs) if node.args else [])
            case other:
                raise Unsupported(f"a {other} in a function of numbers")

    def assigned(self, node: Any) -> Any:
        name = node.lvalue.name
        if kind_of_node(node.lvalue) != "ID" or name not in self.types:
            raise Unsupported("an assignment to what is no variable")
        value = self.value(node.rvalue)
        if node.op != "=":
            value = self.binary(node.op[:-1], self.env[name], value)
        self.env[name] = np.asarray(value).astype(self.types[name])
        return self.env[name]

    def binary(self, op: str, a: Any, b: Any) -> Any:
        a, b = self.common(a, b)
        if op == "/" and np.asarray(a).dtype.kind == "f":
            return a / b
        if op not in BINARY:
            raise Unsupported(f"'{op}' of numbers")
        return BINARY[op](a, b)

    def common(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Both in the type that C computes in: of an integer and a float, the float's."""
        kinds = [np.asarray(x).dtype for x in (a, b)]
        floats = [k for k in kinds if k.kind == "f"]
        if len(floats) == 1:
            a, b = (np.asarray(x).astype(floats[0]) for x in (a, b))
        return a, b

    def call(self, name: str, args: list[Any]) -> Any:
        if name == "__builtin_memcpy":
            to, of = (a.expr.name if kind_of_node(a) == "UnaryOp" and a.op == "&" else "" for a in args[:2])
            if to not in self.types or of not in self.env or number(args[2]) != np.dtype(self.types[to]).itemsize:
                raise Unsupported("a copy of bytes that are no variable's")
            self.env[to] = np.ascontiguousarray(self.env[of]).view(self.types[to])
            return self.env[to]
        given = [self.value(a) for a in args]
        if name in NUMBER_LIBRARY:
            return NUMBER_LIBRARY[name](*(np.asarray(g, np.float32) for g in given))
        if name in self.functions:
            return values(self.functions, name, [np.asarray(g) for g in given])
        raise Unsupported(f"'{name}'")


OPERATORS = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "%": "mod", "&": "and", "|": "or", "^": "xor", "<<": "shl", ">>": "shr",
    "<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne",
}  # fmt: skip
LIBRARY = {
    "fabsf": "abs", "sqrtf": "sqrt", "sinf": "sin", "cosf": "cos", "floorf": "floor", "ceilf": "ceil", "rintf": "round",
    "expf": "exp",
}  # fmt: skip
ELEMENTS = {
    "float": {"f32"}, "double": {"f64"}, "int64_t": {"i64"}, "int32_t": {"i32"}, "int16_t": {"i16"}, "int8_t": {"i8"},
    "uint8_t": {"u8", "bool"},
}  # fmt: skip
NAMED = {"INT64_MIN": -(2**63)}


class Floating(Tile):
    """A number that C computes with as a float, whatever it is made of."""


def read_call(terms: Terms, text: str, launch: KernelLaunch, buffers: Mapping[str, Buffer], unrolled: bool = False) -> Program:
    """What a call of a function does.

    Args:
        unrolled: read loops step by step; for those that carry what has no closed form.

    Raises:
        Unsupported: the source has something that this reading does not know; says what, and the line.
        LawError: a buffer is read as another type than it has.
    """
    found = _Reading(terms, text, launch, buffers)
    function, env = found.started(lambda f: [n for n, _ in parameters(f)], unrolled)
    found.statement(function.body, env)
    return found.program


class _Reading(Reading):
    def __init__(self, terms: Terms, source: str, launch: KernelLaunch, buffers: Mapping[str, Buffer]) -> None:
        super().__init__(terms, functions(source), launch, buffers)
        self.source = source
        self.kinds: dict[str, Kind] = {}  # of variables

    # statements
    def statement(self, node: Any, env: dict[str, Any]) -> None:
        match kind_of_node(node):
            case "Compound":
                self.block(listed(node.block_items), line_of, env)
            case "Decl":
                self.declared(node, env)
            case "Assignment":
                self.assigned(node, env)
            case "ExprList":
                for e in node.exprs:
                    self.statement(e, env)
            case "For":
                self.over(node, env)
            case "If":
                self.either(node, env)
            case "Return":
                raise Return(None if node.expr is None else self.value(node.expr, env))
            case "FuncCall":
                self.value(node, env)
            case "EmptyStatement":
                pass
            case other:
                raise Unsupported(f"a {other}")

    def declared(self, node: Any, env: dict[str, Any]) -> None:
        name, stars = type_name(node.type)
        if node.init is None:
            env[node.name] = None
        value = None if node.init is None else self.value(node.init, env)
        if stars:
            self.pointed(value, name, line_of(node))
        elif name in KINDS:
            self.kinds[node.name] = KINDS[name]
            value = None if value is None else self.converted(value, KINDS[name])
        else:
            raise Unsupported(f"a variable of type {name}")
        env[node.name] = value

    def pointed(self, value: Any, name: str, line: int) -> None:
        """Check that what a pointer is said to point to is what the buffer has."""
        if isinstance(value, Pointer) and self.buffers[value.buffer].dtype not in ELEMENTS.get(name, set()):
            dtype = self.buffers[value.buffer].dtype
            raise LawError("kernel_reads", f"'{value.buffer}' of {dtype} is taken for {name}", where=f"line {line}")
        if value is not None and not isinstance(value, Pointer):
            raise Unsupported("a pointer to what is no buffer")

    def converted(self, value: Any, kind: Kind) -> Tile:
        made = self.calls.cast(self.calls.tile(value), kind)
        return Floating(made.term, made.shape) if kind.kind == "real" else made

    def floating(self, x: Any) -> bool:
        return isinstance(x, Floating) or (isinstance(x, Tile) and self.terms.kinds[x.term] == "real")

    def computed(self, made: Tile, *of: Any) -> Tile:
        """A result, in the type that C gives it by its operands'."""
        return Floating(made.term, made.shape) if any(map(self.floating, of)) else made

    def assigned(self, node: Any, env: dict[str, Any]) -> None:
        value, to = self.value(node.rvalue, env), node.lvalue
        if kind_of_node(to) == "ID" and to.name in self.kinds:
            if node.op != "=":
                value = self.operator(node.op[:-1], self.name(to.name, env), value)
            env[to.name] = self.converted(value, self.kinds[to.name])
        elif kind_of_node(to) == "ArrayRef" and node.op == "=":
            pointer = self.element(to, env)
            kind = kind_of(self.buffers[pointer.buffer].dtype)
            self.store(pointer, self.converted(value, kind), None, line_of(node))
        else:
            raise Unsupported("an assignment to what is no variable or cell")

    def name(self, name: str, env: Mapping[str, Any]) -> Any:
        if name in NAMED:
            return NAMED[name]
        if name not in env:
            raise Unsupported(f"'{name}' has no value")
        if name in self.kinds and env[name] is None:
            raise Unsupported(f"'{name}' is not known: it has no value yet, or is what the last step of a loop left")
        return env[name]

    def over(self, node: Any, env: dict[str, Any]) -> None:
        """``for (int64_t NAME = FIRST; NAME < END; NAME++)``."""
        shape = tuple(map(kind_of_node, (node.init, node.cond, node.next)))
        if shape[:2] != ("DeclList", "BinaryOp") or len(node.init.decls) != 1 or shape[2] not in ("UnaryOp", "Assignment"):
            raise Unsupported("a loop that does not count")
        first, cond, step = node.init.decls[0], node.cond, node.next
        counter = step.expr if shape[2] == "UnaryOp" else step.lvalue
        names = {first.name, getattr(cond.left, "name", ""), getattr(counter, "name", "")}
        by = 1 if shape[2] == "UnaryOp" and step.op in ("++", "p++") else None
        if shape[2] == "Assignment" and step.op == "+=":
            by = self.constant(self.value(step.rvalue, env))
        if len(names) != 1 or cond.op not in ("<", "<=") or not by or by < 0 or type_name(first.type)[0] not in KINDS:
            raise Unsupported("a loop that does not count upwards")
        bounds = [self.value(first.init, env), self.value(cond.right, env)]
        begin, end = (b if (n := self.constant(b)) is None else n for b in bounds)
        end = self.calls.operator("add", end, 1) if cond.op == "<=" else end
        end = n if (n := self.constant(end)) is not None else end
        hidden = env.get(first.name)
        self.loop(Steps(first.name, begin, end, by), lambda: self.statement(node.stmt, env), _assigned(node.stmt), env)
        env[first.name] = hidden

    def either(self, node: Any, env: dict[str, Any]) -> None:
        c, outside = self.truth(self.value(node.cond, env)), self.inside
        before, results = dict(env), list[dict[str, Any]]()
        for holds, branch in ((c, node.iftrue), (self.terms.negated(c), node.iffalse)):
            own = dict(before)
            if branch is not None and holds != self.terms.false:
                self.inside = self.terms.all([outside, holds])
                self.statement(branch, own)
            results.append(own)
        self.inside = outside
        for n in before:
            a, b = results[0][n], results[1][n]
            if c in (self.terms.true, self.terms.false) or a is b:
                env[n] = a if c == self.terms.true else b
            elif isinstance(a, Tile) and isinstance(b, Tile):
                env[n] = self.calls.where(Tile(c), a, b)
            else:
                env[n] = None

    # expressions
    def value(self, node: Any, env: dict[str, Any]) -> Any:
        match kind_of_node(node):
            case "Constant":
                found = number(node)
                return found if isinstance(found, int) else scalar(self.terms, found)
            case "ID":
                return self.name(node.name, env)
            case "BinaryOp":
                return self.binary(node, env)
            case "UnaryOp":
                return self.unary(node, env)
            case "TernaryOp":
                return self.choice(node, env)
            case "Cast":
                name, stars = type_name(node.to_type)
                if stars or name not in KINDS:
                    raise Unsupported(f"a cast to {name}{'*' * stars}")
                return self.converted(self.value(node.expr, env), KINDS[name])
            case "ArrayRef":
                of = self.value(node.name, env)
                if isinstance(of, tuple):
                    return self.item(cast("tuple[Any, ...]", of), self.value(node.subscript, env), line_of(node))
                return self.load(self.element(node, env), None, None, line_of(node))
            case "StructRef":
                fields = self.value(node.name, env)
                if not isinstance(fields, Mapping) or node.field.name not in fields:
                    raise Unsupported(f"a field '{node.field.name}'")
                return cast("Mapping[str, Any]", fields)[node.field.name]
            case "FuncCall":
                return self.call(node, env)
            case other:
                raise Unsupported(f"a {other}")

    def constant(self, value: Any) -> int | None:
        if isinstance(value, Tile):
            found = self.terms.number(value.term) if self.terms.kinds[value.term] == "int" else None
            return None if found is None else int(found)
        return value if isinstance(value, int) else None

    def truth(self, value: Any) -> int:
        """A value as a condition: a pointer unless there is none, a number unless it is 0."""
        terms = self.terms
        if value is None or isinstance(value, Pointer):
            return terms.false if value is None else terms.true
        t = self.calls.tile(value).term
        return t if terms.kinds[t] == "bool" else terms.compared("ne", t, terms.int(terms.aff(scalar(terms, 0).term)))

    def binary(self, node: Any, env: dict[str, Any]) -> Any:
        terms, left = self.terms, self.value(node.left, env)
        if node.op in ("&&", "||"):  # the right one is asked where the left one does not say it
            a, outside = self.truth(left), self.inside
            self.inside = terms.all([outside, a if node.op == "&&" else terms.negated(a)])
            known = a == (terms.false if node.op == "&&" else terms.true)
            b = a if known else self.truth(self.value(node.right, env))
            self.inside = outside
            return Tile(terms.all([a, b]) if node.op == "&&" else terms.any([a, b]))
        return self.operator(node.op, left, self.value(node.right, env))

    def operator(self, op: str, a: Any, b: Any) -> Any:
        if op not in OPERATORS:
            raise Unsupported(f"'{op}'")
        fn = OPERATORS[op]
        if isinstance(a, Pointer):
            return self.calls.operator(fn, a, b)
        x, y = self.calls.tile(a), self.calls.tile(b)
        if fn in ("and", "or", "xor"):
            x, y = self.alike(x, y), self.alike(y, x)
        if fn in ("lt", "le", "gt", "ge", "eq", "ne"):
            return self.calls.operator(fn, x, y)
        if fn == "truediv" and not self.floating(x) and not self.floating(y):
            fn = "floordiv"  # of integers towards zero, as `whole` has it
        return self.computed(self.calls.operator(fn, x, y), x, y)

    def alike(self, x: Tile, other: Tile) -> Tile:
        """A 0 or 1 beside a truth value as one."""
        terms = self.terms
        told = terms.kinds[other.term] == "bool" and terms.number(x.term) in (0.0, 1.0)
        return Tile(self.truth(x)) if told else x

    def unary(self, node: Any, env: dict[str, Any]) -> Any:
        if node.op == "!":
            return Tile(self.terms.negated(self.truth(self.value(node.expr, env))))
        if node.op != "-":
            raise Unsupported(f"'{node.op}'")
        of = self.calls.tile(self.value(node.expr, env))
        return self.computed(each(self.terms, partial(negative, self.terms), of), of)

    def choice(self, node: Any, env: dict[str, Any]) -> Any:
        terms, outside = self.terms, self.inside
        c = self.truth(self.value(node.cond, env))
        if c in (terms.true, terms.false):
            return self.value(node.iftrue if c == terms.true else node.iffalse, env)
        self.inside = terms.all([outside, c])
        a = self.value(node.iftrue, env)
        self.inside = terms.all([outside, terms.negated(c)])
        b = self.value(node.iffalse, env)
        self.inside = outside
        if isinstance(a, Pointer) or isinstance(b, Pointer):
            raise Unsupported("a choice of pointers")
        a, b = self.calls.tile(a), self.calls.tile(b)
        key = terms.keys[a.term]
        if key[0] == "load" and key[3] == terms.true:  # as other languages say it: a cell under a mask
            kind = terms.kinds[a.term]
            rest = b if kind == "bool" else self.converted(b, Kind(kind, 64))
            return self.computed(Tile(terms.load(key[1], kind, key[2], c, rest.term)), a, b)
        return self.computed(self.calls.where(Tile(c), a, b), a, b)

    def item(self, items: tuple[Any, ...], at: Any, line: int) -> Any:
        """What an array of arguments has at a place."""
        k = self.constant(at)
        if k is None or not 0 <= k < len(items):
            raise LawError("kernel_reads", f"there is no argument {k}", where=f"line {line}")
        return items[k]

    def element(self, node: Any, env: dict[str, Any]) -> Pointer:
        """The address of ``NAME[INDEX]``."""
        of = self.value(node.name, env)
        if not isinstance(of, Pointer):
            raise Unsupported("a cell of what is no pointer")
        return self.calls.operator("add", of, self.calls.tile(self.value(node.subscript, env)))

    def call(self, node: Any, env: dict[str, Any]) -> Any:
        name, args = node.name.name, [self.value(a, env) for a in (listed(node.args.exprs) if node.args else [])]
        if name == "INT64_C":
            return args[0]
        if name in ("__builtin_inff", "__builtin_nanf"):
            return scalar(self.terms, float("inf" if name == "__builtin_inff" else "nan"))
        if name in self.known:
            return self.inlined(name, args)
        if name in LIBRARY:
            return each(self.terms, partial(real, self.terms, LIBRARY[name]), self.converted(args[0], KINDS["float"]))
        raise Unsupported(f"'{name}'")

    def inlined(self, name: str, args: list[Any]) -> Any:
        """A function of the file's own: the primitive that it is, or what it says."""
        given = parameters(self.known[name])
        if len(given) != len(args):
            raise Unsupported(f"'{name}' of {len(args)} arguments")
        numbers = {n: KINDS[t] for n, (t, stars) in given if not stars and t in KINDS}
        args = [self.converted(a, numbers[n]) if n in numbers else a for a, (n, _) in zip(args, given, strict=True)]
        reals = all(isinstance(a, Tile) and self.terms.kinds[a.term] == "real" for a in args)
        if reals:
            fn = program_reading.primitive_of(
                (name, self.source), name, ("real",) * len(args), partial(values, self.known, name)
            )
            if fn is not None:
                return each(self.terms, lambda *t: applied(self.terms, fn, t, Kind("real", 64)), *args)
        try:
            return self.said(name, dict(zip((n for n, _ in given), args, strict=True)), numbers)
        except Unsupported:
            if not reals:
                raise
            self.terms.own[f"own {name}"] = partial(values, self.known, name)
            return each(self.terms, lambda *t: self.terms.call(f"own {name}", t), *args)

    def said(self, name: str, env: dict[str, Any], numbers: dict[str, Kind]) -> Any:
        """What a function returns; ``None`` without a value."""
        kinds, inside = self.kinds, self.inside
        self.kinds = numbers
        try:
            self.statement(self.known[name].body, env)
        except Return as done:
            if self.inside != inside:
                raise Unsupported(f"'{name}' returns in the middle") from None
            return done.value
        finally:
            self.kinds, self.inside = kinds, inside
        return None


def _assigned(node: Any) -> set[str]:
    own = {node.name} if kind_of_node(node) == "Decl" else set[str]()
    if kind_of_node(node) == "Assignment" and kind_of_node(node.lvalue) == "ID":
        own = {node.lvalue.name}
    return own.union(*(_assigned(child) for _, child in node.children()))
