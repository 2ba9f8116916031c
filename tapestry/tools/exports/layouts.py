"""Where tensors are under a plan, for formats that give each a place on a mesh: ``json``, ``dtensor`` and ``jax``.

A layout gives, for each mesh axis, the tensor axis that it cuts. DTensor and XLA know layouts alone, and cut n cells for p
devices into parts of ⌈n/p⌉, the last ones shorter; where a device holds something else (a halo, a balanced part, two parts at
once) the nearest layout holds that and more, and the bytes that devices hold beyond the plan's are what it costs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from tapestry.build.atomic import write_json
from tapestry.build.store import Build
from tapestry.interop.placement import held, layout_of_boxes
from tapestry.ir.graph import Block, Graph, Op, reduced_names
from tapestry.ir.kernel import Box, inside, size
from tapestry.ir.monoid import primitive_of
from tapestry.ir.plan import Layout, Mesh, Strategy
from tapestry.ir.program import Buffer, Launch, Load, Reduce, Transfer, moved_bytes, transfer_bytes
from tapestry.ir.provenance import dim_names, operation_names, tensor_names
from tapestry.ir.types import itemsize
from tapestry.plan.layout_constraints import Sayable
from tapestry.plan.search.priced_plan import PricedPlan
from tapestry.tools.exports.nodes.onnx_nodes import NotExpressible

SCHEMA = "tapestry-layouts/1"
FOLDED = re.compile(r"val_\d+|_?(lifted_tensor|tensor_constant).*")  # initializers that torch's exporter makes: of no module
Boxes = tuple[Box | None, ...]


def buffers_of(buffers: Iterable[Buffer]) -> dict[str, list[Boxes]]:
    """For each tensor the boxes in which devices hold it, as it is written or loaded first; each list once."""
    out: dict[str, list[Boxes]] = {}
    for b in buffers:
        if b.field is None and b.boxes not in out.setdefault(b.tensor, []):
            out[b.tensor].append(b.boxes)
    return out


def layout_of(boxes: Boxes, shape: tuple[int, ...], mesh: Mesh) -> Layout | None:
    """The layout that boxes are; None where they are none."""
    present = tuple(b for b in boxes if b is not None)
    return layout_of_boxes(present, shape, mesh) if len(present) == len(boxes) else None


@dataclass(frozen=True, slots=True)
class Nearest:
    """A layout near what devices hold, how many bytes they hold beyond it, all together, and whether its parts are uneven."""

    layout: Layout
    extra: int
    uneven: bool = False


@lru_cache(maxsize=1 << 12)
def nearest(held_boxes: tuple[Boxes, ...], shape: tuple[int, ...], mesh: Mesh, width: int, filled: bool) -> Nearest:
    """The plan's own layout, in parts of ⌈n/p⌉, or the layout of fewest cells of which each device's even part has all that the
    device holds (all of the tensor on each, at the worst): whichever holds less beyond the plan.

    Args:
        filled: whether short parts are filled up to the length of the others, as XLA does.
    """
    found = list[Nearest]()
    own = layout_of(held_boxes[0], shape, mesh) if len(held_boxes) == 1 else None
    if own is not None and (short := _short_parts(own, shape, mesh)):
        parts = _counts(own, shape, mesh)
        sides = [-(-n // p) for n, p in zip(shape, parts, strict=True)]
        more = 0
        for mine, b in zip(short, held_boxes[0], strict=True):
            assert b is not None
            both = prod(max(0, min(x[1], y[1]) - max(x[0], y[0])) for x, y in zip(mine, b, strict=True))
            more += (prod(sides) if filled else size(mine)) - both
        found.append(Nearest(own, more * width, uneven=True))
    planned = sum(size(b) for boxes in held_boxes for b in boxes if b is not None)
    for layout in itertools.product((None, *range(len(shape))), repeat=len(mesh)):
        if any(n % p for n, p in zip(shape, _counts(layout, shape, mesh), strict=True)):
            continue
        mine = held(layout, shape, tuple(replace(a, weights=()) for a in mesh))
        if all(b is None or inside(b, m) for boxes in held_boxes for b, m in zip(boxes, mine, strict=True)):
            found.append(Nearest(layout, max(0, sum(map(size, mine)) - planned) * width))
    return min(found, key=lambda n: n.extra)


def _counts(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> list[int]:
    """Into how many parts each axis of a tensor is cut."""
    return [prod(a.size for a, k in zip(mesh, layout, strict=True) if k == axis) for axis in range(len(shape))]


def padded(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """The shape with every axis filled up until its parts are equal."""
    return tuple(-(-n // p) * p for n, p in zip(shape, _counts(layout, shape, mesh), strict=True))


def _short_parts(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> list[Box]:
    """Each device's part where an axis of n cells for p devices is cut into parts of ⌈n/p⌉; nothing where all are equal."""
    full, even = padded(layout, shape, mesh), tuple(replace(a, weights=()) for a in mesh)
    if full == shape and mesh == even:
        return []
    return [tuple((min(lo, n), min(hi, n)) for (lo, hi), n in zip(b, shape, strict=True)) for b in held(layout, full, even)]


