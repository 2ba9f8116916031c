"""The whole compiler on one screen: `PASSES` is every function that can touch a graph or a plan, in order.

Each is a function from a `Compilation` to the next one; ``tapestry compile --print-passes`` shows what ran, ``--print-after``
the IR there. A plan is lowered wherever it is compared with another one, since its memory is that of its program: so `solve`
and all that follow give programs, with rings for gathers where those are better.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tapestry import flags
from tapestry.build import store
from tapestry.compiler import build_report, passes
from tapestry.compiler.compilation import Compilation
from tapestry.compiler.model_evidence import plugin_evidence
from tapestry.compiler.pass_runner import Function, Pass, Report, Runner, check_names, unreported
from tapestry.errors import LawError, TapestryError, some
from tapestry.interop.tile_metadata import ModelTopology
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Mesh, MeshAxis, device_count
from tapestry.lift.file.structure import TEXT
from tapestry.lift.onnx_to_graph import Lifted
from tapestry.onnx_eval import ort_session
from tapestry.options import Options
from tapestry.plan.pipelines.stage_choice import parse_request
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.plan.search.resume import start_of
from tapestry.plan.topology import Topology, default_mesh, linked, parse_bytes, parse_mesh, topology
from tapestry.plugins import entry_points as plugins
from tapestry.rewrites.core.driver import disabled_by, rule_names
from tapestry.rewrites.core.rule import leaving_out, parse_move, rule_table
from tapestry.rewrites.equations.rule_texts import load_rules
from tapestry.runtime.calibration.automatic import AUTO, automatic
from tapestry.sharding import annotations
from tapestry.sharding import file_mesh as file_mesh_module
from tapestry.sharding.annotations import Annotations

log = logging.getLogger("tapestry")
# fmt: off
PASSES = (
    Pass(passes.read_model,           "lift",     "the file is checked before anything is made of it"),
    Pass(passes.bind_symbols,         "lift",     "everything after it has sizes"),
    Pass(passes.check_memory,         "lift",     "a limit that was meant in MiB is refused before lifting takes a minute"),
    Pass(passes.lift_whole,           "lift",     "of the model as read: normalising changes it in place"),
    Pass(passes.normalize,            "lift",     "lifters know one opset, and no functions, loops and branches"),
    Pass(passes.lift_nodes,           "lift",     "nodes become operations over index spaces"),
    Pass(passes.accumulate,           "lift",     "changes what the model says, as asked: not a rewrite that is proved"),
    Pass(passes.drop_tests,           "lift",     "likewise"),
    Pass(passes.simplify,             "simplify", "what costs nothing on any devices is done before any is chosen"),
    Pass(passes.constrain,            "simplify", "layouts and stages are said of the simplified graph's tensors"),
    Pass(passes.resume,               "search",   "an earlier search's graph takes the place of this one"),
    Pass(passes.cut_pinned_scans,     "search",   "rewrites what pins name, before strategies are listed"),
    Pass(passes.state_task,           "search",   "the graph and the constraints are final: what is asked is said once"),
    Pass(passes.fuse_by_price,        "search",   "the first form of the graph; prices need the devices"),
    Pass(passes.enumerate_strategies, "search",   "what the solver chooses among"),
    Pass(passes.solve,                "search",   "a plan in hand, which the others are held to"),
    Pass(passes.try_other_forms,      "search",   "fusions and simplifications of the first form may cost more than they save"),
    Pass(passes.fit_in_time,          "search",   "memory is a hard limit: where no form fits in space, or plans get dear"),
    Pass(passes.restructure,          "search",   "moves around the best form alone, since each is planned anew"),
    Pass(passes.prefer_few_bytes,     "search",   "the clock is not exact to half a percent; of the best form alone"),
    Pass(passes.hide_transfers,       "search",   "splits the operations of the plan in hand, whose strategies it keeps"),
    Pass(passes.choose_stages,        "search",   "of the graph as it is now; stages are compared with the plan without"),
    Pass(passes.compare_whole_graph,  "search",   "what a person would try first is never better than the plan"),
    Pass(passes.say,                  "search",   "the plan taken, in the words of a format"),
    Pass(passes.pareto_front,         "search",   "of all that was found"),
    Pass(passes.hoist_transfers,      "search",   "last: changes the order of a program, and no strategy"),
    Pass(passes.verify,               "verify",   "a plan that breaks a law goes no further"),
    Pass(passes.prove_rewrites,       "verify",   "the plan's graph is the lifted one"),
    Pass(passes.compare_with_model,   "verify",   "and the lifted one is the model"),
    Pass(passes.measured_configs,     "codegen",  "what this machine's GPU was measured with"),
    Pass(passes.emit_kernels,         "codegen",  "sources of a plan that is proved"),
)
# fmt: on
MeshLike = str | Mesh | Sequence[int] | Mapping[str, int]
TEXT_PASSES = (Pass(passes.read_text, "lift", "a graph that is given as IR text"), *PASSES[6:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Everything that goes into a build directory; ``rewrites`` is the log that is stored,
    ``printed`` the IR after each pass that was named for it."""

    build: store.Build
    constants: Mapping[str, bytes]
    kernels: Mapping[str, str]
    laws: Mapping[str, int]
    rewrites: bytes
    evidence: Sequence[Mapping[str, Any]]
    printed: Mapping[str, str]


