"""A map is computed where its readers need it, as often as they need it: prologues, masks, rotary embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tapestry.ir.expr import Arg, Call, count, size
from tapestry.ir.graph import Block, Graph, Guard, Op, Read
from tapestry.ir.index import Ranges
from tapestry.ir.recognise import products
from tapestry.ir.states import as_scan
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.edit import (
    MOST_ATOMS,
    MOST_DEPTH,
    inline,
    is_view,
    limits,
    merge_reads,
    read_dims,
    recomputed,
    renamed,
    repeatable,
    substitute_read,
    too_deep,
    too_long,
)
from tapestry.rewrites.core.rule import Draft, Match, OpRule, PairRule, Refusal, left_out, refuse, register
from tapestry.rewrites.slice_strided import windows

MOST_NODES = 120  # of one operation's expressions, after inlining


@register
class InlineMap(OpRule):
    """Compute a map inside all of its readers, and nowhere else.

    Unlike `fuse_maps` it may compute cells more than once: for several readers, projections or tiles. So it is a choice.
    A reader that finds a value of its own outside the map's cells keeps it, unless it never looks there.

    before:
        graph g
        input x: f32[6]
        t: f32[3] = op [x0: 3]
          reads x[x0 + 3]
          body neg(x)
        y: f32[6] = op [x0: 6]
          reads t[x0] else 0.0, x[x0 - 3] else 0.0
          body where(lt(index(x0), 3), t, x)
        z: f32[2] = op [i: 2 | n: 3 sum]
          reads t[n], x[i]
          body t * x
        output y, z
    move: inline_map@t
    after:
        graph g
        input x: f32[6]
        y: f32[6] = op [x0: 6]
          reads x[x0 - 3] else 0.0, a1 = x[x0 + 3] when -x0 + 2 >= 0 else 0.0
          body where(lt(index(x0), 3), neg(a1), x)
        z: f32[2] = op [i: 2 | n: 3 sum]
          reads x[i], a1 = x[n + 3]
          body neg(a1) * x
        output y, z
    legal when: the map has one result, which is no output of the graph; every reader is a block operation that is not split,
    and does not look for its tensor along windows, rows of a table or a running state; expressions stay small.
    """

    name = "inline_map"
    phase = "fusion"
    nothing = "no map computes this for others"

    def match(self, draft: Draft, at: int) -> Match | Refusal | None:
        """The readers of a map, each of which computes it."""
        op = draft.block(at)
        if op is None or op.monoid or not (where := draft.readers_of(op.outs[0])):
            return None
        if len(op.outs) != 1 or op.splits:
            return refuse("only a map with one result is computed by its readers")
        if op.outs[0] in draft.outputs:
            return refuse("it is an output of the graph", f"'{op.outs[0]}'")
        new: dict[int, tuple[Op, ...]] = {at: ()}
        for i in where:
            reader = draft.op(i)
            assert reader is not None
            if no := _refused(draft, reader, op):
                return no
            new[i] = (_inlined(draft, reader, op),)
        return Match(new)


def _refused(draft: Draft, reader: Op, op: Block) -> Refusal | None:
    """Why a reader may not compute a map."""
    name = reader.outs[0]
    if not isinstance(reader, Block) or reader.splits:
        return refuse(f"'{name}' is opaque or split, and reads it as it is")
    at = {k for k, r in enumerate(reader.reads) if r.tensor == op.outs[0]}
    nodes = size((*reader.point, *reader.then))
    if nodes > MOST_NODES:
        return refuse(f"'{name}' would grow too large", f"it has {nodes} nodes")
    uses = count((*reader.point, *reader.then), lambda x: isinstance(x, Arg) and x.pos in at)
    if nodes + uses * size(op.body[:1]) > MOST_NODES:
        return refuse(f"'{name}' would grow too large", f"it has {nodes} nodes and uses it {uses} times")
    if too_deep((*reader.point, *reader.then), op.body[:1]):
        return refuse(f"'{name}' would be nested too deeply", f"at most {MOST_DEPTH} calls inside each other")
    if any(_too_long(reader, op, reader.reads[k]) for k in at):
        return refuse(f"the projections of '{name}' would have more than {MOST_ATOMS} terms")
    body = at & reader.body_reads()
    return _reduced_again(draft, reader, op, at, body) if reader.monoid and body else None


def _reduced_again(draft: Draft, reader: Block, op: Block, at: set[int], body: frozenset[int] | set[int]) -> Refusal | None:
    """Why a reduction may not compute a map that it reduces."""
    name = reader.outs[0]
    if as_scan(reader):
        return refuse(f"'{name}' is a running state of it")
    if any(w.tensor == op.outs[0] for d in reader.dims for w in windows(reader, d.name)):
        ratio = recomputed(reader, [reader.reads[k] for k in sorted(body)], draft.tensors[op.outs[0]].shape)
        return refuse(f"windows of '{name}' overlap: it would be computed for each", f"{float(ratio):.3g} times")
    reduced = {d.name for d in reader.reduce}
    if not reader.inner and not products(reader) and any(read_dims(reader.reads[k]) & reduced for k in body):
        if isinstance(e := reader.body[0], Call) and e.fn == "where":
            return refuse(f"'{name}' takes rows of it as a table")
        if len({reader.reads[k] for k in at}) > 1:
            return refuse(f"'{name}' goes through it more than once")
    return None


def _too_long(reader: Block, op: Block, read: Read) -> bool:
    env = dict(zip((d.name for d in op.dims), read.index, strict=True))
    return any(too_long(substitute_read(r, env, reader.ranges), r, read) for r in op.reads)


def _inlined(draft: Draft, reader: Op, op: Block) -> Block:
    """The reader computing the map itself, once for each of its projections."""
    assert isinstance(reader, Block)
    while (k := next((k for k, r in enumerate(reader.reads) if r.tensor == op.outs[0]), None)) is not None:
        reader = inline(reader, k, op, draft.tensors)
    return reader


# Common subexpressions and dead code.


@register
class Share(PairRule):
    """Compute equal operations once.

    before:
        graph g
        input x: f32[4]
        a: f32[4] = op [x0: 4]
          reads x[x0]
          body exp(x)
        b: f32[4] = op [x0: 4]
          reads x[x0]
          body exp(x)
        y: f32[4] = op [x0: 4]
          reads a[x0], b[x0]
          body a + b
        output y
    move: share@b{with=a}
    after:
        graph g
        input x: f32[4]
        a: f32[4] = op [x0: 4]
          reads x[x0]
          body exp(x)
        y: f32[4] = op [x0: 4]
          reads a[x0], a1 = a[x0]
          body a + a1
        output y
    legal when: both have the same index space, projections, body and inputs, and the second is not a graph output.
    """

    name = "share"
    phase = "simplify"
    second = "with"
    nothing = "the operations are not equal, or the second is an output"

    def partners(self, draft: Draft, at: int) -> Iterable[str]:
        """The first of the operations before that equal this one."""
        op = draft.op(at)
        if op is None:
            return ()
        similar = draft.memo.setdefault((type(op), op.inputs, op.dims), op.outs[0])
        if similar == op.outs[0] or (before := draft.op(draft.makers[similar])) is None:
            return ()  # whole texts are compared only of those that read the same
        draft.memo.setdefault(_key(before, draft.tensors), similar)
        first = draft.memo.setdefault(_key(op, draft.tensors), op.outs[0])
        return [first] if first != op.outs[0] else ()

    def match(self, draft: Draft, at: int, other: int) -> Match | Refusal | None:
        """The readers of the second operation, reading what the first one writes."""
        op, first = draft.op(at), draft.op(other)
        if op is None or first is None or _key(op, draft.tensors) != _key(first, draft.tensors):
            return None
        if draft.outputs & set(op.outs):
            return refuse("it is an output of the graph")
        rename = dict(zip(op.outs, first.outs, strict=True))
        where = sorted({i for t in op.outs for i in draft.readers_of(t)})
        return Match({at: ()} | {i: (renamed(o, rename),) for i in where if (o := draft.op(i)) is not None})


@register
class DropDead(OpRule):
    """Remove operations whose results nobody needs.

    before:
        graph g
        input x: f32[4]
        a: f32[4] = op [x0: 4]
          reads x[x0]
          body exp(x)
        y: f32[4] = op [x0: 4]
          reads x[x0]
          body neg(x)
        output y
    move: drop_dead@a
    after:
        graph g
        input x: f32[4]
        y: f32[4] = op [x0: 4]
          reads x[x0]
          body neg(x)
        output y
    legal when: no operation reads any of its results and none is an output of the graph.
    """

    name = "drop_dead"
    phase = "simplify"
    nothing = "its results are needed"
    backwards = True

    def match(self, draft: Draft, at: int) -> Match | Refusal | None:
        """Nothing in place of an operation without a reader."""
        op = draft.op(at)
        needed = op is None or any(draft.readers_of(t) or t in draft.outputs for t in op.outs)
        return None if needed else Match({at: ()})


def _key(op: Op, tensors: Mapping[str, Tensor]) -> str:
    """Everything of an operation but the names of its results and its nodes."""
    if isinstance(op, Block):
        types = [tensors[t].dtype for t in op.outs]
        return f"{types} {op.reads} {op.dims} {op.reduce} {op.monoid} {op.inner} {op.body} {op.then} {op.splits}"
    return repr(replace(op, outs=(), source=(), why="")) if repeatable(op) else f"{op.outs}"


# Results of an operation that nobody reads.


@register
class DropResults(OpRule):
    """Leave out the results of an operation that nobody reads, where it has others; the states behind them stay.

    before:
        graph g
        input x: f32[4, 6]
        a: f32[4], r: f32[4] = op [i: 4 | n: 6 moments]
          reads x[i, n]
          body 1.0, x, 0.0
          then acc1, 1.0 / sqrt((acc2 / acc0))
        output r
    move: drop_results@a
    after:
        graph g
        input x: f32[4, 6]
        r: f32[4] = op [i: 4 | n: 6 moments]
          reads x[i, n]
          body 1.0, x, 0.0
          then 1.0 / sqrt((acc2 / acc0))
        output r
    legal when: no operation reads the result, it is no output of the graph, and another result of the operation is needed.
    """

    name = "drop_results"
    phase = "simplify"
    nothing = "every result is needed, or none is"

    def match(self, draft: Draft, at: int) -> Match | Refusal | None:
        """The operation without the results that nobody reads."""
        op = draft.block(at)
        needed = [] if op is None else [k for k, t in enumerate(op.outs) if draft.readers_of(t) or t in draft.outputs]
        if op is None or not 0 < len(needed) < len(op.outs):
            return None
        less = replace(op, outs=tuple(op.outs[k] for k in needed))
        if op.monoid is None:
            return Match({at: (merge_reads(replace(less, body=tuple(op.body[k] for k in needed))),)})
        return Match({at: (merge_reads(replace(less, then=tuple(op.then[k] for k in needed))),)})


# Views compose into their readers: a chain of transposes, reshapes and slices becomes one projection.


@register
class ComposeViews(PairRule):
    """Read through a view instead of materialising it.

    before:
        graph g
        input x: f32[6, 4]
        input w: f32[6, 3]
        t: f32[4, 6] = op [x0: 4, x1: 6]
          reads x[x1, x0]
          body x
        y: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum]
          reads t[i, m], w[m, n]
          body t * w
        output y
    move: compose_views@y{tensor=t}
    after:
        graph g
        input x: f32[6, 4]
        input w: f32[6, 3]
        t: f32[4, 6] = op [x0: 4, x1: 6]
          reads x[x1, x0]
          body x
        y: f32[4, 3] = op [i: 4, n: 3 | m: 6 sum]
          reads x[m, i], w[m, n]
          body x * w
        output y
    legal when: the view and the read that looks through it do not both fill in cells with different values, and the
    projection stays short.
    """

    name = "compose_views"
    phase = "simplify"
    nothing = "no view to compose there"

    @property
    def reach(self) -> int:
        """See `MatchRule.reach`."""
        return 1

    def match(self, draft: Draft, at: int, other: int) -> Match | Refusal | None:
        """The operation with reads of a view as reads of what the view reads."""
        op, view = draft.block(at), draft.op(other)
        if op is None or view is None or not is_view(view):
            return None
        mine = [r for r in op.reads if r.tensor in view.outs]
        through = self._through(draft, op, mine, view)
        if isinstance(through, Refusal):
            return through
        left = iter(through)
        reads = tuple(next(left) if r.tensor in view.outs else r for r in op.reads)
        return Match({at: (merge_reads(replace(op, reads=reads)),)})

    def _through(self, draft: Draft, op: Block, reads: list[Read], view: Block) -> list[Read] | Refusal:
        """Reads of a view by an operation as reads of what the view reads."""
        out: list[Read] = []
        for r in reads:
            through = compose(r, view, draft.tensors, op.ranges)
            if through is None:
                return refuse(f"'{r.tensor}' and its reader fill in cells with different values")
            if too_long(through, r, view.reads[0]):
                return refuse(f"through '{r.tensor}' the projection would have more than {MOST_ATOMS} terms")
            out.append(through)
        return out

    def sweep(self, graph: Graph) -> Graph:
        """As `MatchRule.sweep`, but an operation that reads many views is made anew once, not for each of them."""
        draft, changed = Draft(graph), False
        for at in range(len(graph.ops)):
            op = draft.block(at)
            if op is None or left_out(self.name, op.outs):
                continue
            reads = dict(enumerate(op.reads))
            places: dict[str, list[int]] = {}
            for k, r in reads.items():
                places.setdefault(r.tensor, []).append(k)
            for t in op.inputs:
                view, where = draft.maker(t), places[t]
                if view is None or not is_view(view):
                    continue
                through = self._through(draft, op, [reads[k] for k in where], view)
                if isinstance(through, list):
                    reads |= zip(where, through, strict=True)
                    places.setdefault(view.reads[0].tensor, []).extend(where)
            new = tuple(reads.values())
            if new != op.reads:
                draft.put(Match({at: (merge_reads(replace(op, reads=new)),)}))
                changed = True
        return (draft.graph() or graph) if changed else graph


def compose(read: Read, view: Block, tensors: Mapping[str, Tensor], ranges: Ranges) -> Read | None:
    """The read of a view's result as a read of what the view reads; ``None`` when it cannot be said in one read."""
    inner = view.reads[0]
    both = read.other is not None and inner.other is not None
    if both and repr(read.other) != repr(inner.other):
        return None
    env = dict(zip((d.name for d in view.dims), read.index, strict=True))
    through = substitute_read(inner, env, ranges)
    when = list(read.when + through.when)
    if read.other is not None:
        when += _bounds(read, view, through, tensors[inner.tensor].shape, ranges)
    other = read.other if read.other is not None else inner.other
    return replace(through, when=tuple(dict.fromkeys(when)), other=other)


def _bounds(read: Read, view: Block, through: Read, shape: tuple[int, ...], ranges: Ranges) -> list[Guard]:
    """Bounds of the view's axes that the bounds of the tensor behind it, of a shape, do not imply."""
    behind = list(zip(through.index, shape, strict=True))
    axes = [(e, d.size) for e, d in zip(read.index, view.dims, strict=True) if (e, d.size) not in behind]
    return limits([e for e, _ in axes], [n for _, n in axes], ranges)
