"""What a block of an operation computes at a cell, as terms over the buffers that its kernel is given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, Let
from tapestry.ir.graph import Block, Dim, Graph
from tapestry.ir.index import Aff, const, dim
from tapestry.ir.kernel import Kernel
from tapestry.ir.monoid import MONOIDS, ByPrimitive, Moments, Monoid, Product, Rebased
from tapestry.ir.state import state_box, varies
from tapestry.ir.types import FLOATS
from tapestry.verify.kernels.kernel_text import NOT_GIVEN, KernelText
from tapestry.verify.kernels.term_arithmetic import Kind, applied, kind_of
from tapestry.verify.kernels.terms import Terms, Unsupported

MOST_ORDERS = 24


@dataclass(frozen=True)
class Operation:
    """A block of one operation, and where its buffers are.

    Attributes:
        order: of the reduced dimensions, as they make one number; ``inner_order`` of the inner reductions'.
    """

    terms: Terms
    graph: Graph
    kernel: Kernel
    text: KernelText
    order: tuple[int, ...] = ()

    @property
    def op(self) -> Block:
        """The operation."""
        op = self.graph.ops[self.kernel.op]
        assert isinstance(op, Block)
        return op

    def values(self, at: Sequence[Aff]) -> list[int]:
        """The value of each output (of ``partial``: of each field) at a cell, in coordinates of the whole tensor."""
        op, env = self.op, {d.name: e for d, e in zip(self.op.dims, at, strict=True)}
        if self.kernel.mode == "finish":
            states = [self._state(k, at) for k in range(len(self.text.states))]
            return [self._expr(e, env, states) for e in op.then]
        if op.monoid is None:
            return [self._expr(e, env, []) for e in op.body]
        env_in, over = self._within(op.reduce, env, len(op.dims), self.order)
        fields = [self._expr(e, env_in, self._lets(env_in)) for e in op.body]
        states = reduced(self.terms, MONOIDS[op.monoid], over, fields)
        return states if self.kernel.mode == "partial" else [self._expr(e, env, states) for e in op.then]

    def _within(
        self, dims: Sequence[Dim], env: Mapping[str, Aff], first: int, order: tuple[int, ...] = ()
    ) -> tuple[dict[str, Aff], tuple[str, int]]:  # fmt: skip
        """Reduced dimensions of the block as parts of one number, and its variable with its size."""
        box = self.kernel.block[first : first + len(dims)]
        ways, total = order or tuple(range(len(dims))), 1
        for lo, hi in box:
            total *= hi - lo
        name = self.terms.fresh()
        flat, rest, out = self.terms.variable(name, total), total, dict(env)
        for k in ways:
            lo, hi = box[k]
            rest //= max(1, hi - lo)
            out[dims[k].name] = self.terms.remainder(self.terms.divided(flat, max(rest, 1)), max(1, hi - lo)) + lo
        return out, (name, total)

    def _lets(self, env: Mapping[str, Aff]) -> list[int]:
        op, out = self.op, list[int]()
        first = len(op.dims) + len(op.reduce)
        for s in op.inner:
            env_in, over = self._within(s.dims, env, first)
            first += len(s.dims)
            body = self._expr(s.body, env_in, [])
            out.append(reduced(self.terms, MONOIDS[s.monoid], over, [body])[0])
        return out

    def _state(self, k: int, at: Sequence[Aff]) -> int:
        box, name = state_box(self.op, k, self.kernel.outs[0]), self.text.states[k]
        buffer = self.text.buffers[name]
        flat = _flat([e if own else const(0) for e, own in zip(at, varies(self.op)[k], strict=True)], box, buffer.steps(box))
        kind = kind_of(buffer.dtype).kind
        return self.terms.load(name, kind, flat, self.terms.true, self.terms.unknown)

    def _expr(self, e: Expr, env: Mapping[str, Aff], states: Sequence[int], known: dict[int, int] | None = None) -> int:
        known = {} if known is None else known
        if id(e) not in known:
            known[id(e)] = self._fresh(e, env, states, known)
        return known[id(e)]

    def _fresh(self, e: Expr, env: Mapping[str, Aff], states: Sequence[int], known: dict[int, int]) -> int:
        match e:
            case Arg(pos):
                return self._read(pos, env)
            case Acc(k) | Let(k):
                return states[k]
            case Const(value, dtype):
                return constant(self.terms, value, dtype)
            case Index(aff, dtype):
                made = self.terms.int(self.terms.placed(aff, env))
                return applied(self.terms, "cast", (made,), kind_of(dtype))
            case Call(fn, args, dtype):
                return applied(self.terms, fn, [self._expr(a, env, states, known) for a in args], kind_of(dtype))

    def _read(self, pos: int, env: Mapping[str, Aff]) -> int:
        r, terms = self.op.reads[pos], self.terms
        t, box = self.graph.tensors[r.tensor], self.kernel.ins[pos]
        index = [terms.placed(e, env) for e in r.index]
        inside = list[int]()
        if r.other is not None:
            inside += [terms.at_least(e) for e in index]
            inside += [terms.at_least(e * -1 + (n - 1)) for e, n in zip(index, t.shape, strict=True)]
        for g in r.when:
            aff = terms.placed(g.aff, env)
            inside.append(terms.at_least(aff) if g.op == "ge" else terms.is_zero(aff))
        other = terms.unknown if r.other is None else constant(terms, r.other, t.dtype)
        if box is None or pos not in self.text.reads:  # nothing of it is for this block, or so the kernel says
            return terms.load(f"{NOT_GIVEN} {pos}", kind_of(t.dtype).kind, const(0), terms.all(inside), other)
        name = self.text.reads[pos]
        at = _flat(index, box, self.text.buffers[name].steps(box))
        return terms.load(name, kind_of(t.dtype).kind, at, terms.all(inside), other)


def orders(kernel: Kernel, op: Block) -> Iterator[tuple[int, ...]]:
    """Orders in which the reduced dimensions may be one number: as they stand, and others."""
    box = kernel.block[len(op.dims) : len(op.dims) + len(op.reduce)]
    long = [k for k, (lo, hi) in enumerate(box) if hi - lo > 1]
    short = tuple(k for k in range(len(box)) if k not in long)
    if len(long) <= 4:
        yield from ((*p, *short) for p in itertools.permutations(long))
    else:
        yield tuple(range(len(box)))


def _flat(index: Sequence[Aff], box: Sequence[tuple[int, int]], steps: Sequence[int]) -> Aff:
    out = const(0)
    for e, (lo, _), s in zip(index, box, steps, strict=True):
        out = out + (e - lo) * s
    return out


def constant(terms: Terms, value: float | int | bool, dtype: str) -> int:
    """A literal of an element type."""
    if dtype in FLOATS:
        return terms.const(float(value))
    return (terms.true if value else terms.false) if dtype == "bool" else terms.int(const(int(value)))


def reduced(terms: Terms, monoid: Monoid, over: tuple[str, int], fields: Sequence[int]) -> list[int]:
    """The state of a reduction in closed form: what the laws of the monoid (`ir.monoid_action`) make of its merges."""
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
