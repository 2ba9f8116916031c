"""The whole compiler as one flat function, one named line per stage."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tapestry.rewrites  # noqa: F401  (fills the table of rules)
import tapestry.sharding.annotations as marking
from tapestry import flags
from tapestry.build import store
from tapestry.codegen import kernel_sources
from tapestry.codegen.unfused import unfused
from tapestry.errors import LawError, TapestryError
from tapestry.ir.canonical_parts import PARTS
from tapestry.ir.graph import Graph
from tapestry.ir.plan import Mesh, MeshAxis, Plan, device_count
from tapestry.ir.program import Load, Program, Reduce, Transfer, device_bytes, payload_bytes, peak_bytes, transfer_bytes
from tapestry.ir.syntax.printer import to_text
from tapestry.lift import Lifted, lift
from tapestry.lift.model_references import check_references
from tapestry.plan.fusion import Machine
from tapestry.plan.hoist_transfers import early
from tapestry.plan.layout_constraints import Fixed
from tapestry.plan.pipelines.stage_choice import parse_request
from tapestry.plan.requests import parse_layouts, parse_pins, scan_blocks
from tapestry.plan.search.pareto import fronts, undominated
from tapestry.plan.search.planner import Found, search
from tapestry.plan.search.resume import Start, fingerprint, start_of
from tapestry.plan.simulate import ASSUMPTION, simulate
from tapestry.plan.solver.budget import Budget
from tapestry.plan.structural_search import replay
from tapestry.plan.task import Task, solve, staging
from tapestry.plan.topology import Link, Topology, default_mesh, from_data, parse_bytes, parse_mesh, shared, to_data, topology
from tapestry.rewrites.core.fixpoint import left_out, simplify
from tapestry.rewrites.core.rule import Move, parse_move
from tapestry.rewrites.equations.registry import load_rules
from tapestry.verify import certificate, layout_laws

log = logging.getLogger("tapestry")
Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What ``tapestry compile`` takes; see README."""

    model: Path
    shapes: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mesh | None = None
    topology: str = "cpu"
    memory: str | None = None
    target: str = "torch-cpu"
    precision: str = "ieee"
    pins: Sequence[str] = ()
    layouts: Sequence[str] = ()
    rules: Sequence[Path] = ()
    weights: bool = True
    time_limit: float = 60.0
    seed: int = 0
    pareto: bool = False
    sharding: bool = True
    resume: Path | None = None
    exact: bool = False
    interrupt: threading.Event = field(default_factory=threading.Event)
    stages: str = "auto"
    micro_batches: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Everything that goes into a build directory."""

    build: store.Build
    constants: Mapping[str, bytes]
    kernels: Mapping[str, str]
    laws: Mapping[str, int]


class _Clock:
    """Seconds per stage, shown as they pass."""

    def __init__(self, report: Report) -> None:
        self.seconds: dict[str, float] = {}
        self.report = report

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        self.report(stage, 0.0)
        yield
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.perf_counter() - start, 4)
        log.log(logging.WARNING if flags.debug_level() else logging.INFO, "%s: %.3f s", stage, self.seconds[stage])


def compile_model(options: Options, report: Report = lambda stage, seconds: None) -> Compiled:
    """ONNX file to a verified build, ready to be written.

    Raises:
        TapestryError: what the user can mend; LawError: a plan that does not pass is never returned.
    """
    start, clock = time.perf_counter(), _Clock(report)
    if not options.time_limit >= 0:  # nan as well
        raise TapestryError(f"{options.time_limit:g} seconds", where="--time-limit", hint="0 or more")
    earlier = store.read(options.resume)[0] if options.resume else None
    for path in options.rules:
        load_rules(path)
    marks = _annotations(options)
    topo = _topology(options, marks)
    staged = marking.staged(marks) if marks else None
    if staged:
        options = _as_staged(options, *staged)
    options = _as_exact(options, topo)
    with clock("lift"):
        sizes = options.shapes or (marking.shapes(marks) if marks else {})
        lifted = lift(options.model, sizes, weights=options.weights, seed=options.seed, steps=_steps(options, topo))
    with clock("simplify"):
        given = marking.constraints(marks, lifted.graph, topo.mesh) if marks and not staged else None
        graph = given.graph if given else simplify(lifted.graph)
    with clock("search"):
        graph, found, moves, extra = _plan(graph, lifted, topo, options, given, earlier)
        topo, found = replace(topo, mesh=found.plan.mesh), replace(found, program=early(found.program))
        alone = _unsharded_peak(graph, topo)
    with clock("verify"):
        laws = certificate.check(
            found.plan.annotated(), found.program, limit=topo.memories(), stated_peak=peak_bytes(found.program)[0],
            places=found.plan.places, streamed=found.plan.streamed, exact=options.exact,
        )  # fmt: skip
    with clock("codegen"):
        knobs = _tuned(found, options)
        kernels = kernel_sources.triton_sources(found.plan.graph, found.program, options.target, options.precision, knobs)
    build = replace(_build(lifted, found, topo, options, moves), knobs=knobs)
    document = _report(lifted, found, topo, alone, kernels, laws, moves)
    document["seconds"] = {**clock.seconds, "total": round(time.perf_counter() - start, 4)}
    document["unified"], document["unfused"] = lifted.unified, unfused(lifted.graph)
    document |= extra
    constants = {t: lifted.constants[t].tobytes() for t in build.constants}
    return Compiled(build=replace(build, report=document), constants=constants, kernels=kernels, laws=laws)


def _steps(options: Options, topo: Topology) -> bool:
    """Whether recurrences are to be lifted step by step: not where one CPU runs them whole, which is faster there."""
    whole = device_count(topo.mesh) == 1 and options.target == "torch-cpu" and not options.memory
    return not whole or options.exact or bool(options.pins)


def _as_exact(options: Options, topo: Topology) -> Options:
    """The options of an exact plan: one stage and no micro-batches.

    Raises:
        TapestryError: exact results are asked for where they cannot be had.
    """
    if not options.exact:
        return options
    if PARTS % device_count(topo.mesh):
        what = f"exact plans are for numbers of devices that divide {PARTS}"
        raise TapestryError(what, where="--exact", why=f"the mesh has {device_count(topo.mesh)}")
    if options.target != "torch-cpu":
        raise TapestryError("exact plans run on torch-cpu", where="--exact", why=f"the target is {options.target}")
    if options.stages not in ("auto", "1") or options.micro_batches not in ("auto", "1"):
        raise TapestryError("exact plans have one stage and one batch", where="--exact", hint="no --stages, no --micro-batches")
    return replace(options, stages="1", micro_batches="1")


def _annotations(options: Options) -> marking.Annotations | None:
    """The model's own sharding, unless it is to be ignored."""
    if not options.sharding:
        return None
    mesh = options.mesh or default_mesh(options.topology)
    return marking.read(options.model, device_count(mesh) if mesh else None)


