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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from tapestry.errors import TapestryError
from tapestry.ir.graph import Block, Graph, with_ops
from tapestry.ir.plan import MeshAxis, Stage
from tapestry.ir.types import Tensor
from tapestry.plan.pipelines.staged_plan import stage_topology
from tapestry.plan.search.problem import build
from tapestry.plan.solver.budget import Meter
from tapestry.plan.topology import Topology
from tapestry.rewrites.core.cones import Cone, Cones
from tapestry.rewrites.core.driver import SIMPLIFIED, rules_of, simplify
from tapestry.rewrites.core.matching import Draft
from tapestry.rewrites.core.rule import Move, Param, rule_table
from tapestry.rewrites.equations.equation import Equation

NEAR = ((1, 0), (2, 1), (4, 2))  # of a region, the smallest that pays first: operations before and behind, along a path
MOST_OPS = 9  # of a region in all
LOOKED_AT, LATER = 24, 5  # forms of a region from which equations are tried, and moves in a row
WORSE = 2.5  # a form that costs more than the region by this factor is not followed
PAYS = 0.98  # of a region's price, under which a derivation is worth planning
CHILD = 5e6  # units of work of a form: measured, 5 ms
_NONE_OF_EQUATION_BOOK = frozenset[str]()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What equations make of a region: of which form it was made, all moves from the region to it, and its seconds."""

    number: int
    parent: int | None
    moves: tuple[Move, ...]
    graph: Graph
    price: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheaper:
    """The cheapest form of a region: seconds before and after, the moves, and what they change of the region."""

    before: float
    after: float
    moves: tuple[Move, ...]
    touched: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Place:
    """An equation that holds at an operation, by its number; for parameters that are tensors, their places in the cone."""

    number: int
    params: tuple[tuple[str, Param, int | None], ...]


@dataclass(slots=True, kw_only=True)
class Book:
    """The search for derivations.

    Attributes:
        topology: its first device prices.
        meter: of work; at most ``units`` of it are done here.
        known: of regions that were searched, by their text: the cheapest form, if any pays.
        disabled: rules that are left out.
    """

    topology: Topology
    meter: Meter
    units: float
    disabled: frozenset[str] = _NONE_OF_EQUATION_BOOK
    known: dict[Cone, Cheaper | None] = field(default_factory=dict[Cone, Cheaper | None])
    cones: Cones = field(default_factory=Cones)
    looked_at: int = 0
    _places: dict[Cone, list[_Place]] = field(default_factory=dict[Cone, list["_Place"]])
    _prices: dict[Cone, float] = field(default_factory=dict[Cone, float])
    _reaches: dict[int, dict[int, Equation]] = field(init=False)  # equations by number, by how far they look

    def __post_init__(self) -> None:
        self._reaches = {}
        for k, r in enumerate(rules_of("algebra")):
            if isinstance(r, Equation) and r.name not in self.disabled:
                self._reaches.setdefault(r.reach, {})[k] = r

    def derivations(self, graph: Graph) -> list[Derivation]:
        """For each kind of region, the moves at all its places that lead to the cheapest form; most seconds saved first."""
        found: dict[Cone, tuple[Cheaper, list[tuple[Move, ...]]]] = {}
        taken, wires = set[str](), _Wires(graph)
        for at in dict.fromkeys(wires.makers[m.at] for m in self.moves(graph)):
            if self.looked_at * CHILD > self.units:
                break
            for up, down in NEAR:
                region = wires.region(at, up, down)
                names = _names(region)
                kind = self._kind(region, names)
                if kind not in self.known:
                    self.known[kind] = self._searched(_renamed(region, names))
                cheaper = self.known[kind]
                back = {new: old for old, new in names.items()}
                if cheaper and not (touched := {back[t] for t in cheaper.touched}) & taken:
                    found.setdefault(kind, (cheaper, []))[1].append(tuple(_at(m, back) for m in cheaper.moves))
                    taken |= touched
                if cheaper:
                    break
        out = [
            Derivation(moves=tuple(_together(steps)), before=c.before, after=c.after, places=len(steps))
            for c, steps in found.values()
        ]
        return sorted(out, key=lambda d: (d.after - d.before) * d.places)

    def _kind(self, region: Graph, names: dict[str, str]) -> Cone:
        """All of a region but names."""
        tensors = (
            tuple(names[t] for t in (*(r.tensor for r in op.reads), *op.outs)) for op in region.ops if isinstance(op, Block)
        )
        ops = tuple(zip(map(self.cones.look, region.ops), tensors, strict=True))
        types = tuple((names[t], x.dtype, x.shape) for t, x in region.tensors.items())
        return (*ops, types, tuple(names[t] for t in region.outputs))

    def price(self, graph: Graph) -> float:
        """Seconds of all operations on one device; operations that look the same are priced once."""
        draft, total = self.cones.draft(graph), 0.0
        for op in graph.ops:
            cone, _ = self.cones.at(draft, op, 0)
            if cone not in self._prices:
                alone = with_ops(replace(graph, outputs=op.outs), (op,))
                self._prices[cone] = float(min(build(alone, self._device(), {}, {}, {}).menus[0].seconds))
            total += self._prices[cone]
        return total

    def _device(self) -> Topology:
        stage = Stage(0, (MeshAxis(self.topology.mesh[-1].name, 1),))
        device = self.topology.alone or self.topology.device
        return replace(stage_topology(self.topology, stage), device=device, kinds=(), calls=())

    def moves(self, graph: Graph) -> Iterator[Move]:
        """Every place where an equation of the book holds, equation by equation; where operations look the same, asked once."""
        draft, found = self.cones.draft(graph), list[tuple[int, int, Move]]()
        for at, op in enumerate(graph.ops):
            for reach, rules in self._reaches.items() if isinstance(op, Block) else ():
                cone, names = self.cones.at(draft, op, reach)
                key = (reach, *cone)
                if key not in self._places:
                    self._places[key] = list(_equations_at(draft, at, rules, names))
                for p in self._places[key]:
                    params = tuple((n, v if k is None else names[k]) for n, v, k in p.params)
                    found.append((p.number, at, Move(rules[p.number].name, op.outs[0], params)))
        yield from (m for _, _, m in sorted(found, key=lambda f: f[:2]))

    def _searched(self, region: Graph) -> Cheaper | None:
        """The cheapest form of a region, of equally cheap ones that of the fewest moves; ``None`` where none pays."""
        begin, *others = self.forms(region)
        best = min(others, key=lambda f: (f.price, len(f.moves)), default=begin)
        if best.price >= begin.price * PAYS:
            return None
        stay = {op.outs[0]: op for op in best.graph.ops}
        touched = frozenset(t for op in region.ops if stay.get(op.outs[0]) != op for t in op.outs)
        return Cheaper(before=begin.price, after=best.price, moves=best.moves, touched=touched)

    def forms(self, region: Graph) -> Iterator[Form]:
        """A region and the forms that equations make of it, the cheapest of those found so far being followed first."""
        begin = Form(number=0, parent=None, moves=(), graph=region, price=self.price(region))
        yield begin
        count, seen = 1, {self.cones.key(region)}
        queue = [(begin.price, 0, begin)]
        for _ in range(LOOKED_AT):
            if not queue:
                break
            _, _, form = heapq.heappop(queue)
            for move in self.moves(form.graph) if len(form.moves) < LATER else ():
                self.looked_at += 1
                self.meter.spent += CHILD
                new = self._applied(form.graph, move)
                if new is None or (key := self.cones.key(new)) in seen:
                    continue
                seen.add(key)
                made = Form(number=count, parent=form.number, moves=(*form.moves, move), graph=new, price=self.price(new))
                yield made
                count += 1
                if made.price < begin.price * WORSE:
                    heapq.heappush(queue, (made.price, made.number, made))

    def _applied(self, graph: Graph, move: Move) -> Graph | None:
        try:
            new = simplify(rule_table()[move.rule].apply(graph, move), disabled=self.disabled, cones=self.cones)
        except TapestryError:
            return None
        return replace(new, log=None)


def _equations_at(draft: Draft, at: int, rules: Mapping[int, Equation], names: list[str]) -> Iterator[_Place]:
    """Where some equations hold at one operation."""
    for number, rule in rules.items():
        for m in rule.found(draft, at):
            if isinstance(m, Move):
                params = ((n, v, names.index(str(v)) if rule.names_tensor(n) else None) for n, v in m.params)
                yield _Place(number, tuple(params))


def _together(places: list[tuple[Move, ...]]) -> Iterator[Move]:
    """Equal derivations of several places, step by step."""
    for k, step in enumerate(zip(*places, strict=True)):
        if k:
            yield Move(SIMPLIFIED, "graph")
        yield from step


class _Wires:
    """Who makes and who reads each tensor of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.makers, self.readers, self.outputs = graph, graph.producers(), graph.consumers(), set(graph.outputs)

    def region(self, at: int, up: int, down: int) -> Graph:
        """An operation with those near it."""
        ops, near, layer = self.graph.ops, {at}, [at]
        for depth in range(max(up, down)):
            before = [self.makers[t] for k in layer for t in ops[k].inputs if t in self.makers] if depth < up else []
            behind = [r for k in layer for t in ops[k].outs for r in self.readers.get(t, ())] if depth < down else []
            layer = [k for k in dict.fromkeys((*before, *behind)) if k not in near and isinstance(ops[k], Block)]
            near |= set(layer[: MOST_OPS - len(near)])
        return self._part(near)

    def _part(self, at: set[int]) -> Graph:
        """Some operations as a graph of their own; what others read of them are its outputs."""
        ops = tuple(self.graph.ops[k] for k in sorted(at))
        made = dict.fromkeys(t for op in ops for t in op.outs)
        inputs = tuple(dict.fromkeys(t for op in ops for t in op.inputs if t not in made))
        outputs = tuple(t for t in made if t in self.outputs or any(r not in at for r in self.readers.get(t, ())))
        tensors = {t: self.graph.tensors[t] for t in (*inputs, *made)}
        return Graph(name="region", tensors=tensors, ops=ops, inputs=inputs, outputs=outputs or tuple(made)[-1:])


