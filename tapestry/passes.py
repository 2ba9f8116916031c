"""The passes between the rooms: they turn what the user asks for into what the search takes, and a plan into what is written.

Those of lifting are in `lift.onnx_to_graph`, those of the search in `plan.search_passes`; the order is in `pipeline`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from onnx import helper

from tapestry import flags
from tapestry.build import store
from tapestry.codegen import kernel_sources
from tapestry.codegen.triton.run.tuned import cache_of_target, recorded
from tapestry.errors import LawError, PlanError, TapestryError, some
from tapestry.ir.graph import Graph, Op, changes
from tapestry.ir.plan import Layout, Plan
from tapestry.ir.program import peak_bytes
from tapestry.lift import onnx_to_graph
from tapestry.lift.onnx_to_graph import Accumulated, Lifted, ModelSource, Symbols, accumulated
from tapestry.model_evidence import QUICKLY, Evidence, compare
from tapestry.plan.fusion import Machine
from tapestry.plan.hoist_transfers import early, in_better_order
from tapestry.plan.pipelines.segments import asked_of
from tapestry.plan.pipelines.stage_choice import Request
from tapestry.plan.requests import parse_layouts, parse_pins, scan_blocks
from tapestry.plan.search.planner import Point, Start, fronts, start_of, undominated
from tapestry.plan.search.priced_plan import PricedPlan, on_the_clock, too_big
from tapestry.plan.search_passes import Planned
from tapestry.plan.solver.budget import Budget, Found
from tapestry.plan.strategy import Language, LayoutConstraints
from tapestry.plan.task import STEPS, Task, staging
from tapestry.plan.topology import Topology, shared
from tapestry.plugins import tool
from tapestry.rewrites.core import driver
from tapestry.rewrites.core.rule import RULES, Move, parse_move
from tapestry.sharding import annotation_constraints
from tapestry.sharding.annotation_constraints import Given, constraints, with_apart
from tapestry.sharding.annotations import Annotations, staged
from tapestry.verify import certificate
from tapestry.verify.rewriting import normal_form, rewrite_log

log = logging.getLogger("tapestry")
RECURRENT = ("LSTM", "GRU", "RNN", "Scan", "Loop")
ROUNDS = 4  # of saying a plan in a format's words: the second one says what the first one made
BARE = 1 << 16  # bytes; who gives less memory than this without a unit may have meant MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the plan keeps to.

    Attributes:
        given: the model's own annotations.
        inputs, outputs: layouts in which inputs (or weights) start and outputs end.
        layouts: those that were asked for, as text; ``pins`` likewise.
        moves: rewrites that the graph has behind it.
        cuts: the pipeline stage of each tensor, where stages are given.
        rewritable: whether more may be tried: a pin names an operation of the graph as it is, and an exact plan computes that
            graph on any mesh.
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


def check_memory(source: ModelSource, topology: Topology, memory: str | None) -> None:
    """Bytes without a unit that cannot even hold the inputs are refused before the model is lifted, which may take a minute.

    Raises:
        PlanError: all devices together have less memory than the inputs take.
    """
    if memory is None or not memory.isdecimal() or int(memory) >= BARE:
        return
    read = {t for n in source.model.graph.node for t in n.input}
    need = sum(_nbytes(i.type.tensor_type) for i in source.model.graph.input if i.name in {*source.inputs} & read)
    if need > sum(topology.memories()):
        what = f"{memory} bytes per device cannot hold the model's inputs: no plan fits"
        why = f"they take {need:,} bytes, {some(len(topology.memories()), 'device')} can hold {sum(topology.memories()):,}"
        raise PlanError(what, where="--memory", why=why, hint=f"{memory} is bytes; write {memory}MiB")


def _nbytes(t: Any) -> int:
    """Bytes of a declared tensor of static shape; 0 of anything else."""
    if not t.elem_type or any(not d.HasField("dim_value") for d in t.shape.dim):
        return 0
    return math.prod(d.dim_value for d in t.shape.dim) * helper.tensor_dtype_to_np_dtype(t.elem_type).itemsize


def lift_whole(source: ModelSource, symbols: Symbols, also_whole: bool, seed: int) -> Lifted | None:
    """The model once more with its recurrences as one operation each, to be planned beside their steps; ``None`` where it has
    none, or where that is not asked for."""
    if not also_whole or not any(n.op_type in RECURRENT for n in source.model.graph.node):
        return None
    model = type(source.model)()
    model.CopyFrom(source.model)
    copy = replace(source, model=model)
    return onnx_to_graph.lift_nodes(copy, symbols, onnx_to_graph.normalize(copy, symbols, False), False, seed)


def accumulate(
    lifted: Lifted, whole: Lifted | None, accumulate: str | None
) -> tuple[Lifted, Lifted | None, Accumulated | None]:
    """Products of f16 summed in the dtype that is asked for, with the error of that; as they are where none is."""
    if accumulate is None:
        return lifted, whole, None
    graph, report = accumulated(lifted.graph, accumulate)
    other = None if whole is None else replace(whole, graph=accumulated(whole.graph, accumulate)[0])
    return replace(lifted, graph=graph), other, report


def drop_tests(lifted: Lifted, whole: Lifted | None, assume_finite: bool) -> tuple[Lifted, Lifted | None]:
    """The model without its tests for NaN and infinities, where the user says that there are none."""
    if not assume_finite:
        return lifted, whole
    other = None if whole is None else replace(whole, graph=normal_form.assume_finite(whole.graph))
    return replace(lifted, graph=normal_form.assume_finite(lifted.graph)), other


def simplify(lifted: Lifted, annotations: Annotations | None, exact: bool, without: frozenset[str]) -> Graph:
    """The graph with everything fused that costs nothing; `constrain` does it where annotations keep results apart. An exact
    plan leaves out users' rules that may change rounding."""
    if annotations and not staged(annotations):
        return lifted.graph
    loose = frozenset(r.name for r in RULES.values() if not r.built_in and not r.exact)
    return driver.simplify(lifted.graph, disabled=without | loose if exact else without)


