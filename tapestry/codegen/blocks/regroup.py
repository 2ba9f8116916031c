"""Dimensions of a task cut in two, or joined: the same points in the same order.

A dimension that one factor reads only as ``floor(o/k)`` is really two, the group and the rest. Cut in two, the group is a batch
dimension and the rest belongs to the other factor alone: a grouped convolution becomes a batched matrix product. Dimensions
that all buffers have one after another are really one.
"""

from __future__ import annotations

from dataclasses import replace

from tapestry.codegen.blocks.lowered import Task, substitute_task
from tapestry.ir.expr import Index, walk
from tapestry.ir.graph import Dim
from tapestry.ir.index import Aff, Floor, const, dim, dims_of


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


def coalesced(task: Task) -> Task:
    """The task with dimensions that every buffer has one after another as one, and without those of one point.

    Points are visited in the same order. Dimensions that checks or places in an expression name stay as they are.
    """
    single = [d for d in task.dims if d.size == 1][: max(0, len(task.dims) - 2)]  # rows and a row: of one text, however many
    single += [d for d in task.reduce[1:] if d.size == 1]
    dims, reduce = (tuple(d for d in group if d not in single) for group in (task.dims, task.reduce))
    task = replace(substitute_task(task, {d.name: const(0) for d in single}, task.ranges), dims=dims, reduce=reduce)
    accesses = (*task.reads.values(), *task.states, *task.outs)
    named = frozenset[str]().union(*(dims_of(c.aff) for a in accesses for c in a.checks))
    named |= frozenset[str]().union(*(dims_of(x.aff) for e in task.exprs for x in walk(e) if isinstance(x, Index)))
    named |= frozenset[str]().union(*(dims_of(t.arg) for a in accesses for t, _ in a.offset.terms if not isinstance(t, str)))
    gone: dict[str, Aff] = {}

    def joined(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        out: list[Dim] = []
        for d in dims:
            whole = out[-1] if out else d
            run = all(a.offset.coef(whole.name) == d.size * a.offset.coef(d.name) for a in accesses)
            if out and run and not {d.name, whole.name} & named:
                gone[out.pop().name] = const(0)
                d = Dim(d.name, whole.size * d.size)
            out.append(d)
        return tuple(out)

    dims, reduce = joined(task.dims), joined(task.reduce)
    return replace(substitute_task(task, gone), dims=dims, reduce=reduce) if gone else task
