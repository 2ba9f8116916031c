"""Writing the right-hand side of a rule with what a match has bound."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from tapestry.ir.expr import PRIMITIVES, Acc, Arg, Expr, Index, call, cast, depth, leaves
from tapestry.ir.graph import Block, Dim, Graph, Inner, Op, Read
from tapestry.ir.index import Aff, dim, dims_of, span
from tapestry.ir.monoid import number
from tapestry.ir.types import DTYPES, Tensor
from tapestry.rewrites.core.edit import (
    MOST_DEPTH,
    fresh_dim,
    merge_reads,
    read_dims,
    results,
    substitute_expr,
    substitute_read,
    unused,
)
from tapestry.rewrites.core.rule import Accept, Candidate, Draft, Match, MatchRule, Move, Params, Refusal, refuse
from tapestry.rewrites.equations.conditions import Conditions
from tapestry.rewrites.equations.match import Matcher
from tapestry.rewrites.equations.pattern import (
    HOLE,
    App,
    Bindings,
    DimPattern,
    Node,
    Num,
    OpPattern,
    RuleText,
    Var,
    number_of,
    place,
    show,
)


@dataclass(frozen=True, slots=True)
class Written:
    """The operations of a right-hand side in order, and the tensors that they add."""

    ops: tuple[Block, ...]
    new: tuple[Tensor, ...]


def write_right_side(rule: RuleText, m: Bindings, tensors: dict[str, Tensor]) -> Written | Refusal:
    """The right-hand side of a rule for a match; a refusal where it would read by a dimension that is not there."""
    names = dict(m.tensors)
    for p in rule.after:
        for o in p.outs:
            if o.name not in names:
                names[o.name] = unused(f"{m.root.outs[0]}.{o.name}", tensors)
    ops: list[Block] = []
    new = dict[str, Tensor]()
    table = ChainMap(new, tensors)
    sources = tuple(dict.fromkeys(s for k in sorted(m.ops) for s in m.ops[k].source))
    for p in rule.after:
        before = next((m.ops[k] for k, q in enumerate(rule.before) if p.outs[0].name in {o.name for o in q.outs}), None)
        outs = before.outs if before is not None and p.outs[0].many else tuple(names[o.name] for o in p.outs)
        op = _Writer(rule, m, p, names, table).op(outs, before, sources)
        if isinstance(op, Refusal):
            return op
        ops.append(op)
        new |= {t.name: t for t in results(op) if t.name not in tensors}
    return Written(tuple(ops), tuple(new.values()))


@dataclass
class _Writer:
    """Writes one operation.

    Attributes:
        names: tensors of the pattern → of the graph.
        tensors: the graph's, and those written before.
        dims: dimensions of this operation, by name of the pattern.
        moved: dimensions of the left-hand side → what stands for them here.
        reads: alias → positions of its reads.
    """

    rule: RuleText
    m: Bindings
    pattern: OpPattern
    names: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    dims: dict[str, tuple[Dim, ...]] = field(default_factory=dict[str, tuple[Dim, ...]])
    moved: dict[str, Aff] = field(default_factory=dict[str, Aff])
    reads: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    projections: list[Read] = field(default_factory=list[Read])
    ranges: dict[str, int] = field(default_factory=dict[str, int])
    inner: tuple[Inner, ...] = ()
    nested: int = 0

    def op(self, outs: tuple[str, ...], before: Block | None, source: tuple[str, ...]) -> Block | Refusal:
        """The operation, or why it cannot be written."""
        p = self.pattern
        dims, reduce = self._space(p.dims), self._space(p.reduce)
        if before is not None and set(dims) == set(before.dims):
            dims = before.dims
        inner = self._inner()
        self.ranges = {d.name: d.size for d in (*dims, *reduce, *(d for s in inner for d in s.dims))}
        for r in p.reads:
            self._read(r.alias, r.tensor, r.index)
        monoid = self.m.monoids.get(p.monoid, p.monoid) or None
        body = tuple(e for n in p.body for e in self._terms(n, ()))
        then = tuple(e for n in p.then for e in self._terms(n, body)) if monoid else ()
        out = merge_reads(
            Block(
                outs=outs, dims=dims, reduce=reduce, monoid=monoid, reads=tuple(self.projections), body=body, then=then,
                inner=self.inner, source=source,
            )
        )  # fmt: skip
        if self.nested > 1:
            return refuse("two bodies with inner reductions do not go into one operation")
        return self._loose(out) or out

    def _space(self, patterns: tuple[DimPattern, ...]) -> tuple[Dim, ...]:
        out: list[Dim] = []
        for d in patterns:
            if d.name not in self.m.dims:
                size = place(d.size, self.m)
                taken = Block(outs=("",), dims=(*(Dim(n, s) for n, s in self.m.ranges.items()), *out))
                self.dims[d.name] = (Dim(fresh_dim(taken, d.name), size.const),)
            else:
                self.dims[d.name] = self.m.dims[d.name]
            out += self.dims[d.name]
        return tuple(out)

    def _inner(self) -> tuple[Inner, ...]:
        whole = self.pattern.body[0] if self.pattern.open_body else None
        return self.m.bodies[whole.fn].inner if isinstance(whole, App) else ()

    def _read(self, alias: str, tensor: str, index: tuple[Node, ...]) -> None:
        first = len(self.projections)
        if alias in self.m.views:
            formals = next(r.index for q in self.rule.before for r in q.reads if r.alias == alias)
            env = dict(e for f, n in zip(formals, index, strict=True) for e in self._argument(f, n))
            self.moved |= env
            self.projections += [self._inside(substitute_read(v, env, self.ranges)) if env else v for v in self.m.views[alias]]
        else:
            cells = tuple(e for n in index for e in self._cells(n))
            self.projections.append(Read(tensor=self.names[tensor], index=cells))
        self.reads[alias] = tuple(range(first, len(self.projections)))

    def _inside(self, r: Read) -> Read:
        """A read without the guards that always hold, and without a fill where it never leaves its tensor."""
        shape = self.tensors[r.tensor].shape
        when = tuple(g for g in r.when if g.op != "ge" or span(g.aff, self.ranges)[0] < 0)
        spans = [span(e, self.ranges) for e in r.index]
        within = not when and all(lo >= 0 and hi < n for (lo, hi), n in zip(spans, shape, strict=True))
        return replace(r, when=when, other=None if within else r.other)

    def _argument(self, formal: Node, given: Node) -> list[tuple[str, Aff]]:
        """What stands for the dimensions that an argument of a view named on the left-hand side."""
        if formal != given and isinstance(formal, App) and formal.fn == "floordiv" and isinstance(formal.args[0], Var):
            (old,) = self.m.dims[formal.args[0].name]
            return [(old.name, self._cells(given)[0] * place(formal.args[1], self.m).const)]
        if formal == given or not isinstance(formal, Var) or formal.name not in self.m.dims:
            return []
        old = self.m.dims[formal.name]
        return list(zip((d.name for d in old), self._cells(given), strict=True))

    def _cells(self, n: Node) -> tuple[Aff, ...]:
        if isinstance(n, App) and n.fn in self.m.maps:
            return self.m.maps[n.fn]
        if isinstance(n, Var) and n.many:
            return tuple(dim(d.name) for d in self.dims.get(n.name) or self.m.dims[n.name])
        return (place(n, self.m, self.dims),)

    def _terms(self, n: Node, state: tuple[Expr, ...], like: str = "") -> tuple[Expr, ...]:
        """The expressions of a term: several of a group, or of a body of several results.

        Args:
            state: what is reduced, for ``acc0`` after the reduction.
            like: the dtype of a literal.
        """
        if isinstance(n, Num):
            default = "bool" if isinstance(n.value, bool) else "i64" if isinstance(n.value, int) else "f32"
            return (number(n.value, like or default),)
        if isinstance(n, Var):
            if n.name in self.reads:
                return tuple(Arg(i, self.tensors[self.projections[i].tensor].dtype) for i in self.reads[n.name])
            if n.name.startswith("acc"):
                accs = tuple(Acc(i, e.dtype) for i, e in enumerate(state))
                return accs if n.many else (accs[int(n.name[3:])],)
            return (number(number_of(n.name, self.m), like or "i64"),)
        if n.fn in self.m.bodies:
            return self._applied(n, state)
        if n.fn == "index":
            return (Index(place(n.args[0], self.m, self.dims)),)
        if n.fn == "cast":
            kind = n.args[1].name if isinstance(n.args[1], Var) else ""
            return (cast(self._terms(n.args[0], state)[0], kind if kind in DTYPES else self.m.dtypes[kind]),)
        return (self._call(n, state, like),)

    def _call(self, n: App, state: tuple[Expr, ...], like: str) -> Expr:
        """A primitive; literals have the dtype of what they stand beside."""
        free = [isinstance(a, Num) or (isinstance(a, Var) and a.name in self.m.sizes) for a in n.args]
        done = {i: self._terms(a, state)[0] for i, a in enumerate(n.args) if not free[i]}
        beside = next((e.dtype for i, e in done.items() if n.fn != "where" or i), like)
        return call(n.fn, *(done[i] if i in done else self._terms(a, state, beside)[0] for i, a in enumerate(n.args)))

    def _applied(self, n: App, state: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """An open body applied; through several projections, one result for each."""
        body = self.m.bodies[n.fn]
        gone: dict[int, Expr] = {}
        accs: dict[int, Expr] = {i: Acc(i, e.dtype) for i, e in enumerate(state)}
        for param, a in zip(body.params, n.args, strict=True):
            values = self._terms(a, state)
            if not isinstance(param, Var):
                accs[HOLE] = values[0]
                continue
            if param.name.startswith("acc"):
                accs |= dict(enumerate(values)) if param.many else {int(param.name[3:]): values[0]}
                continue
            places = self.m.places[body.op, param.name]
            for i, at in enumerate(places):
                several = self.m.variant.get((body.op, at), 0) if len(values) != len(places) else i
                gone[at] = values[several if len(values) > 1 else 0]
        if body.inner:
            self.nested += 1
            self.inner = tuple(replace(s, body=self._put(s.body, gone, accs)) for s in body.inner)
        return tuple(self._put(e, gone, accs) for v in body.variants for e in v)

    def _put(self, e: Expr, gone: Mapping[int, Expr], accs: Mapping[int, Expr]) -> Expr:
        """An expression of the left-hand side with what stands for its reads, states and dimensions here."""

        def leaf(x: Expr) -> Expr:
            return gone[x.pos] if isinstance(x, Arg) else accs.get(x.field, x) if isinstance(x, Acc) else x

        return substitute_expr(e, self.moved, self.ranges, leaf)

    def _loose(self, op: Block) -> Refusal | None:
        """What would be read by a dimension that the operation does not have."""
        names = {d.name for d in op.space}
        for r in op.reads:
            if read_dims(r) - names:
                return refuse(f"'{r.tensor}' varies along '{min(read_dims(r) - names)}'")
        kept = {d.name for d in op.dims}
        for exprs, there in ((op.point, names), (op.then, kept)):
            if lost := {n for x in leaves(exprs) if isinstance(x, Index) for n in dims_of(x.aff)} - there:
                return refuse(f"the body looks at the index of '{min(lost)}'")
        reduced = names - kept
        late = next((op.reads[i] for i in op.then_reads() if read_dims(op.reads[i]) & reduced), None)
        if late is not None:
            return refuse(f"'{late.tensor}' varies along a reduced dimension, and is needed after the reduction")
        if depth((*op.point, *op.then)) > MOST_DEPTH:
            return refuse("the expression would be nested too deeply", f"at most {MOST_DEPTH} calls inside each other")
        return None


def replacements(draft: Draft, m: Bindings, written: Written) -> dict[int, tuple[Op, ...]]:
    """What stands at each position of the graph that a match touches.

    An operation that is written anew under its name stands where it stood, with new ones before it; one that is not goes
    unless something still reads it.
    """
    old = {op.outs[0]: op for op in m.ops.values()}
    parts: dict[str, tuple[Op, ...]] = {}
    pending: tuple[Op, ...] = ()
    for op in written.ops:
        pending = (*pending, op)
        if op.outs[0] in old:
            parts[op.outs[0]], pending = pending, ()
    out: dict[int, tuple[Op, ...]] = {}
    for k in sorted(m.ops, reverse=True):
        op = m.ops[k]
        at = draft.makers[op.outs[0]]
        if op.outs[0] in parts or not _needed(draft, op, out):
            here = out.get(at, draft.ops(at))
            out[at] = tuple(n for o in here for n in (parts.get(op.outs[0], ()) if o is op else (o,)))
    return out


def _needed(draft: Draft, op: Op, changed: Mapping[int, tuple[Op, ...]]) -> bool:
    """Whether something reads a result of an operation, with other operations at some positions, or the graph returns it."""
    ops = [o for t in op.outs for at in {*draft.readers_of(t), *changed} for o in changed.get(at, draft.ops(at))]
    return any(t in draft.outputs or any(t in o.inputs for o in ops) for t in op.outs)


# A rule made of its text: find, apply, sweep and refusals all come from one match of the left-hand side.


class Equation(MatchRule):
    """A rule whose text is ``rule``; `equation` makes one."""

    rule: ClassVar[RuleText]
    again = True

    def __init__(self) -> None:
        self.matcher = Matcher(self.rule)
        paths: dict[str, int] = {}  # the longest path of operations of the left-hand side that ends in each tensor
        for p in self.rule.before:
            paths |= {o.name: 1 + max((paths.get(r.tensor, 0) for r in p.reads), default=0) for o in p.outs}
        self._reach = paths[self.rule.before[-1].outs[0].name] - 1

    @property
    def reach(self) -> int:
        """See `MatchRule.reach`: the longest path in the left-hand side."""
        return self._reach

    def names_tensor(self, param: str) -> bool:
        """Whether a parameter of a move is a tensor, rather than a dimension or a number."""
        return any(p.name == param and p.target in self.matcher.makers for p in self.rule.params)

    def choose(self, graph: Graph, accept: Accept | None = None) -> tuple[Graph, list[Move]]:
        """As `MatchRule.choose`; a graph without an operation of the form of the left-hand side's last one is not looked at."""
        there = any(isinstance(op, Block) and self.matcher.fits(op) for op in graph.ops)
        return super().choose(graph, accept) if there else (graph, [])

    def candidates(self, draft: Draft, at: int, move: Move | None) -> Iterator[Candidate | Refusal]:
        """Every match of the left-hand side at an operation, refusals of those that are not legal.

        Without a move, only what pays is a candidate; with one, what has its parameters.
        """
        op = draft.block(at)
        given = {} if move is None else dict(move.params)
        numbers = {p.name: p.default if move is None else move.number(p.name) for p in self.rule.params if not p.target}
        for m in self.matcher.at(draft, op) if op is not None else ():
            if isinstance(m, Refusal):
                yield m
                continue
            m.numbers |= numbers
            written = Conditions(draft, m).failing(self.rule.when) or write_right_side(self.rule, m, draft.tensors)
            if isinstance(written, Refusal):
                yield written
                continue
            params = self._params(m)
            if all(given.get(k, v) == v for k, v in params) and (move is not None or self._pays(draft, m, written)):
                yield params, Match(replacements(draft, m, written), written.new)

    def _pays(self, draft: Draft, m: Bindings, written: Written) -> bool:
        return Conditions(draft, m, written.ops).failing(self.rule.pays) is None

    def _params(self, m: Bindings) -> Params:
        out: Params = ()
        for p in self.rule.params:
            if not p.target:
                out += ((p.name, m.numbers[p.name]),)
            else:
                out += ((p.name, m.dims[p.target][0].name if p.target in m.dims else m.tensors[p.target]),)
        return out


