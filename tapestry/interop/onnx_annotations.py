"""Write annotations into a model's file: specs, stages, metadata; external data stays reachable; the file appears whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto
from onnx import checker as onnx_checker

from tapestry.build.atomic import equal_sizes, new_file
from tapestry.errors import PlanError, TapestryError
from tapestry.interop import tile_metadata
from tapestry.interop.sharding_specs import (
    IR_VERSIONS,
    PARTS,
    VALUE,
    DeviceConfiguration,
    NodeConfiguration,
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
from tapestry.interop.tile_metadata import ModelTopology
from tapestry.interop.tile_patterns import Tiling

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
    for holder in (model, *model.graph.node, *tile_metadata.values(model)):
        for key in [*metadata(holder)]:
            if key.partition("@")[0] in KEYS:
                set_metadata(holder, key, None)
    tile_metadata.write_topology(model, None)
    for h in tile_metadata.values(model):
        tile_metadata.attach(model, h.name, None)


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
    return sum(_node(node, marks) for node in model.graph.node)


def _ends(model: ModelProto, marks: Marks, beside: bool) -> None:
    """What is said of values: sharded inputs and outputs, topology, tilings."""
    for h in tile_metadata.values(model):
        if h.name in marks.values:
            set_metadata(h, key_of(VALUE, marks.configuration.name), value_text(marks.values[h.name]))
            set_metadata(h, key_of(PARTS, marks.configuration.name), parts_text([marks.values[h.name]]))
    before = tile_metadata.read_topology(model) if beside else None
    if before is None or (marks.topology is not None and marks.topology.count > before.count):
        tile_metadata.write_topology(model, marks.topology)
    if not beside:
        for t, tiling in marks.tilings.items():
            tile_metadata.attach(model, t, tiling, marks.declared.get(t))


def _node(node: NodeProto, marks: Marks) -> int:
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
                    "the external data would be out of reach",
                    where=f"initializer '{t.name}'",
                    why=f"'{data}' is not inside '{there}', and ONNX locations may not leave the model's folder",
                    hint="write beside the original model, or --copy-data",
                )
            new = there / Path(entry.value).name
            if new.exists() and not equal_sizes(new, data):
                raise TapestryError("the external data's place is taken", where=str(new), hint="an empty folder for -o")
            copies[data] = new
            entry.value = new.name
    return copies


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
