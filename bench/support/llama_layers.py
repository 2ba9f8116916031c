"""Llama decoders of any depth, as ONNX graphs without weights: RMSNorm, rotary embedding, grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper, save


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of a decoder; the defaults are those of Llama-3-8B's layers."""

    batch: int = 1
    sequence: int = 8192
    width: int = 4096
    heads: int = 32
    groups: int = 8
    inner: int = 14336
    caches: bool = False
    cached: int = 0  # keys and values that are inputs as they are; those of the new tokens are results beside them

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads


@dataclass(slots=True)
class _Writer:
    size: Size
    results: list[str] = field(default_factory=list[str])
    nodes: list[object] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)

    def add(self, op: str, *ins: str, **attributes: object) -> str:
        """A node with one output, named after its number."""
        out = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(ins), [out], name=out, **attributes))
        return out

    def constant(self, name: str, values: object, dtype: type = np.int64) -> str:
        """A small constant, once."""
        if all(w.name != name for w in self.weights):
            self.weights.append(numpy_helper.from_array(np.array(values, dtype), name))
        return name

    def weight(self, name: str, *shape: int) -> str:
        """A weight in a file that is not there."""
        t = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
        offset = sum(4 * int(np.prod(w.dims)) for w in self.weights if w.data_location == TensorProto.EXTERNAL)
        for key, value in (("location", "weights.bin"), ("offset", str(offset)), ("length", str(4 * int(np.prod(shape))))):
            t.external_data.add(key=key, value=value)
        self.weights.append(t)
        return name

    def norm(self, x: str, scale: str) -> str:
        """RMSNorm (Zhang and Sennrich 2019)."""
        two, epsilon = self.constant("two", 2.0, np.float32), self.constant("epsilon", 1e-5, np.float32)
        mean = self.add("ReduceMean", self.add("Pow", x, two), self.constant("last", [-1]), keepdims=1)
        root = self.add("Sqrt", self.add("Add", mean, epsilon))
        return self.add("Mul", self.add("Div", x, root), scale)

    def project(self, x: str, weight: str, heads: int) -> str:
        """A linear map cut into heads: [batch, heads, sequence, head]."""
        s = self.size
        split = self.constant(f"split{heads}", [s.batch, -1, heads, s.head])
        return self.add("Transpose", self.add("Reshape", self.add("MatMul", x, weight), split), perm=[0, 2, 1, 3])

    def rotary(self, x: str) -> str:
        """Rotary embedding (Su et al. 2021): halves turned by the position's angles."""
        half, end = self.size.head // 2, self.size.head
        cut = [self.constant(f"at{k}", [k]) for k in (0, half, end)]
        axis = self.constant("axis3", [3])
        low, high = (self.add("Slice", x, a, b, axis) for a, b in ((cut[0], cut[1]), (cut[1], cut[2])))
        turned = self.add("Concat", self.add("Neg", high), low, axis=3)
        return self.add("Add", self.add("Mul", x, "cos"), self.add("Mul", turned, "sin"))

    def attention(self, x: str, k: int) -> str:
        """Causal attention of layer ``k`` with grouped keys and values."""
        s, w = self.size, self.weight
        narrow = s.groups * s.head
        q = self.rotary(self.project(x, w(f"l{k}.q", s.width, s.width), s.heads))
        key = self.rotary(self.project(x, w(f"l{k}.k", s.width, narrow), s.groups))
        value = self.project(x, w(f"l{k}.v", s.width, narrow), s.groups)
        if s.caches:
            key = self.appended(f"past_key_values.{k}.key", f"present.{k}.key", key)
            value = self.appended(f"past_key_values.{k}.value", f"present.{k}.value", value)
        if s.cached:
            self.results += [key, value]
            key, value = f"cache.{k}.key", f"cache.{k}.value"
        key, value = self.repeated(key), self.repeated(value)
        scores = self.add("MatMul", q, self.add("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self.add("Mul", scores, self.constant("scale", s.head**-0.5, np.float32))
        read = self.add("MatMul", self.add("Softmax", self.add("Add", scores, "mask"), axis=-1), value)
        flat = self.constant("flat", [s.batch, -1, s.width])
        joined = self.add("Reshape", self.add("Transpose", read, perm=[0, 2, 1, 3]), flat)
        return self.add("MatMul", joined, w(f"l{k}.o", s.width, s.width))

    def repeated(self, x: str) -> str:
        """Each group's heads for all heads that share them."""
        s = self.size
        times = s.heads // s.groups
        wide = self.constant("wide", [s.batch, s.groups, times, 1, s.head])
        each = self.constant("each", [s.batch, s.heads, -1, s.head])
        return self.add("Reshape", self.add("Expand", self.add("Unsqueeze", x, self.constant("axis2", [2])), wide), each)

    def appended(self, past: str, present: str, new: str) -> str:
        """A cache with new cells behind it."""
        self.nodes.append(helper.make_node("Concat", [past, new], [present], name=present, axis=2))
        return present

    def layer(self, x: str, k: int) -> str:
        """Layer ``k``: attention and SwiGLU, each with its norm and residual."""
        s, w = self.size, self.weight
        x = self.add("Add", x, self.attention(self.norm(x, w(f"l{k}.n1", s.width)), k))
        y = self.norm(x, w(f"l{k}.n2", s.width))
        gate, up = (self.add("MatMul", y, w(f"l{k}.{n}", s.width, s.inner)) for n in ("gate", "up"))
        gate = self.add("Mul", gate, self.add("Sigmoid", gate))
        return self.add("Add", x, self.add("MatMul", self.add("Mul", gate, up), w(f"l{k}.down", s.inner, s.width)))


def write(layers: int, folder: Path, size: Size = Size()) -> Path:
    """``llama_LAYERS.onnx`` in a folder: hidden states, mask and rotary tables in, hidden states out; with caches also these,
    and sizes ``sequence``, ``past`` and ``total``."""
    w = _Writer(size)
    x = "x"
    for k in range(layers):
        x = w.layer(x, k)
    s = size
    rows, keys = ("sequence", "total") if s.caches else (s.sequence, s.cached or s.sequence)
    shapes: dict[str, tuple[int | str, ...]] = {
        "x": (s.batch, rows, s.width), "mask": (1, 1, rows, keys), "cos": (rows, s.head), "sin": (rows, s.head),
    }  # fmt: skip
    names = [f"{k}.{part}" for k in range(layers if s.caches else 0) for part in ("key", "value")]
    past = {f"past_key_values.{n}": (s.batch, s.groups, "past", s.head) for n in names}
    past |= {
        f"cache.{k}.{part}": (s.batch, s.groups, s.cached, s.head)
        for k in range(layers)
        for part in ("key", "value")
        if s.cached
    }
    present = {f"present.{n}": (s.batch, s.groups, "total", s.head) for n in names}

    def info(name: str, shape: tuple[int | str, ...]) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    inputs = [info(n, shape) for n, shape in {**shapes, **past}.items()]
    present |= dict.fromkeys(w.results, (s.batch, s.groups, s.sequence, s.head))
    outputs = [info(n, shape) for n, shape in {x: shapes["x"], **present}.items()]
    graph = helper.make_graph(w.nodes, "llama", inputs, outputs, w.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"llama_{layers}.onnx"
    save(model, path)
    return path
