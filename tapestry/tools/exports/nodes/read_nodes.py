"""A read of a tensor over a block, as nodes: Slice, Pad, Reshape and Transpose, and Gather at constant places for what is
left.

Everything is in local coordinates: dimensions of the block from 0 on, places in the buffer from 0 on. The value of a read has
an axis for each dimension of the frame, of one cell where the read does not depend on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod

import numpy as np

from tapestry.ir.graph import Guard, Read
from tapestry.ir.index import Aff, Atom, Floor, const, dim, dims_of, evaluate, span, substitute
from tapestry.ir.kernel import Box
from tapestry.tools.exports.nodes.onnx_nodes import MOST_CELLS, Nodes, NotExpressible, Value

MOST_CUTS = 4  # of a read, one inside another


@dataclass(frozen=True)
class Frame:
    """A box over named dimensions."""

    names: tuple[str, ...]
    box: Box

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Points along each dimension."""
        return tuple(hi - lo for lo, hi in self.box)

    @cached_property
    def ranges(self) -> dict[str, int]:
        """Points by name."""
        return dict(zip(self.names, self.extents, strict=True))

    @cached_property
    def local(self) -> dict[str, Aff]:
        """Each dimension by the block's own coordinates."""
        return {n: (dim(n) + lo) if hi - lo != 1 else const(lo) for n, (lo, hi) in zip(self.names, self.box, strict=True)}

    def place(self, e: Aff) -> Aff:
        """An index expression in the block's own coordinates."""
        return substitute(e, self.local, self.ranges)

    def alongside(self, used: frozenset[str]) -> tuple[int, ...]:
        """The shape of what depends on some dimensions."""
        return tuple(n if name in used else 1 for name, n in zip(self.names, self.extents, strict=True))

    def grid(self, used: frozenset[str]) -> dict[str, np.ndarray]:
        """Coordinates of each of some dimensions, shaped to broadcast over the frame."""
        rank = len(self.names)
        return {
            d: np.arange(n, dtype=np.int64).reshape([-1 if k == i else 1 for k in range(rank)])
            for i, (d, n) in enumerate(zip(self.names, self.extents, strict=True))
            if d in used
        }


NOWHERE = Frame((), ())


def read_value(nodes: Nodes, read: Read, frame: Frame, held: Box, buffer: Value, cuts: int = MOST_CUTS) -> Value:
    """The values of a read over a frame.

    Args:
        held: the box of the tensor that the buffer holds.
    """
    fill = 0 if read.other is None else read.other
    guards = [Guard(frame.place(g.aff), g.op) for g in read.when]
    spans = [span(g.aff, frame.ranges) for g in guards]
    never = any(hi < 0 if g.op == "ge" else hi < 0 or lo > 0 for g, (lo, hi) in zip(guards, spans, strict=True))
    if never or 0 in frame.extents or buffer.size == 0:
        return nodes.filled((1,) * len(frame.names) if never or buffer.size == 0 else frame.extents, fill, buffer.dtype)
    left = [g for g, (lo, hi) in zip(guards, spans, strict=True) if not (lo >= 0 if g.op == "ge" else lo == hi == 0)]
    index = [frame.place(e) - lo for e, (lo, _) in zip(read.index, held, strict=True)]
    shape = tuple(hi - lo for lo, hi in held)
    value = _strided(nodes, index, frame, shape, buffer, fill)
    name, at = next(_cuts(index, frame.ranges), ("", 0)) if value is None and cuts else ("", 0)
    if name:
        k = frame.names.index(name)
        lo, hi = frame.box[k]
        pieces = [replace(frame, box=(*frame.box[:k], p, *frame.box[k + 1 :])) for p in ((lo, lo + at), (lo + at, hi))]
        parts = [read_value(nodes, read, f, held, buffer, cuts - 1) for f in pieces]
        wide = np.broadcast_shapes(*((*p.shape[:k], 1, *p.shape[k + 1 :]) for p in parts))
        sizes = [(*wide[:k], f.extents[k], *wide[k + 1 :]) for f in pieces]
        return nodes.concat([nodes.expand(p, n) for p, n in zip(parts, sizes, strict=True)], k)
    if value is None:
        value = _flat(nodes, index, frame, shape, buffer, fill)
    keep = mask(nodes, left, frame)
    return value if keep is None else nodes.apply("Where", [keep, value, nodes.scalar(fill, buffer.dtype)])


def index_value(nodes: Nodes, e: Aff, frame: Frame) -> Value:
    """Values of an index expression over a frame, in coordinates of the whole; i64.

    It is made of a progression per dimension, so that readers see that it is one.
    """
    return _index(nodes, frame.place(e), frame)