def constrain(
    lifted: Lifted, graph: Graph, annotations: Annotations | None, topology: Topology, layouts: Sequence[str],
    pins: Sequence[str], exact: bool, stage_at: Sequence[str], request: Request, without: frozenset[str],
) -> tuple[Graph, Constraints]:  # fmt: skip
    """The layouts and stages that were asked for, and those of the model's annotations, with the graph that they are of."""
    cuts = annotation_constraints.at_nodes(stage_at, lifted.graph) if stage_at else dict[str, int]()
    if annotations and not staged(annotations) and not stage_at and request.stages == annotations.stages > 1:
        cuts = annotation_constraints.of_file(annotations, lifted.graph)
    graph = with_apart(lifted.graph, (), without, cuts) if cuts else graph
    given = constraints(annotations, lifted.graph, topology.mesh, cuts) if annotations and not staged(annotations) else None
    for note in given.notes if given else ():
        log.warning("sharding: %s", note)
    graph = given.graph if given else graph
    inputs, outputs = parse_layouts(layouts, graph, topology.mesh)
    if given:
        inputs, outputs = {**given.inputs, **inputs}, {**given.outputs, **outputs}
    return graph, Constraints(
        given=given, inputs=inputs, outputs=outputs, layouts=layouts, pins=pins, moves=given.moves if given else (),
        rewritable=not pins and not given and not exact and not cuts, cuts=cuts,
    )  # fmt: skip


def resume(
    lifted: Lifted, whole: Lifted | None, graph: Graph, constraints: Constraints, earlier: store.Build | None
) -> tuple[Graph, Constraints, Start]:
    """The graph that an earlier search ended with, made again from the model; its strategies and its bound."""
    if earlier is None:
        return graph, constraints, Start()
    if model_hash(lifted) != earlier.model_sha256:
        log.warning("--resume: the build is of another model: its strategies are tried where they apply, its bound is not used")
    key, bound = search_of(earlier).get("problem"), earlier.report.get("lower_bound_s")
    if earlier.plan.stages:
        log.warning("--resume: a plan with pipeline stages is searched anew")
        return graph, constraints, Start()
    start = start_of(earlier.plan)
    if isinstance(key, str) and isinstance(bound, float) and math.isfinite(bound):
        start = start_of(earlier.plan, bound, key)
    if not constraints.rewritable or not earlier.moves or "fit" in earlier.report:
        return graph, constraints, start
    try:
        moves = [parse_move(m) for m in earlier.moves]
        again = replayed(lifted, whole, graph, moves)
    except TapestryError as e:
        log.warning("--resume: the build's rewrites do not apply, the search begins without them: %s", e)
        return graph, constraints, start
    return again, replace(constraints, moves=(*constraints.moves, *moves)), start


def replayed(lifted: Lifted, whole: Lifted | None, graph: Graph, moves: Sequence[Move]) -> Graph:
    """The simplified graph after the moves of an earlier search.

    Raises:
        TapestryError: one of them does not apply.
    """
    disabled = driver.disabled_by(moves)
    begin = whole.graph if whole and STEPS in disabled else lifted.graph
    return driver.replay(driver.simplify(begin, disabled=disabled) if disabled else graph, moves)


def search_of(build: store.Build) -> Mapping[str, Any]:
    """How the search of a build ended, as its report says; empty where it says nothing."""
    record = build.report.get("search")
    return cast("Mapping[str, Any]", record) if isinstance(record, Mapping) else {}


