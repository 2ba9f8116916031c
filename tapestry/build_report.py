"""What a compilation leaves: the build that is saved, and the JSON document of ``tapestry compile``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from tapestry.build import store
from tapestry.codegen.unfused import unfused
from tapestry.ir.program import Load, Program, Reduce, Transfer, device_bytes, payload_bytes, peak_bytes, transfer_bytes
from tapestry.lift import Lifted
from tapestry.pass_runner import Runner
from tapestry.passes import Constraints, model_hash, search_of
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.plan.search.resume import fingerprint
from tapestry.plan.search_passes import Planned
from tapestry.plan.simulate import ASSUMPTION, simulate
from tapestry.plan.solver.budget import Budget
from tapestry.plan.topology import Topology, to_data


def build_of(runner: Runner) -> store.Build:
    """The build that the passes made; its report is still empty."""
    lifted, priced = runner.get("lifted", Lifted), runner.get("plan", PricedPlan)
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


def document(runner: Runner, build: store.Build) -> dict[str, Any]:
    """The JSON document of ``compile``, without its seconds."""
    lifted, planned = runner.get("lifted", Lifted), runner.get("planned", Planned)
    constraints = runner.get("constraints", Constraints)
    requests: dict[str, Any] = {"pins": list(runner.values["pins"]), "layouts": list(runner.values["layouts"])}
    if constraints.given:
        requests["sharding"] = {**constraints.given.counts, "notes": list(constraints.given.notes)}
    out = _facts(runner, build) | {"unified": lifted.unified, "unfused": unfused(lifted.graph), "requests": requests}
    if runner.values["pareto"]:
        out["pareto"] = [asdict(p) for p in runner.values["front"]]
    if planned.fitted:
        out["fit"] = dict(planned.fitted.report)
    return out | {"search": _search_record(runner)} | planned.choice.report | {"passes": runner.rows}


def _facts(runner: Runner, build: store.Build) -> dict[str, Any]:
    """The plan in numbers."""
    priced, topology = runner.get("plan", PricedPlan), runner.get("topology", Topology)
    graph, program, lifted = priced.plan.graph, priced.program, runner.get("lifted", Lifted)
    loads = [program.buffers[s.buffer] for s in program.steps if isinstance(s, Load)]
    return {
        "model": str(lifted.model), "nodes": lifted.nodes, "ops": len(graph.ops), "signatures": priced.distinct,
        "left_out": priced.problem.left_out if priced.problem else 0,
        "bound_of": _bound_of(priced, build.moves, fitted=runner.get("planned", Planned).fitted is not None),
        "devices": program.devices, "objective_s": priced.objective, "lower_bound_s": priced.bound, "gap": priced.gap,
        "topology": {"name": topology.name, "measured": bool(topology.device.classes or topology.calls)},
        "simulated_s": simulate(priced.plan, program, replace(topology, mesh=priced.plan.mesh)).total, "overlap": ASSUMPTION,
        "peak_bytes": list(build.peak_bytes), "memory_bytes": topology.device.memory,
        "unsharded_peak_bytes": runner.get("peak_alone", int),
        "host_load_bytes": sum(int(device_bytes(b).sum()) for b in loads),
        "transfers": _transfers(program), "kernels": len(runner.values["kernels"]), "moves": list(build.moves),
        "certificate": {"passed": True, "laws": dict(runner.values["laws"])},
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
        "ended": ended, "interrupted": budget.interrupted(), "work": round(budget.meter.spent), "seconds": round(spent + runner.seconds["search"], 4),
        "problem": fingerprint(priced.problem) if priced.problem else "", "resumed": runner.values["resumed"],
    }  # fmt: skip


def _bound_of(priced: PricedPlan, moves: Sequence[str], *, fitted: bool) -> str:
    """Which plans the lower bound holds for."""
    if fitted:
        return "all plans, in space and in time: the least work of each operation, evenly shared"
    if priced.plan.stages:
        return "the stages of any pipeline, without messages: each operation at its fastest on any of the submeshes"
    form = f"the graph after {len(moves)} moves" if moves else "the graph as simplified"
    left = priced.problem.left_out if priced.problem else 0
    most = f", without up to {left:,} combinations of one operation" if left else ""
    return f"plans in space of {form}: every operation cut along one dimension, or none, by each mesh axis{most}"


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
