"""What a loop's body does to a state: ``h' = a * h + b``, element by element, with ``a`` and ``b`` free of ``h``; or why not.

The next state is followed back through the maps that made it, at symbolic coordinates. Along the way every value is kept as a
coefficient and a constant term, and only what is linear on the expression itself is taken: sums, products and quotients with
factors free of the state, choices on conditions free of it. Nothing is known about operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tapestry.ir.expr import Arg, Call, Const, Expr, Index, call, number
from tapestry.ir.graph import Block, Dim, Op, Read, placed, ranges_of
from tapestry.ir.index import Aff, bounds, dim, substitute
from tapestry.ir.types import FLOATS, Tensor
from tapestry.lift.builder import axes

MOST = 512  # calls in the expressions of one state


class NotLinear(Exception):
    """Why a state is not a linear recurrence."""


@dataclass(frozen=True, slots=True)
class Linear:
    """``scale * h + shift``; ``None`` where a term is absent."""

    scale: Expr | None
    shift: Expr | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The next state over the state's dimensions ``dims``; expressions are over ``reads``, none of which is of the state."""

    dims: tuple[Dim, ...]
    reads: tuple[Read, ...]
    scale: Expr | None
    shift: Expr | None

    @property
    def unchanged(self) -> bool:
        """Whether the state keeps its first value."""
        return self.shift is None and isinstance(self.scale, Const) and self.scale.value == 1


def recurrence(
    state: str, after: str, makers: Mapping[str, Op], tensors: Mapping[str, Tensor], depends: frozenset[str]
) -> Recurrence:
    """How a state's next value comes from it.

    Args:
        state, after: the state's tensor in a step, and the one that is its next value, of the same shape and dtype.
        makers: tensor to the operation that writes it, in one step.
        depends: tensors that are computed from the state.

    Raises:
        NotLinear: not ``a * h + b``, or not element by element.
    """
    walk = _Walk(state, makers, tensors, depends, axes(tensors[state].shape, "s"))
    step = walk.tensor(after, tuple(dim(d.name) for d in walk.dims))
    return Recurrence(dims=walk.dims, reads=tuple(walk.reads), scale=step.scale, shift=step.shift)


@dataclass(slots=True)
class _Walk:
    state: str
    makers: Mapping[str, Op]
    tensors: Mapping[str, Tensor]
    depends: frozenset[str]
    dims: tuple[Dim, ...]
    reads: list[Read] = field(default_factory=list[Read])
    calls: int = 0

    def tensor(self, name: str, at: tuple[Aff, ...]) -> Linear:
        """A tensor's value at a place."""
        if name == self.state:
            if not all(e == dim(d.name) or d.size == 1 for e, d in zip(at, self.dims, strict=True)):
                raise NotLinear("an element of it depends on another one")
            return Linear(number(1, self.tensors[name].dtype), None)
        if name not in self.depends:
            return Linear(None, self.free(Read(tensor=name, index=at)))
        op = self.makers[name]
        if not isinstance(op, Block):
            raise NotLinear(f"{op.kind} is applied to it")
        if op.monoid or op.inner:
            raise NotLinear("an element of it depends on several ones")
        env = placed(op.dims, at)
        return self.expr(op.body[op.outs.index(name)], op, env)

    def free(self, read: Read) -> Expr:
        """A read of what the state has no part in."""
        if read not in self.reads:
            self.reads.append(read)
        return Arg(self.reads.index(read), self.tensors[read.tensor].dtype)

    def expr(self, e: Expr, op: Block, env: Mapping[str, Aff]) -> Linear:
        ranges = ranges_of(self.dims)
        if isinstance(e, Const):
            return Linear(None, e)
        if isinstance(e, Index):
            return Linear(None, replace(e, aff=substitute(e.aff, env, ranges)))
        if isinstance(e, Arg):
            return self.read(op.reads[e.pos], env, ranges)
        assert isinstance(e, Call)
        self.calls += 1
        if self.calls > MOST:
            raise NotLinear("its expression is too long")
        args = [self.expr(a, op, env) for a in e.args]
        if all(a.scale is None for a in args):
            return Linear(None, Call(e.fn, tuple(_shift(a) for a in args), e.dtype))
        return _combine(e.fn, args)

    def read(self, r: Read, env: Mapping[str, Aff], ranges: dict[str, int]) -> Linear:
        at = tuple(substitute(e, env, ranges) for e in r.index)
        if r.tensor not in self.depends and r.tensor != self.state:
            when = tuple(replace(g, aff=substitute(g.aff, env, ranges)) for g in r.when)
            return Linear(None, self.free(replace(r, index=at, when=when)))
        if r.other is not None and not (not r.when and self._inside(r.tensor, at)):
            raise NotLinear("it is read beyond its ends, or under conditions")
        return self.tensor(r.tensor, at)

    def _inside(self, name: str, at: tuple[Aff, ...]) -> bool:
        box = {d.name: (0, d.size - 1) for d in self.dims}
        spans = (bounds(e, box) for e in at)
        return all(lo >= 0 and hi < n for (lo, hi), n in zip(spans, self.tensors[name].shape, strict=True))


def _shift(x: Linear) -> Expr:
    assert x.shift is not None
    return x.shift


def _combine(fn: str, args: list[Linear]) -> Linear:
    """A primitive of which at least one argument has the state in it."""
    if fn == "neg":
        return _each(lambda x: -x, args[0])
    if fn in ("add", "sub"):
        a, b = args
        return Linear(_sum(fn, a.scale, b.scale), _sum(fn, a.shift, b.shift))
    if fn in ("mul", "div"):
        a, b = args
        if b.scale is None:
            by = _shift(b)
            if fn == "div" and by.dtype not in FLOATS:
                raise NotLinear("a quotient of integers is rounded")
            return _each(lambda x: _times(fn, x, by), a)
        if fn == "mul" and a.scale is None:
            by = _shift(a)
            return _each(lambda x: _times(fn, x, by), b)
        raise NotLinear("it is multiplied by itself" if fn == "mul" else "something is divided by it")
    if fn == "where" and args[0].scale is None:
        test = _shift(args[0])
        return Linear(_choice(test, args[1].scale, args[2].scale), _choice(test, args[1].shift, args[2].shift))
    raise NotLinear("it decides which value is taken" if fn == "where" else f"'{fn}' of it is not linear in it")


def _each(put: Callable[[Expr], Expr], x: Linear) -> Linear:
    return Linear(None if x.scale is None else put(x.scale), None if x.shift is None else put(x.shift))


def _times(fn: str, x: Expr, by: Expr) -> Expr:
    return by if fn == "mul" and isinstance(x, Const) and x.value == 1 else call(fn, x, by)


def _sum(fn: str, a: Expr | None, b: Expr | None) -> Expr | None:
    if a is None or b is None:
        return a if b is None else b if fn == "add" else -b
    return call(fn, a, b)


def _choice(test: Expr, a: Expr | None, b: Expr | None) -> Expr | None:
    return call("where", test, a or 0, b or 0) if a or b else None
