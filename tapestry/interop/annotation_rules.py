"""Structural rules of multi-device annotations: everything that can be wrong without knowing what an operator does.

onnx's own checker looks at none of this. Each finding has a code of its own, the node, the tensor and a sentence with the
numbers that show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from onnx import ModelProto, NodeProto

from tapestry.errors import PlanError, some
from tapestry.interop import sharding_specs, tile_metadata
from tapestry.interop.sharding_specs import DeviceConfiguration, NodeConfiguration, ShardedDim, ShardingSpec, name_of

Shape = tuple[int | str | None, ...]  # per axis a size, a symbol, or None
Rule = tuple[str, str, str]  # a rule that is broken: level, code, message


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (``error``) or that costs communication or is left to the backend (``warning``)."""

    level: str
    code: str
    node: str
    tensor: str
    message: str

    def __str__(self) -> str:
        where = ", ".join([f"node '{self.node}'"] * bool(self.node) + [f"tensor '{self.tensor}'"] * bool(self.tensor))
        return f"{self.level}: {where + ': ' if where else ''}{self.message} [{self.code}]"


@dataclass(frozen=True, slots=True)
class Context:
    """What specs are checked against.

    Attributes:
        shapes: of every tensor, as far as known; ``None`` for what is no tensor (a sequence, a map).
        symbols: every symbolic dimension of the model, with its size where it is bound.
    """

    shapes: Mapping[str, Shape | None]
    symbols: Mapping[str, int | None]

    def size(self, dim: int | str | None) -> int | None:
        """The size of an axis, if known."""
        return self.symbols.get(dim) if isinstance(dim, str) else dim


def findings_of(model: ModelProto, context: Context) -> list[Finding]:
    """All structural findings of a model, in file order."""
    named: dict[str, DeviceConfiguration] = {}
    for c in sharding_specs.configurations(model):
        if c.name is not None:
            named.setdefault(c.name, c)
    of_model = (Finding(level, code, "", "", message) for level, code, message in _configuration_rules(model))
    of_nodes = (f for node in _nodes(model) for f in _node(node, named, context))
    return [*of_model, *of_nodes, *_values(model, named, context), *_stages(model)]


def _values(model: ModelProto, configurations: Mapping[str, DeviceConfiguration], context: Context) -> Iterator[Finding]:
    """What our metadata says of the sharding of inputs, outputs and initializers, held to the rules of a node's specs."""
    inner = {v.name for v in model.graph.value_info}
    for name, c in configurations.items():
        for h in tile_metadata.values(model):
            try:
                s = sharding_specs.value_spec(h, name)
            except PlanError as e:
                yield Finding("error", "metadata-unreadable", "", h.name, f"{e.where}: {e.why}")
                continue
            if s is not None and h.name in inner:
                text = f"{sharding_specs.VALUE} is for inputs, outputs and initializers, this value is inside the graph"
                yield Finding("error", "value-inside", "", h.name, text)
            for level, code, message in spec_rules(s, c.num_devices, context) if s is not None else ():
                yield Finding(level, code, "", h.name, message)


