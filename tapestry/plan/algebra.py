"""Derivations by the book of equations: what several of them in a row make of a region of the graph, by price on one device.

A region is an operation at which an equation holds, with a few of those that it is made of and that read it. From a region
the equations lead to others, the cheapest of which is looked at first; after every equation the region is simplified, so
that the next one meets what the compiler would. Regions that differ in names alone are searched once. A derivation is a list
of moves, which replays: ``simplified`` among them says where simplification went in between.

Which derivation is taken is not decided here: `plan.structural_search` plans the graph that each makes, sharding and memory
included, beside the graph as it is.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph, with_ops
from tapestry.ir.plan import MeshAxis, Stage
from tapestry.ir.syntax.printer import to_text
from tapestry.ir.types import Tensor
from tapestry.plan.pipelines.staged_plan import stage_topology
from tapestry.plan.search.problem import Tables, build
from tapestry.plan.solver.budget import Meter
from tapestry.plan.topology import Topology
from tapestry.rewrites.core.driver import SIMPLIFIED, rules_of, simplify
from tapestry.rewrites.core.rule import Move, Refusal
from tapestry.rewrites.equations.equation import Equation

UP, DOWN, MOST_OPS = 4, 2, 9  # of a region: operations before and behind, along a path, and in all
LOOKED_AT, LATER = 24, 5  # forms of a region from which equations are tried, and moves in a row
WORSE = 2.5  # a form that costs more than the region by this factor is not followed
PAYS = 0.98  # of a region's price, under which a derivation is worth planning
CHILD = 3e6  # units of work of a form: measured, 3 ms
_NONE = frozenset[str]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """What equations make of all equal regions.

    Attributes:
        moves: for every step, those of all places; simplification stands between the steps.
        before, after: seconds of one region on one device.
        places: how many regions.
    """

    moves: tuple[Move, ...]
    before: float
    after: float
    places: int

    @property
    def name(self) -> str:
        """The equations in order."""
        return " then ".join(dict.fromkeys(m.rule for m in self.moves if m.rule != SIMPLIFIED))


@dataclass(slots=True, kw_only=True)
class Book:
    """The search for derivations.

    Attributes:
        topology: its first device prices.
        meter: of work; at most ``units`` of it are done here.
        known: of regions that were searched, by their text: the steps that lead to cheaper forms, cheapest first.
        only: rules that may be used; none: all of the book.
    """

    topology: Topology
    meter: Meter
    units: float
    disabled: frozenset[str] = _NONE
    only: frozenset[str] = _NONE
    known: dict[str, list[tuple[float, float, tuple[Move, ...]]]] = field(
        default_factory=dict[str, list[tuple[float, float, tuple[Move, ...]]]]
    )
    tables: Tables = field(default_factory=Tables)
    looked_at: int = 0

    def derivations(self, graph: Graph) -> list[Derivation]:
        """For each kind of region, the moves at all its places that lead to the cheapest form; most seconds saved first."""
        found: dict[str, list[tuple[Move, ...]]] = {}
        price: dict[str, tuple[float, float]] = {}
        taken = set[str]()
        for region in self._regions(graph):
            names = _names(region)
            text = to_text(_renamed(region, names))
            if text not in self.known:
                if self.looked_at * CHILD > self.units:
                    break
                self.known[text] = self._searched(_renamed(region, names))
            own = {t for op in region.ops for t in op.outs}
            if self.known[text] and not own & taken:
                before, after, moves = self.known[text][0]
                back = {new: old for old, new in names.items()}
                key = f"{text} {moves}"
                found.setdefault(key, []).append(tuple(_at(m, back) for m in moves))
                price[key] = (before, after)
                taken |= own
        out = [
            Derivation(moves=tuple(_together(steps)), before=price[k][0], after=price[k][1], places=len(steps))
            for k, steps in found.items()
        ]
        return sorted(out, key=lambda d: (d.after - d.before) * d.places)

    def price(self, graph: Graph) -> float:
        """Seconds of all operations on one device."""
        stage = Stage(0, (MeshAxis(self.topology.mesh[-1].name, 1),))
        device = self.topology.alone or self.topology.device
        alone = replace(stage_topology(self.topology, stage), device=device, kinds=(), calls=())
        return float(sum(min(m.seconds) for m in build(graph, alone, {}, {}, {}, known=self.tables).menus))

    def rules(self) -> list[Equation]:
        """The equations of the book."""
        found = [r for r in rules_of("algebra") if isinstance(r, Equation)]
        return [r for r in found if not self.only or r.name in self.only]

    def moves(self, graph: Graph) -> Iterator[Move]:
        """Every place where an equation of the book holds."""
        blocks = [op for op in graph.ops if isinstance(op, Block)]
        for rule in self.rules():
            if any(rule.matcher.fits(op) for op in blocks):
                yield from (m for m in rule.find(graph) if not isinstance(m, Refusal))

    def _regions(self, graph: Graph) -> Iterator[Graph]:
        """The surroundings of every operation at which an equation holds, each once."""
        seen = set[frozenset[int]]()
        makers, readers = graph.producers(), graph.consumers()
        for at in dict.fromkeys(graph.find(m.at) for m in self.moves(graph)):
            near, layer = {at}, [at]
            for depth in range(max(UP, DOWN)):
                before = [makers[t] for k in layer for t in graph.ops[k].inputs if t in makers] if depth < UP else []
                behind = [r for k in layer for t in graph.ops[k].outs for r in readers.get(t, ())] if depth < DOWN else []
                layer = [k for k in dict.fromkeys((*before, *behind)) if k not in near and isinstance(graph.ops[k], Block)]
                near |= set(layer[: MOST_OPS - len(near)])
            if frozenset(near) not in seen:
                seen.add(frozenset(near))
                yield _part(graph, sorted(near))

    def _searched(self, region: Graph) -> list[tuple[float, float, tuple[Move, ...]]]:
        """Price before, price after and moves of the cheaper forms of a region."""
        begin = self.price(region)
        order, seen, found = itertools.count(), {to_text(region)}, list[tuple[float, float, tuple[Move, ...]]]()
        queue: list[tuple[float, int, Graph, tuple[Move, ...]]] = [(begin, next(order), region, ())]
        for _ in range(LOOKED_AT):
            if not queue:
                break
            _, _, graph, done = heapq.heappop(queue)
            for move in self.moves(graph) if len(done) < LATER else ():
                self.looked_at += 1
                self.meter.spent += CHILD
                new = _applied(graph, move, self.disabled)
                if new is None or (text := to_text(new)) in seen:
                    continue
                seen.add(text)
                price = self.price(new)
                if price < begin * PAYS:
                    found.append((begin, price, (*done, move)))
                if price < begin * WORSE:
                    heapq.heappush(queue, (price, next(order), new, (*done, move)))
        return sorted(found, key=lambda f: (f[1], len(f[2])))


def _applied(graph: Graph, move: Move, disabled: frozenset[str]) -> Graph | None:
    rule = next(r for r in rules_of("algebra") if r.name == move.rule)
    try:
        return replace(simplify(rule.apply(graph, move), disabled=disabled), log=None)
    except TapestryError:
        return None


def _together(places: list[tuple[Move, ...]]) -> Iterator[Move]:
    """Equal derivations of several places, step by step."""
    for k, step in enumerate(zip(*places, strict=True)):
        if k:
            yield Move(SIMPLIFIED, "graph")
        yield from step


def _part(graph: Graph, at: list[int]) -> Graph:
    """Some operations as a graph of their own; what others read of them are its outputs."""
    ops = tuple(graph.ops[k] for k in at)
    made = dict.fromkeys(t for op in ops for t in op.outs)
    inputs = tuple(dict.fromkeys(t for op in ops for t in op.inputs if t not in made))
    outside = {t for k, op in enumerate(graph.ops) if k not in at for t in op.inputs} | {*graph.outputs}
    outputs = tuple(t for t in made if t in outside)
    tensors = {t: graph.tensors[t] for t in (*inputs, *made)}
    return Graph(name="region", tensors=tensors, ops=ops, inputs=inputs, outputs=outputs or tuple(made)[-1:])


def _names(region: Graph) -> dict[str, str]:
    """Names that say nothing, for the tensors of a region."""
    made = {t: f"t{k}" for k, t in enumerate(t for op in region.ops for t in op.outs)}
    return {t: f"i{k}" for k, t in enumerate(region.inputs)} | made


def _renamed(region: Graph, names: dict[str, str]) -> Graph:
    tensors = {names[t]: _typed(x, names[t], t in region.inputs) for t, x in region.tensors.items()}
    ops = tuple(
        replace(op, outs=tuple(names[t] for t in op.outs), reads=tuple(replace(r, tensor=names[r.tensor]) for r in op.reads),
                source=()) for op in region.ops if isinstance(op, Block)
    )  # fmt: skip
    ins, outs = (tuple(names[t] for t in ts) for ts in (region.inputs, region.outputs))
    return with_ops(Graph(name="region", tensors=tensors, ops=ops, inputs=ins, outputs=outs), ops)


def _typed(t: Tensor, name: str, given: bool) -> Tensor:
    return replace(t, name=name, kind="input" if given else "value")


def _at(move: Move, back: dict[str, str]) -> Move:
    """A move of a renamed region as one of the graph: a tensor that an equation added is called after what it was made for."""
    base = next(n for n in sorted(back, key=len, reverse=True) if move.at == n or move.at.startswith(f"{n}."))
    return replace(move, at=back[base] + move.at[len(base) :])
