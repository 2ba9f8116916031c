"""Models of transformers at the sizes that their makers published, with two layers; the same architectures, small."""

from __future__ import annotations

from typing import Any

import torch

Sizes = dict[str, Any]
LAYERS = 2
NO_IDS: Sizes = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TOKENS = (8, 2048)


def _decoder(hidden: int, inner: int, heads: int, groups: int, vocabulary: int, **more: Any) -> Sizes:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": groups,
        "vocab_size": vocabulary, "num_hidden_layers": LAYERS, **more,
    }  # fmt: skip


def _encoder(hidden: int, inner: int, heads: int, **more: Any) -> Sizes:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "num_hidden_layers": LAYERS}
    return {**sizes, **more}


def _both(width: int, inner: int, heads: int, **more: Any) -> Sizes:
    of = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in
          (("layers", LAYERS), ("ffn_dim", inner), ("attention_heads", heads))}  # fmt: skip
    return {"d_model": width, **of, **more}


# name: (model, configuration, sizes, input: batch × tokens, or batch × pixels of an edge)
ZOO: dict[str, tuple[str, str, Sizes, tuple[int, ...]]] = {
    "Llama-3.1-8B": ("LlamaForCausalLM", "LlamaConfig", _decoder(4096, 14336, 32, 8, 128256), TOKENS),
    "Gemma-2-9B": (
        "Gemma2ForCausalLM", "Gemma2Config",
        _decoder(3584, 14336, 16, 8, 256000, head_dim=256, sliding_window=4096, query_pre_attn_scalar=256), TOKENS,
    ),
    "Gemma-3-12B": (
        "Gemma3ForCausalLM", "Gemma3TextConfig",
        _decoder(3840, 15360, 16, 8, 262208, head_dim=256, sliding_window=1024,
                 layer_types=["sliding_attention", "full_attention"]), TOKENS,
    ),
    "Phi-3-mini": ("Phi3ForCausalLM", "Phi3Config", _decoder(3072, 8192, 32, 32, 32064, **NO_IDS), TOKENS),
    "GPT-NeoX-20B": (
        "GPTNeoXForCausalLM", "GPTNeoXConfig",
        _encoder(6144, 24576, 64, vocab_size=50432, max_position_embeddings=2048), TOKENS,
    ),
    "Falcon-7B": (
        "FalconForCausalLM", "FalconConfig",
        {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": LAYERS, "vocab_size": 65024, "multi_query": True,
         "parallel_attn": True, "bias": False, "alibi": False, "new_decoder_architecture": False}, TOKENS,
    ),
    "BLOOM-7B1": (
        "BloomForCausalLM", "BloomConfig", {"hidden_size": 4096, "n_head": 32, "n_layer": LAYERS, "vocab_size": 250880}, TOKENS,
    ),
    "OPT-6.7B": (
        "OPTForCausalLM", "OPTConfig",
        {"hidden_size": 4096, "ffn_dim": 16384, "num_attention_heads": 32, "num_hidden_layers": LAYERS, "vocab_size": 50272,
         "word_embed_proj_dim": 4096}, (8, 1024),
    ),
    "StarCoder2-7B": (
        "Starcoder2ForCausalLM", "Starcoder2Config", _decoder(4608, 18432, 36, 4, 49152, sliding_window=4096), TOKENS,
    ),
    "Command-R-35B": ("CohereForCausalLM", "CohereConfig", _decoder(8192, 22528, 64, 64, 256000), TOKENS),
    "GLM-4-9B": ("GlmForCausalLM", "GlmConfig", _decoder(4096, 13696, 32, 2, 151552, head_dim=128, **NO_IDS), TOKENS),
    "Mixtral-8x7B": (
        "MixtralForCausalLM", "MixtralConfig", _decoder(4096, 14336, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
        TOKENS,
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        _decoder(2048, 6144, 32, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
                 norm_topk_prob=True), TOKENS,
    ),
    "OLMoE-1B-7B": (
        "OlmoeForCausalLM", "OlmoeConfig",
        _decoder(2048, 1024, 16, 16, 50304, num_experts=64, num_experts_per_tok=8), TOKENS,
    ),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        _decoder(7168, 18432, 128, 128, 129280, first_k_dense_replace=1, n_routed_experts=256, num_experts_per_tok=8, n_group=8,
                 topk_group=4, moe_intermediate_size=2048, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
                 qk_nope_head_dim=128, v_head_dim=128), TOKENS,
    ),
    "GPT-OSS-20B": (
        "GptOssForCausalLM", "GptOssConfig",
        _decoder(2880, 2880, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
                 layer_types=["sliding_attention", "full_attention"]), TOKENS,
    ),
    "Qwen3-Next-80B-A3B": (
        "Qwen3NextForCausalLM", "Qwen3NextConfig",
        _decoder(2048, 5120, 16, 2, 151936, head_dim=256, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
                 shared_expert_intermediate_size=512, linear_num_key_heads=16, linear_num_value_heads=32,
                 layer_types=["linear_attention", "full_attention"]), (8, 512),
    ),
    "Mamba-2.8B": (
        "MambaForCausalLM", "MambaConfig",
        {"hidden_size": 2560, "state_size": 16, "num_hidden_layers": LAYERS, "vocab_size": 50280}, (8, 128),
    ),
    "Mamba2-2.7B": (
        "Mamba2ForCausalLM", "Mamba2Config",
        {"hidden_size": 2560, "state_size": 128, "num_heads": 80, "head_dim": 64, "n_groups": 1, "chunk_size": 256,
         "num_hidden_layers": LAYERS, "vocab_size": 50288}, TOKENS,
    ),
    "RWKV-4-3B": (
        "RwkvForCausalLM", "RwkvConfig",
        {"hidden_size": 2560, "attention_hidden_size": 2560, "num_hidden_layers": LAYERS, "vocab_size": 50277}, (8, 128),
    ),
    "T5-3B": (
        "T5ForConditionalGeneration", "T5Config",
        {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_heads": 32, "num_layers": LAYERS, "vocab_size": 32128,
         "decoder_start_token_id": 0}, (8, 512),
    ),
    "BART-large": (
        "BartForConditionalGeneration", "BartConfig", _both(1024, 4096, 16, vocab_size=50265, max_position_embeddings=1024),
        (8, 512),
    ),
    "Whisper-large-v3": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        _both(1280, 5120, 20, vocab_size=51866, num_mel_bins=128, max_source_positions=1500, max_target_positions=448),
        (8, 3000, 448),
    ),
    "BERT-large": ("BertForMaskedLM", "BertConfig", _encoder(1024, 4096, 16, vocab_size=30522), (32, 512)),
    "RoBERTa-large": (
        "RobertaForMaskedLM", "RobertaConfig",
        _encoder(1024, 4096, 16, vocab_size=50265, max_position_embeddings=514), (32, 512),
    ),
    "DeBERTa-v2-xlarge": (
        "DebertaV2ForMaskedLM", "DebertaV2Config",
        _encoder(1536, 6144, 24, vocab_size=128100, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=256,
                 share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False, type_vocab_size=0,
                 conv_kernel_size=3, conv_act="gelu"), (8, 512),
    ),
    "ELECTRA-large": (
        "ElectraForPreTraining", "ElectraConfig", _encoder(1024, 4096, 16, embedding_size=1024, vocab_size=30522), (32, 512),
    ),
    "ViT-large": ("ViTForImageClassification", "ViTConfig", _encoder(1024, 4096, 16, image_size=224, patch_size=16), (32, 224)),
    "Swin-large": (
        "SwinForImageClassification", "SwinConfig",
        {"embed_dim": 192, "depths": [2, 2], "num_heads": [6, 12], "window_size": 7, "image_size": 224, "patch_size": 4},
        (32, 224),
    ),
    "Swin-v2-base": (
        "Swinv2ForImageClassification", "Swinv2Config",
        {"embed_dim": 128, "depths": [2, 2], "num_heads": [4, 8], "window_size": 8, "image_size": 256, "patch_size": 4},
        (32, 256),
    ),
    "SAM-ViT-H": (
        "SamVisionModel", "SamVisionConfig",
        {"hidden_size": 1280, "mlp_dim": 5120, "num_attention_heads": 16, "num_hidden_layers": LAYERS, "image_size": 1024,
         "patch_size": 16, "window_size": 14, "global_attn_indexes": [1]}, (8, 1024),
    ),
    "CLIP-ViT-L": (
        "CLIPModel", "CLIPConfig",
        {"text_config": _encoder(768, 3072, 12, vocab_size=49408, projection_dim=768),
         "vision_config": _encoder(1024, 4096, 16, image_size=224, patch_size=14, projection_dim=768), "projection_dim": 768},
        (32, 224, 77),
    ),
    "SigLIP-so400m": (
        "SiglipModel", "SiglipConfig",
        {"text_config": _encoder(1152, 4304, 16, vocab_size=32000, max_position_embeddings=64),
         "vision_config": _encoder(1152, 4304, 16, image_size=384, patch_size=14)}, (8, 384, 64),
    ),
    "DINOv2-giant": (
        "Dinov2ForImageClassification", "Dinov2Config",
        {"hidden_size": 1536, "num_attention_heads": 24, "num_hidden_layers": LAYERS, "mlp_ratio": 4, "use_swiglu_ffn": True,
         "image_size": 518, "patch_size": 14}, (8, 518),
    ),
    "ConvNeXt-v2-large": (
        "ConvNextV2ForImageClassification", "ConvNextV2Config",
        {"hidden_sizes": [192, 384, 768, 1536], "depths": [1, 1, 2, 1], "image_size": 224}, (32, 224),
    ),
    "SegFormer-B5": (
        "SegformerForSemanticSegmentation", "SegformerConfig",
        {"hidden_sizes": [64, 128, 320, 512], "depths": [1, 1, 2, 1], "decoder_hidden_size": 768, "num_labels": 150}, (8, 640),
    ),
    "DETR-R50": (
        "DetrForObjectDetection", "DetrConfig",
        _both(256, 2048, 8, num_queries=100, num_labels=91, backbone=None, use_timm_backbone=False,
              backbone_config={"model_type": "resnet", "embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048],
                               "depths": [1, 1, 2, 1], "out_features": ["stage4"]}), (8, 800),
    ),
}  # fmt: skip

