"""``tapestry check-sharding``: the structure of a model's annotations, then their meaning on the lifted operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path

from onnx import ModelProto, NodeProto

from tapestry.errors import ModelError, PlanError, TapestryError
from tapestry.interop import annotation_semantics, onnx_annotations, sharding_specs, tile_metadata
from tapestry.interop.annotation_rules import Context, Finding, Shape, findings_of
from tapestry.interop.placement import Intervals, Placement, describe, fused_sizes, placement
from tapestry.interop.sharding_specs import ShardedDim, ShardingSpec, name_of, with_sizes
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.plan import device_count
from tapestry.ir.types import itemsize
from tapestry.lift import lift
from tapestry.lift.file.structure import load
from tapestry.lift.file.symbols import Given
from tapestry.lift.normalize.inference import infer_shapes
from tapestry.lift.normalize.prepare import take_out_weights
from tapestry.plan.topology import MAX_DEVICES, parse_mesh
from tapestry.sharding.unkept import unkept

MAX_SYMBOL = 1 << 12
Placements = Mapping[str, Placement]


def check_file(path: Path, shapes: Given = {}) -> list[Finding]:  # noqa: B006
    """Everything wrong with a file's annotations, structural findings first.

    Args:
        shapes: sizes of symbolic dimensions; without them a size that every cut divides is assumed.

    Raises:
        ModelError: the file is no model.
    """
    model = load(path)
    context = declared(model)
    findings = [*findings_of(model, context), *_metadata(model), *_tilings(model)]
    if all(f.level != "error" for f in findings):
        findings += unkept(path, model, context)
    if not sharding_specs.annotated(model):
        if findings or tile_metadata.carried(model):
            return findings
        return [Finding("warning", "no-annotations", "", "", "the model has no multi-device annotations"), *findings]
    wrong = {(f.node, f.tensor) for f in findings if f.level == "error"}
    try:
        graph = lift(path, shapes or _sizes(model, context), weights=False).graph
    except ModelError as e:
        text = f"what the operators mean was not checked: {e.what} ({e.where}: {e.why})"
        return [*findings, Finding("warning", "not-lifted", "", "", text)]
    symbolic = ((d, graph.tensors[i].shape[k]) for i in graph.inputs for k, d in enumerate(context.shapes.get(i) or ()))
    sizes = {d: n for d, n in symbolic if isinstance(d, str)}
    for c in sharding_specs.configurations(model):
        if c.name and c.num_devices and c.num_devices > MAX_DEVICES:
            text = f"configuration '{c.name}' has {c.num_devices:,} devices: what the operators mean was not checked"
            findings.append(Finding("warning", "many-devices", "", "", text))
        elif c.name and c.num_devices:
            findings += _Meaning(model, graph, c.name, wrong, sizes).findings()
    return findings


def declared(model: ModelProto) -> Context:
    """Shapes of all values: what the file declares, completed by onnx's inference."""
    bare = deepcopy(model)
    try:
        take_out_weights(bare)
        bare = infer_shapes(bare, strict_mode=False, data_prop=False)
    except Exception:  # a damaged model: what it declares has to do
        bare = model
    shapes: dict[str, Shape | None] = {}
    symbols: dict[str, int | None] = {}
    for v in (*bare.graph.value_info, *bare.graph.input, *bare.graph.output):
        if not v.type.HasField("tensor_type"):
            if v.type.WhichOneof("value"):
                shapes[v.name] = None
        elif v.type.tensor_type.HasField("shape"):
            dims = v.type.tensor_type.shape.dim
            shapes[v.name] = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims)
            symbols |= {d.dim_param: None for d in dims if d.dim_param}
    shapes |= {t.name: tuple(t.dims) for t in (*bare.graph.initializer, *model.graph.initializer)}
    return Context(shapes, symbols)


def _sizes(model: ModelProto, context: Context) -> dict[str, int | str | list[int]]:
    """Sizes for the lifting: what the file's metadata says, else one that every cut divides."""
    try:
        stated = onnx_annotations.read_json(sharding_specs.metadata(model), onnx_annotations.SHAPES, dict)
    except TapestryError:
        stated = {}
    weights = {t.name for t in model.graph.initializer}
    inputs = [i.name for i in model.graph.input if i.name not in weights]
    symbolic = {i for i in inputs if any(isinstance(d, str) for d in context.shapes.get(i) or ())}
    if symbolic and symbolic <= stated.keys():
        return {k: stated[k] for k in symbolic}
    parts = 1
    for node in model.graph.node:
        for c in sharding_specs.node_configurations(node):
            for x in (x for s in c.specs for d in s.dims for x in d.shards):
                grown = lcm(parts, max(1, x.num_shards or 1))
                parts = grown if grown <= MAX_SYMBOL else parts
    used = {d for i in symbolic for d in context.shapes[i] or () if isinstance(d, str)}
    return dict.fromkeys(used, 2 * parts)


