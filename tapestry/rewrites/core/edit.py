"""What rewrite rules share: views, replacing dimensions, merging reads, and fresh names.

Rules are derived from projections, so most of them need the same steps: find a Block, replace some of its dimensions by
expressions over others, renumber reads, and give the pieces names that nobody has.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard, TypeVar

from tapestry.errors import TapestryError
from tapestry.ir.expr import Acc, Arg, Call, Expr, Index, arg_positions, depth, leaves, rewrite
from tapestry.ir.graph import Block, Dim, Graph, Guard, Op, Read, Split, map_exprs, names_of, ranges_of, shape_of
from tapestry.ir.index import Aff, Ranges, atoms, const, dim, dims_of, substitute
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.rule import Move, Refusal, refuse

T = TypeVar("T")
Leaf = Callable[[Expr], Expr]
MOST_ATOMS = 100  # of a read's projection: a chain of reshapes and transposes doubles them with every other step
MOST_DEPTH = 100  # of an expression: whatever follows it by recursion, its text's parser first of all, goes as deep


def too_long(read: Read, *before: Read) -> bool:
    """Whether a composed projection is longer than anybody would write, and than what it is made of: isl's time and the
    text grow with it."""

    def length(r: Read) -> int:
        return sum(map(atoms, r.index)) + sum(atoms(g.aff) for g in r.when)

    return length(read) > max([MOST_ATOMS, *map(length, before)])


def too_deep(outer: Iterable[Expr], inner: Iterable[Expr]) -> bool:
    """Whether an expression put into another one may be nested too deeply."""
    return depth(outer) + depth(inner) > MOST_DEPTH


def is_view(op: Op) -> TypeGuard[Block]:
    """Whether an operation only moves cells: one read, passed on as it is."""
    if not isinstance(op, Block) or op.monoid or op.splits or len(op.outs) != 1 or len(op.reads) != 1:
        return False
    return isinstance(op.body[0], Arg)


def substitute_read(read: Read, env: Mapping[str, Aff], ranges: Ranges) -> Read:
    """A read with dimensions replaced by expressions; ``ranges`` are the dimensions afterwards."""
    return replace(
        read,
        index=tuple(substitute(e, env, ranges) for e in read.index),
        when=tuple(Guard(substitute(g.aff, env, ranges), g.op) for g in read.when),
    )


def substitute_expr(e: Expr, env: Mapping[str, Aff], ranges: Ranges, leaf: Leaf = lambda x: x) -> Expr:
    """An expression with dimensions replaced inside ``index(…)``, and every other leaf by ``leaf(it)``, which leaves
    literals alone."""

    def put(x: Expr) -> Expr:
        return replace(x, aff=substitute(x.aff, env, ranges)) if isinstance(x, Index) else leaf(x)

    return e if all(put(x) == x for x in leaves((e,))) else rewrite(e, put)


def shift_args(by: int) -> Leaf:
    """For leaves: reads moved ``by`` positions up."""
    return lambda x: replace(x, pos=x.pos + by) if isinstance(x, Arg) else x


def with_args(gone: Mapping[int, Expr], places: Mapping[int, int]) -> Leaf:
    """For leaves: reads that are gone replaced by what computes them, the others renumbered."""

    def put(x: Expr) -> Expr:
        if not isinstance(x, Arg):
            return x
        return gone[x.pos] if x.pos in gone else replace(x, pos=places[x.pos])

    return put


def merge_reads(op: Block) -> Block:
    """The operation with equal reads made one, and reads that nothing uses dropped."""
    op = prune(op)
    places: dict[str, int] = {}  # by text, which tells 0.0 from -0.0 and from False
    number = [places.setdefault(repr(r), len(places)) for r in op.reads]
    if len(places) == len(op.reads):
        return op
    kept = tuple(dict(zip(number, op.reads, strict=True)).values())
    leaf = with_args({}, dict(enumerate(number)))
    return map_exprs(replace(op, reads=kept), lambda e: rewrite(e, leaf))


def op_at(graph: Graph, move: Move) -> tuple[int, Op]:
    """Position of the operation that a move names, and the operation.

    Raises:
        TapestryError: there is none.
    """
    at = graph.find(move.at)
    if at < 0:
        raise TapestryError(f"no operation writes '{move.at}'", where=str(move))
    return at, graph.ops[at]


def block_at(graph: Graph, move: Move) -> tuple[int, Block]:
    """Like `op_at`, for moves that need a Block.

    Raises:
        TapestryError: there is no such operation, or it is opaque.
    """
    at, op = op_at(graph, move)
    if not isinstance(op, Block):
        raise TapestryError(f"'{move.at}' is opaque: {op.why}", where=str(move))
    return at, op


def accept(found: T | Refusal, move: Move) -> T:
    """What was found for a move, which a refusal is the error of.

    Raises:
        TapestryError: with the refusal's reason and witness.
    """
    if isinstance(found, Refusal):
        raise TapestryError(found.reason, where=str(move), why=found.witness)
    return found


def unused(base: str, taken: Container[str]) -> str:
    """A name that is not taken yet: ``base``, or ``base`` with underscores."""
    while base in taken:
        base += "_"
    return base


def fresh(graph: Graph, base: str) -> str:
    """A tensor name that the graph does not have: ``base``, or ``base`` with underscores."""
    return unused(base, graph.tensors)


def state_names(graph: Graph, op: Block, what: str) -> tuple[str, ...]:
    """Tensor names that the graph does not have, for the fields of an operation's state."""
    assert op.monoid
    return tuple(fresh(graph, f"{op.outs[0]}.{what}.{f}") for f in MONOIDS[op.monoid].fields)