def _index(nodes: Nodes, e: Aff, frame: Frame) -> Value:
    """Values of an index expression in the block's own coordinates."""
    total: Value | None = None
    plain = [(a, c) for a, c in e.terms if isinstance(a, str)]
    for k, (name, c) in enumerate(plain):
        steps = np.arange(frame.ranges[name], dtype=np.int64) * c + (e.const if k == 0 else 0)
        shape = [-1 if n == name else 1 for n in frame.names]
        total = _plus(nodes, total, nodes.constant(steps.reshape(shape), "i64"))
    for atom, c in e.terms:
        if isinstance(atom, str):
            continue
        inside, div = _index(nodes, atom.arg, frame), nodes.scalar(atom.div, "i64")
        value = nodes.apply("Mod", [inside, div])
        if isinstance(atom, Floor):
            value = nodes.apply("Div", [nodes.apply("Sub", [inside, value]), div])
        value = value if c == 1 else nodes.apply("Mul", [value, nodes.scalar(c, "i64")])
        total = _plus(nodes, total, value)
    if total is None:
        return nodes.constant(np.full((1,) * len(frame.names), e.const), "i64")
    return total if plain or not e.const else nodes.apply("Add", [total, nodes.scalar(e.const, "i64")])


def _plus(nodes: Nodes, total: Value | None, value: Value) -> Value:
    return value if total is None else nodes.apply("Add", [total, value])


def mask(nodes: Nodes, guards: Sequence[Guard], frame: Frame) -> Value | None:
    """Where all guards hold, in the block's own coordinates; None where there are none."""
    out: Value | None = None
    zero = nodes.scalar(0, "i64")
    for g in guards:
        test = nodes.apply("GreaterOrEqual" if g.op == "ge" else "Equal", [_index(nodes, g.aff, frame), zero], "bool")
        out = test if out is None else nodes.apply("And", [out, test])
    return out


