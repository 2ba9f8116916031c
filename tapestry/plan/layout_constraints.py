"""Layouts that the search must keep to, as annotations of the model give them: a filter on every operation's strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod

from tapestry.errors import PlanError
from tapestry.interop.placement import layout_of_boxes
from tapestry.ir.graph import Block, Graph, Op, reduced_names
from tapestry.ir.index import dims_of
from tapestry.ir.plan import Layout, Mesh, Strategy
from tapestry.plan.strategy import Pin, footprints, out_layout

Dims = tuple[str | None, ...]
Key = tuple[tuple[tuple[int, Layout], ...], tuple[tuple[int, Layout], ...], Dims | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sayable:
    """What a format can say of an operation's cuts. Parts are equal in every format.

    Attributes:
        dims: the dimensions that may be cut; None: any.
        scatters: whether a sum that is cut may end in parts.
        placed: positions of reads of inputs and weights, of which each device holds a layout's part, or all the same.
        ends_whole: whether results that are the model's outputs end whole on every device.
    """

    dims: frozenset[str] | None = None
    scatters: bool = True
    placed: frozenset[int] = frozenset()
    ends_whole: bool = False

    def of(self, op: Op, s: Strategy, graph: Graph, mesh: Mesh) -> bool:
        """Whether it can say a strategy."""
        cut = {d.name: [a.size for a, n in zip(mesh, s.dims, strict=True) if n == d.name] for d in op.space}
        ends = [[a.size for a, k in zip(mesh, s.out, strict=True) if k == n] for n in range(len(op.dims))]
        sizes = [(op.ranges[d], n) for d, n in cut.items()] + [(d.size, n) for d, n in zip(op.dims, ends, strict=True)]
        summed = reduced_names(op)
        if any(size % prod(parts) for size, parts in sizes):
            return False
        if self.dims is not None and not {d for d in s.dims if d is not None} <= self.dims:
            return False
        if not self.scatters and any(d in summed and k is not None for d, k in zip(s.dims, s.out, strict=True)):
            return False
        held = [
            (t, [tuple((lo, hi) for lo, hi in b) for b in boxes.tolist()])
            for k, t, boxes in footprints(op, graph, s, mesh)
            if k in self.placed
        ]
        return all(len({*b}) == 1 or layout_of_boxes(tuple(b), graph.tensors[t].shape, mesh) is not None for t, b in held)


Language = Callable[[Graph, Mesh], Sequence[Sayable]]
"""What a format can say of each operation of a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConstraints:
    """What is given.

    Attributes:
        outs: tensor to the layout it must have when it is written.
        reads: (ONNX node, tensor) to the layout in which the node reads it: a mesh axis that cuts a tensor's axis must
            cut a dimension that walks it.
        dims: first output of an operation to exactly what each mesh axis cuts.
        language: only what a format can say.
    """

    outs: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    reads: Mapping[tuple[str, str], Layout] = field(default_factory=dict[tuple[str, str], Layout])
    dims: Mapping[str, Dims] = field(default_factory=dict[str, Dims])
    language: Language | None = None

    def __bool__(self) -> bool:
        return bool(self.outs or self.reads or self.dims)

    def key(self, op: Op) -> Key:
        """What concerns an operation, without names: equal for operations that are planned alike."""
        if not self:
            return (), (), None
        outs = tuple((n, self.outs[t]) for n, t in enumerate(op.outs) if t in self.outs)
        reads = tuple(
            (n, self.reads[(s, t)]) for n, t in enumerate(op.inputs) for s in dict.fromkeys(op.source) if (s, t) in self.reads
        )
        return outs, reads, self.dims.get(op.outs[0])


def stated(key: Key, but: Set[int]) -> list[Pin]:
    """What mesh axes cut, where that is given: a window that is cut is a strategy only where it is asked for."""
    return [Pin(d, a) for a, d in enumerate(key[2] or ()) if d is not None and a not in but]


def allowed(op: Op, key: Key, found: list[Strategy], graph: Graph, mesh: Mesh) -> list[Strategy]:
    """The strategies that keep to what is given.

    Raises:
        PlanError: none does; names the tensor.
    """
    outs, reads, dims = key
    for n, layout in outs:
        kept = [s for s in found if out_layout(op, s.out, n) == layout]
        found = _some(kept, op, op.outs[n], f"no split of the operation ends with it {_text(layout, mesh)}")
    if dims is not None:
        found = _some([s for s in found if s.dims == dims], op, op.outs[0], f"no split of the operation cuts {dims}")
    for n, layout in reads:
        tensor = op.inputs[n]
        cuts = [(a, k) for a, k in enumerate(layout) if k is not None and mesh[a].size > 1]
        kept = [s for s in found if all(_walked(op, s, tensor, a, k) for a, k in cuts)]
        found = _some(kept, op, tensor, f"no split of the operation (within its other specs) reads it {_text(layout, mesh)}")
    return found


def _some(kept: list[Strategy], op: Op, tensor: str, why: str) -> list[Strategy]:
    if not kept:
        raise PlanError(
            f"the sharding given for '{tensor}' is impossible",
            where=f"node '{', '.join(op.source)}'",
            why=why,
            hint="change the annotation, or --ignore-sharding",
        )
    return kept


def _walked(op: Op, s: Strategy, tensor: str, mesh_axis: int, axis: int) -> bool:
    """Whether a mesh axis cuts a dimension that walks an axis of a tensor, in every read of it."""
    cut = s.dims[mesh_axis]
    if not isinstance(op, Block):
        names = [d.name for d in op.dims]
        return cut is not None and all(op.in_axes[k][names.index(cut)] == axis for k, t in enumerate(op.ins) if t == tensor)
    body, end = op.body_reads(), s.out[mesh_axis]
    after = cut if end is None else op.dims[end].name  # what is read after a reduction follows the output
    for k, r in enumerate(op.reads):
        if r.tensor == tensor and (cut if k in body else after) not in dims_of(r.index[axis]):
            return False
    return True


def _text(layout: Layout, mesh: Mesh) -> str:
    cuts = [f"cut on axis {k} over mesh axis {a.name} ({a.size})" for a, k in zip(mesh, layout, strict=True) if k is not None]
    return " and ".join(cuts) or "whole on every device"
