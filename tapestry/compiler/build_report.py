"""What a compilation leaves: the build that is saved, and the JSON document of ``tapestry compile``."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tapestry.build import store
from tapestry.errors import LawError
from tapestry.ir.program import Load, Program, Reduce, Transfer, device_bytes, payload_bytes, peak_bytes, transfer_bytes
from tapestry.plan.requests import parse_layouts
from tapestry.plan.simulate import simulate
from tapestry.plan.topology import from_data, to_data
from tapestry.rewrites.core.rule import parse_move
from tapestry.verify.rewriting.footprints import tests_dropped

if TYPE_CHECKING:  # a report is held to its plan without the compiler
    from tapestry.compiler.compilation import Compilation
    from tapestry.compiler.pass_runner import Runner
    from tapestry.plan.search.priced_plan import PricedPlan
    from tapestry.plan.search_passes import Planned
    from tapestry.plan.task import Task


def build_of(c: Compilation) -> store.Build:
    """The build that the passes made; its report is still empty."""
    from tapestry.compiler.passes import as_planned, model_hash

    lifted, priced = as_planned(c), c.plan
    topology = replace(c.topology, mesh=priced.plan.mesh)
    constants: dict[str, tuple[int, int]] = {}
    offset = 0
    for t, w in priced.plan.graph.weights.items():
        if w.file == "":
            constants[t] = (offset, lifted.constants[t].nbytes)
            offset += lifted.constants[t].nbytes
    moves = (*c.constraints.moves, *c.planned.moves)
    return store.Build(
        model=str(lifted.model),
        model_sha256=model_hash(lifted),
        plan=priced.plan,
        program=priced.program,
        target=c.options.target,
        memory=topology.device.memory,
        report={},
        moves=tuple(map(str, moves)),
        peak_bytes=tuple(peak_bytes(priced.program)[0]),
        constants=constants,
        topology=to_data(topology),
        precision=c.options.precision,
        knobs=c.knobs,
    )


def plan_hash(build: store.Build) -> str:
    """SHA-256 of a plan and its program as they are written, wherever the model lies and whatever the search reports."""
    return hashlib.sha256(store.encode(replace(build, model="", report={}))).hexdigest()


def document(runner: Runner, build: store.Build) -> dict[str, Any]:
    """The JSON document of ``compile``, without its seconds."""
    from tapestry.codegen.unfused import unfused
    from tapestry.compiler.passes import as_planned

    c, options = runner.at, runner.at.options
    lifted, planned, given = as_planned(c), c.planned, c.constraints.given
    requests: dict[str, Any] = {
        "pins": list(options.pins),
        "layouts": list(options.layouts),
        "stage_at": list(options.stage_at),
    }
    if given:
        requests["sharding"] = {**given.counts, "notes": list(given.notes)}
    out = _facts(c, build)
    out["certificate"] = {"passed": True, "laws": dict(c.laws), "evidence": [c.evidence]}
    follow = {s: {"is": str(f), "size": lifted.shapes[s], "because": f.why} for s, f in lifted.unified.items()}
    out |= {"sizes": {"follow": follow}, "unfused": unfused(lifted.graph), "requests": requests}
    if c.front is not None:
        out["pareto"] = [asdict(p) for p in c.front]
    if planned.alone:
        out["one_device"] = dict(zip(("objective_s", "fits"), planned.alone, strict=True))
    if c.sums:
        out["accumulate"] = c.sums.data()
    if options.for_format:
        out["for_format"] = options.for_format  # (which says what outputs end whole)
    if options.assume_finite:
        out["assume_finite"] = {"operations": tests_dropped(build.plan.graph)}
    if planned.fitted:
        out["fit"] = dict(planned.fitted.report)
    stages = planned.choice.report
    rows = [{**row, "seconds": s} for row, s in zip(stages_of(build), stages["stages"], strict=True)]
    return out | {"search": _search_record(runner)} | stages | {"stages": rows} | {"passes": runner.rows}


def check_report(build: store.Build) -> int:
    """Hold a report to the plan that it is of; returns how many of its facts were made again.

    Seconds are those of the planner's clock (`plan.simulate`), which runs once more; the bound is the search's own statement,
    and is held to be no more than the objective.

    Raises:
        LawError: naming the fact.
    """
    report, program, topology = build.report, build.program, from_data(build.topology)
    if not report:
        return 0
    timed = simulate(build.plan, program, replace(topology, mesh=build.plan.mesh))
    facts: dict[str, Any] = {"simulated_s": timed.total, **facts_of(build), "plan_sha256": plan_hash(build)}
    if build.memory != topology.device.memory:
        raise LawError("report", "the memory limit is not the topology's", why=f"{build.memory}, not {topology.device.memory}")
    for key, value in facts.items():
        if key not in report or not _same_figures(report[key], value):
            why = f"it says {str(report.get(key))[:120]}, made again it is {str(value)[:120]}"
            raise LawError("report", f"'{key}' is not the plan's", where="the report", why=why)
    objective, bound, gap = (float(report[k]) for k in ("objective_s", "lower_bound_s", "gap"))
    if not _same_figures(objective, timed.total) and not objective >= timed.total:
        why = f"it says {objective:.6g} s, the planner's clock {timed.total:.6g} s"
        raise LawError("report", "the objective is not the plan's time", where="the report", why=why)
    if bound > objective * (1 + 1e-9) or abs(gap - (objective - bound) / max(objective, 1e-300)) > 1e-6:
        why = f"objective {objective:.6g} s, bound {bound:.6g} s, gap {gap:.4%}"
        raise LawError("report", "bound and gap contradict the objective", where="the report", why=why)
    _requests(build)
    _check_stages(build)
    return len(facts) + 4


def stages_of(build: store.Build) -> list[dict[str, Any]]:
    """What a report says of each stage, without its seconds."""
    plan, (peak, _) = build.plan, peak_bytes(build.program)
    return [
        {
            "devices": list(s.devices),
            "mesh": ",".join(f"{a.name}={a.size}" for a in s.mesh),
            "ops": plan.stage_of.count(k),
            "peak_bytes": [peak[d] for d in s.devices],
        }
        for k, s in enumerate(plan.stages)
    ]


def _check_stages(build: store.Build) -> None:
    """The stages of the report are those of the plan, and end where that was asked for.

    Raises:
        LawError: naming what differs.
    """
    plan, report = build.plan, build.report
    parts = [m.number("parts") for m in map(parse_move, build.moves) if m.rule == "micro_batch"]
    found = stages_of(build), parts[-1] if len(plan.stages) > 1 and parts else 1
    rows: list[dict[str, Any]] = report.get("stages", [])
    said = [{k: v for k, v in row.items() if k != "seconds"} for row in rows], report.get("micro_batches", 1)
    if said != found:
        why = f"it says {str(said)[:120]}, made again they are {str(found)[:120]}"
        raise LawError("report", "'stages' are not the plan's", where="the report", why=why)
    nodes: list[str] = report.get("requests", {}).get("stage_at", [])
    if nodes and len(nodes) + 1 != len(plan.stages):
        raise LawError("report", f"{len(plan.stages)} stages, {len(nodes)} ends of stages", where="the report")
    for k, text in enumerate(nodes):
        ends = {text, *text.split(",")}
        for op, at in zip(plan.graph.ops, plan.stage_of, strict=True):
            if at > k and ends & {*op.source[-1:]}:
                raise LawError("report", f"stage {k} does not end at {text}", where="the plan", why=f"'{op.outs[0]}' is later")


def facts_of(build: store.Build) -> dict[str, Any]:
    """What a report says that anyone can count in the plan."""
    program = build.program
    return {
        "ops": len(build.plan.graph.ops),
        "devices": program.devices,
        "peak_bytes": list(peak_bytes(program)[0]),
        "memory_bytes": build.memory,
        "memory_reserve_bytes": from_data(build.topology).device.reserve,
        "host_load_bytes": _host_bytes(program),
        "transfers": _transfers(program),
        "moves": list(build.moves),
    }


def _requests(build: store.Build) -> None:
    """The layouts that were asked for are those that the plan keeps to."""
    asked = build.report.get("requests", {})
    inputs, outputs = parse_layouts(asked.get("layouts", ()), build.plan.graph, build.plan.mesh)
    for what, said, mine in (("input", inputs, build.plan.inputs), ("output", outputs, build.plan.outputs)):
        for name, layout in said.items():
            if mine.get(name) != layout:
                why = f"{list(layout)} was asked for, the plan has {mine.get(name)}"
                raise LawError("report", f"the layout of {what} '{name}' is not kept", where="the plan", why=why)
        if not asked.get("sharding") and "for_format" not in build.report and set(mine) - set(said):
            raise LawError("report", f"a layout of {what} '{min(set(mine) - set(said))}' was not asked for", where="the plan")


def _same_figures(a: Any, b: Any) -> bool:
    return math.isclose(a, b, rel_tol=1e-9) if isinstance(a, float) and isinstance(b, float) else a == b


def _host_bytes(program: Program) -> int:
    """Bytes loaded from the host, all devices together."""
    loads = [program.buffers[s.buffer] for s in program.steps if isinstance(s, Load)]
    return sum(int(device_bytes(b).sum()) for b in loads)


def _facts(c: Compilation, build: store.Build) -> dict[str, Any]:
    """The plan in numbers."""
    from tapestry.compiler.passes import as_planned

    priced, topology, graph, lifted = c.plan, c.topology, c.plan.plan.graph, as_planned(c)
    timed = simulate(priced.plan, priced.program, replace(topology, mesh=priced.plan.mesh))
    return {
        "plan_sha256": plan_hash(build),
        "model": str(lifted.model),
        "nodes": lifted.nodes,
        "signatures": priced.distinct,
        **facts_of(build),
        **_bounded(priced, c.planned, c.task),
        "objective_s": priced.objective,
        "lower_bound_s": priced.bound,
        "gap": priced.gap,
        "topology": {
            "name": topology.name,
            "measured": bool(topology.device.classes or topology.calls),
            "figures": topology.figures,
        },
        "simulated_s": timed.total,
        "overlap": timed.assumption,
        "unsharded_peak_bytes": c.peak_alone,
        "kernels": len(c.kernels),
        "rewrites": {"steps": c.rewrites.steps, "shown": dict(c.rewrites.shown)},
        "host_values": {t.name: t.about for t in graph.tensors.values() if t.on_host},  # bytes unknown, in no peak
    }


def _search_record(runner: Runner) -> dict[str, Any]:
    """How the search ended, and what a later one needs to go on."""
    from tapestry.compiler.passes import search_of
    from tapestry.plan.search.planner import fingerprint

    priced, budget, earlier, resumed = runner.at.plan, runner.at.budget, runner.at.earlier, runner.at.options.resume
    spent = float(search_of(earlier).get("seconds", 0.0)) if earlier else 0.0
    ends = {"proved": priced.proved, "interrupted": budget.interrupted(), "time": budget.late(), "work": budget.over()}
    ended = next((how for how, so in ends.items() if so), "stalled")
    return {
        "ended": ended,
        "interrupted": budget.interrupted(),
        "work": round(budget.meter.spent),
        "seconds": round(spent + runner.seconds["search"], 4),
        "history": [[round(w), t, b] for w, t, b in budget.meter.history if math.isfinite(b)],
        "problem": fingerprint(priced.problem) if priced.problem else "",
        "resumed": str(resumed) if resumed else None,
    }


def _bounded(priced: PricedPlan, planned: Planned, task: Task) -> dict[str, Any]:
    """Which plans the lower bound holds for, and which it says nothing of."""
    scope = planned.scope
    missing = scope.missing(stages=task.several_devices and task.request.stages != 1)
    if planned.fitted:
        of, missing = "all plans, in space and in time: the least work of each operation, shared evenly", list[str]()
    elif len(priced.plan.stages) > 1:
        of = "any pipeline, without messages: each operation at its fastest on any of the submeshes"
    else:
        of = f"{scope.text()}; not covered: {'; '.join(missing)}" if missing else scope.text()
    return {
        "left_out": scope.left_out,
        "bound_of": of,
        "not_bounded": missing,
        "waited_s": scope.waited,
        "equations": [t.data() for t in scope.equations],
        "forms": {"tried": list(scope.forms), "untried": list(scope.untried)},
    }


def _transfers(program: Program) -> list[dict[str, Any]]:
    """Transfers by kind: how many, bytes summed over senders, and the largest per-device payload."""
    out: dict[str, dict[str, Any]] = {}
    for step in program.steps:
        if isinstance(step, Transfer | Reduce):
            row = out.setdefault(step.kind, {"kind": step.kind, "count": 0, "bytes": 0, "payload_bytes": 0})
            row["count"] += 1
            row["bytes"] += transfer_bytes(step, program)
            row["payload_bytes"] = max(row["payload_bytes"], payload_bytes(step, program))
    return list(out.values())
