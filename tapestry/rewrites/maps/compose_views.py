"""Views compose into their readers: a chain of transposes, reshapes and slices becomes one projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph, Guard, Read, with_ops
from tapestry.ir.index import Aff, Ranges, const, span
from tapestry.rewrites.core.edit import MOST_ATOMS, is_view, merge_reads, substitute_read, too_long
from tapestry.rewrites.core.rule import Move, Refusal, Rule, register


@register
class ComposeViews(Rule):
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

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """One move per operation and view that it reads."""
        views = {op.outs[0]: op for op in graph.ops if is_view(op)}
        for op in graph.ops:
            if not isinstance(op, Block):
                continue
            for t in op.inputs:
                if t in views:
                    _, reason = _through(op, views, graph, {t})
                    yield Refusal(self.name, op.outs[0], reason) if reason else Move(self.name, op.outs[0], (("tensor", t),))

    def apply(self, graph: Graph, move: Move) -> Graph:
        """Compose one view into one reader."""
        at = graph.find(move.at)
        op = graph.ops[at] if at >= 0 else None
        views = {o.outs[0]: o for o in graph.ops if is_view(o)}
        if not isinstance(op, Block) or move.text("tensor") not in views:
            raise TapestryError("no view to compose there", where=str(move))
        new, reason = _through(op, views, graph, {move.text("tensor")})
        if reason:
            raise TapestryError(reason, where=str(move))
        return with_ops(graph, (*graph.ops[:at], new, *graph.ops[at + 1 :]))

    def sweep(self, graph: Graph) -> Graph:
        """Compose every view, in one pass: views come before their readers, already composed themselves."""
        views: dict[str, Block] = {}
        ops = list(graph.ops)
        for i, op in enumerate(ops):
            if isinstance(op, Block):
                if any(r.tensor in views for r in op.reads):
                    for t in op.inputs:
                        if t in views:
                            op, _ = _through(op, views, graph, {t})
                    ops[i] = op
                if is_view(op):
                    views[op.outs[0]] = op
        return with_ops(graph, tuple(ops))


def _through(op: Block, views: dict[str, Block], graph: Graph, tensors: set[str]) -> tuple[Block, str]:
    """The operation reading through some views, or unchanged with the reason why not."""
    reads: list[Read] = []
    for r in op.reads:
        if r.tensor not in tensors:
            reads.append(r)
            continue
        composed = compose(r, views[r.tensor], graph, op.ranges)
        if composed is None:
            return op, f"'{r.tensor}' and its reader fill in cells with different values"
        if too_long(composed, r, views[r.tensor].reads[0]):
            return op, f"through '{r.tensor}' the projection would have more than {MOST_ATOMS} terms"
        reads.append(composed)
    return merge_reads(replace(op, reads=tuple(reads))), ""


def compose(read: Read, view: Block, graph: Graph, ranges: Ranges) -> Read | None:
    """The read of a view's result as a read of what the view reads; ``None`` when it cannot be said in one read."""
    inner = view.reads[0]
    both = read.other is not None and inner.other is not None
    if both and repr(read.other) != repr(inner.other):
        return None
    env = dict(zip((d.name for d in view.dims), read.index, strict=True))
    through = substitute_read(inner, env, ranges)
    when = list(read.when + through.when)
    if read.other is not None:
        shape = graph.tensors[read.tensor].shape
        when += _kept_bounds(read.index, shape, through.index, graph.tensors[inner.tensor].shape, ranges)
    other = read.other if read.other is not None else inner.other
    return replace(through, when=tuple(dict.fromkeys(when)), other=other)


def _kept_bounds(
    index: tuple[Aff, ...], shape: tuple[int, ...], through: tuple[Aff, ...], extents: tuple[int, ...], ranges: Ranges
) -> list[Guard]:
    """Bounds of the view's axes that the bounds of the tensor behind it do not imply."""
    out: list[Guard] = []
    for e, n in zip(index, shape, strict=True):
        lo, hi = span(e, ranges)
        if any(e == t and n == m for t, m in zip(through, extents, strict=True)):
            continue
        if lo < 0:
            out.append(Guard(e, "ge"))
        if hi >= n:
            out.append(Guard(const(n - 1) - e, "ge"))
    return out
