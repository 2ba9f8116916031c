"""Annotations of a model as constraints on its plan: what the specs say is kept, what they leave open is searched.

A spec of a result that simplification fuses away is carried to the result that it was fused into, by the projections in
between; where that says something else, the result is kept apart instead. What cannot be kept is listed, never dropped in
silence.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
from onnx import ModelProto

from tapestry.errors import PlanError, TapestryError
from tapestry.interop import onnx_annotations, sharding_specs
from tapestry.interop.annotation_rules import Context, check, spec_rules
from tapestry.interop.onnx_annotations import read_json
from tapestry.interop.placement import layout_of
from tapestry.interop.sharding_specs import ShardingSpec, name_of
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import dims_of, evaluate
from tapestry.ir.plan import Layout, Mesh, MeshAxis, device_count
from tapestry.lift.file.structure import load
from tapestry.plan.layout_constraints import Dims, LayoutConstraints
from tapestry.plan.topology import MAX_DEVICES, parse_mesh
from tapestry.rewrites.core.applied import apply_moves, swept
from tapestry.rewrites.core.driver import applied, disabled_by, simplify, without
from tapestry.rewrites.core.rule import RULES, Move, parse_move

MESH_AXES = 3  # of a mesh that is guessed from a file's specs


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotations:
    """The annotations of one configuration of a file, as they stand.

    Attributes:
        outs, reads: specs by tensor, and by (node, tensor); ``writer`` names the node of an output spec.
        model: the model's metadata; ``nodes`` that of every node, by name.
        stage_of: the pipeline stage of each result, ``node_stages`` the last one of the nodes of a name.
    """

    configuration: str
    devices: int
    outs: Mapping[str, ShardingSpec]
    reads: Mapping[tuple[str, str], ShardingSpec]
    writer: Mapping[str, str]
    model: Mapping[str, str]
    nodes: Mapping[str, Mapping[str, str]]
    stage_of: Mapping[str, int] = field(default_factory=dict[str, int])
    node_stages: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def stages(self) -> int:
        """How many pipeline stages the nodes name."""
        return len({*self.stage_of.values()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a plan has to keep to, for a graph.

    Attributes:
        graph: the simplified graph, with results kept apart and the file's structural moves applied.
        fixed: what the search keeps to.
        inputs, outputs: layouts in which inputs start and outputs end.
        moves: the structural moves, in order.
        notes: what is not kept, and why.
        counts: how many specs were used how.
    """

    graph: Graph
    fixed: LayoutConstraints
    inputs: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    outputs: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    moves: tuple[Move, ...] = ()
    notes: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict[str, int])


def read(path: Path, devices: int | None = None) -> Annotations | None:
    """The annotations of a file for a number of devices; ``None`` when it has none.

    Raises:
        PlanError: they are structurally wrong, or for other numbers of devices only.
    """
    model = load(path)
    configurations = sharding_specs.configurations(model)
    if not sharding_specs.annotated(model):
        return None
    errors = (f for f in check(model, Context({}, _symbols(model))) if f.level == "error" and f.code != "dim-param-unknown")
    wrong = next(errors, None)
    if wrong is not None:
        where = f"node '{wrong.node}'" if wrong.node else str(path)
        hint = "tapestry check-sharding lists everything; --ignore-sharding plans without"
        raise PlanError(f"the model's sharding is wrong: {wrong.message}", where=where, hint=hint)
    chosen = next((c for c in configurations if devices in (None, c.num_devices)), None)
    if chosen is None or chosen.name is None or chosen.num_devices is None:
        sizes = ", ".join(str(c.num_devices) for c in configurations)
        what = f"the model's sharding is for {sizes} devices, not {devices}"
        raise PlanError(what, where=str(path), hint="another --mesh, or --ignore-sharding")
    if chosen.num_devices > MAX_DEVICES:
        what = f"the model's sharding is for {chosen.num_devices:,} devices"
        raise PlanError(what, where=str(path), hint=f"at most {MAX_DEVICES:,}")
    return _collect(model, chosen.name, chosen.num_devices)


def _symbols(model: ModelProto) -> dict[str, int | None]:
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    return {d.dim_param: None for v in values for d in v.type.tensor_type.shape.dim if d.dim_param}


