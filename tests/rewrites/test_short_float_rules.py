"""What rules propose of modules in 16 bits is what their proofs accept: nothing is left undone (tests are strict)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tapestry

IMAGE, ROWS = (1, 3, 64, 64), (2, 16, 64)


class Chain(nn.Module):
    """Modules and functions, one after another."""

    def __init__(self, *parts) -> None:
        super().__init__()
        self.parts = parts
        self.held = nn.ModuleList(p for p in parts if isinstance(p, nn.Module))

    def forward(self, x: Tensor):
        for p in self.parts:
            x = p(x)
        return x


class Attention(nn.Module):
    """Attention with a residual and a norm; of normalised queries and keys, as in Swin v2, where that is asked for."""

    def __init__(self, cosine: bool) -> None:
        super().__init__()
        self.cosine = cosine
        self.qkv, self.out, self.norm = nn.Linear(64, 192), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, 4, 16).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.cosine:
            y = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) * 10).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.norm(x + self.out(y.transpose(1, 2).reshape(b, t, 64)))


def rms(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def routed(x: Tensor) -> tuple[Tensor, Tensor]:
    values, places = F.softmax(x, dim=-1, dtype=torch.float).topk(4, -1)
    return (values / values.sum(-1, keepdim=True)).to(x.dtype), places


MODULES = {
    "conv, layer norm": lambda: (Chain(nn.Conv2d(3, 32, 16, 16), lambda x: x.permute(0, 2, 3, 1), nn.LayerNorm(32)), IMAGE),
    "linear, layer norm": lambda: (Chain(nn.Linear(64, 48), nn.LayerNorm(48)), ROWS),
    "linear, layer norm, gelu": lambda: (Chain(nn.Linear(64, 48), nn.LayerNorm(48), F.gelu), ROWS),
    "router": lambda: (Chain(nn.Linear(64, 16, bias=False), routed), ROWS),
    "softmax": lambda: (Chain(nn.Linear(64, 16), lambda x: x.softmax(-1)), ROWS),
    "log softmax": lambda: (Chain(nn.Linear(64, 16), lambda x: x.log_softmax(-1)), ROWS),
    "rms norm in f32": lambda: (Chain(nn.Linear(64, 32, bias=False), rms), ROWS),
    "rms norm": lambda: (Chain(nn.Linear(64, 32), nn.RMSNorm(32)), ROWS),
    "attention, norm": lambda: (Attention(cosine=False), ROWS),
    "cosine attention": lambda: (Attention(cosine=True), ROWS),
    "group norm": lambda: (Chain(nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), F.silu), (1, 3, 16, 16)),
    "batch norm": lambda: (Chain(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), F.relu), (1, 3, 16, 16)),
    "normalised": lambda: (Chain(nn.Linear(64, 48), lambda x: F.normalize(x, dim=-1)), ROWS),
    "softplus": lambda: (Chain(nn.Linear(64, 48), F.softplus), ROWS),
    "gelu, pool": lambda: (Chain(nn.Conv2d(3, 32, 3), F.gelu, nn.MaxPool2d(2)), (1, 3, 18, 18)),
    "standardised": lambda: (
        Chain(nn.Linear(64, 48), lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)),
        ROWS,
    ),
}
CASES = [
    pytest.param(name, dtype, devices, marks=() if name == "conv, layer norm" and devices < 8 else pytest.mark.slow)
    for name in MODULES for dtype in ("bfloat16", "float16") for devices in (1, 2, 8)
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "dtype", "devices"), CASES)
def test_proposals_are_proved(name: str, dtype: str, devices: int) -> None:
    torch.manual_seed(0)
    module, shape = MODULES[name]()
    kind = getattr(torch, dtype)
    build = tapestry.compile(
        module.to(kind).eval(),
        example_inputs=(torch.randn(shape).to(kind),),
        devices=devices,
        topology="h100",
        target="triton:sm90",
    )
    assert build.kernels and (
        name != "conv, layer norm" or devices > 1 or len(build.build.plan.graph.ops) == 1
    )  # a norm is fused in 16 bits, too
