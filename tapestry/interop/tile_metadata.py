"""Topology and tilings in a model's metadata, under the names that the slides give to the fields.

The slides' ``Model.topology`` is two properties of the model, ``instance_count`` ("4") and ``instance_map``
("[[1],[2],[3],[0]]"); ``Tensor.tile_pattern`` and ``ValueInfo.tile_pattern`` are two of the value or initializer,
``tile_pattern`` ("2,1") and ``tile_assignment`` ("0,1").
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from onnx import ModelProto, TensorProto, ValueInfoProto

from tapestry.errors import TapestryError
from tapestry.interop.instance_map import MAX_INSTANCES, InstanceMap, parse_instances
from tapestry.interop.sharding_specs import metadata, set_metadata
from tapestry.interop.tile_patterns import Tiling, parse

COUNT, MAP = "instance_count", "instance_map"
PATTERN, ASSIGNMENT = "tile_pattern", "tile_assignment"
VALUES_WITH_METADATA = 10  # the IR version that brought them


@dataclass(frozen=True, slots=True)
class ModelTopology:
    """How many instances a model is for, and what connects them, where it says so."""

    count: int
    links: InstanceMap | None = None


def read_topology(model: ModelProto) -> ModelTopology | None:
    """The topology in a model's metadata.

    Raises:
        TapestryError: it does not read, or the map names instances that there are not.
    """
    found = metadata(model)
    if COUNT not in found and MAP not in found:
        return None
    text = found.get(COUNT, "1").strip()  # "the assumed value can be one"
    if not re.fullmatch(r"0*[1-9]\d{0,5}", text) or int(text) > MAX_INSTANCES:
        raise TapestryError(f"'{text[:40]}' instances", where=COUNT, hint=f"a number from 1 to {MAX_INSTANCES:,}")
    try:
        links = parse_instances(f"{{{int(text)}, {found[MAP]}}}") if MAP in found else None
    except TapestryError as e:
        raise TapestryError(e.what, where=MAP, hint=e.hint) from None
    return ModelTopology(int(text), links)


def carried(model: ModelProto) -> bool:
    """Whether a model has a topology or a tiling in its metadata, right or wrong."""
    return any(k in metadata(h) for h in (model, *values(model)) for k in (COUNT, MAP, PATTERN, ASSIGNMENT))


def write_topology(model: ModelProto, found: ModelTopology | None) -> None:
    """Put a topology on a model, in the place of any that it has."""
    links = None if found is None or found.links is None else str(found.links).partition(", ")[2].removesuffix("}")
    set_metadata(model, COUNT, None if found is None else str(found.count))
    set_metadata(model, MAP, links)


def attach(model: ModelProto, tensor: str, tiling: Tiling | None, declared: ValueInfoProto | None = None) -> None:
    """Write a tiling on a value or initializer (None removes it).

    Args:
        declared: what the value is, for one inside the graph that the file does not declare.

    Raises:
        TapestryError: it is not declared.
    """
    holders = [h for h in values(model) if h.name == tensor]
    if not holders and tiling is not None:
        if declared is None:
            raise TapestryError(f"the model declares no '{tensor}'", hint="give its type, or infer the model's shapes")
        holders = [model.graph.value_info.add()]
        holders[0].CopyFrom(declared)
    for k, h in enumerate(holders):
        mine = tiling if k == 0 else None
        assignment = None if mine is None or mine.assignment is None else ",".join(map(str, mine.assignment))
        set_metadata(h, PATTERN, None if mine is None else ",".join(map(str, mine.pattern)))
        set_metadata(h, ASSIGNMENT, assignment)
    if tiling is not None:
        model.ir_version = max(model.ir_version, VALUES_WITH_METADATA)


def read(model: ModelProto) -> dict[str, Tiling]:
    """All tilings in a model's metadata.

    Raises:
        TapestryError: one does not parse, does not fit its tensor, or an assignment stands without a pattern.
    """
    out: dict[str, Tiling] = {}
    for h in values(model):
        found = metadata(h)
        if PATTERN not in found and ASSIGNMENT not in found:
            continue
        try:
            if PATTERN not in found:
                raise TapestryError("an assignment without a tile pattern", hint=f"{PATTERN} beside it")
            given = f": {found[ASSIGNMENT]}" if ASSIGNMENT in found else ""
            out[h.name] = parse(f"{{{found[PATTERN]}{given}}}")
            rank = _rank(h)
            if rank is not None:
                out[h.name].over(rank)
        except TapestryError as e:
            raise TapestryError(e.what, where=f"tensor '{h.name}'", why=e.why or e.where, hint=e.hint) from None
    return out


def beyond(model: ModelProto) -> Iterator[tuple[str, str]]:
    """(tensor, what is wrong) where a tiling names an instance that the model's topology has not.

    Raises:
        TapestryError: the metadata does not read.
    """
    topology = read_topology(model)
    for tensor, tiling in read(model).items():
        worst = max(tiling.instances)
        if topology is not None and worst >= topology.count:
            text = f"{COUNT} is {topology.count}, they count from 0"
            yield tensor, f"instance {worst} of tiling {tiling} does not exist: {text}"


def values(model: ModelProto) -> list[ValueInfoProto | TensorProto]:
    """What of a graph has metadata: inputs, outputs, values inside, initializers."""
    graph = model.graph
    return [*graph.input, *graph.output, *graph.value_info, *graph.initializer]


def _rank(h: ValueInfoProto | TensorProto) -> int | None:
    if isinstance(h, TensorProto):
        return len(h.dims)
    t = h.type.tensor_type
    return len(t.shape.dim) if h.type.HasField("tensor_type") and t.HasField("shape") else None
