"""What a rewrite changed, as pairs of small graphs: the cone of a result before, and after, over the same inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tapestry.ir.graph import Block, Graph, Op, Opaque, Read, Rewrite
from tapestry.ir.syntax.printer import signature
from tapestry.verify.rewriting import normal_form

MOST_KEPT = 32  # operations that a rewrite leaves as they are, taken in to see that two of their results are one


@dataclass(frozen=True)
class Change:
    """A rewrite taken apart.

    Attributes:
        gone, come: the operations that went and those in their place, by what they write.
        kept: the others.
        needed: what the operations that went wrote, and others read or the graph returns.
        used: operations that were kept, and that a proof has looked at.
    """

    step: Rewrite
    gone: dict[str, Op]
    come: dict[str, Op]
    kept: dict[str, Op]
    needed: frozenset[str]
    used: dict[str, Op] = field(default_factory=dict[str, Op])

    @cached_property
    def places(self) -> tuple[dict[str, int], dict[str, int]]:
        """Where in the two graphs each tensor is made."""
        before, after = ({t: k for k, op in enumerate(g.ops) for t in op.outs} for g in (self.step.before, self.step.after))
        return before, after

    @classmethod
    def of(cls, step: Rewrite) -> Change:
        """The change, found by comparing the graphs."""
        there, now = ({id(op) for op in g.ops} for g in (step.before, step.after))
        old = {op.outs: op for op in step.before.ops if id(op) not in now}
        new = {op.outs: op for op in step.after.ops if id(op) not in there}
        same = {outs for outs, op in new.items() if old.get(outs) == op}
        gone = {t: op for outs, op in old.items() if outs not in same for t in outs}
        come = {t: op for outs, op in new.items() if outs not in same for t in outs}
        kept = {t: op for op in step.before.ops for t in op.outs if t not in gone}
        read = {*step.before.outputs, *step.after.outputs} | {t for op in kept.values() for t in op.inputs}
        return cls(step, gone, come, kept, frozenset(t for t in gone if t in read))

    def cones(self, old: str, new: str, cuts: Collection[str]) -> Iterator[tuple[Graph, Graph]]:
        """What two tensors are made by, before and after, back to tensors that are cut or of operations that were kept.

        Where the two read different tensors, those are followed further back until they are the same, if they ever are; so are
        those that one reads elsewhere than the other. Each pair says the same if a wider one does not; where they might be the
        same further back than `MOST_KEPT` operations, the first one comes if it is one term, else nothing.
        """
        kept = dict[str, Op]()
        first = found = self._pair(old, new, kept, cuts)
        place, same = self.places[0], False
        for _ in range(MOST_KEPT):
            one, other = ({*g.inputs} for g in found)
            if one == other:
                same = True
                self.used.update(kept)
                yield found
                apart = [t for t in _read_otherwise(*found) if t in place]
            else:
                apart = [t for t in one ^ other if t in place] or [t for t in one | other if t in place]
            if not apart:
                break
            t = max(apart, key=lambda t: place[t])
            cuts = {*cuts} - {t}
            kept |= dict.fromkeys(self.kept[t].outs, self.kept[t]) if t in self.kept else {}
            found = self._pair(old, new, kept, cuts)
        else:
            same = same or not normal_form.equal(*first, real=False)  # they may read what the result does not need
        if not same:
            yield first

    def _pair(self, old: str, new: str, kept: dict[str, Op], cuts: Collection[str]) -> tuple[Graph, Graph]:
        return (
            _cone(self.step.before, kept, self.gone, self.places[0], old, cuts),
            _cone(self.step.after, kept, self.come, self.places[1], new, cuts),
        )


def _cone(
    graph: Graph,
    kept: Mapping[str, Op],
    makers: Mapping[str, Op],
    place: Mapping[str, int],
    target: str,
    cuts: Collection[str],
) -> Graph:
    found, ops, stack = set[str](), dict[str, Op](), [target]
    while stack:
        t = stack.pop()
        op = None if t in found or t in cuts else kept.get(t) or makers.get(t)
        if op is not None:
            ops[op.outs[0]] = op
            stack += op.inputs
        found.add(t)
    return region(graph, tuple(ops[t] for t in sorted(ops, key=lambda t: place[t])), (target,))


def region(graph: Graph, ops: tuple[Op, ...], outputs: tuple[str, ...]) -> Graph:
    """Some operations of a graph; what they read or give and do not make is given."""
    made = dict.fromkeys(t for op in ops for t in op.outs)
    seen = (*(t for op in ops for t in op.inputs), *outputs)
    inputs = tuple(dict.fromkeys(t for t in seen if t not in made))
    tensors = {t: graph.tensors[t] for t in (*inputs, *made)}
    return Graph(name="region", tensors=tensors, ops=ops, inputs=inputs, outputs=outputs)


def _read_otherwise(before: Graph, after: Graph) -> set[str]:
    """Inputs of which not the same places are read in both graphs, or not as often."""
    one, other = (
        Counter((r.tensor, r.index) if isinstance(r, Read) else (r, ()) for op in g.ops for r in _looks(op))
        for g in (before, after)
    )
    return {t for t, _ in (one - other) + (other - one)} & {*before.inputs}


def _looks(op: Op) -> tuple[Read | str, ...]:
    return op.reads if isinstance(op, Block) else op.ins


def without_names(before: Graph, after: Graph) -> tuple[object, ...]:
    """What two graphs over the same inputs say: equal for pairs that differ in names alone."""
    given = dict.fromkeys((*before.inputs, *after.inputs))
    return tuple(_unnamed(g, given) for g in (before, after))


def _unnamed(graph: Graph, given: Mapping[str, None]) -> tuple[object, ...]:
    number = {t: k for k, t in enumerate(dict.fromkeys((*given, *(t for op in graph.ops for t in op.outs))))}
    ops = (
        (signature(op, graph), op.opsets if isinstance(op, Opaque) else (), *(number[t] for t in (*op.inputs, *op.outs)))
        for op in graph.ops
    )
    return *ops, *(number[t] for t in graph.outputs)
