"""New equations for the book: small terms of equal values, proved, that the book does not derive, by what they save.

A candidate is a pair of terms with the same values in exact arithmetic (`tools.rulebook.term_rules`) of which one is less
work. It counts when it does not follow from those before it by replacing parts, when the prover for all sizes and ranks proves
it, when no three equations of the book in a row (nor of those found before it) lead from one side to the other, and when it
makes a region of some model cheaper on one device. It is then made as general as the prover and instances allow.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.syntax.printer import to_text
from tapestry.plan.algebra import Book
from tapestry.plan.solver.budget import Meter
from tapestry.plan.topology import Topology
from tapestry.rewrites.core.driver import rules_of, simplify
from tapestry.rewrites.core.rule import Move, register, rule_table
from tapestry.rewrites.equations import all_sizes
from tapestry.rewrites.equations.equation import Equation
from tapestry.rewrites.equations.instances import instance, proof_of, prove_moves
from tapestry.rewrites.equations.pattern import RuleText, parse_rules
from tapestry.rewrites.equations.rounding import rounding
from tapestry.rewrites.equations.rule_texts import WORDS, equation
from tapestry.tools.rulebook.small_terms import FAMILIES, REDUCTIONS, Enumeration, Family, Term, ordered, reduces, rewritten
from tapestry.tools.rulebook.term_rules import passes, rule_text
from tapestry.verify.rewriting import normal_form

OPERATIONS = 3  # of a term at most
TERMS = 12_000  # of a family, whose values are taken: about a second
LESS = 1.4  # by this factor one side of a candidate is less work than the other
STEPS, MOST_FORMS = 3, 400  # of the book in a row, and forms that they may lead to; where there are more, the candidate goes
UNITS = 4e9  # of work for the regions of one model


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What one equation alone saves on a model, by price on one device: seconds of the regions where it holds."""

    model: str
    before: float
    after: float
    places: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A new equation, most saved first; ``shown`` says on instances how many results by what evidence."""

    rule: RuleText
    family: str
    shown: Mapping[str, int]
    savings: tuple[Saving, ...]

    @property
    def title(self) -> str:
        """The equation as mathematics."""
        return self.rule.summary.removesuffix(".")

    @property
    def proof(self) -> str:
        """The kind of proof that it has beside the one at every place where it is applied."""
        return proof_of(self.rule)

    @property
    def rounding(self) -> str:
        """By how much its sides may differ."""
        return rounding(self.rule)


@dataclass(frozen=True, slots=True)
class _New:
    """An equation that the book does not derive, and both sides of an instance of it."""

    family: Family
    before: Term
    after: Term
    sides: tuple[Graph, Graph]


@dataclass(slots=True)
class Discovery:
    """The search for new equations.

    Attributes:
        corpus: models by name, simplified.
        topology: its first device prices.
        terms: of a family at most.
        without: rules of the book that are not there for it.
        counts: what became of all candidates.
    """

    corpus: Mapping[str, Graph]
    topology: Topology
    terms: int
    families: tuple[Family, ...] = FAMILIES
    without: frozenset[str] = frozenset()
    counts: Counter[str] = field(default_factory=Counter[str])

    def found(self) -> list[Found]:
        """All of them; those that save something on a model first, by how much."""
        new, table = dict[str, _New](), dict(rule_table())
        try:
            for name in self.without:
                rule_table().pop(name)
            for family in self.families:
                for before, after in self._candidates(family):
                    name = f"found_{len(new) + 1}"
                    sides = self._new(_rule(family, before, after, name))
                    if sides is not None:
                        new[name] = _New(family, before, after, sides)
            for name in list(new):
                rule = rule_table().pop(name)
                if any(derives(*sides) for sides in (new[name].sides, new[name].sides[::-1])):
                    del new[name]
                    self.counts["derived by others"] += 1
                else:
                    rule_table()[name] = rule
            self.counts["new"] = len(new)
            out = [self._made(name, found) for name, found in new.items()]
        finally:
            rule_table().clear()
            rule_table().update(table)
        return sorted(out, key=lambda f: -max((s.before - s.after for s in f.savings), default=0.0))

    def _candidates(self, family: Family) -> Iterator[tuple[Term, Term]]:
        """Pairs that are proved, the side of more work first, none an instance of those before."""
        known = list[tuple[Term, Term]]()
        enumeration = Enumeration(family, self.terms)
        for pair in enumeration.equations(OPERATIONS):
            before, after = sorted(pair, key=lambda t: -family.work(t))
            self.counts["equal values"] += 1
            if not _useful(family, before, after):
                continue
            self.counts["candidates"] += 1
            if ordered(rewritten(family, before, known)) == ordered(rewritten(family, after, known)):
                self.counts["instances of others"] += 1
            elif not all_sizes.proved(_rule(family, before, after, "found")):
                self.counts["not proved"] += 1
            else:
                known.append((before, after))
                yield before, after
        self.counts["terms"] += enumeration.tried

    def _new(self, text: RuleText) -> tuple[Graph, Graph] | None:
        """Both sides of an instance, where an equation holds and the book does not lead from one of them to the other.

        The equation is in the table of rules afterwards if so.
        """
        rule = equation(text)()
        for seed in range(20):
            graph = instance(text, np.random.default_rng(seed), small=True)
            move = None if graph is None else next((m for m in rule.find(graph) if isinstance(m, Move)), None)
            if graph is None or move is None:
                continue
            before, after = (replace(simplify(g), log=None) for g in (graph, rule.apply(graph, move)))
            if derives(before, after) or derives(after, before):
                self.counts["derived by the book"] += 1
                return None
            try:
                return (before, after) if _shown(text) else None
            except TapestryError:  # what one side reads, the other does not: NaN would be lost
                rule_table().pop(text.name, None)
                self.counts["refuted on instances"] += 1
                return None
        self.counts["not met"] += 1
        return None

    def _made(self, name: str, new: _New) -> Found:
        """The most general rule of those tried that is still proved, for all sizes and on instances."""
        texts, leaves = (repr(new.before), repr(new.after)), new.family.leaves
        once = [n for n in leaves if texts[0].count(repr((n,))) == 1 and texts[1].count(repr((n,))) <= 1]
        once.sort(key=lambda n: (-len(leaves[n]), n))
        for rest, leaf in itertools.product((True, False) if new.before[0] in REDUCTIONS else (False,), (*once, "")):
            try:
                text = _rule(new.family, new.before, new.after, name, leaf, rest)
                if all_sizes.proved(text) and (shown := _shown(text)):
                    return Found(rule=text, family=new.family.name, shown=shown, savings=self._savings(text))
            except TapestryError:  # no instance of so general a rule, or one that refutes it
                continue
        raise AssertionError("it was proved, and shown, as it was found")

    def _savings(self, text: RuleText) -> tuple[Saving, ...]:
        others = frozenset(r.name for r in rules_of("algebra") if r.name != text.name)
        out = list[Saving]()
        for model, graph in self.corpus.items():
            book = Book(topology=self.topology, meter=Meter(), units=UNITS, disabled=others)
            made = book.derivations(graph)
            if made:
                sides = (sum(d.before * d.places for d in made), sum(d.after * d.places for d in made))
                out.append(Saving(model=model, before=sides[0], after=sides[1], places=sum(d.places for d in made)))
        return tuple(sorted(out, key=lambda s: s.after - s.before))


def _rule(family: Family, before: Term, after: Term, name: str, opened: str = "", rest: bool = False) -> RuleText:
    (rule,) = parse_rules(rule_text(family, before, after, name, opened, rest=rest), family.name, WORDS)
    return rule


def _useful(family: Family, before: Term, after: Term) -> bool:
    """Whether a pair can be a rule that makes less work of a reduction."""
    less = family.work(before) >= LESS * family.work(after) or passes(family, before) > passes(family, after)
    same = family.dims_of(before) == family.dims_of(after) and ordered(before) != ordered(after)
    bound = family.leaves_of(after) and family.leaves_of(after) <= family.leaves_of(before)
    return bool(less and same and bound and reduces(before))


def _shown(text: RuleText) -> Mapping[str, int]:
    """The evidence of a rule on instances; it stays in the table of rules.

    Raises:
        TapestryError: none meets its conditions, or it is refuted.
    """
    rule_table().pop(text.name, None)
    register(rule := equation(text))
    return dict(prove_moves(rule(), np.random.default_rng(0), enough=6).shown)


def derives(begin: Graph, end: Graph) -> bool:
    """Whether `STEPS` equations of the book in a row lead from one graph to another, up to views and the order of operands."""
    forms, seen = [begin], {to_text(begin)}
    rules = [r for r in rule_table().values() if isinstance(r, Equation) and r.phase in ("algebra", "request")]
    for step in range(STEPS + 1):
        later = list[Graph]()
        for graph in forms:
            if normal_form.equal(graph, end, real=False):
                return True
            for rule in rules if step < STEPS else ():
                for move in rule.find(graph):
                    new = _after_move(rule, graph, move) if isinstance(move, Move) else None
                    if new is not None and (text := to_text(new)) not in seen:
                        seen.add(text)
                        later.append(new)
            if len(seen) > MOST_FORMS:
                return True
        forms = later
    return False


def _after_move(rule: Equation, graph: Graph, move: Move) -> Graph | None:
    try:
        return replace(simplify(rule.apply(graph, move)), log=None)
    except TapestryError:
        return None
