"""One walk over a block at a point, whatever stands for the point and for values: arrays of numbers, or terms.

`interp` walks with arrays of places, `rewriting.normal_form` and the proofs of kernels with index expressions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, Let
from tapestry.ir.graph import Block, Dim, Guard, Inner, Read
from tapestry.ir.index import Aff

P = TypeVar("P")
V = TypeVar("V")


class Walk(ABC, Generic[P, V]):
    """Values ``V`` of blocks at places ``P`` of their dimensions, by name."""

    @abstractmethod
    def const(self, value: float | int | bool, dtype: str) -> V:
        """A literal."""

    @abstractmethod
    def index(self, aff: Aff, env: Mapping[str, P], dtype: str) -> V:
        """An index expression as a value."""

    @abstractmethod
    def call(self, e: Call, args: list[V]) -> V:
        """A primitive."""

    @abstractmethod
    def read(self, op: Block, pos: int, env: Mapping[str, P]) -> V:
        """The cell that a read looks at."""

    @abstractmethod
    def bound(self, op: Block, dims: Sequence[Dim], env: Mapping[str, P]) -> tuple[dict[str, P], Any]:
        """Places with those of reduced dimensions, and what `reduced` needs to know of these."""

    @abstractmethod
    def reduced(self, monoid: str, over: Any, fields: list[V], kinds: tuple[str, ...]) -> list[V]:
        """The state of a reduction."""

    def values(self, op: Block, env: Mapping[str, P], which: Sequence[int] | None = None) -> list[V]:
        """What a block computes, or some of it."""
        exprs, states = op.then if op.monoid else op.body, self.states(op, env) if op.monoid else ()
        return self.exprs(op, exprs if which is None else [exprs[k] for k in which], env, states)

    def states(self, op: Block, env: Mapping[str, P]) -> list[V]:
        """The reduced state of a block."""
        within, over = self.bound(op, op.reduce, env)
        return self.reduced(str(op.monoid), over, self.lifted(op, within), tuple(e.dtype for e in op.body))

    def lifted(self, op: Block, within: Mapping[str, P]) -> list[V]:
        """The state that one step of a reduction brings."""
        return self.exprs(op, op.body, within, [self._inner(op, s, within) for s in op.inner])

    def _inner(self, op: Block, s: Inner, env: Mapping[str, P]) -> V:
        within, over = self.bound(op, s.dims, env)
        return self.reduced(s.monoid, over, self.exprs(op, (s.body,), within, ()), (s.body.dtype,))[0]

    def exprs(self, op: Block, exprs: Sequence[Expr], env: Mapping[str, P], states: Sequence[V]) -> list[V]:
        """Expressions of a block; ``states`` has the reduced fields in ``then``, the inner values in a body."""
        known: dict[object, V] = {}
        return [self.expr(e, lambda pos: self.read(op, pos, env), env, states, known) for e in exprs]

    def expr(
        self, e: Expr, read: Callable[[int], V], env: Mapping[str, P], states: Sequence[V], known: dict[object, V]
    ) -> V:  # fmt: skip
        """One expression; ``known`` has the parts that are already computed."""
        key = e if isinstance(e, Arg) else id(e)
        if key not in known:
            match e:
                case Arg(pos):
                    known[key] = read(pos)
                case Acc(k) | Let(k):
                    known[key] = states[k]
                case Const(value, dtype):
                    known[key] = self.const(value, dtype)
                case Index(aff, dtype):
                    known[key] = self.index(aff, env, dtype)
                case Call():
                    known[key] = self.call(e, [self.expr(a, read, env, states, known) for a in e.args])
        return known[key]


def guards(r: Read, shape: Sequence[int]) -> list[Guard]:
    """What holds where a read finds a cell: its guards, and that it is inside the tensor if it may leave that."""
    inside = list[Guard]()
    for e, n in zip(r.index, shape, strict=True) if r.other is not None else ():
        inside += [Guard(e, "ge"), Guard(e * -1 + (n - 1), "ge")]
    return [*inside, *r.when]