# By how much the two sides of an equation may differ in floating point, from its text.
#
# A value made by sums and products alone is, computed in any order, within γ_d·Σ|terms| of the real one. The terms are those
# of the expanded sum of products, d is the most roundings that one of them passes, γ_d = d·u/(1 − d·u), u the unit roundoff
# (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1 and section 3.1). So the sides differ by the two
# bounds at most. A sum of M terms rounds each at most M − 1 times.


_FREE = frozenset({"neg", "abs", "max", "min", "where", "index", "eq", "ne", "lt", "le", "gt", "ge", "and"})  # round nothing
_LINEAR = frozenset({"add", "sub", "mul"})
Roundings = Counter[str]  # sizes, "" for one


def rounding(rule: RuleText) -> str:
    """By how much results may change, as a sentence without its full stop."""
    if rule.exact:
        return "the same bits"
    sides = [_side(rule, ops) for ops in (rule.before, rule.after)]
    if any(s is None for s in sides):
        return "real arithmetic; no bound is stated"
    left, right = (s or Counter() for s in sides)
    if not any(left.values()) and not any(right.values()):
        rises = any(isinstance(c.test, App) and c.test.fn == "increasing" for c in rule.when)
        return "the same values" + (", where functions rise as they are computed" if rises else ": nothing is rounded")
    return f"at most γ(d)·Σ|terms| on each side, d = {_text(left)} before and {_text(right)} after"


