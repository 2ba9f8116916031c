"""ONNX's multi-device annotations as data: what the protos of IR version 11 say, and the metadata of ours that completes specs.

``None`` stands for a field that is not set, so that reading and writing again gives the same protobuf, and so that the
checker can tell "unset" from 0. What an annotation means is in `placement`, whether it may be in `annotation_rules`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from google.protobuf import json_format
from onnx import (
    DeviceConfigurationProto,
    IntIntListEntryProto,
    ModelProto,
    NodeDeviceConfigurationProto,
    NodeProto,
    ShardedDimProto,
    ShardingSpecProto,
    SimpleShardedDimProto,
    TensorProto,
    ValueInfoProto,
)

from tapestry.errors import PlanError

IR_VERSIONS = (11, 13)  # the first with annotations, the last that onnxruntime 1.31 reads
OURS = "tapestry"  # the configuration that is written where no other name is asked for
PARTS = "tapestry.parts"  # node or value: JSON, {tensor: {axis: [[first, end], ...]}}, parts that are not the equal cut
VALUE = "tapestry.sharding"  # input, output or initializer: JSON, a ShardingSpecProto


@dataclass(frozen=True, slots=True)
class DeviceConfiguration:
    """A named set of devices, numbered from 0 (`DeviceConfigurationProto`)."""

    name: str | None
    num_devices: int | None
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SimpleShard:
    """``num_shards`` parts of an axis, or of one of the axes that were fused into it; ``dim`` is its size or symbol."""

    num_shards: int | None
    dim: int | str | None = None


@dataclass(frozen=True, slots=True)
class ShardedDim:
    """How one axis is cut; several shards where a reshape fused several cut axes into one, the slowest first.

    Attributes:
        parts: the interval of each part, where our metadata says it: unequal parts, or (of what a node reads) parts that
            overlap, which is a halo. Empty: the equal cut.
    """

    axis: int | None
    shards: tuple[SimpleShard, ...]
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """Where the parts of one tensor are.

    Attributes:
        tensor: an input or output of the node.
        devices: for each part, in row-major order over ``dims`` as they are listed, a device or the key of a group.
        groups: (key, devices): a part on several devices. A key that is also a device means the group.
        dims: the cut axes; none for a tensor in one part.
    """

    tensor: str | None
    devices: tuple[int, ...] = ()
    groups: tuple[tuple[int | None, tuple[int, ...]], ...] = ()
    dims: tuple[ShardedDim, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeConfiguration:
    """What a node says for one configuration: specs of its inputs and outputs, and its pipeline stage."""

    configuration: str | None
    specs: tuple[ShardingSpec, ...] = ()
    stage: int | None = None


# reading


def configurations(model: ModelProto) -> tuple[DeviceConfiguration, ...]:
    """The device configurations of a model."""
    return tuple(
        DeviceConfiguration(_stated(c, "name"), _stated(c, "num_devices"), tuple(c.device)) for c in model.configuration
    )


def node_configurations(node: NodeProto) -> tuple[NodeConfiguration, ...]:
    """The annotations of a node, one entry per configuration, as the protos say them."""
    return tuple(
        NodeConfiguration(_stated(c, "configuration_id"), tuple(map(read_spec, c.sharding_spec)), _stated(c, "pipeline_stage"))
        for c in node.device_configurations
    )


def read_spec(proto: ShardingSpecProto) -> ShardingSpec:
    """One sharding spec."""
    groups = tuple((_stated(e, "key"), tuple(e.value)) for e in proto.index_to_device_group_map)
    return ShardingSpec(_stated(proto, "tensor_name"), tuple(proto.device), groups, tuple(map(_read_dim, proto.sharded_dim)))


def _read_dim(proto: ShardedDimProto) -> ShardedDim:
    shards = (SimpleShard(_stated(s, "num_shards"), _stated(s, s.WhichOneof("dim") or "")) for s in proto.simple_sharding)
    return ShardedDim(_stated(proto, "axis"), tuple(shards))


def _stated(proto: Any, name: str) -> Any:
    """The value of a field, if it is set."""
    return getattr(proto, name) if name and proto.HasField(name) else None


def key_of(key: str, configuration: str | None) -> str:
    """The key of a property of a configuration: ``tapestry.mesh``, for others than ours ``tapestry.mesh@four``."""
    return key if configuration in (OURS, None) else f"{key}@{configuration}"


def parts_in(holder: Holder, configuration: str | None) -> dict[str, dict[int, tuple[tuple[int, int], ...]]]:
    """The parts that a holder's metadata gives: by tensor, then by axis.

    Raises:
        PlanError: it does not read.
    """
    text = metadata(holder).get(key_of(PARTS, configuration))
    if text is None:
        return {}
    with suppress(ValueError, TypeError, AttributeError, RecursionError):  # whatever it is, it is refused below
        found = cast("dict[str, dict[str, list[list[int]]]]", json.loads(text))
        out = {t: {int(k): tuple((lo, hi) for lo, hi in v) for k, v in axes.items()} for t, axes in found.items()}
        if all(type(x) is int for axes in out.values() for v in axes.values() for pair in v for x in pair):
            return out
    raise PlanError("the model's metadata does not read", where=PARTS, why=text[:80], hint="--ignore-sharding plans without it")


def complete(c: NodeConfiguration, node: NodeProto) -> NodeConfiguration:
    """A node's annotation with the parts that its metadata gives.

    Raises:
        PlanError: the metadata does not read.
    """
    parts = parts_in(node, c.configuration)
    return replace(c, specs=tuple(with_parts(s, parts) for s in c.specs)) if parts else c


def with_parts(spec: ShardingSpec, parts: Mapping[str, Mapping[int, tuple[tuple[int, int], ...]]]) -> ShardingSpec:
    """A spec with the parts that metadata gives for its tensor."""
    mine = parts.get(spec.tensor or "", {})
    if not mine:
        return spec
    return replace(spec, dims=tuple(replace(d, parts=mine.get(d.axis, ()) if d.axis is not None else ()) for d in spec.dims))


def with_sizes(spec: ShardingSpec, sizes: Mapping[str, int]) -> ShardingSpec:
    """A spec with sizes in the place of symbols."""
    return replace(
        spec,
        dims=tuple(replace(d, shards=tuple(replace(x, dim=sizes.get(str(x.dim), x.dim)) for x in d.shards)) for d in spec.dims),
    )


def value_spec(holder: ValueInfoProto | TensorProto, configuration: str | None) -> ShardingSpec | None:
    """How an input, output or initializer is sharded where it enters or leaves, as its metadata says.

    Raises:
        PlanError: it does not read.
    """
    text = metadata(holder).get(key_of(VALUE, configuration))
    if text is None:
        return None
    try:
        proto = json_format.Parse(text, ShardingSpecProto(), max_recursion_depth=8)
    except (json_format.ParseError, RecursionError, ValueError, TypeError):
        where = f"{VALUE} of '{holder.name}'"
        hint = "a ShardingSpecProto as JSON"
        raise PlanError("the model's metadata does not read", where=where, why=text[:80], hint=hint) from None
    return with_parts(replace(read_spec(proto), tensor=holder.name), parts_in(holder, configuration))


def annotated(model: ModelProto) -> bool:
    """Whether the model has any multi-device annotation."""
    return bool(model.configuration) or any(n.device_configurations for n in model.graph.node)


def name_of(node: NodeProto) -> str:
    """The name by which messages call a node, and by which a plan's operations know where they came from."""
    return node.name or next((o for o in node.output if o), node.op_type)


