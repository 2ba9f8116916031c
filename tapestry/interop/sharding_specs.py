"""ONNX's multi-device annotations as data: what the protos of IR version 11 say, no more and no less.

``None`` stands for a field that is not set, so that reading and writing again gives the same protobuf, and so that the
checker can tell "unset" from 0. What an annotation means is in `placement`, whether it may be in `annotation_rules`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onnx import (
    DeviceConfigurationProto,
    IntIntListEntryProto,
    ModelProto,
    NodeDeviceConfigurationProto,
    NodeProto,
    ShardedDimProto,
    ShardingSpecProto,
    SimpleShardedDimProto,
)  # fmt: skip

IR_VERSIONS = (11, 13)  # the first with annotations, the last that onnxruntime 1.31 reads


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
    """How one axis is cut; several shards where a reshape fused several cut axes into one, the slowest first."""

    axis: int | None
    shards: tuple[SimpleShard, ...]


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
        DeviceConfiguration(
            c.name if c.HasField("name") else None, c.num_devices if c.HasField("num_devices") else None, tuple(c.device)
        )
        for c in model.configuration
    )


def node_configurations(node: NodeProto) -> tuple[NodeConfiguration, ...]:
    """The annotations of a node, one entry per configuration."""
    return tuple(
        NodeConfiguration(
            c.configuration_id if c.HasField("configuration_id") else None,
            tuple(read_spec(s) for s in c.sharding_spec),
            c.pipeline_stage if c.HasField("pipeline_stage") else None,
        )
        for c in node.device_configurations
    )


def read_spec(proto: ShardingSpecProto) -> ShardingSpec:
    """One sharding spec."""
    return ShardingSpec(
        tensor=proto.tensor_name if proto.HasField("tensor_name") else None,
        devices=tuple(proto.device),
        groups=tuple((e.key if e.HasField("key") else None, tuple(e.value)) for e in proto.index_to_device_group_map),
        dims=tuple(_read_dim(d) for d in proto.sharded_dim),
    )


def _read_dim(proto: ShardedDimProto) -> ShardedDim:
    shards: list[SimpleShard] = []
    for s in proto.simple_sharding:
        kind = s.WhichOneof("dim")
        dim = None if kind is None else s.dim_value if kind == "dim_value" else s.dim_param
        shards.append(SimpleShard(s.num_shards if s.HasField("num_shards") else None, dim))
    return ShardedDim(proto.axis if proto.HasField("axis") else None, tuple(shards))


def annotated(model: ModelProto) -> bool:
    """Whether the model has any multi-device annotation."""
    return bool(model.configuration) or any(n.device_configurations for n in model.graph.node)


def name_of(node: NodeProto) -> str:
    """The name by which messages call a node, and by which a plan's operations know where they came from."""
    return node.name or next((o for o in node.output if o), node.op_type)


# writing


def configuration_proto(c: DeviceConfiguration) -> DeviceConfigurationProto:
    """A device configuration as its protobuf."""
    proto = DeviceConfigurationProto(device=c.devices)
    if c.name is not None:
        proto.name = c.name
    if c.num_devices is not None:
        proto.num_devices = c.num_devices
    return proto


def node_proto(c: NodeConfiguration) -> NodeDeviceConfigurationProto:
    """A node's annotation as its protobuf."""
    proto = NodeDeviceConfigurationProto(sharding_spec=[spec_proto(s) for s in c.specs])
    if c.configuration is not None:
        proto.configuration_id = c.configuration
    if c.stage is not None:
        proto.pipeline_stage = c.stage
    return proto


def spec_proto(s: ShardingSpec) -> ShardingSpecProto:
    """One sharding spec as its protobuf."""
    proto = ShardingSpecProto(device=s.devices, sharded_dim=[_dim_proto(d) for d in s.dims])
    if s.tensor is not None:
        proto.tensor_name = s.tensor
    for key, devices in s.groups:
        entry = IntIntListEntryProto(value=devices)
        if key is not None:
            entry.key = key
        proto.index_to_device_group_map.append(entry)
    return proto


def _dim_proto(d: ShardedDim) -> ShardedDimProto:
    proto = ShardedDimProto()
    if d.axis is not None:
        proto.axis = d.axis
    for s in d.shards:
        item = SimpleShardedDimProto()
        if s.num_shards is not None:
            item.num_shards = s.num_shards
        if isinstance(s.dim, int):
            item.dim_value = s.dim
        elif s.dim is not None:
            item.dim_param = s.dim
        proto.simple_sharding.append(item)
    return proto


def clear(model: ModelProto) -> None:
    """Drop every annotation."""
    del model.configuration[:]
    for node in model.graph.node:
        del node.device_configurations[:]


# metadata: what the protos cannot say


def metadata(holder: object) -> dict[str, str]:
    """The ``metadata_props`` of a model, node, value or tensor."""
    props: Iterable[object] = holder.metadata_props  # type: ignore[attr-defined]
    return {p.key: p.value for p in props}  # type: ignore[attr-defined]


def set_metadata(holder: object, key: str, value: str | None) -> None:
    """Set a metadata property, or (None) remove it."""
    props = holder.metadata_props  # type: ignore[attr-defined]
    kept = [(p.key, p.value) for p in props if p.key != key]
    del props[:]
    for k, v in kept + ([] if value is None else [(key, value)]):
        props.add(key=k, value=v)
