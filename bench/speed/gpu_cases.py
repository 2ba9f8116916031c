"""Rows of bench/speed/gpu.py: what is computed, by an ONNX model of ours, by the peers in torch, and by a reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch.nn.attention import SDPBackend, sdpa_kernel

N = helper.make_node
Tensor = torch.Tensor
Function = Callable[..., Tensor]
KINDS = {
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float16: TensorProto.FLOAT16,
    torch.float32: TensorProto.FLOAT,
    torch.int64: TensorProto.INT64,
    torch.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row.

    Attributes:
        model: an ONNX model of the inputs, in order.
        inputs: random tensors of a generator on a device.
        reference: the result in f32 or f64; ``None`` where the peer is the reference (``tolerance`` then says how near).
        peers: by name; those whose name begins with "compile" are given to torch.compile first.
        flops, bytes: of one call, at least.
    """

    name: str
    model: onnx.ModelProto
    inputs: Callable[[torch.Generator], list[Tensor]]
    peers: Mapping[str, Function]
    reference: Function
    tolerance: float
    flops: float = 0.0
    bytes: float = 0.0
    note: Mapping[str, Any] = field(default_factory=dict)


def model(
    nodes: Sequence[Any],
    inputs: Mapping[str, Tensor | tuple[torch.dtype, Sequence[int]]],
    out: str,
    kind: torch.dtype,
    weights: Mapping[str, Any] | None = None,
    opset: int = 23,
) -> onnx.ModelProto:
    """A model with inputs by dtype and shape."""
    info = [helper.make_tensor_value_info(n, KINDS[d], list(s)) for n, (d, s) in inputs.items()]
    stored = [numpy_helper.from_array(np.asarray(a), n) for n, a in (weights or {}).items()]
    result = helper.make_tensor_value_info(out, KINDS[kind], None)
    graph = helper.make_graph(list(nodes), "bench", info, [result], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)


