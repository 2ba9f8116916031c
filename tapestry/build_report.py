"""What a compilation leaves: the build that is saved, and the JSON document of ``tapestry compile``."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from typing import Any

from tapestry.build import store
from tapestry.codegen.unfused import unfused
from tapestry.ir.program import Load, Program, Reduce, Transfer, device_bytes, payload_bytes, peak_bytes, transfer_bytes
from tapestry.lift import Lifted
from tapestry.pass_runner import Runner
from tapestry.passes import Constraints, Rewrites, model_hash, search_of
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.plan.search.resume import fingerprint
from tapestry.plan.search_passes import Planned
from tapestry.plan.simulate import simulate
from tapestry.plan.solver.budget import Budget
from tapestry.plan.task import STEPS, Task
from tapestry.plan.topology import Topology, to_data
from tapestry.rewrites.core.driver import disabled_by


def lifted_of(runner: Runner) -> Lifted:
    """The model as the plan has it: with recurrences whole, or step by step."""
    moves = (*runner.get("constraints", Constraints).moves, *runner.get("planned", Planned).moves)
    whole = runner.values["whole"] is not None and STEPS in disabled_by(moves)
    return runner.get("whole" if whole else "lifted", Lifted)


def build_of(runner: Runner) -> store.Build:
    """The build that the passes made; its report is still empty."""
    lifted, priced = lifted_of(runner), runner.get("plan", PricedPlan)
    topology = replace(runner.get("topology", Topology), mesh=priced.plan.mesh)
    constants: dict[str, tuple[int, int]] = {}
    offset = 0
    for t, w in priced.plan.graph.weights.items():
        if w.file == "":
            constants[t] = (offset, lifted.constants[t].nbytes)
            offset += lifted.constants[t].nbytes
    moves = (*runner.get("constraints", Constraints).moves, *runner.get("planned", Planned).moves)
    return store.Build(
        model=str(lifted.model), model_sha256=model_hash(lifted), plan=priced.plan, program=priced.program,
        target=runner.values["target"], memory=topology.device.memory, report={}, moves=tuple(map(str, moves)),
        peak_bytes=tuple(peak_bytes(priced.program)[0]), constants=constants, topology=to_data(topology),
        exact=runner.values["exact"], precision=runner.values["precision"], knobs=runner.values["knobs"],
    )  # fmt: skip


def plan_hash(build: store.Build) -> str:
    """SHA-256 of a plan and its program as they are written, wherever the model lies and whatever the search reports."""
    return hashlib.sha256(store.encode(replace(build, model="", report={}))).hexdigest()


def document(runner: Runner, build: store.Build) -> dict[str, Any]:
    """The JSON document of ``compile``, without its seconds."""
    lifted, planned = lifted_of(runner), runner.get("planned", Planned)
    constraints = runner.get("constraints", Constraints)
    requests: dict[str, Any] = {"pins": list(runner.values["pins"]), "layouts": list(runner.values["layouts"])}
    if constraints.given:
        requests["sharding"] = {**constraints.given.counts, "notes": list(constraints.given.notes)}
    out = _facts(runner, build) | {"unified": lifted.unified, "unfused": unfused(lifted.graph), "requests": requests}
    if runner.values["pareto"]:
        out["pareto"] = [asdict(p) for p in runner.values["front"]]
    if planned.alternatives:
        out["alternatives"] = [a.data() for a in planned.alternatives]
    if planned.fitted:
        out["fit"] = dict(planned.fitted.report)
    return out | {"search": _search_record(runner)} | planned.choice.report | {"passes": runner.rows}


def _facts(runner: Runner, build: store.Build) -> dict[str, Any]:
    """The plan in numbers."""
    priced, topology = runner.get("plan", PricedPlan), runner.get("topology", Topology)
    graph, program, lifted = priced.plan.graph, priced.program, lifted_of(runner)
    loads = [program.buffers[s.buffer] for s in program.steps if isinstance(s, Load)]
    timed = simulate(priced.plan, program, replace(topology, mesh=priced.plan.mesh))
    return {
        "plan_sha256": plan_hash(build),
        "model": str(lifted.model), "nodes": lifted.nodes, "ops": len(graph.ops), "signatures": priced.distinct,
        **_bounded(priced, runner.get("planned", Planned), runner.get("task", Task)),
        "devices": program.devices, "objective_s": priced.objective, "lower_bound_s": priced.bound, "gap": priced.gap,
        "topology": {"name": topology.name, "measured": bool(topology.device.classes or topology.calls)},
        "simulated_s": timed.total, "overlap": timed.assumption,
        "peak_bytes": list(build.peak_bytes), "memory_bytes": topology.device.memory,
        "unsharded_peak_bytes": runner.get("peak_alone", int),
        "host_load_bytes": sum(int(device_bytes(b).sum()) for b in loads),
        "transfers": _transfers(program), "kernels": len(runner.values["kernels"]), "moves": list(build.moves),
        "certificate": {"passed": True, "laws": dict(runner.values["laws"])},
        "rewrites": {"steps": runner.get("rewrites", Rewrites).steps, "shown": dict(runner.get("rewrites", Rewrites).shown)},
        "host_values": {t.name: t.about for t in graph.tensors.values() if t.on_host},  # bytes unknown, in no peak
    }  # fmt: skip


def _search_record(runner: Runner) -> dict[str, Any]:
    """How the search ended, and what a later one needs to go on."""
    priced, budget, earlier = runner.get("plan", PricedPlan), runner.get("budget", Budget), runner.values["earlier"]
    spent = float(search_of(earlier).get("seconds", 0.0)) if earlier else 0.0
    ended = (
        "proved"
        if priced.proved
        else "interrupted"
        if budget.interrupted()
        else "time"
        if budget.late()
        else "work"
        if budget.over()
        else "stalled"
    )
    return {
        "ended": ended, "interrupted": budget.interrupted(), "work": round(budget.meter.spent),
        "seconds": round(spent + runner.seconds["search"], 4),
        "problem": fingerprint(priced.problem) if priced.problem else "", "resumed": runner.values["resumed"],
    }  # fmt: skip


def _bounded(priced: PricedPlan, planned: Planned, task: Task) -> dict[str, Any]:
    """Which plans the lower bound holds for, and which it says nothing of."""
    scope = planned.scope
    missing = scope.missing(stages=task.several_devices and task.request.stages != 1)
    if planned.fitted:
        of, missing = "all plans, in space and in time: the least work of each operation, evenly shared", list[str]()
    elif len(priced.plan.stages) > 1:
        of = "the stages of any pipeline, without messages: each operation at its fastest on any of the submeshes"
    else:
        of = f"{scope.text()}; without {'; '.join(missing)}" if missing else scope.text()
    return {
        "left_out": scope.left_out, "bound_of": of, "not_bounded": missing,
        "forms": {"tried": list(scope.forms), "untried": list(scope.untried)},
    }  # fmt: skip


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
