"""Small configurations of architectures of transformers and of torchvision, exported as their users would.

A net is a function that makes a module and its inputs, by name. `TRANSFORMERS` has at least two of each family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.exporters.corpus_exports import without_own_operators

Made = tuple[torch.nn.Module, dict[str, torch.Tensor]]
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
MOE: dict[str, Any] = {**KV, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
BOTH: dict[str, Any] = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 99,
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SOUND: dict[str, Any] = {
    **SMALL, "conv_dim": (32, 32, 32), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
# name: (family, model, configuration, sizes)
TRANSFORMERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "llama": ("dense", "LlamaForCausalLM", "LlamaConfig", KV),
    "mistral": ("dense", "MistralForCausalLM", "MistralConfig", KV),
    "qwen2": ("dense", "Qwen2ForCausalLM", "Qwen2Config", KV),
    "qwen3": ("dense", "Qwen3ForCausalLM", "Qwen3Config", {**KV, "head_dim": 16}),
    "gemma2": ("dense", "Gemma2ForCausalLM", "Gemma2Config", {**KV, "head_dim": 16}),
    "gemma3": ("dense", "Gemma3ForCausalLM", "Gemma3TextConfig", {**KV, "head_dim": 16}),
    "phi3": ("dense", "Phi3ForCausalLM", "Phi3Config", {**KV, "pad_token_id": 0}),
    "gpt2": ("dense", "GPT2LMHeadModel", "GPT2Config", GPT),
    "gpt-neox": ("dense", "GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL),
    "opt": ("dense", "OPTForCausalLM", "OPTConfig", {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "bloom": ("dense", "BloomForCausalLM", "BloomConfig", {**SMALL, "n_layer": 2, "n_head": 4}),
    "mixtral": ("experts", "MixtralForCausalLM", "MixtralConfig", {**KV, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("experts", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**MOE, "shared_expert_intermediate_size": 48}),
    "olmoe": ("experts", "OlmoeForCausalLM", "OlmoeConfig", {**MOE, "pad_token_id": 0}),
    "deepseek-v3": (
        "experts", "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {
            **MOE, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
            "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        },
    ),
    "bert": ("encoder", "BertModel", "BertConfig", SMALL),
    "roberta": ("encoder", "RobertaModel", "RobertaConfig", SMALL),
    "distilbert": (
        "encoder", "DistilBertModel", "DistilBertConfig",
        {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4, "vocab_size": 99},
    ),
    "modernbert": ("encoder", "ModernBertModel", "ModernBertConfig", {**SMALL, **TOKENS, "cls_token_id": 1, "sep_token_id": 2}),
    "deberta-v2": (
        "encoder", "DebertaV2Model", "DebertaV2Config",
        {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    ),
    "t5": (
        "encoder and decoder", "T5ForConditionalGeneration", "T5Config",
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 99, "decoder_start_token_id": 0},
    ),
    "bart": ("encoder and decoder", "BartForConditionalGeneration", "BartConfig", {**BOTH, "max_position_embeddings": 64}),
    "mamba": ("state space", "MambaForCausalLM", "MambaConfig", {**SMALL, "state_size": 8}),
    "mamba2": (
        "state space", "Mamba2ForCausalLM", "Mamba2Config",
        {**SMALL, "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    ),
    "vit": ("vision", "ViTModel", "ViTConfig", IMAGE),
    "swin": (
        "vision", "SwinModel", "SwinConfig",
        {"image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    "dinov2": ("vision", "Dinov2Model", "Dinov2Config", IMAGE),
    "convnext": (
        "convolution", "ConvNextModel", "ConvNextConfig",
        {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 2, 1], "image_size": 64},
    ),
    "whisper": (
        "speech", "WhisperForConditionalGeneration", "WhisperConfig",
        {
            **BOTH, **TOKENS, "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32,
            "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
        },
    ),
    "wav2vec2": ("speech", "Wav2Vec2ForCTC", "Wav2Vec2Config", SOUND),
    "hubert": ("speech", "HubertModel", "HubertConfig", SOUND),
}  # fmt: skip
VISION = ("resnet18", "mobilenet_v2", "vgg11", "densenet121", "efficientnet_b0", "convnext_tiny")


def _of_transformers(family: str, model: str, config: str, sizes: dict[str, Any]) -> Made:
    import transformers

    module: Any = getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()
    ids = torch.randint(1, 99, (2, 8))
    if module.main_input_name == "pixel_values":
        return module, {"pixel_values": torch.randn(2, 3, sizes["image_size"], sizes["image_size"])}
    if module.main_input_name == "input_values":
        return module, {"input_values": torch.randn(2, 800)}
    if module.main_input_name == "input_features":
        return module, {"input_features": torch.randn(2, 16, 32), "decoder_input_ids": ids[:, :7]}
    return module, {"input_ids": ids, **({"decoder_input_ids": ids[:, :7]} if family == "encoder and decoder" else {})}


def _vision(name: str) -> Made:
    import torchvision

    return getattr(torchvision.models, name)().eval(), {"x": torch.randn(1, 3, 64, 64)}


def nets() -> dict[str, Callable[[], Made]]:
    """A module and its inputs by name, of what is installed."""
    without_own_operators()
    return {n: lambda row=row: _of_transformers(*row) for n, row in TRANSFORMERS.items()} | {
        n: lambda n=n: _vision(n) for n in VISION
    }