def _metadata(model: ModelProto) -> Iterator[Finding]:
    """Our own metadata must agree with the protos."""
    sizes = {c.name or "": c.num_devices for c in sharding_specs.configurations(model)}
    for key, text in sharding_specs.metadata(model).items():
        kind, _, of = key.partition("@")
        if kind != onnx_annotations.MESH:
            continue
        try:
            count = device_count(parse_mesh(text))
        except TapestryError as e:
            yield Finding("error", "mesh", "", "", f"{key}: {e.what}")
            continue
        name = of or sharding_specs.OURS
        if sizes.get(name) != count:
            had = f"has {sizes[name]}" if name in sizes else f"is not in the model, which has {[*sizes]}"
            yield Finding("error", "mesh", "", "", f"{key} '{text}' has {count} devices, configuration '{name}' {had}")


def _tilings(model: ModelProto) -> Iterator[Finding]:
    """Topology and tile patterns: readable, of instances that there are, enough for every configuration."""
    try:
        topology = tile_metadata.read_topology(model)
    except TapestryError as e:
        yield Finding("error", "topology", "", "", f"{e.what} {e.where}".strip())
        return
    for c in sharding_specs.configurations(model):
        if topology is not None and (c.num_devices or 0) > topology.count:
            text = f"configuration '{c.name}' has {c.num_devices} devices, {tile_metadata.COUNT} is {topology.count}"
            yield Finding("error", "instances-too-few", "", "", text)
    try:
        for tensor, text in tile_metadata.beyond(model):
            yield Finding("error", "instance-range", "", tensor, text)
    except TapestryError as e:
        yield Finding("error", "tile-pattern", "", "", f"{e.where}: {e.what}")


@dataclass(slots=True)
class _Meaning:
    """The meaning of one configuration's specs."""

    model: ModelProto
    graph: Graph
    name: str
    wrong: set[tuple[str, str]]
    sizes: Mapping[str, int]

    def findings(self) -> list[Finding]:
        """Findings of every annotated node that is still an operation of its own after lifting."""
        ops: dict[str, list[Op]] = {}
        for op in self.graph.ops:
            for s in op.source:
                ops.setdefault(s, []).append(op)
        cache: dict[tuple[object, ...], Placement] = {}
        written: dict[str, Placement] = {}
        out: list[Finding] = []
        for node in self.model.graph.node:
            mine = self._specs(node, cache)
            if mine:
                for op in ops.get(name_of(node), []):
                    out += self._op(node, op, mine, written)
            written |= {t: p for t, p in mine.items() if t in node.output}
        return out

    def _specs(self, node: NodeProto, cache: dict[tuple[object, ...], Placement]) -> dict[str, Placement]:
        placements: dict[str, Placement] = {}
        try:
            own = [c for c in sharding_specs.node_configurations(node) if c.configuration == self.name]
            specs: list[ShardingSpec] = [self._sized(s) for c in own for s in sharding_specs.complete(c, node).specs]
        except PlanError:  # a finding of its own
            return placements
        for s in specs:
            if s.tensor is None or s.tensor not in self.graph.tensors or (name_of(node), s.tensor) in self.wrong:
                continue
            shape = self.graph.tensors[s.tensor].shape
            if not all(_fits(d, shape) for d in s.dims):
                continue  # a symbol was given another size than the file's
            key = (s.devices, s.groups, s.dims, shape)
            if key not in cache:
                cache[key] = placement(s, shape)
            placements[s.tensor] = cache[key]
        return placements

    def _sized(self, s: ShardingSpec) -> ShardingSpec:
        """A spec with the lifted graph's sizes in the place of symbols."""
        return with_sizes(s, self.sizes)

    def _op(self, node: NodeProto, op: Op, mine: Placements, written: Placements) -> Iterator[Finding]:
        name = name_of(node)
        own = {t: mine[t] for t in op.inputs if t in mine}
        inherited = {t: written[t] for t in op.inputs if t in written and t not in own}
        clash = annotation_semantics.clash(op, own)
        if clash is not None:
            yield Finding("error", *_clash_text(op, clash, name))
            return
        both = {**inherited, **own}
        clash = annotation_semantics.clash(op, both) if inherited else None
        if clash is not None:
            code, node_name, tensor, text = _clash_text(op, clash, name)
            text = f"as their producers leave them, {text}: a reshard is implied"
            yield Finding("warning", f"{code}-inherited", node_name, tensor, text)
        for t, p in own.items():
            if t in written and written[t].pieces != p.pieces:
                yield self._reshard(name, t, written[t], p)
        yield from _not_identical(op, own, name)
        outs = {t: mine[t] for t in op.outs if t in mine}
        stated = onnx_annotations.PARTIAL in sharding_specs.metadata(node)
        for m in annotation_semantics.missing(op, self.graph, outs, both):
            if m.how != "reduction" or not stated:
                yield self._missing(name, m)

    def _reshard(self, node: str, tensor: str, before: Placement, after: Placement) -> Finding:
        device = max(after.pieces, key=lambda d: _lacking(before, after, d))
        lacking = _lacking(before, after, device) * itemsize(self.graph.tensors[tensor].dtype)
        text = f"it is written {describe(before, device)} and read {describe(after, device)} on device {device}"
        return Finding("warning", "reshard", node, tensor, f"{text}: {lacking:,} bytes to receive there")

    def _missing(self, node: str, m: annotation_semantics.Missing) -> Finding:
        nbytes = m.cells * itemsize(self.graph.tensors[m.tensor].dtype)
        text = {
            "reduction": "the reduced axis is cut: partial results have to be completed (an all-reduce or reduce-scatter)",
            "halo": f"a halo exchange is implied, device {m.device} lacks {nbytes:,} bytes of it",
            "reshard": f"a reshard is implied, device {m.device} lacks {nbytes:,} bytes of it for its part of the output",
        }[m.how]
        return Finding("warning", m.how, node, m.tensor, text)


