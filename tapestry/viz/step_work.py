"""What a step computes or sends, in the terms of the cost model: what `tapestry calibrate --from-trace` fits times to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tapestry.ir.collective_calls import merge_calls, transfer_call
from tapestry.ir.graph import Block
from tapestry.ir.plan import Plan
from tapestry.ir.program import Launch, Program, Reduce, Step, Transfer
from tapestry.plan.cost import compute
from tapestry.plan.cost.kernel_class import kernel_class
from tapestry.plan.strategy import op_boxes, reads_once, result_boxes


def step_work(step: Step, plan: Plan, program: Program) -> dict[str, Any]:
    """Of a kernel its class, dtype and ``work`` (contraction FLOPs, other FLOPs, bytes) on the device that has most; of a merge
    or a transfer by one call that call, the ranks of a group, and its bytes. Nothing of what has no such terms."""
    match step:
        case Launch():
            return _kernel(step, plan)
        case Transfer() if step.messages:
            calls = (transfer_call(step, program),)
        case Reduce():
            calls = merge_calls(step, program, plan.graph.ops[step.op])
        case _:
            return {}
    if len(calls) != 1:
        return {}
    return {"call": calls[0].name, "group": len(calls[0].groups[0]), "call_bytes": calls[0].nbytes}


def _kernel(step: Launch, plan: Plan) -> dict[str, Any]:
    op, s, graph = plan.graph.ops[step.op], plan.strategies[step.op], plan.graph
    if step.mode == "finish" or any(s.ring):
        return {}
    mesh = plan.stage(step.op).mesh
    block = op_boxes(op, s.dims, mesh)
    if isinstance(op, Block) and step.mode == "partial":
        op, final = replace(op, then=()), block[:, : len(op.dims)]
    else:
        final = result_boxes(op, s, mesh)
    work = compute.quantities(op, graph, block, final, reads_once(op, graph, s, mesh))
    most = int(np.argmax(sum(np.broadcast_to(w, len(block)) for w in work)))
    each = [float(np.broadcast_to(w, len(block))[most]) for w in work]
    return {"class": kernel_class(op), "dtype": compute.multiplied(op, graph), "work": each}
