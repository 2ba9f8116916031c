"""By how much the two sides of an equation may differ in floating point, from its text.

A value made by sums and products alone is, computed in any order, within γ_d·Σ|terms| of the real one. The terms are those
of the expanded sum of products, d is the most roundings that one of them passes, γ_d = d·u/(1 − d·u), u the unit roundoff
(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1 and section 3.1). So the sides differ by the two
bounds at most. A sum of M terms rounds each at most M − 1 times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tapestry.ir.expr import PRIMITIVES
from tapestry.rewrites.equations.pattern import App, Node, Num, OpPattern, RuleText, Var, show

_FREE = frozenset({"neg", "abs", "max", "min", "where", "index", "eq", "ne", "lt", "le", "gt", "ge", "and"})  # round nothing
_LINEAR = frozenset({"add", "sub", "mul"})
Roundings = Counter[str]  # sizes, "" for one


def rounding(rule: RuleText) -> str:
    """By how much results may change, as a sentence without its full stop."""
    if rule.exact:
        return "the same bits"
    sides = [_side(rule, ops) for ops in (rule.before, rule.after)]
    if any(s is None for s in sides):
        return "real arithmetic; no bound is stated"
    left, right = (s or Counter() for s in sides)
    if not any(left.values()) and not any(right.values()):
        rises = any(isinstance(c.test, App) and c.test.fn == "increasing" for c in rule.when)
        return "the same values" + (", where functions rise as they are computed" if rises else ": nothing is rounded")
    return f"at most γ(d)·Σ|terms| on each side, d = {_text(left)} before and {_text(right)} after"


def _text(d: Roundings) -> str:
    constant = d[""]
    parts = [n if k == 1 else f"{k}·{n}" for n, k in sorted(d.items()) if n and k]
    return " + ".join(parts + ([str(constant)] if constant > 0 or not parts else [])) + (
        f" − {-constant}" if parts and constant < 0 else ""
    )


def _side(rule: RuleText, ops: tuple[OpPattern, ...]) -> Roundings | None:
    """The most roundings of a term of the last operation; ``None`` where something else than sums and products is computed."""
    done: dict[str, Roundings] = {}
    for p in ops:
        summed = p.monoid == "sum" or (p.monoid[:1].isupper() and p.monoid not in _selecting(rule))  # an open one may be a sum
        if p.monoid not in ("", "max", "min") and not summed and p.monoid[0].islower():
            return None
        names = {r.alias: done[r.tensor] for r in p.reads if r.tensor in done}
        found = _rounded(p.body[0], names)
        if found is None:
            return None
        for d in p.reduce if summed else ():
            found = found + Counter({show(d.size).removesuffix(".."): 1})
        if p.reduce and summed:
            found[""] -= 1
        if p.then and (found := _rounded(p.then[0], names | {"acc0": found, "acc": found})) is None:
            return None
        done[p.outs[0].name] = found
    return done[ops[-1].outs[0].name]


def _selecting(rule: RuleText) -> Iterator[str]:
    """Open monoids that stand for a maximum or minimum."""
    for c in rule.when:
        if (
            isinstance(c.test, App)
            and c.test.fn == "in"
            and all(isinstance(a, Var) and a.name in ("max", "min") for a in c.test.args[1:])
        ):
            yield show(c.test.args[0])


def _rounded(n: Node, names: dict[str, Roundings]) -> Roundings | None:
    """The most roundings of a term in an expression. An open body rounds the same on both sides."""
    if isinstance(n, Num):
        return Counter()
    if isinstance(n, Var):
        return names.get(n.name, Counter())
    if n.fn in PRIMITIVES and n.fn not in _FREE | _LINEAR:
        return None
    parts = [_rounded(a, names) for a in n.args]
    if any(p is None for p in parts):
        return None
    found = [p for p in parts if p is not None]
    if n.fn == "mul":
        return sum(found, Counter[str]()) + Counter({"": 1})
    most = max(found, key=lambda p: (sum(v for k, v in p.items() if k), p[""]), default=Counter[str]())
    out = Counter(most)
    for p in found:
        for k, v in p.items():
            out[k] = max(out[k], v)
    out[""] += n.fn in _LINEAR
    return out