def _text(d: Roundings) -> str:
    constant = d[""]
    parts = [n if k == 1 else f"{k}·{n}" for n, k in sorted(d.items()) if n and k]
    return " + ".join(parts + ([str(constant)] if constant > 0 or not parts else [])) + (
        f" − {-constant}" if parts and constant < 0 else ""
    )


def _side(rule: RuleText, ops: tuple[OpPattern, ...]) -> Roundings | None:
    """The most roundings of a term of the last operation; ``None`` where something else than sums and products is computed."""
    done: dict[str, Roundings] = {}
    for p in ops:
        summed = p.monoid == "sum" or (p.monoid[:1].isupper() and p.monoid not in _selecting(rule))  # an open one may be a sum
        if p.monoid not in ("", "max", "min") and not summed and p.monoid[0].islower():
            return None
        names = {r.alias: done[r.tensor] for r in p.reads if r.tensor in done}
        found = _rounded(p.body[0], names)
        if found is None:
            return None
        for d in p.reduce if summed else ():
            found = found + Counter({show(d.size).removesuffix(".."): 1})
        if p.reduce and summed:
            found[""] -= 1
        if p.then and (found := _rounded(p.then[0], names | {"acc0": found, "acc": found})) is None:
            return None
        done[p.outs[0].name] = found
    return done[ops[-1].outs[0].name]


def _selecting(rule: RuleText) -> Iterator[str]:
    """Open monoids that stand for a maximum or minimum."""
    for c in rule.when:
        if (
            isinstance(c.test, App)
            and c.test.fn == "in"
            and all(isinstance(a, Var) and a.name in ("max", "min") for a in c.test.args[1:])
        ):
            yield show(c.test.args[0])


def _rounded(n: Node, names: dict[str, Roundings]) -> Roundings | None:
    """The most roundings of a term in an expression. An open body rounds the same on both sides."""
    if isinstance(n, Num):
        return Counter()
    if isinstance(n, Var):
        return names.get(n.name, Counter())
    if n.fn in PRIMITIVES and n.fn not in _FREE | _LINEAR:
        return None
    parts = [_rounded(a, names) for a in n.args]
    if any(p is None for p in parts):
        return None
    found = [p for p in parts if p is not None]
    if n.fn == "mul":
        return sum(found, Counter[str]()) + Counter({"": 1})
    most = max(found, key=lambda p: (sum(v for k, v in p.items() if k), p[""]), default=Counter[str]())
    out = Counter(most)
    for p in found:
        for k, v in p.items():
            out[k] = max(out[k], v)
    out[""] += n.fn in _LINEAR
    return out
