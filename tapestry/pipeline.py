"""The whole compiler on one screen: `PASSES` is every function that can touch a graph or a plan, in order.

Each line names the values that its function takes and gives, and gets no others; ``tapestry compile --print-passes`` shows what
ran, ``--print-after PASS`` the IR there. A plan is lowered wherever it is compared with another one, since its memory is
that of its program: so `solve` and all that follow give programs, with rings for gathers where those are better.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tapestry import build_report, passes
from tapestry.build import store
from tapestry.errors import TapestryError, some
from tapestry.interop.instance_map import ModelTopology
from tapestry.ir.graph import Graph
from tapestry.ir.plan import PARTS, Mesh, MeshAxis, device_count
from tapestry.lift import onnx_to_graph as lift
from tapestry.lift.file.structure import TEXT
from tapestry.model_evidence import plugin_evidence
from tapestry.onnx_eval import ort_session
from tapestry.pass_runner import Pass, Report, Runner, check_names
from tapestry.plan import search_passes as search
from tapestry.plan.pipelines.stage_choice import parse_request
from tapestry.plan.search.planner import start_of
from tapestry.plan.search.priced_plan import PricedPlan, TooBig
from tapestry.plan.solver.budget import Found, unseen
from tapestry.plan.topology import Topology, default_mesh, linked, parse_bytes, parse_mesh, topology
from tapestry.plugins import entry_points as plugins
from tapestry.rewrites import load_rules
from tapestry.rewrites.core.driver import disabled_by, rule_names
from tapestry.rewrites.core.rule import parse_move
from tapestry.runtime.calibration.automatic import AUTO, automatic
from tapestry.sharding import annotations
from tapestry.sharding import annotations as file_mesh
from tapestry.sharding.annotations import Annotations

# fmt: off
PASSES = (
    #    phase       pass                                 takes                                     gives
    Pass("lift",     lift.read_model,                     "model weights kept",                     "source"),
    Pass("lift",     lift.bind_symbols,                   "source shapes",                          "symbols"),
    Pass("lift",     passes.check_memory,                 "source topology memory",                 ""),
    Pass("lift",     passes.lift_whole,                   "source symbols also_whole seed",         "whole"),
    Pass("lift",     lift.normalize,                      "source symbols unroll_steps",            "prepared"),
    Pass("lift",     lift.lift_nodes,                     "source symbols prepared unroll_steps "
                                                          "seed",                                   "lifted"),
    Pass("lift",     passes.accumulate,                   "lifted whole accumulate",                "lifted whole sums"),
    Pass("lift",     passes.drop_tests,                   "lifted whole assume_finite",             "lifted whole"),
    Pass("simplify", passes.simplify,                     "lifted annotations exact without",       "graph"),
    Pass("simplify", passes.constrain,                    "lifted graph annotations topology "
                                                          "layouts pins exact stage_at request "
                                                          "without",                                "graph constraints"),
    Pass("search",   passes.resume,                       "lifted whole graph constraints earlier", "graph constraints start"),
    Pass("search",   passes.cut_pinned_scans,             "lifted graph constraints topology "
                                                          "exact request",                          "graph constraints"),
    Pass("search",   passes.state_task,                   "lifted whole graph constraints start "
                                                          "earlier topology request target "
                                                          "exact time_limit interrupt found without "
                                                          "for_format",                             "task budget"),
    Pass("search",   search.fuse_by_price,                "graph task",                             "form"),
    Pass("search",   search.enumerate_strategies,         "form task",                              "problems"),
    Pass("search",   search.solve,                        "form problems task budget",              "candidate"),
    Pass("search",   search.try_other_forms,              "candidate graph task budget",            "candidate"),
    Pass("search",   search.fit_in_time,                  "candidate task budget",                  "candidate"),
    Pass("search",   search.restructure,                  "candidate graph task budget",            "candidate"),
    Pass("search",   search.choose_stages,                "candidate task budget",                  "planned plan"),
    Pass("search",   search.compare_whole_graph,          "planned plan form task budget",          "planned plan peak_alone"),
    Pass("search",   passes.say,                          "plan task budget for_format",            "plan"),
    Pass("search",   passes.pareto_front,                 "planned task constraints budget pareto", "front"),
    Pass("search",   passes.hoist_transfers,              "plan topology",                          "plan"),
    Pass("verify",   passes.verify,                       "plan topology exact",                    "laws"),
    Pass("verify",   passes.prove_rewrites,               "plan lifted whole",                      "rewrites"),
    Pass("verify",   passes.compare_with_model,           "plan lifted whole planned constraints",  "evidence"),
    Pass("codegen",  passes.measured_configs,             "plan target precision",                  "knobs"),
    Pass("codegen",  passes.emit_kernels,                 "plan target precision knobs",            "kernels"),
)
# fmt: on
TEXT_PASSES = (Pass("lift", lift.read_text, "model weights", "lifted whole"), *PASSES[6:])  # a graph that is given as IR text


MeshLike = str | Mesh | Sequence[int] | Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What ``tapestry compile`` takes; see README. ``print_after`` names passes after which the IR is printed,
    ``without`` rules (or a phase of them) that are not used, ``kept`` values that are computed whatever is known of them."""

    model: Path
    shapes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    mesh: Mesh | None = None
    topology: str = AUTO
    memory: str | None = None
    memory_reserve: str | None = None
    target: str = "torch-cpu"
    precision: str = "ieee"
    accumulate: str | None = None
    reduce_in: str = "f32"
    assume_finite: bool = False
    for_format: str | None = None
    pins: Sequence[str] = ()
    layouts: Sequence[str] = ()
    rules: Sequence[Path] = ()
    weights: bool = True
    time_limit: float | None = None
    seed: int = 0
    pareto: bool = False
    sharding: bool = True
    configuration: str | None = None
    resume: Path | None = None
    exact: bool = False
    without: Sequence[str] = ()
    interrupt: threading.Event = field(default_factory=threading.Event)
    found: Found = unseen
    stages: str = "auto"
    micro_batches: str = "auto"
    stage_at: Sequence[str] = ()
    print_after: Sequence[str] = ()
    kept: frozenset[str] = frozenset()


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


