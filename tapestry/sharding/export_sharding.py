"""A build's plan as ONNX annotations: where every tensor that has an ONNX name is, and in metadata what specs cannot say.

A spec cannot say "partial sum", a mesh, unequal parts, a halo, or where something inside a node is. docs/sharding.md has the
table of what is written for each. Topology and tile patterns are written as well, in the form of the slides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, ValueInfoProto, helper

from tapestry.build.store import Build
from tapestry.errors import BuildError, TapestryError
from tapestry.interop import onnx_annotations, tile_metadata
from tapestry.interop.onnx_annotations import Marks
from tapestry.interop.placement import grown, layout_of_boxes, on_devices, spec_of, stating, tiling_of_layout
from tapestry.interop.sharding_specs import OURS, DeviceConfiguration, ShardingSpec, name_of
from tapestry.interop.tile_patterns import Tiling
from tapestry.ir.graph import Block, Graph, Op, names_of
from tapestry.ir.kernel import Box
from tapestry.ir.plan import Layout, Mesh, Plan, Stage, Strategy
from tapestry.ir.types import numpy_dtype
from tapestry.lift import lift
from tapestry.lift.file.structure import load
from tapestry.plan.strategy import footprints, out_layout
from tapestry.plan.topology import from_data
from tapestry.plan.topology.wire_shapes import connections
from tapestry.rewrites.core.rule import parse_move
from tapestry.sharding.annotation_constraints import fused_view, view_at, view_spec
from tapestry.sharding.check_sharding import declared

Shape = tuple[int | str | None, ...]


def export(
    build: Build, target: Path, *, copy: bool = False, into: Path | None = None, configuration: str = OURS
) -> dict[str, Any]:
    """Write the build's model with the plan as annotations; returns what was written, as data.

    Args:
        into: a file with the same graph, whose configurations are kept.
        configuration: the name of the plan's.

    Raises:
        BuildError: the model is not the one that the build was made from; TapestryError: it cannot be written there.
    """
    source = Path(build.model)
    if not source.is_file() or hashlib.sha256(source.read_bytes()).hexdigest() != build.model_sha256:
        raise BuildError("the model is not what it was when the build was made", where=str(source), hint="compile it again")
    if not configuration.isidentifier():
        raise TapestryError(f"'{configuration}' is no name", where="--configuration", hint="letters, digits and underscores")
    model = load(source)
    if into is not None and _bare(load(into)) != _bare(model):
        why = "beside annotations and their metadata they differ"
        raise BuildError("the file is not the build's model", where=str(into), why=why, hint=f"one made from {source}")
    marks = marks_of(build, model, configuration)
    source, model = (source, model) if into is None else (into, load(into))
    specs = onnx_annotations.annotate(model, marks, beside=into is not None)
    onnx_annotations.write(model, source, target, copy=copy, replace=into is not None)
    written = {o for n in model.graph.node for o in n.output if o in marks.outs}
    return {
        "model": str(target),
        "ir_version": model.ir_version,
        "configuration": configuration,
        "devices": build.plan.devices,
        "configurations": [c.name for c in model.configuration],
        "specs": specs,
        "outputs": len(written & _results(build.plan)),
        "tensors": len(_results(build.plan)),
        "views": len(written - _results(build.plan)),
        "tilings": len(marks.tilings),
        "partial": sum(len(json.loads(m.get(onnx_annotations.PARTIAL, "[]"))) for m in marks.nodes.values()),
    }


def _bare(model: ModelProto) -> bytes:
    """The model without annotations, metadata of theirs and what they need, for a comparison."""
    onnx_annotations.strip(model)
    model.ir_version = 0
    del model.graph.value_info[:]
    for o in model.graph.output:
        o.ClearField("type")
    for t in onnx_annotations.external(model):
        for entry in t.external_data:
            if entry.key == "location":
                entry.value = Path(entry.value).name
    return model.SerializeToString(deterministic=True)


def _results(plan: Plan) -> set[str]:
    return {t for op in plan.graph.ops for t in op.outs}


def marks_of(build: Build, model: ModelProto, configuration: str = OURS) -> Marks:
    """The annotations of a build's plan."""
    plan, said = build.plan, _Said(build, model, declared(model).shapes)
    placed = said.placed()
    outs = {t: on_devices(said.spec(t, layout, at.mesh), at.first) for t, (layout, at) in placed.items() if t in said.nodes}
    outs |= said.views(placed)
    notes = _notes(plan, said.nodes)
    reads = said.reads()
    values = {t: said.spec(t, layout, plan.mesh) for t, layout in {**plan.inputs, **plan.outputs}.items()}
    tilings = said.tilings(placed)
    shares = {a.name: a.weights for a in plan.mesh if a.weights}
    order = {a.name: a.order for a in plan.mesh if a.order}
    return Marks(
        configuration=DeviceConfiguration(configuration, plan.devices),
        outs=outs,
        reads=reads,
        values=values,
        stages=_stages(plan, model),
        nodes={k: {key: json.dumps(v) for key, v in found.items()} for k, found in notes.items()},
        model={
            onnx_annotations.MESH: ",".join(f"{a.name}={a.size}" for a in plan.mesh),
            onnx_annotations.SHAPES: json.dumps({t: plan.graph.tensors[t].shape for t in plan.graph.inputs}),
            onnx_annotations.MOVES: json.dumps(build.moves),
            **({onnx_annotations.SHARES: json.dumps(shares)} if shares else {}),
            **({onnx_annotations.ORDER: json.dumps(order)} if order else {}),
            **({onnx_annotations.STAGES: json.dumps(_stages_data(build))} if plan.stages else {}),
        },
        shapes=_static_outputs(plan, model),
        topology=_topology(build),
        tilings=tilings,
        declared={t: said.value(t) for t in tilings},
    )