def compile_model(options: Options, report: Report = unreported) -> Compiled:
    """ONNX file to a verified build, ready to be written.

    Raises:
        TapestryError: what the user can mend; LawError: a plan that does not pass is never returned.
    """
    runner = begun(options, report)
    searched(runner)
    return finished(runner)


def begun(options: Options, report: Report) -> Runner:
    """The model lifted and constrained: all passes before the search."""
    ort_session.ready()  # for the comparison with the model's file
    check_names(options.print_after, _passes(options))
    with plugins.taking_part() as parts:
        at = asked(options)
    runner = Runner(at=at, report=report, began=options.began, print_after=options.print_after, plugins=parts)
    runner.run(_passes_between(None, passes.resume, _passes(options)))
    return runner


def searched(runner: Runner) -> None:
    """The search.

    Raises:
        PlanError: nothing fits, or there is no plan as asked for.
    """
    runner.run(_passes_between(passes.resume, passes.verify))


def finished(runner: Runner) -> Compiled:
    """The plan verified, and its kernels.

    Raises:
        LawError: a plan that does not pass is never returned.
    """
    left = frozenset[str]()
    while True:
        try:
            runner.run(_passes_between(passes.verify, None))
            break
        except LawError as e:
            left = _wrong(e, runner.at, left)
        with leaving_out(left):
            runner.run(_passes_between(passes.simplify, passes.resume, _passes(runner.at.options)))
            searched(runner)
    at, build = runner.at, build_report.build_of(runner.at)
    if at.options.found:
        at.options.found(at.plan.objective, at.plan.bound)
    document = build_report.document(runner, build)
    document["plugins"] = [p.data() for p in sorted(runner.plugins)]
    evidence = document["certificate"]["evidence"] = [at.evidence, *plugin_evidence(runner.plugins)]
    document["seconds"] = {**runner.seconds, "total": round(time.perf_counter() - runner.began, 4)}
    lifted = passes.as_planned(at)
    constants = {t: lifted.constants[t].tobytes() for t in build.constants}
    return Compiled(
        build=replace(build, report=document),
        constants=constants,
        kernels=at.kernels,
        laws=at.laws,
        rewrites=at.rewrites.log,
        evidence=evidence,
        printed=runner.printed,
    )


def _wrong(e: LawError, at: Compilation, left: frozenset[str]) -> frozenset[str]:
    """What to leave out, too: a rule where its proof failed; everywhere if it was left out somewhere before.

    Raises:
        LawError: no proof of a rule failed, or the rule is left out everywhere; or all of them are errors.
    """
    if not e.rewrites and not flags.strict():  # a law of the plan, which a rewrite may have broken
        try:
            passes.prove_rewrites(at)
        except LawError as behind:
            e = behind if behind.rewrites else e
    rule = next((place.partition("@")[0] for place in e.rewrites), "")
    new = frozenset({rule}) if any(place.startswith(f"{rule}@") for place in left) else e.rewrites
    if flags.strict() or rule not in rule_table() or new <= left:
        raise e
    log.warning("a rewrite is wrong; it is left undone, and the search begins again without %s: %s", ", ".join(sorted(new)), e)
    return left | new