def compile_model(options: Options, report: Report = lambda phase, name: None) -> Compiled:
    """ONNX file to a verified build, ready to be written.

    Raises:
        TapestryError: what the user can mend; LawError: a plan that does not pass is never returned.
    """
    runner = begun(options, report)
    searched(runner, options)
    return finished(runner)


def begun(options: Options, report: Report) -> Runner:
    """The model lifted and constrained: all passes before the search."""
    start = time.perf_counter()
    ort_session.ready()  # for the comparison with the model's file
    check_names(options.print_after, _passes(options))
    with plugins.taking_part() as parts:
        values = {**_values(options), "start_s": start}
    runner = Runner(values=values, report=report, print_after=options.print_after, plugins=parts)
    runner.run(_between(None, passes.resume, _passes(options)))
    return runner


def searched(runner: Runner, options: Options) -> None:
    """The search.

    Raises:
        PlanError: nothing fits, or there is no plan as asked for.
    """
    try:
        runner.run(_between(passes.resume, passes.verify))
    except TooBig as e:
        if options.memory and options.memory.isdecimal():
            e.hint = f"{options.memory} is bytes: {options.memory}MiB, if that is meant; {e.hint}"
        raise


def finished(runner: Runner, more: Mapping[str, Any] | None = None) -> Compiled:
    """The plan verified, and its kernels; ``more`` goes into the report.

    Raises:
        LawError: a plan that does not pass is never returned.
    """
    runner.run(_between(passes.verify, None))
    build = build_report.build_of(runner)
    document = {**build_report.document(runner, build), **(more or {})}
    document["plugins"] = [p.data() for p in sorted(runner.plugins)]
    evidence = document["certificate"]["evidence"] = [runner.values["evidence"], *plugin_evidence(runner.plugins)]
    document["seconds"] = {**runner.seconds, "total": round(time.perf_counter() - runner.values["start_s"], 4)}
    lifted = build_report.lifted_of(runner)
    constants = {t: lifted.constants[t].tobytes() for t in build.constants}
    return Compiled(
        build=replace(build, report=document), constants=constants, kernels=runner.values["kernels"],
        laws=runner.values["laws"], rewrites=runner.get("rewrites", passes.Rewrites).log,
        evidence=evidence, printed=runner.printed,
    )  # fmt: skip


def graph_again(options: Options, build: store.Build) -> Graph:
    """The graph of a build made again at other sizes: by the passes before the search, and by the moves that the build has.

    Raises:
        TapestryError: the model cannot be lifted at these sizes, or the moves do not apply.
    """
    runner = Runner(values=_values(options), report=lambda phase, name: None)
    moves = [parse_move(m) for m in build.moves]
    runner.run(_between(None, passes.simplify))
    lifted, whole, left_out = runner.get("lifted", lift.Lifted), runner.values["whole"], disabled_by(moves)
    if left_out:  # what the passes would simplify is not what the plan's graph began as
        return passes.replayed(lifted, whole, lifted.graph, moves)
    runner.run(_between(passes.simplify, passes.resume))
    own = len(runner.get("constraints", passes.Constraints).moves)  # those of the model's annotations are behind the graph
    return passes.replayed(lifted, whole, runner.get("graph", Graph), moves[own:])


def search_again(options: Options, build: store.Build, graph: Graph) -> PricedPlan:
    """The best strategies for a build's graph at other sizes, beginning with the build's own; the plan is not verified."""
    lifted = lift.Lifted(graph=graph, model=Path(build.model), constants={}, nodes=len(graph.ops))
    values = {**_values(options), "earlier": build, "lifted": lifted, "whole": None, "graph": graph}
    runner = Runner(values=values, report=lambda phase, name: None)
    runner.run(_between(passes.constrain, passes.resume))
    constraints = runner.get("constraints", passes.Constraints)
    moves = (*constraints.moves, *map(parse_move, build.moves))
    runner.values |= {"constraints": replace(constraints, moves=moves, rewritable=False), "start": start_of(build.plan)}
    runner.run(_between(passes.state_task, passes.verify))
    return runner.get("plan", PricedPlan)


