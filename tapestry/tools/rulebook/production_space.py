"""The space of graphs that are equivalent to a small one, by production rules, each with what it costs in time and memory.

Rules are those of the book of equations and those that cut: a reduction into partial states and a tree of merges of any
fan-in (``matmul => sum``), what is done behind a reduction apart from it, strided and dilated windows into dense ones, a
dimension into parts that follow each other in time, and last a dimension over a mesh axis. Equations come first, as the search
of plans tries them; then forms are cut in the order in which they are found, until there are as many as were asked for.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tapestry.errors import TapestryError
from tapestry.ir.graph import Graph, reduced_names, with_ops
from tapestry.ir.syntax.printer import to_text
from tapestry.plan.algebra import LATER, WORSE, Book
from tapestry.plan.search.priced_plan import PricedPlan, peak, priced_plan
from tapestry.plan.search.problem import Problem, Tables, build
from tapestry.plan.topology import Topology
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.driver import SIMPLIFIED, rules_of, simplify
from tapestry.rewrites.core.rule import Move, Refusal, Sized, rule_table
from tapestry.rewrites.splitting.split import split_move, splittable
from tapestry.rewrites.splitting.split_time import time_move

TREES = ((2, 2), (4, 2), (4, 4))  # parts of a reduction, and fan-in of the merges
IN_TIME = 2  # parts
WAYS = 16  # of ending cut reductions of one form that are priced
SIMPLER = Move(SIMPLIFIED, "graph")


@dataclass(frozen=True, slots=True, kw_only=True)
class Production:
    """A form of the graph.

    Attributes:
        parent: the form that it was first made of; ``by``: by which move.
        moves: all moves from the graph as it was written.
        seconds, nbytes: simulated time, and what the fullest device holds at most.
    """

    number: int
    parent: int | None
    by: Move | None
    moves: tuple[Move, ...]
    depth: int
    graph: Graph
    seconds: float
    nbytes: int


@dataclass(slots=True, kw_only=True)
class ProductionSpace:
    """A search for forms.

    Attributes:
        topology: of the devices that forms are cut over, and that price them.
        most: forms after which no more is looked for.
        forms: those found; ``again``: (form, form, move) where a move leads to one that was there.
        pruned: why something was not followed, and how often.
    """

    topology: Topology
    book: Book
    most: int = 100
    forms: list[Production] = field(default_factory=list[Production])
    again: list[tuple[int, int, Move]] = field(default_factory=list[tuple[int, int, Move]])
    pruned: Counter[str] = field(default_factory=Counter[str])
    _tables: Tables = field(default_factory=Tables)

    def derive(self, graph: Graph) -> None:
        """Find the forms of a graph."""
        simple = replace(simplify(graph), log=None)
        first = () if simple.ops == graph.ops else (SIMPLER,)
        for f in self.book.forms(simple):  # equations first, the cheapest form followed first; then cuts
            parent = None if f.parent is None else self.forms[f.parent]
            steps = [s for m in f.moves for s in (m, SIMPLER)]
            self._add(parent, f.moves[-1] if f.moves else None, (*first, *steps), f.graph)
        numbers, queue = {_graph_key(f.graph): f.number for f in self.forms}, deque(self.forms)
        while queue:
            form = queue.popleft()
            for move in self._moves(form.graph):
                new = self._made(form.graph, move)
                if new is None:
                    continue
                number = numbers.setdefault(_graph_key(new), len(self.forms))
                if number < len(self.forms):
                    self.pruned["met before"] += 1
                    self.again += [(form.number, number, move)] if number != form.number else []
                elif number >= self.most:
                    del numbers[_graph_key(new)]
                    self.pruned[f"beyond {self.most} forms"] += 1
                else:
                    self._add(form, move, (*form.moves, move), new)
                    queue.extend(self.forms[-1:] if self._followed(self.forms[-1]) else ())

    def _add(self, parent: Production | None, by: Move | None, moves: tuple[Move, ...], graph: Graph) -> None:
        plan, depth = self._priced(graph), 0 if parent is None else parent.depth + 1
        self.forms.append(
            Production(
                number=len(self.forms),
                parent=None if parent is None else parent.number,
                by=by,
                moves=moves,
                depth=depth,
                graph=graph,
                seconds=plan.objective,
                nbytes=peak(plan),
            )
        )

    def _followed(self, form: Production) -> bool:
        """Whether a form's own are looked for."""
        begin = self.forms[0]
        if form.seconds > WORSE * begin.seconds and form.nbytes >= begin.nbytes:
            self.pruned[f"slower than {WORSE} times the first, and no smaller"] += 1
            return False
        if form.depth >= LATER:
            self.pruned[f"more than {LATER} moves"] += 1
            return False
        return True

    def _moves(self, graph: Graph) -> Iterator[Move]:
        """Every production of a graph; of one that is cut over devices further cuts alone: what it is rewritten to is cut
        elsewhere."""
        for op in graph.ops:
            for d, axis in itertools.product(splittable(op), self.topology.mesh):
                if axis.size > 1:
                    yield split_move(op, d.name, axis.size, f"mesh.{axis.name}")
        if not any(op.splits for op in graph.ops):
            yield from self._rewrites(graph)
            for op in graph.ops:
                reduced = reduced_names(op)
                for d in op.space:
                    where = op.outs[0], (("dim", d.name),)
                    trees = TREES if d.name in reduced else ()
                    yield from (Move("split_reduce", where[0], (*where[1], ("parts", p), ("fanin", b))) for p, b in trees)
                    yield time_move(op, d.name, IN_TIME, 0)

    def _rewrites(self, graph: Graph) -> Iterator[Move]:
        """What the rules find that the search of plans tries, and what is behind a reduction apart."""
        for rule in (rule_table()["epilogue_apart"], *(r for r in rules_of("search") if r.name not in self.book.disabled)):
            found = rule.sized(graph, 2) if isinstance(rule, Sized) else rule.find(graph)
            for m in found:
                if isinstance(m, Refusal):
                    self.pruned["refused by a rule"] += 1
                else:
                    yield m

    def _made(self, graph: Graph, move: Move) -> Graph | None:
        """What a move makes of a graph."""
        try:
            return replace(apply_moves(graph, [move]), log=None)
        except TapestryError:
            self.pruned["refused by a rule"] += 1
            return None

    def _priced(self, graph: Graph) -> PricedPlan:
        """The plan in which every operation is cut as the graph says and no other is; a cut reduction ends as is cheapest."""
        bare = with_ops(graph, tuple(replace(op, splits=()) for op in graph.ops))
        problem = build(bare, self.topology, {}, {}, {}, known=self._tables)
        every = itertools.product(*self._choices(graph, problem))
        return min((priced_plan(problem, c, 0.0) for c in itertools.islice(every, WAYS)), key=lambda p: (p.objective, peak(p)))

    def _choices(self, graph: Graph, problem: Problem) -> Iterator[list[int]]:
        for op, menu in zip(graph.ops, problem.menus, strict=True):
            cut = {s.to.removeprefix("mesh."): s.dim for s in op.splits}
            dims = tuple(cut.get(a.name) for a in self.topology.mesh)
            yield [k for k, s in enumerate(menu.strategies) if s.dims == dims]


def _graph_key(graph: Graph) -> str:
    """The text of a graph, in which it does not matter which of several cuts was made first."""
    return to_text(with_ops(graph, tuple(replace(op, splits=tuple(sorted(op.splits, key=str))) for op in graph.ops)))
