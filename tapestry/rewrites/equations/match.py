"""Finding the left-hand side of a rule in a graph.

An open tensor of a pattern is a *view*: ``x[i, m]`` matches any read (any projection, guards and fill included) that depends
on no dimension but i and m. An operation that another one of the pattern reads is *pulled back*: its dimensions are replaced
by what the reader's projection says, so that everything a match holds lies in one index space, that of the last operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tapestry.ir.expr import Acc, Arg, Call, Const, Expr, Index, Let, arg_positions, distinct, leaves, replaced
from tapestry.ir.graph import Block, Dim, Inner, Read, placed, shape_of
from tapestry.ir.index import Aff, Floor, const, dim, dims_of, substitute
from tapestry.ir.types import DTYPES
from tapestry.rewrites.core.edit import MOST_ATOMS, read_dims, substitute_expr, substitute_read, too_long
from tapestry.rewrites.core.matching import Draft
from tapestry.rewrites.core.rule import Refusal, refuse
from tapestry.rewrites.equations.bindings import HOLE, Bindings, Body, place
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
)

COMMUTATIVE = frozenset({"add", "mul", "min", "max", "eq", "ne", "and", "or", "xor"})


_NOTHING = Bindings()
_Reads = dict[str, tuple[int, ...]]  # alias → positions
_Found = tuple[_Reads, dict[str, Body]]
_At = tuple[int, Block, Bindings, Mapping[str, Aff]]  # position in the pattern, operation, match so far, where it is read


class Matcher:
    """Matches of one rule's left-hand side."""

    def __init__(self, rule: RuleText) -> None:
        self.before, self.alone, self.constants = rule.before, rule.alone, rule.constants
        self.makers = {o.name: k for k, p in enumerate(rule.before) for o in p.outs}
        self.root_dims = {d.name for d in (*rule.before[-1].dims, *rule.before[-1].reduce)}

    def fits(self, op: Block) -> bool:
        """Whether an operation may be the last one of the left-hand side, by what is seen at once."""
        return _similar(self.before[-1], op, _NOTHING)

    def at(self, draft: Draft, op: Block) -> Iterator[Bindings | Refusal]:
        """Every match whose last operation is ``op``, and near misses."""
        if self.fits(op) and next(self._chosen(draft, self.before[-1], op, _NOTHING), None) is not None:
            yield from self._op(draft, len(self.before) - 1, op, Bindings(ranges=op.ranges), {})

    def _op(self, draft: Draft, k: int, op: Block, m: Bindings, env: Mapping[str, Aff]) -> Iterator[Bindings | Refusal]:
        """Every match of one operation of the pattern, and of those before it; it may change ``m``."""
        p = self.before[k]
        chosen = list(self._chosen(draft, p, op, m)) if _similar(p, op, m) else []
        if not chosen:
            return
        if op.splits:
            yield refuse("an operation that is split already is not rewritten", str(op.splits[0]))
            return
        m.ops[k] = op
        if p.monoid and op.monoid != p.monoid:
            m.monoids[p.monoid] = op.monoid
        m.tensors |= {o.name: t for o, t in zip(p.outs, op.outs, strict=False)}
        for o, t in () if p.outs[0].many else zip(p.outs, op.outs, strict=True):
            if (
                draft.tensors[t].dtype if o.dtype in DTYPES else m.dtypes.setdefault(o.dtype, draft.tensors[t].dtype)
            ) != draft.tensors[t].dtype:
                return
        root = k == len(self.before) - 1
        for dims in self._dims(p, op, m, root):
            for tensors in chosen:
                results: list[Bindings | Refusal] = []
                for reads, bodies in self._expressions(k, op, dims, tensors, env):
                    results += self._reads(draft, k, op, dims, env, reads, bodies)
                if root:
                    results = [r if isinstance(r, Refusal) else self._settled(r) for r in results]
                matches = [r for r in results if isinstance(r, Bindings)]
                yield from matches or results[:1]  # factors may be taken in either order: one refusal says why none fits

    def _dims(self, p: OpPattern, op: Block, m: Bindings, root: bool) -> Iterator[Bindings]:
        """Bind the dimensions: of the last operation all, of others the reduced ones (already renamed) and the sizes."""
        for mapped in _assigned(p.dims, op.dims) if root or not any(d.name in self.root_dims for d in p.dims) else [{}]:
            for reduced in _assigned(p.reduce, op.reduce):
                out = m.copy()
                if all(_bind_sizes(out, pd, (mapped | reduced).get(pd.name)) for pd in (*p.dims, *p.reduce)):
                    for pd in (*(p.dims if root else ()), *p.reduce):
                        if pd.name in reduced or pd.name in mapped:
                            out.dims.setdefault(pd.name, (mapped | reduced)[pd.name])
                    yield out

    def _chosen(self, draft: Draft, p: OpPattern, op: Block, m: Bindings) -> Iterator[dict[str, str]]:
        """Tensors that stand for those that the pattern defines and this operation reads."""
        wanted = [r for r in p.reads if r.tensor in self.makers]
        made = [(t, maker) for t in reversed(op.inputs) if (maker := draft.maker(t))] if wanted else []
        options = [
            [
                t
                for t, maker in made
                if (r.tensor not in self.alone or draft.only_reader(t) is not None)
                and _similar(self.before[self.makers[r.tensor]], maker, m)
            ]
            for r in wanted
        ]
        for chosen in itertools.product(*options):
            if len(set(chosen)) == len(chosen):
                yield {r.alias: t for r, t in zip(wanted, chosen, strict=True)}

    def _expressions(
        self, k: int, op: Block, m: Bindings, chosen: Mapping[str, str], env: Mapping[str, Aff]
    ) -> Iterator[_Found]:
        """Bind aliases to reads and open bodies to expressions, by the body and what follows the reduction."""
        p = self.before[k]
        reads: _Reads = {a: tuple([i for i, r in enumerate(op.reads) if r.tensor == t]) for a, t in chosen.items()}
        found: list[_Found] = [(reads, {})]
        for patterns, exprs, whole in ((p.body, op.body, p.open_body), (p.then, op.then, p.open_then)):
            if whole:
                node = patterns[0]
                assert isinstance(node, App)
                whole_of = Body(k, (exprs,), node.args, op.inner if patterns is p.body else ())
                if closed_part(node):
                    found = [f for s in found for f in self._around((k, op, m, env), node, whole_of, s)]
                else:
                    found = [(a, b | {node.fn: whole_of}) for a, b in found]
            elif patterns:
                for pattern, e in zip(patterns, exprs, strict=True):
                    found = [f for s in found for f in self._unify((k, op, m, env), pattern, e, s)]
        for aliases, bodies in found:
            done = self._others(k, op, m, aliases, bodies)
            if done is not None:
                yield done, bodies

    def _around(self, at: _At, node: App, whole: Body, s: _Found) -> Iterator[_Found]:
        """Bind an open body around a closed term to what is around each of its places."""
        closed, (exprs,) = closed_part(node), whole.variants
        assert closed is not None
        for e in distinct(exprs):
            if isinstance(e, Call) and _alike(closed, e):
                hole = Acc(HOLE, e.dtype)
                rest = tuple(replaced(x, e, hole) for x in exprs)
                for reads, bodies in self._unify(at, closed, e, s):
                    yield reads, bodies | {node.fn: replace(whole, variants=(rest,))}

    def _unify(self, at: _At, p: Node, e: Expr, s: _Found) -> Iterator[_Found]:
        (k, op, m, env), (reads, bodies) = at, s
        if isinstance(p, Num):
            if isinstance(e, Const) and e.value == p.value and isinstance(p.value, bool) <= (e.dtype == "bool"):
                yield s
        elif isinstance(p, Var) and p.name in self.constants:
            if isinstance(e, Const) and isinstance(e.value, int) and bodies.get(p.name, e_ := Body(k, ((e,),), ())) == e_:
                yield reads, bodies | {p.name: e_}
        elif isinstance(p, Var):
            if isinstance(e, Acc) and p.name == f"acc{e.field}":
                yield s
            elif isinstance(e, Arg) and any(r.alias == p.name for r in self.before[k].reads):
                bound = reads.get(p.name)
                if bound is None or e.pos in bound or op.reads[bound[0]] == op.reads[e.pos]:
                    yield {**reads, p.name: (*(bound or ()), *(() if bound and e.pos in bound else (e.pos,)))}, bodies
        elif is_open(p):
            assert isinstance(p, App)
            new = Body(k, ((e,),), p.args)
            merged = any(isinstance(x, Let) for x in leaves((e,)))  # which stays with the operation that merges it
            if not merged and bodies.get(p.fn, new) == new:
                yield reads, bodies | {p.fn: new}
        elif p.fn == "index":
            if isinstance(e, Index) and (substitute(e.aff, env, m.ranges) if env else e.aff) == place(p.args[0], m):
                yield s
        elif isinstance(e, Call) and e.fn == p.fn and len(e.args) == len(p.args):
            for args in (p.args, p.args[::-1]) if p.fn in COMMUTATIVE else (p.args,):
                found = [s]
                for a, x in zip(args, e.args, strict=True):
                    found = [f for one in found for f in self._unify(at, a, x, one)]
                yield from found

    def _others(self, k: int, op: Block, m: Bindings, reads: _Reads, bodies: Mapping[str, Body]) -> _Reads | None:
        """The reads that no place in an expression binds: by name inside of open bodies, the rest to the group."""
        p = self.before[k]
        if any(map(closed_part, (*p.body, *p.then))):
            return self._used(p, k, reads, bodies)
        group = next((r for r in p.reads if r.many and r.alias not in reads), None)
        bound = {i for places in reads.values() for i in places}
        free = [i for i in range(len(op.reads)) if i not in bound]
        for r in p.reads:
            if not r.many and r.alias not in reads:
                allowed = None if group is None else _allowed(group.index, m)
                mine = [i for i in free if allowed is None or read_dims(op.reads[i]) - allowed]
                if not mine or any(repr(op.reads[i]) != repr(op.reads[mine[0]]) for i in mine):
                    return None  # (at the second one, as a rule, of thousands)
                reads, taken = {**reads, r.alias: tuple(mine)}, set(mine)
                free = [i for i in free if i not in taken]
        late = next((r for r in p.reads if r.many and r is not group and r.alias not in reads), None)
        if group is not None:
            early = arg_positions((*op.body, *(s.body for s in op.inner))) if late else frozenset(free)
            reads = {**reads, group.alias: tuple([i for i in free if i in early])}
            reads |= {late.alias: tuple([i for i in free if i not in early])} if late else {}
        elif free:
            return None
        for body in bodies.values():
            given = {i for a in body.params if isinstance(a, Var) for i in reads.get(a.name, ())}
            used: frozenset[int] = (
                arg_positions((*body.variants[0], *(s.body for s in body.inner))) if body.op == k else frozenset[int]()
            )
            accs = [x for x in leaves(body.variants[0]) if isinstance(x, Acc)]
            if used - given or (accs and not any(isinstance(a, Var) and a.name.startswith("acc") for a in body.params)):
                return None
        return reads

    def _used(self, p: OpPattern, k: int, reads: _Reads, bodies: Mapping[str, Body]) -> _Reads | None:
        """Where an open body is around a closed term: every group has the reads that the bodies it is given to use."""
        for r in p.reads:
            takers = [
                b for b in bodies.values() if b.op == k and any(isinstance(a, Var) and a.name == r.alias for a in b.params)
            ]
            if r.many:
                exprs = tuple(e for b in takers for e in (*b.variants[0], *(s.body for s in b.inner)))
                reads = {**reads, r.alias: tuple(sorted(arg_positions(exprs)))}
            elif r.alias not in reads:
                return None
        for b in bodies.values():
            states = {x.field for x in leaves(b.variants[0]) if isinstance(x, Acc)} - {HOLE} if b.op == k else set[int]()
            if states and not any(isinstance(a, Var) and a.name.startswith("acc") for a in b.params):
                return None
        return reads

    def _reads(
        self, draft: Draft, k: int, op: Block, m: Bindings, env: Mapping[str, Aff], reads: _Reads, bodies: dict[str, Body]
    ) -> Iterator[Bindings | Refusal]:
        """Pull the reads and bodies back, then match the operations that write what is read."""
        m = m.copy()
        p = self.before[k]
        ranges = m.ranges
        for name, body in bodies.items():
            variants, inner = body.variants, body.inner
            if name in self.constants:
                (literal,) = variants[0]
                assert isinstance(literal, Const)
                m.numbers[name] = int(literal.value)
                continue
            if env:
                variants = tuple(tuple(substitute_expr(e, env, ranges) for e in v) for v in variants)
                inner = tuple(
                    Inner(dims=_renamed(s.dims, env), monoid=s.monoid, body=substitute_expr(s.body, env, ranges)) for s in inner
                )
            old = m.bodies.get(name)
            if old is not None and old.op == k:  # the operation is read through one more projection
                m.bodies[name] = replace(old, variants=old.variants + variants)
            else:
                m.bodies[name] = replace(body, variants=variants, inner=inner)
        made: list[tuple[str, tuple[int, ...]]] = []
        for r in p.reads:
            m.places[k, r.alias] = reads[r.alias]
            if r.tensor in self.makers:
                made.append((r.tensor, reads[r.alias]))
                continue
            views: list[Read] = []
            for i in reads[r.alias]:
                moved = substitute_read(op.reads[i], env, ranges) if env else op.reads[i]
                if env and too_long(moved, op.reads[i]):
                    yield refuse(f"the projections would have more than {MOST_ATOMS} terms")
                    return
                views.append(moved)
            if m.views.setdefault(r.alias, tuple(views)) != tuple(views):
                return
        yield from self._makers(draft, k, op, m, env, made)

    def _makers(
        self, draft: Draft, k: int, op: Block, m: Bindings, env: Mapping[str, Aff], left: list[tuple[str, tuple[int, ...]]]
    ) -> Iterator[Bindings | Refusal]:
        if not left:
            yield m
            return
        (name, places), *rest = left
        pattern = next(r for r in self.before[k].reads if r.tensor == name)
        reads = list(dict.fromkeys(op.reads[i] for i in places))
        tensor = reads[0].tensor
        maker = draft.maker(tensor)
        assert maker is not None
        if any(r.other is not None for r in reads):
            yield refuse(f"'{tensor}' is read outside its cells, where it is not defined")
            return
        if len(reads) > 1 and not pattern.many:
            yield refuse(f"'{tensor}' is read through {len(reads)} projections: it would be computed for each")
            return
        if len(reads) > 1 and maker.reads:
            return
        m.variant |= {(k, i): reads.index(op.reads[i]) for i in places}
        found: list[Bindings | Refusal] = [m]
        for r in reads:
            found = [f for one in found if isinstance(one, Bindings) for f in self._pulled(draft, name, maker, one, r, env)]
        for f in found:
            if isinstance(f, Refusal):
                yield f
            else:
                yield from self._makers(draft, k, op, f, env, rest)

    def _pulled(
        self, draft: Draft, name: str, maker: Block, m: Bindings, read: Read, env: Mapping[str, Aff]
    ) -> Iterator[Bindings | Refusal]:
        """Match the operation that writes a tensor, as it is read by one projection; it changes ``m``."""
        k = self.makers[name]
        pattern = next(r for p in self.before[k:] for r in p.reads if r.tensor == name)
        index = substitute_read(read, env, m.ranges).index
        for n in pattern.index:
            if isinstance(n, App):
                m.maps[n.fn] = index
        # a group that two operations reduce is one: the second has the dimensions of the first
        shared = [d for q in self.before[k].reduce for d in m.dims.get(q.name, ())]
        alike = shape_of(shared) == shape_of(maker.reduce)
        rename = {old.name: new.name for old, new in zip(maker.reduce, shared, strict=True)} if alike else {}
        for d in (*maker.reduce, *maker.inner_dims):
            new = d.name
            while d.name not in rename and new in m.ranges:
                new += "_"
            m.ranges = m.ranges | {rename.setdefault(d.name, new): d.size}
        inside = placed(maker.dims, index)
        inside |= {a: dim(b) for a, b in rename.items()}
        reduce = tuple(Dim(rename[d.name], d.size) for d in maker.reduce)
        moved = replace(maker, reduce=reduce) if reduce != maker.reduce else maker
        for found in self._op(draft, k, moved, m, inside):
            if isinstance(found, Bindings):
                found.ops[k] = maker
            yield found

    def _settled(self, m: Bindings) -> Bindings | Refusal:
        """Share out dimensions among the groups that stand side by side, and hold every view to its dimensions."""
        for p in (self.before[-1],):
            for group, dims in ((p.dims, m.root.dims), (p.reduce, m.root.reduce)):
                if group and group[0].name not in m.dims and (miss := self._share(m, group, dims)):
                    return miss
        for k, p in enumerate(self.before):
            inner = {d.name for b in m.bodies.values() if b.op == k for s in b.inner for d in s.dims}
            for r in p.reads:
                if r.tensor in self.makers:
                    continue
                if not self._coarse(r, m):
                    return refuse(f"'{r.alias}' is not read by a quotient of the index")
                allowed = _allowed(r.index, m)
                for v in m.views[r.alias] if allowed is not None else ():
                    loose = read_dims(v) - (allowed or set()) - inner
                    if loose:
                        return refuse(f"'{v.tensor}' varies along '{min(loose)}'")
        return m

    def _coarse(self, r: ReadPattern, m: Bindings) -> bool:
        """Bind the divisors of a view ``x[h // Q]``: it depends on h by floor(h/Q) alone, for one Q."""
        for n in r.index:
            if not (isinstance(n, App) and n.fn == "floordiv" and isinstance(n.args[0], Var) and isinstance(n.args[1], Var)):
                continue
            (d,) = m.dims[n.args[0].name]
            found = {
                k
                for v in m.views[r.alias]
                for e in (*v.index, *(g.aff for g in v.when))
                for k in _divisors(e, d.name, m.ranges)
            }
            if len(found) != 1 or 0 in found or m.numbers.setdefault(n.args[1].name, min(found)) != min(found):
                return False
        return True

    def _share(self, m: Bindings, group: tuple[DimPattern, ...], dims: tuple[Dim, ...]) -> Refusal | None:
        mentioned = {g.name: {r.alias for p in self.before for r in p.reads if _mentions(r.index, g.name)} for g in group}
        shares: dict[str, list[Dim]] = {g.name: [] for g in group}
        for d in dims:
            users = {a for a, views in m.views.items() if any(d.name in read_dims(v) for v in views)}
            fitting = [g.name for g in group if users <= mentioned[g.name]]
            if not fitting:
                return refuse(f"'{d.name}' is a dimension of {', '.join(sorted(users))} at once")
            shares[min(fitting, key=lambda g: len(mentioned[g]))].append(d)
        for g in group:
            m.dims[g.name] = tuple(shares[g.name])
            if not (g.many or len(shares[g.name]) == 1) or not _bind_sizes(m, g, m.dims[g.name]):
                return refuse(f"'{g.name}' is {len(shares[g.name])} dimensions")
        return None


