"""Structural rules of multi-device annotations: everything that can be wrong without knowing what an operator does.

onnx's own checker looks at none of this. Each finding has a code of its own, the node, the tensor and a sentence with the
numbers that show it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, cast

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto
from onnx import checker as onnx_checker

from tapestry.build.store import new_file
from tapestry.errors import PlanError, TapestryError, some
from tapestry.interop import instance_map, sharding_specs
from tapestry.interop.instance_map import ModelTopology
from tapestry.interop.sharding_specs import (
    IR_VERSIONS,
    PARTS,
    VALUE,
    DeviceConfiguration,
    NodeConfiguration,
    ShardedDim,
    ShardingSpec,
    clear,
    configuration_proto,
    key_of,
    metadata,
    name_of,
    node_proto,
    parts_text,
    set_metadata,
    value_text,
)
from tapestry.interop.tile_patterns import Tiling

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
        for h in instance_map.values(model):
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
                    "error", "stage-back", name_of(node), latest[2],
                    f"pipeline_stage {mine} reads '{latest[2]}', which comes from node '{latest[1]}' in stage {latest[0]}",
                )  # fmt: skip
            here = (mine, name_of(node)) if mine is not None else latest[:2] if latest else None
            stage |= {o: here for o in node.output if here is not None}


# Write annotations into a model's file: specs, stages, metadata; external data stays reachable; the file appears whole.


MESH = "tapestry.mesh"  # model: names and sizes of the mesh axes, "d0=2,d1=4"
SHAPES = "tapestry.shapes"  # model: JSON, sizes of the inputs that the plan was made for
SHARES = "tapestry.shares"  # model: JSON, weights of the coordinates of mesh axes whose shares are not equal
ORDER = "tapestry.order"  # model: JSON, by mesh axis which device along it has each coordinate, where they do not count on
MOVES = "tapestry.moves"  # model: JSON, structural rewrites of the plan, in order
STAGES = "tapestry.stages"  # model: JSON, devices and mesh of each pipeline stage, and the number of micro-batches
PARTIAL = "tapestry.partial"  # node: JSON list, reductions cut over devices and where each is completed
INTERNAL = "tapestry.internal"  # node: JSON, placements of operations inside the node whose results have no ONNX name
checker = cast(Any, onnx_checker)  # (its types are incomplete)
KEYS = (MESH, SHARES, ORDER, SHAPES, MOVES, STAGES, PARTIAL, INTERNAL, PARTS, VALUE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Everything to write of one configuration.

    Attributes:
        outs: specs of tensors where they are written.
        reads: (node, tensor) to the spec in which a node reads a tensor.
        values: specs in which inputs and weights start and outputs end, as the user fixed them.
        stages: pipeline stage by node.
        nodes: metadata by the tensor that a node writes, or by the node's name.
        model: metadata of the model.
        shapes: sizes of graph outputs that the file does not declare.
        tilings: the same layouts as tile patterns, where one can say them; ``declared`` has the values inside the graph.
    """

    configuration: DeviceConfiguration
    outs: Mapping[str, ShardingSpec] = field(default_factory=dict[str, ShardingSpec])
    reads: Mapping[tuple[str, str], ShardingSpec] = field(default_factory=dict[tuple[str, str], ShardingSpec])
    values: Mapping[str, ShardingSpec] = field(default_factory=dict[str, ShardingSpec])
    stages: Mapping[str, int] = field(default_factory=dict[str, int])
    nodes: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    model: Mapping[str, str] = field(default_factory=dict[str, str])
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    topology: ModelTopology | None = None
    tilings: Mapping[str, Tiling] = field(default_factory=dict[str, Tiling])
    declared: Mapping[str, ValueInfoProto] = field(default_factory=dict[str, ValueInfoProto])


def strip(model: ModelProto) -> None:
    """Drop every annotation, and the metadata that belongs to them."""
    clear(model)
    for holder in (model, *model.graph.node, *instance_map.values(model)):
        for key in [*metadata(holder)]:
            if key.partition("@")[0] in KEYS:
                set_metadata(holder, key, None)
    instance_map.write_topology(model, None)
    for h in instance_map.values(model):
        instance_map.attach(model, h.name, None)


def annotate(model: ModelProto, marks: Marks, *, beside: bool = False) -> int:
    """Put the annotations of a configuration on a model; returns the number of specs written.

    Args:
        beside: keep the configurations that the model has. Its tilings and topology stay too: they are of the configuration
            that was written first (the topology grows where this one has more devices).

    Raises:
        PlanError: the model has a configuration of that name.
    """
    name = marks.configuration.name
    if not beside:
        strip(model)
    elif any(c.name == name for c in model.configuration):
        raise PlanError(f"the model has a configuration '{name}'", where="--configuration", hint="another name, or no --into")
    first, last = IR_VERSIONS
    model.ir_version = min(max(model.ir_version, first), last)
    model.configuration.append(configuration_proto(marks.configuration))
    for key, value in marks.model.items():
        set_metadata(model, key_of(key, name), value)
    for o in model.graph.output:
        if o.name in marks.shapes and o.type.HasField("tensor_type") and not o.type.tensor_type.HasField("shape"):
            o.type.tensor_type.shape.SetInParent()
            for n in marks.shapes[o.name]:
                o.type.tensor_type.shape.dim.add(dim_value=n)
    _ends(model, marks, beside)
    return sum(_node_of_onnx_annotations(node, marks) for node in model.graph.node)


