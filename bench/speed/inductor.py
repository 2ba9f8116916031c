"""What torch.compile makes of an ONNX graph: kernels and bytes of the code that Inductor generates, without running it.

The peer of `bench fusion`. The graph is the exporter's own after binding sizes and constant folding, node by node as torch
functions; Inductor (default settings, CPU, and again with `freezing`, which knows the weights) traces, fuses and generates
code for the whole of it. Counted are the calls that the generated program makes: C++ kernels, and operators of libraries
(products, convolutions, attention). Nothing is compiled by a C++ compiler and nothing runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import ModelProto, NodeProto, numpy_helper
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from tapestry.lift.file.structure import load
from tapestry.lift.file.symbols import bind, rewrite_file
from tapestry.lift.normalize.prepare import prepare, take_out_weights
from tapestry.lift.onnx_to_graph import input_dims
from tapestry.lift.operators.recurrent.loop_body import step_types
from tapestry.lift.sizes.model_sizes import equations, follow

Tensor = torch.Tensor
Values = dict[str, Any]


def folded(path: Path, shapes: Mapping[str, Any]) -> ModelProto:
    """The model with sizes bound and constants folded; weights stand as inputs."""
    model = load(path)
    stored = take_out_weights(model)
    inputs = input_dims(model, set(stored))
    env = bind(inputs, shapes)
    follow(equations(model, inputs), env)
    rewrite_file(model, env)
    return prepare(model, step_types).model


class Module(torch.nn.Module):
    """A folded model as a torch module: its float inputs that are weights are parameters.

    Args:
        weights: names of the inputs that are weights, with their values; ``None`` leaves them uninitialised.
    """

    def __init__(self, model: ModelProto, weights: Mapping[str, np.ndarray | None]) -> None:
        super().__init__()
        self.graph = model.graph
        self.known = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        for n in model.graph.node:
            if n.op_type == "Constant":
                self.known[n.output[0]] = constant(n.attribute[0])
        self.feeds = [i.name for i in model.graph.input if i.name not in weights and i.name not in self.known]
        self.names: dict[str, str] = {}
        for k, i in enumerate(i for i in model.graph.input if i.name in weights):
            value = weights[i.name]
            tensor = empty(i) if value is None else torch.from_numpy(np.array(value))
            self.names[i.name] = f"w{k}"
            self.register_parameter(f"w{k}", torch.nn.Parameter(tensor, requires_grad=False))
        for k, (name, a) in enumerate(self.known.items()):
            self.names.setdefault(name, f"c{k}")
            self.register_buffer(self.names[name], torch.from_numpy(np.array(a)))

    def forward(self, *feeds: Tensor) -> tuple[Tensor, ...]:
        """The graph's outputs from its inputs in order."""
        values: Values = dict(zip(self.feeds, feeds, strict=True))
        values |= {n: getattr(self, own) for n, own in self.names.items()}
        for node in self.graph.node:
            if node.op_type == "Constant":
                continue
            out = FUNCTIONS[node.op_type](_Call(node, values, self.known))
            for name, v in zip(node.output, out if isinstance(out, tuple) else (out,), strict=False):
                values[name] = v
        return tuple(values[o.name] for o in self.graph.output)


def constant(a: onnx.AttributeProto) -> np.ndarray:
    """The value of a Constant node."""
    if a.name == "value":
        return numpy_helper.to_array(a.t)
    return np.array(onnx.helper.get_attribute_value(a), np.float32 if "float" in a.name else np.int64)


def empty(info: onnx.ValueInfoProto) -> Tensor:
    """A tensor of an input's type: memory that is never touched."""
    t = info.type.tensor_type
    dtype = torch.from_numpy(np.zeros(0, onnx.helper.tensor_dtype_to_np_dtype(t.elem_type))).dtype
    return torch.zeros([d.dim_value for d in t.shape.dim], dtype=dtype)


class _Call:
    """A node with the values that it reads."""

    def __init__(self, node: NodeProto, values: Values, known: Mapping[str, np.ndarray]) -> None:
        self.node, self.values, self.known = node, values, known
        self.attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        self.x = [values[i] if i else None for i in node.input]

    def __getitem__(self, k: int) -> Any:
        return self.x[k] if k < len(self.x) else None

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)

    def ints(self, k: int, name: str = "", default: list[int] | None = None) -> list[int]:
        """Integers known at compile time: an input, or in older opsets an attribute."""
        if k < len(self.node.input) and self.node.input[k]:
            return [int(v) for v in np.ravel(self.known[self.node.input[k]])]
        found = self.attributes.get(name, default)
        assert found is not None, (self.node.op_type, name)
        return list(found)