def _nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Nodes of the graph, of its subgraphs and of the functions."""

    def inside(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
        for n in nodes:
            yield n
            for a in n.attribute:
                for g in (*([a.g] if a.HasField("g") else []), *a.graphs):
                    yield from inside(g.node)

    for owner in (model.graph, *model.functions):
        yield from inside(owner.node)


def _configuration_rules(model: ModelProto) -> Iterator[Rule]:
    configurations = sharding_specs.configurations(model)
    if sharding_specs.annotated(model) and model.ir_version < sharding_specs.IR_VERSIONS[0]:
        first = sharding_specs.IR_VERSIONS[0]
        yield "error", "ir-version", f"IR version {model.ir_version} has no multi-device annotations, they came with {first}"
    for k, c in enumerate(configurations):
        name = f"configuration '{c.name}'" if c.name else f"configuration number {k}"
        if not c.name:
            yield "error", "configuration-unnamed", f"{name} has no name"
        elif any(o.name == c.name for o in configurations[:k]):
            yield "error", "configuration-duplicate", f"two configurations have the name '{c.name}'"
        if c.num_devices is None:
            yield "error", "num-devices-unset", f"{name} does not say its num_devices"
        elif c.num_devices < 1:
            yield "error", "num-devices-bad", f"{name} has {c.num_devices} devices"
        elif c.devices and len(c.devices) != c.num_devices:
            yield "error", "device-names", f"{name} has {c.num_devices} devices and {len(c.devices)} names"
        twice = next((d for d in c.devices if c.devices.count(d) > 1), None)
        if twice is not None:
            yield "warning", "device-name-twice", f"{name} has two devices named '{twice}'"


def _node(node: NodeProto, configurations: Mapping[str, DeviceConfiguration], context: Context) -> Iterator[Finding]:
    name = name_of(node)
    seen: set[str] = set()
    for c in sharding_specs.node_configurations(node):
        if not c.configuration:
            yield Finding("error", "configuration-id-unset", name, "", "an annotation does not say its configuration_id")
        elif c.configuration in seen:
            yield Finding("error", "configuration-id-twice", name, "", f"two annotations for configuration '{c.configuration}'")
        elif c.configuration not in configurations:
            names = ", ".join(f"'{k}'" for k in configurations) or "none"
            text = f"configuration '{c.configuration}' is not in the model, which has {names}"
            yield Finding("error", "configuration-unknown", name, "", text)
        seen.add(c.configuration or "")
        if c.stage is not None and c.stage < 0:
            yield Finding("error", "stage-negative", name, "", f"pipeline_stage is {c.stage}")
        configuration = configurations.get(c.configuration or "")
        try:
            c = sharding_specs.complete(c, node)
        except PlanError as e:
            yield Finding("error", "metadata-unreadable", name, "", f"{e.where}: {e.why}")
        yield from _specs(node, c, configuration.num_devices if configuration else None, context)


def _specs(node: NodeProto, c: NodeConfiguration, devices: int | None, context: Context) -> Iterator[Finding]:
    name = name_of(node)
    seen: set[str] = set()
    for s in c.specs:
        if not s.tensor:
            yield Finding("error", "tensor-unset", name, "", "a sharding spec does not say its tensor_name")
            continue
        if s.tensor not in (*node.input, *node.output):
            text = f"'{s.tensor}' is neither an input nor an output of the node"
            yield Finding("error", "tensor-foreign", name, s.tensor, text)
            continue
        if s.tensor in seen:
            yield Finding("error", "tensor-twice", name, s.tensor, "two sharding specs for one tensor")
        seen.add(s.tensor)
        for level, code, message in spec_rules(s, devices, context):
            yield Finding(level, code, name, s.tensor, message)


def spec_rules(s: ShardingSpec, devices: int | None, context: Context) -> list[Rule]:
    """What is wrong with one spec, whichever node it is in."""
    return [*_device_rules(s, devices), *_dim_rules(s, context)]


def _device_rules(s: ShardingSpec, count: int | None) -> Iterator[Rule]:
    """Devices and groups: each part on devices that exist, no device with two parts."""
    groups: dict[int, tuple[int, ...]] = {}
    for key, devices in s.groups:
        if key is None:
            yield "error", "group-key-unset", f"the device group {list(devices)} has no key"
            continue
        if key in groups:
            yield "error", "group-key-twice", f"two device groups have the key {key}"
        groups.setdefault(key, devices)
        if not devices:
            yield "error", "group-empty", f"device group {key} is empty"
        if len(set(devices)) < len(devices):
            twice = next(d for d in devices if devices.count(d) > 1)
            yield "error", "group-device-twice", f"device {twice} is twice in device group {key}"
        for d in devices:
            if d < 0 or (count is not None and d >= count):
                yield "error", "group-device-range", f"device {d} in group {key} does not exist: {_range(count)}"
        if key not in s.devices:
            yield "warning", "group-unused", f"device group {key} is not used"
    if not s.devices:
        yield "error", "devices-empty", "the list of devices is empty"
    for d in s.devices:
        if d in groups:
            continue
        if d < 0:
            keys = f"the keys are {sorted(groups) or 'none'}"
            yield "error", "group-unknown", f"{d} is not a device and the key of no device group; {keys}"
        elif count is not None and d >= count:
            yield "error", "device-range", f"device {d} does not exist: {_range(count)}"
    yield from _one_part_each(s, groups)


def _one_part_each(s: ShardingSpec, groups: Mapping[int, tuple[int, ...]]) -> Iterator[Rule]:
    owner: dict[int, int] = {}
    for k, entry in enumerate(s.devices):
        for d in dict.fromkeys(groups.get(entry, (entry,))):
            if d in owner:
                yield "error", "device-two-parts", f"device {d} is given parts {owner[d]} and {k} of the tensor"
            owner.setdefault(d, k)


def _range(count: int | None) -> str:
    return "devices count from 0" if count is None else f"the configuration has devices 0 to {count - 1}"


def _dim_rules(s: ShardingSpec, context: Context) -> Iterator[Rule]:
    """Axes: inside the rank, each cut once, in a sane number of parts that the devices match."""
    shape = context.shapes.get(s.tensor or "", ())
    has_shape = s.tensor in context.shapes
    if has_shape and shape is None:
        yield "error", "not-a-tensor", "only tensors can be sharded, this value is a sequence, map or optional"
        return
    rank = len(shape or ()) if has_shape else None
    cut: set[int] = set()
    for d in s.dims:
        if d.axis is None:
            yield "error", "axis-unset", "a sharded_dim does not say its axis"
        elif rank is not None and not -rank <= d.axis < rank:
            yield "error", "axis-range", f"axis {d.axis} of a tensor of rank {rank}"
        else:
            axis = d.axis % rank if rank else d.axis
            if axis in cut:
                yield "error", "axis-twice", f"axis {axis} is sharded twice"
            cut.add(axis)
            yield from _shard_rules(d, axis, (shape or ())[axis] if rank else None, rank is not None, context)
    counts = [x.num_shards for d in s.dims for x in d.shards]
    if all(n is not None and n > 0 for n in counts) and all(d.shards for d in s.dims):
        parts = prod(n for n in counts if n is not None)
        if s.devices and parts != len(s.devices):
            yield "error", "devices-count", f"{some(parts, 'part')} and a list of {some(len(s.devices), 'device')} or groups"


def _shard_rules(d: ShardedDim, axis: int, dim: int | str | None, has_rank: bool, context: Context) -> Iterator[Rule]:
    if not d.shards:
        yield "error", "sharding-empty", f"axis {axis} has no simple_sharding"
    size = context.size(dim)
    sizes: list[int | None] = []
    for s in d.shards:
        if s.num_shards is None:
            yield "error", "shards-unset", f"num_shards of axis {axis} is not set"
        elif s.num_shards < 1:
            yield "error", "shards-bad", f"num_shards of axis {axis} is {s.num_shards}"
        if isinstance(s.dim, int):
            sizes.append(s.dim)
            if s.dim < 1:
                yield "error", "dim-value-bad", f"dim_value of axis {axis} is {s.dim}"
            elif len(d.shards) == 1 and size is not None and s.dim != size:
                yield "error", "dim-value", f"dim_value of axis {axis} is {s.dim}, the tensor has {size}"
        elif s.dim is not None:
            sizes.append(context.symbols.get(s.dim))
            yield from _symbol_rules(s.dim, axis, dim, has_rank and len(d.shards) == 1, context)
        else:
            sizes.append(size if len(d.shards) == 1 else None)
    yield from _fit_rules(d, axis, size, sizes)
    yield from _part_rules(d, axis, size)


def _part_rules(d: ShardedDim, axis: int, size: int | None) -> Iterator[Rule]:
    """Parts that metadata gives: one interval for each, inside of the axis."""
    if d.parts and (len(d.shards) != 1 or d.shards[0].num_shards != len(d.parts)):
        counts = [s.num_shards for s in d.shards]
        yield "error", "parts-count", f"{some(len(d.parts), 'interval')} given for axis {axis}, its shards are {counts}"
    wrong = next(((lo, hi) for lo, hi in d.parts if not 0 <= lo <= hi <= (hi if size is None else size)), None)
    if wrong is not None:
        yield "error", "parts-range", f"the part [{wrong[0]}, {wrong[1]}) of axis {axis} is outside of its {size} cells"


def _symbol_rules(symbol: str, axis: int, dim: int | str | None, whole: bool, context: Context) -> Iterator[Rule]:
    if symbol not in context.symbols:
        names = ", ".join(sorted(context.symbols)) or "none"
        yield "error", "dim-param-unknown", f"dim_param '{symbol}' of axis {axis} is no symbol of the model, which has {names}"
    elif whole and isinstance(dim, str) and dim != symbol and not _equal_symbols(symbol, dim, context):
        yield "error", "dim-param", f"dim_param of axis {axis} is '{symbol}', the tensor has '{dim}'"
    elif whole and isinstance(dim, int) and context.symbols[symbol] not in (None, dim):
        yield "error", "dim-param", f"dim_param '{symbol}' of axis {axis} is {context.symbols[symbol]}, the tensor has {dim}"


def _equal_symbols(a: str, b: str, context: Context) -> bool:
    return context.symbols.get(a) is not None and context.symbols.get(a) == context.symbols.get(b)


def _fit_rules(d: ShardedDim, axis: int, size: int | None, sizes: list[int | None]) -> Iterator[Rule]:
    if len(d.shards) > 1:
        if any(n is None for n in sizes):
            yield "error", "fused-dims", f"axis {axis} is a fusion of {len(d.shards)} axes and the size of one is not given"
            return
        if size is not None and prod(n for n in sizes if n is not None) != size:
            text = " × ".join(str(n) for n in sizes)
            yield "error", "fused-dims", f"axis {axis} has {size} cells, the axes fused into it {text}"
    for n, s in zip(sizes, d.shards, strict=True):
        if n is None or s.num_shards is None or s.num_shards < 1 or n < 1:
            continue
        if s.num_shards > n:
            yield "error", "too-many-parts", f"axis {axis} of {n} cells cannot be cut into {s.num_shards} non-empty parts"
        elif n % s.num_shards and not d.parts:
            text = "Tapestry's sizes then differ by at most one"
            yield "warning", "uneven", f"axis {axis} of {n} cells in {s.num_shards} parts is uneven; {text}"


def _stages(model: ModelProto) -> Iterator[Finding]:
    """Along every edge of the graph the pipeline stage stays or grows; a node without one passes on what it reads."""
    annotated = [(n, sharding_specs.node_configurations(n)) for n in model.graph.node]
    for name in dict.fromkeys(c.configuration or "" for _, marks in annotated for c in marks if c.stage is not None):
        stage: dict[str, tuple[int, str]] = {}  # tensor → latest stage before it, and the node that said so
        for node, marks in annotated:
            latest = max(((*stage[i], i) for i in node.input if i in stage), default=None)
            mine = next((c.stage for c in marks if (c.configuration or "") == name and c.stage is not None), None)
            if mine is not None and latest is not None and 0 <= mine < latest[0]:
                yield Finding(
                    "error",
                    "stage-back",
                    name_of(node),
                    latest[2],
                    f"pipeline_stage {mine} reads '{latest[2]}', which comes from node '{latest[1]}' in stage {latest[0]}",
                )
            here = (mine, name_of(node)) if mine is not None else latest[:2] if latest else None
            stage |= {o: here for o in node.output if here is not None}
