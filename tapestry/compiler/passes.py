"""Every pass: a function from what a compilation has to what it has then; the order is in `compiler.pipeline`.

What lifting does is in `lift.onnx_to_graph`, what the search does in `plan.search_passes`; here is what that takes, and what is
between the rooms.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from onnx import helper

from tapestry import flags
from tapestry.build import store
from tapestry.codegen import kernel_sources
from tapestry.codegen.triton.run.tuned import cache_of_target, recorded
from tapestry.compiler.compilation import Compilation, Constraints, Rewrites
from tapestry.compiler.model_evidence import QUICKLY, compare
from tapestry.errors import LawError, PlanError, TapestryError, similar, some
from tapestry.ir.graph import Graph, Op, changes
from tapestry.ir.plan import Layout, Plan
from tapestry.ir.program import peak_bytes
from tapestry.lift import accumulation
from tapestry.lift import onnx_to_graph as lift
from tapestry.lift.onnx_to_graph import Lifted
from tapestry.plan import search_passes as search
from tapestry.plan.fusion import Machine
from tapestry.plan.hoist_transfers import in_better_order
from tapestry.plan.layout_constraints import Language, LayoutConstraints
from tapestry.plan.pipelines.stage_choice import Request
from tapestry.plan.pipelines.stage_constraints import asked_of
from tapestry.plan.requests import parse_layouts, parse_pins, scan_blocks
from tapestry.plan.search.pareto import SHARE, front, undominated
from tapestry.plan.search.priced_plan import MORE_ROOM, PricedPlan, on_the_clock, too_big
from tapestry.plan.search.resume import Start, start_of
from tapestry.plan.solver.budget import Budget, unseen
from tapestry.plan.task import STEPS, Task, staging
from tapestry.plan.topology import shared
from tapestry.plugins import offered, tool
from tapestry.rewrites.core import driver
from tapestry.rewrites.core.rule import BOOK, LEFT_OUT, Move, leaving_out, parse_move
from tapestry.sharding import given_stages
from tapestry.sharding.annotation_constraints import constraints, with_apart
from tapestry.sharding.annotations import staged
from tapestry.verify import certificate
from tapestry.verify.rewriting import footprints, rewrite_log
from tapestry.viz.tool_kinds import ExportFormat

log = logging.getLogger("tapestry")
RECURRENT = ("LSTM", "GRU", "RNN", "Scan", "Loop")
ROUNDS = 4  # of saying a plan in a format's words: the second one says what the first one made
BARE = 1 << 16  # bytes; who gives less memory than this without a unit may have meant MiB


def read_model(c: Compilation) -> Compilation:
    """The model's file, checked, its weights taken out."""
    return c.made(source=lift.read_model(c.options.model, c.options.weights, c.options.kept))


def read_text(c: Compilation) -> Compilation:
    """A graph that is given as IR text."""
    return c.made(lifted=lift.read_text(c.options.model, c.options.weights))


def bind_symbols(c: Compilation) -> Compilation:
    """The size of every symbolic dimension."""
    return c.made(symbols=lift.bind_symbols(c.source, c.shapes))


def check_memory(c: Compilation) -> Compilation:
    """A limit that cannot hold the outputs, which stay to the end, is refused before the model is lifted, which may take a
    minute; so are bytes without a unit that cannot even hold the inputs.

    Raises:
        PlanError: all devices together have less memory.
    """
    memory, source = c.options.memory, c.source
    memories, held = c.topology.memories(), sum(_nbytes(o.type.tensor_type) for o in source.model.graph.output)
    if held > sum(memories):
        what = f"no plan fits: the outputs take {held:,} bytes, {some(len(memories), 'device')} can hold {sum(memories):,}"
        raise PlanError(what, where="--memory" if memory else "", why="they are held to the end", hint=MORE_ROOM)
    if memory is None or not memory.isdecimal() or int(memory) >= BARE:
        return c
    read = {t for n in source.model.graph.node for t in n.input}
    need = sum(_nbytes(i.type.tensor_type) for i in source.model.graph.input if i.name in {*source.inputs} & read)
    if need > sum(memories):
        what = f"{memory} bytes per device cannot hold the model's inputs: no plan fits"
        why = f"they take {need:,} bytes, {some(len(memories), 'device')} can hold {sum(memories):,}"
        raise PlanError(what, where="--memory", why=why, hint=f"{memory} is bytes; write {memory}MiB")
    return c


