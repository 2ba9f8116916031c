"""Edits of what a build says of itself and of its interface; see `tests.support.faults.graph_edits`."""

from __future__ import annotations

from dataclasses import replace

from tapestry.compiler import build_report
from tapestry.ir.program import Transfer
from tests.support.faults.edited_build import Edited
from tests.support.faults.graph_edits import edit

# interface


@edit
def output_dropped(e: Edited) -> bool:
    if len(e.graph.outputs) < 2:
        return False
    return e.put(replace(e.graph, outputs=e.graph.outputs[:-1]))


@edit
def outputs_exchanged(e: Edited) -> bool:
    if len(e.graph.outputs) < 2:
        return False
    return e.put(replace(e.graph, outputs=(*e.graph.outputs[1:], e.graph.outputs[0])))


@edit
def inputs_exchanged(e: Edited) -> bool:
    if len(e.graph.inputs) < 2:
        return False
    return e.put(replace(e.graph, inputs=e.graph.inputs[::-1]))


# certificate


@edit
def model_hash_zeroed(e: Edited) -> bool:
    e.build = replace(e.build, model_sha256="0" * 64)
    return True


@edit
def layouts_removed(e: Edited) -> bool:
    if not e.build.plan.outputs and not e.build.plan.inputs:
        return False
    e.build = replace(e.build, plan=replace(e.build.plan, inputs={}, outputs={}))
    return True


@edit
def objective_and_bound_divided(e: Edited) -> bool:
    e.again = False
    r = e.build.report
    return e.report(objective_s=r["objective_s"] / 10, lower_bound_s=r["lower_bound_s"] / 10, simulated_s=r["simulated_s"] / 10)


@edit
def bound_above_the_objective(e: Edited) -> bool:
    e.again = False
    return e.report(lower_bound_s=e.build.report["objective_s"] * 2, gap=-0.5)


@edit
def transfers_relabelled(e: Edited) -> bool:
    """Transfers are of another kind in the program, and counted as such."""
    e.again = False
    kinds = {
        "all_gather": "broadcast",
        "broadcast": "all_to_all",
        "halo": "all_gather",
        "send_recv": "halo",
        "all_to_all": "send_recv",
    }
    steps = [replace(s, kind=kinds.get(s.kind, "halo")) if isinstance(s, Transfer) else s for s in e.build.program.steps]
    if not any(isinstance(s, Transfer) for s in steps):
        return False
    e.build = replace(e.build, program=replace(e.build.program, steps=tuple(steps)))
    return e.report(**build_report.facts_of(e.build))


@edit
def transfers_of_the_report_relabelled(e: Edited) -> bool:
    e.again = False
    rows = [{**r, "kind": "halo", "bytes": 1} for r in e.build.report["transfers"]]
    return bool(rows) and e.report(transfers=rows)


@edit
def memory_limit_raised(e: Edited) -> bool:
    e.again = False
    e.build = replace(e.build, memory=e.build.memory * 8)
    return True
