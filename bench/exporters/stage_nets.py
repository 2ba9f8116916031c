"""The two models of PopRT's auto-sharding examples, in their shape and narrow: a DeBERTa and a ViT-L.

Weights are random. Sizes are small, so that every candidate of the examples can be compiled and run here.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor, nn

WIDTH, HEADS = 128, 4


def heads(x: Tensor) -> Tensor:
    """``[batch, cells, width]`` as ``[batch, heads, cells, width / heads]``."""
    return x.reshape(*x.shape[:2], HEADS, -1).transpose(1, 2)


class Disentangled(nn.Module):
    """DeBERTa's attention: content to content, content to position and position to content (He et al., 2021, equation 4)."""

    def __init__(self, cells: int, span: int) -> None:
        super().__init__()
        self.query_proj, self.key_proj, self.value_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.pos_key_proj, self.pos_query_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        at = torch.arange(cells)
        self.register_buffer("distance", (at[:, None] - at[None, :] + span).clamp(0, 2 * span - 1), persistent=False)

    def forward(self, x: Tensor, relative: Tensor) -> Tensor:
        q, k, v = heads(self.query_proj(x)), heads(self.key_proj(x)), heads(self.value_proj(x))
        near = self.distance.expand(*q.shape[:2], -1, -1)
        to_position = q @ heads(self.pos_key_proj(relative)).transpose(-1, -2)
        to_content = k @ heads(self.pos_query_proj(relative)).transpose(-1, -2)
        scores = q @ k.transpose(-1, -2) + to_position.gather(-1, near) + to_content.gather(-1, near).transpose(-1, -2)
        found = (scores * (3 * WIDTH // HEADS) ** -0.5).softmax(-1) @ v
        return found.transpose(1, 2).flatten(2)


class DebertaLayer(nn.Module):
    """Attention, then two products; the norms behind them."""

    def __init__(self, cells: int, span: int) -> None:
        super().__init__()
        self.attention, self.dense = Disentangled(cells, span), nn.Linear(WIDTH, WIDTH)
        self.intermediate, self.output = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, relative: Tensor) -> Tensor:
        x = self.norm_1(x + self.dense(self.attention(x, relative)))
        return self.norm_2(x + self.output(nn.functional.gelu(self.intermediate(x))))


class Deberta(nn.Module):
    """Embeddings and layers: tokens ``[1, cells]`` to hidden states ``[1, cells, WIDTH]``."""

    def __init__(self, layers: int = 6, cells: int = 128, span: int = 32, words: int = 8192) -> None:
        super().__init__()
        self.embeddings, self.norm = nn.Embedding(words, WIDTH), nn.LayerNorm(WIDTH)
        self.relative = nn.Parameter(torch.randn(1, 2 * span, WIDTH) * 0.02)
        self.layer = nn.ModuleList(DebertaLayer(cells, span) for _ in range(layers))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.norm(self.embeddings(input_ids))
        for layer in self.layer:
            x = layer(x, self.relative)
        return x


class Attention(nn.Module):
    """Multi-head attention with one product for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in self.in_proj(x).chunk(3, -1))
        weights = ((q @ k.transpose(-1, -2)) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """Norms before attention and before the products."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.self_attention, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ViT(nn.Module):
    """torchvision's ``vit_l_16`` in its 24 layers and its names: an image ``[1, 3, 64, 64]`` to classes ``[1, 100]``."""

    def __init__(self, layers: int = 24) -> None:
        super().__init__()
        self.conv_proj, self.class_token = nn.Conv2d(3, WIDTH, 16, 16), nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embedding, self.ln = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02), nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(OrderedDict((f"encoder_layer_{k}", EncoderLayer()) for k in range(layers)))
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.conv_proj(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token, patches], 1) + self.pos_embedding
        return self.head(self.ln(self.layers(x))[:, 0])


def export(name: str, folder: Path) -> Path:
    """``deberta_like`` or ``vit_l_like`` as an ONNX file."""
    torch.manual_seed(0)
    module, x = {
        "deberta_like": lambda: (Deberta(), torch.randint(0, 8192, (1, 128))),
        "vit_l_like": lambda: (ViT(), torch.randn(1, 3, 64, 64)),
    }[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older exporter says that there is a newer one
        torch.onnx.export(module.eval(), (x,), str(folder / f"{name}.onnx"), dynamo=False, opset_version=17)
    return folder / f"{name}.onnx"