# writing


def configuration_proto(c: DeviceConfiguration) -> DeviceConfigurationProto:
    """A device configuration as its protobuf."""
    return DeviceConfigurationProto(device=c.devices, name=c.name, num_devices=c.num_devices)


def node_proto(c: NodeConfiguration) -> NodeDeviceConfigurationProto:
    """A node's annotation as its protobuf."""
    specs = map(spec_proto, c.specs)
    return NodeDeviceConfigurationProto(sharding_spec=specs, configuration_id=c.configuration, pipeline_stage=c.stage)


def spec_proto(s: ShardingSpec) -> ShardingSpecProto:
    """One sharding spec as its protobuf."""
    groups = [IntIntListEntryProto(value=devices, key=key) for key, devices in s.groups]
    dims = map(_dim_proto, s.dims)
    return ShardingSpecProto(device=s.devices, sharded_dim=dims, tensor_name=s.tensor, index_to_device_group_map=groups)


def _dim_proto(d: ShardedDim) -> ShardedDimProto:
    shards: list[SimpleShardedDimProto] = []
    for s in d.shards:
        size, symbol = (s.dim, None) if isinstance(s.dim, int) else (None, s.dim)
        shards.append(SimpleShardedDimProto(num_shards=s.num_shards, dim_value=size, dim_param=symbol))
    return ShardedDimProto(axis=d.axis, simple_sharding=shards)


def value_text(s: ShardingSpec) -> str:
    """A spec as JSON, for the value whose it is."""
    return " ".join(json_format.MessageToJson(spec_proto(replace(s, tensor=None)), indent=None).split())


def parts_text(specs: Sequence[ShardingSpec]) -> str | None:
    """The parts of some specs as JSON; ``None`` where all are equal cuts."""
    found = {s.tensor or "": {str(d.axis): d.parts for d in s.dims if d.parts} for s in specs}
    found = {t: axes for t, axes in found.items() if axes}
    return json.dumps(found) if found else None


def clear(model: ModelProto) -> None:
    """Drop every annotation."""
    del model.configuration[:]
    for node in model.graph.node:
        del node.device_configurations[:]


# metadata: what the protos cannot say


Holder = ModelProto | NodeProto | ValueInfoProto | TensorProto


def metadata(holder: Holder) -> dict[str, str]:
    """The ``metadata_props`` of a model, node, value or tensor."""
    return {p.key: p.value for p in holder.metadata_props}


def set_metadata(holder: Holder, key: str, value: str | None) -> None:
    """Set a metadata property, or (None) remove it."""
    others = [p for p in holder.metadata_props if p.key != key]
    del holder.metadata_props[:]
    holder.metadata_props.extend(others)
    if value is not None:
        holder.metadata_props.add(key=key, value=value)
