"""Stages written onto a model's nodes as ONNX's multi-device protos say it (IR version 11 and later): ``pipeline_stage``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnx import ModelProto

from tapestry.errors import TapestryError
from tapestry.interop.onnx_annotations import external
from tapestry.interop.sharding_specs import IR_VERSIONS
from tapestry.lift.file.protos import nested

CONFIGURATION = "tapestry.auto_shard"


def annotate_stages(model: ModelProto, stages: Sequence[int], devices: int) -> None:
    """Put each node's stage on it (and on the nodes of its subgraphs); other configurations of the model stay.

    By position, not by name: names of nodes need not be unique.
    """
    first, last = IR_VERSIONS
    model.ir_version = min(max(model.ir_version, first), last)
    others = [c for c in model.configuration if c.name != CONFIGURATION]
    del model.configuration[:]
    model.configuration.extend(others)
    model.configuration.add(name=CONFIGURATION, num_devices=devices)
    marked = ((n, stage) for node, stage in zip(model.graph.node, stages, strict=True) for n in nested([node]))
    for node, stage in marked:
        of_others = [c for c in node.device_configurations if c.configuration_id != CONFIGURATION]
        del node.device_configurations[:]
        node.device_configurations.extend(of_others)
        node.device_configurations.add(configuration_id=CONFIGURATION, pipeline_stage=stage)


def output_path(model: Path, output: Path | None) -> Path:
    """Where the annotated model goes: ``MODEL.auto_sharded.onnx`` beside the model unless told."""
    return output or model.with_name(f"{model.name.removesuffix('.onnx')}.auto_sharded.onnx")


def check_output(model: ModelProto, source: Path, target: Path) -> None:
    """Refuse an output that could not be written, before any work is done.

    Raises:
        TapestryError: it is the input, a folder, or in another folder than the external data.
    """
    if target.is_dir() or target.resolve() == source.resolve():
        why = "it is a folder" if target.is_dir() else "it is the input model"
        raise TapestryError("cannot write there", where=str(target), why=why, hint="another --output-model")
    if not target.absolute().parent.is_dir():
        raise TapestryError("cannot write there", where=str(target), why="its folder does not exist")
    outside = next(external(model), None)
    if outside is not None and target.resolve().parent != source.resolve().parent:
        raise TapestryError(
            "the external data would be out of reach",
            where=f"initializer '{outside.name}'",
            why="ONNX locations may not leave the model's folder",
            hint=f"an --output-model in {source.resolve().parent}",
        )
