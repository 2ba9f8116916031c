"""The annotations of a model for one configuration: ONNX's protos with our metadata, else the tilings of the slides."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx import ModelProto

from tapestry.errors import PlanError, TapestryError
from tapestry.interop import onnx_annotations, sharding_specs, tile_metadata
from tapestry.interop.annotation_rules import Context, findings_of
from tapestry.interop.onnx_annotations import read_json
from tapestry.interop.sharding_specs import OURS, DeviceConfiguration, ShardedDim, ShardingSpec, SimpleShard, key_of, name_of
from tapestry.interop.tile_patterns import SUPPRESSED, Tiling
from tapestry.lift.file.structure import load
from tapestry.plan.topology import MAX_DEVICES

log = logging.getLogger("tapestry")


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotations:
    """The annotations of one configuration of a file, as they stand.

    Attributes:
        outs, reads: specs by tensor, and by (node, tensor); ``writer`` names the node of an output spec.
        values: specs in which inputs and weights start and outputs end.
        model: the model's metadata of this configuration, without its name in the keys; ``nodes`` that of every node, by name.
        symbols: symbolic dimensions, each as an axis of an input.
        stage_of: the pipeline stage of each result, ``node_stages`` the last one of the nodes of a name.
        apart: each stage has devices of its own, and specs (which were of these) say the same for all stages.
    """

    configuration: str
    devices: int
    outs: Mapping[str, ShardingSpec]
    reads: Mapping[tuple[str, str], ShardingSpec]
    writer: Mapping[str, str]
    model: Mapping[str, str]
    nodes: Mapping[str, Mapping[str, str]]
    values: Mapping[str, ShardingSpec] = field(default_factory=dict[str, ShardingSpec])
    symbols: Mapping[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    stage_of: Mapping[str, int] = field(default_factory=dict[str, int])
    node_stages: Mapping[str, int] = field(default_factory=dict[str, int])
    apart: bool = False

    @property
    def stages(self) -> int:
        """How many pipeline stages the nodes name."""
        return len({*self.stage_of.values()})


def read(
    path: Path, devices: int | None = None, configuration: str | None = None
) -> tuple[Annotations | None, tile_metadata.ModelTopology | None]:
    """The annotations of a file for a number of devices, and the topology that it carries; ``None`` for what it has not.

    Args:
        configuration: which one, by its name; by default the first for as many devices.

    Raises:
        PlanError: they are structurally wrong, or for other numbers of devices only; the model's topology has fewer instances;
            there is no configuration of that name.
    """
    model = load(path)
    topology = _topology(model, devices)
    if not sharding_specs.annotated(model):
        if configuration is not None:
            raise PlanError(f"the model has no configuration '{configuration}'", where=str(path), why="it has none")
        tilings = _of_tilings(model, topology, devices)
        count = tilings.devices if tilings else topology.count if topology else 1
        if devices is None and count > MAX_DEVICES:
            raise PlanError(f"the model is for {count:,} instances", where=str(path), hint=f"at most {MAX_DEVICES:,} --devices")
        return tilings, topology
    errors = (
        f for f in findings_of(model, Context({}, _symbols(model))) if f.level == "error" and f.code != "dim-param-unknown"
    )
    wrong = next(errors, None)
    if wrong is not None:
        where = f"node '{wrong.node}'" if wrong.node else str(path)
        hint = "tapestry check-sharding lists everything; --ignore-sharding plans without"
        raise PlanError(f"the model's sharding is wrong: {wrong.message}", where=where, hint=hint)
    chosen = _chosen(sharding_specs.configurations(model), path, devices, configuration)
    assert chosen.name is not None and chosen.num_devices is not None
    if chosen.num_devices > MAX_DEVICES:
        what = f"the model's sharding is for {chosen.num_devices:,} devices"
        raise PlanError(what, where=str(path), hint=f"at most {MAX_DEVICES:,}")
    if topology is not None and chosen.num_devices > topology.count:
        what = f"configuration '{chosen.name}' is for {chosen.num_devices} devices, the model's topology has {topology.count}"
        raise PlanError(what, where=tile_metadata.COUNT, hint="--ignore-sharding, or another --configuration")
    return _for_all_stages(_collect(model, chosen.name, chosen.num_devices)), topology


def _chosen(found: tuple[DeviceConfiguration, ...], path: Path, devices: int | None, name: str | None) -> DeviceConfiguration:
    """The configuration that was asked for.

    Raises:
        PlanError: there is none.
    """
    if name is not None and all(c.name != name for c in found):
        names = ", ".join(f"'{c.name}'" for c in found) or "none"
        raise PlanError(f"the model has no configuration '{name}'", where=str(path), why=f"it has {names}")
    chosen = next((c for c in found if devices in (None, c.num_devices) and name in (None, c.name)), None)
    if chosen is None or chosen.name is None or chosen.num_devices is None:
        sizes = ", ".join(str(c.num_devices) for c in found if name in (None, c.name))
        which = f"configuration '{name}'" if name is not None else "sharding"
        what = f"the model's {which} is for {sizes} devices, not {devices}"
        raise PlanError(what, where=str(path), hint="another --mesh, or --ignore-sharding")
    others = [c.name for c in found if c.num_devices == chosen.num_devices and c != chosen]
    if name is None and others:
        log.warning(
            "sharding: configuration '%s', the first for %d devices; --configuration takes another one",
            chosen.name,
            chosen.num_devices,
        )
    return chosen


def _topology(model: ModelProto, devices: int | None) -> tile_metadata.ModelTopology | None:
    """The topology that a model carries.

    Raises:
        PlanError: it does not read; more devices are asked for than it has instances; a tiling names an instance beyond them.
    """
    try:
        found = tile_metadata.read_topology(model)
        wrong = next(tile_metadata.beyond(model), None)
    except TapestryError as e:
        raise PlanError(e.what, where=e.where, why=e.why, hint="--ignore-sharding plans without") from None
    if wrong is not None:
        raise PlanError(wrong[1], where=f"tensor '{wrong[0]}'", hint="--ignore-sharding plans without")
    if found is not None and devices is not None and devices > found.count:
        what = f"the model's topology has {found.count} instances, not {devices}"
        raise PlanError(what, where=tile_metadata.COUNT, hint="fewer --devices, or --ignore-sharding")
    return found


def _of_tilings(model: ModelProto, topology: tile_metadata.ModelTopology | None, devices: int | None) -> Annotations | None:
    """Tile patterns as specs.

    Raises:
        PlanError: they are for another number of instances, or a tile is on none.
    """
    found = tile_metadata.read(model)
    if not found:
        return None
    count = topology.count if topology else max(devices or 1, 1 + max(max(t.instances) for t in found.values()))
    if devices not in (None, count):
        raise PlanError(
            f"the model's tilings are for {count} instances, not {devices}", hint="another --mesh, or --ignore-sharding"
        )
    writer = {o: name_of(n) for n in model.graph.node for o in n.output}
    specs = {t: _tiled(t, g) for t, g in found.items()}
    ends = {v.name for v in (*model.graph.input, *model.graph.output, *model.graph.initializer)}
    return Annotations(
        configuration=OURS,
        devices=count,
        outs={t: s for t, s in specs.items() if t in writer},
        reads={},
        writer=writer,
        model={},
        nodes={},
        values={t: s for t, s in specs.items() if t in ends},
    )


def _tiled(tensor: str, tiling: Tiling) -> ShardingSpec:
    """A tiling as a spec.

    Raises:
        PlanError: a tile is suppressed.
    """
    if SUPPRESSED in tiling.instances:
        why = "no instance has all that the next nodes read"
        raise PlanError(
            f"a tile of '{tensor}' is suppressed: {tiling}", where=f"tensor '{tensor}'", why=why, hint="--ignore-sharding"
        )
    if tiling.count == 1:
        return ShardingSpec(tensor, (-1,), ((-1, tiling.instances),), ())
    cuts = [(k - len(tiling.pattern), p) for k, p in enumerate(tiling.pattern) if p > 1]
    return ShardingSpec(tensor, tiling.instances, (), tuple(ShardedDim(k, (SimpleShard(p),)) for k, p in cuts))


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
            for s in sharding_specs.complete(c, node).specs:
                assert s.tensor is not None
                if s.tensor in node.output:
                    outs[s.tensor] = s
                else:
                    reads[(name_of(node), s.tensor)] = s
    found = {h.name: sharding_specs.value_spec(h, name) for h in tile_metadata.values(model)}
    return Annotations(
        configuration=name,
        devices=devices,
        outs=outs,
        reads=reads,
        model=_own(sharding_specs.metadata(model), name),
        writer={o: name_of(n) for n in model.graph.node for o in n.output},
        stage_of=stage_of,
        node_stages=node_stages,
        nodes={name_of(n): _own(sharding_specs.metadata(n), name) for n in model.graph.node},
        values={t: s for t, s in found.items() if s is not None},
        symbols={
            d.dim_param: (i.name, k)
            for i in model.graph.input
            for k, d in enumerate(i.type.tensor_type.shape.dim)
            if d.dim_param
        },
    )


def _for_all_stages(a: Annotations) -> Annotations:
    """Specs of the devices of one stage each, as the proposal's pipelines have them, said for all stages: a device stands for
    those in its place in the others. Where stages do not have as many devices each, in their order, all stays as it is."""
    numbers = {k: n for n, k in enumerate(sorted({*a.stage_of.values(), *a.node_stages.values()}))}
    if len(numbers) < 2 or a.devices % len(numbers) or onnx_annotations.MESH in a.model:
        return a
    each = a.devices // len(numbers)
    mine = [(numbers[a.stage_of[t]], s) for t, s in a.outs.items() if t in a.stage_of]
    mine += [(numbers[a.node_stages[n]], s) for (n, _), s in a.reads.items() if n in a.node_stages]
    of_one = all(set(_all_devices(s)) <= {*range(k * each, (k + 1) * each)} for k, s in mine)
    if not mine or not of_one or len(mine) < len(a.outs) + len(a.reads) or a.values:
        return a

    def put(s: ShardingSpec) -> ShardingSpec:
        groups = dict(s.groups)
        wide = [
            (-1 - n, tuple(d % each + each * k for k in range(len(numbers)) for d in groups.get(e, (e,))))
            for n, e in enumerate(s.devices)
        ]
        return replace(s, devices=tuple(key for key, _ in wide), groups=tuple(wide))

    outs, reads = {t: put(s) for t, s in a.outs.items()}, {k: put(s) for k, s in a.reads.items()}
    return replace(a, outs=outs, reads=reads, apart=True)


def _all_devices(s: ShardingSpec) -> list[int]:
    groups = dict(s.groups)
    return [d for e in s.devices for d in groups.get(e, (e,))]


def _own(properties: Mapping[str, str], name: str) -> dict[str, str]:
    """The properties that belong to a configuration, by their plain keys."""
    return {k: properties[key_of(k, name)] for k in onnx_annotations.KEYS if key_of(k, name) in properties}


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
        stages, micro = len([s["mesh"] for s in stated["stages"]]), int(stated["micro_batches"])
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise PlanError(f"not pipeline stages: {e}", where=onnx_annotations.STAGES, hint="--ignore-sharding") from None
    if not (1 <= stages <= a.devices and 1 <= micro <= a.devices * MAX_DEVICES):
        raise PlanError(f"{stages} stages and {micro} micro-batches", where=onnx_annotations.STAGES, hint="--ignore-sharding")
    return stages, micro
