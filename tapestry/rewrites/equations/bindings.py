"""What the names of a left-hand side stand for in a match."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tapestry.ir.expr import Expr
from tapestry.ir.graph import Block, Dim, Inner, Read
from tapestry.ir.index import Aff, const, dim, floordiv, modulo
from tapestry.rewrites.equations.pattern import Node, Num, Var

HOLE = -1  # the number of the state that stands in an open body where its closed argument was


@dataclass(frozen=True, slots=True)
class Body:
    """What an open body stands for.

    Attributes:
        op: position in the pattern of the operation that it was found in; ``Arg`` is a read of that operation.
        variants: the expressions; more than one list where the operation is read through several projections.
        params: its parameters as written.
        inner: inner reductions that are part of it.
    """

    op: int
    variants: tuple[tuple[Expr, ...], ...]
    params: tuple[Node, ...]
    inner: tuple[Inner, ...] = ()


@dataclass(slots=True)
class Bindings:
    """What the names of a left-hand side stand for.

    Attributes:
        ops: by position in the pattern.
        sizes: a tuple, of one size for a plain name.
        ranges: all dimensions of the index space of the match.
        places: position of an operation in the pattern, and alias → positions of its reads.
        variant: of a tensor that is read through several projections: which of them a read has.
    """

    ops: dict[int, Block] = field(default_factory=dict[int, Block])
    tensors: dict[str, str] = field(default_factory=dict[str, str])
    dims: dict[str, tuple[Dim, ...]] = field(default_factory=dict[str, tuple[Dim, ...]])
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    dtypes: dict[str, str] = field(default_factory=dict[str, str])
    monoids: dict[str, str | None] = field(default_factory=dict[str, str | None])
    views: dict[str, tuple[Read, ...]] = field(default_factory=dict[str, tuple[Read, ...]])
    maps: dict[str, tuple[Aff, ...]] = field(default_factory=dict[str, tuple[Aff, ...]])
    bodies: dict[str, Body] = field(default_factory=dict[str, Body])
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    ranges: dict[str, int] = field(default_factory=dict[str, int])
    places: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict[tuple[int, str], tuple[int, ...]])
    variant: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])

    def copy(self) -> Bindings:
        """A match that may be extended without touching this one."""
        return Bindings(**{f: getattr(self, f).copy() for f in self.__slots__})

    @property
    def root(self) -> Block:
        """The last operation of the left-hand side."""
        return self.ops[max(self.ops)]


def place(n: Node, m: Bindings, dims: Mapping[str, tuple[Dim, ...]] | None = None) -> Aff:
    """An index term as an expression over the dimensions of a match."""
    if isinstance(n, Num):
        return const(int(n.value))
    if isinstance(n, Var):
        bound = (dims or {}).get(n.name) or m.dims.get(n.name)
        return dim(bound[0].name) if bound else const(number_of(n.name, m))
    a, b = (place(x, m, dims) for x in n.args)
    if n.fn in ("add", "sub"):
        return a + b if n.fn == "add" else a - b
    if n.fn == "mul":
        return b * a.const if not a.terms else a * b.const
    ranges = m.ranges | {d.name: d.size for ds in (dims or {}).values() for d in ds}
    return (floordiv if n.fn == "floordiv" else modulo)(a, b.const, ranges)


def number_of(name: str, m: Bindings) -> int:
    """The number that a parameter or a size of one dimension stands for."""
    if name in m.numbers:
        return m.numbers[name]
    total = 1
    for n in m.sizes[name]:
        total *= n
    return total
