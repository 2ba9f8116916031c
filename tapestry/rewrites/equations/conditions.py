"""What may stand under ``when:`` and ``pays:``: arithmetic on sizes, measures of bodies, and named properties."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod

from tapestry.ir import space
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, count, distinct, size
from tapestry.ir.graph import Block, Dim, Op, Read, points
from tapestry.ir.index import Aff, dims_of
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.types import FLOATS
from tapestry.rewrites.core.matching import Draft
from tapestry.rewrites.core.rule import Refusal, refuse
from tapestry.rewrites.equations.bindings import Bindings
from tapestry.rewrites.equations.pattern import App, Clause, Node, Num, Var, show

_COMPARE: dict[str, Callable[[object, object], bool]] = {"eq": operator.eq, "ne": operator.ne}
_ORDER: dict[str, Callable[[int, int], bool]] = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": lambda a, b: a // b,
}
Failure = str | None  # of a property: None where it holds, else a witness, which may be empty


class Conditions:
    """Asks the clauses of a rule of one match."""

    def __init__(self, draft: Draft, m: Bindings, rewritten: tuple[Op, ...] = ()) -> None:
        self.draft, self.m, self.rewritten = draft, m, rewritten

    def failing(self, clauses: tuple[Clause, ...]) -> Refusal | None:
        """The first clause that does not hold, as the reason to refuse; ``None`` when all do."""
        for clause in clauses:
            witness = self._holds(clause.test)
            if witness is not None:
                return refuse(self._filled(clause.reason) if clause.reason else f"{show(clause.test)} does not hold", witness)
        return None

    def _holds(self, test: Node) -> Failure:
        """``None`` where a condition holds, else the values that it has."""
        assert isinstance(test, App)
        if test.fn in PROPERTIES:
            return PROPERTIES[test.fn](self, *(a.name for a in test.args if isinstance(a, Var)))
        if test.fn == "in":
            value, *options = (self.word(a) for a in test.args)
            return None if value in options else f"{show(test.args[0])} is {value}"
        left, right = (self.word(a) if test.fn in _COMPARE else self.value(a) for a in test.args)
        holds = _COMPARE[test.fn](left, right) if test.fn in _COMPARE else _ORDER[test.fn](int(left), int(right))
        shown = dict.fromkeys(show(a) for a in test.args if not isinstance(a, Num))
        values = dict(zip([show(a) for a in test.args], (left, right), strict=True))
        return None if holds else ", ".join(f"{n} is {values[n]}" for n in shown)

    def word(self, n: Node) -> int | str:
        """The name that a dtype or monoid stands for, or a number."""
        if isinstance(n, Var) and n.name in self.m.dtypes:
            return self.m.dtypes[n.name]
        if isinstance(n, Var) and n.name in self.m.monoids:
            return self.m.monoids[n.name] or ""
        if isinstance(n, App) and n.fn == "dtype" and isinstance(n.args[0], Var):
            return self.dtype(n.args[0].name)
        if isinstance(n, Var) and n.name not in self.m.numbers and n.name not in self.m.sizes:
            return n.name
        return self.value(n)

    def value(self, n: Node) -> int:
        """The number that a term is: a group's size is the product of its dimensions' sizes."""
        if isinstance(n, Num):
            return int(n.value)
        if isinstance(n, Var):
            return self.m.numbers[n.name] if n.name in self.m.numbers else prod(self.m.sizes[n.name])
        if n.fn in MEASURES:
            return MEASURES[n.fn](self, *(a.name for a in n.args if isinstance(a, Var)))
        return _ARITHMETIC[n.fn](*(self.value(a) for a in n.args))

    def exprs(self, name: str) -> tuple[Expr, ...]:
        """What an open body stands for, with what stands behind the reduction where that is one, too."""
        return self.m.bodies[name].variants[0]

    def dtype(self, view: str) -> str:
        """The dtype of the tensor that an open name stands for."""
        return self.draft.tensors[self.m.views[view][0].tensor].dtype

    def _filled(self, reason: str) -> str:
        """A reason with ``{…}`` replaced by names and values of the match."""

        def fill(found: re.Match[str]) -> str:
            name, _, arg = found.group(1).partition(" of ")
            if arg:
                return str(MEASURES[name](self, arg))
            if name in self.m.tensors:
                return self.m.tensors[name]
            if name in self.m.views:
                return self.m.views[name][0].tensor
            if name in self.m.dims:
                return ", ".join(d.name for d in self.m.dims[name])
            return str(self.word(Var(name)))

        return re.sub(r"\{([^}]*)\}", fill, reason)


def _uses(c: Conditions, *names: str) -> int:
    """``uses(t)``: how often the expressions of its reader have the tensor t."""
    (t,) = names
    k, places = next((k, places) for (k, alias), places in c.m.places.items() if alias == t)
    op, at = c.m.ops[k], set(places)
    return count((*op.point, *op.then), lambda x: isinstance(x, Arg) and x.pos in at)


def _nodes(c: Conditions, *names: str) -> int:
    """``nodes(F)``: how many operands and operators an open body is written with."""
    return sum(size(c.exprs(n)) for n in names)


def _calls(c: Conditions, *names: str) -> int:
    """``calls(F)``: how many primitives an open body applies."""
    return sum(count(c.exprs(n), lambda x: isinstance(x, Call)) for n in names)


def _rank(c: Conditions, *names: str) -> int:
    """``rank(M)``: how many dimensions a group has."""
    return sum(len(c.m.sizes[n]) for n in names)


def _work(c: Conditions, *names: str) -> int:
    """``work(before)``, ``work(after)``: points of the index spaces of the operations on one side."""
    (side,) = names
    ops = c.rewritten if side == "after" else tuple(c.m.ops.values())
    return sum(points(op.space) for op in ops)


def _injective(c: Conditions, *names: str) -> Failure:
    """``injective(e)``: a projection reads no cell at two points of the last operation's index space."""
    for name in names:
        index, op = c.m.maps[name], c.m.root
        used = frozenset(n for a in index for n in dims_of(a))
        spare = [d.name for d in op.space if d.name not in used and d.size > 1]
        if spare:
            return f"every cell is read at each {', '.join(spare)}"
        collision = _collision(tuple(d for d in op.space if d.name in used), index)
        if collision:
            return str(collision)
    return None