def _topology(options: Options, marks: marking.Annotations | None) -> Topology:
    stated = options.mesh or default_mesh(options.topology)
    mesh = stated or (marking.mesh(marks) if marks else (MeshAxis("d0", 1),))
    return topology(mesh, options.topology, parse_bytes(options.memory) if options.memory else None)


def _plan(
    graph: Graph, lifted: Lifted, topo: Topology, options: Options, given: marking.Given | None, earlier: store.Build | None
) -> tuple[Graph, Found, list[Move], dict[str, Any]]:
    """Search, first over strategies, then (unless the model gives its sharding) over structural rewrites around them."""
    began, budget = time.monotonic(), Budget.of(options.time_limit, options.interrupt)
    inputs, outputs = parse_layouts(options.layouts, graph, topo.mesh)
    if given:
        inputs, outputs = {**given.inputs, **inputs}, {**given.outputs, **outputs}
        for note in given.notes:
            log.warning("sharding: %s", note)
    # a pin names an operation of the graph as it is, and an exact plan computes that graph on any mesh
    free = not options.pins and not given and not options.exact
    start, moves = Start(), list(given.moves) if given else []
    again = earlier is not None and _sha256(lifted) == earlier.model_sha256
    if earlier:
        graph, start, more = _resumed(graph, lifted, earlier, rewritten=free)
        moves += more
    folded = sorted({s for op in lifted.graph.ops for s in op.source})
    pins = list(options.pins)
    if pins and not options.exact:
        graph, blocks, more = scan_blocks(parse_pins(pins, graph, topo.mesh, folded), graph, topo.mesh)
        moves, pins = moves + blocks, pins + more
    request = parse_request(options.stages, options.micro_batches, topo)
    task = Task(
        topo=topo, pins=pins, inputs=inputs, outputs=outputs, start=start, rewritten=free,
        ways=[topo] if options.layouts or given or options.exact else shared(topo),  # a layout that is given has equal parts
        folded=folded,
        fixed=replace(given.fixed if given else Fixed(), exact=options.exact),
        request=staging(request, bound=bool(options.pins or options.layouts or given)),
        again=_fitted_before(earlier) if earlier else None,
        machine=_machine(topo, options) if free and not again else None,
        leave=left_out(moves), simplified=(lambda leave: simplify(lifted.graph, leave=leave)) if free and not earlier else None,
    )  # fmt: skip
    done = solve(task, graph, budget)
    _debug(done.found)
    extra: dict[str, Any] = {"requests": {"pins": list(options.pins), "layouts": list(options.layouts)}}
    if given:
        extra["requests"]["sharding"] = {**given.counts, "notes": list(given.notes)}
    if options.pareto:
        points = fronts(task.problems(done.graph, [*moves, *done.base]), budget)
        extra["pareto"] = [asdict(p) for p in undominated([*points, *(done.fitted.points if done.fitted else ())])]
    if done.fitted:
        extra["fit"] = dict(done.fitted.report)
    extra["search"] = _search_record(done.found, budget, time.monotonic() - began, options, earlier)
    return done.graph, done.found, [*moves, *done.moves], extra | done.choice.report


