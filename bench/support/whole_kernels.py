"""A model on one GPU as its distinct kernels: lifted without weights, fused by price, each with how often it is launched."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Mapping
from pathlib import Path

import onnx

from bench.support.half_models import KINDS, in_half
from bench.support.record import SHARED
from tapestry.codegen.blocks.lowered import unavailable
from tapestry.codegen.triton.emit.source import generate, kernel_key
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel, whole
from tapestry.lift import lift
from tapestry.plan.fusion import Machine, fused
from tapestry.plan.topology.presets import SOURCES
from tapestry.rewrites.core.driver import simplify

GPU = Machine(device=SOURCES["h100"].device, eager=False)


def export(name: str, dtype: str) -> onnx.ModelProto:
    """A shared export, without its weights, with every f32 in ``dtype``."""
    model = onnx.load_from_string(gzip.decompress((SHARED / f"{name}.onnx.gz").read_bytes()))
    return in_half(model, dtype) if dtype in KINDS else model


def fused_graph(model: onnx.ModelProto, sizes: Mapping[str, int]) -> Graph:
    """What a plan for one GPU computes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        return fused(simplify(lift(path, dict(sizes), weights=False).graph), GPU)[0]


def distinct(graph: Graph) -> list[list[Kernel]]:
    """Every distinct kernel of a graph on one device: those of the operations that it computes."""
    found: dict[str, list[Kernel]] = {}
    for i, op in enumerate(graph.ops):
        if not isinstance(op, Block) or unavailable(graph, i):
            continue
        ins = tuple(whole(graph.tensors[r.tensor].shape) for r in op.reads)
        outs = tuple(whole(graph.tensors[t].shape) for t in op.outs)
        kernel = Kernel(op=i, mode="full", block=whole(tuple(d.size for d in op.space)), ins=ins, outs=outs)
        found.setdefault(kernel_key(graph, kernel), []).append(kernel)
    return list(found.values())


def launches(graph: Graph, target: str) -> list[int]:
    """Launches of each operation by the kernels that the model of the chip chooses, copies and merges of parts included.

    What has no kernel is one launch.
    """
    out = [1] * len(graph.ops)
    for same in distinct(graph):
        count = len(generate(graph, same[0], target=target).launches)
        for kernel in same:
            out[kernel.op] = count
    return out