def _names(region: Graph) -> dict[str, str]:
    """Names that say nothing, for the tensors of a region."""
    made = {t: f"t{k}" for k, t in enumerate(t for op in region.ops for t in op.outs)}
    return {t: f"i{k}" for k, t in enumerate(region.inputs)} | made


def _renamed(region: Graph, names: dict[str, str]) -> Graph:
    tensors = {names[t]: _typed(x, names[t], t in region.inputs) for t, x in region.tensors.items()}
    ops = tuple(
        replace(
            op,
            outs=tuple(names[t] for t in op.outs),
            reads=tuple(replace(r, tensor=names[r.tensor]) for r in op.reads),
            source=(),
        )
        for op in region.ops
        if isinstance(op, Block)
    )
    ins, outs = (tuple(names[t] for t in ts) for ts in (region.inputs, region.outputs))
    return with_ops(Graph(name="region", tensors=tensors, ops=ops, inputs=ins, outputs=outs), ops)


def _typed(t: Tensor, name: str, given: bool) -> Tensor:
    return replace(t, name=name, kind="input" if given else "value")


def _at(move: Move, back: dict[str, str]) -> Move:
    """A move of a renamed region as one of the graph: a tensor that an equation added is called after what it was made for."""
    base = next(n for n in sorted(back, key=len, reverse=True) if move.at == n or move.at.startswith(f"{n}."))
    return replace(move, at=back[base] + move.at[len(base) :])
