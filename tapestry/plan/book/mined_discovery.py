"""New equations whose left-hand sides occur: terms of arithmetic out of graphs, equal terms that are less work, proved.

What is mined (`mined_terms`) has an equal term of less work (`cheaper_terms`) or has none. An equation is kept where the prover
for all sizes proves it, instances show it, three equations of the book in a row lead from neither side to the other, and a
graph becomes cheaper by it, by price on one device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph
from tapestry.plan.book.algebra import Book
from tapestry.plan.book.cheaper_terms import Cheaper
from tapestry.plan.book.discovery import UNITS, Saving, derives
from tapestry.plan.book.mined_terms import Mined, general, mined, parts
from tapestry.plan.book.point_rules import texts
from tapestry.plan.solver.budget import Meter
from tapestry.plan.topology import Topology
from tapestry.rewrites.core.driver import rules_of, simplify
from tapestry.rewrites.core.rule import RULES, Move, register
from tapestry.rewrites.equations import all_sizes
from tapestry.rewrites.equations.equation import Equation
from tapestry.rewrites.equations.instances import instance, proof_of, prove
from tapestry.rewrites.equations.pattern import RuleText, parse_rules
from tapestry.rewrites.equations.rounding import rounding
from tapestry.rewrites.equations.rule_texts import WORDS, equation
from tapestry.rewrites.equations.small_terms import Term
from tapestry.rewrites.equations.term_rules import shown

ENOUGH, SEEDS = 6, 20  # instances that an equation is shown on, and drawings of one for what the book derives
PAYS = 0.9995  # of a region's price, under which an equation saves something there
MODELS = 2  # in which a left-hand side is computed at most points, whose savings are priced


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An equation at one kind of place: its text, the proof and rounding, evidence on instances, and savings, most first."""

    where: str
    text: RuleText
    shown: Mapping[str, int]
    savings: tuple[Saving, ...]

    @property
    def proof(self) -> str:
        """The kind of proof."""
        return proof_of(self.text)

    @property
    def rounding(self) -> str:
        """By how much its sides may differ."""
        return rounding(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurring:
    """A new equation; ``points`` says at how many points each graph computes its left-hand side."""

    before: Term
    after: Term
    points: Mapping[str, int]
    rules: tuple[Rule, ...]

    @property
    def title(self) -> str:
        """The equation as mathematics."""
        return f"{shown(self.before)} = {shown(self.after)}"

    @property
    def best(self) -> Saving | None:
        """Where it saves most."""
        return min((s for r in self.rules for s in r.savings), key=lambda s: s.after - s.before, default=None)


@dataclass(slots=True)
class MinedDiscovery:
    """The search.

    Attributes:
        corpus: graphs by name, simplified.
        counts: what became of all left-hand sides.
    """

    corpus: Mapping[str, Graph]
    topology: Topology
    counts: Counter[str] = field(default_factory=Counter[str])

    def found(self) -> Iterator[Occurring]:
        """All equations that save something; first those whose left-hand sides are computed at most points."""
        sides: dict[Mined, Counter[str]] = defaultdict(Counter[str])
        for name, graph in self.corpus.items():
            for m, points in mined(graph):
                sides[m][name] += points
        for m in list(sides):
            sides[general(m)] += sides[m] if general(m) != m else Counter[str]()
        self.counts["left-hand sides"] = len(sides)
        less = {m: (after, gain) for m in sides for after, gain in self._less(m)}
        for m, (after, gain) in sorted(less.items(), key=lambda s: (-sum(sides[s[0]].values()), repr(s[0]))):
            if any(
                o != m and less.get(o, (after, 0))[1] >= gain and len(o.whole) == len(m.whole) for o in (general(m), *parts(m))
            ):
                self.counts["instances of others"] += 1
                continue
            self.counts["candidates"] += 1
            new = Occurring(before=m.term, after=after, points=sides[m], rules=tuple(self._rules(m, after, sides[m])))
            if new.best:
                self.counts["new"] += 1
                yield new

    def _less(self, m: Mined) -> Iterator[tuple[Term, int]]:
        """The equal term of least work, and by how many operations at all points it is less; none where there is none."""
        search = Cheaper(m)
        after = search.found()
        self.counts["terms"] += search.tried
        if after is None or not search.gain(after):
            self.counts["no equal term is less work"] += 1
        else:
            yield after, search.gain(after)

    def _rules(self, m: Mined, after: Term, points: Counter[str]) -> Iterator[Rule]:
        """The equation at all kinds of places, where it is proved and new."""
        made: list[Rule] = []
        for where, text in texts(m, after, f"mined_{self.counts['candidates']}"):
            try:
                (rule,) = parse_rules(text, "mined", WORDS)
                if not all_sizes.proved(rule):
                    self.counts["not proved"] += 1
                    return
                register(equation(rule))
                of = RULES[rule.name]
                assert isinstance(of, Equation)
                savings = tuple(self._savings(rule.name, [n for n, _ in points.most_common(MODELS)]))
                if not savings:
                    self.counts[f"{where}: no region is cheaper"] += 1
                    continue
                if not made and self._derived(of):
                    self.counts["derived by the book"] += 1
                    return
                evidence = dict(prove(of, np.random.default_rng(0), enough=ENOUGH).shown)
                made.append(Rule(where=where, text=rule, shown=evidence, savings=savings))
            except TapestryError:
                self.counts["refuted on instances, or not met"] += 1
                return
            finally:
                RULES.pop(text.split()[1], None)
        yield from made

    def _derived(self, rule: Equation) -> bool:
        for seed in range(SEEDS):
            graph = instance(rule.rule, np.random.default_rng(seed), small=True)
            move = None if graph is None else next((x for x in rule.find(graph) if isinstance(x, Move)), None)
            if graph is not None and move is not None:
                before, after = (replace(simplify(g), log=None) for g in (graph, rule.apply(graph, move)))
                RULES.pop(rule.name)
                try:
                    return derives(before, after) or derives(after, before)
                finally:
                    RULES[rule.name] = rule
        return False

    def _savings(self, name: str, models: list[str]) -> Iterator[Saving]:
        others = frozenset(r.name for r in rules_of("algebra") if r.name != name)
        for model in models:
            book = Book(topology=self.topology, meter=Meter(), units=UNITS, disabled=others, pays=PAYS)
            made = book.derivations(self.corpus[model])
            if made:
                sides = (sum(d.before * d.places for d in made), sum(d.after * d.places for d in made))
                yield Saving(model=model, before=sides[0], after=sides[1], places=sum(d.places for d in made))