@lru_cache(maxsize=1 << 12)
def _collision(dims: tuple[Dim, ...], index: tuple[Aff, ...]) -> tuple[object, object] | None:
    """Two points of some dimensions at which an index is the same (asked of isl)."""
    if all(a.is_dim for a in index) and len(set(index)) == len(index):
        return None
    return space.used(Block(outs=("",), dims=dims), Read(tensor="", index=index)).collision()


def _commutative(c: Conditions, *names: str) -> Failure:
    """``commutative(S)``: states of the monoid may be merged in any order."""
    name = c.m.monoids[names[0]]
    return None if name is None or MONOIDS[name].commutative else f"'{name}' does not"


def _single(c: Conditions, *names: str) -> Failure:
    """``single(S)``: the monoid's state is one field."""
    name = c.m.monoids[names[0]]
    return None if name is not None and len(MONOIDS[name].fields) == 1 else f"'{name}'"


def _float(c: Conditions, *names: str) -> Failure:
    """``float(T)``: the dtype is one of floating point."""
    dtype = c.m.dtypes[names[0]]
    return None if dtype in FLOATS else dtype


def _computed(c: Conditions, *names: str) -> Failure:
    """``computed(F)``: an open body applies a primitive, rather than passing on what is read."""
    return None if any(isinstance(c.exprs(f)[0], Call) for f in names) else ""