def _nbytes(t: Any) -> int:
    """Bytes of a declared tensor of static shape; 0 of anything else."""
    if not t.elem_type or any(not d.HasField("dim_value") for d in t.shape.dim):
        return 0
    return math.prod(d.dim_value for d in t.shape.dim) * helper.tensor_dtype_to_np_dtype(t.elem_type).itemsize


def lift_whole(c: Compilation) -> Compilation:
    """The model once more with its recurrences as one operation each, to be planned beside their steps; ``None`` where it has
    none, or where that is not asked for."""
    if not c.also_whole or not any(n.op_type in RECURRENT for n in c.source.model.graph.node):
        return c.made(whole=None)
    model = type(c.source.model)()
    model.CopyFrom(c.source.model)
    copy = replace(c.source, model=model)
    return c.made(whole=lift.lift_nodes(copy, c.symbols, lift.normalize(copy, c.symbols, False), False, c.options.seed))


def normalize(c: Compilation) -> Compilation:
    """The model with shapes inferred, constants folded, functions, loops and branches written out."""
    return c.made(prepared=lift.normalize(c.source, c.symbols, c.unroll_steps))


def lift_nodes(c: Compilation) -> Compilation:
    """Every node as operations over index spaces."""
    return c.made(lifted=lift.lift_nodes(c.source, c.symbols, c.prepared, c.unroll_steps, c.options.seed))


def accumulate(c: Compilation) -> Compilation:
    """Products of f16 summed in the dtype that is asked for, with the error of that; as they are where none is."""
    if c.options.accumulate is None:
        return c
    graph, report = accumulation.accumulated(c.lifted.graph, c.options.accumulate)
    other = c.whole and replace(c.whole, graph=accumulation.accumulated(c.whole.graph, c.options.accumulate)[0])
    return c.made(lifted=replace(c.lifted, graph=graph), whole=other, sums=report)


def drop_tests(c: Compilation) -> Compilation:
    """The model without its tests for NaN and infinities, where the user says that there are none."""
    if not c.options.assume_finite:
        return c
    other = c.whole and replace(c.whole, graph=footprints.assume_finite(c.whole.graph))
    return c.made(lifted=replace(c.lifted, graph=footprints.assume_finite(c.lifted.graph)), whole=other)


def simplify(c: Compilation) -> Compilation:
    """The graph with everything fused that costs nothing; `constrain` does it where annotations keep results apart."""
    if c.annotations and not staged(c.annotations):
        return c.made(graph=c.lifted.graph)
    return c.made(graph=driver.simplify(c.lifted.graph, disabled=c.without))


def constrain(c: Compilation) -> Compilation:
    """The layouts and stages that were asked for, and those of the model's annotations, with the graph that they are of."""
    whole, mesh, options = c.lifted.graph, c.topology.mesh, c.options
    marks = None if c.annotations and staged(c.annotations) else c.annotations
    cuts = given_stages.at_nodes(options.stage_at, whole) if options.stage_at else dict[str, int]()
    if marks and not options.stage_at and c.request.stages == marks.stages > 1:
        cuts = given_stages.of_file(marks, whole)
    graph = with_apart(whole, (), c.without, cuts) if cuts else c.graph
    given = constraints(marks, whole, mesh, cuts) if marks else None
    for note in given.notes if given else ():
        log.warning("sharding: %s", note)
    graph = given.graph if given else graph
    inputs, outputs = parse_layouts(options.layouts, graph, mesh)
    if given:
        inputs, outputs = {**given.inputs, **inputs}, {**given.outputs, **outputs}
    return c.made(
        graph=graph,
        constraints=Constraints(
            given=given,
            inputs=inputs,
            outputs=outputs,
            layouts=options.layouts,
            pins=options.pins,
            cuts=cuts,
            moves=(*map(driver.without, sorted(LEFT_OUT.get())), *(given.moves if given else ())),
            rewritable=not given and not cuts,
        ),
    )


