"""Proofs of equations for all sizes by cases: which part of a concat, pad or clip a cell comes from.

Both sides are evaluated at one cell, whose indices are integers in the ranges of the result's dimensions; sizes, starts and
strides have any value that the conditions allow. Where the value depends on a test (of indices and sizes, or of the order
of two cells, as in a maximum) the proof goes on in both cases, under the test and under its opposite; cases without any
integers are left out (isl). In every case both sides must be one term (`real_terms`). Reductions are opened where both
sides end in the same one: equal summands at all points make equal sums.

Tests are linear in the names that occur; a product of names is a name of its own, of which it is only known that a product
of what is not negative is not negative. The order of cells is one of integers here, which is no loss: only which of two
cells (or of a cell and zero) is greater is ever asked. A group of dimensions stands for one of them: slices, pads and
concats of several dimensions are those of one after the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from tapestry.ir import space
from tapestry.ir.expr import PRIMITIVES
from tapestry.rewrites.equations.pattern import App, Node, Num, OpPattern, RuleText, Var
from tapestry.rewrites.equations.real_terms import Facts, applied, atom, real_number
from tapestry.rewrites.equations.term_walks import Term, Unprovable, canonical

Monomial = tuple[str, ...]  # names, sorted; () is the unit
Poly = Mapping[Monomial, int]
Value = Term | bool
MOST_CASES = 400
FACTS = Facts({}, frozenset(), frozenset(), frozenset(), {})
_ORDERS = {"lt": (1, 0, -1), "le": (1, 0, 0), "gt": (0, 1, -1), "ge": (0, 1, 0)}  # which one less which, less what


class _Split(Exception):
    """Whether a form is at least zero is not decided in this case."""

    def __init__(self, form: Poly) -> None:
        self.form = form


def proved(rule: RuleText) -> bool:
    """Whether both sides are one term in every case."""
    try:
        return _Proof(rule).holds()
    except (Unprovable, RecursionError, StopIteration):
        return False


@dataclass
class _Proof:
    """The cases of a rule.

    Attributes:
        known: forms that are at least zero in all cases.
        values: of names that a condition sets.
    """

    rule: RuleText
    known: list[Poly] = field(default_factory=list[Poly])
    values: dict[str, Poly] = field(default_factory=dict[str, Poly])

    def holds(self) -> bool:
        """Whether the results of both sides agree."""
        (before,) = (p for p in self.rule.before if p.outs[0].name == self.rule.before[-1].outs[0].name)
        after = next(p for p in self.rule.after if p.outs[0].name == before.outs[0].name)
        if [(d.name, d.many) for d in before.dims] != [(d.name, d.many) for d in after.dims]:
            raise Unprovable
        same = before.monoid == after.monoid and not before.then and not after.then
        if not same or [d.name for d in before.reduce] != [d.name for d in after.reduce]:
            raise Unprovable
        sides = [_Cell(self, self.rule.before), _Cell(self, self.rule.after)]
        self.values = dict(self._values(sides[0]))
        self.known = list(self._conditions(sides[0]))
        for p, q in zip((*before.dims, *before.reduce), (*after.dims, *after.reduce), strict=True):
            ours, theirs = (sides[0].place(d.size, {}) for d in (p, q))
            self.known += [{(p.name,): 1}, _minus(_minus(ours, {(p.name,): 1}), {(): 1})]
            if not (self.always(_minus(ours, theirs)) and self.always(_minus(theirs, ours))):
                raise Unprovable
        one = {d.name for d in (*before.dims, *before.reduce) if sides[0].place(d.size, {}) == {(): 1}}
        env: dict[str, Poly] = {d.name: {} if d.name in one else {(d.name,): 1} for d in (*before.dims, *before.reduce)}
        cases: list[list[Poly]] = [[]]
        count = 0
        while cases:
            case, count = cases.pop(), count + 1
            if count > MOST_CASES:
                raise Unprovable
            here = [*self.known, *case]
            if not space.possible(map(_linear, _products(here))):
                continue
            for side in sides:
                side.here = here
            try:
                if not sides[0].same(sides[0].body(before, env), sides[1].body(after, env)):
                    return False
            except _Split as s:
                cases += [[*case, s.form], [*case, _minus({(): -1}, s.form)]]
        return True

    def always(self, form: Poly) -> bool:
        """Whether a form is at least zero wherever the conditions hold."""
        return not space.possible(map(_linear, _products([*self.known, _minus({(): -1}, form)])))

    def _values(self, cell: _Cell) -> Iterator[tuple[str, Poly]]:
        for c in self.rule.when:
            t = c.test
            if isinstance(t, App) and t.fn == "eq" and isinstance(t.args[0], Var):
                yield t.args[0].name, cell.place(t.args[1], {})

    def _conditions(self, cell: _Cell) -> Iterator[Poly]:
        for c in self.rule.when:
            t = c.test
            if isinstance(t, App) and t.fn in (*_ORDERS, "eq"):
                a, b = (cell.place(x, {}) for x in t.args)
                for order in ("le", "ge") if t.fn == "eq" else (t.fn,):
                    yield _nonnegative_where(order, a, b)


@dataclass
class _Cell:
    """The value of a side's cells in one case, where every form of ``here`` is at least zero."""

    proof: _Proof
    ops: tuple[OpPattern, ...]
    here: list[Poly] = field(default_factory=list[Poly])

    def body(self, p: OpPattern, env: Mapping[str, Poly]) -> Value:
        """What an operation computes at a point, before its reduction."""
        if len(p.body) != 1 or p.then or p.outs[0].many:
            raise Unprovable
        return self.expr(p.body[0], p, env)

    def expr(self, n: Node, p: OpPattern, env: Mapping[str, Poly]) -> Value:
        """The value of a term."""
        if isinstance(n, Num):
            if isinstance(n.value, bool):
                return n.value
            return atom(("endless", n.value)) if math.isinf(n.value) else real_number(Fraction(n.value))
        if isinstance(n, Var):
            read = next((r for r in p.reads if r.alias == n.name), None)
            if read is None:
                return _term(self.place(n, env))
            index = [self.reduced(self.place(i, env)) for i in read.index]
            maker = next((q for q in self.ops if q.outs[0].name == read.tensor), None)
            if maker is None:
                return atom(("view", read.alias, tuple(_key(e) for e in index)))
            if maker.monoid or len(index) != len(maker.dims):
                raise Unprovable
            return self.body(maker, {d.name: e for d, e in zip(maker.dims, index, strict=True)})
        if n.fn == "index":
            return _term(self.place(n.args[0], env))
        return self.call(n, p, env)

    def call(self, n: App, p: OpPattern, env: Mapping[str, Poly]) -> Value:
        """A primitive applied; what is not chosen is not evaluated."""
        if n.fn == "where":
            return self.expr(n.args[1 if self.true(self.expr(n.args[0], p, env)) else 2], p, env)
        if n.fn not in PRIMITIVES:
            raise Unprovable
        args = [self.expr(a, p, env) for a in n.args]
        match n.fn, args:
            case "and", [a, b]:
                return self.true(a) and self.true(b)
            case "or", [a, b]:
                return self.true(a) or self.true(b)
            case "not", [a]:
                return not self.true(a)
            case (("lt" | "le" | "gt" | "ge"), [a, b]):
                self.gap(a, b)
                return self.decided(_nonnegative_where(n.fn, _form(a), _form(b)))
            case "eq", [a, b]:
                return self.level(a, b)
            case "ne", [a, b]:
                return not self.level(a, b)
            case "max", [a, b]:
                return a if self.greater(a, b) else b
            case "min", [a, b]:
                return b if self.greater(a, b) else a
            case "abs", [a]:
                return a if self.decided(self.gap(a, real_number(Fraction(0)))) else applied("neg", [a], FACTS)
            case "mod", [a, b]:
                return self.remainder(_form(a), _form(b))
            case _:
                return applied(n.fn, args, FACTS)

    def gap(self, a: Value, b: Value) -> Poly:
        """What a has more than b; of cells nothing but their order is asked, which integers have all of that reals have."""
        out = _minus(_form(a), _form(b))
        cells = {n for m in out for n in m if _is_cell(n)}
        names = {n for m in out for n in m} - cells
        tied = [f for f in self.proof.known if names & {n for m in f for n in m}]
        if cells and (() in out or any(() in f or len(f) > 2 for f in tied)):
            raise Unprovable
        return out

    def greater(self, a: Value, b: Value) -> bool:
        """Whether a ≥ b; infinities are beyond everything."""
        for x, sign in ((a, 1), (b, -1)):
            if not isinstance(x, bool) and (found := _endless(x)) is not None:
                return found * sign > 0
        return self.decided(self.gap(a, b))

    def level(self, a: Value, b: Value) -> bool:
        """Whether a = b."""
        gap = self.gap(a, b)
        return self.decided(gap) and self.decided({m: -c for m, c in gap.items()})

    def true(self, v: Value) -> bool:
        """Whether a truth value is true; of a cell that holds one, by cases."""
        return v if isinstance(v, bool) else self.decided(_minus(_form(v), {(): 1}))

    def decided(self, form: Poly) -> bool:
        """Whether a form is at least zero here."""
        form = {m: c for m, c in form.items() if c}
        if set(form) <= {()}:
            return form.get((), 0) >= 0
        opposite = _minus({(): -1}, form)
        if not space.possible(map(_linear, _products([*self.here, opposite]))):
            return True
        if not space.possible(map(_linear, _products([*self.here, form]))):
            return False
        raise _Split(form)

    def place(self, n: Node, env: Mapping[str, Poly]) -> Poly:
        """An index, or a size, as a polynomial of names."""
        if isinstance(n, Num):
            return {(): int(n.value)}
        if isinstance(n, Var):
            return env[n.name] if n.name in env else self.proof.values.get(n.name, {(n.name,): 1})
        a, b = (self.place(x, env) for x in n.args)
        if n.fn in ("add", "sub"):
            return _minus(a, {m: -c for m, c in b.items()} if n.fn == "add" else b)
        if n.fn == "mul":
            return _times(a, b)
        if n.fn == "floordiv":
            return self.quotient(a, b)
        raise Unprovable

    def reduced(self, index: Poly) -> Poly:
        """An index, zero where it can be nothing else."""
        none: Poly = {}
        return none if self.zero(index) else index

    def zero(self, form: Poly) -> bool:
        """Whether a form is zero, without looking at cases."""
        return not form or (self.surely(form) and self.surely({m: -c for m, c in form.items()}))

    def same(self, a: Value, b: Value) -> bool:
        """Whether two values are equal here."""
        if isinstance(a, bool) or isinstance(b, bool):
            return self.true(a) == self.true(b)
        if canonical(a) == canonical(b):
            return True
        try:
            return self.zero(self.gap(a, b))
        except Unprovable:
            return False

    def quotient(self, a: Poly, b: Poly) -> Poly:
        """⌊a / b⌋: multiples of a b that is one name come out."""
        if b == {(): 1}:
            return a
        (name,) = _name(b)
        whole = {m: c for m, c in a.items() if name in m}
        out: Counter[Monomial] = Counter()
        for m, c in whole.items():
            left = list(m)
            left.remove(name)
            out[tuple(left)] += c
        rest = {m: c for m, c in a.items() if name not in m and c}
        if rest and not (self.surely(rest) and self.surely(_minus(_minus(b, rest), {(): 1}))):
            out[f"div({_key(rest)}, {name})",] += 1
        return dict(out)

    def remainder(self, a: Poly, b: Poly) -> Term:
        """What is left of a modulo b, which has b's sign."""
        if b == {(): 1}:
            return _term({})
        (name,) = _name(b)
        rest = {m: c for m, c in a.items() if name not in m and c}
        (only,) = rest if len(rest) == 1 else ((),)
        if len(only) == 1 and only[0].startswith("mod(") and only[0].endswith(f", {name})") and rest[only] == 1:
            return _term(rest)  # a remainder modulo b is its own
        if self.surely(rest) and self.surely(_minus(_minus(b, rest), {(): 1})):
            return _term(rest)
        return _term({(f"mod({_key(rest)}, {name})",): 1})

    def surely(self, form: Poly) -> bool:
        """Whether a form is at least zero, without looking at cases."""
        try:
            return self.decided(form)
        except _Split:
            return False


