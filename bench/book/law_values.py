"""The two sides of a law by their values at drawn sizes: an evaluation of rule texts that shares nothing with the provers.

Every name of a size, start or stride is a small integer; a group of dimensions is one of them. A tensor is a function of its
indices: whole numbers that its name, the index and the draw decide, truth values where the text says so. ``exp`` is a power of
two, quotients are fractions.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tapestry.rewrites.equations.pattern import App, Node, Num, OpPattern, RuleText, Var, names_in

Env = Mapping[str, int]
_FNS: Mapping[str, Any] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "neg": lambda a: -a, "abs": abs,
    "div": lambda a, b: Fraction(a) / b, "floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b, "max": max, "min": min,
    "exp": lambda a: Fraction(2) ** a, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "and": lambda a, b: a and b,
    "or": lambda a, b: a or b, "not": lambda a: not a,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a law in one draw."""

    rule: RuleText
    ops: tuple[OpPattern, ...]
    sizes: Env
    seed: int

    def cell(self, p: OpPattern, env: Env) -> Any:
        """The value of an operation at a place."""
        ranges = [range(self.number(d.size, {})) for d in p.reduce]
        points = [{**env, **dict(zip((d.name for d in p.reduce), at, strict=True))} for at in itertools.product(*ranges)]
        values = [self.value(p.body[0], p, e, None) for e in points]
        state = {"": lambda v: v[0], "sum": sum, "max": max, "min": min}[p.monoid](values)
        return self.value(p.then[0], p, env, state) if p.then else state

    def value(self, n: Node, p: OpPattern, env: Env, state: Any) -> Any:
        """The value of a term."""
        if isinstance(n, Num):
            return n.value
        if isinstance(n, Var):
            read = next((r for r in p.reads if r.alias == n.name), None)
            if read is None:
                return state if n.name == "acc0" else self.number(n, env)
            at = [self.number(i, env) for i in read.index]
            maker = next((q for q in self.ops if q.outs[0].name == read.tensor), None)
            if maker is not None:
                return self.cell(maker, dict(zip((d.name for d in maker.dims), at, strict=True)))
            drawn = zlib.crc32(repr((read.alias, at, self.seed)).encode())
            return bool(drawn % 2) if read.alias == "p" else drawn % 11 - 5
        if n.fn == "index":
            return self.number(n.args[0], env)
        if n.fn == "where":
            return self.value(n.args[1 if self.value(n.args[0], p, env, state) else 2], p, env, state)
        return _FNS[n.fn](*(self.value(a, p, env, state) for a in n.args))

    def number(self, n: Node, env: Env) -> int:
        """An index or a size."""
        if isinstance(n, Num):
            return int(n.value)
        if isinstance(n, Var):
            return env[n.name] if n.name in env else self.sizes[n.name]
        assert isinstance(n, App)
        return _FNS[n.fn](*(self.number(a, env) for a in n.args))


def drawn(rule: RuleText, seed: int) -> Env | None:
    """Sizes that meet the conditions; ``None`` where this draw has none."""
    rng = random.Random(seed)
    ops = (*rule.before, *rule.after)
    nodes = [x for p in ops for x in (*(d.size for d in (*p.dims, *p.reduce)), *p.body, *(i for r in p.reads for i in r.index))]
    nodes += [c.test for c in rule.when]
    names = sorted({v.name for n in nodes for v in names_in(n)} - {d.name for p in ops for d in (*p.dims, *p.reduce)})
    for _ in range(300):
        sizes = {n: rng.randint(0, 5) if rng.random() < 0.9 else rng.randint(-3, 8) for n in names}
        for c in rule.when:  # what a condition sets
            if isinstance(c.test, App) and c.test.fn == "eq" and isinstance(c.test.args[0], Var):
                sizes[c.test.args[0].name] = Side(rule, (), sizes, seed).number(c.test.args[1], {})
        side = Side(rule, (), sizes, seed)
        if all(_FNS[c.test.fn](*(side.number(a, {}) for a in c.test.args)) for c in rule.when if isinstance(c.test, App)):
            return sizes
    return None


def differs(rule: RuleText, seed: int) -> str | None:
    """Where the sides differ in a draw, in words; ``None`` where they agree or the draw has no sizes.

    Raises:
        LookupError: the draw has no sizes, or no cells.
    """
    sizes = drawn(rule, seed)
    if sizes is None:
        raise LookupError
    last = rule.before[-1]
    sides = [(Side(rule, ops, sizes, seed), next(p for p in ops if p.outs[0].name == last.outs[0].name))
             for ops in (rule.before, rule.after)]  # fmt: skip
    shapes = [[s.number(d.size, {}) for d in p.dims] for s, p in sides]
    if shapes[0] != shapes[1]:
        return f"shapes {shapes[0]} and {shapes[1]} at {sizes}"
    if math.prod(shapes[0]) < 1 or min(shapes[0], default=1) < 1:
        raise LookupError
    for at in itertools.islice(itertools.product(*map(range, shapes[0])), 60):
        try:
            a, b = (s.cell(p, dict(zip((d.name for d in p.dims), at, strict=True))) for s, p in sides)
        except ZeroDivisionError:
            continue
        if a != b:
            return f"at {at} with {sizes}: {a} and {b}"
    return None