def fresh_dims(dims: Iterable[Dim], space: Iterable[Dim]) -> dict[str, Dim]:
    """Dimensions under names that neither ``space`` has nor each other, by the names that they have now."""
    taken, out = names_of(space), dict[str, Dim]()
    for d in dims:
        out[d.name] = Dim(unused(d.name, taken), d.size)
        taken.add(out[d.name].name)
    return out


def fresh_dim(op: Op, base: str) -> str:
    """A dimension name that the operation does not have: ``base``, or ``base`` with a number."""
    names, n, out = names_of(op.space), 0, base
    while out in names:
        out, n = f"{base}{n}", n + 1
    return out


def resized(dims: tuple[Dim, ...], name: str, size: int) -> tuple[Dim, ...]:
    """The dimensions with one of them of another size."""
    return tuple(Dim(d.name, size) if d.name == name else d for d in dims)


def reindex(op: Block, env: Mapping[str, Aff], space: tuple[Dim, ...]) -> Block:
    """The operation with dimensions replaced by expressions, in reads, guards and ``index(…)``; its dims are left alone.

    Args:
        env: what replaces a dimension; those missing stay.
        space: the dimensions afterwards, with which floors and mods are simplified.
    """
    ranges = ranges_of((*space, *op.inner_dims))
    moved = replace(op, reads=tuple(substitute_read(r, env, ranges) for r in op.reads))
    return map_exprs(moved, lambda e: substitute_expr(e, env, ranges))


def over(op: Block, env: Mapping[str, Aff], other: Block) -> Block:
    """The operation over the dimensions of another one, of which its own are expressions."""
    return replace(reindex(op, env, other.space), dims=other.dims, reduce=other.reduce)


def without_units(read: Read, op: Block) -> Read:
    """A read with the dimensions of size 1 left out, so that equal places are equal."""
    return substitute_read(read, {d.name: const(0) for d in op.space if d.size == 1}, op.ranges)


def resolved(e: Expr, op: Block) -> str:
    """Text of an expression with what it reads in place of the numbers of its reads; the same text is the same value."""
    names: list[str] = []

    def leaf(x: Expr) -> Expr:
        if isinstance(x, Arg):
            names.append(repr(without_units(op.reads[x.pos], op)))
            return replace(x, pos=0)
        return x

    return f"{rewrite(e, leaf)} {names}"


def same_value(e: Expr, op: Block, f: Expr, other: Block) -> bool:
    """Whether expressions of two operations over the same dimensions have the same value, by what they read."""
    return resolved(e, op) == resolved(f, other)


def with_part(e: Expr, old: Expr, new: Expr) -> Expr:
    """An expression with another one in place of one of its parts, wherever that stands."""
    if e == old:
        return new
    return Call(e.fn, tuple(with_part(a, old, new) for a in e.args), e.dtype) if isinstance(e, Call) else e


def without_casts(e: Expr, among: Container[str]) -> Expr:
    """The expression inside casts between some types."""
    while isinstance(e, Call) and e.fn == "cast" and e.dtype in among and e.args[0].dtype in among:
        e = e.args[0]
    return e


