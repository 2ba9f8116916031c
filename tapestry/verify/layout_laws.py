"""What a plan says of its tensors beside its program: the layouts that its user fixed."""

from __future__ import annotations

from tapestry.errors import LawError
from tapestry.ir.plan import Layout, Plan


def check_layouts(plan: Plan) -> int:
    """Check that layouts are of tensors that there are, one entry per mesh axis, none beyond their axes; how many there are.

    Raises:
        LawError: naming the tensor.
    """
    graph = plan.graph
    starts = {*graph.inputs, *graph.weights}
    for what, layouts, known in (("input", plan.inputs, starts), ("output", plan.outputs, {*graph.outputs})):
        for name, layout in layouts.items():
            if name not in known:
                raise LawError("agreement", f"the plan has a layout of '{name}'", where="the plan", why=f"it is no {what}")
            _fits(name, layout, len(graph.tensors[name].shape), plan)
    return len(plan.inputs) + len(plan.outputs)


def _fits(name: str, layout: Layout, rank: int, plan: Plan) -> None:
    axes = [a for a in layout if a is not None]
    if len(layout) != len(plan.mesh) or any(not 0 <= a < rank for a in axes):
        why = f"{list(layout)} for a tensor of rank {rank} on a mesh of {len(plan.mesh)} axes"
        raise LawError("agreement", f"the layout of '{name}' cannot be", where="the plan", why=why)
