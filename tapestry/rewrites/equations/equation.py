"""A rule made of its text: find, apply, sweep and refusals all come from one match of the left-hand side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph, Op, with_ops
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.rule import Move, Param, Refusal, Rule
from tapestry.rewrites.equations.build import Written, swapped, write
from tapestry.rewrites.equations.conditions import Conditions
from tapestry.rewrites.equations.match import Match, Matcher, Miss, Surroundings
from tapestry.rewrites.equations.pattern import RuleText


class Equation(Rule):
    """A rule whose text is ``rule``; `equation` makes one."""

    rule: ClassVar[RuleText]

    def __init__(self) -> None:
        self.matcher = Matcher(self.rule)

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """A move wherever the left-hand side matches and pays, and a refusal wherever it matches but is not legal."""
        around = Surroundings(graph)
        for op in graph.ops:
            given: set[Move] = set()
            for found in self._candidates(around, op, {}):
                if isinstance(found, Refusal):
                    yield found
                elif (move := found[0]) not in given and self._pays(around, *found[1:]):
                    given.add(move)
                    yield move

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with the right-hand side in place of the left.

        Raises:
            TapestryError: the move is not legal here; the message says what does not hold.
        """
        at = graph.find(move.at)
        if at < 0:
            raise TapestryError(f"no operation writes '{move.at}'", where=str(move))
        around, given = Surroundings(graph), dict(move.params)
        numbers = {p.name: move.number(p.name) for p in self.rule.params if not p.target}
        refusal: Refusal | None = None
        for found in self._candidates(around, graph.ops[at], numbers):
            if isinstance(found, Refusal):
                refusal = refusal or found
            elif all(given.get(k, v) == v for k, v in found[0].params):
                return _put(graph, around, *found[1:])
        reason = refusal.reason if refusal else f"this is not {self.rule.form or f'the left-hand side of {self.name}'}"
        raise TapestryError(reason, where=str(move), why=refusal.witness if refusal else "")

    def sweep(self, graph: Graph) -> Graph:
        """Apply every move in one pass over the operations in order."""
        around = Surroundings(graph)
        slots: list[tuple[Op, ...]] = [(op,) for op in graph.ops]
        home = {id(op): i for i, op in enumerate(graph.ops)}
        alive: list[Op] = []  # so that no operation takes over the id of one that went
        new: list[Tensor] = []
        for root in graph.ops:
            op = root
            while (match := self._first(around, op)) is not None:
                m, written = match
                for old, ops in swapped(m, written):
                    if ops or not around.needed(old):
                        i = home[id(old)]
                        slots[i] = tuple(n for o in slots[i] for n in (ops if o is old else (o,)))
                        home |= {id(n): i for n in ops}
                        around.swap((old,), ops, written.new)
                alive += [op, *written.ops]
                new += written.new
                op = written.ops[-1]
        return with_ops(graph, tuple(op for slot in slots for op in slot), tuple(new)) if alive else graph

    def _first(self, around: Surroundings, op: Op) -> tuple[Match, Written] | None:
        for found in self._candidates(around, op, {}):
            if not isinstance(found, Refusal) and self._pays(around, *found[1:]):
                return found[1:]
        return None

    def _pays(self, around: Surroundings, m: Match, written: Written) -> bool:
        return Conditions(around, m, written.ops).failing(self.rule.pays) is None

    def _candidates(
        self, around: Surroundings, op: Op, numbers: dict[str, int]
    ) -> Iterator[tuple[Move, Match, Written] | Refusal]:
        """Every match at an operation that may be rewritten, with the move and what it writes; refusals of the others."""
        for m in self.matcher.at(around, op):
            if isinstance(m, Miss):
                yield Refusal(self.name, op.outs[0], m.reason, m.witness)
                continue
            m.numbers |= {p.name: numbers.get(p.name, p.default) for p in self.rule.params if not p.target}
            miss = Conditions(around, m).failing(self.rule.when)
            written = write(self.rule, m, around.tensors) if miss is None else miss
            if isinstance(written, Miss):
                yield Refusal(self.name, op.outs[0], written.reason, written.witness)
            else:
                yield Move(self.name, op.outs[0], self._params(m)), m, written

    def _params(self, m: Match) -> tuple[tuple[str, Param], ...]:
        out: list[tuple[str, Param]] = []
        for p in self.rule.params:
            if not p.target:
                out.append((p.name, m.numbers[p.name]))
            else:
                out.append((p.name, m.dims[p.target][0].name if p.target in m.dims else m.tensors[p.target]))
        return tuple(out)


def _put(graph: Graph, around: Surroundings, m: Match, written: Written) -> Graph:
    """The graph with what is written; an operation of the left-hand side that is still read stays."""
    slots: dict[int, tuple[Op, ...]] = {}
    for old, ops in swapped(m, written):
        if ops or not around.needed(old):
            slots[id(old)] = ops
            around.swap((old,), ops, written.new)
    return with_ops(graph, tuple(o for op in graph.ops for o in slots.get(id(op), (op,))), written.new)