def _ends(model: ModelProto, marks: Marks, beside: bool) -> None:
    """What is said of values: sharded inputs and outputs, topology, tilings."""
    for h in instance_map.values(model):
        if h.name in marks.values:
            set_metadata(h, key_of(VALUE, marks.configuration.name), value_text(marks.values[h.name]))
            set_metadata(h, key_of(PARTS, marks.configuration.name), parts_text([marks.values[h.name]]))
    before = instance_map.read_topology(model) if beside else None
    if before is None or (marks.topology is not None and marks.topology.count > before.count):
        instance_map.write_topology(model, marks.topology)
    if not beside:
        for t, tiling in marks.tilings.items():
            instance_map.attach(model, t, tiling, marks.declared.get(t))


def _node_of_onnx_annotations(node: NodeProto, marks: Marks) -> int:
    name, configuration = name_of(node), marks.configuration.name
    specs = [marks.reads[(name, t)] for t in dict.fromkeys(node.input) if (name, t) in marks.reads]
    specs += [marks.outs[t] for t in dict.fromkeys(node.output) if t in marks.outs]
    stage = marks.stages.get(name)
    if specs or stage is not None:
        node.device_configurations.append(node_proto(NodeConfiguration(configuration, tuple(specs), stage)))
    set_metadata(node, key_of(PARTS, configuration), parts_text(specs))
    for who in dict.fromkeys((name, *node.output)):
        for key, value in marks.nodes.get(who, {}).items():
            set_metadata(node, key_of(key, configuration), value)
    return len(specs)


def read_json(properties: Mapping[str, str], key: str, kind: type) -> Any:
    """A metadata property that is JSON; an empty ``kind`` where there is none.

    Raises:
        PlanError: it is no JSON, or of another type.
    """
    if key not in properties:
        return kind()
    try:
        value = json.loads(properties[key])
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        hint = "--ignore-sharding plans without it"
        raise PlanError("the model's metadata does not read", where=key, why=properties[key][:80], hint=hint)
    return value


def write(model: ModelProto, source: Path, target: Path, *, copy: bool = False, replace: bool = False) -> None:
    """Write a model that was read from ``source`` to ``target`` in one step, and let onnx check it first.

    Args:
        copy: whether external data that cannot be reached from the target's folder is copied there.
        replace: whether the target may be the source.

    Raises:
        TapestryError: the data would be out of reach, the place is taken by something else, or onnx refuses the file.
    """
    source, target = source.resolve(), target.absolute()
    if target.is_dir() or (target.resolve() == source and not replace):
        why = "it is a folder" if target.is_dir() else "it is the model that the build was made from"
        raise TapestryError("cannot write there", where=str(target), why=why, hint="another -o")
    moved = _relocate(model, source.parent, target.resolve().parent, copy)
    try:
        with new_file(target) as temporary:
            temporary.write_bytes(model.SerializeToString())
            for old, new in moved.items():
                shutil.copyfile(old, new)
            _accepted(temporary, source)
    except ValueError as e:  # protobuf's limit of 2 GiB
        hint = "keep weights as external data"
        raise TapestryError("the model does not serialise", where=str(target), why=str(e)[:200], hint=hint) from None


def external(model: ModelProto) -> Iterator[TensorProto]:
    """Initializers whose data is in another file."""
    return (t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL)


def _relocate(model: ModelProto, here: Path, there: Path, copy: bool) -> dict[Path, Path]:
    """Make locations relative to the new folder; returns the files to copy."""
    if here == there:
        return {}
    copies: dict[Path, Path] = {}
    for t in external(model):
        for entry in t.external_data:
            if entry.key != "location":
                continue
            data = here / entry.value
            if data.is_relative_to(there):  # a location may not leave the model's folder
                entry.value = data.relative_to(there).as_posix()
                continue
            if not copy:
                raise TapestryError(
                    "the external data would be out of reach", where=f"initializer '{t.name}'",
                    why=f"'{data}' is not inside '{there}', and ONNX locations may not leave the model's folder",
                    hint="write beside the original model, or --copy-data",
                )  # fmt: skip
            new = there / Path(entry.value).name
            if new.exists() and not _same_file(new, data):
                raise TapestryError("the external data's place is taken", where=str(new), hint="an empty folder for -o")
            copies[data] = new
            entry.value = new.name
    return copies


def _same_file(a: Path, b: Path) -> bool:
    return a.is_file() and b.is_file() and a.stat().st_size == b.stat().st_size


def _accepted(path: Path, source: Path) -> None:
    """Ask onnx's checker, unless it refuses the original as well."""
    try:
        checker.check_model(str(path))
    except Exception as e:
        try:
            checker.check_model(str(source))
        except Exception:
            return
        raise TapestryError("onnx refuses the annotated model", where=str(path), why=" ".join(str(e).split())[:300]) from None