def export_json(build: Build, target: Path) -> dict[str, Any]:
    """``json``: the layout of every tensor, and what every operation cuts; nothing is lost."""
    graph, mesh, names = build.plan.graph, build.plan.mesh, tensor_names(build.plan.graph)
    found = buffers_of(build.program.buffers.values())
    kinds = dict.fromkeys(graph.inputs, "input") | dict.fromkeys(graph.weights, "weight")
    tensors = [
        {
            "name": t,
            "called": names[t],
            "kind": kinds.get(t, "value"),
            "dtype": x.dtype,
            "shape": x.shape,
            "output": t in graph.outputs,
            "held": [_held(boxes, x.shape, mesh) for boxes in found.get(t, [])],
        }
        for t, x in graph.tensors.items()
    ]
    called = operation_names(graph)
    operations = [_operation(build, op, s, name) for op, s, name in zip(graph.ops, build.plan.strategies, called, strict=True)]
    if build.plan.stages:
        for row, k in zip(operations, build.plan.stage_of, strict=True):
            row["stage"] = k
    moved = [
        {
            "kind": s.kind,
            "tensor": build.program.buffers[s.dst if isinstance(s, Transfer) else s.dsts[0]].tensor,
            "bytes": transfer_bytes(s, build.program),
        }
        for s in build.program.steps
        if isinstance(s, Transfer | Reduce)
    ]
    stages = [{"first": s.first, "mesh": [[a.name, a.size] for a in s.mesh]} for s in build.plan.stages]
    document = {
        "schema": SCHEMA, "model": build.model, "model_sha256": build.model_sha256,
        "mesh": [{"name": a.name, "size": a.size, **({"shares": a.weights} if a.weights else {}),
                  **({"order": a.order} if a.order else {})} for a in mesh],
        "stages": stages, "tensors": tensors, "operations": operations, "moved": moved,
    }  # fmt: skip
    write_json(target, document)
    counts = {"tensors": len(tensors), "operations": len(operations)}
    return {"file": str(target), **counts, "plan_bytes": moved_bytes(build.program)}


def _held(boxes: Boxes, shape: tuple[int, ...], mesh: Mesh) -> dict[str, Any]:
    """A buffer of a tensor: its layout, or each device's box where there is none."""
    layout = layout_of(boxes, shape, mesh)
    return {"layout": layout} if layout is not None else {"layout": None, "boxes": boxes}


def _operation(build: Build, op: Op, s: Strategy, name: str) -> dict[str, Any]:
    better = dim_names(op, build.plan.graph)
    reduced = reduced_names(op)
    return {
        "name": name,
        "writes": op.outs,
        "reads": op.inputs,
        "nodes": op.source,
        "dims": {better.get(d.name, d.name): d.size for d in op.space},
        "cut": [d and better.get(d, d) for d in s.dims],
        "out": s.out,
        "ring": s.ring,
        "merges": [d is not None and d in reduced for d in s.dims],
        "monoid": op.monoid if isinstance(op, Block) else None,
    }


# a place for each tensor, in others' words


def as_placements(layout: Layout, rank: int, mesh: Mesh) -> list[Any]:
    """For each mesh axis ``Shard(d)`` or ``Replicate()``, as `torch.distributed.tensor` writes them."""
    del rank, mesh
    return ["Replicate()" if k is None else f"Shard({k})" for k in layout]