def cut_pinned_scans(
    lifted: Lifted, graph: Graph, constraints: Constraints, topology: Topology, exact: bool, request: Request
) -> tuple[Graph, Constraints]:
    """Scans that are pinned along the dimension in which they run become scans of blocks, so that only totals travel."""
    if not constraints.pins or exact or request.explicit:
        return graph, constraints
    pins = parse_pins(constraints.pins, graph, topology.mesh, _folded(lifted))
    graph, moves, more = scan_blocks(pins, graph, topology.mesh)
    return graph, replace(constraints, moves=(*constraints.moves, *moves), pins=[*constraints.pins, *more])


def state_task(
    lifted: Lifted, whole: Lifted | None, graph: Graph, constraints: Constraints, start: Start, earlier: store.Build | None,
    topology: Topology, request: Request, target: str, exact: bool, time_limit: float | None,
    interrupt: threading.Event, found: Found, without: frozenset[str], for_format: str | None,
) -> tuple[Task, Budget]:  # fmt: skip
    """Everything that the search is asked for but the graph, and how long it may take."""
    given, free = constraints.given, constraints.rewritable
    same_model = earlier is not None and model_hash(lifted) == earlier.model_sha256
    language = _format_language(for_format)
    equal_parts = bool(constraints.layouts or given or exact or language)  # a layout that is given has equal parts
    budget = Budget.of(time_limit, interrupt, found)
    fixed = replace(given.fixed if given else LayoutConstraints(), exact=exact, language=language)
    asked, pins, inputs, outputs = request, constraints.pins, constraints.inputs, constraints.outputs
    if request.explicit:  # it is of the meshes of stages, not of the whole one
        keep = asked_of(
            graph, topology.mesh, pins=pins, folded=_folded(lifted), inputs=inputs, outputs=outputs, fixed=fixed,
            cuts=constraints.cuts,
        )  # fmt: skip
        asked, fixed, pins = replace(request, asked=keep), LayoutConstraints(), ()
        inputs, outputs = dict[str, Layout](), dict[str, Layout]()
    machine = Machine(device=topology.device, eager=not target.startswith("triton"))
    task = Task(
        topology=topology, topologies=[topology] if equal_parts else shared(topology), pins=pins,
        folded=_folded(lifted), inputs=inputs, outputs=outputs, fixed=fixed, start=start, rewritable=free,
        request=Request(stages=1) if language else staging(asked, bound=constraints.whole_mesh),
        previous_plan=_fitted_before(earlier) if earlier else None,
        machine=machine if free and not same_model else None, disabled_rules=driver.disabled_by(constraints.moves) | without,
        lifted=lifted.graph if free and not earlier else None,
        whole=whole.graph if whole and free and STEPS not in driver.disabled_by(constraints.moves) else None,
        meter=budget.meter,
    )  # fmt: skip
    return task, budget


def _format_language(for_format: str | None) -> Language | None:
    """What a plan for a format of export keeps to; formats are imported where one is asked for."""
    if for_format is None:
        return None
    return tool("exports.formats").language(for_format)


def _folded(lifted: Lifted) -> list[str]:
    """Names of all nodes of the model, those that are no operations any more among them."""
    return sorted({s for op in lifted.graph.ops for s in op.source})


def _fitted_before(earlier: store.Build) -> tuple[Plan, list[Move]] | None:
    """The plan of a build that fits in time only, with the moves to its graph."""
    if "fit" not in earlier.report:
        return None
    try:
        return earlier.plan, [parse_move(m) for m in earlier.moves]
    except TapestryError:
        return None


def pareto_front(planned: Planned, task: Task, constraints: Constraints, budget: Budget, pareto: bool) -> list[Point] | None:
    """Latency against memory, where that is asked for: plans of the graph and of what rewrites make of it."""
    if not pareto:
        return None
    points = fronts(task.rewritten_problems(planned.graph, [*constraints.moves, *planned.base]), budget)
    return undominated([*points, *(planned.fitted.points if planned.fitted else ())])


def say(plan: PricedPlan, task: Task, budget: Budget, for_format: str | None) -> PricedPlan:
    """A plan that was asked for in a format, as the format says it; the bound stays one of all plans that it can say.

    Raises:
        PlanError: it does not fit then; NotExpressible: the format has nothing to say of it.
    """

    if for_format is None:
        return plan
    formats = tool("exports.formats")

    def beyond(plan: PricedPlan) -> bool:
        return any(n > most for n, most in zip(peak_bytes(plan.program)[0], task.topology.memories(), strict=True))

    for _ in range(ROUNDS):
        choices = formats.said(for_format, plan)
        if plan.plan.strategies in choices:
            break
        problem, others = task.problems(plan.plan.graph)[0], list[PricedPlan]()
        for strategies in choices:
            new = replace(plan.plan, strategies=strategies)
            program, timed = on_the_clock(problem, new)
            others.append(replace(plan, plan=new, program=program, objective=timed.total, bound=min(plan.bound, timed.total)))
        plan = min(others, key=lambda p: (beyond(p), p.objective))
    else:
        raise PlanError(
            "no plan was found that the format can say", where=f"--for {for_format}", hint="--pin, or without --for"
        )
    if beyond(plan):
        raise too_big(plan, task.topology.device.memory, budget, f"; a plan that {for_format} cannot say fits")
    return plan