def resume(c: Compilation) -> Compilation:
    """The graph that an earlier search ended with, made again from the model; its strategies and its bound."""
    earlier, constraints = c.earlier, c.constraints
    if earlier is None:
        return c.made(start=Start())
    if model_hash(c.lifted) != earlier.model_sha256:
        log.warning("--resume: the build is of another model: its strategies are tried where they apply, its bound is not used")
    key, bound = search_of(earlier).get("problem"), earlier.report.get("lower_bound_s")
    if earlier.plan.stages:
        log.warning("--resume: a plan with pipeline stages is searched anew")
        return c.made(start=Start())
    start = start_of(earlier.plan)
    if isinstance(key, str) and isinstance(bound, float) and math.isfinite(bound):
        start = start_of(earlier.plan, bound, key)
    if constraints.pins or not constraints.rewritable or not earlier.moves or "fit" in earlier.report:
        return c.made(start=start)
    try:
        moves = [parse_move(m) for m in earlier.moves]
        again = replayed(c, moves)
    except TapestryError as e:
        log.warning("--resume: the build's rewrites do not apply, the search begins without them: %s", e)
        return c.made(start=start)
    return c.made(graph=again, constraints=replace(constraints, moves=(*constraints.moves, *moves)), start=start)


def replayed(c: Compilation, moves: Sequence[Move]) -> Graph:
    """The simplified graph after the moves of an earlier search.

    Raises:
        TapestryError: one of them does not apply.
    """
    disabled = driver.disabled_by(moves)
    begin = c.whole if c.whole and STEPS in disabled else c.lifted
    with leaving_out(disabled):
        return driver.replay(driver.simplify(begin.graph, disabled=disabled) if disabled else c.graph, moves)


def search_of(build: store.Build) -> Mapping[str, Any]:
    """How the search of a build ended, as its report says; empty where it says nothing."""
    record = build.report.get("search")
    return cast("Mapping[str, Any]", record) if isinstance(record, Mapping) else {}


def cut_pinned_scans(c: Compilation) -> Compilation:
    """Scans that are pinned along the dimension in which they run become scans of blocks, so that only totals travel."""
    was = c.constraints
    if not was.pins or c.request.explicit:
        return c
    pins = parse_pins(was.pins, c.graph, c.topology.mesh, _folded(c.lifted))
    graph, moves, more = scan_blocks(pins, c.graph, c.topology.mesh)
    return c.made(graph=graph, constraints=replace(was, moves=(*was.moves, *moves), pins=[*was.pins, *more]))


def state_task(c: Compilation) -> Compilation:
    """Everything that the search is asked for but the graph, and how long it may take."""
    topology, lifted, earlier = c.topology, c.lifted, c.earlier
    given, free, disabled = c.constraints.given, c.constraints.rewritable, driver.disabled_by(c.constraints.moves)
    same_model = earlier is not None and model_hash(lifted) == earlier.model_sha256
    language = _format_language(c.options.for_format)
    equal_parts = bool(c.constraints.layouts or given or language)  # a layout that is given has equal parts
    budget = Budget.of(c.options.time_limit, c.options.interrupt, c.options.found or unseen)
    fixed = replace(given.fixed if given else LayoutConstraints(), language=language)
    asked, pins, inputs, outputs = c.request, c.constraints.pins, c.constraints.inputs, c.constraints.outputs
    if asked.explicit:  # it is of the meshes of stages, not of the whole one
        keep = asked_of(
            c.graph,
            topology.mesh,
            pins=pins,
            folded=_folded(lifted),
            inputs=inputs,
            outputs=outputs,
            fixed=fixed,
            cuts=c.constraints.cuts,
        )
        asked, fixed, pins = replace(asked, asked=keep), LayoutConstraints(), ()
        inputs, outputs = dict[str, Layout](), dict[str, Layout]()
    machine = Machine(device=topology.device, eager=not c.options.target.startswith("triton"))
    task = Task(
        topology=topology,
        topologies=[topology] if equal_parts else shared(topology),
        pins={c.graph.ops[i].outs[0]: p for i, p in parse_pins(pins, c.graph, topology.mesh, _folded(lifted)).items()},
        inputs=inputs,
        outputs=outputs,
        fixed=fixed,
        start=c.start,
        rewritable=free,
        request=Request(stages=1) if language else staging(asked, bound=c.constraints.whole_mesh),
        previous_plan=_fitted_before(earlier) if earlier else None,
        machine=machine if free and (pins or not same_model) else None,
        disabled_rules=disabled | c.without,
        book=BOOK in map(str, c.options.rules),
        lifted=lifted.graph if free and not earlier else None,
        whole=c.whole.graph if c.whole and free and STEPS not in disabled else None,
        meter=budget.meter,
    )
    return c.made(task=task, budget=budget)


