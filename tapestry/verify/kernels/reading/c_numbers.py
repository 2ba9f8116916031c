"""Values of small functions in C at many points, in the types that C computes in: for what is found by its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tapestry.verify.kernels.reading.c_syntax import kind_of_node, listed, number, parameters, type_name
from tapestry.verify.kernels.reading.program_reading import Return
from tapestry.verify.kernels.terms import Unsupported

Array = np.ndarray[Any, Any]
TYPES: dict[str, Any] = {
    "float": np.float32, "double": np.float64, "int": np.int32,
    **{f"int{b}_t": np.dtype(f"int{b}").type for b in (8, 16, 32, 64)},
}  # fmt: skip
BINARY: dict[str, Callable[..., Any]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
    "==": np.equal, "!=": np.not_equal, "&": np.bitwise_and, "|": np.bitwise_or, "^": np.bitwise_xor, "<<": np.left_shift,
    ">>": np.right_shift, "&&": np.logical_and, "||": np.logical_or,
}  # fmt: skip
LIBRARY: dict[str, Callable[..., Any]] = {
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
                found = number(node)
                return (
                    np.int32(found) if isinstance(found, int) else (np.float32 if node.value[-1] in "fF" else np.float64)(found)
                )
            case "ID" if node.name in self.env:
                return self.env[node.name]
            case "BinaryOp":
                return self.binary(node.op, self.value(node.left), self.value(node.right))
            case "UnaryOp" if node.op in ("-", "!"):
                return -self.value(node.expr) if node.op == "-" else np.logical_not(self.value(node.expr))
            case "TernaryOp":
                a, b = self.common(self.value(node.iftrue), self.value(node.iffalse))
                chosen: Array = np.where(self.value(node.cond) != 0, a, b)
                return chosen
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
        if name in LIBRARY:
            return LIBRARY[name](*(np.asarray(g, np.float32) for g in given))
        if name in self.functions:
            return values(self.functions, name, [np.asarray(g) for g in given])
        raise Unsupported(f"'{name}'")