def _machine(topo: Topology, options: Options) -> Machine:
    return Machine(device=topo.device, eager=options.target == "torch-cpu", precision=options.precision)


def _sha256(lifted: Lifted) -> str:
    return hashlib.sha256(lifted.model.read_bytes()).hexdigest()


def _resumed(graph: Graph, lifted: Lifted, earlier: store.Build, *, rewritten: bool) -> tuple[Graph, Start, list[Move]]:
    """The graph that an earlier search ended with, made again from the model; its strategies, its bound and its moves."""
    if _sha256(lifted) != earlier.model_sha256:
        log.warning("--resume: the build is of another model: its strategies are tried where they apply, its bound is not used")
    record, bound = earlier.report.get("search"), earlier.report.get("lower_bound_s")
    key = record.get("problem") if isinstance(record, Mapping) else None
    if earlier.plan.stages:
        log.warning("--resume: a plan with pipeline stages is searched anew")
        return graph, Start(), []
    start = start_of(earlier.plan)
    if isinstance(key, str) and isinstance(bound, float) and math.isfinite(bound):
        start = start_of(earlier.plan, bound, key)
    if not rewritten or not earlier.moves or "fit" in earlier.report:
        return graph, start, []
    try:
        moves = [parse_move(m) for m in earlier.moves]
        again = replay(simplify(lifted.graph, leave=left_out(moves)) if left_out(moves) else graph, moves)
    except TapestryError as e:
        log.warning("--resume: the build's rewrites do not apply, the search begins without them: %s", e)
        return graph, start, []
    return again, start, moves


def _fitted_before(earlier: store.Build) -> tuple[Plan, list[Move]] | None:
    """The plan of a build that fits in time only, with the moves to its graph."""
    if "fit" not in earlier.report:
        return None
    try:
        return earlier.plan, [parse_move(m) for m in earlier.moves]
    except TapestryError:
        return None


def _search_record(
    found: Found, budget: Budget, seconds: float, options: Options, earlier: store.Build | None
) -> dict[str, Any]:
    """How the search ended, and what a later one needs to go on."""
    before = earlier.report.get("search") if earlier else None
    spent = before.get("seconds", 0.0) if isinstance(before, Mapping) else 0.0
    ended = "proved" if found.gap <= 1e-9 else "interrupted" if budget.interrupted() else "time" if budget.over() else "stalled"
    return {
        "ended": ended, "interrupted": budget.interrupted(), "seconds": round(spent + seconds, 4),
        "problem": fingerprint(found.problem) if found.problem else "",
        "resumed": str(options.resume) if options.resume else None,
    }  # fmt: skip


