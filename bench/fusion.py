"""Kernels and bytes moved per model on one device, against the same graphs run node by node.

    .venv/bin/python bench/fusion.py [--only NAME …]

Ours: kernels that the plan launches (operations that are not opaque, each reading its footprints and writing its results once).
The peer is eager execution: one kernel per ONNX node of the exporter's own graph after constant folding, views (reshape,
transpose, slice, expand …) being free, each node reading its inputs and writing its results once. torch.compile's kernels are
not counted: the models exist here as ONNX files alone. Writes bench/results/fusion.json; exits 1 where a layer has not exactly
one attention kernel, or a normalisation's statistics take more than one pass.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import sys

from record import SHARED, WORK, Row, write
from rich.console import Console
from rich.table import Table

from tapestry.ir.graph import Block, Graph, Op
from tapestry.lift import lift
from tapestry.rewrites.pattern import is_view
from tapestry.rewrites.simplify import simplify

# model -> (symbols, attention layers)
MODELS: dict[str, tuple[dict[str, int], int]] = {
    "bert_base": ({"s18": 1, "s41": 128}, 12),
    "gpt2": ({"s72": 1, "s70": 64}, 12),
    "llama_tiny": ({"s72": 2, "s53": 32}, 4),
    "qwen3_tiny": ({"s72": 2, "s53": 32}, 4),
    "t5_small": ({"s11": 1, "s53": 32, "s28": 32}, 18),
    "vit_base": ({"s99": 1}, 12),
    "whisper_encoder": ({"s6": 1}, 4),
    "resnet50": ({"s31": 1}, 0),
}


def measure(name: str) -> Row:
    """Kernels and bytes of one model, ours and node by node."""
    shapes, layers = MODELS[name]
    WORK.mkdir(parents=True, exist_ok=True)
    path = WORK / f"{name}.onnx"
    path.write_bytes(gzip.decompress((SHARED / f"{name}.onnx.gz").read_bytes()))
    lifted = lift(path, shapes, weights=False)
    graph = simplify(lifted.graph)
    eager = _nodes(lifted.graph)
    blocks = [op for op in graph.ops if isinstance(op, Block)]
    attention = sum(op.monoid == "softsum" for op in blocks)
    return {
        "model": name, "shapes": shapes, "nodes": lifted.nodes, "layers": layers, "attention_kernels": attention,
        "kernels": len(graph.ops), "kernels_per_layer": _per_layer(graph) if layers else None,
        "bytes": _bytes(graph, [[op] for op in graph.ops]),
        "eager_kernels": len(eager), "eager_bytes": _bytes(lifted.graph, eager),
        "passes": _norm_passes(blocks),
    }  # fmt: skip


def _nodes(graph: Graph) -> list[list[Op]]:
    """Operations by the ONNX node that they came from, without the nodes that only view their input."""
    groups: dict[str, list[Op]] = {}
    for i, op in enumerate(graph.ops):
        groups.setdefault(op.source[0] if op.source else f"#{i}", []).append(op)
    return [ops for ops in groups.values() if not all(is_view(op) for op in ops)]


def _bytes(graph: Graph, kernels: list[list[Op]]) -> int:
    """What kernels read and write, each tensor once per kernel; what stays inside a kernel is free."""
    readers = graph.consumers()
    views = {op.outs[0]: op.inputs[0] for op in graph.ops if is_view(op)}
    total = 0
    for ops in kernels:
        made = {t for op in ops for t in op.outs}
        inside = {id(op) for op in ops}
        for t in {_behind(t, views) for op in ops for t in op.inputs} - made:
            total += graph.tensors[t].nbytes
        for t in made:
            if t in graph.outputs or any(id(graph.ops[i]) not in inside for i in readers.get(t, [])):
                total += graph.tensors[t].nbytes
    return total


def _behind(tensor: str, views: dict[str, str]) -> str:
    while tensor in views:
        tensor = views[tensor]
    return tensor


def _per_layer(graph: Graph) -> int:
    """Kernels from one attention to the next, the smallest such distance."""
    at = [i for i, op in enumerate(graph.ops) if isinstance(op, Block) and op.monoid == "softsum"]
    return min(b - a for a, b in itertools.pairwise(at))


def _norm_passes(blocks: list[Block]) -> int:
    """The most kernels that go through one tensor for the statistics of a normalisation and to apply them."""
    found = 0
    for op in blocks:
        if op.monoid != "moments":
            continue
        alone = op.outs[0] in {t for o in blocks for t in o.inputs} and len(op.outs) > 1  # the statistics leave the kernel
        found = max(found, 2 if alone else 1)
    return found


def main() -> int:
    """Measure every model, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    rows = [measure(n) for n in args.only if (SHARED / f"{n}.onnx.gz").is_file()]
    table = Table("model", "layers", "attention", "kernels", "per layer", "eager", "ratio", "MB", "eager MB", "ratio")
    for r in rows:
        table.add_row(
            r["model"], str(r["layers"]), str(r["attention_kernels"]), str(r["kernels"]), str(r["kernels_per_layer"] or ""),
            str(r["eager_kernels"]), f"{r['kernels'] / r['eager_kernels']:.2f}", f"{r['bytes'] / 1e6:.1f}",
            f"{r['eager_bytes'] / 1e6:.1f}", f"{r['bytes'] / r['eager_bytes']:.2f}",
        )  # fmt: skip
    Console().print(table)
    if set(args.only) == set(MODELS):
        write("fusion", rows, peer="eager: one kernel per ONNX node that is not a view")
    return 0 if all(r["attention_kernels"] == r["layers"] and r["passes"] <= 1 for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
