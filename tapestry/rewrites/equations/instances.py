"""Graphs that have the form of a rule's left-hand side: the example of its documentation, and the proof by trying.

A rule is tried on random instances of many ranks and sizes, on open bodies, projections and monoids drawn at random, and each
move is proved by `verify.rewriting`; one that claims exactness is held to it on infinities and NaN as well.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tapestry.errors import LawError, TapestryError
from tapestry.ir import laws
from tapestry.ir.expr import Acc, Arg, Expr, Index, call, cast, number
from tapestry.ir.graph import Block, Dim, Graph, Read, changes, names_of, shape_of
from tapestry.ir.index import Aff, dim, floordiv
from tapestry.ir.monoid import MONOIDS
from tapestry.ir.syntax.parser import parse
from tapestry.ir.syntax.printer import to_text
from tapestry.ir.types import DTYPES, FLOATS, Tensor
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.rule import Move, parse_move
from tapestry.rewrites.equations import by_cases
from tapestry.rewrites.equations.all_sizes import proved
from tapestry.rewrites.equations.equation import Equation
from tapestry.rewrites.equations.pattern import (
    App,
    DimPattern,
    Node,
    Num,
    OpPattern,
    ReadPattern,
    RuleText,
    Var,
    closed_part,
    is_open,
    names_in,
    show,
)
from tapestry.rewrites.equations.rounding import rounding
from tapestry.verify.rewriting.proofs import prove_steps

ALL_SIZES, BY_CASES, ON_INSTANCES = "normal form for all sizes and ranks", "cases for all sizes and ranks", "instances only"
ENOUGH, TRIES = 8, 400  # instances that a rule is held to, and drawings of them at most
STATES = ("sum", "max", "min", "prod", "logsumexp", "argmax")  # monoids that an open one is tried with


@dataclass(frozen=True, slots=True)
class Proof:
    """How a rule was held to what it says: on how many instances, by how many moves, and how many results by what evidence."""

    instances: int
    moves: int
    shown: Mapping[str, int]
    kind: str


def prove_moves(rule: Equation, rng: np.random.Generator, enough: int = ENOUGH) -> Proof:
    """Prove every move of a registered rule on random instances of its left-hand side.

    Raises:
        LawError: the two sides disagree; with the move, the law and a witness.
        TapestryError: no instance meets the rule's conditions.
    """
    moves = done = 0
    shown = Counter[str]()
    for _ in range(TRIES):
        graph = instance(rule.rule, rng)
        found = [] if graph is None else [m for m in rule.find(graph) if isinstance(m, Move)]
        if graph is None or not found:
            continue
        for move in _varied(rule, graph, found):
            after = apply_moves(graph, [parse_move(str(move))])
            laws.check(after)
            if repr(parse(to_text(after)).ops) != repr(after.ops):
                raise LawError("text", "the graph does not read back from its own text", where=str(move))
            shown += prove_steps(changes(after))
            moves += 1
        done += 1
        if done == enough:
            break
    if not done:
        raise TapestryError("no instance of its left-hand side meets its conditions", where=rule.name)
    return Proof(done, moves, shown, proof_of(rule.rule))


def _varied(rule: Equation, graph: Graph, found: list[Move]) -> list[Move]:
    """The moves, and those with other numbers that are legal, too."""
    out = list(found)
    for p in rule.rule.params:
        for n in (2, 3, 4) if not p.target else ():
            for m in found:
                other = replace(m, params=tuple((k, n if k == p.name else v) for k, v in m.params))
                try:
                    rule.apply(graph, other)
                except TapestryError:
                    continue
                out.append(other)
    return list(dict.fromkeys(out))


def describe(rule: Equation) -> str:
    """The documentation of a rule: its equation, and an instance of it with small sizes.

    Raises:
        TapestryError: no small instance meets the rule's conditions.
    """
    text = rule.rule
    for seed in range(100):
        graph = instance(text, np.random.default_rng(seed), small=True)
        move = None if graph is None else next((m for m in rule.find(graph) if isinstance(m, Move)), None)
        if graph is not None and move is not None:
            sides = [textwrap.indent(to_text(g), "    ") for g in (graph, rule.apply(graph, move))]
            legal = "; ".join([f"one_reader({t})" for t in sorted(text.alone)] + [show(c.test) for c in text.when]) or "always"
            body = textwrap.indent(text.text, "    ")
            return (
                f"{text.summary or text.form}\n\nbefore:\n{sides[0]}\nmove: {move}\n\nafter:\n{sides[1]}\n"
                f"legal when:\n    {legal}.\n\nrounding: {rounding(text)}.\n"
                f"proof: {proof_of(text)}.\n\nThe equation:\n\n{body}\n"
            )
    raise TapestryError("no small instance of its left-hand side meets its conditions", where=text.name)


def proof_of(rule: RuleText) -> str:
    """The kind of proof that a rule has beside the one at every place where it is applied."""
    kind = ALL_SIZES if proved(rule) else BY_CASES if by_cases.proved(rule) else ""
    return f"{kind}, and on instances" if kind else ON_INSTANCES


def instance(rule: RuleText, rng: np.random.Generator, *, small: bool = False) -> Graph | None:
    """A graph of the form of a left-hand side, drawn at random; ``None`` where a drawing is no graph.

    Args:
        small: for an example that is read: one dimension for each group, plain projections.
    """
    try:
        graph = _Drawing(rule, rng, small).graph()
        laws.check(graph)
    except (AssertionError, LawError):  # dtypes that do not go together, reads that leave a tensor: another one is drawn
        return None
    return graph


class _Drawing:
    """One random choice for everything that a left-hand side leaves open."""

    def __init__(self, rule: RuleText, rng: np.random.Generator, small: bool) -> None:
        self.rule, self.rng, self.small = rule, rng, small
        self.default = "f32" if small or rng.random() < 0.8 else "i64"
        self.sizes: dict[str, tuple[int, ...]] = {}
        self.dims: dict[str, tuple[Dim, ...]] = {}
        self.monoids: dict[str, str | None] = {}
        self.tensors: dict[str, Tensor] = {}
        self.views: dict[str, tuple[Read, ...]] = {}
        self.maps: dict[str, tuple[tuple[Dim, ...], tuple[Aff, ...]]] = {}
        self.inputs: list[str] = []

    def graph(self) -> Graph:
        """The graph; its open tensors are inputs."""
        root = self.rule.before[-1]
        for d in (*root.dims, *root.reduce):
            self._bind(d)
        for p in self.rule.before[::-1]:  # projections of the tensors in between decide about their shapes
            for r in p.reads:
                for n in r.index:
                    if isinstance(n, App) and n.fn not in self.maps:
                        self._map(n)
            for d in p.reduce:
                self._bind(d)
        ops = [self._op(p) for p in self.rule.before]
        stay = {o.name for p in self.rule.after for o in p.outs} if not self.small else set[str]()
        outs = tuple(t for op in ops for t in op.outs if op is ops[-1] or t in stay)
        return Graph(name="g", tensors=self.tensors, ops=tuple(ops), inputs=tuple(self.inputs), outputs=outs)

    def _size(self) -> int:
        return int(self.rng.integers(2, 5))

    def _bind(self, d: DimPattern) -> None:
        if d.name in self.dims:
            return
        key = d.size.name if isinstance(d.size, Var) else ""
        if isinstance(d.size, Num):
            sizes = (int(d.size.value),)
        elif key in self.sizes:
            sizes = self.sizes[key]
        else:
            rank = (1 if self.small else int(self.rng.choice([0, 1, 1, 2]))) if d.many else 1
            sizes = self.sizes[key] = tuple(self._size() for _ in range(rank))
        names = [d.name] if len(sizes) == 1 else [f"{d.name}{i}" for i in range(len(sizes))]
        self.dims[d.name] = tuple(Dim(n, s) for n, s in zip(names, sizes, strict=True))

    def _of(self, names: list[Var]) -> list[Dim]:
        return [d for v in names for d in self.dims[v.name]]

    def _shuffled(self, dims: list[Dim]) -> list[Dim]:
        order: list[int] = [] if self.small else self.rng.permutation(len(dims)).tolist()
        return [dims[i] for i in order] if order else list(dims)

    def _map(self, n: App) -> None:
        """A projection that may permute, stride and shift, and the dimensions of what it reads."""
        dims = self._of([v for v in names_in(n) if v.name in self.dims])
        order = self._shuffled(dims)
        steps = [(1, 0) if self.small else (int(self.rng.integers(1, 3)), int(self.rng.integers(0, 2))) for _ in order]
        made = tuple(Dim(f"x{i}", s * (d.size - 1) + o + 1) for i, (d, (s, o)) in enumerate(zip(order, steps, strict=True)))
        self.maps[n.fn] = made, tuple(dim(d.name) * s + o for d, (s, o) in zip(order, steps, strict=True))

    def _op(self, p: OpPattern) -> Block:
        mapped = next((n for q in self.rule.before for r in q.reads if r.tensor == p.outs[0].name for n in r.index), None)
        if isinstance(mapped, App):
            (d,) = p.dims
            self.dims[d.name] = self.maps[mapped.fn][0]
            if isinstance(d.size, Var):
                self.sizes[d.size.name] = shape_of(self.dims[d.name])
        dims = tuple(d for q in p.dims for d in self.dims[q.name])
        monoid = self._monoid(p)
        reduce = tuple(d for q in p.reduce for d in self.dims[q.name]) if monoid else ()
        reads: list[Read] = []
        places: dict[str, list[Expr]] = {}
        for r in p.reads:
            places[r.alias] = []
            for read in self._reads(r):
                places[r.alias].append(Arg(len(reads), self.tensors[read.tensor].dtype))
                reads.append(read)
        space = (*dims, *reduce)
        count = len(MONOIDS[monoid].fields) if monoid else 1
        want = [self._dtype(p.outs[0].dtype)] * count
        if monoid == "argmax":
            want[1] = "i64"
        body = tuple(e for n in p.body for e in self._terms(n, want, places, space))
        then: tuple[Expr, ...] = ()
        assert len(body) == count  # a closed body is no state of several fields
        if monoid:
            MONOIDS[monoid].combiner(tuple(e.dtype for e in body))  # fails for dtypes that the monoid is not for
        if monoid and p.then:
            accs: list[Expr] = [Acc(i, e.dtype) for i, e in enumerate(body)]
            named = places | {"acc": accs} | {f"acc{i}": [a] for i, a in enumerate(accs)}
            late = names_of(reduce)
            for alias, args in places.items():
                named[alias] = [a for a in args if isinstance(a, Arg) and not late & _plain_dims(reads[a.pos])]
            then = tuple(e for n in p.then for e in self._terms(n, want[:1], named, dims))
        results = then or body
        outs = (
            tuple(o.name for o in p.outs)
            if len(results) == len(p.outs)
            else tuple(f"{p.outs[0].name}{i}" for i in range(count))
        )
        for t, e in zip(outs, results, strict=True):
            self.tensors[t] = Tensor(name=t, dtype=e.dtype, shape=shape_of(dims))
        return Block(outs=outs, dims=dims, reduce=reduce, monoid=monoid, reads=tuple(reads), body=body, then=then)

    def _dtype(self, name: str) -> str:
        return name if name in DTYPES else self.default

    def _monoid(self, p: OpPattern) -> str | None:
        if not p.monoid or p.monoid[0].islower():
            return p.monoid or None
        if p.monoid not in self.monoids:
            names: list[str | None] = [*STATES[: 1 if self.small and self.rng.random() < 0.7 else None]]
            if not self.small and p.open_then and all(d.many for d in p.reduce):
                names.append(None)
            self.monoids[p.monoid] = names[int(self.rng.integers(len(names)))]
            if self.monoids[p.monoid] is None:
                for d in p.reduce:
                    self.dims[d.name] = ()
        return self.monoids[p.monoid]

    def _reads(self, r: ReadPattern) -> tuple[Read, ...]:
        if r.tensor in self.tensors and r.tensor not in self.inputs:
            index = tuple(e for n in r.index for e in self._cells(n))
            return (Read(tensor=r.tensor, index=index),)
        if r.alias not in self.views:
            names = (
                [r.tensor] if not r.many else [f"{r.tensor}{i}" for i in range(1 if self.small else self.rng.integers(1, 3))]
            )
            dims = self._of([v for n in r.index for v in names_in(n) if v.name in self.dims])
            coarse = {show(n.args[0]) for n in r.index if isinstance(n, App) and n.fn == "floordiv"}
            self.views[r.alias] = tuple(self._view(n, dims, {d.name for c in coarse for d in self.dims[c]}) for n in names)
        return self.views[r.alias]

    def _cells(self, n: Node) -> tuple[Aff, ...]:
        if isinstance(n, App):
            return self.maps[n.fn][1]
        return tuple(dim(d.name) for v in names_in(n) for d in self.dims[v.name])

    def _view(self, name: str, dims: list[Dim], halved: set[str]) -> Read:
        """A read of a new input: all dimensions as they are, or some of them in another order, shifted and filled in."""
        used = self._shuffled(dims)
        used = used[1:] if not self.small and self.rng.random() < 0.2 else used
        shift = int(not self.small and self.rng.random() < 0.25)
        shape = tuple((d.size + 1) // 2 if d.name in halved else d.size for d in used)
        self.tensors[name] = Tensor(name=name, dtype=self.default, shape=shape, kind="input")
        self.inputs.append(name)
        fill = number(int(self.rng.integers(0, 3)), self.default).value if shift else None
        places = (floordiv(dim(d.name), 2) if d.name in halved else dim(d.name) for d in used)
        return Read(tensor=name, index=tuple(e - shift for e in places), other=fill)

    def _terms(self, n: Node, want: list[str], args: Mapping[str, list[Expr]], space: tuple[Dim, ...]) -> list[Expr]:
        """The expressions of a term, one for every dtype that is wanted."""
        if isinstance(n, Num):
            return [number(n.value, want[0])]
        if isinstance(n, Var):
            if n.name in args:
                return args[n.name]
            return [number(self.sizes[n.name][0] if n.name in self.sizes else int(self.rng.integers(1, 4)), "i64")]
        if is_open(n):
            if not n.args and self.rng.random() < 0.5:  # a number is a function of nothing, too
                return [number(3, w) for w in want]
            given = [e for a in n.args if isinstance(a, Var) for e in args.get(a.name, [])]
            given += [self._terms(a, want, args, space)[0] for a in (closed_part(n),) if a]
            return [self._expression(given, w, space) for w in want]
        if n.fn == "index":
            return [Index(dim(show(n.args[0])))]
        kind = "i64" if any(isinstance(a, App) and a.fn == "index" for a in n.args) else want[0]
        kind = self.default if kind == "bool" and n.fn in ("lt", "le", "gt", "ge", "eq", "ne") else kind
        kinds = ["bool", kind, kind] if n.fn == "where" else [kind] * len(n.args)
        return [call(n.fn, *(self._terms(a, [k], args, space)[0] for a, k in zip(n.args, kinds, strict=True)))]

    def _expression(self, given: list[Expr], want: str, space: tuple[Dim, ...]) -> Expr:
        """A random expression of a dtype over all that is given, and now and then over the index."""
        parts = [self._unary(cast(e, want)) for e in given]
        if space and (not parts or (not self.small and self.rng.random() < 0.3)):
            parts.append(cast(Index(dim(space[int(self.rng.integers(len(space)))].name)), want))
        out = parts[0] if parts else number(2, want)
        for e in parts[1:]:
            out = call(str(self.rng.choice(["add", "mul", "max"])) if want != "bool" else "or", out, e)
        return out

    def _unary(self, e: Expr) -> Expr:
        fns = ["tanh", "neg", "abs"] if e.dtype in FLOATS else ["neg", "abs"]
        return e if e.dtype == "bool" or (not self.small and self.rng.random() < 0.4) else call(str(self.rng.choice(fns)), e)


def _plain_dims(read: Read) -> set[str]:
    return {n for e in read.index for n, _ in e.terms if isinstance(n, str)}
