"""What rewrite rules share: views, replacing dimensions, merging reads, and fresh names.

Rules are derived from projections, so most of them need the same steps: find a Block, replace some of its dimensions by
expressions over others, renumber reads, and give the pieces names that nobody has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any, TypeGuard

import numpy as np

from tapestry.errors import TapestryError
from tapestry.ir import space
from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, Let, arg_positions, call, depth, leaves, rewrite
from tapestry.ir.graph import Block, Dim, Graph, Guard, Inner, Op, Read, Split, map_exprs
from tapestry.ir.index import Aff, Ranges, atoms, const, dim, dims_of, span, substitute
from tapestry.ir.kernel import Box
from tapestry.ir.monoid import MONOIDS, number
from tapestry.ir.recognise import dims_read, folded_roles, kept, products
from tapestry.ir.types import FLOATS, Tensor, numpy_dtype
from tapestry.rewrites.core.rule import Move, Refusal, refuse

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


def accept(refusal: Refusal | None, move: Move) -> None:
    """Raise a refusal as the error of a move; nothing when there is none.

    Raises:
        TapestryError: with the refusal's reason and witness.
    """
    if refusal:
        raise TapestryError(refusal.reason, where=str(move), why=refusal.witness)


def unused(base: str, taken: Container[str]) -> str:
    """A name that is not taken yet: ``base``, or ``base`` with underscores."""
    while base in taken:
        base += "_"
    return base


def fresh(graph: Graph, base: str) -> str:
    """A tensor name that the graph does not have: ``base``, or ``base`` with underscores."""
    return unused(base, graph.tensors)


def fresh_dims(dims: Iterable[Dim], space: Iterable[Dim]) -> dict[str, Dim]:
    """Dimensions under names that neither ``space`` has nor each other, by the names that they have now."""
    taken, out = {d.name for d in space}, dict[str, Dim]()
    for d in dims:
        out[d.name] = Dim(unused(d.name, taken), d.size)
        taken.add(out[d.name].name)
    return out


def fresh_dim(op: Op, base: str) -> str:
    """A dimension name that the operation does not have: ``base``, or ``base`` with a number."""
    names, n, out = {d.name for d in op.space}, 0, base
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
    ranges = {d.name: d.size for d in (*space, *op.inner_dims)}
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


def points(dims: Iterable[Dim]) -> int:
    """Number of points of some dimensions."""
    return prod(d.size for d in dims)


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


def plain_index(dims: tuple[Dim, ...]) -> tuple[Aff, ...]:
    """The projection that names every dimension once, in order."""
    return tuple(dim(d.name) for d in dims)


def splits_in(op: Op, dims: tuple[Dim, ...]) -> tuple[Split, ...]:
    """The operation's splits of those dimensions."""
    names = {d.name for d in dims}
    return tuple(s for s in op.splits if s.dim in names)


def single_consumer(graph: Graph, tensor: str) -> int | None:
    """Position of the only operation that reads a tensor; ``None`` when there are others or it is an output."""
    readers = [i for i, op in enumerate(graph.ops) if tensor in op.inputs]
    return readers[0] if len(readers) == 1 and tensor not in graph.outputs else None


