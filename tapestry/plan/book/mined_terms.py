"""Left-hand sides that occur: the connected terms of arithmetic of two to four operations in the operations of graphs.

A term is a tree of sums, differences, products and quotients around leaves, which are whatever stands there: reads, states,
literals, other functions of them. The dimensions of an operation that the same leaves vary along are one group, so that a
term says which of its leaves vary along which groups and nothing else: two places with one such term are one left-hand side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from tapestry.ir.expr import Acc, Call, Const, Expr, distinct
from tapestry.ir.graph import Block, Graph
from tapestry.ir.recognise.contraction import dims_read
from tapestry.ir.state import varies
from tapestry.ir.types import FLOATS
from tapestry.rewrites.equations.small_terms import Term, ordered

ARITHMETIC = frozenset({"add", "sub", "mul", "div", "neg"})
FEWEST, MOST = 2, 4  # operations of a term
MOST_PLACES = 24  # of an operation, at which terms begin
MOST_LEAVES, MOST_GROUPS = 5, 3  # of a term
LETTERS = "imn"
Leaves = Mapping[str, str]  # name → groups


@dataclass(frozen=True, slots=True)
class Mined:
    """A left-hand side.

    Attributes:
        term: as `rewrites.equations.small_terms` writes them; a literal is a leaf that is called k and varies along nothing.
        leaves: name → the groups that it varies along.
    """

    term: Term
    leaves: tuple[tuple[str, str], ...]

    @property
    def whole(self) -> str:
        """All groups."""
        return "".join(sorted({d for _, ds in self.leaves for d in ds}, key=LETTERS.index))


def mined(graph: Graph) -> Iterator[tuple[Mined, int]]:
    """Every term of a graph, with the points at which it is computed."""
    for op in graph.ops:
        if isinstance(op, Block):
            sizes = {d.name: d.size for d in op.space}
            yield from _of(op, op.body, frozenset(d.name for d in op.space), sizes)
            yield from _of(op, op.then, frozenset(d.name for d in op.dims), sizes)


def _of(op: Block, exprs: tuple[Expr, ...], space: frozenset[str], sizes: Mapping[str, int]) -> Iterator[tuple[Mined, int]]:
    roots = [e for e in distinct(exprs) if isinstance(e, Call) and e.fn in ARITHMETIC and e.dtype in FLOATS]
    for root in roots[:MOST_PLACES]:
        for n in range(FEWEST, MOST + 1):
            for tree, parts in _grown(root, n):
                found = _canonical(tree, [frozenset(_varied(op, e, space, sizes)) for e in parts], parts)
                if found is not None:
                    yield found, prod(sizes[d] for d in space)


def _grown(e: Expr, n: int) -> Iterator[tuple[Term, list[Expr]]]:
    """Trees of n operations with a root: leaves are numbers, places of a list."""
    if n == 0:
        yield (0,), [e]
        return
    if not (isinstance(e, Call) and e.fn in ARITHMETIC):
        return
    for shares in itertools.product(range(n), repeat=len(e.args)):
        if sum(shares) == n - 1:
            for sides in itertools.product(*(list(_grown(a, k)) for a, k in zip(e.args, shares, strict=True))):
                parts: list[Expr] = []
                args: list[Term] = []
                for tree, own in sides:
                    args.append(_moved(tree, [_place(parts, x) for x in own]))
                yield (e.fn, *args), parts


def _place(parts: list[Expr], e: Expr) -> int:
    if e not in parts:
        parts.append(e)
    return parts.index(e)


def _moved(t: Term, places: list[int]) -> Term:
    return (places[t[0]],) if isinstance(t[0], int) else (t[0], *(_moved(a, places) for a in t[1:]))


def _varied(op: Block, e: Expr, space: frozenset[str], sizes: Mapping[str, int]) -> Iterator[str]:
    """Dimensions of more than one point that an expression varies along."""
    found = dims_read(op, e) & space
    for x in distinct((e,)):
        if isinstance(x, Acc):
            found |= {d.name for d, along in zip(op.dims, varies(op)[x.field], strict=True) if along}
    yield from (d for d in found if sizes[d] > 1)


def _canonical(tree: Term, varied: list[frozenset[str]], parts: list[Expr]) -> Mined | None:
    """A term with its leaves and groups called in one of all orders, the same for equal ones."""
    literal = tuple(isinstance(e, Const) for e in parts)
    groups = sorted({tuple(d in v for v in varied) for d in frozenset[str]().union(*varied)}, reverse=True)
    if all(literal) or len(parts) > MOST_LEAVES or len(groups) > MOST_GROUPS:
        return None
    return _called(tree, tuple(groups), literal)


@lru_cache(maxsize=1 << 14)
def _called(tree: Term, groups: tuple[tuple[bool, ...], ...], literal: tuple[bool, ...]) -> Mined:
    found: list[tuple[str, Mined]] = []
    for letters in itertools.permutations(LETTERS[: len(groups)]):
        varied = [
            sorted((x for x, g in zip(letters, groups, strict=True) if g[k]), key=LETTERS.index) for k in range(len(literal))
        ]
        for order in itertools.permutations(range(len(literal))):
            names = {p: ("k" if literal[p] else "x") + str(n) for n, p in enumerate(order)}
            term, leaves = _named(tree, names), tuple(sorted((names[k], "".join(v)) for k, v in enumerate(varied)))
            found.append((repr((ordered(term), leaves)), Mined(term, leaves)))
    return min(found, key=lambda f: f[0])[1]


def general(m: Mined) -> Mined:
    """A term with a leaf of its own wherever one stands."""
    varied: list[str] = []
    literal: list[bool] = []

    def fresh(t: Term) -> Term:
        if len(t) > 1:
            return (t[0], *map(fresh, t[1:]))
        varied.append(dict(m.leaves)[t[0]])
        literal.append(t[0].startswith("k"))
        return (len(varied) - 1,)

    tree = fresh(m.term)
    if len(varied) > MOST_LEAVES + 1:
        return m
    groups = sorted({tuple(d in v for v in varied) for d in set("".join(varied))}, reverse=True)
    return _called(tree, tuple(groups), tuple(literal))


def parts(m: Mined) -> Iterator[Mined]:
    """The terms inside of a term."""
    for t in m.term[1:]:
        if len(t) > 1:
            names = tuple(dict.fromkeys(_leaf_names(t)))
            inner = Mined(t, tuple((n, d) for n, d in m.leaves if n in names))
            varied = [dict(m.leaves)[n] for n in names]
            groups = sorted({tuple(d in v for v in varied) for d in set("".join(varied))}, reverse=True)
            tree = _numbered(t, names)
            yield _called(tree, tuple(groups), tuple(n.startswith("k") for n in names))
            yield from parts(inner)


def _leaf_names(t: Term) -> Iterator[str]:
    if len(t) == 1:
        yield t[0]
    for a in t[1:]:
        yield from _leaf_names(a)


def _numbered(t: Term, names: tuple[str, ...]) -> Term:
    return (names.index(t[0]),) if len(t) == 1 else (t[0], *(_numbered(a, names) for a in t[1:]))


def _named(t: Term, names: Mapping[int, str]) -> Term:
    return (names[t[0]],) if isinstance(t[0], int) else (t[0], *(_named(a, names) for a in t[1:]))