def _topology(build: Build) -> tile_metadata.ModelTopology:
    """How many instances, and which are joined; of very many that are all joined with all only how many."""
    return tile_metadata.ModelTopology(build.plan.devices, connections(from_data(build.topology), build.plan.devices))


def _notes(plan: Plan, nodes: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Metadata of nodes: reductions that are completed, and operations inside of a node, by the tensor or the node's name."""
    named = set(nodes.values())
    notes: dict[str, dict[str, Any]] = {}
    for op, s, at in zip(plan.graph.ops, plan.strategies, plan.places, strict=True):
        holder = op.outs[0] if op.outs[0] in nodes else next((x for x in reversed(op.source) if x in named), "")
        if not holder:
            continue
        partial = _partial(op, s, at.mesh)
        for t in op.outs if partial else ():
            if t in nodes:
                notes.setdefault(t, {}).setdefault(onnx_annotations.PARTIAL, []).extend(partial)
        if op.outs[0] not in nodes or not isinstance(op, Block):
            notes.setdefault(holder, {}).setdefault(onnx_annotations.INTERNAL, {})[op.outs[0]] = {"dims": s.dims, "out": s.out}
    return notes


@dataclass(frozen=True, slots=True)
class _Said:
    """A build, its model, and the shapes that the model declares, with symbols."""

    build: Build
    model: ModelProto
    shapes: Mapping[str, Shape | None]

    @property
    def nodes(self) -> dict[str, str]:
        """Results by name, with the node that writes them."""
        return {o: name_of(n) for n in self.model.graph.node for o in n.output if o}

    @property
    def graph(self) -> Graph:
        """The plan's graph."""
        return self.build.plan.graph

    def placed(self) -> dict[str, tuple[Layout, Stage]]:
        """Where every result of the plan is written."""
        plan = self.build.plan
        return {
            t: (out_layout(op, s.out, n), at)
            for op, s, at in zip(plan.graph.ops, plan.strategies, plan.places, strict=True)
            for n, t in enumerate(op.outs)
        }

    def spec(self, tensor: str, layout: Layout, mesh: Mesh) -> ShardingSpec:
        """A layout of a tensor of the plan as a spec that states sizes, symbols and unequal parts."""
        shape = self.graph.tensors[tensor].shape
        return stating(spec_of(tensor, layout, len(shape), mesh), self.shapes.get(tensor) or (), shape, mesh, layout)

    def views(self, placed: Mapping[str, tuple[Layout, Stage]]) -> dict[str, ShardingSpec]:
        """Specs of results that the plan has as views of others."""
        names = [o for o in self.nodes if o not in placed]
        if not names:
            return {}
        sizes = {t: list(self.graph.tensors[t].shape) for t in self.graph.inputs}
        try:
            lifted = lift(Path(self.build.model), sizes, weights=False).graph
        except TapestryError:  # a file that needs its weights to be lifted says less
            return {}
        out: dict[str, ShardingSpec] = {}
        apart = [parse_move(m) for m in self.build.moves if m.startswith("unfuse@")]
        for t in names:
            view = next((fused_view(m, lifted, self.graph) for m in apart if m.at == t), None) or view_at(lifted, t)
            source = view.reads[0].tensor if view is not None else ""
            if view is not None and source in placed:
                layout, at = placed[source]
                found = view_spec(t, view, layout, self.graph.tensors[source].shape, at.mesh)
                out |= {t: on_devices(found, at.first)} if found is not None else {}
        return out

    def reads(self) -> dict[tuple[str, str], ShardingSpec]:
        """What each node reads where, as far as a spec with its parts can say it: the same for all that the node became."""
        readers: dict[str, set[str]] = {}
        for node in self.model.graph.node:
            for t in node.input:
                readers.setdefault(t, set()).add(name_of(node))
        plan = self.build.plan
        found: dict[tuple[str, str], set[tuple[tuple[Box, ...], Stage]]] = {}
        for op, s, at in zip(plan.graph.ops, plan.strategies, plan.places, strict=True):
            for _, t, boxes in footprints(op, plan.graph, s, at.mesh):
                for node in readers.get(t, set()) & set(op.source):
                    found.setdefault((node, t), set()).add((_boxes(boxes), at))
        specs = {key: self._read(key[1], *next(iter(v))) for key, v in found.items() if len(v) == 1}
        return {key: s for key, s in specs.items() if s is not None}

    def _read(self, tensor: str, boxes: tuple[Box, ...], at: Stage) -> ShardingSpec | None:
        if any(lo >= hi for b in boxes for lo, hi in b):  # (of a concatenation, say: a device may read none of a part)
            return None
        shape = self.graph.tensors[tensor].shape
        layout = layout_of_boxes(boxes, shape, at.mesh)
        if layout is not None:
            return on_devices(self.spec(tensor, layout, at.mesh), at.first)
        halo = grown(tensor, boxes, shape, at.mesh)
        return None if halo is None else on_devices(halo, at.first)

    def tilings(self, placed: Mapping[str, tuple[Layout, Stage]]) -> dict[str, Tiling]:
        """Tile patterns of what starts, ends or is written in a layout that one can say."""
        plan = self.build.plan
        named = {h.name for h in tile_metadata.values(self.model)} | self.nodes.keys()
        fixed = {t: (v, Stage(0, plan.mesh)) for t, v in {**plan.inputs, **plan.outputs}.items()}
        found = {
            t: tiling_of_layout(layout, self.graph.tensors[t].shape, at.mesh, at.first)
            for t, (layout, at) in {**placed, **fixed}.items()
            if t in named
        }
        return {t: g for t, g in found.items() if g is not None}

    def value(self, tensor: str) -> ValueInfoProto:
        """What a result is, for a file that does not declare it: its type, and its sizes where the file has no symbols."""
        t = self.graph.tensors[tensor]
        shape = self.shapes.get(tensor) or (None,) * len(t.shape)
        kind = helper.np_dtype_to_tensor_dtype(numpy_dtype(t.dtype))
        return helper.make_tensor_value_info(tensor, kind, list(shape))


def _boxes(boxes: np.ndarray) -> tuple[Box, ...]:
    return tuple(tuple((int(lo), int(hi)) for lo, hi in b) for b in boxes)


def _stages_data(build: Build) -> dict[str, Any]:
    """Devices and mesh of every stage, and how many micro-batches go through them."""
    stages = [{"first": s.first, "mesh": ",".join(f"{a.name}={a.size}" for a in s.mesh)} for s in build.plan.stages]
    return {"stages": stages, "micro_batches": build.report.get("micro_batches", 1)}


def _stages(plan: Plan, model: ModelProto) -> dict[str, int]:
    """The pipeline stage of each node that became operations.

    A view may be part of operations of several stages, and belongs to the first; a node that became operations of several
    stages gives its results in the last of them, which is not before any of what it reads.
    """
    first: dict[str, int] = {}
    for op, k in zip(plan.graph.ops, plan.stage_of, strict=False):
        for name in op.source:
            first[name] = min(first.get(name, k), k)
    at: dict[str, int] = {}
    out: dict[str, int] = {}
    for node in model.graph.node if plan.stages else ():
        name = name_of(node)
        stage = max([first.get(name, 0), *(at[t] for t in node.input if t in at)])
        at |= dict.fromkeys(node.output, stage)
        if name in first:
            out[name] = stage
    return out


def _static_outputs(plan: Plan, model: ModelProto) -> dict[str, tuple[int, ...]]:
    """Sizes of outputs, where no input has a symbolic size (the file's own symbols are left as they are)."""
    dims = [d for i in model.graph.input for d in i.type.tensor_type.shape.dim]
    if not all(d.HasField("dim_value") for d in dims):
        return {}
    return {t: plan.graph.tensors[t].shape for t in plan.graph.outputs}


def _partial(op: Op, s: Strategy, mesh: Mesh) -> list[dict[str, Any]]:
    if not isinstance(op, Block):
        return []
    reduced = names_of(op.reduce)
    return [
        {"dim": d, "mesh_axis": a.name, "monoid": op.monoid, "by": "all-reduce" if o is None else "reduce-scatter", "along": o}
        for d, o, a in zip(s.dims, s.out, mesh, strict=True)
        if d in reduced
    ]