SMALL: Sizes = {  # what a size is in a small model; other keys stay
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 99, "ffn_dim": 96, "word_embed_proj_dim": 64, "n_head": 4, "num_local_experts": 4, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "n_routed_experts": 8,
    "n_group": 2, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "state_size": 8, "num_heads": 4, "chunk_size": 8, "d_model": 64, "d_kv": 16, "d_ff": 96,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32, "max_position_embeddings": 64,
    "embedding_size": 64, "embed_dim": 32, "mlp_dim": 96, "projection_dim": 32, "attention_hidden_size": 64,
    "position_buckets": 8, "decoder_hidden_size": 64, "num_queries": 10, "sliding_window": 4, "query_pre_attn_scalar": 16,
    "window_size": 4, "hidden_sizes": [16, 32, 64, 64], "num_labels": 7,
}  # fmt: skip
OWN_SMALL: dict[str, Sizes] = {  # where one size does not go with the others
    "Falcon-7B": {"num_attention_heads": 4}, "Command-R-35B": {"num_key_value_heads": 4},
    "DeepSeek-V3": {"num_key_value_heads": 4}, "Mamba2-2.7B": {"num_heads": 8},
    "Swin-large": {"num_heads": [2, 4]}, "Swin-v2-base": {"num_heads": [2, 4]},
}  # fmt: skip
EDGES = {"image_size": 32, "patch_size": 8}
SMALL_INPUT: dict[str, tuple[int, ...]] = {
    "Whisper-large-v3": (2, 32, 7), "CLIP-ViT-L": (2, 32, 7), "SigLIP-so400m": (2, 32, 7), "ConvNeXt-v2-large": (2, 64),
    "SegFormer-B5": (2, 64), "DETR-R50": (2, 64),
}  # fmt: skip