def _collect(model: ModelProto, name: str, devices: int) -> Annotations:
    outs: dict[str, ShardingSpec] = {}
    reads: dict[tuple[str, str], ShardingSpec] = {}
    stage_of, node_stages = dict[str, int](), dict[str, int]()
    for node in model.graph.node:
        for c in sharding_specs.node_configurations(node):
            if c.configuration != name:
                continue
            if c.stage is not None:
                stage_of |= dict.fromkeys(filter(None, node.output), c.stage)
                node_stages[name_of(node)] = max(c.stage, node_stages.get(name_of(node), 0))
            for s in c.specs:
                assert s.tensor is not None
                if s.tensor in node.output:
                    outs[s.tensor] = s
                else:
                    reads[(name_of(node), s.tensor)] = s
    return Annotations(
        configuration=name, devices=devices, outs=outs, reads=reads, model=sharding_specs.metadata(model),
        stage_of=stage_of, node_stages=node_stages,
        writer={o: name_of(n) for n in model.graph.node for o in n.output},
        nodes={name_of(n): sharding_specs.metadata(n) for n in model.graph.node},
    )  # fmt: skip


def shapes(a: Annotations) -> dict[str, list[int]]:
    """Sizes of inputs that the annotations were made for, where the file says."""
    sizes = read_json(a.model, onnx_annotations.SHAPES, dict)
    return {k: v for k, v in sizes.items() if isinstance(v, list) and v}


def staged(a: Annotations) -> tuple[int, int] | None:
    """(pipeline stages, micro-batches) that the file says it was planned with; its specs are then of parts of the mesh.

    Raises:
        PlanError: the metadata does not say that.
    """
    text = a.model.get(onnx_annotations.STAGES)
    if text is None:
        return None
    try:
        stated = json.loads(text)
        stages, micro = len(stated["stages"]), int(stated["micro_batches"])
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise PlanError(f"not pipeline stages: {e}", where=onnx_annotations.STAGES, hint="--ignore-sharding") from None
    if not (2 <= stages <= a.devices and 1 <= micro <= a.devices * MAX_DEVICES):
        raise PlanError(f"{stages} stages and {micro} micro-batches", where=onnx_annotations.STAGES, hint="--ignore-sharding")
    return stages, micro


def mesh(a: Annotations) -> Mesh:
    """The mesh that the file names, or else the first of few axes that can say all its specs.

    Sizes do not matter for that: every cut axis is given as many cells as a multiple of its parts.

    Raises:
        PlanError: the named mesh has another number of devices.
    """
    if onnx_annotations.MESH in a.model:
        named = parse_mesh(a.model[onnx_annotations.MESH])
        if device_count(named) != a.devices:
            what = f"{onnx_annotations.MESH} has {device_count(named)} devices, the configuration {a.devices}"
            raise PlanError(what, where=a.model[onnx_annotations.MESH])
        return named
    specs = {replace(s, tensor=None) for s in (*a.outs.values(), *a.reads.values()) if s.dims}
    for k in range(1, MESH_AXES + 1):
        for sizes in _factors(a.devices, k):
            guess = tuple(MeshAxis(f"d{i}", n) for i, n in enumerate(sizes))
            if all(layout_of(*_model_of(s), guess) is not None for s in specs):
                return guess
    return (MeshAxis("d0", a.devices),)


def _model_of(s: ShardingSpec) -> tuple[ShardingSpec, tuple[int, ...]]:
    """The spec for a tensor that has the cut axes and no others."""
    dims = tuple(replace(d, axis=k, shards=tuple(replace(x, dim=x.num_shards) for x in d.shards)) for k, d in enumerate(s.dims))
    return replace(s, dims=dims), tuple(prod(x.num_shards or 1 for x in d.shards) for d in s.dims)


