"""Kernels and bytes moved per model on one device, against torch.compile's Inductor on the same graphs, and node by node.

    .venv/bin/python -m bench fusion [--only NAME …] [--noted]

Ours: operations of a plan for one GPU (`plan/alternatives.py`, preset h100), each reading its footprints and writing its
results once, and the launches of their kernels on ``sm90``, with copies and the merges of split-K; ``cpu_kernels`` are those of
the torch-cpu target, which runs expressions operator by operator and fuses less. The peer is the code that Inductor generates
for a CPU from the same graph (`bench inductor`): its C++ kernels and calls of library operators, each a launch, with default
settings and with freezing. Bytes are compared within one setting, the default: its scheduler's own count (with freezing it
leaves packed weights out). Second peer: eager execution, one kernel per ONNX node
after constant folding, views being free. ``--noted`` keeps Inductor's figures from the earlier run: they take minutes.
Llama-7B's weights (27 GB) are not made for the peer, so it has none; nor have VGG-16, a graph without weights, and two
models with operators that `bench inductor` does not know. ``inside`` counts the
contractions that the reduction behind them computes itself (`fuse_contraction`). Writes bench/results/fusion.json; exits 1
where a layer has not exactly one attention kernel, a normalisation takes more than one pass, a Llama layer more than eight
launches, or a model more than Inductor in its better setting.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import sys

import onnx
from onnx import TensorProto, helper
from rich.console import Console
from rich.table import Table

from bench.speed import inductor
from bench.support.record import SHARED, WORK, Row, read, write
from bench.support.whole_kernels import GPU, launches
from tapestry.ir.graph import Block, Graph, Op
from tapestry.lift import lift
from tapestry.plan.fusion import Machine, fused
from tapestry.plan.topology.presets import SOURCES
from tapestry.rewrites.core.driver import simplify
from tapestry.rewrites.core.edit import is_view

# model -> (symbols, attention layers)
MODELS: dict[str, tuple[dict[str, int], int]] = {
    "bert_base": ({"s18": 1, "s41": 128}, 12),
    "gpt2": ({"s72": 1, "s70": 64, "s43": "s72", "s53": "s70"}, 12),
    "llama_tiny": ({"s72": 2, "s53": 32}, 4),
    "llama_tiny_opset23": ({"s72": 1, "s53": 32}, 4),
    "qwen3_tiny": ({"s72": 2, "s53": 32}, 4),
    "t5_small": ({"s11": 1, "s53": 32, "s28": 32}, 18),
    "vit_base": ({"s99": 1}, 12),
    "whisper_encoder": ({"s6": 1}, 4),
    "resnet50": ({"s31": 1}, 0),
    "mobilenet_v2": ({"s31": 1}, 0),
    "unet": ({"s77": 1}, 0),
    "vgg16": ({}, 0),
    "llama_7b": ({"s72": 1, "s53": 2048}, 32),
}
NO_PEER = {"llama_7b", "vgg16"} | {"mobilenet_v2", "unet"}  # too large to make weights for, operators the peer's module lacks
VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # filters of 3 x 3; 0: a 2 x 2 pool
MOST = {"llama_tiny": 8, "llama_tiny_opset23": 8, "llama_7b": 8}  # kernels of a layer
TARGET = "sm90"  # whose launches are counted
CPU = Machine(device=SOURCES["cpu"].device, eager=True)


def measure(name: str, noted: Row | None) -> Row:
    """Kernels and bytes of one model: ours, Inductor's (as noted, if they are given), and node by node."""
    shapes, layers = MODELS[name]
    WORK.mkdir(parents=True, exist_ok=True)
    path = WORK / f"{name}.onnx"
    if name == "vgg16":
        onnx.save(vgg16(), path)
    else:
        path.write_bytes(gzip.decompress((SHARED / f"{name}.onnx.gz").read_bytes()))
    lifted = lift(path, shapes, weights=False)
    plain = simplify(lifted.graph)
    graph = fused(plain, GPU)[0]
    eager = _nodes(lifted.graph)
    launched = launches(graph, TARGET)
    blocks = [op for op in graph.ops if isinstance(op, Block)]
    attention = sum(op.monoid == "softsum" for op in blocks)
    peer = noted["inductor"] if noted else None if name in NO_PEER else inductor.measure(path, shapes)
    return {
        "model": name, "shapes": shapes, "nodes": lifted.nodes, "layers": layers, "attention_kernels": attention,
        "kernels": len(graph.ops), "kernels_per_layer": _per_layer(graph, [1] * len(graph.ops)) if layers else None,
        "launches": sum(launched), "launches_per_layer": _per_layer(graph, launched) if layers else None,
        "bytes": _bytes(graph, [[op] for op in graph.ops]), "cpu_kernels": len(fused(plain, CPU)[0].ops),
        "inductor": peer, "inductor_kernels": min(r["kernels"] for r in peer.values()) if peer else None,
        "inductor_bytes": peer["default"]["bytes"] if peer else None,
        "inductor_launches": {setting: r["kernels"] for setting, r in peer.items()} if peer else None,
        "eager_kernels": len(eager), "eager_bytes": _bytes(lifted.graph, eager),
        "inside": sum(bool(op.inner) for op in blocks) - attention, "passes": _norm_passes(blocks),
    }  # fmt: skip