def _small(sizes: Sizes, own: Sizes) -> Sizes:
    """The same configuration, of small sizes."""
    out: Sizes = {}
    for k, v in sizes.items():
        if isinstance(v, dict):
            out[k] = _small(v, own)
        elif k == "patch_size":
            out[k] = min(v, EDGES[k])
        else:
            out[k] = own.get(k, EDGES.get(k, SMALL.get(k, v)))
    return out


def made(name: str, *, small: bool = False, seed: int = 0) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model and its inputs by name: on the meta device in bfloat16, or small, with random weights in float32."""
    import transformers

    model, config_class, sizes, shape = ZOO[name]
    if small:
        sizes = _small(sizes, OWN_SMALL.get(name, {}))
        shape = SMALL_INPUT.get(name, (2, 32) if "image_size" in sizes else (2, 8))
    config: Any = getattr(transformers, config_class)(**sizes)
    config.use_cache = False
    if getattr(config, "vocab_size", 0):
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):  # the makers' ids are beyond a small vocabulary
            value = getattr(config, key, None)
            if small and isinstance(value, int) and value >= config.vocab_size:
                setattr(config, key, NO_IDS[key])
    torch.manual_seed(seed)
    with torch.device("cpu" if small else "meta"):
        module = getattr(transformers, model)._from_config(config, dtype=torch.float32 if small else torch.bfloat16).eval()
    return module, _inputs(module, config, shape)


def _inputs(module: Any, config: Any, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Random tokens, pixels or spectra; of several modalities, both."""
    main, (batch, size, *more) = module.main_input_name, shape
    dtype = next(module.parameters()).dtype
    text = getattr(config, "text_config", None) or config
    ids = torch.randint(3, getattr(text, "vocab_size", 0) or 99, (batch, more[0] if more else size))
    pixels = torch.rand(batch, 3, size, size, dtype=dtype) if not hasattr(config, "num_mel_bins") else None
    if main == "pixel_values":
        return {"pixel_values": pixels}  # pyright: ignore[reportReturnType]
    if main == "input_features":
        return {"input_features": torch.randn(batch, config.num_mel_bins, size, dtype=dtype), "decoder_input_ids": ids}
    if type(module).__name__ in ("CLIPModel", "SiglipModel"):
        return {"input_ids": ids, "pixel_values": pixels}  # pyright: ignore[reportReturnType]
    return {"input_ids": ids, **({"decoder_input_ids": ids[:, : size // 4 or 1]} if config.is_encoder_decoder else {})}
