"""What is done with a model: mesh, moves, strategies, layouts. It applies to a shrunken model as far as it still can."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tapestry.errors import LawError, TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Arrival, Layout, Mesh, MeshAxis, Plan, Stage, Strategy, device_count
from tapestry.plan.strategy import strategies, tensor_boxes
from tapestry.rewrites import RULES
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.rule import Move, Sized, parse_move
from tests.fuzz import awkward

MESHES = ((1,), (2,), (2,), (3,), (3,), (4,), (5,), (8,), (2, 2), (2, 2), (2, 3), (3, 2), (4, 2), (1, 3), (2, 2, 2), (2, 3, 2))
OFFERS = 40  # moves of one rule that are looked at
STAGES: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...] = (  # (first device, mesh) of each stage
    ((0, (2,)), (2, (2,))), ((0, (1,)), (1, (1,))), ((0, (1,)), (1, (3,))), ((2, (2,)), (0, (2,))),
    ((0, (2, 2)), (4, (1,)), (5, (2,))),
)  # fmt: skip
VIAS = {"strategies": 300, "search": 30, "stages": 42, "build": 9, "triton": 12, "processes": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is planned.

    Attributes:
        simplified: whether the graph is simplified before the moves, and after them.
        moves: rewrites, as text.
        strategies: by the first tensor that an operation writes; others are replicated.
        inputs, outputs: fixed layouts.
        streamed: weights loaded for every use.
        via: "strategies" as they are here, also on pipeline "stages" or on generated kernels in "triton"'s interpreter;
            "search" by the planner; "build" by the planner, through files, and "processes" then on several of them.
        stages: (first device, mesh sizes) of each; ``placed`` is the stage of an operation by the first tensor it writes, and
            ``arrivals`` the layout in which a stage receives a tensor, by ``tensor@stage``.
        cells: of inputs, with the values that a second run has there (`awkward`).
    """

    mesh: Mesh
    simplified: tuple[bool, bool] = (True, False)
    moves: tuple[str, ...] = ()
    strategies: Mapping[str, Strategy] = field(default_factory=dict[str, Strategy])
    inputs: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    outputs: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    streamed: frozenset[str] = frozenset()
    via: str = "strategies"
    stages: tuple[tuple[int, tuple[int, ...]], ...] = ()
    placed: Mapping[str, int] = field(default_factory=dict[str, int])
    arrivals: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    cells: tuple[awkward.Cell, ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "mesh": [[a.name, a.size, list(a.weights)] for a in self.mesh], "simplified": list(self.simplified),
            "moves": list(self.moves), "via": self.via, "streamed": sorted(self.streamed),
            "strategies": {t: {"dims": list(s.dims), "out": list(s.out)} for t, s in self.strategies.items()},
            "inputs": {t: list(x) for t, x in self.inputs.items()}, "outputs": {t: list(x) for t, x in self.outputs.items()},
            "stages": [[first, list(sizes)] for first, sizes in self.stages], "placed": dict(self.placed),
            "arrivals": {t: list(x) for t, x in self.arrivals.items()}, "cells": [[t, n, str(v)] for t, n, v in self.cells],
        }  # fmt: skip


def from_document(d: Mapping[str, Any]) -> Recipe:
    """A recipe read from JSON again."""
    return Recipe(
        mesh=tuple(MeshAxis(n, s, tuple(w)) for n, s, w in d["mesh"]), simplified=tuple(d["simplified"]),
        moves=tuple(d["moves"]), via=d["via"], streamed=frozenset(d["streamed"]),
        strategies={t: Strategy(tuple(s["dims"]), tuple(s["out"])) for t, s in d["strategies"].items()},
        inputs={t: tuple(x) for t, x in d["inputs"].items()}, outputs={t: tuple(x) for t, x in d["outputs"].items()},
        stages=tuple((first, tuple(sizes)) for first, sizes in d.get("stages", ())), placed=d.get("placed", {}),
        arrivals={t: tuple(x) for t, x in d.get("arrivals", {}).items()},
        cells=tuple((t, n, float(v)) for t, n, v in d.get("cells", ())),
    )  # fmt: skip