def renamed_dims(op: Block, names: Mapping[str, str]) -> Block:
    """The operation with other names for some of its map dimensions."""
    dims = tuple(Dim(names.get(d.name, d.name), d.size) for d in op.dims)
    return replace(reindex(op, {old: dim(new) for old, new in names.items()}, (*dims, *op.reduce)), dims=dims)


def read_dims(read: Read) -> frozenset[str]:
    """Dimensions that the place or the guards of a read depend on."""
    return frozenset(n for e in (*read.index, *(g.aff for g in read.when)) for n in dims_of(e))


def prune(op: Block) -> Block:
    """The operation without the reads that nothing uses."""
    kept = sorted(arg_positions(op.point + op.then))
    if len(kept) == len(op.reads):
        return op
    leaf = with_args({}, {old: new for new, old in enumerate(kept)})
    return map_exprs(replace(op, reads=tuple(op.reads[k] for k in kept)), lambda e: rewrite(e, leaf))


def plain_index(dims: Iterable[Dim]) -> tuple[Aff, ...]:
    """The projection that names every dimension once, in order."""
    return tuple(dim(d.name) for d in dims)


def splits_in(op: Op, dims: tuple[Dim, ...]) -> tuple[Split, ...]:
    """The operation's splits of those dimensions."""
    names = names_of(dims)
    return tuple(s for s in op.splits if s.dim in names)


def single_consumer(graph: Graph, tensor: str) -> int | None:
    """Position of the only operation that reads a tensor; ``None`` when there are others or it is an output."""
    readers = [i for i, op in enumerate(graph.ops) if tensor in op.inputs]
    return readers[0] if len(readers) == 1 and tensor not in graph.outputs else None


def results(*ops: Block) -> tuple[Tensor, ...]:
    """The tensors that operations write, by their dimensions and expressions."""
    return tuple(
        Tensor(name=t, dtype=e.dtype, shape=shape_of(op.dims))
        for op in ops
        for t, e in zip(op.outs, op.then if op.monoid else op.body, strict=True)
    )


def finish(op: Block, states: Sequence[str], merged: Sequence[Expr]) -> Block:
    """What an operation does after it has reduced, as a map that reads states which others have reduced.

    Args:
        states: tensors over the operation's map dimensions; ``Arg(k)`` is the k-th.
        merged: the whole state, in terms of those.
    """
    late = sorted(op.then_reads())
    leaf = with_args({}, {old: len(states) + new for new, old in enumerate(late)})
    reads = (*(Read(tensor=t, index=plain_index(op.dims)) for t in states), *(op.reads[k] for k in late))
    then = tuple(rewrite(e, lambda x: merged[x.field] if isinstance(x, Acc) else leaf(x)) for e in op.then)
    return Block(outs=op.outs, dims=op.dims, reads=reads, body=then, source=op.source)


def cut_refusal(name: str, size: int, parts: int) -> Refusal | None:
    """Why so many points cannot be cut into so many parts; ``None`` when they can."""
    if 2 <= parts <= size:
        return None
    points = "1 point" if size == 1 else f"{size} points"
    return refuse(f"{points} of '{name}' cannot be cut into {parts} non-empty parts", f"part {min(parts - 1, size)} is empty")


def order_refusal(op: Block, name: str) -> Refusal | None:
    """Why a reduced dimension cannot be cut with the states merged part by part; ``None`` when it can."""
    if not order_matters(op, name):
        return None
    return refuse(
        f"'{op.monoid}' does not commute and '{name}' is not the first reduced dimension",
        f"points 0 and 1 of '{name}' would be merged after all of '{op.reduce[0].name}'",
    )


def order_matters(op: Block, name: str) -> bool:
    """Whether cutting a reduced dimension would merge states in another order than the monoid allows.

    States are merged in the row-major order of the reduced dimensions: cutting the first keeps that order.
    """
    return op.monoid is not None and not MONOIDS[op.monoid].commutative and op.reduce[0].name != name


def repeatable(op: Op) -> bool:
    """Whether running a node again gives the same results (an opaque random node does not)."""
    return isinstance(op, Block) or not op.kind.startswith(("Random", "Multinomial", "Bernoulli", "Dropout"))


def renamed(op: Op, rename: Mapping[str, str]) -> Op:
    """The operation reading other tensors."""
    if not rename or not any(t in rename for t in op.inputs):
        return op
    if isinstance(op, Block):
        return replace(op, reads=tuple(replace(r, tensor=rename.get(r.tensor, r.tensor)) for r in op.reads))
    return replace(op, ins=tuple(rename.get(t, t) for t in op.ins))