def _cuts(index: Sequence[Aff], ranges: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Places inside a dimension where a floor or mod of it begins anew: the first, or the last where it begins with one."""
    for atom in (a for e in index for a, _ in e.terms if not isinstance(a, str)):
        (name, step), *more = atom.arg.terms
        if isinstance(name, str) and not more and step > 0 and not atom.div % step and not atom.arg.const % step:
            n, every = ranges[name], atom.div // step
            at = -(atom.arg.const // step) % every or n - n % every
            if 0 < at < n:
                yield name, at


# strided reads


def _strided(
    nodes: Nodes, index: Sequence[Aff], frame: Frame, shape: tuple[int, ...], buffer: Value, fill: float | int | bool
) -> Value | None:
    """Each axis of the buffer as a product of dimensions that no other axis has; None where it is none."""
    digits = _digits(index, frame.ranges)
    ranges = {n: k for parts in digits.values() for n, k in parts}
    env = {name: _of_digits(parts) for name, parts in digits.items() if len(parts) > 1}
    index = [substitute(e, env, ranges) for e in index]
    used = [n for e in index for n in dims_of(e)]
    if len(set(used)) < len(used) or not all(e.is_affine for e in index):
        return None
    value = _padded(nodes, index, ranges, shape, buffer, fill)
    low = [min(0, span(e, ranges)[0]) for e in index]
    axes: list[list[str]] = []
    at = 0
    for e, lo in zip(index, low, strict=True):
        order = sorted(dims_of(e), key=lambda n: (-e.coef(n), n))
        value = _axis(nodes, value, at, e - lo, order, ranges)
        axes.append(order)
        at += max(len(order), 1)
    sizes = [ranges[n] for group in axes for n in group]
    value = nodes.reshape(value, sizes)
    names = [n for group in axes for n in group]
    wanted = [n for name in frame.names for n, _ in digits[name] if n in names]
    value = nodes.transpose(value, [names.index(n) for n in wanted])
    return _joined(nodes, value, frame, digits, frozenset(names))


def _joined(
    nodes: Nodes, value: Value, frame: Frame, digits: Mapping[str, Sequence[tuple[str, int]]], used: frozenset[str]
) -> Value:
    """Digits joined to the dimensions that they are of; one cell along dimensions that none is of."""
    partly = [name for name in frame.names if 0 < sum(n in used for n, _ in digits[name]) < len(digits[name])]
    if partly:  # a dimension of which the value has some digits alone is repeated along the others
        small = [k if n in used else 1 for name in frame.names for n, k in digits[name]]
        large = [k if n in used or name in partly else 1 for name in frame.names for n, k in digits[name]]
        value = nodes.expand(nodes.reshape(value, small), large)
    shape = [prod(k for _, k in digits[d]) if any(n in used for n, _ in digits[d]) else 1 for d in frame.names]
    return nodes.reshape(value, shape)


def _of_digits(parts: Sequence[tuple[str, int]]) -> Aff:
    """A dimension as the sum of its digits, each times its place."""
    out = const(0)
    for k, (name, n) in enumerate(parts):
        out = out + (dim(name) if n != 1 else const(0)) * prod(size for _, size in parts[k + 1 :])
    return out


def _digits(index: Sequence[Aff], ranges: Mapping[str, int]) -> dict[str, tuple[tuple[str, int], ...]]:
    """Each dimension as digits, the greatest first, such that floors and mods of it are digits; itself where it has none."""
    places: dict[str, set[int]] = {n: set() for n in ranges}
    for e in index:
        _dimension_cuts(e.terms, places)
    out: dict[str, tuple[tuple[str, int], ...]] = {}
    for name, n in ranges.items():
        steps = [1, *sorted(p for p in places[name] if 1 < p < n), n]
        if len(steps) == 2 or any(b % a for a, b in itertools.pairwise(steps)):
            out[name] = ((name, n),)
            continue
        sizes = [b // a for a, b in itertools.pairwise(steps)][::-1]
        out[name] = tuple((f"{name}.{k}", size) for k, size in enumerate(sizes))
    return out


def _dimension_cuts(terms: Sequence[tuple[Atom, int]], places: dict[str, set[int]]) -> None:
    """Where floors and mods cut the dimensions that they are of."""
    for atom, _ in terms:
        if isinstance(atom, str):
            continue
        for name, c in atom.arg.terms:
            if isinstance(name, str):
                places[name].add(atom.div // gcd(atom.div, c))
        _dimension_cuts(atom.arg.terms, places)


def _padded(
    nodes: Nodes,
    index: Sequence[Aff],
    ranges: Mapping[str, int],
    shape: tuple[int, ...],
    buffer: Value,
    fill: float | int | bool,
) -> Value:
    """The buffer with as many cells around it as places lie outside of it."""
    before = [max(0, -span(e, ranges)[0]) for e in index]
    after = [max(0, span(e, ranges)[1] - n + 1) for e, n in zip(index, shape, strict=True)]
    return nodes.pad(buffer, before, after, fill)


def _axis(nodes: Nodes, value: Value, at: int, e: Aff, order: Sequence[str], ranges: Mapping[str, int]) -> Value:
    """One axis at the places of an expression: cut to them, with an axis for each of its dimensions (one where it has none)."""
    extents = [ranges[n] for n in order]
    steps = [e.coef(n) for n in order]
    if not order:
        return _cut(nodes, value, at, e.const, 1, 1)
    chain = all(steps[k] == steps[k + 1] * extents[k + 1] for k in range(len(order) - 1))
    if steps[-1] > 0 and chain:
        value = _cut(nodes, value, at, e.const, prod(extents), steps[-1])
        return nodes.reshape(value, [*value.shape[:at], *extents, *value.shape[at + 1 :]])
    grid = np.ix_(*(np.arange(n, dtype=np.int64) for n in extents))
    return nodes.gather(value, np.asarray(evaluate(e, dict(zip(order, grid, strict=True))), np.int64), at)


def _cut(nodes: Nodes, value: Value, at: int, first: int, count: int, step: int) -> Value:
    box = [(0, n) for n in value.shape]
    box[at] = (first, first + (count - 1) * step + 1)
    return nodes.slice(value, box, [step if k == at else 1 for k in range(len(box))])


def _flat(
    nodes: Nodes, index: Sequence[Aff], frame: Frame, shape: tuple[int, ...], buffer: Value, fill: float | int | bool
) -> Value:
    """Any read: a table of places in the flat buffer."""
    used = frozenset[str]().union(*map(dims_of, index))
    if prod(frame.alongside(used)) > MOST_CELLS:
        raise NotExpressible("a table of places would be too large", why=f"{prod(frame.alongside(used)):,} cells")
    grid = frame.grid(used)
    flat: np.ndarray = np.zeros([1] * len(frame.names), np.int64)
    valid: np.ndarray = np.ones([1] * len(frame.names), bool)
    for e, n in zip(index, shape, strict=True):
        v = np.asarray(evaluate(e, grid), np.int64)
        valid = valid & (v >= 0) & (v < n)
        flat = flat * n + np.clip(v, 0, n - 1)
    value = nodes.gather(nodes.reshape(buffer, [buffer.size]), flat, 0)
    if bool(valid.all()):
        return value
    return nodes.apply("Where", [nodes.constant(valid, "bool"), value, nodes.scalar(fill, buffer.dtype)])