def results(*ops: Block) -> tuple[Tensor, ...]:
    """The tensors that operations write, by their dimensions and expressions."""
    return tuple(
        Tensor(name=t, dtype=e.dtype, shape=tuple(d.size for d in op.dims))
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


# The value of an expression whose leaves are numbers: by what rules decide what padding or an empty row gives.
#
# The verifier, which judges the rules, evaluates expressions by other code (`verify.interp`).


Number = np.ndarray[Any, Any]


def _sigmoid(x: Number) -> Number:
    return 1 / (1 + np.exp(-x))


def _erf(x: Number) -> Number:
    return np.asarray(math.erf(x))


def _truncated(a: Number, b: Number) -> Number:
    low = a // b
    return low + ((np.fmod(a, b) != 0) & ((a < 0) != (b < 0)))


_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "neg": np.negative,
    "abs": np.abs, "sign": np.sign, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "where": np.where, "mod": np.mod, "fmod": np.fmod,
}  # fmt: skip
_OF_FLOATS: dict[str, Callable[..., Any]] = {
    "div": np.divide, "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "log1p": np.log1p, "expm1": np.expm1, "floor": np.floor,
    "ceil": np.ceil, "round": np.rint, "sigmoid": _sigmoid, "pow": np.power, "isnan": np.isnan, "isinf": np.isinf,
    "erf": _erf,
}  # fmt: skip
_OF_INTEGERS: dict[str, Callable[..., Any]] = {"div": _truncated}
_OF_TRUTHS: dict[str, Callable[..., Any]] = {"and": np.logical_and, "or": np.logical_or, "not": np.logical_not}


def constant(e: Expr, args: Sequence[float | int | bool] = ()) -> float | int | bool | None:
    """The value of an expression over literals, ``Arg(k)`` being ``args[k]``; ``None`` where a part of it has none here."""
    with np.errstate(all="ignore"):
        out = _value(e, args)
    return None if out is None else out.item()


def _value(e: Expr, args: Sequence[float | int | bool]) -> Number | None:
    if isinstance(e, Const):
        return np.asarray(e.value, numpy_dtype(e.dtype))
    if isinstance(e, Arg):
        return np.asarray(args[e.pos], numpy_dtype(e.dtype)) if e.pos < len(args) else None
    if not isinstance(e, Call):
        return None
    operands = [x for a in e.args if (x := _value(a, args)) is not None]
    if len(operands) < len(e.args):
        return None
    dtype = e.args[-1].dtype
    if e.fn == "cast":
        defined = e.dtype in FLOATS or dtype not in FLOATS or float(operands[0]).is_integer()
        return np.asarray(operands[0], numpy_dtype(e.dtype)) if defined else None
    table = _OF_FLOATS if dtype in FLOATS else _OF_TRUTHS if dtype == "bool" else _OF_INTEGERS
    of = _OF_NUMBERS.get(e.fn) or table.get(e.fn)
    return None if of is None else np.asarray(of(*operands), numpy_dtype(e.dtype))


# The one question of fusion: is what a reader's tile needs inside what the same tile of the producer computes?
#
# A tile is what one program of a kernel computes: some points of the map dimensions, with all of the reduced ones. Over all
# tiles together the reader asks for every cell so many times; one time means that nothing is computed twice, however the
# projection looks (a transpose, a slice, a group of heads). More is the recomputation that fusing costs. The cells that a tile
# needs come from isl, factor by factor (`space.independent`), since a footprint is the product of those.


ROWS = COLUMNS = 128  # of the tile of a contraction, and the queries that a program of attention holds
POINTS = 1024  # of the tile of a map
MOST_TILES = 16  # along the dimensions of one factor: of more, the largest of some is taken for all

Tile = Mapping[str, int]


def tile_of(op: Block) -> dict[str, int]:
    """Points of one program's tile along each dimension; reduced dimensions are whole, programs walk along them.

    Contractions have rows (dimensions of the first factor alone) and columns (of the second), attention the rows of its
    scores and all columns of its values, rows of a norm or softmax are whole, maps are cut in row-major order. A product that
    is reduced has the tiles of the product, and goes through all of the reduced dimensions.
    """
    tile = {d.name: d.size for d in (*op.reduce, *op.inner_dims)}
    rows, columns = _roles(op)
    bounded = products(op) or folded_roles(op)
    for group, most in ((rows, ROWS), (columns, COLUMNS if bounded else prod(d.size for d in columns))):
        for d in reversed(group):
            tile[d.name] = max(1, min(d.size, most))
            most //= tile[d.name]
    if (row := kept(op.monoid, op.dims, op.reduce, op.body)) is not None:
        tile[row.column.name] = row.column.size
    rest = [d for d in op.dims if d.name not in tile]
    most = 1 if op.monoid else POINTS
    for d in reversed(rest):
        tile[d.name] = max(1, min(d.size, most))
        most //= tile[d.name]
    return tile


