"""A map is computed where its readers need it, as often as they need it: prologues, masks, rotary embeddings."""

from __future__ import annotations

from tapestry.ir.expr import Arg, Call, count, size
from tapestry.ir.graph import Block, Op, Read, names_of, placed
from tapestry.ir.recognition.contraction import products
from tapestry.ir.recognition.running_state import as_scan
from tapestry.rewrites.core.edit import MOST_ATOMS, MOST_DEPTH, read_dims, substitute_read, too_deep, too_long
from tapestry.rewrites.core.inline import inline
from tapestry.rewrites.core.matching import Draft, Match, OpRule
from tapestry.rewrites.core.rule import Refusal, refuse, register
from tapestry.rewrites.core.tile_footprint import recomputed
from tapestry.rewrites.splitting.phases import windows

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
    reduced = names_of(reader.reduce)
    if not reader.inner and not products(reader) and any(read_dims(reader.reads[k]) & reduced for k in body):
        if isinstance(e := reader.body[0], Call) and e.fn == "where":
            return refuse(f"'{name}' takes rows of it as a table")
        if len({reader.reads[k] for k in at}) > 1:
            return refuse(f"'{name}' goes through it more than once")
    return None


def _too_long(reader: Block, op: Block, read: Read) -> bool:
    env = placed(op.dims, read.index)
    return any(too_long(substitute_read(r, env, reader.ranges), r, read) for r in op.reads)


def _inlined(draft: Draft, reader: Op, op: Block) -> Block:
    """The reader computing the map itself, once for each of its projections."""
    assert isinstance(reader, Block)
    while (k := next((k for k, r in enumerate(reader.reads) if r.tensor == op.outs[0]), None)) is not None:
        reader = inline(reader, k, op, draft.tensors)
    return reader