def _slice(c: _Call) -> Tensor:
    x, starts, ends = c[0], c.ints(1), c.ints(2)
    axes, steps = c.ints(3, default=list(range(len(starts)))), c.ints(4, default=[1] * len(starts))
    for a, lo, hi, step in zip(axes, starts, ends, steps, strict=True):
        assert step > 0
        n = x.shape[a]
        cut = [slice(None)] * x.dim()
        cut[a] = slice(*slice(lo, hi, step).indices(n))
        x = x[tuple(cut)]
    return x


def _reshape(c: _Call) -> Tensor:
    return c[0].reshape([c[0].shape[i] if n == 0 else n for i, n in enumerate(c.ints(1))])


def _expand(c: _Call) -> Tensor:
    return c[0].expand(torch.broadcast_shapes(c[0].shape, c.ints(1)))


def _unsqueeze(c: _Call) -> Tensor:
    x, axes = c[0], c.ints(1, "axes")
    rank = x.dim() + len(axes)
    for a in sorted(a % rank for a in axes):
        x = x.unsqueeze(a)
    return x


def _squeeze(c: _Call) -> Tensor:
    axes = c.ints(1, "axes", [a for a, n in enumerate(c[0].shape) if n == 1])
    return c[0].squeeze([a % c[0].dim() for a in axes])


def _gather(c: _Call) -> Tensor:
    x, at, axis = c[0], c[1], c.attr("axis", 0)
    if axis == 0 and x.dim() == 2:
        return F.embedding(torch.where(at < 0, at + x.shape[0], at), x)
    taken = torch.index_select(x, axis, torch.where(at < 0, at + x.shape[axis], at).reshape(-1))
    return taken.reshape([*x.shape[:axis], *at.shape, *x.shape[axis + 1 :]])


def _gather_nd(c: _Call) -> Tensor:
    assert not c.attr("batch_dims", 0)
    return c[0][tuple(c[1].unbind(-1))]


def _gemm(c: _Call) -> Tensor:
    a, b = c[0].T if c.attr("transA") else c[0], c[1].T if c.attr("transB") else c[1]
    alpha, beta = c.attr("alpha", 1.0), c.attr("beta", 1.0)
    return alpha * (a @ b) if c[2] is None else torch.addmm(c[2], a, b, beta=beta, alpha=alpha)


def _conv(c: _Call) -> Tensor:
    rank = c[0].dim() - 2
    pads = c.attr("pads", [0] * 2 * rank)
    assert pads[:rank] == pads[rank:] and c.attr("auto_pad", b"NOTSET") == b"NOTSET"
    function = {1: F.conv1d, 2: F.conv2d}[rank]
    return function(c[0], c[1], c[2], c.attr("strides", 1), pads[:rank], c.attr("dilations", 1), c.attr("group", 1))


def _max_pool(c: _Call) -> Tensor:
    pads = c.attr("pads", [0, 0, 0, 0])
    assert pads[:2] == pads[2:]
    return F.max_pool2d(c[0], c.attr("kernel_shape"), c.attr("strides"), pads[:2], ceil_mode=bool(c.attr("ceil_mode", 0)))


def _mean(c: _Call) -> Tensor:
    return c[0].mean(c.ints(1, "axes"), keepdim=bool(c.attr("keepdims", 1)))


def _layer_norm(c: _Call) -> Tensor:
    return F.layer_norm(c[0], c[0].shape[c.attr("axis", -1) :], c[1], c[2], c.attr("epsilon", 1e-5))


def _rms_norm(c: _Call) -> Tensor:
    return F.rms_norm(c[0], c[0].shape[c.attr("axis", -1) :], c[1], c.attr("epsilon", 1e-5))


def _rotary(c: _Call) -> Tensor:
    x, cos, sin = c[0], c[1], c[2]
    assert not c.attr("interleaved") and not c.attr("rotary_embedding_dim") and c[3] is None and x.dim() == 4
    a, b = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def _attention(c: _Call) -> Tensor:
    assert c[0].dim() == 4 and not c.attr("softcap") and not c.attr("is_causal") and c[4] is None
    return F.scaled_dot_product_attention(c[0], c[1], c[2], c[3], scale=c.attr("scale"), enable_gqa=True)


def _cast(c: _Call) -> Tensor:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(c.attr("to"))
    return c[0].to(torch.from_numpy(np.zeros(0, dtype)).dtype)


