"""Sizes of tiny models of transformers."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
    "num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 64, "n_embd": 32, "n_head": 4, "n_layer": 2,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "rotary_dim": 8, "n_positions": 64, "n_inner": 48, "ffn_hidden_size": 48,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0, "use_cache": False,
    "num_layers": 2, "num_heads": 4, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "d_model": 32,
    "tie_word_embeddings": False, "multi_query": False, "layer_types": None, "sliding_window": None,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
}  # fmt: skip