def hoist_transfers(plan: PricedPlan, topology: Topology) -> PricedPlan:
    """The plan's program with transfers in the order that takes least time, each posted as early as memory allows."""
    ordered, seconds = in_better_order(plan.plan, plan.program, replace(topology, mesh=plan.plan.mesh))
    return replace(plan, program=early(ordered), objective=seconds, bound=min(plan.bound, seconds))


def verify(plan: PricedPlan, topology: Topology, exact: bool) -> dict[str, int]:
    """Every law of the plan, proved by algorithms that the planner does not share: how many checks of each.

    Raises:
        LawError: the plan breaks one; it is never returned then.
    """
    limits = replace(topology, mesh=plan.plan.mesh).memories()
    return certificate.check(
        plan.plan.annotated(), plan.program, limit=limits, stated_peak=peak_bytes(plan.program)[0], places=plan.plan.places,
        streamed=plan.plan.streamed, exact=exact, native_sums=plan.plan.native_sums,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rewrites:
    """The rewrites behind a plan's graph: the log as it is stored, how many, and how many results were shown by what."""

    log: bytes
    steps: int
    shown: Mapping[str, int]


def prove_rewrites(plan: PricedPlan, lifted: Lifted, whole: Lifted | None) -> Rewrites:
    """Every change of the graph between lifting and the plan, proved where it was made (`verify.rewriting`).

    Raises:
        LawError: one does not say the same before and after, or is not in the log.
    """
    graph = plan.plan.graph
    steps = changes(graph)
    ends = [s.after for s in steps]
    begins = [*(s.before for s in steps), graph]
    outside = next((k for k, end in enumerate(ends) if _by_name(end) != _by_name(begins[k + 1])), None)  # (in whatever order)
    if outside is not None:
        raise LawError("rewrites", "the graph was changed outside of the log", where=f"after {steps[outside].by}")
    lift_graphs = [x.graph if not (log := changes(x.graph)) else log[0].before for x in (lifted, whole) if x is not None]
    if not any(_by_name(begins[0]) == _by_name(g) for g in lift_graphs):
        raise LawError("rewrites", "the log does not begin with the lifted graph")
    log, shown = rewrite_log.proved(begins[0], steps)
    return Rewrites(log, len(steps), dict(shown))


def _by_name(graph: Graph) -> dict[tuple[str, ...], Op]:
    return {op.outs: op for op in graph.ops}


def compare_with_model(
    plan: PricedPlan, lifted: Lifted, whole: Lifted | None, planned: Planned, constraints: Constraints
) -> Evidence:  # fmt: skip
    """The plan's graph held to the model's file, where its size allows that; what was compared with what.

    Raises:
        LawError: it is not the model's.
    """
    of, graph = as_planned(lifted, whole, planned, constraints), plan.plan.graph
    _, evidence = compare(graph, of.model, model_hash(of), of.constants, points=QUICKLY, special=False)
    return evidence


def as_planned(lifted: Lifted, whole: Lifted | None, planned: Planned, constraints: Constraints) -> Lifted:
    """The model as the plan has it: with recurrences whole, or step by step."""
    as_whole = whole is not None and STEPS in driver.disabled_by((*constraints.moves, *planned.moves))
    return whole if as_whole and whole is not None else lifted


def measured_configs(plan: PricedPlan, target: str, precision: str) -> dict[str, dict[str, Any]]:
    """Configurations measured for the plan's kernels on this machine, where it has a GPU of the target's kind."""
    if not target.startswith("triton"):
        return {}
    cache = cache_of_target(flags.cache_folder(), target, precision)
    graph = plan.plan.graph
    return {} if cache is None else recorded(cache, graph, kernel_sources.distinct_kernels(graph, plan.program))


def emit_kernels(plan: PricedPlan, target: str, precision: str, knobs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Source of every distinct kernel of the plan, by file name."""
    return kernel_sources.triton_sources(plan.plan.graph, plan.program, target, precision, knobs)


def model_hash(lifted: Lifted) -> str:
    """SHA-256 of the model's file."""
    return hashlib.sha256(lifted.model.read_bytes()).hexdigest()
