"""Terms: what a kernel or an operation computes at a point, each kept once, in a normal form of real arithmetic.

Integers are quasi-affine expressions (`ir.index.Aff`) of iteration variables; whatever else is an integer (a loaded one, a
choice) is a dimension ``#n`` that stands for term n. Sums have coefficients, products exponents, `exp` of a sum is a product;
so terms that are equal as real numbers mostly are the same term. Roundings, NaN and infinite values are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tapestry.ir.index import Aff, Atom, Floor, const, dim, dims_of, floordiv, modulo, substitute

FAR = 1 << 63  # how far an integer that is read may be from 0
MOST = 60_000
_NONE = frozenset[str]()
REDUCING = {"add": 0.0, "mul": 1.0, "max": -math.inf, "min": math.inf}
COMMUTATIVE = frozenset({"max", "min", "and", "or", "xor", "imul", "feq"})


class Unsupported(Exception):
    """A form that the proof does not know; the reason."""


class Terms:
    """All terms of one proof, by number.

    Attributes:
        keys: operator and operands of each term.
        kinds: ``int``, ``real`` or ``bool`` of each term.
        free: iteration variables that each term depends on.
        sizes: how many values a variable has, from 0.
    """

    def __init__(self) -> None:
        self.numbers: dict[tuple[Any, ...], int] = {}
        self.keys: list[tuple[Any, ...]] = []
        self.kinds: list[str] = []
        self.free: list[frozenset[str]] = []
        self.height: list[int] = []
        self.sizes: dict[str, int] = {}
        self.named = 0
        self.true, self.false = self._make(("true",), "bool"), self._make(("false",), "bool")
        self.unknown = self._make(("unknown",), "real")

    def _make(
        self, key: tuple[Any, ...], kind: str, parts: Iterable[int] = (), free: frozenset[str] = _NONE, tall: int = 0
    ) -> int:
        if key not in self.numbers:
            if len(self.keys) > MOST:
                raise Unsupported("too many terms")
            parts = list(parts)
            self.numbers[key] = len(self.keys)
            self.keys.append(key)
            self.kinds.append(kind)
            self.free.append(free.union(*(self.free[p] for p in parts)))
            self.height.append(max([tall, *(self.height[p] for p in parts)]))
        return self.numbers[key]

    def fresh(self) -> str:
        """A name that no variable has."""
        self.named += 1
        return f"v{self.named}"

    def variable(self, name: str, size: int) -> Aff:
        """An iteration variable over [0, size); one of size 1 is 0."""
        if size == 1:
            return const(0)
        self.sizes[name] = size
        return dim(name)

    # integers
    def int(self, aff: Aff) -> int:
        """An integer."""
        own = frozenset(d for d in dims_of(aff) if d[0] != "#")
        leaves = [int(d[1:]) for d in dims_of(aff) if d[0] == "#"]
        if len(aff.terms) == 1 and aff.terms[0][1] == 1 and not aff.const and leaves and aff.is_affine:
            return leaves[0]
        return self._make(("int", aff), "int", leaves, own)

    def aff(self, t: int) -> Aff:
        """An integer term as an index expression."""
        key = self.keys[t]
        if key[0] == "int":
            return key[1]
        if self.kinds[t] == "bool":
            t = self.where(t, self.int(const(1)), self.int(const(0)))
            return self.aff(t)
        if key[0] == "const" and float(key[1]).is_integer():
            return const(int(key[1]))
        if self.kinds[t] != "int":
            raise Unsupported("a real number as an index")
        return dim(f"#{t}")

    def reach(self, aff: Aff) -> tuple[int, int]:
        """Inclusive bounds of an integer."""
        lo = hi = aff.const
        for atom, c in aff.terms:
            a, b = self._atom(atom)
            lo, hi = lo + c * (a if c > 0 else b), hi + c * (b if c > 0 else a)
        return lo, hi

    def _atom(self, atom: Atom) -> tuple[int, int]:
        if isinstance(atom, str):
            return self._leaf(int(atom[1:])) if atom[0] == "#" else (0, self.sizes[atom] - 1)
        lo, hi = self.reach(atom.arg)
        if isinstance(atom, Floor):
            return lo // atom.div, hi // atom.div
        return (lo % atom.div, hi % atom.div) if lo // atom.div == hi // atom.div else (0, atom.div - 1)

    def _leaf(self, t: int) -> tuple[int, int]:
        key = self.keys[t]
        if key[0] == "where":
            (a, b), (c, d) = (self.reach(self.aff(x)) for x in key[2:4])
            return min(a, c), max(b, d)
        return -FAR, FAR

    def _ranges(self, aff: Aff) -> Mapping[str, int] | None:
        return None if any(d[0] == "#" for d in dims_of(aff)) else self.sizes

    def divided(self, a: Aff, k: int) -> Aff:
        """``floor(a / k)``."""
        return floordiv(a, k, self._ranges(a))

    def remainder(self, a: Aff, k: int) -> Aff:
        """``a mod k``."""
        return modulo(a, k, self._ranges(a))

    # conditions
    def at_least(self, aff: Aff) -> int:
        """``aff >= 0``."""
        lo, hi = self.reach(aff)
        if lo >= 0 or hi < 0:
            return self.true if lo >= 0 else self.false
        return self._make(("ge", aff), "bool", [self.int(aff)])

    def is_zero(self, aff: Aff) -> int:
        """``aff == 0``."""
        lo, hi = self.reach(aff)
        if (lo, hi) == (0, 0) or lo > 0 or hi < 0:
            return self.true if lo == hi == 0 else self.false
        first = next((c for _, c in aff.terms), 1)
        return self._make(("eq", aff if first > 0 else aff * -1), "bool", [self.int(aff)])

    def all(self, conditions: Iterable[int]) -> int:
        """Whether all hold."""
        parts = {p for c in conditions for p in self.conjuncts(c)} - {self.true}
        if self.false in parts or any(self.keys[p][0] == "not" and self.keys[p][1] in parts for p in parts):
            return self.false
        ordered = tuple(sorted(parts))
        return self.true if not ordered else ordered[0] if len(ordered) == 1 else self._make(("all", ordered), "bool", ordered)

    def conjuncts(self, c: int) -> tuple[int, ...]:
        """The conditions that a condition is made of, all of which must hold."""
        return tuple[int, ...](self.keys[c][1]) if self.keys[c][0] == "all" else (c,)

    def aff_of(self, c: int, kind: str) -> Aff:
        """The integer that a condition of a kind (``ge``, ``eq``) is about; 0 for any other."""
        return self.keys[c][1] if self.keys[c][0] == kind else const(0)

    def negated(self, c: int) -> int:
        """Whether it does not hold."""
        key = self.keys[c]
        if key[0] in ("true", "false"):
            return self.false if key[0] == "true" else self.true
        if key[0] == "ge":
            return self.at_least(key[1] * -1 - 1)
        return key[1] if key[0] == "not" else self._make(("not", c), "bool", (c,))

    def any(self, conditions: Iterable[int]) -> int:
        """Whether one holds."""
        return self.negated(self.all(self.negated(c) for c in conditions))

    def compared(self, fn: str, a: int, b: int) -> int:
        """``lt le gt ge eq ne`` of two numbers."""
        if fn in ("gt", "ge"):
            a, b, fn = b, a, {"gt": "lt", "ge": "le"}[fn]
        if "bool" in (self.kinds[a], self.kinds[b]) and fn in ("eq", "ne"):
            return self._truth(fn, a, b)
        if self.kinds[a] != "real" and self.kinds[b] != "real":
            d = self.aff(b) - self.aff(a)
            if fn in ("eq", "ne"):
                same = self.is_zero(d)
                return same if fn == "eq" else self.negated(same)
            return self.at_least(d - 1 if fn == "lt" else d)
        if fn == "ne":
            return self.negated(self.compared("eq", a, b))
        x, y = self.number(a), self.number(b)
        if x is not None and y is not None:
            return self.true if {"lt": x < y, "le": x <= y, "eq": x == y}[fn] else self.false
        if a == b:
            return self.false if fn == "lt" else self.true
        if fn == "eq":
            if any(v is not None and math.isinf(v) for v in (x, y)):  # what is computed is finite
                return self.false
            a, b = sorted((a, b))
        return self._make((f"f{fn}", a, b), "bool", (a, b))

    def _truth(self, fn: str, a: int, b: int) -> int:
        """Equality of truth values, or of one and a number."""
        if self.kinds[a] != "bool":
            a, b = b, a
        if self.kinds[b] != "bool":
            value = self.number(b)
            if value not in (0.0, 1.0):
                raise Unsupported("a truth value beside another number")
            b = self.true if value else self.false
        if b in (self.true, self.false):
            return a if (b == self.true) == (fn == "eq") else self.negated(a)
        same = self._make(("same", *sorted((a, b))), "bool", (a, b))
        return same if fn == "eq" else self.negated(same)

    # numbers
    def const(self, value: float) -> int:
        """A real number, to nine digits."""
        return self._make(("const", float(f"{value:.9g}")), "real")

    def number(self, t: int) -> float | None:
        """The value of a constant."""
        key = self.keys[t]
        if key[0] == "const":
            return key[1]
        return float(key[1].const) if key[0] == "int" and not key[1].terms else None

    def _sum_of(self, t: int) -> tuple[float, dict[int, float]]:
        key, value = self.keys[t], self.number(t)
        if value is not None:
            return value, {}
        return (key[1], dict(key[2])) if key[0] == "add" else (0.0, {t: 1.0})

    def add(self, parts: Iterable[tuple[float, int]]) -> int:
        """``sum(coefficient * term)`` of real numbers."""
        base, total = 0.0, dict[int, float]()
        for c, t in parts:
            if t == self.unknown:
                return t
            own, terms = self._sum_of(t)
            base += c * own
            for x, k in terms.items():
                total[x] = total.get(x, 0.0) + c * k
        size = max(map(abs, total.values()), default=0.0)
        kept = {x: float(f"{k:.9g}") for x, k in total.items() if abs(k) > 1e-12 * size}
        base = float(f"{base:.9g}")
        if not kept or math.isinf(base) or math.isnan(base):
            return self.const(base)
        if base == 0.0 and list(kept.values()) == [1.0]:
            return next(iter(kept))
        return self._make(("add", base, tuple(sorted(kept.items()))), "real", kept)

    def mul(self, parts: Iterable[tuple[int, float]]) -> int:
        """``prod(term ** exponent)`` of real numbers."""
        scale, total, parts = 1.0, dict[int, float](), list(parts)
        if any(t == self.unknown for t, _ in parts):  # of 0 times anything too: it may be a NaN
            return self.unknown
        if any(self.number(t) == 0.0 and e > 0 for t, e in parts):
            return self.const(0.0)
        for t, e in parts:
            if e != 1.0 and self.keys[t][0] == "where" and self.number(self.keys[t][3]) == 0.0 and e > 0:
                t, e = self.where(self.keys[t][1], self.mul([(self.keys[t][2], e)]), self.keys[t][3]), 1.0
            base, terms = self._sum_of(t)
            if not terms:
                scale *= self._power(base, e)
                continue
            if len(terms) == 1 and base == 0.0:
                ((t, k),) = terms.items()
                if k < 0 and e != int(e):
                    raise Unsupported("a root of a negative multiple")
                scale *= k**e
            key = self.keys[t]
            for x, k in key[1] if key[0] == "mul" else ((t, 1.0),):
                total[x] = total.get(x, 0.0) + k * e
        kept = tuple(sorted((x, float(f"{e:.9g}")) for x, e in total.items() if abs(e) > 1e-9))
        if not kept:
            return self.const(scale)
        one = kept[0][0] if len(kept) == 1 and kept[0][1] == 1.0 else self._make(("mul", kept), "real", [x for x, _ in kept])
        return one if scale == 1.0 else self.add([(scale, one)])

    def _power(self, base: float, e: float) -> float:
        try:
            return base**e if not isinstance(base**e, complex) else math.nan
        except (ZeroDivisionError, OverflowError):
            return math.inf

    def exp(self, t: int) -> int:
        """The exponential: of a sum a product, of a choice a choice."""
        key = self.keys[t]
        if t == self.unknown:
            return t
        if key[0] == "where" and any(self.number(x) == -math.inf for x in key[2:4]):
            return self.where(key[1], self.exp(key[2]), self.exp(key[3]))
        base, terms = self._sum_of(t)
        scale = self.const(math.exp(base) if base < 700 else math.inf)
        return self.mul([(scale, 1.0), *((self._make(("exp", x), "real", (x,)), c) for x, c in terms.items())])

    def call(self, fn: str, args: Iterable[int], kind: str = "real") -> int:
        """Any other function."""
        args = tuple(args)
        if self.unknown in args:
            return self.unknown
        if fn in ("max", "min"):
            args = tuple({x for a in args for x in (self.keys[a][1] if self.keys[a][0] == fn else (a,))})
            worst = REDUCING[fn]
            args = tuple(a for a in args if self.number(a) != worst) or args[:1]
            if len(args) == 1:
                return args[0]
        if fn in COMMUTATIVE:
            args = tuple(sorted(args))
        return self._make((fn, args), kind, args)

    def where(self, c: int, a: int, b: int) -> int:
        """A choice. Where both are the same at equal operands of the condition, it is none."""
        if c in (self.true, self.false) or a == b:
            return b if c == self.false else a
        key = self.keys[c]
        if key[0] == "not":
            return self.where(key[1], b, a)
        if self.kinds[a] == self.kinds[b] == "bool":
            return self.any([self.all([c, a]), self.all([self.negated(c), b])])
        if key[0] == "feq" and self._continues(key[1], key[2], a, b):
            return b
        if "real" in (self.kinds[a], self.kinds[b]):
            a, b = (self.const(v) if (v := self.number(x)) is not None else x for x in (a, b))
        kind = "real" if "real" in (self.kinds[a], self.kinds[b]) else "int"
        return self._make(("where", c, a, b), kind, (c, a, b))

    def _continues(self, x: int, y: int, a: int, b: int) -> bool:
        """Whether ``b = a * exp(c * (x - y))`` for some c: then it is a where x and y are equal."""
        if self.number(a) == 0.0 or self.unknown in (a, b):
            return False
        ratio = self.mul([(b, 1.0), (a, -1.0)])
        key = self.keys[ratio]
        rates = [
            e * sign
            for t, e in (key[1] if key[0] == "mul" else ())
            for z, sign in ((x, 1), (y, -1))
            if self.keys[t] == ("exp", z)
        ]
        return any(self.exp(self.add([(c, x), (-c, y)])) == ratio for c in rates)

    def load(self, buffer: str, kind: str, at: Aff, mask: int, other: int) -> int:
        """A cell of a buffer where the mask holds, else another value."""
        if mask == self.false:
            return other
        if mask == self.true:
            other = self.unknown
        key = ("load", buffer, at, mask, other)
        return self._make(key, kind, (self.int(at), mask, other))

    def carried(self, loop: int, name: str, lanes: tuple[Aff, ...], kind: str) -> int:
        """What a variable of a loop holds when a step begins."""
        parts = [self.int(a) for a in lanes]
        return self._make(("carried", loop, name, lanes), kind, parts, frozenset({f"loop {loop}"}))

    # reductions
    def reduce(self, fn: str, over: tuple[tuple[str, int], ...], body: int) -> int:
        """A reduction over variables and their sizes, in order; sums are taken apart."""
        over = tuple((v, n) for v, n in over if n != 1)
        if body == self.unknown:
            return body
        key = self.keys[body]
        count = math.prod(n for _, n in over)
        if fn in ("max", "min"):
            over = tuple((v, n) for v, n in over if v in self.free[body])
        if not over:
            return body
        if fn == "add":
            names = {v for v, _ in over}
            if not self.free[body] & names:
                return self.mul([(self.const(count), 1.0), (body, 1.0)])
            if key[0] == "add":
                sums = [(c, self.reduce(fn, over, t)) for t, c in key[2]]
                return self.add([*sums, (1.0, self.const(key[1] * count))])
            if key[0] == "mul":
                before = [(t, e) for t, e in key[1] if not self.free[t] & names]
                if before:
                    inside = self.mul([(t, e) for t, e in key[1] if self.free[t] & names])
                    return self.mul([*before, (self.reduce(fn, over, inside), 1.0)])
        if key[0] == "reduce" and key[1] == fn:
            names = [self.fresh() for _ in key[2]]
            self.sizes.update(zip(names, key[2], strict=True))
            own = self.opened(body, [dim(n) for n in names])
            return self.reduce(fn, (*over, *zip(names, key[2], strict=True)), own)
        tall = self.height[body] + 1
        names = {v: f"r{tall}.{k}.{n}" for k, (v, n) in enumerate(over)}
        self.sizes.update((names[v], n) for v, n in over)
        inner = self.substituted(body, {v: dim(n) for v, n in names.items()})
        made = self._make(("reduce", fn, tuple(n for _, n in over), inner), self.kinds[body], (inner,), tall=tall)
        self.free[made] = self.free[inner] - set(names.values())
        return made

    def bound(self, t: int) -> list[str]:
        """The variables of a reduction."""
        return [f"r{self.height[t]}.{k}.{n}" for k, n in enumerate(self.keys[t][2])]

    def opened(self, t: int, at: list[Aff]) -> int:
        """The body of a reduction at values of its variables."""
        return self.substituted(self.keys[t][3], dict(zip(self.bound(t), at, strict=True)))

    # substitution
    def substituted(self, t: int, env: Mapping[str, Aff], known: dict[int, int] | None = None) -> int:
        """A term with expressions for variables."""
        known = {} if known is None else known
        if not self.free[t] & env.keys():
            return t
        if t not in known:
            known[t] = self.rebuilt(t, lambda x: self.substituted(x, env, known), lambda a: self.index(a, env, known))
        return known[t]

    def index(self, a: Aff, env: Mapping[str, Aff], known: dict[int, int]) -> Aff:
        """An index expression with expressions for variables."""
        leaves = {d: self.aff(self.substituted(int(d[1:]), env, known)) for d in dims_of(a) if d[0] == "#"}
        return self.placed(a, {**env, **leaves})

    def placed(self, a: Aff, env: Mapping[str, Aff]) -> Aff:
        """An index expression with expressions for its dimensions, simplified by the variables' sizes."""
        found = substitute(a, env, None)
        return found if any(d[0] == "#" for d in dims_of(found)) else substitute(a, env, self.sizes)

    def parts(self, t: int) -> tuple[int, ...]:
        """The operands of a term; of a load its mask and its other value."""
        key = self.keys[t]
        match key[0]:
            case "load":
                return key[3], key[4]
            case "add":
                return tuple(x for x, _ in key[2])
            case "mul":
                return tuple(x for x, _ in key[1])
            case "reduce":
                return (key[3],)
            case "where" | "not" | "same" | "flt" | "fle" | "feq" | "exp":
                return key[1:]
            case "int" | "ge" | "eq" | "const" | "true" | "false" | "unknown" | "carried":
                return ()
            case _:
                return key[1]

    def rebuilt(self, t: int, of: Callable[[int], int], index: Callable[[Aff], Aff] | None = None) -> int:
        """A term with ``of`` applied to its operands and ``index`` to its own index expressions, which stay without it."""
        key = self.keys[t]
        if key[0] in ("const", "true", "false", "unknown") or (index is None and key[0] in ("int", "ge", "eq", "carried")):
            return t
        placed: Callable[[Aff], Aff] = index or (lambda a: a)
        match key:
            case ("int", a):
                return self.int(placed(a))
            case ("ge", a):
                return self.at_least(placed(a))
            case ("eq", a):
                return self.is_zero(placed(a))
            case ("carried", loop, name, lanes):
                return self.carried(loop, name, tuple(map(placed, lanes)), self.kinds[t])
            case ("load", buffer, at, mask, other):
                return self.load(buffer, self.kinds[t], placed(at), of(mask), of(other))
            case ("add", base, terms):
                return self.add([(base, self.const(1.0)), *((c, of(x)) for x, c in terms)])
            case ("mul", factors):
                return self.mul([(of(x), e) for x, e in factors])
            case ("where", c, a, b):
                return self.where(of(c), of(a), of(b))
            case ("all", parts):
                return self.all(map(of, parts))
            case ("not", c):
                return self.negated(of(c))
            case ("same", a, b):
                return self.compared("eq", of(a), of(b))
            case ("flt" | "fle" | "feq", a, b):
                return self.compared(key[0][1:], of(a), of(b))
            case ("exp", x):
                return self.exp(of(x))
            case ("reduce", fn, sizes, body):
                names = [self.fresh() for _ in sizes]
                self.sizes.update(zip(names, sizes, strict=True))
                env = dict(zip(self.bound(t), map(dim, names), strict=True))
                return self.reduce(fn, tuple(zip(names, sizes, strict=True)), of(self.substituted(body, env)))
            case (fn, args):
                return self.call(fn, map(of, args), self.kinds[t])
            case _:
                raise Unsupported(f"{key[0]}")