def _minus(a: Poly, b: Poly) -> Poly:
    return {m: c for m in {**a, **b} if (c := a.get(m, 0) - b.get(m, 0))}


def _times(a: Poly, b: Poly) -> Poly:
    out: Counter[Monomial] = Counter()
    for m, c in a.items():
        for n, d in b.items():
            out[tuple(sorted((*m, *n)))] += c * d
    return {m: c for m, c in out.items() if c}


def _nonnegative_where(fn: str, a: Poly, b: Poly) -> Poly:
    """What is at least zero where a test of integers holds."""
    right, left, less = _ORDERS[fn]
    gap = _minus(b, a) if right > left else _minus(a, b)
    return _minus(gap, {(): -less})


def _name(p: Poly) -> Monomial:
    (m,) = p
    if p[m] != 1 or len(m) != 1:
        raise Unprovable
    return m


def _key(p: Poly) -> str:
    return " + ".join(f"{c}*{'*'.join(m) or '1'}" for m, c in sorted(p.items()) if c) or "0"


def _linear(p: Poly) -> dict[str, int]:
    return {"*".join(m): c for m, c in p.items()}


def _products(forms: list[Poly]) -> list[Poly]:
    """Forms that are at least zero, with their products by names that are: only where such products occur."""
    names = {m[0] for f in forms for m, c in f.items() if len(m) == 1 and c > 0 and set(f) <= {m, ()} and f.get((), 0) <= 0}
    products = {m for f in forms for m in f if len(m) > 1}
    out = list(forms)
    for n in sorted(names):
        if any(n in m for m in products):
            out += [_times(f, {(n,): 1}) for f in forms if all(len(m) <= 1 for m in f)]
    return out


def _term(p: Poly) -> Term:
    """A polynomial as a value."""
    return ("sum", tuple((Fraction(c), (), tuple(("size", n) for n in m)) for m, c in p.items() if c))


def _form(v: Value) -> Poly:
    """A value as a polynomial whose names may be cells."""
    if isinstance(v, bool):
        raise Unprovable
    out: Counter[Monomial] = Counter()
    for c, bounds, factors in v[1]:
        if bounds or c.denominator != 1 or any(f[0] == "endless" for f in factors):
            raise Unprovable
        out[tuple(sorted(f[1] if f[0] == "size" else repr(f) for f in factors))] += int(c)
    cells = [m for m in out if any(map(_is_cell, m))]
    if cells and (any(len(m) > 1 for m in cells) or len(out) > 2 or any(abs(c) != 1 for m, c in out.items() if m)):
        raise Unprovable  # arithmetic of cells is not one of integers
    return dict(out)


def _is_cell(name: str) -> bool:
    return name.startswith("(")


def _endless(v: Term) -> int | None:
    """The sign of an infinity."""
    if len(v[1]) == 1 and v[1][0][2] and v[1][0][2][0][0] == "endless":
        return 1 if v[1][0][2][0][1] * v[1][0][0] > 0 else -1
    return None
