"""A build's plan as ONNX annotations: where every tensor that has an ONNX name is, and in metadata what specs cannot say.

A spec cannot say "partial sum", a mesh, or where something inside a node is. ``tapestry.partial`` on the node that writes a
result lists, per mesh axis that cuts a reduced dimension, ``{"dim", "mesh_axis", "monoid", "by", "along"}``: the partial
states are merged ``by`` an all-reduce, or by a reduce-scatter ``along`` an axis of the result, before that node's output.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from tapestry.build.store import Build
from tapestry.errors import BuildError
from tapestry.interop import onnx_annotations
from tapestry.interop.onnx_annotations import Marks
from tapestry.interop.placement import layout_of_boxes, on_devices, spec_of
from tapestry.interop.sharding_specs import DeviceConfiguration, ShardingSpec, name_of
from tapestry.ir.graph import Block, Op
from tapestry.ir.plan import Layout, Mesh, Plan, Stage, Strategy
from tapestry.lift.file.structure import load
from tapestry.plan.strategy import footprints, out_layout

CONFIGURATION = "tapestry"


def export(build: Build, target: Path, *, copy: bool = False) -> dict[str, Any]:
    """Write the build's model with the plan as annotations; returns what was written, as data.

    Raises:
        BuildError: the model is not the one that the build was made from; TapestryError: it cannot be written there.
    """
    shared = next((a for a in build.plan.mesh if a.weights), None)
    if shared is not None:
        raise BuildError(
            f"mesh axis '{shared.name}' has uneven shares {shared.weights}, and a sharding spec can only say equal parts",
            hint="compile for equal devices",
        )
    source = Path(build.model)
    if not source.is_file() or hashlib.sha256(source.read_bytes()).hexdigest() != build.model_sha256:
        raise BuildError("the model is not what it was when the build was made", where=str(source), hint="compile it again")
    model = load(source)
    marks = marks_of(build, model)
    specs = onnx_annotations.annotate(model, marks)
    onnx_annotations.write(model, source, target, copy=copy)
    written = {o for n in model.graph.node for o in n.output if o in marks.outs}
    return {
        "model": str(target), "ir_version": model.ir_version, "configuration": CONFIGURATION, "devices": build.plan.devices,
        "specs": specs, "outputs": len(written), "tensors": len([t for op in build.plan.graph.ops for t in op.outs]),
        "partial": sum(len(json.loads(m.get(onnx_annotations.PARTIAL, "[]"))) for m in marks.nodes.values()),
    }  # fmt: skip


def marks_of(build: Build, model: ModelProto) -> Marks:
    """The annotations of a build's plan."""
    plan = build.plan
    nodes = {o: name_of(n) for n in model.graph.node for o in n.output if o}
    named = set(nodes.values())
    outs: dict[str, ShardingSpec] = {}
    notes: dict[str, dict[str, Any]] = {}
    for op, s, at in zip(plan.graph.ops, plan.strategies, plan.places, strict=True):
        for n, t in enumerate(op.outs):
            if t in nodes:
                spec = spec_of(t, out_layout(op, s.out, n), len(plan.graph.tensors[t].shape), at.mesh)
                outs[t] = on_devices(spec, at.first)
        holder = op.outs[0] if op.outs[0] in nodes else next((x for x in reversed(op.source) if x in named), "")
        if not holder:
            continue
        partial = _partial(op, s, at.mesh)
        if partial and op.outs[0] in nodes:
            notes.setdefault(holder, {}).setdefault(onnx_annotations.PARTIAL, []).extend(partial)
        if op.outs[0] not in nodes or not isinstance(op, Block):
            notes.setdefault(holder, {}).setdefault(onnx_annotations.INTERNAL, {})[op.outs[0]] = {"dims": s.dims, "out": s.out}
    shapes = {t: plan.graph.tensors[t].shape for t in plan.graph.inputs}
    return Marks(
        configuration=DeviceConfiguration(CONFIGURATION, plan.devices), outs=outs, reads=_reads(plan, model),
        stages=_stages(plan, model),
        nodes={k: {key: json.dumps(v) for key, v in found.items()} for k, found in notes.items()},
        model={
            onnx_annotations.MESH: ",".join(f"{a.name}={a.size}" for a in plan.mesh),
            onnx_annotations.SHAPES: json.dumps(shapes),
            onnx_annotations.FIXED: json.dumps({"inputs": plan.inputs, "outputs": plan.outputs}),
            onnx_annotations.MOVES: json.dumps(build.moves),
            **({onnx_annotations.STAGES: json.dumps(_stages_data(build))} if plan.stages else {}),
        },
        shapes=_static_outputs(plan, model),
    )  # fmt: skip


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
    reduced = {d.name for d in op.reduce}
    return [
        {"dim": d, "mesh_axis": a.name, "monoid": op.monoid, "by": "all-reduce" if o is None else "reduce-scatter", "along": o}
        for d, o, a in zip(s.dims, s.out, mesh, strict=True)
        if d in reduced
    ]


def _reads(plan: Plan, model: ModelProto) -> dict[tuple[str, str], ShardingSpec]:
    """What each node reads where, as far as a spec can say it: no halo, and the same for all that the node became."""
    readers: dict[str, set[str]] = {}
    for node in model.graph.node:
        for t in node.input:
            readers.setdefault(t, set()).add(name_of(node))
    layouts_read: dict[tuple[str, str], set[tuple[Layout | None, Stage]]] = {}
    for op, s, at in zip(plan.graph.ops, plan.strategies, plan.places, strict=True):
        for _, t, boxes in footprints(op, plan.graph, s, at.mesh):
            for node in readers.get(t, set()) & set(op.source):
                layouts_read.setdefault((node, t), set()).add((_layout(boxes, plan.graph.tensors[t].shape, at.mesh), at))
    out: dict[tuple[str, str], ShardingSpec] = {}
    for (node, t), layouts in layouts_read.items():
        layout, at = next(iter(layouts))
        if len(layouts) == 1 and layout is not None:
            out[(node, t)] = on_devices(spec_of(t, layout, len(plan.graph.tensors[t].shape), at.mesh), at.first)
    return out


def _layout(boxes: np.ndarray, shape: tuple[int, ...], mesh: Mesh) -> Layout | None:
    return layout_of_boxes(tuple(tuple((int(lo), int(hi)) for lo, hi in b) for b in boxes), shape, mesh)