def _as_staged(options: Options, stages: int, micro: int) -> Options:
    """A file that says in how many stages and micro-batches it was planned gets as many, unless the user says otherwise."""
    if options.stages != "auto" or options.micro_batches != "auto":
        return options
    log.warning("sharding: %d stages and %d micro-batch(es), as the file says; the rest is searched anew", stages, micro)
    return replace(options, stages=str(stages), micro_batches=str(micro))


def _tuned(found: Found, options: Options) -> dict[str, dict[str, Any]]:
    """Knobs measured for the plan's kernels on this machine, where it has a GPU of the target's kind."""
    from tapestry.codegen.triton.run.tuned import cache_of_target, recorded

    if not options.target.startswith("triton"):
        return {}
    cache = cache_of_target(flags.cache_folder(), options.target, options.precision)
    return {} if cache is None else recorded(cache, found.plan.graph, kernel_sources.kernels(found.plan.graph, found.program))


def _debug(found: Found) -> None:
    if flags.debug_level() >= 2:
        log.warning("objective %.6g s, bound %.6g s, gap %.4f", found.objective, found.bound, found.gap)
    if flags.debug_level() >= 3:
        log.warning("%s", to_text(found.plan.annotated()))


def _unsharded_peak(graph: Graph, topo: Topology) -> int:
    """Peak bytes of the same graph on one device of unlimited memory."""
    one = replace(
        topo,
        mesh=(MeshAxis("d0", 1),),
        links=(Link(0.0, 0.0),),
        joined=(),
        kinds=(),
        device=replace(topo.device, memory=1 << 62),
    )
    return peak_bytes(search(graph, one).program)[0][0]


def _build(lifted: Lifted, found: Found, topo: Topology, options: Options, moves: list[Move]) -> store.Build:
    constants: dict[str, tuple[int, int]] = {}
    offset = 0
    for t, w in found.plan.graph.weights.items():
        if w.file == "":
            constants[t] = (offset, lifted.constants[t].nbytes)
            offset += lifted.constants[t].nbytes
    return store.Build(
        model=str(lifted.model), model_sha256=_sha256(lifted), plan=found.plan,
        program=found.program, target=options.target, memory=topo.device.memory, report={}, moves=tuple(map(str, moves)),
        peak_bytes=tuple(peak_bytes(found.program)[0]), constants=constants,
        topology=to_data(topo), exact=options.exact, precision=options.precision,
    )  # fmt: skip


def _report(
    lifted: Lifted,
    found: Found,
    topo: Topology,
    alone: int,
    kernels: Mapping[str, str],
    laws: Mapping[str, int],
    moves: list[Move],
) -> dict[str, Any]:
    """The JSON document of ``compile``."""
    graph, program = found.plan.graph, found.program
    loads = [program.buffers[s.buffer] for s in program.steps if isinstance(s, Load)]
    return {
        "model": str(lifted.model), "nodes": lifted.nodes, "ops": len(graph.ops), "signatures": found.distinct,
        "left_out": found.problem.left_out if found.problem else 0,
        "devices": program.devices, "objective_s": found.objective, "lower_bound_s": found.bound, "gap": found.gap,
        "simulated_s": simulate(found.plan, program, topo).total, "overlap": ASSUMPTION,
        "peak_bytes": peak_bytes(program)[0], "memory_bytes": topo.device.memory, "unsharded_peak_bytes": alone,
        "host_load_bytes": sum(int(device_bytes(b).sum()) for b in loads),
        "transfers": transfers(program), "kernels": len(kernels), "moves": list(map(str, moves)),
        "certificate": {"passed": True, "laws": dict(laws)},
        "host_values": {t.name: t.about for t in graph.tensors.values() if t.on_host},  # bytes unknown, in no peak
    }  # fmt: skip


def transfers(program: Program) -> list[dict[str, Any]]:
    """Transfers by kind: how many, bytes summed over senders, and the largest per-device payload."""
    out: dict[str, dict[str, Any]] = {}
    for step in program.steps:
        if isinstance(step, Transfer | Reduce):
            row = out.setdefault(step.kind, {"kind": step.kind, "count": 0, "bytes": 0, "payload_bytes": 0})
            row["count"] += 1
            row["bytes"] += transfer_bytes(step, program)
            row["payload_bytes"] = max(row["payload_bytes"], payload_bytes(step, program))
    return list(out.values())


