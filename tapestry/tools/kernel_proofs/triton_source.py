"""The source text of a Triton kernel, interpreted over terms: nothing of it is imported or run.

Programs of the grid are a variable, lanes of tiles and steps of loops too. What a loop adds up becomes a reduction; any other
thing that a loop carries is beyond this reading, which then says so.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, cast

from tapestry.ir.index import const
from tapestry.tools.kernel_proofs import own_functions
from tapestry.tools.kernel_proofs.kernel_text import Box, Buffer, KernelLaunch
from tapestry.tools.kernel_proofs.lane_tiles import Pointer, Tile, each, folded, indexed, lane
from tapestry.tools.kernel_proofs.program_reading import Program, Reading, Return, Steps, parameters
from tapestry.tools.kernel_proofs.term.term_arithmetic import Kind, applied, negative
from tapestry.tools.kernel_proofs.term.terms import REDUCING, Terms, Unsupported
from tapestry.tools.kernel_proofs.triton_calls import KINDS

OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
    ast.LShift: "shl", ast.RShift: "shr", ast.Eq: "eq", ast.NotEq: "ne",
}  # fmt: skip
OPPOSITE = {"eq": "ne", "lt": "ge"}
OF_LITERALS = ("add", "sub", "mul", "truediv", "floordiv", "mod")


def functions(source: str) -> dict[str, ast.FunctionDef]:
    """The functions of a kernel's file.

    Raises:
        Unsupported: it is not a file of functions.
    """
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as e:
        raise Unsupported(f"not Python: {e}") from None
    return {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}


def read_launch(
    terms: Terms, text: str, launch: KernelLaunch, buffers: Mapping[str, Buffer], unrolled: bool = False
) -> Program:
    """What a launch of a kernel's source does.

    Args:
        unrolled: read loops step by step; for those that carry what has no closed form.

    Raises:
        Unsupported: the source has something that this reading does not know; says what, and the line.
    """
    found = _Reading(terms, functions(text), launch, buffers)
    function, env = found.started(unrolled)
    found.body(function.body, env)
    return found.program


class _Reading(Reading):
    @cached_property
    def table(self) -> dict[str, Callable[..., Any]]:
        return self.calls.table()

    # statements
    def body(self, lines: list[ast.stmt], env: dict[str, Any]) -> None:
        for k, line in enumerate(lines):
            if isinstance(line, ast.If):
                return self.either(line, lines[k + 1 :], env)
            self.block([line], env)
        return None

    def either(self, choice: ast.If, rest: list[ast.stmt], env: dict[str, Any]) -> None:
        """A choice that programs make: what follows is read once under each answer."""
        match choice.test:
            case ast.Compare(left, [ast.Eq() | ast.Lt() as op], [right]):
                asked, bound, yes = self.calls.tile(self.value(left, env)), self.value(right, env), OPERATORS[type(op)]
            case _:
                raise Unsupported(f"line {choice.lineno}: a choice by {ast.unparse(choice.test)}")
        outside = self.inside
        for fn, lines in ((yes, choice.body), (OPPOSITE[yes], choice.orelse)):
            self.inside = self.terms.all([outside, self.calls.operator(fn, asked, bound).term])
            if self.inside == self.terms.false:
                continue  # answered before
            try:
                self.body([*lines, *rest], dict(env))
            except Return:
                raise Unsupported(f"line {choice.lineno}: a choice between results") from None
        self.inside = outside
        env.update(dict.fromkeys(_assigned([choice, *rest])))  # what each answer leaves is not known to what comes after

    def statement(self, line: Any, env: dict[str, Any]) -> None:
        match line:
            case ast.Assign(targets=[target], value=value):
                self.assign(target, self.value(value, env), env)
            case ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value):
                env[name] = self.value(value, env)
            case ast.AugAssign(target=ast.Name(name), op=op, value=value):
                env[name] = self.calls.operator(OPERATORS[type(op)], self.name(name, env), self.value(value, env))
            case ast.Expr(ast.Constant()) | ast.Pass():
                pass
            case ast.Expr(value):
                self.value(value, env)
            case ast.For(target=ast.Name(name), iter=ast.Call() as steps, body=body, orelse=[]):
                self.loop_over(name, steps, body, env)
            case ast.Return(value=ast.expr() as value):
                raise Return(self.value(value, env))
            case _:
                raise Unsupported(f"a {type(line).__name__}")

    def assign(self, target: ast.expr, value: Any, env: dict[str, Any]) -> None:
        match target:
            case ast.Name(name):
                env[name] = value
            case ast.Tuple(elts) if isinstance(value, tuple):
                values = cast("tuple[Any, ...]", value)
                if len(values) != len(elts):
                    raise Unsupported("an assignment to fewer, or more, names")
                for t, v in zip(elts, values, strict=True):
                    self.assign(t, v, env)
            case _:
                raise Unsupported("an assignment to parts")

    def name(self, name: str, env: Mapping[str, Any]) -> Any:
        if name not in env and name in self.known:
            return self.known[name]
        if name not in env:
            raise Unsupported(f"'{name}' has no value")
        if env[name] is None:
            raise Unsupported(f"'{name}' is what the last step of a loop left")
        return env[name]

    def loop_over(self, name: str, steps: ast.Call, body: list[ast.stmt], env: dict[str, Any]) -> None:
        how = ast.unparse(steps.func)
        bounds = [self.value(a, env) for a in steps.args]
        first, end, step = ([0, *bounds, 1] if len(bounds) == 1 else [*bounds, 1] if len(bounds) == 2 else bounds)[:3]
        if not isinstance(step, int) or step <= 0 or how not in ("range", "tl.range", "tl.static_range"):
            raise Unsupported(f"a loop over {ast.unparse(steps)}")
        along = Steps(name, first, end, step, always_unrolled=how == "tl.static_range")
        self.loop(along, lambda: self.body(body, env), _assigned(body), env)

    # expressions
    def value(self, e: ast.expr, env: dict[str, Any]) -> Any:
        match e:
            case ast.Constant(value):
                return value
            case ast.Name(name):
                return self.name(name, env)
            case ast.Tuple(elts) | ast.List(elts):
                return tuple(self.value(x, env) for x in elts)
            case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]):
                return self.binary(OPERATORS.get(type(op), ""), self.value(left, env), self.value(right, env))
            case ast.UnaryOp(ast.USub(), x):
                got = self.value(x, env)
                return -got if isinstance(got, int | float) else each(self.terms, partial(negative, self.terms), got)
            case ast.Subscript(value=x, slice=index):
                items = index.elts if isinstance(index, ast.Tuple) else [index]
                return self.subscript(self.value(x, env), [None if isinstance(i, ast.Constant) else i for i in items])
            case ast.Attribute():
                return self.attribute(e, env)
            case ast.Call():
                return self.call(e, env)
            case _:
                raise Unsupported(f"a {type(e).__name__}")

    def subscript(self, x: Any, items: list[Any]) -> Any:
        if isinstance(x, Pointer):
            return Pointer(x.buffer, indexed(self.terms, x.at, items))
        return indexed(self.terms, self.calls.tile(x), items)

    def binary(self, fn: str, a: Any, b: Any) -> Any:
        if not fn:
            raise Unsupported("an operator")
        if isinstance(a, int | float) and isinstance(b, int | float):
            if fn not in OF_LITERALS:
                raise Unsupported(f"{fn} of two literals")
            return getattr(operator, fn)(a, b)
        return self.calls.operator(fn, a, b)

    def attribute(self, e: ast.Attribute, env: dict[str, Any]) -> Any:
        text = ast.unparse(e)
        if text.startswith("tl.") and text[3:] in KINDS:
            return KINDS[text[3:]]
        if text.startswith(("tl.PropagateNan.", "tl.")):
            return text
        if e.attr == "dtype":
            kind = self.terms.kinds[self.calls.tile(self.value(e.value, env)).term]
            return Kind(kind, 64)
        raise Unsupported(f"'{text}'")

    def call(self, e: ast.Call, env: dict[str, Any]) -> Any:
        name = ast.unparse(e.func) if isinstance(e.func, ast.Name) or _of_library(e.func) else ""
        args = [self.value(a, env) for a in e.args]
        options = {k.arg: self.value(k.value, env) for k in e.keywords if k.arg}
        if name.startswith("tl."):
            return self.library(name[3:], args, options, e.lineno)
        if name == "float" and isinstance(args[0], str):
            return float(args[0])
        if name in self.known:
            return self.inlined(name, args)
        if isinstance(e.func, ast.Attribute):
            return self.method(self.value(e.func.value, env), e.func.attr, args, options, e.lineno)
        raise Unsupported(f"'{name}'")

    def library(self, name: str, args: list[Any], options: dict[str, Any], line: int) -> Any:
        if name == "program_id":
            along = list(self.program.grid.items())
            axis: int = args[0]
            at = self.terms.variable(*along[axis]) if axis < len(along) else const(0)
            return Tile(self.terms.int(at))
        if name == "load":
            return self.load(args[0], options.get("mask"), options.get("other"), line)
        if name == "store":
            return self.store(args[0], self.calls.tile(args[1]), options.get("mask"), line)
        if name == "reduce":
            return self.reduced(args[0], args[1], args[2])
        if name not in self.table:
            raise Unsupported(f"'tl.{name}'")
        try:
            return self.table[name](*args, **options)
        except TypeError as e:
            raise Unsupported(f"'tl.{name}': {e}") from None

    def inlined(self, name: str, args: list[Any]) -> Any:
        """A function of the kernel's own: the primitive that it is, or what it says."""
        tiles = list(map(self.calls.tile, args))
        kinds = tuple(self.terms.kinds[t.term] for t in tiles)
        fn = self.primitive(self.known[name], kinds)
        if fn is not None:
            return each(self.terms, lambda *t: applied(self.terms, fn, t, Kind(kinds[0], 64)), *tiles)
        return self.said(name, args)

    def primitive(self, function: ast.FunctionDef, kinds: tuple[str, ...]) -> str | None:
        read = partial(_Reading, known=self.known, launch=self.launch, buffers=self.buffers)
        return own_functions.primitive_of(
            ast.dump(function), function.name, kinds, lambda terms, ins: read(terms).said(function.name, ins)
        )

    def said(self, name: str, args: list[Any]) -> Any:
        """What a function returns."""
        function = self.known[name]
        env = dict(zip(parameters(function), args, strict=True))
        try:
            self.body(function.body, env)
        except Return as done:
            return done.value
        raise Unsupported(f"'{name}' returns nothing")

    def reduced(self, x: Any, axis: int, fn: Any) -> Any:
        """``tl.reduce`` by a function of the file that is a primitive."""
        if not isinstance(fn, ast.FunctionDef) or not isinstance(x, Tile):
            raise Unsupported("a reduction of several fields by a function of its own")
        merge = self.primitive(fn, (self.terms.kinds[x.term],) * 2)
        if merge not in REDUCING:
            raise Unsupported(f"a reduction by '{fn.name}'")
        return folded(self.terms, merge, x, axis)

    def method(self, x: Any, name: str, args: list[Any], options: dict[str, Any], line: int) -> Any:
        if isinstance(x, Box) and name in ("load", "store"):
            pointer, mask = self.boxed(x, args[0])
            if name == "load":
                return self.load(pointer, mask, 0.0, line)
            return self.store(pointer, self.calls.reshaped(self.calls.tile(args[1]), x.block), mask, line)
        if name == "to":
            if options.get("bitcast"):
                raise Unsupported("bits as another type")
            return self.calls.cast(self.calls.tile(x), args[0])
        if name == "reshape":
            shape = tuple(cast("tuple[int, ...]", args[0]) if isinstance(args[0], tuple) else args)
            return self.calls.reshaped(self.calls.tile(x), shape)
        raise Unsupported(f"'.{name}'")

    # memory
    def boxed(self, box: Box, start: Any) -> tuple[Pointer, Tile]:
        """Address and mask of a tile of a descriptor: reads past an extent give zero, and stores there are dropped."""
        terms, at, masks = self.terms, const(0), list[int]()
        for k, (s, n, stride) in enumerate(zip(start, box.shape, box.strides, strict=True)):
            along = terms.aff(self.calls.tile(s).term) + lane(terms, k, box.block[k])
            at = at + along * stride
            masks += [terms.at_least(along), terms.at_least(along * -1 + (n - 1))]
        return Pointer(box.buffer, Tile(terms.int(at), box.block)), Tile(terms.all(masks), box.block)


def _assigned(body: list[ast.stmt]) -> set[str]:
    return {n.id for line in body for n in ast.walk(line) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _of_library(e: ast.expr) -> bool:
    return isinstance(e, ast.Attribute) and isinstance(e.value, ast.Name) and e.value.id == "tl"
