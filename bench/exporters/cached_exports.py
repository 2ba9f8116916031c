"""Exports of causal decoders given caches, as exporters of transformers and optimum write them: ``past_key_values.N.key`` and
``.value`` go in, ``present.N.key`` and ``.value`` come out, and positions are an input.

The exports of the shared folder take whole sequences. Their graphs say what a cached one computes: keys and values of the past
stand before the new ones, the causal mask compares places in the whole sequence, and nothing else depends on the past. What is
changed is found by what it does (the comparison behind the causal mask, the operands of each softmax), not by a model's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

HEADS_FIRST = [0, 2, 1, 3]  # [batch, tokens, heads, size] to [batch, heads, tokens, size]


class Export:
    """A model's graph, with the node that makes each tensor and the nodes that read it."""

    def __init__(self, path: Path) -> None:
        self.model = onnx.load(path, load_external_data=False)
        self.graph = self.model.graph
        self.made: list[NodeProto] = []
        self.index()

    def index(self) -> None:
        """Look again, after a change."""
        self.maker = {o: n for n in self.graph.node for o in n.output}
        self.readers: dict[str, list[NodeProto]] = {}
        for n in self.graph.node:
            for i in n.input:
                self.readers.setdefault(i, []).append(n)

    def back(self, name: str, ops: Sequence[str]) -> str:
        """The tensor behind a chain of nodes of these kinds, by their first inputs."""
        while name in self.maker and self.maker[name].op_type in ops:
            name = self.maker[name].input[0]
        return name

    def node(self, op: str, ins: Sequence[str], out: str, **attributes: object) -> str:
        """Make a node; it goes before all others that could read it."""
        self.made.append(helper.make_node(op, list(ins), [out], name=f"cached/{out}", **attributes))
        return out

    def constant(self, name: str, value: object) -> str:
        """An integer constant."""
        self.graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))
        return name

    def renamed(self, old: str, new: str, readers: Sequence[NodeProto]) -> None:
        """Let some readers of a tensor read another one."""
        for n in readers:
            for k, i in enumerate(n.input):
                if i == old:
                    n.input[k] = new


def write(source: Path, target: Path) -> Path:
    """Write a decoder with caches; its weights stay in the file beside the source, which must be in the target's folder."""
    e = Export(source)
    _sizes(e)
    _mask(e)
    _positions(e)
    _caches(e)
    _inputs(e)
    _ordered(e)
    onnx.save(e.model, target)
    return target


def _sizes(e: Export) -> None:
    """The number of new tokens is that of ``input_ids``; only what is repeated over heads has that of the mask."""
    for name in ("zero", "one"):
        e.constant(f"cached.{name}", int(name == "one"))
    new = e.node("Shape", ["input_ids"], "cached.new", start=1, end=2)
    e.node("Squeeze", [new], "cached.new.scalar")
    e.node("Squeeze", [e.node("Shape", ["attention_mask"], "cached.total", start=1, end=2)], "cached.total.scalar")
    for n in list(e.readers["attention_mask"]):
        start = next((a.i for a in n.attribute if a.name == "start"), 0)
        if n.op_type != "Shape" or start != 1:
            continue
        for joined in (r for r in e.readers.get(n.output[0], []) if r.op_type == "Concat"):
            uses = e.readers.get(joined.output[0], [])
            over_heads = any(u.op_type == "Expand" or e.maker[u.input[0]].op_type == "Expand" for u in uses)
            if not over_heads:
                e.renamed(n.output[0], new, [joined])


def _mask(e: Export) -> None:
    """A query sees keys up to its own place in the whole sequence."""
    causal = next(n for n in e.graph.node if n.op_type == "LessOrEqual")
    past = e.node("Sub", ["cached.total.scalar", "cached.new.scalar"], "cached.past")
    places = e.node("Range", ["cached.zero", "cached.new.scalar", "cached.one"], "cached.places")
    absolute = e.node("Add", [places, past], "cached.queries.flat")
    causal.input[1] = e.node("Reshape", [absolute, e.constant("cached.column", [1, 1, -1, 1])], "cached.queries")


