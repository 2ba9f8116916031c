"""Small configurations of twelve architectures of transformers and six of torchvision, exported as their users would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.exporters.corpus_exports import without_own_operators

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 99,
}
KV = {**SMALL, "num_key_value_heads": 2}
GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 99}
IMAGE: dict[str, Any] = {**SMALL, "image_size": 32, "patch_size": 8}
del IMAGE["vocab_size"]
MOE: dict[str, Any] = {**KV, "num_local_experts": 4, "num_experts_per_tok": 2}
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", KV),
    "mistral": ("MistralForCausalLM", "MistralConfig", KV),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", KV),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**KV, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**KV, "head_dim": 16}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**KV, "pad_token_id": 0}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL),
    "bert": ("BertModel", "BertConfig", SMALL),
    "roberta": ("RobertaModel", "RobertaConfig", SMALL),
    "vit": ("ViTModel", "ViTConfig", IMAGE),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4, "vocab_size": 99},
    ),
}
VISION = ("resnet18", "mobilenet_v2", "vgg11", "densenet121", "efficientnet_b0", "convnext_tiny")


def _language(model: str, config: str, sizes: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    import transformers

    module = getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()
    module.config.use_cache = False
    if "image_size" in sizes:
        return module, {"pixel_values": torch.randn(1, 3, sizes["image_size"], sizes["image_size"])}
    return module, {"input_ids": torch.randint(1, sizes["vocab_size"], (2, 8))}


def _vision(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    import torchvision

    return getattr(torchvision.models, name)().eval(), {"x": torch.randn(1, 3, 64, 64)}


def nets() -> dict[str, Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]]]:
    """A module and its inputs by name, of what is installed."""
    without_own_operators()
    return {n: lambda row=row: _language(*row) for n, row in TRANSFORMERS.items()} | {n: lambda n=n: _vision(n) for n in VISION}