def _divisors(e: Aff, name: str, ranges: Mapping[str, int]) -> Iterator[int]:
    """By what a dimension is divided wherever it occurs in an index, beside unit dimensions; 0 for anything else."""
    for atom, _ in e.terms:
        if isinstance(atom, str):
            yield from (0,) if atom == name else ()
        elif name in dims_of(atom.arg):
            rest = substitute(atom.arg, {n: const(0) for n in dims_of(atom.arg) if ranges.get(n) == 1}, ranges)
            yield atom.div if isinstance(atom, Floor) and rest == dim(name) else 0


def _renamed(dims: tuple[Dim, ...], env: Mapping[str, Aff]) -> tuple[Dim, ...]:
    return tuple(Dim(str(env[d.name]) if d.name in env else d.name, d.size) for d in dims)


def _mentions(index: tuple[Node, ...], name: str) -> bool:
    return any(v.name == name for n in index for v in names_in(n))


def _allowed(index: tuple[Node, ...], m: Bindings) -> set[str] | None:
    """Dimensions that a view may depend on; ``None`` for any (it names dimensions of an operation read through a map)."""
    names = [v.name for n in index for v in names_in(n) if v.name not in m.numbers]
    if any(n not in m.dims for n in names):
        return None
    return {d.name for n in names for d in m.dims[n]}


