"""Launches of a program for several sizes whose kernels are one function: layers of a model differ in the names of tensors."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields, replace

from tapestry.ir.graph import Block
from tapestry.ir.many_sizes.symbolic_plan import SymbolicPlan, flat
from tapestry.ir.program import Launch
from tapestry.ir.types import Tensor


def equal_launches(plan: SymbolicPlan) -> dict[tuple[int, int], int]:
    """A number for each launch of an operation, by step and device: equal where both are one function at every size.

    They are where operations, blocks and boxes of buffers are equal with formulas in the places of integers, whatever the
    tensors are called.
    """
    graph, program = plan.graph, plan.program
    numbers: dict[Hashable, int] = {}
    of_ops: dict[int, Hashable] = {}
    out: dict[tuple[int, int], int] = {}
    for at, step in enumerate(program.steps):
        if not isinstance(step, Launch) or not isinstance(op := graph.ops[step.op], Block):
            continue
        if step.op not in of_ops:
            of_ops[step.op] = _without_names(op, plan)
        for d, block in enumerate(step.blocks):
            boxes = [program.buffers[b].boxes[d] if b else None for b in (*step.ins, *step.outs, *step.states)]
            if block is not None:
                key = (of_ops[step.op], _symbol_key(step.mode, block, tuple(boxes)))
                out[at, d] = numbers.setdefault(key, len(numbers))
    return out


def _without_names(op: Block, plan: SymbolicPlan) -> Hashable:
    """All that an operation says but what its tensors are called and where it came from."""
    slots = {t: str(k) for k, t in enumerate(op.inputs)}
    reads = tuple(replace(r, tensor=slots[r.tensor]) for r in op.reads)
    tensors = [plan.graph.tensors[t] for t in (*op.inputs, *op.outs)]
    about = [tuple(getattr(t, f.name) for f in fields(Tensor) if f.name != "name") for t in tensors]
    return _symbol_key(replace(op, reads=reads, outs=("",) * len(op.outs), source=()), tuple(about))


def _symbol_key(*values: object) -> Hashable:
    found = flat(*values)
    return tuple(found.integers), tuple(found.rest)