def _format_language(for_format: str | None) -> Language | None:
    """What a plan for a format of export keeps to; formats are imported where one is asked for.

    Raises:
        TapestryError: there is no such format, or it says a plan as it is.
    """
    if for_format is None:
        return None
    known = {name: f.language for name in offered(ExportFormat) if (f := tool(ExportFormat, name)).language}
    if for_format not in known:
        hint = similar(for_format, known) or f"one of {', '.join(known)}"
        raise TapestryError(f"no plan can be asked for in format '{for_format}'", where="--for", hint=hint)
    return known[for_format]


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


def fuse_by_price(c: Compilation) -> Compilation:
    """The graph with every fusion that pays on one device."""
    return c.made(form=search.fuse_by_price(c.graph, c.task))


def enumerate_strategies(c: Compilation) -> Compilation:
    """What each operation may do, and what that costs."""
    return c.made(problems=search.enumerate_strategies(c.form, c.task))


def solve(c: Compilation) -> Compilation:
    """The best plan of that form."""
    return c.made(candidate=search.solve(c.form, c.problems, c.task, c.budget))


def try_other_forms(c: Compilation) -> Compilation:
    """The best of that form and of others."""
    return c.made(candidate=search.try_other_forms(c.candidate, c.graph, c.task, c.budget))


def fit_in_time(c: Compilation) -> Compilation:
    """Splits in time, where nothing fits in space or memory is dear."""
    return c.made(candidate=search.fit_in_time(c.candidate, c.task, c.budget))


def restructure(c: Compilation) -> Compilation:
    """Structural rewrites that make the plan better."""
    return c.made(candidate=search.restructure(c.candidate, c.graph, c.task, c.budget))


def prefer_few_bytes(c: Compilation) -> Compilation:
    """Of nearly equal plans the one that sends least."""
    return c.made(candidate=search.prefer_few_bytes(c.candidate, c.budget))


def hide_transfers(c: Compilation) -> Compilation:
    """Operations next to transfers in parts, where that takes less time."""
    return c.made(candidate=search.hide_transfers(c.candidate, c.task, c.budget))


def choose_stages(c: Compilation) -> Compilation:
    """Pipeline stages, where they are asked for or pay."""
    planned, plan = search.choose_stages(c.candidate, c.task, c.budget)
    return c.made(planned=planned, plan=plan)


def compare_whole_graph(c: Compilation) -> Compilation:
    """The plan, or one device where that is no worse."""
    planned, plan, alone = search.compare_whole_graph(c.planned, c.plan, c.form, c.task, c.budget)
    return c.made(planned=planned, plan=plan, peak_alone=alone)


def pareto_front(c: Compilation) -> Compilation:
    """Latency against memory, where that is asked for: plans of the graph that the search took."""
    if not c.options.pareto:
        return c
    moves = tuple(map(str, [*c.constraints.moves, *c.planned.base]))
    points = front(c.task.problems(c.planned.graph)[0], c.budget.share(SHARE), moves)
    return c.made(front=undominated([*points, *(c.planned.fitted.points if c.planned.fitted else ())]))


def say(c: Compilation) -> Compilation:
    """A plan that was asked for in a format, as the format says it; the bound stays one of all plans that it can say.

    Raises:
        PlanError: it does not fit then; NotExpressible: the format has nothing to say of it.
    """
    plan, task, for_format = c.plan, c.task, c.options.for_format
    if for_format is None:
        return c
    said = tool(ExportFormat, for_format).said

    def beyond(plan: PricedPlan) -> bool:
        return any(n > most for n, most in zip(peak_bytes(plan.program)[0], task.topology.memories(), strict=True))

    for _ in range(ROUNDS):
        choices = said(plan) if said else [plan.plan.strategies]
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
        raise too_big(plan, task.topology.device.memory, c.budget, f"; a plan that {for_format} cannot say fits")
    return c.made(plan=plan)


