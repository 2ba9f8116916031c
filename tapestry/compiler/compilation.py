"""What one compilation has: what the user asks for, and what passes made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from tapestry.build import store
from tapestry.compiler.model_evidence import Evidence
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Layout
from tapestry.lift.accumulation import Accumulated
from tapestry.lift.nodes import Prepared
from tapestry.lift.onnx_to_graph import Lifted, ModelSource, Symbols
from tapestry.options import Options
from tapestry.plan.pipelines.stage_choice import Request
from tapestry.plan.search.pareto import Point
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.plan.search.problem import Problem
from tapestry.plan.search.resume import Start
from tapestry.plan.search_passes import Candidate, Form, Planned
from tapestry.plan.solver.budget import Budget
from tapestry.plan.task import Task
from tapestry.plan.topology import Topology
from tapestry.rewrites.core.rule import Move
from tapestry.sharding.annotation_constraints import Given
from tapestry.sharding.annotations import Annotations


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the plan keeps to.

    Attributes:
        given: the model's own annotations.
        inputs, outputs: layouts in which inputs (or weights) start and outputs end.
        layouts: those that were asked for, as text; ``pins`` likewise.
        moves: rewrites that the graph has behind it.
        cuts: the pipeline stage of each tensor, where stages are given.
        rewritable: whether more may be tried.
    """

    given: Given | None
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    layouts: Sequence[str]
    pins: Sequence[str]
    moves: tuple[Move, ...]
    rewritable: bool
    cuts: Mapping[str, int]

    @property
    def whole_mesh(self) -> bool:
        """Whether something is fixed that is said of the whole mesh."""
        return bool(self.layouts or self.given or self.pins)


@dataclass(frozen=True, slots=True)
class Rewrites:
    """The rewrites behind a plan's graph: the log as it is stored, how many, and how many results were shown by what."""

    log: bytes
    steps: int
    shown: Mapping[str, int]


class _Unmade:
    """What a field has until a pass makes it: nothing can be done with it."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"'{name}' of a value that no pass has made yet")


UNMADE: Any = _Unmade()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compilation:
    """Everything that passes read and make; fields stand in the order in which they are made."""

    options: Options  # what the user asks for; the next eight follow from it, and from files that it names
    shapes: Mapping[str, Any]  # of symbols; those of the model's annotations where none are given
    topology: Topology  # the devices and their links
    request: Request  # how many stages and micro-batches
    annotations: Annotations | None  # the model's own, for several devices
    earlier: store.Build | None  # to go on from
    without: frozenset[str]  # rules that are not used
    unroll_steps: bool  # whether recurrences are lifted step by step
    also_whole: bool  # whether they are lifted as one operation as well

    source: ModelSource = UNMADE  # the model's file as read; later passes change its model in place
    symbols: Symbols = UNMADE  # with their sizes
    whole: Lifted | None = None  # the model with each recurrence as one operation, beside `lifted`
    prepared: Prepared = UNMADE  # the model, normalised
    lifted: Lifted = UNMADE  # the model as operations
    sums: Accumulated | None = None  # how products of f16 are summed, where that was asked for
    graph: Graph = UNMADE  # with which the search begins
    constraints: Constraints = UNMADE  # that its plan keeps to
    start: Start = UNMADE  # what an earlier search found
    task: Task = UNMADE  # what the search is asked for, but the graph
    budget: Budget = UNMADE  # how long it may take
    form: Form = UNMADE  # the graph with fusions that pay
    problems: list[Problem] = UNMADE  # that its operations state, one for each topology
    candidate: Candidate = UNMADE  # the best form so far, with its plan
    planned: Planned = UNMADE  # how the plan came about
    plan: PricedPlan = UNMADE  # with its program
    peak_alone: int = UNMADE  # bytes of one device that computes everything
    front: list[Point] | None = None  # latency against memory, where that was asked for
    laws: Mapping[str, int] = UNMADE  # how many checks of each the plan passed
    rewrites: Rewrites = UNMADE  # that made its graph of the lifted one, proved
    evidence: Evidence = UNMADE  # that its graph is the model
    knobs: Mapping[str, Mapping[str, Any]] = UNMADE  # measured for its kernels
    kernels: Mapping[str, str] = UNMADE  # their sources, by file

    def made(self, **values: Any) -> Compilation:
        """The compilation with values that a pass made; a test holds them to the types of the fields."""
        return replace(self, **values)
