"""Whether two terms are the same number wherever a condition holds: by normal form, and isl where addresses look different."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tapestry.ir.index import Aff, const, dim, dims_of, substitute
from tapestry.tools.kernel_proofs.addresses import Conditions
from tapestry.tools.kernel_proofs.term.rearranged import nothing, rearranged_steps
from tapestry.tools.kernel_proofs.term.terms import COMMUTATIVE, REDUCING, Terms

CLOSE = 1e-6  # relative, of constants: those of a source may be of fewer bits
MOST = 20_000
MOST_ORDERS = 6  # of sums one after another


@dataclass
class Matching:
    """Compares terms of one proof."""

    terms: Terms
    ask: Conditions
    steps: int = 0
    known: dict[tuple[int, int, int], bool] = field(default_factory=dict[tuple[int, int, int], bool])

    def same(self, a: int, b: int, given: int) -> bool:
        """Whether two terms are equal wherever ``given`` holds."""
        if a == b and a != self.terms.unknown:
            return True
        key = a, b, given
        if key not in self.known:
            self.steps += 1
            self.known[key] = self.steps < MOST and self._same(self.seen(a, given), self.seen(b, given), given)
        return self.known[key]

    def seen(self, t: int, given: int) -> int:
        """A term without the choices that a condition decides."""
        terms = self.terms
        while True:
            key = terms.keys[t]
            if key[0] == "where":
                if self.ask.follows(given, key[1]):
                    t = key[2]
                elif self.ask.never(given, key[1]):
                    t = key[3]
                else:
                    return t
            elif key[0] == "load" and key[3] != terms.true:
                if self.ask.follows(given, key[3]):
                    return terms.load(key[1], terms.kinds[t], key[2], terms.true, terms.unknown)
                if not self.ask.never(given, key[3]):
                    return t
                t = key[4]
            else:
                return t

    def _same(self, a: int, b: int, given: int) -> bool:
        terms = self.terms
        if a == b:
            return a != terms.unknown
        p, q = terms.keys[a], terms.keys[b]
        x, y = terms.number(a), terms.number(b)
        if x is not None and y is not None:
            return x == y or abs(x - y) <= CLOSE * abs(x)
        if terms.kinds[a] == terms.kinds[b] == "int" and "int" in (p[0], q[0]):
            return self.ask.equal(terms.aff(a), terms.aff(self._alike(a, b, given)), given)
        if terms.kinds[a] == terms.kinds[b] == "bool" and self.ask.same(a, self._alike(a, b, given), given):
            return True
        if p[0] == "add" and q[0] == "reduce":
            return self._in_stretches(p, b, given)
        if {p[0], q[0]} == {"load", "where"}:
            p, q = (self._choice(t) for t in (a, b))
        if p[0] != q[0]:
            return False
        match p[0]:
            case "load":
                return self._loads(a, b, given)
            case "add":
                return abs(p[1] - q[1]) <= CLOSE * abs(p[1]) and self._paired(p[2], q[2], given)
            case "mul":
                return self._paired(p[1], q[1], given)
            case "where":
                return (
                    self.same(p[1], q[1], given)
                    and self.same(p[2], q[2], terms.all((given, p[1])))
                    and self.same(p[3], q[3], terms.all((given, terms.negated(p[1]))))
                )
            case "reduce":
                return p[1] == q[1] and ((p[2] == q[2] and self._bodies(a, b, given)) or self._rearranged(a, b, given))
            case "exp" | "not" | "flt" | "fle" | "feq" | "same":
                return all(self.same(s, t, given) for s, t in zip(p[1:], q[1:], strict=True))
            case "ge" | "eq" | "int" | "const" | "true" | "false" | "unknown" | "carried":
                return False
            case fn:
                return self._arguments(fn, p[1], q[1], given)

    def _choice(self, t: int) -> tuple[Any, ...]:
        """A cell under a mask as a choice."""
        terms, key = self.terms, self.terms.keys[t]
        if key[0] != "load":
            return key
        return ("where", key[3], terms.load(key[1], terms.kinds[t], key[2], terms.true, terms.unknown), key[4])

    def _alike(self, a: int, b: int, given: int) -> int:
        """``b`` with the loaded integers of ``a`` in the place of equal ones of its own."""
        terms, env = self.terms, dict[str, Aff]()
        mine = leaves(terms, a)
        for t in leaves(terms, b) - mine:
            found = next((s for s in sorted(mine) if s != a and self.same(s, t, given)), None)
            if found is not None:
                env[f"#{t}"] = dim(f"#{found}")
        return renamed(terms, b, env) if env else b

    def _arguments(self, fn: str, p: Sequence[int], q: Sequence[int], given: int) -> bool:
        if len(p) != len(q):
            return False
        if fn in COMMUTATIVE or fn == "all":
            return self._paired([(t, 1.0) for t in p], [(t, 1.0) for t in q], given)
        return all(self.same(s, t, given) for s, t in zip(p, q, strict=True))

    def _paired(self, p: Sequence[tuple[int, float]], q: Sequence[tuple[int, float]], given: int) -> bool:
        """Whether parts with numbers (coefficients, exponents) are the same ones in some order."""
        left = list(q)
        if len(p) != len(q):
            return False
        for t, c in sorted(p, key=lambda x: x not in left):
            fits = [(s, d) for s, d in left if abs(c - d) <= CLOSE * abs(c)]
            found = next((x for x in fits if x[0] == t), None) or next((x for x in fits if self.same(t, x[0], given)), None)
            if found is None:
                return False
            left.remove(found)
        return True

    def _loads(self, a: int, b: int, given: int) -> bool:
        (_, s, x, m, u), (_, t, y, n, v) = self.terms.keys[a], self.terms.keys[b]
        within = self.terms.all((given, m))
        if s != t or not self.same(m, n, given) or not self.same(self.terms.int(x), self.terms.int(y), within):
            return False
        return m == self.terms.true or self.same(u, v, self.terms.all((given, self.terms.negated(m))))

    def _bodies(self, a: int, b: int, given: int) -> bool:
        """Bodies at the same values of the variables."""
        terms = self.terms
        at = [terms.variable(terms.fresh(), n) for n in terms.keys[a][2]]
        return self.same(terms.opened(a, at), terms.opened(b, at), given)

    def _in_stretches(self, p: tuple[Any, ...], b: int, given: int) -> bool:
        """Whether sums one after another are one sum, each of a stretch of its steps."""
        terms = self.terms
        sums: list[int] = [t for t, c in p[2] if c == 1.0 and terms.keys[t][:2] == ("reduce", "add")]
        if len(sums) < len(p[2]) or p[1] or terms.keys[b][1] != "add" or len(terms.keys[b][2]) != 1:
            return False
        total = terms.keys[b][2][0]
        for order in itertools.islice(itertools.permutations(sums), MOST_ORDERS):
            done = 0
            for t in order:
                own = math.prod(terms.keys[t][2])
                count = min(own, total - done)
                if count < own and not (count > 0 and _nothing(terms, t, count, own)):
                    break
                at = terms.variable(terms.fresh(), count)
                if not self.same(_opened(terms, t, at, 0), terms.opened(b, [at + done]), given):
                    break
                done += count
            else:
                if done == total:
                    return True
        return False

    def _rearranged(self, a: int, b: int, given: int) -> bool:
        """Bodies at steps that correspond in another order."""
        terms = self.terms
        fn, sizes = str(terms.keys[a][1]), tuple[int, ...](terms.keys[a][2])
        names = [terms.fresh() for _ in sizes]
        step = terms.fresh()
        mine = terms.opened(a, [terms.variable(n, k) for n, k in zip(names, sizes, strict=True)])
        if len(terms.keys[b][2]) != 1:
            return False
        theirs = terms.opened(b, [terms.variable(step, terms.keys[b][2][0])])
        for at, real in rearranged_steps(terms, mine, theirs, tuple(names), step):
            past = terms.all((given, terms.negated(real)))
            if real != terms.true and not nothing(terms, self.ask, mine, fn, past):
                continue
            if self.same(mine, terms.substituted(theirs, {step: at}), terms.all((given, real))):
                return True
        return False


def leaves(terms: Terms, t: int) -> set[int]:
    """Integers that are no variables, in an integer or a condition on integers."""
    key = terms.keys[t]
    if key[0] in ("int", "ge", "eq"):
        return {int(d[1:]) for d in dims_of(key[1]) if d[0] == "#"}
    if key[0] in ("not", "all"):
        return set[int]().union(*(leaves(terms, p) for p in terms.parts(t)))
    return {t} if terms.kinds[t] == "int" else set()


def renamed(terms: Terms, t: int, env: Mapping[str, Aff]) -> int:
    """An integer, or a condition on integers, with others for its leaves."""
    key = terms.keys[t]
    if key[0] in ("int", "ge", "eq", "not", "all"):
        return terms.rebuilt(t, partial(renamed, terms, env=env), lambda a: substitute(a, env, None))
    return terms.int(env[f"#{t}"]) if f"#{t}" in env else t


def flattened(terms: Terms, t: int, sizes: Sequence[int], known: dict[int, int]) -> int:
    """A term whose reductions run over one variable each, of one of some sizes where steps past it contribute nothing."""

    def of(x: int) -> int:
        if x not in known:
            known[x] = _flat(terms, x, sizes, of)
        return known[x]

    return of(t)


def _flat(terms: Terms, t: int, sizes: Sequence[int], of: Callable[[int], int]) -> int:
    key = terms.keys[t]
    if key[0] == "load":
        return t
    if key[0] != "reduce":
        return terms.rebuilt(t, of)
    total = math.prod(key[2])
    shorter = [] if total in sizes else sorted({n for n in sizes if n < total}, reverse=True)
    for size in (*shorter, total):
        if size < total and not _nothing(terms, t, size, total):
            continue
        name = terms.fresh()
        body = _opened(terms, t, terms.variable(name, size), 0)
        return terms.reduce(key[1], ((name, size),), of(body))
    return t


def _opened(terms: Terms, t: int, flat: Aff, past: int) -> int:
    at, inner = list[Aff](), 1
    for n in reversed(terms.keys[t][2]):
        at.append(terms.remainder(terms.divided(flat + past, inner), n))
        inner *= n
    return terms.opened(t, at[::-1])


def _nothing(terms: Terms, t: int, size: int, total: int) -> bool:
    """Whether a reduction's steps from ``size`` on are its identity."""
    name = terms.fresh()
    rest = _opened(terms, t, terms.variable(name, total - size) if total - size > 1 else const(0), size)
    return terms.number(rest) == REDUCING.get(terms.keys[t][1])
