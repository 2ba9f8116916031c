"""Small faults in source text, one at a time: another comparison, a bound one off, a condition dropped, arguments swapped.

A fault is put into running functions by exchanging their code, so that every module that holds one has it.
"""

from __future__ import annotations

import ast
import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Pow: ast.Mult,
}  # fmt: skip
SILENT = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)  # wording, and what stops a program anyway


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: the number of its place in the walk over a file, what it does there, and the line."""

    path: str
    place: int
    way: int
    line: int
    column: int
    text: str

    @property
    def key(self) -> str:
        """What it is called in a record."""
        return f"{self.path}:{self.line}:{self.column}: {self.text}"


Way = tuple[str, Callable[[Any], ast.AST]]


def _compare(node: ast.Compare) -> Iterator[Way]:
    for k, op in enumerate(node.ops):
        other = COMPARED[type(op)]

        def make(n: ast.Compare, k: int = k, other: type[ast.cmpop] = other) -> ast.AST:
            n.ops[k] = other()
            return n

        yield f"{type(op).__name__} is {other.__name__}", make


def _drop(node: ast.BoolOp) -> Iterator[Way]:
    for k in range(len(node.values)):

        def make(n: ast.BoolOp, k: int = k) -> ast.AST:
            del n.values[k]
            return n.values[0] if len(n.values) == 1 else n

        yield f"without '{ast.unparse(node.values[k])[:60]}'", make


def _set(**fields: Any) -> Callable[[Any], ast.AST]:
    def make(n: Any) -> ast.AST:
        for name, value in fields.items():
            setattr(n, name, value)
        return n

    return make


def _constant(node: ast.Constant) -> Iterator[Way]:
    if isinstance(node.value, bool):
        yield f"{node.value} is {not node.value}", _set(value=not node.value)
    elif isinstance(node.value, int | float):
        yield f"{node.value} is {node.value + 1}", _set(value=node.value + 1)


def _call(node: ast.Call) -> Iterator[Way]:
    plain = not any(isinstance(a, ast.Starred) for a in node.args[:2])
    if len(node.args) > 1 and plain and ast.dump(node.args[0]) != ast.dump(node.args[1]):
        yield "first two arguments swapped", lambda n: _set(args=[n.args[1], n.args[0], *n.args[2:]])(n)


def ways(node: ast.AST) -> Iterator[Way]:
    """What may be done to a node, in words and as a change of a copy."""
    match node:
        case ast.Compare():
            yield from _compare(node)
        case ast.BinOp() if type(node.op) in COMPUTED:
            other = COMPUTED[type(node.op)]
            yield f"{type(node.op).__name__} is {other.__name__}", _set(op=other())
        case ast.BoolOp():
            other_op = ast.Or if isinstance(node.op, ast.And) else ast.And
            yield f"{type(node.op).__name__} is {other_op.__name__}", _set(op=other_op())
            yield from _drop(node)
        case ast.UnaryOp(op=ast.Not()):
            yield "not dropped", lambda n: n.operand
        case ast.Constant():
            yield from _constant(node)
        case ast.If() | ast.IfExp() | ast.While():
            yield "condition never holds", _set(test=ast.Constant(False))
            if not isinstance(node, ast.While):
                yield "condition always holds", _set(test=ast.Constant(True))
        case ast.comprehension(ifs=[_, *_]):
            yield "filter dropped", _set(ifs=[])
        case ast.Call():
            yield from _call(node)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "statement dropped", lambda n: ast.Pass()
        case _:
            pass


def _places(tree: ast.AST, inside: bool = False) -> Iterator[tuple[ast.AST, str, int | None]]:
    """(parent, field, index) of every node of a function's body, in one order; annotations, defaults and wording left out."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params", "defaults", "kw_defaults", "ctx"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if not isinstance(child, ast.AST) or isinstance(child, SILENT) or _wording(child):
                continue
            within = inside or isinstance(tree, ast.FunctionDef | ast.Lambda)
            if within and not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                yield tree, name, index
            yield from _places(child, within)


def _wording(node: ast.AST) -> bool:
    """Whether a node only says something: a string, or what is logged."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def mutants(path: Path, root: Path) -> list[Mutant]:
    """Every fault of a file."""
    tree, out = ast.parse(path.read_text()), list[Mutant]()
    for place, (parent, name, index) in enumerate(_places(tree)):
        node = _at(parent, name, index)
        at = node.target if isinstance(node, ast.comprehension) else node
        line, column = getattr(at, "lineno", 0), getattr(at, "col_offset", 0)
        out += [Mutant(str(path.relative_to(root)), place, k, line, column, text) for k, (text, _) in enumerate(ways(node))]
    return out


def _at(parent: ast.AST, name: str, index: int | None) -> Any:
    value = getattr(parent, name)
    return value if index is None else value[index]


def mutated(m: Mutant, root: Path) -> ast.Module:
    """The file with the fault in it."""
    tree = ast.parse((root / m.path).read_text())
    parent, name, index = next(p for k, p in enumerate(_places(tree)) if k == m.place)
    node = _at(parent, name, index)
    changed = list(ways(node))[m.way][1](copy.deepcopy(node))
    if index is None:
        setattr(parent, name, changed)
    else:
        getattr(parent, name)[index] = changed
    return ast.fix_missing_locations(tree)


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and all that are inside it, in one order."""
    yield code
    for c in code.co_consts:
        if isinstance(c, CodeType):
            yield from codes(c)


def functions() -> dict[CodeType, list[FunctionType]]:
    """All functions that there are, by their code."""
    gc.unfreeze()  # the tests freeze what their collection made, and what is frozen is not listed
    out: dict[CodeType, list[FunctionType]] = {}
    for f in gc.get_objects():
        if type(f) is FunctionType:  # (isinstance asks the object, and some warn)
            out.setdefault(f.__code__, []).append(f)
    return out


def install(m: Mutant, root: Path, known: dict[CodeType, list[FunctionType]]) -> list[tuple[FunctionType, CodeType]]:
    """Put a fault into the running functions; what was there before, to be put back (nothing where none is loaded)."""
    path = root / m.path
    before = list(codes(compile(path.read_text(), str(path), "exec", dont_inherit=True)))
    after = list(codes(compile(mutated(m, root), str(path), "exec", dont_inherit=True)))
    undo: list[tuple[FunctionType, CodeType]] = []
    if len(before) != len(after):
        return undo
    for old, new in zip(before[1:], after[1:], strict=True):
        for f in known.get(old, ()):
            if old != new and f.__code__.co_freevars == new.co_freevars:
                undo.append((f, f.__code__))
                f.__code__ = new
    return undo


def sample(found: Sequence[Mutant], count: int, rng: Any) -> list[Mutant]:
    """So many of the faults, at random, at most three on one line."""
    chosen: list[Mutant] = []
    lines: dict[tuple[str, int], int] = {}
    for m in rng.sample(list(found), len(found)):
        if len(chosen) == count:
            break
        if lines.get((m.path, m.line), 0) < 3:
            lines[m.path, m.line] = lines.get((m.path, m.line), 0) + 1
            chosen.append(m)
    return chosen


__all__ = ["Mutant", "functions", "install", "mutants", "sample"]
