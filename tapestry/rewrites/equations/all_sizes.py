"""Proofs of equations for all sizes and ranks: both sides of a rule as one term over real numbers.

A group of dimensions is one variable, whatever its rank; a view is a function of its indices, an open body one of its
operands and of the place. A sum of products is a set of monomials, each with all its sums in front: Σ over bound variables
of a product. Sums distribute, flatten and commute by construction; what is left are lemmas about index ranges:

- Σ over [0, M) of what is chosen below A is Σ over [0, A); Σ over [0, M − A) of f(A + j) is Σ over [0, M) less Σ over [0, A);
- (k, j) ↦ L·k + j is a bijection of [0, K) × [0, L) with [0, K·L), in order (mixed radix);
- Σ over [0, 1) of f is f(0), over [0, 0) nothing;
- Σ_v [P = v] f(v) is f(P) where P is in range, else zero.

Maxima and minima are sets of terms with bound variables: what is added goes inside, increasing functions go inside, a term
without the variable goes outside of the other lattice operation. Ranges of extrema are not empty. Equal terms prove the rule;
unequal ones say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from tapestry.ir.expr import PRIMITIVES
from tapestry.rewrites.equations.pattern import App, Node, Num, OpPattern, ReadPattern, RuleText, Var, show
from tapestry.rewrites.equations.real_terms import Facts, applied, atom, inside, real_number, reduced
from tapestry.rewrites.equations.term_walks import NAMES, Term, Unprovable, canonical, variable


def proved(rule: RuleText) -> bool:
    """Whether both sides are one term, for all sizes, ranks, bodies and monoids that the conditions allow."""
    choices = [c.test for c in rule.when if isinstance(c.test, App) and c.test.fn == "in"]
    monoids = {p.monoid for p in rule.before}
    options = next((c for c in choices if isinstance(c.args[0], Var) and c.args[0].name in monoids), None)
    names = [a.name for a in options.args[1:] if isinstance(a, Var)] if options and isinstance(options.args[0], Var) else [""]
    open_ = options.args[0].name if options and isinstance(options.args[0], Var) else ""
    try:
        return all(_equal(rule, {open_: n} if n else {}) for n in names)
    except (Unprovable, RecursionError):
        return False


def _equal(rule: RuleText, monoids: Mapping[str, str]) -> bool:
    facts = facts_of(rule)
    gone = {o.name for p in rule.after for o in p.outs}
    before, after = _Side(rule, rule.before, facts, monoids), _Side(rule, rule.after, facts, monoids)
    for p in rule.before:
        for o in p.outs:
            if o.name in gone:
                at = tuple(variable(d.name) for d in p.dims)
                q = next(q for q in rule.after if o.name in {x.name for x in q.outs})
                if [d.name for d in q.dims] != [d.name for d in p.dims]:
                    raise Unprovable
                if canonical(before.cell(o.name, at)) != canonical(after.cell(o.name, at)):
                    return False
    return True


def facts_of(rule: RuleText) -> Facts:
    """What the conditions of a rule say."""
    products: dict[tuple[str, str], str] = {}
    below = set[tuple[str, str]]()
    named: dict[str, set[str]] = {"increasing": set(), "placeless": set()}
    for c in rule.when:
        t = c.test
        if isinstance(t, App) and t.fn == "eq" and isinstance(t.args[1], App) and t.args[1].fn == "mul":
            a, b = (show(x) for x in t.args[1].args)
            products |= {(a, b): show(t.args[0]), (b, a): show(t.args[0])}
        if isinstance(t, App) and t.fn == "lt":
            below.add((show(t.args[0]), show(t.args[1])))
        if isinstance(t, App) and t.fn in named and len(t.args) == 1 and isinstance(t.args[0], Var):
            named[t.fn].add(t.args[0].name)
    seen: dict[str, frozenset[str]] = {}
    for p in rule.after:
        dims = frozenset(d.name for d in (*p.dims, *p.reduce))
        moved = {v for r in p.reads for v in _replaced(rule, r)}
        for e, space in (*((e, dims | moved) for e in p.body), *((e, frozenset(d.name for d in p.dims)) for e in p.then)):
            for fn in _open(e):
                seen[fn] = seen.get(fn, space) & space
    return Facts(products, frozenset(below), frozenset(named["increasing"]), frozenset(named["placeless"]), seen)


def _replaced(rule: RuleText, read: ReadPattern) -> Iterator[str]:
    """Dimensions of the left-hand side for which a read of the right gives something else."""
    formals = next((r.index for p in rule.before for r in p.reads if r.alias == read.alias), read.index)
    for f, n in zip(formals, read.index, strict=True):
        if f != n and isinstance(f, Var):
            yield f.name


def _open(n: Node) -> Iterator[str]:
    if isinstance(n, App):
        if n.fn not in PRIMITIVES and n.fn not in ("index", "add", "sub", "mul", "div"):
            yield n.fn
        for a in n.args:
            yield from _open(a)


@dataclass
class _Side:
    """Terms of the cells of one side."""

    rule: RuleText
    ops: tuple[OpPattern, ...]
    facts: Facts
    monoids: Mapping[str, str]

    def cell(self, tensor: str, at: tuple[Term, ...]) -> Term:
        """The term of a tensor's cell; of what the other side writes and this one keeps, its own."""
        p = next(p for p in (*self.ops, *self.rule.before) if tensor in {o.name for o in p.outs})
        if [o.many for o in p.outs] != [False]:
            raise Unprovable
        if len(at) == 1 and len(p.dims) != 1:
            raise Unprovable  # a projection of several groups at once
        return self.op(p, {d.name: e for d, e in zip(p.dims, at, strict=True)})

    def op(self, p: OpPattern, env: dict[str, Term]) -> Term:
        """The value of an operation at a place."""
        bound = [(f"b{next(NAMES)}", show(d.size).removesuffix("..")) for d in p.reduce]
        inside = env | {d.name: variable(n) for d, (n, _) in zip(p.reduce, bound, strict=True)}
        if len(p.body) != 1 or len(p.then) > 1:
            raise Unprovable
        monoid = self.monoids.get(p.monoid, p.monoid)
        value = self.expr(p.body[0], p, inside, None)
        state = reduced(monoid, tuple(bound), value, self.facts) if monoid else value
        return self.expr(p.then[0], p, env, state) if p.then else state

    def expr(self, n: Node, p: OpPattern, env: dict[str, Term], state: Term) -> Term:
        """The value of a term of an operation."""
        if isinstance(n, Num):
            if not math.isfinite(n.value):
                raise Unprovable
            return real_number(Fraction(n.value))
        if isinstance(n, Var):
            if n.name[:3] == "acc":
                return state
            read = next((r for r in p.reads if r.alias == n.name), None)
            return self.read(read, env) if read else atom(("size", n.name))
        if n.fn == "index":
            return atom(("index", self.place(n.args[0], env)))
        if n.fn in PRIMITIVES:
            return applied(n.fn, [self.expr(a, p, env, state) for a in n.args], self.facts)
        return self.body(n, p, env, state)

    def body(self, n: App, p: OpPattern, env: dict[str, Term], state: Term) -> Term:
        """An open body: a function of its operands, and of the dimensions that it may look at."""
        values = [self.expr(a, p, env, state) for a in n.args]
        owner = next(q for q in self.rule.before if any(n.fn in _open(e) for e in (*q.body, *q.then)))
        moved = dict(env)
        for r in p.reads if self.ops is self.rule.after else ():
            formals = next((x.index for q in self.rule.before for x in q.reads if x.alias == r.alias), r.index)
            moved |= {
                f.name: self.place(g, env) for f, g in zip(formals, r.index, strict=True) if f != g and isinstance(f, Var)
            }
        late = any(n.fn in _open(e) for e in owner.then)
        own = [d.name for d in (*owner.dims, *(() if late else owner.reduce))]
        seen = self.facts.seen.get(n.fn, frozenset[str]())
        places = () if n.fn in self.facts.placeless else tuple((d, moved[d]) for d in own if d in seen and d in moved)
        if n.fn in self.facts.increasing and len(values) == 1:
            return inside(values[0], lambda x: atom(("open", n.fn, (x,), places)))
        return atom(("open", n.fn, tuple(values), places))

    def read(self, r: ReadPattern, env: dict[str, Term]) -> Term:
        """The value of a read: of an open tensor a function of its indices."""
        made = {o.name for q in (*self.rule.before, *self.ops) for o in q.outs}
        at = tuple(self.place(i, env) for i in r.index)
        return self.cell(r.tensor, at) if r.tensor in made else atom(("view", r.alias, at))

    def place(self, n: Node, env: dict[str, Term]) -> Term:
        """An index as a sum of variables with sizes for coefficients."""
        if isinstance(n, Var):
            return env.get(n.name, ("at", (), ((n.name, 1),)))
        if isinstance(n, Num):
            return ("at", (), (("1", int(n.value)),) if n.value else ())
        if n.fn in ("add", "sub"):
            a, b = (self.place(x, env) for x in n.args)
            if n.fn == "sub":
                raise Unprovable
            return ("at", tuple(sorted((*a[1], *b[1]), key=repr)), tuple(sorted((*a[2], *b[2]), key=repr)))
        if n.fn == "mul":
            size, other = show(n.args[0]), self.place(n.args[1], env)
            if other[2] or len(other[1]) != 1 or other[1][0][1] != "1":
                raise Unprovable
            return ("at", ((other[1][0][0], size),), ())
        return ("at", ((("map", n.fn, tuple(self.place(a, env) for a in n.args)), "1"),), ())