def _positions(e: Export) -> None:
    """What turns places into angles, or looks them up in a table, takes them from ``position_ids``."""
    for n in e.graph.node:
        k = {"Cast": 0, "Gather": 1}.get(n.op_type, -1)
        if k < 0 or e.back(n.input[k], ["Unsqueeze"]) not in e.maker or n.input[k] not in e.maker:
            continue
        if e.maker[e.back(n.input[k], ["Unsqueeze"])].op_type != "Range" or not _is_float(e, n):
            continue
        if n.op_type == "Gather":
            n.input[k] = "position_ids"
        else:
            n.input[k] = e.node("Unsqueeze", ["position_ids", e.constant("cached.last", [-1])], "cached.angles")


def _is_float(e: Export, n: NodeProto) -> bool:
    """Whether a cast is to floats; what is looked up in a table of weights is."""
    return n.op_type == "Gather" or any(a.name == "to" and a.i == TensorProto.FLOAT for a in n.attribute)


def _caches(e: Export) -> None:
    """Keys and values of the past stand before the new ones, at each softmax."""
    found: list[tuple[str, str]] = []
    for n in e.graph.node:
        if n.op_type == "Softmax":
            scores = e.maker[e.back(n.input[0], ["Add", "Where"])]
            weights = n
            while weights.op_type != "MatMul":
                weights = next(r for r in e.readers[weights.output[0]] if r.op_type in ("MatMul", "Where"))
            found.append((_heads(e, scores.input[1]), _heads(e, weights.input[1])))
    for layer, pair in enumerate(found):
        for kind, new in zip(("key", "value"), pair, strict=True):
            readers, present = list(e.readers[new]), f"present.{layer}.{kind}"
            e.node("Concat", [f"past_key_values.{layer}.{kind}", new], present, axis=2)
            e.renamed(new, present, readers)
    e.layers, e.new = len(found), found[0][0]


def _heads(e: Export, name: str) -> str:
    """The new keys or values [batch, heads, tokens, size] behind an operand of a product."""
    while True:
        n = e.maker[name]
        if n.op_type == "Unsqueeze":  # repeated over groups of heads
            return n.input[0]
        perm = next((list(a.ints) for a in n.attribute if a.name == "perm"), [])
        if perm == HEADS_FIRST:
            return name
        name = n.input[0]


def _inputs(e: Export) -> None:
    """Inputs and outputs, with symbols for sizes."""
    heads, size = _cache_sizes(e)
    batch, tokens, total = "batch", "sequence", "total_sequence"
    shapes = {"input_ids": [batch, tokens], "attention_mask": [batch, total], "position_ids": [batch, tokens]}
    ids, out = [helper.make_tensor_value_info(n, TensorProto.INT64, s) for n, s in shapes.items()], e.graph.output[0]
    logits = [batch, tokens, out.type.tensor_type.shape.dim[-1].dim_value]
    outputs = [helper.make_tensor_value_info(out.name, TensorProto.FLOAT, logits)]
    for layer in range(e.layers):
        for kind in ("key", "value"):
            past, present = [batch, heads, "past_sequence", size], [batch, heads, total, size]
            ids.append(helper.make_tensor_value_info(f"past_key_values.{layer}.{kind}", TensorProto.FLOAT, past))
            outputs.append(helper.make_tensor_value_info(f"present.{layer}.{kind}", TensorProto.FLOAT, present))
    for field, values in ((e.graph.input, ids), (e.graph.output, outputs)):
        del field[:]
        field.extend(values)
    del e.graph.value_info[:]


def _cache_sizes(e: Export) -> tuple[int, int]:
    """(heads, size of one) of keys, from shapes that the export says."""
    known = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in e.graph.value_info}
    return known[e.new][1], known[e.new][3]


def _ordered(e: Export) -> None:
    """Every node after those that it reads."""
    waiting, made = [*e.made, *e.graph.node], {i.name for i in (*e.graph.input, *e.graph.initializer)} | {""}
    ordered: list[NodeProto] = []
    while waiting:
        ready = [n for n in waiting if all(i in made for i in n.input)]
        assert ready, waiting[0]
        ordered += ready
        made |= {o for n in ready for o in n.output}
        done = {id(n) for n in ready}
        waiting = [n for n in waiting if id(n) not in done]
    copies = [NodeProto.FromString(n.SerializeToString()) for n in ordered]
    del e.graph.node[:]
    e.graph.node.extend(copies)