def _fits(d: ShardedDim, shape: tuple[int, ...]) -> bool:
    """Whether an axis has a cell for every part (not so where a symbol was given a small size)."""
    if any(hi > shape[d.axis or 0] for _, hi in d.parts):
        return False
    try:
        sizes = fused_sizes(d, shape[d.axis or 0])
    except PlanError:
        return False
    return all(x.num_shards is not None and x.num_shards <= n for x, n in zip(d.shards, sizes, strict=True))


def _lacking(before: Placement, after: Placement, device: int) -> int:
    """Cells that a device has after and not before."""
    piece, old = after.pieces[device], before.pieces.get(device)
    cells = prod(sum(hi - lo for lo, hi in iv) for iv in piece)
    if old is None:
        return cells
    common = prod(
        sum(max(0, min(b, d) - max(a, c)) for a, b in mine for c, d in theirs) for mine, theirs in zip(piece, old, strict=True)
    )
    return cells - common


def _clash_text(op: Op, clash: annotation_semantics.Clash, node: str) -> tuple[str, str, str, str]:
    """(code, node, tensor, message) for a point that no device can compute."""
    point = ", ".join(f"{n}={v}" for n, v in clash.point.items())
    cells = " and ".join(f"'{t}'{list(c)} (on {_devices(h)})" for t, c, h in clash.cells)
    if not isinstance(op, Block):
        text = f"{op.kind} is computed whole along some axes of its inputs, and no device holds them: {cells}"
        return "not-splittable", node, clash.cells[0][0], text
    reduced = bool(op.reduce)
    code = "contraction" if reduced else "agreement"
    lone = next((t for t, _, h in clash.cells if not h), None)
    why = f"point ({point}) needs {cells}"
    text = "no device holds these cells" if lone else "no device holds them together, the device sets do not meet"
    return code, node, lone or clash.cells[-1][0], f"{why}: {text}"


def _devices(numbers: tuple[int, ...]) -> str:
    return f"device{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else "no device"


def _not_identical(op: Op, placed: Mapping[str, Placement], node: str) -> Iterator[Finding]:
    """The formalism asks for identical cuts of inputs along a common axis; holding more than is needed is no error here."""
    if not isinstance(op, Block):
        return
    for d in op.space:
        seen: dict[str, dict[int, Intervals]] = {}
        for r in op.reads:
            axis = next((k for k, e in enumerate(r.index) if e.is_dim and e.coef(d.name) == 1), None)
            if axis is not None and r.tensor in placed and placed[r.tensor].shape[axis] == d.size:
                p = placed[r.tensor]
                seen.setdefault(r.tensor, {n: piece[axis] for n, piece in p.pieces.items()})
        if len({str(sorted(v.items())) for v in seen.values()}) > 1:
            names = " and ".join(f"'{t}'" for t in seen)
            text = f"{names} are not placed alike along '{d.name}'; each device has what it needs, and some more than that"
            yield Finding("warning", "not-identical", node, next(iter(seen)), text)
            return
