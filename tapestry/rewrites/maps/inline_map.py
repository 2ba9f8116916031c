"""A map is computed where its readers need it, as often as they need it: prologues, masks, rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tapestry.errors import TapestryError
from tapestry.ir.expr import Arg, Call, Const, Expr, Index, call, count
from tapestry.ir.graph import Block, Graph, Guard, Op, Read, map_exprs, with_ops
from tapestry.ir.index import const, span
from tapestry.ir.monoid import number
from tapestry.ir.recognise.contraction import products
from tapestry.ir.recognise.running_state import as_scan
from tapestry.rewrites.core.edit import (
    MOST_ATOMS,
    MOST_DEPTH,
    merge_reads,
    read_dims,
    shift_args,
    substitute_expr,
    substitute_read,
    too_deep,
    too_long,
)
from tapestry.rewrites.core.rule import Move, Refusal, Rule, register
from tapestry.rewrites.core.tile_footprint import implied, recomputed
from tapestry.rewrites.partition.phases import windows

MOST_NODES = 120  # of one operation's expressions, after inlining
Accept = Callable[[Block, list[Block], list[Block]], bool]
"""Whether a map and its readers are worth replacing by readers that compute it themselves."""


@register
class InlineMap(Rule):
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

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """One move or refusal per map that block operations read."""
        readers = graph.consumers()
        for op in graph.ops:
            if isinstance(op, Block) and not op.monoid and op.outs[0] in readers:
                their = [graph.ops[i] for i in readers[op.outs[0]]]
                reason, witness = refuse(graph, op, their)
                yield Refusal(self.name, op.outs[0], reason, witness) if reason else Move(self.name, op.outs[0])

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Inline one map."""
        at = graph.producers().get(move.at, -1)
        where = graph.consumers().get(move.at, [])
        if at < 0 or not where:
            raise TapestryError("no operation computes this for others", where=str(move))
        op, their = graph.ops[at], [graph.ops[i] for i in where]
        reason, witness = refuse(graph, op, their)
        if reason:
            raise TapestryError(reason, where=str(move), why=witness)
        assert isinstance(op, Block)
        new = {i: inlined(graph, r, op) for i, r in zip(where, their, strict=True) if isinstance(r, Block)}
        return with_ops(graph, tuple(new.get(i, o) for i, o in enumerate(graph.ops) if i != at))

    def choose(self, graph: Graph, accept: Accept) -> tuple[Graph, list[Move]]:
        """Every map that is worth it, in one pass: makers come first, so that chains go all the way."""
        ops: list[Op | None] = list(graph.ops)
        readers, moves = graph.consumers(), list[Move]()
        for i, op in enumerate(graph.ops):
            op = ops[i]
            if not isinstance(op, Block) or op.monoid or op.outs[0] not in readers:
                continue
            where = readers[op.outs[0]]
            their = [o for o in (ops[j] for j in where) if o is not None]
            if refuse(graph, op, their)[0]:
                continue
            old = [o for o in their if isinstance(o, Block)]
            new = [inlined(graph, o, op) for o in old]
            if not accept(op, old, new):
                continue
            for j, o in zip(where, new, strict=True):
                ops[j] = o
            ops[i] = None
            for t in op.inputs:
                readers[t] = sorted({*readers[t], *where} - {i})
            moves.append(Move(self.name, op.outs[0]))
        return with_ops(graph, tuple(o for o in ops if o is not None)), moves


def refuse(graph: Graph, op: Op, readers: list[Op]) -> tuple[str, str]:
    """Why a map may not be computed by its readers ("" when it may), and a witness."""
    if not isinstance(op, Block) or op.monoid or len(op.outs) != 1 or op.splits:
        return "only a map with one result is computed by its readers", ""
    tensor = op.outs[0]
    if tensor in graph.outputs:
        return "it is an output of the graph", f"'{tensor}'"
    for r in readers:
        why = _refuses(graph, r, op)
        if why[0]:
            return why
    return "", ""


def _refuses(graph: Graph, reader: Op, op: Block) -> tuple[str, str]:
    if not isinstance(reader, Block) or reader.splits:
        return f"'{reader.outs[0]}' is opaque or split, and reads it as it is", ""
    at = {k for k, r in enumerate(reader.reads) if r.tensor == op.outs[0]}
    uses = count((*reader.point, *reader.then), lambda x: isinstance(x, Arg) and x.pos in at)
    nodes = count((*reader.point, *reader.then), lambda _: True)
    if nodes + uses * count(op.body[:1], lambda _: True) > MOST_NODES:
        return f"'{reader.outs[0]}' would grow too large", f"it has {nodes} nodes and uses it {uses} times"
    if too_deep((*reader.point, *reader.then), op.body[:1]):
        return f"'{reader.outs[0]}' would be nested too deeply", f"at most {MOST_DEPTH} calls inside each other"
    if any(_too_long(reader, op, reader.reads[k]) for k in at):
        return f"the projections of '{reader.outs[0]}' would have more than {MOST_ATOMS} terms", ""
    body = at & reader.body_reads()
    if not reader.monoid or not body:
        return "", ""
    if as_scan(reader):
        return f"'{reader.outs[0]}' is a running state of it", ""
    if any(w.tensor == op.outs[0] for d in reader.dims for w in windows(reader, d.name)):
        ratio = recomputed(reader, [reader.reads[k] for k in sorted(body)], graph.tensors[op.outs[0]].shape)
        return f"windows of '{reader.outs[0]}' overlap: it would be computed for each", f"{float(ratio):.3g} times"
    reduced = {d.name for d in reader.reduce}
    if not reader.inner and not products(reader) and any(read_dims(reader.reads[k]) & reduced for k in body):
        if isinstance(e := reader.body[0], Call) and e.fn == "where":
            return f"'{reader.outs[0]}' takes rows of it as a table", ""
        if len({reader.reads[k] for k in at}) > 1:
            return f"'{reader.outs[0]}' goes through it more than once", ""
    return "", ""


