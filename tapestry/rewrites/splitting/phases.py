"""Phases of an axis that is walked in steps: what the two slicing rules share.

Reading ``x[s*h + r]`` in steps of s touches, for each residue f, only cells ``x[s*j + f]``. Those cells in a tensor of
their own are a phase of x, and reading them is dense. Both rules replace a dimension d by ``s*d + q`` for one residue q
and let every read whose index then is ``s*(…) + f`` read phase f instead: the cells touched stay exactly the same, also
where the index leaves the tensor, since ``0 <= s*j + f < n`` says the same as ``0 <= j < ⌈(n - f)/s⌉``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block, Dim, Graph, Read, names_of, shape_of
from tapestry.ir.index import Aff, dim, dims_of
from tapestry.ir.types import Tensor
from tapestry.rewrites.core.edit import fresh, plain_index, reindex, resized
from tapestry.rewrites.core.rule import Refusal, refuse

MOST = 64  # phases, each an operation or more


def too_many(step: int) -> Refusal | None:
    """Why an axis is not cut into so many phases; ``None`` where it may be."""
    return refuse(f"{step} phases are more than {MOST}", "each is an operation of its own") if step > MOST else None


@dataclass(frozen=True, slots=True)
class Window:
    """How one read walks one axis along a map dimension: ``step*dim + Σ coef*other + const``, some other being reduced."""

    tensor: str
    axis: int
    step: int
    others: tuple[tuple[str, int], ...]
    const: int


def windows(op: Block, name: str) -> list[Window]:
    """The sliding windows of an operation along a map dimension, from its projections."""
    reduced = names_of(op.reduce)
    found: list[Window] = []
    for r in op.reads:
        for axis, e in enumerate(r.index):
            others = tuple((str(a), c) for a, c in e.terms if a != name)
            if e.is_affine and e.coef(name) > 0 and any(a in reduced for a, _ in others):
                found.append(Window(r.tensor, axis, e.coef(name), others, e.const))
    return found


def sliding(graph: Graph) -> Iterator[tuple[Block, str]]:
    """Every operation and map dimension along which a window slides."""
    for op in graph.blocks:
        for d in op.dims:
            if windows(op, d.name):
                yield op, d.name


def points_in(size: int, step: int, phase: int) -> int:
    """How many of ``size`` points are in a residue class."""
    return -(-(size - phase) // step)


@dataclass(slots=True)
class Phases:
    """The phases taken of a graph's tensors, each once: the operations that make them and the new tensors."""

    graph: Graph
    ops: list[Block] = field(default_factory=list[Block])
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    names: dict[tuple[str, int, int, int], str] = field(default_factory=dict[tuple[str, int, int, int], str])

    def take(self, op: Block, name: str, step: int, phase: int) -> Block | None:
        """The operation over one residue class of a dimension, reading phases; ``None`` when a phase would be empty."""
        space = resized(op.space, name, points_in(op.ranges[name], step, phase))
        moved = reindex(op, {name: dim(name) * step + phase}, space)
        reads: list[Read] = []
        for old, new in zip(op.reads, moved.reads, strict=True):
            for axis, e in enumerate(old.index):
                if name in dims_of(e):
                    new = self._dense(new, axis, step)
                    if new is None:
                        return None
            reads.append(new)
        n = len(op.dims)
        return replace(moved, dims=space[:n], reduce=space[n : n + len(op.reduce)], reads=tuple(reads))

    def _dense(self, read: Read, axis: int, step: int) -> Read | None:
        e = read.index[axis]
        if not e.is_affine or any(c % step for _, c in e.terms):
            return read
        tensor = self._phase(read.tensor, axis, step, e.const % step)
        index = Aff(tuple((a, c // step) for a, c in e.terms), e.const // step)
        if tensor is None:
            return None
        return replace(read, tensor=tensor, index=(*read.index[:axis], index, *read.index[axis + 1 :]))

    def _phase(self, tensor: str, axis: int, step: int, phase: int) -> str | None:
        key = (tensor, axis, step, phase)
        if key not in self.names:
            whole = self.tensors.get(tensor) or self.graph.tensors[tensor]
            extent = points_in(whole.shape[axis], step, phase)
            if extent <= 0:
                return None
            dims = tuple(Dim(f"x{i}", extent if i == axis else n) for i, n in enumerate(whole.shape))
            index = tuple(e * step + phase if i == axis else e for i, e in enumerate(plain_index(dims)))
            out = fresh(self.graph, f"{tensor}.x{axis}.s{phase}")
            self.tensors[out] = Tensor(name=out, dtype=whole.dtype, shape=shape_of(dims))
            read = Read(tensor=tensor, index=index)
            self.ops.append(Block(outs=(out,), dims=dims, reads=(read,), body=(Arg(0, whole.dtype),)))
            self.names[key] = out
        return self.names[key]
