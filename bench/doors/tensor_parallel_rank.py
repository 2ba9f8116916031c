"""One rank of tiny models of transformers under tensor-parallel plans, by transformers' own classes, on gloo.

``RANK=0 WORLD_SIZE=2 … python -m bench.doors.tensor_parallel_rank FOLDER`` takes the plans ``NAME.plan.json`` of a folder;
rank 0 writes to ``out.json`` how far logits are from those of the whole models. A plan takes the place of the shipped one.
"""

from __future__ import annotations

import copy
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

TOKENS = 6
TINY: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
    "num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": 64, "n_embd": 32, "n_head": 4, "n_layer": 1,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "rotary_dim": 8, "n_positions": 64, "n_inner": 48, "ffn_hidden_size": 48,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0, "use_cache": False,
    "num_layers": 1, "num_heads": 4, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "d_model": 32,
    "tie_word_embeddings": False, "multi_query": False, "layer_types": None, "sliding_window": 64,
    "attention_types": [[["global"], 1]], "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
}  # fmt: skip


def model_of(name: str) -> Any:
    """A tiny model with random weights, the same in every process."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[name]
    known = config_class().to_dict()
    config = config_class(**{k: v for k, v in TINY.items() if k in known})
    config._attn_implementation = "eager"
    config._experts_implementation = "batched_mm"  # the one without branches on data, which exports
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0, 0.15)
    return model.eval().float()


def logits(model: Any) -> torch.Tensor:
    """Of a few tokens."""
    ids = torch.arange(3, 3 + TOKENS)[None]
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def compared(name: str, plan: dict[str, str], mesh: Any) -> dict[str, Any]:
    """One architecture, whole and cut: how far logits are apart, and how many parameters are in parts."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = model_of(name)
    whole = logits(model)
    cut = copy.deepcopy(model)
    type(cut)._tp_plan = cut._tp_plan = {}
    concrete, _, _ = cut._resolve_parallel_plans(DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan))
    apply_tensor_parallelism(cut, mesh, concrete)
    found = logits(cut)
    parts = sum(hasattr(p, "to_local") for p in cut.parameters())
    return {"rel_err": float((found - whole).abs().max() / whole.abs().max()), "cut_parameters": parts}


def main() -> None:
    """Every plan of a folder, in the order of names; rank 0 writes what came of them."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    rows: dict[str, Any] = {}
    for path in sorted(folder.glob("*.plan.json")):
        name = path.name.removesuffix(".plan.json")
        try:
            rows[name] = compared(name, json.loads(path.read_text()), mesh)
        except Exception as e:  # on all ranks alike: a plan that does not run is a row
            rows[name] = {"error": f"{type(e).__name__}: {e}".replace("\n", " ")[:300]}
    if dist.get_rank() == 0:
        (folder / "out.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
