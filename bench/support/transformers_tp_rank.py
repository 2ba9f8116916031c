"""One rank of a tiny model of transformers under a tensor-parallel plan, by transformers' own classes, on gloo.

``RANK=0 WORLD_SIZE=2 … python -m bench.support.transformers_tp_rank NAME PLAN.json OUT.json``; rank 0 writes how far the
logits are from those of the whole model. The plan takes the place of the one that the architecture ships.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

TOKENS = 6


def model_of(name: str) -> Any:
    """A tiny model with random weights, the same in every process."""
    import transformers

    from bench.support.transformers_sizes import TINY

    config_class = transformers.CONFIG_MAPPING[name]
    known = config_class().to_dict()
    config = config_class(**{k: v for k, v in TINY.items() if k in known})
    config._attn_implementation = "eager"
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


def main() -> None:
    """Run whole, cut, run again."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    name, plan = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    dist.init_process_group("gloo")
    model = model_of(name)
    whole = logits(model)
    cut = copy.deepcopy(model)
    type(cut)._tp_plan = cut._tp_plan = {}
    config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    concrete, _, _ = cut._resolve_parallel_plans(config)
    apply_tensor_parallelism(cut, mesh, concrete)
    found = logits(cut)
    parts = sum(hasattr(p, "to_local") for p in cut.parameters())
    if dist.get_rank() == 0:
        error = float((found - whole).abs().max() / whole.abs().max())
        Path(sys.argv[3]).write_text(json.dumps({"rel_err": error, "cut_parameters": parts}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