def _factors(n: int, k: int) -> Iterator[tuple[int, ...]]:
    if k == 1:
        if n > 0:
            yield (n,)
        return
    for f in range(2, n // 2 + 1):
        if n % f == 0:
            yield from ((f, *rest) for rest in _factors(n // f, k - 1) if 1 not in rest)


# constraints


def constraints(a: Annotations, lifted: Graph, over: Mesh, apart: Sequence[str] | None = None) -> Given:
    """The annotations as constraints on the plan of a lifted (not yet simplified) graph.

    Args:
        apart: results that stay apart because stages end there; ``None``: there are no stages.

    Raises:
        PlanError: a spec cannot be said with the mesh's axes, or contradicts the tensor.
    """
    unplanned = f"pipeline stages are not planned ({a.stages} in the file: --stages {a.stages})"
    notes = [unplanned] * (a.stages > 1 and apart is None)
    wanted = {t: _spec_layout(s, lifted, over, a.writer[t]) for t, s in a.outs.items() if t in lifted.tensors}
    reads = {k: _spec_layout(s, lifted, over, k[0]) for k, s in a.reads.items() if k[1] in lifted.tensors}
    notes += [f"'{t}' is not computed any more (folded or dead)" for t in a.outs if t not in lifted.tensors]
    chosen = [parse_move(str(m)) for m in read_json(a.model, onnx_annotations.MOVES, list)]
    graph, outs, more = _kept(lifted, wanted, disabled_by(chosen), apart or ())
    notes += more
    graph, moves = _moved(graph, chosen, notes)
    inputs, outputs = _ends(a, lifted, reads)
    dims, inner = _dims(a, graph, outs, over)
    fixed = LayoutConstraints(outs={**outs, **inner}, reads=reads, dims=dims)
    counts = {"specs": len(a.outs) + len(a.reads), "fixed": len(outs), "reads": len(reads), "dims": len(fixed.dims)}
    return Given(graph=graph, fixed=fixed, inputs=inputs, outputs=outputs, moves=moves, notes=tuple(notes), counts=counts)


def _spec_layout(s: ShardingSpec, graph: Graph, over: Mesh, node: str) -> Layout:
    shape = graph.tensors[s.tensor or ""].shape
    here = Context({s.tensor or "": shape}, {x.dim: None for d in s.dims for x in d.shards if isinstance(x.dim, str)})
    wrong = next((m for level, _, m in spec_rules(s, None, here) if level == "error"), None)
    layout = None if wrong else layout_of(s, shape, over)
    if layout is None:
        mesh_text = "x".join(str(x.size) for x in over)
        raise PlanError(
            f"the sharding given for '{s.tensor}' cannot be kept", where=f"node '{node}'",
            why=wrong or f"no layout over the axes of mesh {mesh_text} puts its parts on these devices: {list(s.devices)}",
            hint="another --mesh, another order of devices, or --ignore-sharding",
        )  # fmt: skip
    return layout


def _kept(
    lifted: Graph, wanted: Mapping[str, Layout], disabled: frozenset[str], ends: Sequence[str]
) -> tuple[Graph, dict[str, Layout], list[str]]:
    """The simplified graph, in which the ends of stages stay apart, the layouts that its tensors get, and what is lost."""
    graph = with_apart(lifted, ends, disabled) if ends else simplify(lifted, disabled=disabled)
    outs = {t: layout for t, layout in wanted.items() if t in graph.producers()}
    apart: list[str] = []
    for t, layout in wanted.items():
        if t in outs:
            continue
        carried = _carry(t, layout, lifted, graph)
        if carried is None or outs.get(carried[0], wanted.get(carried[0], carried[1])) != carried[1]:
            apart.append(t)
        else:
            outs[carried[0]] = carried[1]
    if apart:
        graph = with_apart(lifted, [*apart, *ends], disabled)
        outs = {t: layout for t, layout in {**outs, **wanted}.items() if t in graph.producers()}
    lost = [t for t in apart if t not in outs]
    return graph, outs, [f"'{t}' is a view of another tensor, which has no place of its own" for t in lost]


def with_apart(lifted: Graph, apart: Sequence[str], disabled: frozenset[str]) -> Graph:
    """The simplified graph in which some results are not fused into their readers."""
    held_back = tuple(dict.fromkeys((*lifted.outputs, *apart)))
    graph = replace(simplify(replace(lifted, outputs=held_back), disabled=disabled), outputs=lifted.outputs)
    return swept(RULES["drop_dead"], graph)


def _carry(tensor: str, layout: Layout, lifted: Graph, graph: Graph) -> tuple[str, Layout] | None:
    """The tensor of the simplified graph that a result was fused into, and the same layout there.

    Follows single readers that compute each point from one cell. A cut is carried along when the reader walks the axis by
    one dimension of the same extent.
    """
    written, readers = graph.producers(), lifted.consumers()
    for _ in range(len(lifted.ops)):
        if tensor in written:
            return tensor, layout
        consumers = readers.get(tensor, [])
        op = lifted.ops[consumers[0]] if len(consumers) == 1 else None
        if not isinstance(op, Block) or op.monoid or len(op.outs) != 1:
            return None
        through = [r for r in op.reads if r.tensor == tensor]
        if len(through) != 1 or through[0].other is not None:
            return None
        moved = [_walk(op, through[0].index[k], lifted.tensors[tensor].shape[k]) if k is not None else None for k in layout]
        if any(k is not None and m is None for k, m in zip(layout, moved, strict=True)):
            return None
        tensor, layout = op.outs[0], tuple(moved)
    return None


def _walk(op: Block, index: Any, extent: int) -> int | None:
    """The output axis that walks a tensor's axis cell by cell, in the same order."""
    names = sorted(dims_of(index))
    if len(names) != 1:
        return None
    k = next((i for i, d in enumerate(op.dims) if d.name == names[0]), None)
    if k is None or op.dims[k].size != extent:
        return None
    return k if np.array_equal(np.asarray(evaluate(index, {names[0]: np.arange(extent)})), np.arange(extent)) else None


def _moved(graph: Graph, moves: Sequence[Move], notes: list[str]) -> tuple[Graph, tuple[Move, ...]]:
    """The structural rewrites that the file says were chosen."""
    new, disabled = graph, disabled_by(moves)
    try:
        for _, group in itertools.groupby(applied(moves), key=lambda m: (m.rule, m.params)):
            new = simplify(apply_moves(new, list(group)), disabled=disabled)
    except TapestryError as e:
        notes.append(f"the file's rewrites do not apply: {e.what}")
        return graph, tuple(map(without, sorted(disabled)))
    return new, tuple(moves)


def _ends(a: Annotations, graph: Graph, reads: Mapping[tuple[str, str], Layout]) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Layouts of inputs and outputs: as the metadata says; else of inputs whose readers all give the same one."""
    if onnx_annotations.FIXED in a.model:
        layouts = read_json(a.model, onnx_annotations.FIXED, dict)
        pairs = [{t: tuple(v) for t, v in layouts.get(k, {}).items() if t in graph.tensors} for k in ("inputs", "outputs")]
        return pairs[0], pairs[1]
    inputs: dict[str, Layout] = {}
    for t in graph.inputs:
        given = [reads.get((s, t)) for i in graph.consumers().get(t, []) for s in graph.ops[i].source]
        if given and given[0] is not None and all(g == given[0] for g in given):
            inputs[t] = given[0]
    return inputs, {}


def _dims(a: Annotations, graph: Graph, outs: Mapping[str, Layout], over: Mesh) -> tuple[dict[str, Dims], dict[str, Layout]]:
    """What every mesh axis cuts, exactly, where the file's metadata completes its specs; and layouts inside nodes."""
    out: dict[str, Dims] = {}
    inner: dict[str, Layout] = {}
    if onnx_annotations.MESH not in a.model:
        return out, inner
    blocks = {op.outs[0] for op in graph.ops if isinstance(op, Block)}
    for props in a.nodes.values():
        for name, s in read_json(props, onnx_annotations.INTERNAL, dict).items():
            if _complete(s, len(over)):
                out[str(name)] = tuple(s["dims"])
                inner |= {str(name): tuple(s["out"])} if name in blocks else {}
    for op in graph.ops:
        layout = outs.get(op.outs[0])
        if not isinstance(op, Block) or layout is None:
            continue
        properties = a.nodes.get(a.writer.get(op.outs[0], ""), {})
        rows: list[Any] = read_json(properties, onnx_annotations.PARTIAL, list)
        partial: dict[str, dict[str, Any]] = {p["mesh_axis"]: p for p in rows if isinstance(p, dict) and "mesh_axis" in p}
        dims: list[str | None] = []
        for axis, k in zip(over, layout, strict=True):
            p = partial.get(axis.name)
            own = None if k is None else op.dims[k].name
            dims.append(str(p.get("dim")) if p is not None and p.get("along") == k else own)
        if all(d is None or d in op.ranges for d in dims):
            out[op.outs[0]] = tuple(dims)
    return out, inner


def _complete(s: Any, axes: int) -> bool:
    """Whether the metadata of an inner result says what every mesh axis cuts."""
    return isinstance(s, dict) and len(cast(Any, s).get("dims", ())) == len(cast(Any, s).get("out", ())) == axes