def vgg16() -> onnx.ModelProto:
    """Simonyan and Zisserman's configuration D (2014) for one image of 224 x 224, its weights elsewhere."""
    nodes, stored, x, channels, size = list[onnx.NodeProto](), list[TensorProto](), "x", 3, 224

    def weight(name: str, *shape: int) -> str:
        t = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
        t.external_data.add(key="location", value="vgg16.data")
        stored.append(t)
        return name

    for k, filters in enumerate(VGG16):
        if not filters:
            nodes.append(helper.make_node("MaxPool", [x], [f"pool{k}"], kernel_shape=[2, 2], strides=[2, 2]))
            x, size = f"pool{k}", size // 2
            continue
        inputs = [x, weight(f"w{k}", filters, channels, 3, 3), weight(f"b{k}", filters)]
        nodes += [helper.make_node("Conv", inputs, [f"c{k}"], pads=[1] * 4), helper.make_node("Relu", [f"c{k}"], [f"r{k}"])]
        x, channels = f"r{k}", filters
    nodes.append(helper.make_node("Flatten", [x], ["flat"]))
    x, width = "flat", channels * size * size
    for k, n in enumerate((4096, 4096, 1000)):
        nodes.append(helper.make_node("Gemm", [x, weight(f"m{k}", width, n), weight(f"a{k}", n)], [f"g{k}"]))
        nodes.append(helper.make_node("Relu", [f"g{k}"], [f"h{k}"]))
        x, width = f"h{k}", n
    ins = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 224, 224])]
    outs = [helper.make_tensor_value_info("g2", TensorProto.FLOAT, [1, 1000])]
    graph = helper.make_graph(nodes[:-1], "vgg16", ins, outs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


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


def _per_layer(graph: Graph, each: list[int]) -> int:
    """Kernels (``each``: of every operation) from one attention to the next, the fewest of any layer."""
    at = [i for i, op in enumerate(graph.ops) if isinstance(op, Block) and op.monoid == "softsum"]
    return min(sum(each[a:b]) for a, b in itertools.pairwise(at))


def _norm_passes(blocks: list[Block]) -> int:
    """The most kernels that go through one tensor for the statistics of a normalisation and to apply them."""
    found = 0
    for op in blocks:
        if op.monoid != "moments":
            continue
        alone = op.outs[0] in {t for o in blocks for t in o.inputs} and len(op.outs) > 1  # the statistics leave the kernel
        found = max(found, 2 if alone else 1)
    return found


def bad(row: Row) -> str:
    """What a row has that it must not have."""
    faults = [
        "attention kernels" if row["attention_kernels"] != row["layers"] else "",
        "passes" if row["passes"] > 1 else "",
        "launches per layer" if row["model"] in MOST and row["launches_per_layer"] > MOST[row["model"]] else "",
        "more launches than Inductor" if row["inductor_kernels"] and row["launches"] > row["inductor_kernels"] else "",
    ]
    return ", ".join(filter(None, faults))


def main() -> int:
    """Measure every model, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--noted", action="store_true", help="Inductor's figures from the earlier run")
    args = parser.parse_args()
    before = {r["model"]: r for r in read("fusion") if r.get("inductor")} if args.noted else {}
    rows = [measure(n, before.get(n)) for n in args.only if n == "vgg16" or (SHARED / f"{n}.onnx.gz").is_file()]
    table = Table(
        "model", "attention", "kernels", "launches", "per layer", "Inductor", "ratio", "eager", "MB", "Inductor MB", "ratio", ""
    )
    for r in rows:
        kernels, moved = r["inductor_kernels"], r["inductor_bytes"]
        peer = "/".join(map(str, (r["inductor_launches"] or {}).values()))
        ratio = f"{r['launches'] / kernels:.2f}" if kernels else ""
        sizes = (f"{moved / 1e6:.1f}", f"{r['bytes'] / moved:.2f}") if moved else ("", "")
        attention, layer = f"{r['attention_kernels']} of {r['layers']}", str(r["launches_per_layer"] or "")
        counts = (str(r["kernels"]), str(r["launches"]), layer, peer, ratio, str(r["eager_kernels"]))
        table.add_row(r["model"], attention, *counts, f"{r['bytes'] / 1e6:.1f}", *sizes, bad(r))
    Console().print(table)
    if set(args.only) == set(MODELS):
        peer = "torch.compile's Inductor: code generated for CPU from the same graph; eager: one kernel per ONNX node but views"
        write("fusion", rows, peer=peer)
    return 1 if any(map(bad, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