def _limits(build: store.Build) -> list[int]:
    """Bytes that each device has."""
    topo = from_data(build.topology)
    return topo.memories() if topo.kinds else [build.memory] * build.plan.devices


def verify_build(folder: Path) -> tuple[store.Build, dict[str, int]]:
    """Re-check a build directory from its files alone: hashes, every law, memory, kernels.

    Raises:
        BuildError: the files are not what their hashes say; LawError: the plan breaks a law.
    """
    build, _ = store.read(folder)
    plan = build.plan
    stated = list(build.peak_bytes)
    laws = certificate.check(
        plan.annotated(),
        build.program,
        limit=_limits(build),
        stated_peak=stated,
        places=plan.places,
        streamed=plan.streamed,
        exact=build.exact,
    )
    laws["agreement"] += layout_laws.check(plan)
    laws["model"] = check_references(plan.graph, Path(build.model), build.model_sha256)
    emitted = kernel_sources.triton_sources(plan.graph, build.program, build.target, build.precision, build.knobs)
    written = {p.name: p.read_bytes() for p in (folder / "kernels").iterdir()} if (folder / "kernels").is_dir() else {}
    for name, source in emitted.items():
        if written.get(name) != source.encode():
            raise LawError(
                "kernels", f"'{name}' is not what the plan generates", where=str(folder), why=_differs(written, name, source)
            )
    laws["kernels"] = len(emitted)
    return build, laws


def _differs(written: Mapping[str, bytes], name: str, source: str) -> str:
    """The first line in which a kernel's file is not what is generated."""
    if name not in written:
        return "there is no such file"
    there, want = written[name].decode(errors="replace").splitlines(), source.splitlines()
    at = next((k for k, (a, b) in enumerate(zip(there, want, strict=False)) if a != b), min(len(there), len(want)))
    said, right = (repr(text[at].strip()[:80]) if at < len(text) else "nothing" for text in (there, want))
    return f"line {at + 1} is {said}, not {right}"


def emit_kernels(folder: Path, output: Path, target: str, report: Callable[[int, int], None]) -> dict[str, Any]:
    """Sources, compiled objects and a resource table of a build's kernels, written in one step; returns the document.

    Raises:
        TapestryError: the target is unknown, or the output is a folder with other things in it.
    """
    from tapestry.codegen.triton import compile_ahead
    from tapestry.codegen.triton.run.report import rows_of, summary

    build, _ = store.read(folder)
    graph = build.plan.graph
    counts = kernel_sources.launches(graph, build.program)
    knobs = build.knobs if target == build.target else {}
    made = kernel_sources.named_kernels(graph, build.program, target, build.precision, knobs)
    files: dict[str, bytes] = {}
    rows: list[dict[str, Any]] = []
    for done, (name, (kernel, source)) in enumerate(made.items()):
        report(done, len(made))
        stem = name.removesuffix(".py")
        files[name] = source.source.encode()
        compiled = compile_ahead(source, target)
        found = rows_of(graph, kernel, source, stem, compiled, counts.get(kernel_sources.key_of(graph, kernel), 0))
        for each, row in zip(compiled, found, strict=True):
            for kind, text in each.asm.items():
                files[f"{row['kernel']}.{kind}"] = text if isinstance(text, bytes) else str(text).encode()
        rows += found
    opaque = kernel_sources.without_kernel(graph)
    model = summary(rows, list(opaque), build.report.get("unfused", {}))
    document = {"target": target, "precision": build.precision, "kernels": rows, "model": model, "opaque": opaque}
    files["resources.json"] = json.dumps(document, indent=1).encode()
    store.write_files(output, files, "resources.json")
    return document


def mesh_of(devices: int | None, mesh: str | None) -> Mesh | None:
    """The mesh that ``--devices`` or ``--mesh`` asks for."""
    if devices is not None and mesh is not None:
        raise TapestryError("--devices and --mesh exclude each other")
    if devices is not None and devices < 1:
        raise TapestryError(f"{devices} devices", where="--devices", hint="at least 1")
    return parse_mesh(str(devices)) if devices is not None else parse_mesh(mesh) if mesh else None