def rewritten(graph: Graph, recipe: Recipe, *, lenient: bool = False) -> Graph:
    """The lifted graph after simplification and moves; ``lenient`` leaves out moves that do not apply."""
    graph = simplify(graph) if recipe.simplified[0] else graph
    for text in recipe.moves:
        try:
            graph = apply_moves(graph, [parse_move(text)])
        except LawError:
            raise
        except TapestryError:
            if not lenient:
                raise
    return simplify(graph) if recipe.simplified[1] else graph


def planned(graph: Graph, recipe: Recipe) -> Plan:
    """A plan of a rewritten graph; strategies and layouts that do not fit it are left out."""
    mesh = recipe.mesh
    if recipe.stages:
        return _staged(graph, recipe)
    chosen: list[Strategy] = []
    for op in graph.ops:
        wanted = recipe.strategies.get(op.outs[0])
        offered = strategies(op, mesh)
        chosen.append(wanted if wanted in offered else offered[0])
    sources, inputs = {*graph.inputs, *graph.weights}, dict(recipe.inputs)
    return Plan(
        graph=graph, mesh=mesh, strategies=tuple(chosen), streamed=recipe.streamed & set(graph.weights),
        inputs={t: x for t, x in inputs.items() if t in sources and _fits(graph, t, x, mesh)},
        outputs={t: x for t, x in recipe.outputs.items() if t in graph.outputs and _fits(graph, t, x, mesh)},
    )  # fmt: skip


def mesh_of(sizes: Iterable[int]) -> Mesh:
    """Equal shares."""
    return tuple(MeshAxis(f"d{k}", n) for k, n in enumerate(sizes))


def _staged(graph: Graph, recipe: Recipe) -> Plan:
    """A plan with pipeline stages: an operation is no earlier than what it reads."""
    stages = tuple(Stage(first, mesh_of(sizes)) for first, sizes in recipe.stages)
    makers, of, chosen = graph.producers(), list[int](), list[Strategy]()
    reading = [i for i, op in enumerate(graph.ops) if any(t in makers and graph.tensors[t].on_host for t in op.inputs)]
    together = max(reading, default=-1)  # values of the host are never sent: what touches them is in one stage
    for i, op in enumerate(graph.ops):
        least = max((of[makers[t]] for t in op.inputs if t in makers), default=0)
        of.append(0 if i <= together else max(least, recipe.placed.get(op.outs[0], least)))
        wanted, offered = recipe.strategies.get(op.outs[0]), strategies(op, stages[of[-1]].mesh)
        chosen.append(wanted if wanted in offered else offered[0])
    arrivals: list[Arrival] = []
    for key, layout in recipe.arrivals.items():
        t, _, k = key.rpartition("@")
        if t in makers and of[makers[t]] < int(k) and _fits(graph, t, layout, stages[int(k)].mesh):
            arrivals.append(Arrival(t, int(k), layout))
    return Plan(
        graph=graph, mesh=recipe.mesh, strategies=tuple(chosen), stages=stages, stage_of=tuple(of), arrivals=tuple(arrivals)
    )


def _on_stages(graph: Graph, recipe: Recipe, rng: random.Random) -> Recipe:
    """A recipe's operations put on stages, with strategies on their meshes and layouts for what arrives."""
    stages = rng.choice(STAGES)
    placed = dict(zip((op.outs[0] for op in graph.ops), sorted(rng.randrange(len(stages)) for _ in graph.ops), strict=True))
    mesh = mesh_of([max(first + device_count(mesh_of(sizes)) for first, sizes in stages)])
    chosen = {op.outs[0]: rng.choice(strategies(op, mesh_of(stages[placed[op.outs[0]]][1]))) for op in graph.ops}
    arrivals: dict[str, Layout] = {}
    for t, i in graph.producers().items():
        for k in range(placed[graph.ops[i].outs[0]] + 1, len(stages)):
            layout = tuple(rng.choice([None, *range(len(graph.tensors[t].shape))]) for _ in stages[k][1])
            if rng.random() < 0.5 and not graph.tensors[t].on_host and _fits(graph, t, layout, mesh_of(stages[k][1])):
                arrivals[f"{t}@{k}"] = layout
    return replace(recipe, mesh=mesh, stages=stages, placed=placed, strategies=chosen, arrivals=arrivals)