def _passes(options: Options) -> Sequence[Pass]:
    return TEXT_PASSES if options.model.suffix == TEXT else PASSES


def _between(
    first: Callable[..., Any] | None, end: Callable[..., Any] | None, of: Sequence[Pass] = PASSES
) -> Sequence[Pass]:  # fmt: skip
    """The passes from one (by default the first) to another one, which is not among them (by default to the last)."""
    at = [p.function for p in of]
    return of[0 if first is None else at.index(first) : None if end is None else at.index(end)]


# what the passes start from


def _values(options: Options) -> dict[str, Any]:
    """The values that the first passes take: the options, with files read and text parsed."""
    if options.time_limit is not None and not options.time_limit >= 0:  # nan as well
        raise TapestryError(f"{options.time_limit:g} seconds", where="--time-limit", hint="0 or more")
    earlier = store.read(options.resume)[0] if options.resume else None
    if options.target != "torch-cpu" and not options.target.startswith("triton"):
        from tapestry.runtime.target_protocol import PluginTarget

        PluginTarget(options.target)  # else what makes none would be found when the build is run
    for path in options.rules:
        load_rules(path)
    mesh = options.mesh or default_mesh(options.topology)
    annotated = options.sharding and options.model.suffix != TEXT
    if options.configuration is not None and not annotated:
        raise TapestryError("annotations are not read", where="--configuration", hint="without --ignore-sharding, from ONNX")
    devices = device_count(mesh) if mesh else None
    marks, carried = annotations.read(options.model, devices, options.configuration) if annotated else (None, None)
    named = file_mesh.mesh(marks) if marks else (MeshAxis("d0", carried.count if carried else 1),)
    if mesh is None or [(a.name, a.size) for a in mesh] == [(a.name, a.size) for a in named]:  # with the file's shares
        mesh = named
    topo = _topology(options, mesh, carried)
    stages, micro = _stages(options, topo, marks)
    return {
        "model": options.model, "weights": options.weights, "seed": options.seed, "memory": options.memory,
        "shapes": options.shapes or (annotations.shapes(marks) if marks else {}), "unroll_steps": _unroll_steps(options, topo),
        "also_whole": _also_whole(options, topo) and not marks,
        "annotations": marks, "topology": topo, "layouts": options.layouts, "pins": options.pins, "exact": options.exact,
        "accumulate": options.accumulate, "assume_finite": options.assume_finite, "without": rule_names(options.without),
        "stage_at": options.stage_at, "for_format": options.for_format,
        "earlier": earlier, "request": parse_request(stages, micro, topo), "target": options.target,
        "precision": options.precision, "time_limit": options.time_limit, "interrupt": options.interrupt,
        "found": options.found, "kept": options.kept,
        "pareto": options.pareto, "resumed": str(options.resume) if options.resume else None,
    }  # fmt: skip


def _topology(options: Options, mesh: Mesh, carried: ModelTopology | None) -> Topology:
    """The topology asked for; ``auto`` is what was measured on this machine, for plans that run on its processor, with the
    links that the model carries, if any."""
    source = options.topology
    if source == AUTO:
        source = automatic(device_count(mesh)) if options.target == "torch-cpu" else "cpu"
    memory = parse_bytes(options.memory) if options.memory else None
    found = topology(mesh, source, memory, precision=options.precision, reserve=options.memory_reserve)
    if options.reduce_in not in ("f32", "native"):
        raise TapestryError(f"partial sums in '{options.reduce_in}'", where="--reduce-in", hint="f32 or native")
    found = replace(found, native_sums=options.reduce_in == "native")
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
    return not whole or options.exact or bool(options.pins)


def _also_whole(options: Options, topo: Topology) -> bool:
    """Whether recurrences are lifted whole as well, to be planned beside their steps: on several CPUs, where nothing is said of
    single operations."""
    said = options.exact or options.pins or options.layouts or options.memory or options.stage_at
    return device_count(topo.mesh) > 1 and options.target == "torch-cpu" and not said


def _stages(options: Options, topo: Topology, marks: Annotations | None) -> tuple[str, str]:
    """How many stages and micro-batches are asked for. A file that says in how many it was planned, or whose nodes name their
    stages, and nothing else or the layouts on the devices of each, gets as many, unless the user says otherwise; an exact plan
    has one of each.

    Raises:
        TapestryError: exact results are asked for where they cannot be had.
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
    if not options.exact:
        return _of_one_order(options, topo, stages), micro
    if PARTS % device_count(topo.mesh):
        what = f"exact plans are for numbers of devices that divide {PARTS}"
        raise TapestryError(what, where="--exact", why=f"the mesh has {device_count(topo.mesh)}")
    if options.target != "torch-cpu":
        raise TapestryError("exact plans run on torch-cpu", where="--exact", why=f"the target is {options.target}")
    if options.accumulate == "f16":
        raise TapestryError("exact sums are not in f16", where="--exact", hint="no --accumulate")
    if stages not in ("auto", "1") or micro not in ("auto", "1"):
        raise TapestryError("exact plans have one stage and one batch", where="--exact", hint="no --stages, no --micro-batches")
    return "1", "1"


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