def graph_again(options: Options, build: store.Build) -> Graph:
    """The graph of a build made again at other sizes: by the passes before the search, and by the moves that the build has.

    Raises:
        TapestryError: the model cannot be lifted at these sizes, or the moves do not apply.
    """
    runner = Runner(at=asked(options), report=unreported)
    moves = [parse_move(m) for m in build.moves]
    runner.run(_passes_between(None, passes.simplify))
    if disabled_by(moves):  # what the passes would simplify is not what the plan's graph began as
        return passes.replayed(runner.at, moves)
    runner.run(_passes_between(passes.simplify, passes.resume))
    return passes.replayed(runner.at, moves[len(runner.at.constraints.moves) :])  # those of annotations are behind the graph


def search_again(options: Options, build: store.Build, graph: Graph) -> PricedPlan:
    """The best strategies for a build's graph at other sizes, beginning with the build's own; the plan is not verified."""
    lifted = Lifted(graph=graph, model=Path(build.model), constants={}, nodes=len(graph.ops))
    runner = Runner(at=asked(options).made(earlier=build, lifted=lifted, graph=graph), report=unreported)
    runner.run(_passes_between(passes.constrain, passes.resume))
    was = runner.at.constraints
    constraints = replace(was, moves=(*was.moves, *map(parse_move, build.moves)), rewritable=False)
    runner.at = runner.at.made(constraints=constraints, start=start_of(build.plan))
    runner.run(_passes_between(passes.state_task, passes.verify))
    return runner.at.plan


def _passes(options: Options) -> Sequence[Pass]:
    return TEXT_PASSES if options.model.suffix == TEXT else PASSES


def _passes_between(first: Function | None, end: Function | None, of: Sequence[Pass] = PASSES) -> Sequence[Pass]:
    """The passes from one (by default the first) to another one, which is not among them (by default to the last)."""
    at = [p.function for p in of]
    return of[0 if first is None else at.index(first) : None if end is None else at.index(end)]


# what the passes start from


def asked(options: Options) -> Compilation:
    """What the first passes take: the options, with files read and text parsed."""
    if options.time_limit is not None and not options.time_limit >= 0:  # nan as well
        raise TapestryError(f"{options.time_limit:g} seconds", where="--time-limit", hint="0 or more")
    earlier = store.read(options.resume)[0] if options.resume else None
    if options.target != "torch-cpu" and not options.target.startswith("triton"):
        from tapestry.runtime.plugin_target import PluginTarget

        PluginTarget(options.target)  # else what makes none would be found when the build is run
    for path in options.rules:
        load_rules(path)
    mesh = options.mesh or default_mesh(options.topology)
    annotated = options.sharding and options.model.suffix != TEXT
    if options.configuration is not None and not annotated:
        raise TapestryError("annotations are not read", where="--configuration", hint="without --ignore-sharding, from ONNX")
    devices = device_count(mesh) if mesh else None
    marks, carried = annotations.read(options.model, devices, options.configuration) if annotated else (None, None)
    named = file_mesh_module.mesh(marks) if marks else (MeshAxis("d0", carried.count if carried else 1),)
    if mesh is None or [(a.name, a.size) for a in mesh] == [(a.name, a.size) for a in named]:  # with the file's shares
        mesh = named
    topo = _topology(options, mesh, carried)
    stages, micro = _stages_asked_for(options, topo, marks)
    return Compilation(
        options=options,
        shapes=options.shapes or (annotations.shapes(marks) if marks else {}),
        topology=topo,
        request=parse_request(stages, micro, topo),
        annotations=marks,
        earlier=earlier,
        without=rule_names(options.without),
        unroll_steps=_unroll_steps(options, topo),
        also_whole=_also_whole(options, topo) and not marks,
    )