def _split(c: _Call) -> tuple[Tensor, ...]:
    axis, count = c.attr("axis", 0), len(c.node.output)
    sizes = c.ints(1, "split", [c[0].shape[axis] // count] * count)
    return tuple(torch.split(c[0], sizes, axis))


def _range(c: _Call) -> Tensor:
    first, end, step = (c.known[n].item() for n in c.node.input)
    return torch.arange(first, end, step, dtype=c[0].dtype)


def _div(c: _Call) -> Tensor:
    return torch.div(c[0], c[1], rounding_mode=None if c[0].is_floating_point() else "trunc")


def _each(fn: Callable[..., Tensor], arity: int) -> Callable[[_Call], Tensor]:
    return lambda c: fn(*(c[k] for k in range(arity)))


_UNARY = {
    "Erf": torch.erf, "Cos": torch.cos, "Sin": torch.sin, "Sqrt": torch.sqrt, "Reciprocal": torch.reciprocal, "Neg": torch.neg,
    "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Relu": torch.relu, "Abs": torch.abs, "Log": torch.log, "IsNaN": torch.isnan,
    "Identity": lambda x: x,
}  # fmt: skip
_BINARY = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "MatMul": torch.matmul, "And": torch.logical_and, "Pow": torch.pow,
    "LessOrEqual": torch.le, "GreaterOrEqual": torch.ge, "Greater": torch.gt, "Less": torch.lt, "Min": torch.minimum,
    "Max": torch.maximum,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[_Call], Any]] = {
    **{name: _each(fn, 1) for name, fn in _UNARY.items()}, **{name: _each(fn, 2) for name, fn in _BINARY.items()},
    "Where": _each(torch.where, 3), "Slice": _slice, "Reshape": _reshape, "Expand": _expand, "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze, "Gather": _gather, "GatherND": _gather_nd, "Gemm": _gemm, "Conv": _conv, "MaxPool": _max_pool,
    "ReduceMean": _mean, "LayerNormalization": _layer_norm, "RMSNormalization": _rms_norm, "RotaryEmbedding": _rotary,
    "Attention": _attention, "Cast": _cast, "Split": _split, "Range": _range, "Div": _div,
    "Transpose": lambda c: c[0].permute(c.attr("perm", list(range(c[0].dim()))[::-1])),
    "Concat": lambda c: torch.cat(c.x, c.attr("axis")), "Softmax": lambda c: torch.softmax(c[0], c.attr("axis", -1)),
}  # fmt: skip


class _Generated(Exception):
    """Stops Inductor once the code is there."""


def inductor(module: Module, freezing: bool) -> dict[str, Any]:
    """Kernels that the generated program launches, C++ and of libraries, and the bytes that they read and write."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    found: dict[str, Any] = {}
    original = GraphLowering.codegen

    def stop(self: Any) -> Any:
        source = original(self)[0].value
        found["bytes"] = int(self.count_bytes()[0])
        found["source"] = source
        raise _Generated

    feeds = [empty(i) for i in module.graph.input if i.name in module.feeds]
    torch._dynamo.reset()
    GraphLowering.codegen = stop  # type: ignore[method-assign]
    try:
        with torch.no_grad(), config.patch(freezing=freezing, fx_graph_cache=False):
            torch.compile(make_fx(module)(*feeds), fullgraph=True, dynamic=False)(*feeds)
    except Exception:
        if not found:
            raise
    finally:
        GraphLowering.codegen = original  # type: ignore[method-assign]
    kernels, libraries = calls(found.pop("source"))
    return {"kernels": kernels + sum(libraries.values()), "cpp": kernels, "libraries": libraries, **found}


def calls(source: str) -> tuple[int, dict[str, int]]:
    """(C++ kernels, operators of libraries by name) that a generated program calls."""
    body = source[source.index("def call(") :]
    kernels = len(re.findall(r"^\s+(?:\w+ = )?cpp_fused\w*\(", body, re.M))
    libraries: dict[str, int] = {}
    for name in re.findall(r"^\s+(?:\w+ = )?(extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", body, re.M):
        libraries[name] = libraries.get(name, 0) + 1
    return kernels, libraries


def measure(path: Path, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor on a model file, with default settings and with freezing; weights are zeros, since nothing runs."""
    model = folded(path, shapes)
    stored = {i.name for i in model.graph.input} - set(input_names(path))
    module = Module(model, dict.fromkeys(stored))
    return {"default": inductor(module, freezing=False), "freezing": inductor(module, freezing=True)}


def input_names(path: Path) -> list[str]:
    """The model's inputs that are not initializers."""
    graph = onnx.load(str(path), load_external_data=False).graph
    weights = {t.name for t in graph.initializer}
    return [i.name for i in graph.input if i.name not in weights]