def _roles(op: Block) -> tuple[Sequence[Dim], Sequence[Dim]]:
    """(rows, columns) of a reduction's map dimensions; both empty for a map."""
    if (found := folded_roles(op)) is not None:
        return found.rows, () if found.folds else found.columns
    if pairs := products(op):
        left, right = (dims_read(op, e) for e in pairs[0])
        return [d for d in op.dims if d.name in left - right], [d for d in op.dims if d.name in right - left]
    if not op.monoid:
        return (), ()
    first = dims_read(op, op.body[0])
    keyed = frozenset[str]().union(*(dims_read(op, e) for e in op.body[1:])) if op.inner else frozenset[str]()
    rows = [d for d in op.dims if d.name in first - keyed] if op.inner else ()
    return rows[-1:], [d for d in op.dims if d.name not in first]


def tiles(op: Block, tile: Tile) -> int:
    """Number of programs."""
    return prod(-(-d.size // max(1, tile[d.name])) for d in op.space)


def loaded(op: Block, read: Read, shape: tuple[int, ...], tile: Tile) -> int:
    """Cells that a read touches, counted once for every tile that touches them."""
    total, seen = 1, set[str]()
    for f in space.independent(op, read, shape):
        dims = [op.space[i] for i in f.dims]
        seen |= {d.name for d in dims}
        total *= _cells_over_tiles(f, tuple(d.size for d in dims), tuple(tile[d.name] for d in dims))
    return total * prod(-(-d.size // max(1, tile[d.name])) for d in op.space if d.name not in seen)


@lru_cache(maxsize=1 << 14)
def _cells_over_tiles(factor: space.Factor, sizes: tuple[int, ...], each: tuple[int, ...]) -> int:
    """Cells along the factor's axes over all tiles of its dimensions."""
    counts = [-(-n // max(1, t)) for n, t in zip(sizes, each, strict=True)]
    some = [range(c) if prod(counts) <= MOST_TILES else sorted({0, c // 2, c - 1}) for c in counts]
    found: list[int] = []
    for ids in itertools.product(*some):
        box: Box = tuple((k * t, min(n, (k + 1) * t)) for k, t, n in zip(ids, each, sizes, strict=True))
        image = factor.image(box)
        found.append(0 if image is None else prod(hi - lo for lo, hi in image))
    return sum(found) if len(found) == prod(counts) else max(found) * prod(counts)


def recomputed(op: Block, reads: Sequence[Read], shape: tuple[int, ...], tile: Tile | None = None) -> Fraction:
    """How often a cell is asked for, over all tiles and projections of the reader; 1 where fusing computes nothing twice."""
    tile = tile or tile_of(op)
    return Fraction(sum(loaded(op, r, shape, tile) for r in reads), max(1, prod(shape)))


def implied(op: Block, known: Sequence[Guard], wanted: Guard) -> bool:
    """Whether a condition holds wherever others do, at all points of the index space (asked of isl)."""
    if wanted.op == "ge":
        fails = [Guard(wanted.aff * -1 - 1, "ge")]
    else:
        fails = [Guard(wanted.aff - 1, "ge"), Guard(wanted.aff * -1 - 1, "ge")]
    box: Box = tuple((0, d.size) for d in op.space)
    return all(space.access(op, Read(tensor="", index=(), when=(*known, f), other=0), ()).image(box) is None for f in fails)


def evaluated(op: Block, e: Expr, tile: Tile) -> int:
    """Points at which the programs together compute an expression: once per tile along what it does not vary along."""
    inside = dims_read(op, e)
    return tiles(op, tile) * prod(tile[d.name] for d in op.space if d.name in inside)


# Replace a read by what computes it: the step that every fusion is made of.
#
# `inline` puts a producer into an operation that reads it. `nest` turns a reduction into a map that computes the reduction
# whole at each of its points, so that `inline` can put it into another reduction. Whether that is legal, and whether it pays,
# is for the rules to say; here is only how it is done.


def inline(reader: Block, k: int, producer: Block, tensors: Mapping[str, Tensor]) -> Block:
    """The reader with read number ``k`` computed in place by the producer's body.

    Dimensions of the producer become the index expressions of the read, so that projections compose. Equal reads go with
    it; a tensor that is read through other projections too takes a call for each. The result has equal reads merged, unused
    ones dropped, and the ONNX nodes of both as its source.

    - The producer is a map: its body takes the place of the read, and its inner reductions (see `nest`) become the reader's.
      A read with a value of its own outside the producer's cells keeps that value: ``where(inside, body, other)``, unless the
      reader looks at it inside alone. The producer's reads are guarded as the read was.
    - The producer is a reduction: the reader must be a map. It becomes the reduction, over dimensions with fresh names,
      and what it did becomes ``then``. It reads results of the producer at one row (``k``'s) alone, and never outside.

    Args:
        tensors: of the graph; needed are those that the producer reads.
    """
    read, reduces = reader.reads[k], producer.monoid is not None
    assert not reduces or (reader.monoid is None and read.other is None)
    own = fresh_dims((*producer.reduce, *producer.inner_dims), reader.space)
    ranges = reader.ranges | {d.name: d.size for d in own.values()}
    env = dict(zip((d.name for d in producer.dims), read.index, strict=True)) | {n: dim(d.name) for n, d in own.items()}
    inside = _inside(read, producer, reader.ranges)
    theirs = [_guarded(substitute_read(r, env, ranges), inside, ranges, tensors) for r in producer.reads]
    # the reads of a reduction come first, as its body does
    here, there = (len(theirs), 0) if reduces else (0, len(reader.reads))

    def moved(e: Expr) -> Expr:
        return substitute_expr(e, env, ranges, lambda x: _shifted(x, there, len(reader.inner)))

    results = {t: moved(e) for t, e in zip(producer.outs, producer.then if reduces else producer.body, strict=True)}
    at = {j: r for j, r in enumerate(reader.reads) if r.tensor in results and (reduces or _alike(r, read))}
    if inside and read.other is not None and not _only_inside(reader, at, inside):
        test, other = _test(inside), read.other
        results = {t: call("where", test, e, number(other, e.dtype)) for t, e in results.items()}
    values = {j: results[r.tensor] for j, r in at.items()}

    def put(x: Expr) -> Expr:
        return values[x.pos] if isinstance(x, Arg) and x.pos in values else _shifted(x, here, 0)

    new = map_exprs(reader, lambda e: rewrite(e, put))
    if reduces:
        reduce = tuple(own[d.name] for d in producer.reduce)
        new = replace(new, reduce=reduce, monoid=producer.monoid, body=tuple(map(moved, producer.body)), then=new.body)
    inner = tuple(Inner(dims=tuple(own[d.name] for d in s.dims), monoid=s.monoid, body=moved(s.body)) for s in producer.inner)
    reads = (*theirs, *reader.reads) if reduces else (*reader.reads, *theirs)
    source = tuple(dict.fromkeys(producer.source + reader.source))
    return merge_reads(replace(new, inner=new.inner + inner, reads=reads, source=source))


def nest(op: Block) -> Block:
    """A reduction of one field as a map that computes it whole at each of its points, as an inner reduction.

    That is no operation of a graph: `inline` puts it into a reduction, which then has the inner reduction.
    """
    assert op.monoid and len(op.body) == 1 and not op.inner
    body = tuple(rewrite(e, lambda x: Let(0, x.dtype) if isinstance(x, Acc) else x) for e in op.then)
    inner = Inner(dims=op.reduce, monoid=op.monoid, body=op.body[0])
    return replace(op, reduce=(), monoid=None, inner=(inner,), body=body, then=())


def limits(index: Iterable[Aff], shape: Sequence[int], ranges: Ranges) -> list[Guard]:
    """The conditions under which an index is inside a tensor, without those that always hold."""
    out: list[Guard] = []
    for e, n in zip(index, shape, strict=True):
        lo, hi = span(e, ranges)
        out += [Guard(e, "ge")] if lo < 0 else []
        out += [Guard(const(n - 1) - e, "ge")] if hi >= n else []
    return out


def _alike(a: Read, b: Read) -> bool:
    """Whether two reads are of one place (by text, which tells 0.0 from -0.0)."""
    return repr(replace(a, tensor=b.tensor)) == repr(b)


def _shifted(x: Expr, reads: int, lets: int) -> Expr:
    if isinstance(x, Arg):
        return replace(x, pos=x.pos + reads)
    return replace(x, pos=x.pos + lets) if isinstance(x, Let) else x


def _inside(read: Read, producer: Block, ranges: Ranges) -> list[Guard]:
    """When a read with a value of its own is of one of the producer's cells; nothing for one that always is."""
    if read.other is None:
        return []
    return list(dict.fromkeys([*limits(read.index, [d.size for d in producer.dims], ranges), *read.when]))


def _guarded(read: Read, inside: list[Guard], ranges: Ranges, tensors: Mapping[str, Tensor]) -> Read:
    """A read of the producer, safe where the reader looks outside the producer's cells; whatever it gives there."""
    if not inside:
        return read
    tensor = tensors[read.tensor]
    if not limits(read.index, tensor.shape, ranges):
        return read
    other = number(0, tensor.dtype).value if read.other is None else read.other
    return replace(read, when=tuple(dict.fromkeys([*read.when, *inside])), other=other)


def _test(inside: list[Guard]) -> Expr:
    tests = [call("ge" if g.op == "ge" else "eq", Index(g.aff), Const(0, "i64")) for g in inside]
    out: Expr = tests[0]
    for t in tests[1:]:
        out = call("and", out, t)
    return out


def _only_inside(reader: Block, at: Mapping[int, Read], inside: list[Guard]) -> bool:
    """Whether the value of some reads is used inside alone: under choices that imply it (asked of isl)."""

    def safe(e: Expr, given: tuple[Guard, ...]) -> bool:
        if isinstance(e, Arg):
            return e.pos not in at or all(implied(reader, given, g) for g in inside)
        if not isinstance(e, Call):
            return True
        if e.fn == "where":
            yes, no = _conditions(e.args[0])
            return safe(e.args[0], given) and safe(e.args[1], (*given, *yes)) and safe(e.args[2], (*given, *no))
        return all(safe(a, given) for a in e.args)

    return all(safe(e, ()) for e in (*reader.point, *reader.then))


def _conditions(test: Expr) -> tuple[tuple[Guard, ...], tuple[Guard, ...]]:
    """What holds where a comparison of an index with a number does, and where it does not."""
    if not isinstance(test, Call) or len(test.args) != 2:
        return (), ()
    left, right = test.args
    if test.fn == "and":
        return _conditions(left)[0] + _conditions(right)[0], ()
    if not isinstance(left, Index) or not isinstance(right, Const):
        return (), ()
    more, less = left.aff - int(right.value), const(int(right.value)) - left.aff
    holds = {"lt": less - 1, "le": less, "gt": more - 1, "ge": more}.get(test.fn)
    if holds is None:
        return ((Guard(more, "eq"),), ()) if test.fn == "eq" else ((), ())
    return (Guard(holds, "ge"),), (Guard(const(-1) - holds, "ge"),)
