"""Grouped contractions: a dimension that one factor reads only as ``floor(o/k)`` is really two, the group and the rest.

Cut in two, the group is a batch dimension and the rest belongs to the other factor alone: a grouped convolution becomes a
batched matrix product.
"""

from __future__ import annotations

from dataclasses import replace

from tapestry.codegen.triton.task.lowered import Task, substitute_task
from tapestry.ir.graph import Dim
from tapestry.ir.index import Aff, Floor, dim, dims_of


def split_groups(task: Task) -> Task:
    """The task with every such dimension cut in two (the same points in the same order); itself when there is none."""
    for d in task.dims:
        for k in _group_sizes(task, d):
            task = _cut_task(task, d, k)
            break
    return task


def _group_sizes(task: Task, d: Dim) -> list[int]:
    """Group sizes k such that some read depends on d by ``floor(d/k)`` alone; only whole groups can be cut."""
    sizes: set[int] = set()
    for access in task.reads.values():
        affs = (access.offset, *(c.aff for c in access.checks))
        atoms = {a for e in affs for a, _ in e.terms if d.name in dims_of(Aff(((a, 1),)))}
        if len(atoms) == 1 and isinstance(atom := atoms.pop(), Floor) and atom.arg == dim(d.name):
            sizes.add(atom.div)
    return [k for k in sorted(sizes) if d.size % k == 0 and k < d.size]


def _cut_task(task: Task, d: Dim, k: int) -> Task:
    taken = set(task.ranges)
    outer, inner = (next(n for n in (f"{d.name}_{s}", f"{d.name}_{s}_") if n not in taken) for s in ("group", "in"))
    ranges = {n: s for n, s in task.ranges.items() if n != d.name} | {outer: d.size // k, inner: k}
    both = {d.name: dim(outer) * k + dim(inner)}
    at = task.dims.index(d)
    dims = (*task.dims[:at], Dim(outer, d.size // k), Dim(inner, k), *task.dims[at + 1 :])
    return replace(substitute_task(task, both, ranges), dims=dims)