def _topology(options: Options, mesh: Mesh, carried: ModelTopology | None) -> Topology:
    """The topology asked for; ``auto`` is what was measured on this machine, for plans that run on its processor, and the
    target's card for kernels of a GPU, with the links that the model carries, if any."""
    source = options.topology
    if source == AUTO:
        source = automatic(device_count(mesh)) if options.target == "torch-cpu" else "cpu"
        if options.target.startswith("triton"):
            from tapestry.codegen.triton.run.tuned import card_of

            source = card_of(options.target)
    memory = parse_bytes(options.memory) if options.memory else None
    found = topology(mesh, source, memory, precision=options.precision, reserve=options.memory_reserve)
    if options.reduce_in not in (None, "f32", "native"):
        raise TapestryError(f"partial sums in '{options.reduce_in}'", where="--reduce-in", hint="f32 or native")
    found = found if options.reduce_in is None else replace(found, native_sums=options.reduce_in == "native")
    if options.topology != AUTO:
        return found
    found = replace(found, name=AUTO) if Path(source).is_file() else found
    if carried is None or carried.links is None or carried.links.complete:
        return found
    if carried.count != device_count(mesh):
        text = "topology: the model's links are of %d instances, not of %d, and are not used"
        passes.log.warning(text, carried.count, device_count(mesh))
        return found
    return linked(found, str(carried.links))


def _unroll_steps(options: Options, topo: Topology) -> bool:
    """Whether recurrences are to be lifted step by step: not where one CPU runs them whole, which is faster there."""
    whole = device_count(topo.mesh) == 1 and options.target == "torch-cpu" and not options.memory
    return not whole or bool(options.pins)


def _also_whole(options: Options, topo: Topology) -> bool:
    """Whether recurrences are lifted whole as well, to be planned beside their steps: on several CPUs, where nothing is said of
    single operations."""
    said = options.pins or options.layouts or options.memory or options.stage_at
    return device_count(topo.mesh) > 1 and options.target == "torch-cpu" and not said


def _stages_asked_for(options: Options, topo: Topology, marks: Annotations | None) -> tuple[str, str]:
    """How many stages and micro-batches are asked for. A file that says in how many it was planned, or whose nodes name their
    stages, and nothing else or the layouts on the devices of each, gets as many, unless the user says otherwise.

    Raises:
        TapestryError: the numbers that are asked for contradict each other.
    """
    stages, micro = options.stages, options.micro_batches
    staged = annotations.staged(marks) if marks else None
    if staged and stages == micro == "auto":
        passes.log.warning("sharding: %d stages and %d micro-batch(es), as the file says; the rest is searched anew", *staged)
        stages, micro = map(str, staged)
    elif marks and marks.stages > 1 and stages == "auto" and (marks.apart or not (marks.outs or marks.reads)):
        stages = str(marks.stages)
    if options.stage_at:
        asked, stages = stages, str(len(options.stage_at) + 1)
        if options.stages not in ("auto", stages):
            why = f"{some(len(options.stage_at), 'cut')} would make {stages} stages"
            raise TapestryError(f"{asked} stages", where="--stages", why=why, hint="leave --stages out")
    return _of_one_order(options, topo, stages), micro


def _of_one_order(options: Options, topo: Topology, stages: str) -> str:
    """The stages asked for; on devices that are in an order of the file's own there is one.

    Raises:
        TapestryError: several are asked for there.
    """
    if not any(a.order for a in topo.mesh):
        return stages
    if options.stage_at or stages not in ("auto", "1"):
        why, hint = (
            "the file's specs put parts on devices in another order than they are numbered",
            "--stages 1, or --ignore-sharding",
        )
        raise TapestryError("no stages on this order of devices", where="--stages", why=why, hint=hint)
    return "1"


def mesh_of(devices: int | None, mesh: MeshLike | None) -> Mesh | None:
    """The mesh that ``--devices`` or ``--mesh`` asks for: a text, sizes, sizes by name, or mesh axes.

    Raises:
        TapestryError: both are given, or one of them is none.
    """
    if devices is not None and mesh is not None:
        raise TapestryError("--devices and --mesh exclude each other")
    if devices is not None:
        if type(devices) is not int or devices < 1:
            raise TapestryError(f"{devices!r} devices", where="--devices", hint="a whole number of at least 1")
        return parse_mesh(str(devices))
    if isinstance(mesh, Mapping):
        return parse_mesh(",".join(f"{name}={size}" for name, size in mesh.items()))
    if mesh is None or isinstance(mesh, str):
        return parse_mesh(mesh) if mesh else None
    axes = tuple(a for a in mesh if isinstance(a, MeshAxis))
    for a in axes:
        if a.order and sorted(a.order) != list(range(a.size)):
            raise TapestryError(f"the order {a.order} of axis '{a.name}'", where="mesh", hint=f"0 to {a.size - 1}, each once")
    return axes if len(axes) == len(mesh) else parse_mesh("x".join(map(str, mesh)))