def as_partition_spec(layout: Layout, rank: int, mesh: Mesh) -> list[Any]:
    """For each tensor axis null, a mesh axis, or several, the major one first: the arguments of ``PartitionSpec``."""
    cut = [[a.name for a, k in zip(mesh, layout, strict=True) if k == axis] for axis in range(rank)]
    return [None if not names else names[0] if len(names) == 1 else names for names in cut]


def export_places(build: Build, target: Path, form: str, *, nearest_will_do: bool) -> dict[str, Any]:
    """``dtensor`` or ``jax``: a place for each parameter, constant, input, output and activation, by its name in the model.

    Raises:
        NotExpressible: some tensor has none, and the nearest is not asked for; the plan has stages, or an order of devices.
    """
    graph, mesh, say = build.plan.graph, build.plan.mesh, as_placements if form == "dtensor" else as_partition_spec

    def said_of(tensor: str, layout: Layout) -> list[Any]:
        return say(layout, len(graph.tensors[tensor].shape), mesh)

    found, names = places(build, form, nearest_will_do=nearest_will_do), tensor_names(build.plan.graph)
    said: dict[str, dict[str, Any]] = {"parameters": {}, "constants": {}, "inputs": {}, "outputs": {}, "activations": {}}
    for t, layout in found.first.items():
        kind = "parameters" if t in graph.weights else "inputs" if t in graph.inputs else "activations"
        kind = "constants" if t in build.constants or (t in graph.weights and FOLDED.fullmatch(t)) else kind
        said[kind][names[t] if kind == "activations" else t] = said_of(t, layout)
    said["outputs"] = {t: said_of(t, layout) for t, layout in found.last.items()}
    called = operation_names(graph)
    reads: dict[str, dict[str, Any]] = {}
    for (k, t), layout in found.reads.items():
        reads.setdefault(called[k], {})[names[t]] = said_of(t, layout)
    sizes = [a.size for a in mesh]
    axis_names = [a.name for a in mesh]
    axes = {"dim_names": axis_names, "shape": sizes} if form == "dtensor" else {"axis_names": axis_names, "axis_sizes": sizes}
    more: dict[str, Any] = {"extra_bytes": sum(found.extra.values()), "extra": found.extra}
    document = {"schema": f"tapestry-{form}/1", "mesh": axes, **said, "reads": reads, **more}
    if form == "dtensor":
        document["written"] = _partial(build)
    else:
        document["padded"] = found.padded
    write_json(target, document)
    return {"file": str(target), **{k: len(v) for k, v in said.items()}, **more}


@dataclass(frozen=True, slots=True)
class Placed:
    """Layouts of tensors.

    Attributes:
        first: as they are given or written; ``last``: outputs, as they end.
        reads: where an operation (its number) reads a tensor otherwise than that: it was moved in between.
        extra: bytes that devices hold beyond the plan's, by tensor.
        padded: shapes of the ends that are cut unevenly, filled up until their parts are equal.
    """

    first: dict[str, Layout] = field(default_factory=dict[str, Layout])
    last: dict[str, Layout] = field(default_factory=dict[str, Layout])
    reads: dict[tuple[int, str], Layout] = field(default_factory=dict[tuple[int, str], Layout])
    extra: dict[str, int] = field(default_factory=dict[str, int])
    padded: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    def read(self, op: int, tensor: str) -> Layout:
        """The layout in which an operation reads a tensor."""
        return self.reads.get((op, tensor), self.first[tensor])


def language(graph: Graph, mesh: Mesh) -> list[Sayable]:
    """What a place for each tensor can say: parts are equal, and inputs and weights are held in a layout."""
    del mesh
    outside = {*graph.inputs, *graph.weights}
    return [
        Sayable(
            placed=frozenset(k for k, t in enumerate(r.tensor for r in op.reads) if t in outside)
            if isinstance(op, Block)
            else frozenset(k for k, t in enumerate(op.ins) if t in outside)
        )
        for op in graph.ops
    ]


