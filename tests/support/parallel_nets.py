"""Small networks and parallel programs for them: one writer of ONNX nodes that knows on how many ranks it writes, and which.

The same text writes the model (one rank) and each rank of a program; where they differ, a style says so: data, tensor
(Megatron), sequence (norms on parts of the sequence), context (queries on parts of it), pipeline and expert parallelism.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper, save


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a program is parallel: sizes of the mesh ``dp, pp, tp``, and what the ``tp`` axis does to the sequence.

    ``sequence``: norms and residuals on parts of the sequence. ``context``: all of it, with whole weights; keys and values are
    gathered, or travel round a ``ring``, where each rank keeps the state of a softmax.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    sequence: bool = False
    context: bool = False
    ring: bool = False
    head: str = "whole"  # of the last projection: whole, gathered (columns) or rows

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a network."""

    batch: int = 4
    sequence: int = 8
    width: int = 16
    heads: int = 4
    groups: int = 4
    inner: int = 24
    layers: int = 2
    vocabulary: int = 20


@dataclass(slots=True)
class Writer:
    """Nodes of one rank."""

    style: Style
    rank: int
    seed: int = 0
    data: bool = True
    nodes: list[Any] = field(default_factory=list[Any])
    weights: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    absent: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    inputs: list[Any] = field(default_factory=list[Any])
    placement: dict[str, list[str | None]] = field(default_factory=dict[str, list[str | None]])
    count: int = 0

    @property
    def place(self) -> tuple[int, int, int]:
        """Coordinates on the mesh."""
        s = self.style
        return self.rank // (s.tp * s.pp), self.rank // s.tp % s.pp, self.rank % s.tp

    def group(self, axis: str) -> list[int]:
        """Ranks along a mesh axis through this one."""
        d, p, t = self.place
        s = self.style
        if axis == "tp":
            return [(d * s.pp + p) * s.tp + k for k in range(s.tp)]
        return (
            [(d * s.pp + k) * s.tp + t for k in range(s.pp)]
            if axis == "pp"
            else [(k * s.pp + p) * s.tp + t for k in range(s.dp)]
        )

    def add(self, op: str, *ins: str, name: str = "", outputs: int = 1, **attributes: Any) -> str:
        """A node; the name of its first output."""
        out = name or f"{op.lower()}_{self.count}"
        self.count += 1
        outs = [out, *(f"{out}.{k}" for k in range(1, outputs))]
        self.nodes.append(helper.make_node(op, list(ins), outs, name=out, **attributes))
        return out

    def collective(self, kind: str, x: str, axis: str = "tp", op: str = "NONE", root: int = -1, name: str = "") -> str:
        """A collective over a mesh axis, where that has more than one rank."""
        group = self.group(axis)
        if len(group) == 1:
            return x
        return self.add(
            "DistCollective", x, name=name, collective_operation=kind, reduce_op=op, root=group[root] if root >= 0 else -1,
            nb_rank=len(group), groups=group, group_size=len(group), domain="",
        )  # fmt: skip

    def reduce(self, x: str, op: str = "SUM") -> str:
        """All-reduce over the tensor axis."""
        return self.collective("ALL_REDUCE", x, op=op)

    def along(self, kind: str, x: str, axis: int, rank: int, op: str = "NONE") -> str:
        """A gather or reduce-scatter along any axis, by a swap with the first one, as polygraphy writes it."""
        if self.style.tp == 1:
            return x
        perm = list(range(rank))
        perm[0], perm[axis] = axis, 0
        if axis:
            x = self.add("Transpose", x, perm=perm)
        x = self.collective(kind, x, op=op)
        return self.add("Transpose", x, perm=perm) if axis else x

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        """A small constant."""
        a = np.array(values, dtype)
        name = f"c_{a.dtype}_{'_'.join(map(str, a.reshape(-1)[:6]))}_{a.ndim}"
        self.weights[name] = a
        return name

    def weight(self, name: str, *shape: int, cut: int | None = None, low: float = -1.0) -> str:
        """A weight of the model; on a rank its part along an axis; without ``data`` in a file that is not there."""
        self.placement[name] = ["tp" if k == cut else None for k in range(len(shape))]
        if not self.data:
            self.absent[name] = tuple(n // self.style.tp if k == cut else n for k, n in enumerate(shape))
            return name
        rng = np.random.default_rng([self.seed, *name.encode()])
        a = rng.uniform(low, 1.0, shape).astype(np.float32)
        parts, k = self.style.tp, self.place[2]
        if cut is not None and parts > 1:
            n = shape[cut] // parts
            a = np.take(a, range(k * n, (k + 1) * n), axis=cut)
        self.weights[name] = np.ascontiguousarray(a)
        return name

    def has(self, name: str) -> bool:
        """Whether there is an input of that name."""
        return name in self.placement

    def input(self, name: str, *shape: int, cut: Sequence[str | None] = ()) -> str:
        """An input; ``cut`` has the mesh axis along which each of its first axes is cut."""
        self.placement[name] = [*cut, *(None for _ in shape[len(cut) :])]
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    def model(self, output: str, shape: Sequence[int], cut: Sequence[str | None] = ("dp",)) -> ModelProto:
        """What was written, with its one output."""
        infos = [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)]
        self.placement[output] = [*cut, *(None for _ in shape[len(cut) :])]
        stored = [numpy_helper.from_array(a, n) for n, a in self.weights.items()]
        for name, shape in self.absent.items():
            t = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
            for key, value in (("location", "absent"), ("offset", "0"), ("length", str(4 * int(np.prod(shape))))):
                t.external_data.add(key=key, value=value)
            stored.append(t)
        graph = helper.make_graph(self.nodes, "net", self.inputs, infos, stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


Build = Callable[[Writer, Sizes], ModelProto]


def _rms(w: Writer, x: str, scale: str) -> str:
    mean = w.add("ReduceMean", w.add("Mul", x, x), w.constant([-1]), keepdims=1)
    root = w.add("Sqrt", w.add("Add", mean, w.constant(1e-5, np.float32)))
    return w.add("Mul", w.add("Div", x, root), scale)


def _layer_norm(w: Writer, x: str, name: str, width: int) -> str:
    return w.add(
        "LayerNormalization", x, w.weight(f"{name}.w", width, low=0.5), w.weight(f"{name}.b", width), axis=-1, epsilon=1e-5
    )


def _heads(w: Writer, x: str, batch: int, sequence: int, heads: int, size: int) -> str:
    split = w.add("Reshape", x, w.constant([batch, sequence, heads, size]))
    return w.add("Transpose", split, perm=[0, 2, 1, 3])


def _rope(w: Writer, x: str, size: int) -> str:
    cut = [w.constant([k]) for k in (0, size // 2, size)]
    low, high = (w.add("Slice", x, a, b, w.constant([3])) for a, b in ((cut[0], cut[1]), (cut[1], cut[2])))
    turned = w.add("Concat", w.add("Neg", high), low, axis=3)
    return w.add("Add", w.add("Mul", x, "cos"), w.add("Mul", turned, "sin"))


def _attention(w: Writer, x: str, z: Sizes, k: int, bias: bool, rope: bool) -> str:
    """Attention with its heads on the tensor axis; under ``context`` with its queries there."""
    st, size = w.style, z.width // z.heads
    tp = 1 if st.context else st.tp
    cut = None if st.context else 1
    batch, heads, groups = z.batch // st.dp, z.heads // tp, z.groups // tp
    sequence = z.sequence // (st.tp if st.context else 1)

    def project(name: str, n: int, number: int) -> str:
        y = w.add("MatMul", x, w.weight(f"l{k}.{name}", z.width, n * size, cut=cut))
        if bias:
            y = w.add("Add", y, w.weight(f"l{k}.{name}.b", n * size, cut=None if cut is None else 0))
        return _heads(w, y, batch, sequence, number, size)

    q, key, value = project("q", z.heads, heads), project("k", z.groups, groups), project("v", z.groups, groups)
    if rope:
        q, key = _rope(w, q, size), _rope(w, key, size)
    if st.context and not st.ring:
        key, value = (w.along("ALL_GATHER", t, 2, 4) for t in (key, value))
    full, times = sequence if st.ring else z.sequence, z.heads // z.groups
    if times > 1:
        wide, each = w.constant([batch, groups, times, full, size]), w.constant([batch, heads, full, size])
        key, value = (
            w.add("Reshape", w.add("Expand", w.add("Unsqueeze", t, w.constant([2])), wide), each) for t in (key, value)
        )

    def scores_of(key: str, mask: str) -> str:
        scores = w.add("MatMul", q, w.add("Transpose", key, perm=[0, 1, 3, 2]))
        scores = w.add("Mul", scores, w.constant(size**-0.5, np.float32))
        return w.add("Add", scores, mask) if rope else scores

    if st.ring and st.tp > 1:
        read = _ring(w, key, value, sequence, scores_of)
    else:
        read = w.add("MatMul", w.add("Softmax", scores_of(key, "mask"), axis=-1), value)
    joined = w.add("Reshape", w.add("Transpose", read, perm=[0, 2, 1, 3]), w.constant([batch, sequence, heads * size]))
    y = w.add("MatMul", joined, w.weight(f"l{k}.o", z.width, z.width, cut=None if cut is None else 0))
    y = _reduced(w, y)
    return w.add("Add", y, w.weight(f"l{k}.o.b", z.width)) if bias else y


def _ring(w: Writer, key: str, value: str, part: int, scores_of: Callable[[str, str], str]) -> str:
    """Attention over keys and values that go from rank to rank: the greatest score, the sum and the weighted sum are rescaled
    whenever a part has a greater one (Liu, Zaharia and Abbeel, 2023)."""
    parts, me, last = w.style.tp, w.place[2], w.constant([-1])
    top = total = read = ""
    for step in range(parts):
        begin = (me - step) % parts * part
        columns = (
            w.add("Slice", "mask", w.constant([begin]), w.constant([begin + part]), w.constant([3])) if w.has("mask") else ""
        )
        scores = scores_of(key, columns)
        high = w.add("ReduceMax", scores, last, keepdims=1)
        high = w.add("Max", top, high) if top else high
        weights = w.add("Exp", w.add("Sub", scores, high))
        more, weighted = w.add("ReduceSum", weights, last, keepdims=1), w.add("MatMul", weights, value)
        if top:
            factor = w.add("Exp", w.add("Sub", top, high))
            more = w.add("Add", w.add("Mul", total, factor), more)
            weighted = w.add("Add", w.add("Mul", read, factor), weighted)
        top, total, read = high, more, weighted
        if step < parts - 1:
            key, value = _passed_on(w, key), _passed_on(w, value)
    return w.add("Div", read, total)


def _passed_on(w: Writer, x: str) -> str:
    """The value of the rank before this one."""
    parts, before = w.style.tp, (w.place[2] - 1) % w.style.tp
    every = w.collective("ALL_GATHER", w.add("Unsqueeze", x, w.constant([0])))
    mine = w.add("Slice", every, w.constant([before]), w.constant([before + 1]), w.constant([0])) if parts > 1 else every
    return w.add("Squeeze", mine, w.constant([0]))


def _reduced(w: Writer, y: str) -> str:
    """A row-parallel result: all-reduced, or reduce-scattered along the sequence."""
    if w.style.context:
        return y
    return w.along("REDUCE_SCATTER", y, 1, 3, "SUM") if w.style.sequence else w.reduce(y)


def _gathered(w: Writer, x: str) -> str:
    return w.along("ALL_GATHER", x, 1, 3) if w.style.sequence else x


def _mlp(w: Writer, x: str, z: Sizes, k: int, gated: bool) -> str:
    cut = None if w.style.context else 1
    rows = None if w.style.context else 0
    up = w.add("MatMul", x, w.weight(f"l{k}.up", z.width, z.inner, cut=cut))
    if gated:
        gate = w.add("MatMul", x, w.weight(f"l{k}.gate", z.width, z.inner, cut=cut))
        up = w.add("Mul", w.add("Mul", gate, w.add("Sigmoid", gate)), up)
    else:
        up = w.add("Add", up, w.weight(f"l{k}.up.b", z.inner, cut=rows))
        half = w.add("Erf", w.add("Div", up, w.constant(2**0.5, np.float32)))
        up = w.add("Mul", w.add("Mul", up, w.add("Add", half, w.constant(1.0, np.float32))), w.constant(0.5, np.float32))
    y = _reduced(w, w.add("MatMul", up, w.weight(f"l{k}.down", z.inner, z.width, cut=rows)))
    return y if gated else w.add("Add", y, w.weight(f"l{k}.down.b", z.width))


def _stages(w: Writer, z: Sizes, x: str, layer: Callable[[str, int], str], shape: Sequence[int]) -> str:
    """Layers, shared out among the stages of a pipeline; a stage broadcasts what it has to the others."""
    each = z.layers // w.style.pp
    for stage in range(w.style.pp):
        if w.place[1] == stage:
            for k in range(stage * each, (stage + 1) * each):
                x = layer(x, k)
        else:
            w.weights["zeros"] = np.zeros(shape, np.float32)
            x = w.add("Identity", "zeros")
        x = w.collective("BROADCAST", x, "pp", root=stage, name=f"stage_{stage}")
    return x


def decoder(w: Writer, z: Sizes) -> ModelProto:
    """Llama's: RMSNorm, rotary embedding, grouped queries, SwiGLU, and a head over a vocabulary."""
    st = w.style
    size, batch = z.width // z.heads, z.batch // st.dp
    part = z.sequence // (st.tp if st.sequence or st.context else 1)
    turned = z.sequence // (st.tp if st.context else 1)
    rows = "tp" if st.context else None
    x = w.input("x", batch, part, z.width, cut=("dp", "tp" if st.sequence else rows))
    w.input("cos", turned, size, cut=(rows,))
    w.input("sin", turned, size, cut=(rows,))
    w.input("mask", 1, 1, turned, z.sequence, cut=(None, None, rows))

    def layer(x: str, k: int) -> str:
        y = _gathered(w, _rms(w, x, w.weight(f"l{k}.n1", z.width, low=0.5)))
        x = w.add("Add", x, _attention(w, y, z, k, False, True))
        y = _gathered(w, _rms(w, x, w.weight(f"l{k}.n2", z.width, low=0.5)))
        return w.add("Add", x, _mlp(w, y, z, k, True))

    x = _stages(w, z, x, layer, (batch, part, z.width))
    x = _gathered(w, _rms(w, x, w.weight("norm", z.width, low=0.5)))
    if st.head == "whole":
        y, sequence = w.add("MatMul", x, w.weight("head", z.width, z.vocabulary), name="logits"), turned
    elif st.head == "gathered":
        y, sequence = w.add("MatMul", x, w.weight("head", z.width, z.vocabulary, cut=1)), turned
        y = w.add("Identity", w.along("ALL_GATHER", y, 2, 3), name="logits")
    else:
        n = z.width // st.tp
        begin, end = w.constant([w.place[2] * n]), w.constant([(w.place[2] + 1) * n])
        mine = w.add("Slice", x, begin, end, w.constant([2])) if st.tp > 1 else x
        y, sequence = w.add("MatMul", mine, w.weight("head", z.width, z.vocabulary, cut=0)), turned
        y = w.add("Identity", w.reduce(y), name="logits")
    return w.model(y, (batch, sequence, z.vocabulary), ("dp", rows))


def encoder(w: Writer, z: Sizes) -> ModelProto:
    """BERT's: LayerNorm after each part, biases, GELU."""
    st = w.style
    batch = z.batch // st.dp
    part = z.sequence // (st.tp if st.sequence or st.context else 1)
    cut = ("dp", "tp" if st.sequence or st.context else None)
    x = w.input("x", batch, part, z.width, cut=cut)

    def layer(x: str, k: int) -> str:
        x = _layer_norm(w, w.add("Add", x, _attention(w, _gathered(w, x), z, k, True, False)), f"l{k}.n1", z.width)
        return _layer_norm(w, w.add("Add", x, _mlp(w, _gathered(w, x), z, k, False)), f"l{k}.n2", z.width)

    x = _stages(w, z, x, layer, (batch, part, z.width))
    return w.model(w.add("Identity", x, name="hidden"), (batch, part, z.width), cut)


def mlp(w: Writer, z: Sizes) -> ModelProto:
    """Linear maps with activations: columns, then rows, and a mean over the batch."""
    st = w.style
    batch = z.batch // st.dp
    x = w.input("x", batch, z.width, cut=("dp",))
    for k in range(z.layers):
        y = w.add("Gemm", x, w.weight(f"l{k}.a", z.width, z.inner, cut=1), w.weight(f"l{k}.a.b", z.inner, cut=0))
        y = w.reduce(w.add("MatMul", w.add("Tanh", y), w.weight(f"l{k}.b", z.inner, z.width, cut=0)))
        x = w.add("Add", w.add("Add", y, w.weight(f"l{k}.b.b", z.width)), x)
    mean = w.add("ReduceMean", x, w.constant([0]), keepdims=0)
    mean = w.collective("ALL_REDUCE", mean, "dp", "AVG")
    return w.model(w.add("Mul", x, mean, name="scaled"), (batch, z.width))


def convolutions(w: Writer, z: Sizes) -> ModelProto:
    """Convolutions whose channels are cut: out of the first, into the second, with a batch norm and a pooled head."""
    st, side = w.style, z.sequence
    batch = z.batch // st.dp
    x = w.input("x", batch, 4, side, side, cut=("dp",))
    for k in range(z.layers):
        y = w.add(
            "Conv", x, w.weight(f"l{k}.a", z.inner, 4, 3, 3, cut=0), w.weight(f"l{k}.a.b", z.inner, cut=0), pads=[1, 1, 1, 1]
        )
        stats = [w.weight(f"l{k}.bn.{n}", z.inner, cut=0, low=0.3) for n in ("scale", "bias", "mean", "var")]
        y = w.add("Relu", w.add("BatchNormalization", y, *stats))
        y = w.reduce(w.add("Conv", y, w.weight(f"l{k}.b", 4, z.inner, 3, 3, cut=1), pads=[1, 1, 1, 1]))
        x = w.add("Add", x, w.add("Mul", y, w.weight(f"l{k}.gain", 4, 1, 1)))
    pooled = w.add("Flatten", w.add("GlobalAveragePool", x))
    return w.model(w.add("MatMul", pooled, w.weight("head", 4, 10), name="classes"), (batch, 10))


def experts(w: Writer, z: Sizes) -> ModelProto:
    """A mixture of experts, every one weighted by a gate; experts are cut over the ranks and their results added."""
    st = w.style
    batch, number = z.batch // st.dp, 4
    x = w.input("x", batch, z.sequence, z.width, cut=("dp",))
    for k in range(z.layers):
        gate = w.add("Softmax", w.add("MatMul", x, w.weight(f"l{k}.gate", z.width, number)), axis=-1)
        if st.tp > 1:
            n = number // st.tp
            begin, end = w.constant([w.place[2] * n]), w.constant([(w.place[2] + 1) * n])
            gate = w.add("Slice", gate, begin, end, w.constant([2]))
        wide = w.add("Unsqueeze", x, w.constant([1]))
        up = w.add("Relu", w.add("MatMul", wide, w.weight(f"l{k}.up", number, z.width, z.inner, cut=0)))
        down = w.add("MatMul", up, w.weight(f"l{k}.down", number, z.inner, z.width, cut=0))
        chosen = w.add("Mul", down, w.add("Unsqueeze", w.add("Transpose", gate, perm=[0, 2, 1]), w.constant([3])))
        x = w.add("Add", x, w.reduce(w.add("ReduceSum", chosen, w.constant([1]), keepdims=0)))
    return w.model(w.add("Identity", x, name="mixed"), (batch, z.sequence, z.width))


NETS: dict[str, Build] = {"decoder": decoder, "encoder": encoder, "mlp": mlp, "convolutions": convolutions, "experts": experts}


def write(
    net: str, style: Style, folder: Path, sizes: Sizes = Sizes(), seed: int = 0, data: bool = True,
) -> tuple[Path, Path]:  # fmt: skip
    """A model's file, and a folder with a program of it."""
    folder.mkdir(parents=True, exist_ok=True)
    save(NETS[net](Writer(Style(head=style.head), 0, seed, data), sizes), folder / "model.onnx")
    program = folder / "program"
    program.mkdir(exist_ok=True)
    placement: dict[str, list[str | None]] = {}
    for rank in range(style.world):
        w = Writer(style, rank, seed, data)
        save(NETS[net](w, sizes), program / f"rank{rank}.onnx")
        placement |= w.placement
    mesh = {"dp": style.dp, "pp": style.pp, "tp": style.tp}
    (program / "program.json").write_text(json.dumps({"mesh": mesh, "placement": placement}))
    return folder / "model.onnx", program
