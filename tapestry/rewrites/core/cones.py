"""What rules see of an operation, as a number: operations of equal numbers are matched once, in whatever graph or layer.

A *cone* is an operation with those that it is made of, so many of them along a path, without the names of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tapestry.ir.graph import Graph, Op, Opaque
from tapestry.rewrites.core.matching import Draft, MatchRule
from tapestry.rewrites.core.rule import Rule

Cone = tuple[object, ...]


@dataclass(slots=True)
class Cones:
    """Numbers of operations, and at which cones which rules have nothing to do; for many graphs."""

    _looks: dict[int, tuple[Op, int]] = field(default_factory=dict[int, tuple[Op, int]])  # by identity, which it keeps
    _numbers: dict[object, int] = field(default_factory=dict[object, int])
    _idle: dict[str, set[Cone]] = field(default_factory=dict[str, set[Cone]])
    _last: tuple[Graph, Draft] | None = None
    _every: dict[int, list[Cone]] = field(default_factory=dict[int, list[Cone]])  # the cones of the last graph, by reach

    def look(self, op: Op) -> int:
        """A number for all of an operation but names of tensors and nodes."""
        found = self._looks.get(id(op))
        if found is None:
            found = op, self._numbers.setdefault(_bare(op), len(self._numbers))
            self._looks[id(op)] = found
        return found[1]

    def at(self, draft: Draft, op: Op, reach: int) -> tuple[Cone, list[str]]:
        """The cone of an operation, and its tensors in the order in which the cone has them."""
        names, parts, layer = dict[str, int](), list[object](), [op]
        for depth in range(reach + 1):
            makers = dict[str, Op]()
            for o in layer:
                parts.append(self.look(o))
                for t in (*_tensors_read(o), *o.outs):
                    if t in names:
                        parts.append(names[t])
                        continue
                    names[t] = len(names)
                    x, inside = draft.tensors.get(t), t not in op.outs and (depth < reach or t in o.outs)
                    maker = draft.maker(t) if inside else None
                    parts.append((x and (x.dtype, x.shape), maker is not None, inside and draft.only_reader(t) is not None))
                    if maker is not None and maker is not o:
                        makers.setdefault(maker.outs[0], maker)
            layer = list(makers.values())
        return tuple(parts), list(names)

    def key(self, graph: Graph) -> Cone:
        """A graph with the names of its tensors, without those of its nodes."""
        return tuple((self.look(op), *_tensors_read(op), *op.outs) for op in graph.ops)

    def draft(self, graph: Graph) -> Draft:
        """A graph as rules read it; the last one is kept."""
        if self._last is None or self._last[0] is not graph:
            self._last = graph, Draft(graph)
            self._every.clear()
        return self._last[1]

    def idle(self, rule: Rule, graph: Graph) -> bool:
        """Whether a rule is known to change nothing in a graph."""
        known = self._idle.get(rule.name)
        return known is not None and known.issuperset(self._cones(rule, graph))

    def note_idle(self, rule: Rule, graph: Graph) -> None:
        """Remember that a rule changed nothing in a graph."""
        if isinstance(rule, MatchRule) and rule.reach is not None:
            self._idle.setdefault(rule.name, set()).update(self._cones(rule, graph))

    def _cones(self, rule: Rule, graph: Graph) -> list[Cone]:
        draft, reach = self.draft(graph), (rule.reach if isinstance(rule, MatchRule) else None) or 0
        if reach not in self._every:
            self._every[reach] = [self.at(draft, op, reach)[0] for op in graph.ops]
        return self._every[reach]


def _tensors_read(op: Op) -> tuple[str, ...]:
    return op.ins if isinstance(op, Opaque) else tuple(r.tensor for r in op.reads)


def _bare(op: Op) -> object:
    if isinstance(op, Opaque):
        return replace(op, outs=(), ins=(), source=(), why="")
    reads = tuple((r.index, r.when, r.other) for r in op.reads)
    return op.dims, op.reduce, op.monoid, reads, op.body, op.then, op.inner, op.splits, len(op.outs)
