"""A rule made of its text: find, apply, sweep and refusals all come from one match of the left-hand side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tapestry.ir.graph import Block, Graph
from tapestry.rewrites.core.matching import Accept, Candidate, Draft, Match, MatchRule, Params
from tapestry.rewrites.core.rule import Move, Refusal
from tapestry.rewrites.equations.bindings import Bindings
from tapestry.rewrites.equations.build import Written, replacements, write_right_side
from tapestry.rewrites.equations.conditions import Conditions
from tapestry.rewrites.equations.match import Matcher
from tapestry.rewrites.equations.pattern import RuleText


class Equation(MatchRule):
    """A rule whose text is ``rule``; `equation` makes one."""

    rule: ClassVar[RuleText]
    again = True

    def __init__(self) -> None:
        self.matcher = Matcher(self.rule)
        paths: dict[str, int] = {}  # the longest path of operations of the left-hand side that ends in each tensor
        for p in self.rule.before:
            paths |= {o.name: 1 + max((paths.get(r.tensor, 0) for r in p.reads), default=0) for o in p.outs}
        self._reach = paths[self.rule.before[-1].outs[0].name] - 1

    @property
    def reach(self) -> int:
        """See `MatchRule.reach`: the longest path in the left-hand side."""
        return self._reach

    def names_tensor(self, param: str) -> bool:
        """Whether a parameter of a move is a tensor, rather than a dimension or a number."""
        return any(p.name == param and p.target in self.matcher.makers for p in self.rule.params)

    def choose(self, graph: Graph, accept: Accept | None = None) -> tuple[Graph, list[Move]]:
        """As `MatchRule.choose`; a graph without an operation of the form of the left-hand side's last one is not looked at."""
        there = any(isinstance(op, Block) and self.matcher.fits(op) for op in graph.ops)
        return super().choose(graph, accept) if there else (graph, [])

    def candidates(self, draft: Draft, at: int, move: Move | None) -> Iterator[Candidate | Refusal]:
        """Every match of the left-hand side at an operation, refusals of those that are not legal.

        Without a move, only what pays is a candidate; with one, what has its parameters.
        """
        op = draft.block(at)
        given = {} if move is None else dict(move.params)
        numbers = {p.name: p.default if move is None else move.number(p.name) for p in self.rule.params if not p.target}
        for m in self.matcher.at(draft, op) if op is not None else ():
            if isinstance(m, Refusal):
                yield m
                continue
            m.numbers |= numbers
            written = Conditions(draft, m).failing(self.rule.when) or write_right_side(self.rule, m, draft.tensors)
            if isinstance(written, Refusal):
                yield written
                continue
            params = self._params(m)
            if all(given.get(k, v) == v for k, v in params) and (move is not None or self._pays(draft, m, written)):
                yield params, Match(replacements(draft, m, written), written.new)

    def _pays(self, draft: Draft, m: Bindings, written: Written) -> bool:
        return Conditions(draft, m, written.ops).failing(self.rule.pays) is None

    def _params(self, m: Bindings) -> Params:
        out: Params = ()
        for p in self.rule.params:
            if not p.target:
                out += ((p.name, m.numbers[p.name]),)
            else:
                out += ((p.name, m.dims[p.target][0].name if p.target in m.dims else m.tensors[p.target]),)
        return out