def hoist_transfers(c: Compilation) -> Compilation:
    """The plan's program with transfers in the order that takes least time, each posted as early as memory allows."""
    plan = c.plan
    program, seconds = in_better_order(plan.plan, plan.program, replace(c.topology, mesh=plan.plan.mesh))
    return c.made(plan=replace(plan, program=program, objective=seconds, bound=min(plan.bound, seconds)))


def verify(c: Compilation) -> Compilation:
    """Every law of the plan, proved by algorithms that the planner does not share: how many checks of each.

    Raises:
        LawError: the plan breaks one; it is never returned then.
    """
    plan, program = c.plan.plan, c.plan.program
    laws = certificate.check(
        plan.annotated(),
        program,
        limit=replace(c.topology, mesh=plan.mesh).memories(),
        stated_peak=peak_bytes(program)[0],
        places=plan.places,
        streamed=plan.streamed,
        native_sums=plan.native_sums,
    )
    return c.made(laws=laws)


def prove_rewrites(c: Compilation) -> Compilation:
    """Every change of the graph between lifting and the plan, proved where it was made (`verify.rewriting`).

    Raises:
        LawError: one does not say the same before and after, or is not in the log.
    """
    graph = c.plan.plan.graph
    steps = changes(graph)
    ends = [s.after for s in steps]
    begins = [*(s.before for s in steps), graph]
    outside = next((k for k, end in enumerate(ends) if _by_name(end) != _by_name(begins[k + 1])), None)  # (in whatever order)
    if outside is not None:
        raise LawError("rewrites", "the graph was changed outside of the log", where=f"after {steps[outside].by}")
    lift_graphs = [x.graph if not (log := changes(x.graph)) else log[0].before for x in (c.lifted, c.whole) if x is not None]
    if not any(_by_name(begins[0]) == _by_name(g) for g in lift_graphs):
        raise LawError("rewrites", "the log does not begin with the lifted graph")
    log, shown = rewrite_log.proved(begins[0], steps)
    return c.made(rewrites=Rewrites(log, len(steps), dict(shown)))


def _by_name(graph: Graph) -> dict[tuple[str, ...], Op]:
    return {op.outs: op for op in graph.ops}


def compare_with_model(c: Compilation) -> Compilation:
    """The plan's graph held to the model's file, where its size allows that; what was compared with what.

    Raises:
        LawError: it is not the model's.
    """
    of, graph = as_planned(c), c.plan.plan.graph
    return c.made(evidence=compare(graph, of.model, model_hash(of), of.constants, points=QUICKLY, special=False)[1])


def as_planned(c: Compilation) -> Lifted:
    """The model as the plan has it: with recurrences whole, or step by step."""
    return c.whole if c.whole and STEPS in driver.disabled_by((*c.constraints.moves, *c.planned.moves)) else c.lifted


def measured_configs(c: Compilation) -> Compilation:
    """Configurations measured for the plan's kernels on this machine, where it has a GPU of the target's kind."""
    knobs = dict[str, dict[str, Any]]()
    if c.options.target.startswith("triton"):
        cache = cache_of_target(flags.cache_folder(), c.options.target, c.options.precision)
        graph = c.plan.plan.graph
        knobs = recorded(cache, graph, kernel_sources.distinct_kernels(graph, c.plan.program)) if cache is not None else knobs
    return c.made(knobs=knobs)


def emit_kernels(c: Compilation) -> Compilation:
    """Source of every distinct kernel of the plan, by file name."""
    plan, options = c.plan, c.options
    sources = kernel_sources.triton_sources(plan.plan.graph, plan.program, options.target, options.precision, c.knobs)
    return c.made(kernels=sources)


def model_hash(lifted: Lifted) -> str:
    """SHA-256 of the model's file."""
    return hashlib.sha256(lifted.model.read_bytes()).hexdigest()
