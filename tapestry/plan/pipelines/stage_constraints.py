"""What the stages of a plan keep to: pins, fixed layouts and annotations, and the stage of each tensor where that is given.

A layout of the whole mesh is, on the mesh of a stage, the same axes by name (`ir.plan.on_stage`); a stage that does not
have an axis that cuts as a whole cannot keep to it. A pin of so many parts needs them on the stage's own mesh.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tapestry.errors import PlanError
from tapestry.ir.graph import Graph, Op
from tapestry.ir.plan import Layout, Mesh, on_stage
from tapestry.plan.layout_constraints import Dims, LayoutConstraints
from tapestry.plan.requests import AskedPin, read_pins
from tapestry.plan.strategy import Pin

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The same for one part of the graph on the mesh of a stage, as the search takes it."""

    pins: Mapping[int, tuple[Pin, ...]]
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    fixed: LayoutConstraints


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked for of a graph on the whole mesh.

    Attributes:
        pins: by the first result of an operation.
        cuts: the stage of each tensor; stages are numbered from 0. Empty: they are searched.
    """

    mesh: Mesh = ()
    pins: Mapping[str, tuple[AskedPin, ...]] = field(default_factory=dict[str, tuple[AskedPin, ...]])
    inputs: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    outputs: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    fixed: LayoutConstraints = field(default_factory=LayoutConstraints)
    cuts: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def bound(self) -> bool:
        """Whether something is fixed inside stages."""
        return bool(self.pins or self.inputs or self.outputs or self.fixed)

    def on(self, graph: Graph, mesh: Mesh, received: Collection[str] = ()) -> Given | None:
        """For a part of the graph on the mesh of a stage; ``None`` when that mesh cannot keep to it.

        Args:
            received: tensors that another stage writes: pins and layouts of their writing are not meant here.
        """
        pins: dict[int, tuple[Pin, ...]] = {}
        outs, reads, dims = dict[str, Layout | None](), dict[tuple[str, str], Layout | None](), dict[str, Dims | None]()
        for i, op in enumerate(graph.ops):
            mine = [t for t in op.outs if t not in received]
            for p in self.pins.get(before_cut(op.outs[0]), ()) if mine else ():
                found = p.on(op, mesh)
                if found is None:
                    return None
                pins[i] = pins.get(i, ()) + found
            outs |= {
                t: on_stage(self.fixed.outs[before_cut(t)], self.mesh, mesh) for t in mine if before_cut(t) in self.fixed.outs
            }
            reads |= {(s, t): on_stage(self.fixed.reads[s, before_cut(t)], self.mesh, mesh) for s, t in self.read(op)}
            if before_cut(op.outs[0]) in self.fixed.dims and mine:
                dims[op.outs[0]] = _dims_on(self.fixed.dims[before_cut(op.outs[0])], self.mesh, mesh)
        inputs, outputs = (
            {t: on_stage(x, self.mesh, mesh) for t, x in of.items() if t in there}
            for of, there in ((self.inputs, {*graph.inputs, *graph.weights}), (self.outputs, graph.producers()))
        )
        if None in (*outs.values(), *reads.values(), *dims.values(), *inputs.values(), *outputs.values()):
            return None
        fixed = LayoutConstraints(outs=_sure(outs), reads=_sure(reads), dims=_sure(dims))
        return Given(pins=pins, inputs=_sure(inputs), outputs=_sure(outputs), fixed=fixed)

    def read(self, op: Op) -> Iterator[tuple[str, str]]:
        """(node, tensor) of the reads of an operation of which something is said."""
        for s in dict.fromkeys(op.source):
            yield from ((s, t) for t in op.inputs if (s, before_cut(t)) in self.fixed.reads)

    def key(self, op: Op) -> object:
        """What is said of an operation, without its name: equal for those that are planned alike."""
        if not self.bound:
            return None
        name = before_cut(op.outs[0])
        outs = tuple((n, self.fixed.outs.get(before_cut(t)), self.outputs.get(t)) for n, t in enumerate(op.outs))
        ins = tuple((n, self.inputs[t]) for n, t in enumerate(op.inputs) if t in self.inputs)
        reads = tuple((op.inputs.index(t), self.fixed.reads[s, before_cut(t)]) for s, t in self.read(op))
        return self.pins.get(name), outs, ins, reads, self.fixed.dims.get(name)


def asked_of(
    graph: Graph,
    mesh: Mesh,
    *,
    pins: Sequence[str],
    folded: Sequence[str],
    inputs: Mapping[str, Layout],
    outputs: Mapping[str, Layout],
    fixed: LayoutConstraints,
    cuts: Mapping[str, int],
) -> Asked:
    """What is asked for, with the operations that the pins name.

    Raises:
        PlanError: a pin names no operation, dimension or mesh axis; a layout is of an output that no operation writes.
    """
    loose = next((t for t in outputs if t not in graph.producers()), None)
    if loose is not None:
        raise PlanError("an output that is an input as it came is in no stage", where=f"--layout {loose}", hint="--stages 1")
    found: dict[str, tuple[AskedPin, ...]] = {}
    for i, p in read_pins(pins, graph, mesh, folded):
        name = graph.ops[i].outs[0]
        found[name] = (*found.get(name, ()), p)
    return Asked(mesh=mesh, pins=found, inputs=inputs, outputs=outputs, fixed=fixed, cuts=cuts)


def stage_numbers(graph: Graph, known: Mapping[str, int]) -> list[int]:
    """The stage of each operation, from that of some tensors; an operation of whose results nothing is known is in the first
    stage that has all it reads."""
    at: dict[str, int] = {}
    out: list[int] = []
    for op in graph.ops:
        own = max((known.get(before_cut(t), 0) for t in op.outs), default=0)
        out.append(max([own, *(at[t] for t in op.inputs if t in at)]))
        at |= dict.fromkeys(op.outs, out[-1])
    return out


def needed(ends: Sequence[Iterable[int]], parents: Callable[[int], Iterable[int]]) -> list[set[int]]:
    """What each stage has when stages end with these: all that they need and no earlier stage has."""
    taken, out = set[int](), list[set[int]]()
    for end in ends:
        mine, need = set[int](), [*end]
        while need:
            k = need.pop()
            if k not in taken and k not in mine:
                mine.add(k)
                need += parents(k)
        taken |= mine
        out.append(mine)
    return out


def before_cut(tensor: str) -> str:
    """The name of a tensor before the batch was cut: micro-batch 3 of ``h`` is ``h@3``."""
    return re.sub(r"@\d+(\.part|\.\d+)?$", "", tensor)


def _dims_on(dims: Dims, mesh: Mesh, stage: Mesh) -> Dims | None:
    cuts = {a: d for a, d in zip(mesh, dims, strict=True) if d is not None and a.size > 1}
    return None if any(a not in stage for a in cuts) else tuple(cuts.get(a) for a in stage)


def _sure(found: Mapping[K, V | None]) -> dict[K, V]:
    return {k: v for k, v in found.items() if v is not None}