def _fits(graph: Graph, tensor: str, layout: Layout, mesh: Mesh) -> bool:
    """Whether a layout leaves no device without cells (or the tensor has none at all)."""
    shape = graph.tensors[tensor].shape
    if any(a is not None and a >= len(shape) for a in layout):
        return False
    boxes = tensor_boxes(shape, layout, mesh)
    return all((boxes[:, a, 1] > boxes[:, a, 0]).all() for a in layout if a is not None)


def random_recipe(lifted: Graph, rng: random.Random) -> tuple[Recipe, Graph]:
    """Any recipe for a lifted graph, and the graph that it makes."""
    mesh = random_mesh(rng)
    via = rng.choices(list(VIAS), list(VIAS.values()))[0]
    if via == "processes":
        return Recipe(mesh=mesh_of(rng.choice(((2,), (3,)))), via=via), lifted
    if via == "build":
        return Recipe(mesh=mesh, via=via), lifted
    before = rng.random() < 0.8
    graph = simplify(lifted) if before else lifted
    moves: list[str] = []
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        move = _any_move(graph, mesh, rng)
        if move is not None:
            moves.append(str(move))
            graph = apply_moves(graph, [move])
    after = bool(moves) and rng.random() < 0.3
    graph = simplify(graph) if after else graph
    if via == "stages":
        return _on_stages(graph, Recipe(mesh=mesh, simplified=(before, after), moves=tuple(moves), via=via), rng), graph
    chosen = {op.outs[0]: rng.choice(strategies(op, mesh)) for op in graph.ops} if via != "search" else {}
    weights = sorted(graph.weights)
    share = rng.choice([0.0, 0.0, 0.5])
    recipe = Recipe(
        mesh=mesh, simplified=(before, after), moves=tuple(moves), strategies=chosen, via=via,
        inputs=_layouts(graph, [*graph.inputs, *weights], mesh, rng), outputs=_layouts(graph, graph.outputs, mesh, rng),
        streamed=frozenset(w for w in weights if rng.random() < share) if via != "search" else frozenset(),
    )  # fmt: skip
    fixed = {t: x for t, x in recipe.inputs.items() if t not in recipe.streamed}
    return replace(recipe, inputs=fixed), graph


def random_mesh(rng: random.Random) -> Mesh:
    """One to three axes, sometimes with uneven shares."""
    sizes = rng.choice(MESHES)
    uneven = rng.random() < 0.2
    return tuple(
        MeshAxis(f"d{k}", n, tuple(rng.randint(1, 3) for _ in range(n)) if uneven and n > 1 else ())
        for k, n in enumerate(sizes)
    )


def _any_move(graph: Graph, mesh: Mesh, rng: random.Random) -> Move | None:
    """A move of some rule (``split`` is what strategies are)."""
    names = [n for n, r in RULES.items() if n == "split_reduce" or (r.kind == "move" and r.phase != "request")]
    for name in rng.sample(names, len(names)):
        rule = RULES[name]
        found: Iterable[object] = rule.find(graph)
        if isinstance(rule, Sized) and rng.random() < 0.5:
            found = rule.sized(graph, rng.choice([a.size for a in mesh] + [2, 3]))
        moves = [m for m in itertools.islice(found, OFFERS) if isinstance(m, Move)]
        if moves:
            return _in_more_parts(graph, rng.choice(moves), rng)
    return None


def _in_more_parts(graph: Graph, move: Move, rng: random.Random) -> Move:
    """The move, or the same one with another number of parts where that is legal: rules offer two of them by themselves."""
    params = dict(move.params)
    if "parts" not in params or rng.random() < 0.5:
        return move
    other = replace(move, params=tuple({**params, "parts": rng.choice([3, 4, 5])}.items()))
    try:
        apply_moves(graph, [other])
    except LawError:
        raise
    except TapestryError:
        return move
    return other


def _layouts(graph: Graph, names: Iterable[str], mesh: Mesh, rng: random.Random) -> dict[str, Layout]:
    out: dict[str, Layout] = {}
    share = rng.choice([0.0, 0.3])
    for t in names:
        if rng.random() < share:
            layout = tuple(rng.choice([None, *range(len(graph.tensors[t].shape))]) for _ in mesh)
            if _fits(graph, t, layout, mesh):
                out[t] = layout
    return out


def devices(recipe: Recipe) -> int:
    """Number of devices."""
    return device_count(recipe.mesh)