def normal(g: torch.Generator, shape: Sequence[int], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Normal numbers, made in f32."""
    return (torch.randn(*shape, generator=g, device=g.device) * scale).to(dtype)


# products


def products(tiny: bool) -> Iterator[Case]:
    """bf16 GEMM against cuBLAS; the odd size first, for correctness."""
    sizes = [
        (4095, 4097, 1023),
        (2048, 2048, 2048),
        (4096, 4096, 4096),
        (8192, 8192, 8192),
        (65536, 1024, 1024),
        (128, 8192, 8192),
    ]
    for m, n, k in [(33, 35, 37), (64, 64, 64)] if tiny else sizes:
        half = torch.bfloat16
        yield Case(
            name=f"gemm {m}x{n}x{k} bf16",
            model=model([N("MatMul", ["a", "b"], ["y"])], {"a": (half, (m, k)), "b": (half, (k, n))}, "y", half),
            inputs=lambda g, m=m, n=n, k=k: [normal(g, (m, k), torch.bfloat16), normal(g, (k, n), torch.bfloat16)],
            peers={"cublas": torch.matmul},
            reference=lambda a, b: a.double() @ b.double(),
            tolerance=1e-2,
            flops=2.0 * m * n * k,
            bytes=2.0 * (m * k + k * n + m * n),
        )


def narrow_products(tiny: bool) -> Iterator[Case]:
    """GEMM of 8-bit floats (e4m3) with a scale for each factor, rows by rows, to bf16, against torch's own."""
    kind, half, one = torch.float8_e4m3fn, torch.bfloat16, torch.float32
    for m, n, k in [(33, 48, 64)] if tiny else [(4095, 4097, 1023), (4096, 4096, 4096), (8192, 8192, 8192)]:
        nodes = [
            N("DequantizeLinear", ["a", "s"], ["af"]),
            N("DequantizeLinear", ["b", "t"], ["bf"]),
            N("Transpose", ["bf"], ["bt"], perm=[1, 0]),
            N("MatMul", ["af", "bt"], ["f"]),
            N("Cast", ["f"], ["y"], to=KINDS[half]),
        ]
        shapes = {"a": (kind, (m, k)), "b": (kind, (n, k)), "s": (one, ()), "t": (one, ())}
        takes = hasattr(torch, "_scaled_mm") and n % 16 == 0 and k % 16 == 0  # cuBLAS's own limit
        yield Case(
            name=f"gemm {m}x{n}x{k} e4m3",
            model=model(nodes, shapes, "y", half),
            inputs=lambda g, m=m, n=n, k=k: [
                normal(g, (m, k), torch.float8_e4m3fn),
                normal(g, (n, k), torch.float8_e4m3fn),
                torch.rand((), generator=g, device=g.device) + 0.5,
                torch.rand((), generator=g, device=g.device) + 0.5,
            ],
            peers={"scaled_mm": lambda a, b, s, t: torch._scaled_mm(a, b.t(), s, t, out_dtype=torch.bfloat16)} if takes else {},
            reference=lambda a, b, s, t: (a.double() * s) @ (b.double() * t).t(),
            tolerance=1e-2,
            flops=2.0 * m * n * k,
            bytes=float(m * k + k * n + 2 * m * n),
        )


def gemms(tiny: bool) -> Iterator[Case]:
    """All of them."""
    yield from products(tiny)
    yield from narrow_products(tiny)


# attention


def attention_case(name: str, batch: int, heads: tuple[int, int], sizes: tuple[int, int, int], causal: bool) -> Case:
    """Attention forward in bf16 by ONNX's operator; sizes are queries, keys and head width."""
    (hq, hk), (s, t, d), half = heads, sizes, torch.bfloat16
    shapes = {"q": (batch, hq, s, d), "k": (batch, hk, t, d), "v": (batch, hk, t, d)}
    kept = s * t - s * (s - 1) // 2 if causal and s == t else s * t

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.float().repeat_interleave(hq // hk, 1) for x in (k, v))
        out = torch.empty(q.shape, device=q.device)
        keep = torch.ones(s, t, dtype=torch.bool, device=q.device).tril() if causal else None
        for b in range(batch):
            for h in range(hq):
                scores = q[b, h].float() @ k[b, h].T * d**-0.5
                scores = scores if keep is None else scores.masked_fill(~keep, float("-inf"))
                out[b, h] = torch.softmax(scores, -1) @ v[b, h]
        return out

    def sdpa(backend: SDPBackend | None) -> Function:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if backend is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=hq != hk)
            with sdpa_kernel([backend]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=hq != hk)

        return run

    return Case(
        name=f"attention {name} b{batch} h{hq}/{hk} s{s} t{t} d{d}{' causal' if causal else ''}",
        model=model(
            [N("Attention", ["q", "k", "v"], ["y"], is_causal=int(causal))],
            {n: (half, x) for n, x in shapes.items()},
            "y",
            half,
        ),
        inputs=lambda g: [normal(g, x, half) for x in shapes.values()],
        peers={"flash": sdpa(SDPBackend.FLASH_ATTENTION), "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "sdpa": sdpa(None)},
        reference=reference,
        tolerance=2e-2,
        flops=4.0 * batch * hq * kept * d,
        bytes=2.0 * sum(float(np.prod(x)) for x in (shapes["q"], *shapes.values())),
    )


def attentions(tiny: bool) -> Iterator[Case]:
    """Odd sizes, then 16k tokens of 2,048 features by length, head width and mask; grouped heads; decoding."""
    if tiny:
        yield attention_case("odd", 1, (2, 1), (17, 17, 16), True)
        yield attention_case("decode", 2, (2, 2), (1, 33, 16), False)
        return
    yield attention_case("odd", 2, (4, 2), (1021, 1021, 128), True)
    yield attention_case("odd", 1, (4, 4), (509, 1031, 64), False)
    for d in (128, 64):
        for s in (512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                yield attention_case("forward", 16384 // s, (2048 // d, 2048 // d), (s, s, d), causal)
    yield attention_case("gqa", 2, (32, 8), (8192, 8192, 128), True)
    yield attention_case("gqa", 4, (32, 4), (4096, 4096, 128), True)
    for batch, t in ((1, 16384), (16, 8192), (64, 2048)):
        yield attention_case("decode", batch, (32, 8), (1, t, 128), False)


# rows that memory decides


def _row(
    name: str,
    nodes: Sequence[Any],
    shape: tuple[int, int],
    f: Function,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.dtype | None = None,
    weights: Mapping[str, Any] | None = None,
    more: Mapping[str, tuple[torch.dtype, Sequence[int]]] | None = None,
    tolerance: float = 2e-2,
    moved: float = 2.0,
    reference: Function | None = None,
) -> Case:
    """A case over rows x columns, whose function is given to torch.compile; ``moved`` counts passes over the data."""
    rows, columns = shape
    inputs = {"x": (dtype, shape), **(more or {})}

    def make(g: torch.Generator) -> list[Tensor]:
        return [
            torch.randint(0, columns, tuple(s), generator=g, device=g.device) if d == torch.int64 else normal(g, s, d)
            for d, s in inputs.values()
        ]

    wide = reference or (lambda *a: f(*(x.double() if x.is_floating_point() else x for x in a)))
    return Case(
        name=f"{name} {rows}x{columns} {str(dtype).removeprefix('torch.')}",
        model=model(nodes, inputs, "y", out or dtype, weights),
        inputs=make,
        peers={"compile": f},
        reference=wide,
        tolerance=tolerance,
        bytes=moved * rows * columns * dtype.itemsize,
    )


def rows(tiny: bool) -> Iterator[Case]:
    """Softmax, norms, losses and scans over rows, against torch.compile and the copy's bandwidth: one of each kind, then more.

    To compile the peers takes most of the time.
    """
    found = [*_norms(tiny), *_sums(tiny)]
    first = {re.split(r"\d", c.name)[0]: c.name for c in reversed(found)}
    yield from sorted(found, key=lambda c: c.name not in first.values())


def _norms(tiny: bool) -> Iterator[Case]:
    sizes = [(7, 37)] if tiny else [(16384, 1024), (8192, 4096), (4096, 16384), (4095, 8191)]
    half = torch.bfloat16
    for shape in sizes:
        n = shape[1]
        vector = {"g": (half, (n,)), "b": (half, (n,))}
        yield _row("softmax", [N("Softmax", ["x"], ["y"], axis=-1)], shape, lambda x: torch.softmax(x, -1))
        yield _row(
            "layer norm",
            [N("LayerNormalization", ["x", "g", "b"], ["y"], axis=-1, epsilon=1e-5)],
            shape,
            lambda x, g, b, n=n: F.layer_norm(x, (n,), g, b, 1e-5),
            more=vector,
        )
        yield _row(
            "rms norm",
            [N("RMSNormalization", ["x", "g"], ["y"], axis=-1, epsilon=1e-6)],
            shape,
            lambda x, g, n=n: F.rms_norm(x, (n,), g, 1e-6),
            more={"g": vector["g"]},
        )


def _sums(tiny: bool) -> Iterator[Case]:
    for shape in [(5, 41)] if tiny else [(8192, 32768), (4096, 50257)]:
        yield _row(
            "cross entropy",
            [N("SoftmaxCrossEntropyLoss", ["x", "t"], ["y"], reduction="none")],
            shape,
            lambda x, t: F.cross_entropy(x, t, reduction="none"),
            more={"t": (torch.int64, (shape[0],))},
            moved=1.0,
        )
        yield _row(
            "argmax",
            [N("ArgMax", ["x"], ["y"], axis=-1, keepdims=0)],
            shape,
            lambda x: torch.argmax(x, -1),
            out=torch.int64,
            moved=1.0,
            dtype=torch.float32,
            tolerance=0.0,
        )
    for shape in [(5, 67)] if tiny else [(8192, 8192), (1023, 65537)]:
        yield _row(
            "cumsum",
            [N("CumSum", ["x", "axis"], ["y"])],
            shape,
            lambda x: torch.cumsum(x, -1),
            dtype=torch.float32,
            tolerance=1e-4,
            weights={"axis": np.int64(1)},
        )


def dropouts(tiny: bool) -> Iterator[tuple[Case, tuple[int, int]]]:
    """Dropout + residual + layer norm; its random numbers are ours alone, so that the check is against our CPU target."""
    half = torch.bfloat16
    for shape in [(6, 33)] if tiny else [(8192, 4096), (4095, 4097)]:
        n = shape[1]
        nodes = [
            N("Dropout", ["x", "ratio", "train"], ["d"], "dropout"),
            N("Add", ["d", "r"], ["s"]),
            N("LayerNormalization", ["s", "g", "b"], ["y"], axis=-1, epsilon=1e-5),
        ]
        more = {"r": (half, shape), "g": (half, (n,)), "b": (half, (n,))}
        made = _row(
            "dropout + add + norm",
            nodes,
            shape,
            lambda x, r, g, b, n=n: F.layer_norm(F.dropout(x, 0.1, True) + r, (n,), g, b, 1e-5),
            more=more,
            weights={"ratio": np.float32(0.1), "train": np.array(True)},
            moved=3.0,
        )
        yield made, shape


# convolutions


def convolutions(tiny: bool) -> Iterator[Case]:
    """ResNet-50's shapes, data and weights with channels last, against cuDNN."""
    batch = 1 if tiny else 32
    shapes = [
        (224, 3, 64, 7, 2),
        (56, 64, 64, 3, 1),
        (56, 64, 256, 1, 1),
        (56, 256, 128, 1, 2),
        (28, 128, 128, 3, 1),
        (28, 256, 512, 1, 1),
        (14, 256, 256, 3, 1),
        (14, 1024, 256, 1, 1),
        (7, 512, 512, 3, 1),
        (56, 128, 128, 3, 2),
    ]
    for size, c, o, k, stride in [(9, 5, 7, 3, 2), (6, 8, 16, 1, 1)] if tiny else [(55, 63, 65, 3, 1), *shapes]:
        half, pad = torch.float16, k // 2
        out = (size + 2 * pad - k) // stride + 1
        nodes = [
            N("Transpose", ["x"], ["xc"], perm=[0, 3, 1, 2]),
            N("Transpose", ["w"], ["wc"], perm=[0, 3, 1, 2]),
            N("Conv", ["xc", "wc"], ["c"], kernel_shape=[k, k], strides=[stride] * 2, pads=[pad] * 4),
            N("Transpose", ["c"], ["y"], perm=[0, 2, 3, 1]),
        ]

        def run(x: Tensor, w: Tensor, stride: int = stride, pad: int = pad) -> Tensor:
            return F.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), stride=stride, padding=pad).permute(0, 2, 3, 1)

        yield Case(
            name=f"conv {size}x{size} {c}->{o} k{k} s{stride} b{batch} f16",
            model=model(nodes, {"x": (half, (batch, size, size, c)), "w": (half, (o, k, k, c))}, "y", half),
            inputs=lambda g, a=(batch, size, size, c), b=(o, k, k, c): [
                normal(g, a, torch.float16),
                normal(g, b, torch.float16, 0.05),
            ],
            peers={"cudnn": run},
            reference=lambda x, w, run=run: run(x.float(), w.float()),
            tolerance=1e-2,
            flops=2.0 * batch * out * out * o * c * k * k,
            bytes=2.0 * (batch * size * size * c + o * k * k * c + batch * out * out * o),
        )