def _too_long(reader: Block, op: Block, read: Read) -> bool:
    env = dict(zip((d.name for d in op.dims), read.index, strict=True))
    return any(too_long(substitute_read(r, env, reader.ranges), r, read) for r in op.reads)


def inlined(graph: Graph, reader: Block, op: Block) -> Block:
    """The reader computing the map itself, once for each of its projections."""
    new = reader
    while (k := next((k for k, r in enumerate(new.reads) if r.tensor == op.outs[0]), None)) is not None:
        new = written_out(graph, new, op, k)
    return merge_reads(replace(new, source=tuple(dict.fromkeys(op.source + reader.source))))


def written_out(graph: Graph, reader: Block, op: Block, k: int) -> Block:
    """The reader with read number k replaced by the map's body; a value of its own outside the map's cells is kept."""
    read = reader.reads[k]
    env = dict(zip((d.name for d in op.dims), read.index, strict=True))
    inside = _inside(reader, read, graph.tensors[op.outs[0]].shape)
    moved = tuple(_kept(graph, substitute_read(r, env, reader.ranges), inside, reader) for r in op.reads)
    body = substitute_expr(op.body[0], env, reader.ranges, shift_args(len(reader.reads)))
    if inside and not _guarded(reader, k, inside):
        test = _test(inside)
        assert read.other is not None
        body = call("where", test, body, number(read.other, body.dtype))
    wide = replace(reader, reads=reader.reads + moved)
    new = map_exprs(wide, lambda e: substitute_expr(e, {}, reader.ranges, lambda x: body if x == Arg(k, body.dtype) else x))
    down: Callable[[Expr], Expr] = lambda x: replace(x, pos=x.pos - (x.pos > k)) if isinstance(x, Arg) else x  # noqa: E731
    dropped = replace(new, reads=new.reads[:k] + new.reads[k + 1 :])
    return map_exprs(dropped, lambda e: substitute_expr(e, {}, reader.ranges, down))


def _inside(reader: Block, read: Read, shape: tuple[int, ...]) -> list[Guard]:
    """When a guarded read finds a cell; nothing for one that always does."""
    if read.other is None:
        return []
    out: list[Guard] = []
    for e, n in zip(read.index, shape, strict=True):
        lo, hi = span(e, reader.ranges)
        out += [Guard(e, "ge")] if lo < 0 else []
        out += [Guard(const(n - 1) - e, "ge")] if hi >= n else []
    return list(dict.fromkeys([*out, *read.when]))


def _kept(graph: Graph, read: Read, inside: list[Guard], reader: Block) -> Read:
    """A read of the map, safe where the reader looks outside the map's cells; whatever it gives there."""
    spans = [span(e, reader.ranges) for e in read.index]
    tensor = graph.tensors[read.tensor]
    if not inside or all(lo >= 0 and hi < n for (lo, hi), n in zip(spans, tensor.shape, strict=True)):
        return read
    other = number(0, tensor.dtype).value if read.other is None else read.other
    return replace(read, when=tuple(dict.fromkeys([*read.when, *inside])), other=other)


def _test(inside: list[Guard]) -> Expr:
    tests = [call("ge" if g.op == "ge" else "eq", Index(g.aff), Const(0, "i64")) for g in inside]
    out: Expr = tests[0]
    for t in tests[1:]:
        out = call("and", out, t)
    return out


def _guarded(reader: Block, k: int, inside: list[Guard]) -> bool:
    """Whether the value of read k is used only where it finds a cell: under choices that imply it (asked of isl)."""

    def safe(e: Expr, known: tuple[Guard, ...]) -> bool:
        if isinstance(e, Arg):
            return e.pos != k or all(implied(reader, known, g) for g in inside)
        if not isinstance(e, Call):
            return True
        if e.fn == "where":
            yes, no = _conditions(e.args[0])
            return safe(e.args[0], known) and safe(e.args[1], (*known, *yes)) and safe(e.args[2], (*known, *no))
        return all(safe(a, known) for a in e.args)

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
    found = {"lt": less - 1, "le": less, "gt": more - 1, "ge": more}.get(test.fn)
    if found is None:
        return ((Guard(more, "eq"),), ()) if test.fn == "eq" else ((), ())
    return (Guard(found, "ge"),), (Guard(const(-1) - found, "ge"),)
