"""Views compose into their readers: a chain of transposes, reshapes and slices becomes one projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tapestry.ir.graph import Block, Graph, Guard, Read, placed
from tapestry.ir.index import Ranges
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.edit import MOST_ATOMS, is_view, merge_reads, substitute_read, too_long
from tapestry.rewrites.core.inline import limits
from tapestry.rewrites.core.matching import Draft, Match, PairRule
from tapestry.rewrites.core.rule import Refusal, left_out, refuse, register


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
    env = placed(view.dims, read.index)
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