def _increasing(c: Conditions, *names: str) -> Failure:
    """``increasing(F)``: an open body of one read never falls where that rises."""
    ways = [_way(c.exprs(f)[0]) for f in names]
    return None if all(w == RISES for w in ways) else "it is not of functions that are known to rise"


RISES, STAYS, FALLS = 1, 0, -1
_RISING = frozenset({"exp", "log", "tanh", "sqrt", "erf", "atan", "sinh", "floor", "ceil", "round", "sign"})
_SAME = {"add": (1, 1), "max": (1, 1), "min": (1, 1), "sub": (1, -1)}


def _way(e: Expr) -> int | None:
    """Whether an expression rises, falls or stays where what it reads rises; ``None`` where that is not known."""
    if not isinstance(e, Call):
        return RISES if isinstance(e, Arg | Acc) else STAYS if isinstance(e, Const) else None
    ways = [_way(a) for a in e.args]
    if e.fn in _RISING or e.fn == "neg":
        return None if ways[0] is None else ways[0] * (FALLS if e.fn == "neg" else RISES)
    if e.fn in _SAME:
        signs = {w * s for w, s in zip(ways, _SAME[e.fn], strict=True) if w is not None} - {STAYS}
        return None if None in ways or len(signs) > 1 else max(signs, default=STAYS, key=abs)
    factor = e.args[-1] if e.fn == "div" else next((a for a in e.args if isinstance(a, Const)), None)
    if e.fn in ("mul", "div") and isinstance(factor, Const) and factor.value:
        other = next(w for w, a in zip(ways, e.args, strict=True) if a is not factor)
        return None if other is None else other * (RISES if factor.value > 0 else FALLS)
    return None


def _placeless(c: Conditions, *names: str) -> Failure:
    """``placeless(F, n)``: an open body does not look at the index of the dimensions (of none, without any)."""
    dims = {d.name for n in names[1:] for d in c.m.dims[n]}
    for x in distinct(c.exprs(names[0])):
        if isinstance(x, Index) and (not dims or dims_of(x.aff) & dims):
            return f"index({x.aff})"
    return None


def _reads_inside(c: Conditions, *names: str) -> Failure:
    """``plain(x)``: a tensor is read inside its cells, without a guard and a value to fill in."""
    wrong = next((v for n in names for v in c.m.views[n] if v.other is not None), None)
    return None if wrong is None else f"'{wrong.tensor}' is read outside"


def _deterministic(c: Conditions, *names: str) -> Failure:
    """``deterministic(F)``: an open body draws no random numbers."""
    random = any(isinstance(x, Call) and x.fn == "philox" for f in names for x in distinct(c.exprs(f)))
    return "it draws random numbers" if random else None


def _adds(c: Conditions, *names: str) -> Failure:
    """``adds(S, x)``: the monoid leaves a value of x's dtype as it is where all others are zero."""
    monoid, dtype = c.m.monoids[names[0]], c.dtype(names[1])
    return None if monoid == ("any" if dtype == "bool" else "sum") else f"'{monoid}' of {dtype}"


def _moves_only(c: Conditions, *names: str) -> Failure:
    """``computes(y)``: an operation does more than to move what it reads."""
    k = next(k for k, op in c.m.ops.items() if c.m.tensors[names[0]] in op.outs)
    op: Block = c.m.ops[k]
    return None if len(op.reads) > 1 or not isinstance(op.body[0], Arg) else ""


MEASURES: Mapping[str, Callable[..., int]] = {"uses": _uses, "nodes": _nodes, "calls": _calls, "rank": _rank, "work": _work}
PROPERTIES: Mapping[str, Callable[..., Failure]] = {
    "injective": _injective, "commutative": _commutative, "single": _single, "float": _float,
    "computed": _computed, "increasing": _increasing,
    "placeless": _placeless, "plain": _reads_inside, "deterministic": _deterministic, "computes": _moves_only,
    "adds": _adds,
}  # fmt: skip