def _similar(p: OpPattern, op: Block, m: Bindings) -> bool:
    """Whether an operation may have the form of a pattern, by what is seen at once."""
    if not p.outs[0].many and len(p.outs) != len(op.outs):
        return False
    if p.monoid in m.monoids:
        if op.monoid != m.monoids[p.monoid]:
            return False
    elif p.monoid and p.monoid[0].islower():
        if op.monoid != p.monoid:
            return False
    elif (op.monoid is None) != (not p.monoid) and not (p.monoid and all(d.many for d in p.reduce) and p.open_then):
        return False
    if not p.open_body and (op.inner or len(p.body) != len(op.body) or not all(map(_alike, p.body, op.body))):
        return False
    if not p.reads and op.reads:
        return False
    return not op.lowers if op.monoid and not p.then else p.open_then or len(p.then) == len(op.then)


def _alike(n: Node, e: Expr) -> bool:
    """Whether an expression may have the form of a term, by its outermost primitive."""
    return not isinstance(n, App) or is_open(n) or n.fn == "index" or (isinstance(e, Call) and e.fn == n.fn)


def _assigned(patterns: tuple[DimPattern, ...], dims: tuple[Dim, ...]) -> Iterator[dict[str, tuple[Dim, ...]]]:
    """Ways to give dimensions in order to patterns; nothing yet for groups side by side, which `Matcher` shares out."""
    if any(a.many and b.many for a, b in itertools.pairwise(patterns)):
        yield {}
    elif not patterns:
        if not dims:
            yield {}
    else:
        first, rest = patterns[0], patterns[1:]
        for n in range(len(dims) + 1) if first.many and rest else (len(dims),) if first.many else (1,):
            if n <= len(dims):
                for others in _assigned(rest, dims[n:]):
                    yield {first.name: dims[:n], **others}


def _bind_sizes(m: Bindings, p: DimPattern, dims: tuple[Dim, ...] | None) -> bool:
    sizes = None if dims is None else shape_of(dims)
    if sizes is None:
        return True
    if isinstance(p.size, Num):
        return sizes == (p.size.value,)
    return not isinstance(p.size, Var) or m.sizes.setdefault(p.size.name, sizes) == sizes
