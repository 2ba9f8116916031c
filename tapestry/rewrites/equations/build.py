"""Writing the right-hand side of a rule with what a match has bound."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tapestry.ir.expr import Acc, Arg, Expr, Index, call, cast, depth, leaves, number
from tapestry.ir.graph import Block, Dim, Inner, Op, Read, names_of, ranges_of
from tapestry.ir.index import Aff, dim, dims_of, span
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
from tapestry.rewrites.core.matching import Draft
from tapestry.rewrites.core.rule import Refusal, refuse
from tapestry.rewrites.equations.bindings import HOLE, Bindings, number_of, place
from tapestry.rewrites.equations.pattern import App, DimPattern, Node, Num, OpPattern, RuleText, Var


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
        self.ranges = ranges_of((*dims, *reduce, *(d for s in inner for d in s.dims)))
        for r in p.reads:
            self._read(r.alias, r.tensor, r.index)
        monoid = self.m.monoids.get(p.monoid, p.monoid) or None
        body = tuple(e for n in p.body for e in self._terms(n, ()))
        then = tuple(e for n in p.then for e in self._terms(n, body)) if monoid else ()
        out = merge_reads(
            Block(
                outs=outs,
                dims=dims,
                reduce=reduce,
                monoid=monoid,
                reads=tuple(self.projections),
                body=body,
                then=then,
                inner=self.inner,
                source=source,
            )
        )
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
        names = names_of(op.space)
        for r in op.reads:
            if read_dims(r) - names:
                return refuse(f"'{r.tensor}' varies along '{min(read_dims(r) - names)}'")
        kept = names_of(op.dims)
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
