"""What a block of an operation computes at a cell, as terms over the buffers that its kernel is given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tapestry.ir.expr import Arg, Call, Expr
from tapestry.ir.graph import Block, Dim, Graph
from tapestry.ir.index import Aff, const, dim
from tapestry.ir.kernel import Box, Kernel, strides
from tapestry.ir.monoid import MONOIDS, ByPrimitive, Moments, Monoid, Product, Rebased
from tapestry.ir.recognition.state import state_box, varies
from tapestry.ir.types import FLOATS
from tapestry.tools.kernel_proofs.kernel_text import NOT_GIVEN, KernelText, block_of
from tapestry.tools.kernel_proofs.term.term_arithmetic import Kind, applied, kind_of
from tapestry.tools.kernel_proofs.term.terms import Terms, Unsupported
from tapestry.verify.interp import Walk, guards


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
        flat = _flat(index, box)
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
        at = _flat([terms.placed(e, env) for e in r.index], box)
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


def _flat(index: Sequence[Aff], box: Box) -> Aff:
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
