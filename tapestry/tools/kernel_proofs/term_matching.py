"""Whether two terms are the same number wherever a condition holds: by normal form, and isl where addresses look different."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tapestry.ir.expr import Arg, Call, Expr
from tapestry.ir.graph import Block, Dim, Graph
from tapestry.ir.index import Aff, Floor, Mod, const, dim, dims_of, substitute
from tapestry.ir.kernel import Box, Kernel, strides
from tapestry.ir.monoid import MONOIDS, ByPrimitive, Moments, Monoid, Product, Rebased
from tapestry.ir.states import state_box, varies
from tapestry.ir.types import FLOATS
from tapestry.tools.kernel_proofs.addresses import Conditions
from tapestry.tools.kernel_proofs.kernel_text import NOT_GIVEN, Evaluation, KernelText, block_of, evaluated_together
from tapestry.tools.kernel_proofs.terms import COMMUTATIVE, REDUCING, Kind, Terms, Unsupported, applied, kind_of
from tapestry.verify.interp import Walk, guards

# What a block of an operation computes at a cell, as terms over the buffers that its kernel is given.


@dataclass(frozen=True)
class Operation(Walk[Aff, int]):
    """A block of one operation, and where its buffers are.

    Attributes:
        order: of the reduced dimensions, as they make one number.
    """

    terms: Terms
    graph: Graph
    kernel: Kernel
    text: KernelText
    order: tuple[int, ...] = ()

    def outputs(self, at: Sequence[Aff]) -> list[int]:
        """The value of each output (of ``partial``: of each field) at a cell, in coordinates of the whole tensor."""
        op = block_of(self.graph, self.kernel)
        env = {d.name: e for d, e in zip(op.dims, at, strict=True)}
        if self.kernel.mode == "finish":
            return self.exprs(op, op.then, env, [self._state(op, k, at) for k in range(len(self.text.states))])
        return self.states(op, env) if self.kernel.mode == "partial" else self.values(op, env)

    def bound(self, op: Block, dims: Sequence[Dim], env: Mapping[str, Aff]) -> tuple[dict[str, Aff], tuple[str, int]]:
        """Reduced dimensions of the block as parts of one number, and its variable with its size."""
        of = dict(zip((d.name for d in op.space), self.kernel.block, strict=True))
        box = [of[d.name] for d in dims]
        total = math.prod(hi - lo for lo, hi in box)
        name = self.terms.fresh()
        flat, rest, out = self.terms.variable(name, total), total, dict(env)
        for k in (self.order if dims is op.reduce else ()) or range(len(dims)):
            lo, hi = box[k]
            rest //= max(1, hi - lo)
            out[dims[k].name] = self.terms.remainder(self.terms.divided(flat, max(rest, 1)), max(1, hi - lo)) + lo
        return out, (name, total)

    def reduced(self, monoid: str, over: tuple[str, int], fields: list[int], kinds: tuple[str, ...]) -> list[int]:
        return reduced(self.terms, MONOIDS[monoid], over, fields)

    def _state(self, op: Block, k: int, at: Sequence[Aff]) -> int:
        box, name = state_box(op, k, self.kernel.outs[0]), self.text.states[k]
        index = [e if own else const(0) for e, own in zip(at, varies(op)[k], strict=True)]
        flat = _flat_of_operation_terms(index, box)
        return self.terms.load(name, kind_of(self.text.buffers[name].dtype).kind, flat, self.terms.true, self.terms.unknown)

    def const(self, value: float | int | bool, dtype: str) -> int:
        if dtype in FLOATS:
            return self.terms.const(float(value))
        return (self.terms.true if value else self.terms.false) if dtype == "bool" else self.terms.int(const(int(value)))

    def index(self, aff: Aff, env: Mapping[str, Aff], dtype: str) -> int:
        return applied(self.terms, "cast", (self.terms.int(self.terms.placed(aff, env)),), kind_of(dtype))

    def call(self, e: Call, args: list[int]) -> int:
        return applied(self.terms, e.fn, args, kind_of(e.dtype))

    def read(self, op: Block, pos: int, env: Mapping[str, Aff]) -> int:
        r, terms, box = op.reads[pos], self.terms, self.kernel.ins[pos]
        t = self.graph.tensors[r.tensor]
        places = [(terms.placed(g.aff, env), g.op) for g in guards(r, t.shape)]
        inside = terms.all([terms.at_least(aff) if kind == "ge" else terms.is_zero(aff) for aff, kind in places])
        other = terms.unknown if r.other is None else self.const(r.other, t.dtype)
        if box is None or pos not in self.text.reads:  # nothing of it is for this block, or so the kernel says
            return terms.load(f"{NOT_GIVEN} {pos}", kind_of(t.dtype).kind, const(0), inside, other)
        at = _flat_of_operation_terms([terms.placed(e, env) for e in r.index], box)
        return terms.load(self.text.reads[pos], kind_of(t.dtype).kind, at, inside, other)


def orders(kernel: Kernel, op: Block) -> Iterator[tuple[int, ...]]:
    """Orders in which the reduced dimensions may be one number: as they stand, and others."""
    box = kernel.block[len(op.dims) : len(op.dims) + len(op.reduce)]
    long = [k for k, (lo, hi) in enumerate(box) if hi - lo > 1]
    short = tuple(k for k in range(len(box)) if k not in long)
    if len(long) <= 4:
        yield from ((*p, *short) for p in itertools.permutations(long))
    else:
        yield tuple(range(len(box)))


def _flat_of_operation_terms(index: Sequence[Aff], box: Box) -> Aff:
    out = const(0)
    for e, (lo, _), s in zip(index, box, strides(box), strict=True):
        out = out + (e - lo) * s
    return out


def reduced(terms: Terms, monoid: Monoid, over: tuple[str, int], fields: Sequence[int]) -> list[int]:
    """The state of a reduction in closed form: what the laws of the monoid (`ir.monoid`) make of its merges."""
    match monoid.structure:
        case ByPrimitive(fn) if fn in ("add", "mul", "max", "min"):
            chosen = _selected(terms, over, fields[0]) if fn == "add" else None
            return [terms.reduce(fn, (over,), fields[0]) if chosen is None else chosen]
        case Product(parts):
            out, at = list[int](), 0
            for p in parts:
                out += reduced(terms, p, over, fields[at : at + len(p.fields)])
                at += len(p.fields)
            return out
        case Moments():
            return _moments(terms, over, *fields)
        case Rebased(centre, acted, act):
            n = len(centre.fields)
            middle = reduced(terms, centre, over, fields[:n])
            dtypes = ["f32"] * (len(middle) + len(fields))
            given = [Arg(k, d) for k, d in enumerate(dtypes)]
            values = [*fields[:n], *middle, *fields[n:]]
            moved = [_said(terms, e, values) for e in act(tuple(given[:n]), tuple(given[n : 2 * n]), tuple(given[2 * n :]))]
            return [*middle, *reduced(terms, acted, over, moved)]
        case _:
            raise Unsupported(f"the monoid '{monoid.name}' has no closed form")


def _said(terms: Terms, e: Expr, values: Sequence[int]) -> int:
    if isinstance(e, Arg):
        return values[e.pos]
    assert isinstance(e, Call), e
    return applied(terms, e.fn, [_said(terms, a, values) for a in e.args], Kind("real", 64))


def _moments(terms: Terms, over: tuple[str, int], n: int, mean: int, spread: int) -> list[int]:
    """Count, mean and squared deviations of weighted ones (the parallel axis theorem)."""
    total = terms.reduce("add", (over,), n)
    middle = terms.mul([(terms.reduce("add", (over,), terms.mul([(n, 1.0), (mean, 1.0)])), 1.0), (total, -1.0)])
    away = terms.add([(1.0, mean), (-1.0, middle)])
    squares = terms.add([(1.0, spread), (1.0, terms.mul([(n, 1.0), (away, 2.0)]))])
    return [total, middle, terms.reduce("add", (over,), squares)]


def _selected(terms: Terms, over: tuple[str, int], body: int) -> int | None:
    """``sum_v where(v == u, x[v], 0)`` is ``x[u]`` where u is one of the v, else 0."""
    key: tuple[Any, ...] = terms.keys[body]
    name, size = over
    if key[0] != "where" or terms.number(key[3]) != 0.0:
        return None
    tests = terms.conjuncts(int(key[1]))
    for c in tests:
        aff = terms.aff_of(c, "eq")
        by = aff.coef(name)
        if abs(by) != 1:
            continue
        at = (aff - dim(name) * by) * -by
        if name in terms.free[terms.int(at)]:
            continue
        inside = terms.all([terms.at_least(at), terms.at_least(at * -1 + (size - 1))])
        rest = terms.all(t for t in tests if t != c)
        value = terms.where(rest, key[2], key[3])
        return terms.where(inside, terms.substituted(value, {name: at}), key[3])
    return None


# A reduction in another order: which step of the operation each step of a source is, and that it is each of them once.


MOST_STEPS_ONE_BY_ONE = 1 << 20  # steps that are looked at one by one


def rearranged_steps(terms: Terms, a: int, b: int, names: tuple[str, ...], step: str) -> Iterator[tuple[Aff, int]]:
    """Candidates for the ``step`` of ``b`` that a step of ``a`` (of variables ``names``) is, and where ``a`` has steps.

    They are read off addresses of one buffer in both bodies, and hold each step of ``b`` exactly once.
    """
    size = terms.sizes[step]
    if math.prod(terms.sizes[n] for n in names) > MOST_STEPS_ONE_BY_ONE:
        return
    real = terms.all(c for c in conditions(terms, a) if terms.free[c] and terms.free[c] <= set(names))
    seen = set[Aff]()
    for buffer, at in addresses(terms, b):
        digits = _digits(terms, at, step)
        for other, mine in addresses(terms, a):
            part = _variable_part(mine, names) if digits and other == buffer else None
            if part is None or part in seen:
                continue
            seen.add(part)
            low = terms.reach(part)[0]
            at_step = const(0)
            for by, weight, count in digits:
                at_step = at_step + terms.remainder(terms.divided(part - low, by), count) * weight
            run = Evaluation(terms, {}, {})
            own, (value, there) = evaluated_together([run.aff(at_step), run.of(real)])
            value, there = np.broadcast_arrays(value, there)
            hit = value[there]
            if set(own) == set(names) and len(hit) == size and np.array_equal(np.sort(hit), np.arange(size)):
                yield at_step, real


def _digits(terms: Terms, at: Aff, step: str) -> list[tuple[int, int, int]]:
    """How an address says its step: coefficients, what each digit counts in the step, and how many values it has."""
    out = list[tuple[int, int, int]]()
    for atom, c in at.terms:
        if step not in ({atom} if isinstance(atom, str) else dims_of(atom.arg)):
            continue
        weight, last = 1, atom
        while not isinstance(atom, str):
            inner = atom.arg
            if len(inner.terms) != 1 or inner.const or inner.terms[0][1] != 1:
                return []
            weight *= atom.div if isinstance(atom, Floor) else 1
            atom = inner.terms[0][0]
        count = last.div if isinstance(last, Mod) else -(-terms.sizes[step] // weight)
        if c <= 0:
            return []
        out.append((c, weight, count))
    return out


def _variable_part(at: Aff, names: tuple[str, ...]) -> Aff | None:
    """What of an address depends on variables; ``None`` where it depends on others with them."""
    own = Aff()
    for atom, c in at.terms:
        inside = {atom} if isinstance(atom, str) else dims_of(atom.arg)
        if inside & set(names):
            if not inside <= set(names):
                return None
            own = own + Aff(((atom, c),))
    return own


def addresses(terms: Terms, t: int) -> list[tuple[str, Aff]]:
    """Buffers and addresses of the loads of a body."""
    return [(key[1], key[2]) for key in _within(terms, t) if key[0] == "load"]


def conditions(terms: Terms, t: int) -> set[int]:
    """Conditions of the loads and choices of a body, each by itself."""
    found = set[int]()
    for key in _within(terms, t):
        c = key[3] if key[0] == "load" else key[1] if key[0] == "where" else terms.true
        found |= set(terms.conjuncts(c))
    return found - {terms.true}


def _within(terms: Terms, t: int) -> list[tuple[Any, ...]]:
    """The terms that a body is made of."""
    seen, stack, out = set[int](), [t], list[tuple[Any, ...]]()
    while stack:
        x = stack.pop()
        if x not in seen:
            seen.add(x)
            out.append(terms.keys[x])
            stack += terms.parts(x)
    return out


def nothing(terms: Terms, ask: Conditions, t: int, fn: str, given: int) -> bool:
    """Whether a body is the identity of its reduction wherever a condition holds."""
    key = terms.keys[t]
    if terms.number(t) is not None:
        return terms.number(t) == REDUCING[fn]
    match key[0]:
        case "load":
            return ask.never(given, key[3]) and nothing(terms, ask, key[4], fn, given)
        case "where":
            return (ask.never(given, key[1]) or nothing(terms, ask, key[2], fn, given)) and (
                ask.follows(given, key[1]) or nothing(terms, ask, key[3], fn, given)
            )
        case "mul" if fn == "add":
            return any(nothing(terms, ask, x, fn, given) for x, _ in key[1]) and all(
                known(terms, ask, x, given) for x, _ in key[1]
            )
        case _:
            return False


def known(terms: Terms, ask: Conditions, t: int, given: int) -> bool:
    """Whether a value is a number wherever a condition holds: no lane that a load left as it was."""
    key = terms.keys[t]
    if t == terms.unknown:
        return False
    if key[0] == "load" and key[4] == terms.unknown:
        return ask.follows(given, key[3])
    if key[0] == "where":
        return (ask.never(given, key[1]) or known(terms, ask, key[2], given)) and (
            ask.follows(given, key[1]) or known(terms, ask, key[3], given)
        )
    return all(known(terms, ask, x, given) for x in terms.parts(t))


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