def places(build: Build | PricedPlan, form: str, *, nearest_will_do: bool) -> Placed:
    """A layout for each tensor that devices hold.

    Raises:
        NotExpressible: some tensor has none, and the nearest is not asked for; the plan has stages, or an order of devices.
    """
    if build.plan.stages:
        what = "a format of one mesh cannot say pipeline stages"
        raise NotExpressible(what, where=f"--format {form}", hint="onnx-ranks or json; or compile with --stages 1")
    if any(a.order for a in build.plan.mesh):
        what = "the plan's devices are in another order than the mesh's"
        raise NotExpressible(what, where=f"--format {form}", hint="onnx, onnx-ranks or json")
    graph, mesh, buffers = build.plan.graph, build.plan.mesh, build.program.buffers
    found, names, out = buffers_of(buffers.values()), tensor_names(graph), Placed()
    loaded = buffers_of(buffers[s.buffer] for s in build.program.steps if isinstance(s, Load))
    last = {t: buffers[b].boxes for t, b in build.program.outputs.items()}
    for t, x in graph.tensors.items():
        if x.on_host:
            what = f"it stays on the host (its size is known only at run time); {form} cannot place it"
            raise NotExpressible(what, where=f"'{t}'", hint="onnx")
        held_boxes = loaded.get(t) or found.get(t, [])[:1]
        for boxes, into, name in ((held_boxes, out.first, names[t]), ([last[t]] if t in last else [], out.last, t)):
            if boxes:
                at = _place(boxes, x.shape, mesh, itemsize(x.dtype), nearest_will_do, name, form)
                into[t] = at.layout
                out.extra.update({t: max(at.extra, out.extra.get(t, 0))} if at.extra else {})
                if at.uneven and form != "dtensor" and (into is out.last or t in graph.inputs or t in graph.weights):
                    out.padded[t] = padded(at.layout, x.shape, mesh)
    for s in (s for s in build.program.steps if isinstance(s, Launch)):
        for b in (buffers[b] for b in s.ins if b):
            at = layout_of(b.boxes, graph.tensors[b.tensor].shape, mesh) if b.field is None else None
            if at is not None and at != out.first.get(b.tensor):
                out.reads[s.op, b.tensor] = at
    return out


def _place(
    held_boxes: list[Boxes], shape: tuple[int, ...], mesh: Mesh, width: int, nearest_will_do: bool, name: str, form: str
) -> Nearest:
    """One tensor's place.

    Raises:
        NotExpressible: it has none; says what is held.
    """
    at = nearest(tuple(held_boxes), shape, mesh, width, form != "dtensor")
    if all(len({*boxes}) == 1 for boxes in held_boxes):  # of what no device cuts each may have all
        return at
    alone = len(held_boxes) == 1 and layout_of(held_boxes[0], shape, mesh) is not None
    if not nearest_will_do and (at.extra or not alone):
        first = next(b for b in held_boxes[0] if b is not None)
        why = f"device 0 holds {', '.join(f'{lo}:{hi}' for lo, hi in first)} of {list(shape)}"
        why = f"{len(held_boxes)} different parts of it are held" if len(held_boxes) > 1 else why
        hint = f"--nearest: {at.extra:,} bytes more are held"
        raise NotExpressible(f"{form} has no place for a tensor as the plan holds it", where=f"'{name}'", why=why, hint=hint)
    return at


def _partial(build: Build) -> dict[str, list[str]]:
    """Results that are partial before their merge: their placements as they are written, ``Partial(sum)`` among them."""
    graph, mesh, names, out = build.plan.graph, build.plan.mesh, tensor_names(build.plan.graph), dict[str, list[str]]()
    words: Mapping[str, str] = {"add": "sum", "max": "max", "min": "min", "mul": "product"}
    for op, s in zip(graph.ops, build.plan.strategies, strict=True):
        if not isinstance(op, Block) or op.lowers or primitive_of(op.monoid) not in words:
            continue
        reduced, axes = {d.name for d in op.reduce}, {d.name: k for k, d in enumerate(op.dims)}
        if reduced.isdisjoint(d for d in s.dims if d):
            continue
        word = f"Partial({words[primitive_of(op.monoid)]})"
        placed = [
            "Replicate()" if d is None else word if d in reduced else f"Shard({axes[d]})"
            for d, _ in zip(s.dims, mesh, strict=True)
        ]
        out |= {names[t]: placed for t in op.outs}
    return out
