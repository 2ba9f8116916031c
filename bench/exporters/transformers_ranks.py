"""Tiny models of transformers, whole and as each rank of their shipped tensor-parallel plan, for `bench prove plans`.

Runs in an environment of its own that has torch, onnxscript and transformers (5.18 was used), not in the project's:
``python bench/exporters/transformers_ranks.py FOLDER [NAME …]``. The plan is applied by transformers' own classes
(`transformers.distributed.tensor_parallel`); in place of a process group there are stand-ins that record each collective
as a `DistCollective` node and take this rank's part where a tensor is distributed. Embeddings are an input, so that their
rules are left out.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from transformers.distributed import tensor_parallel as tp

RANKS = 2
TINY: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
    "num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": 64, "n_embd": 32, "n_head": 4, "n_layer": 1,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 0, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0, "use_cache": False,
    "decoder_sparse_step": 1, "audio_token_id": 3, "audio_bos_token_id": 4, "audio_delay_token_id": 5,
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {}, {"num_key_value_heads": 4}, {"num_hidden_layers": 6}, {"moe_intermediate_size": [16, 16]}, {"head_dim": 64},
    {"head_dim": 128}, {"mlp_layer_types": ["dense"]}, {"head_dim": 64, "num_hidden_layers": 4},
]  # fmt: skip
CHOSEN: dict[str, dict[str, Any]] = {}  # by architecture: the variant of which its model runs


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """The sum over ranks."""
    attributes = {"collective_operation": "ALL_REDUCE", "reduce_op": "SUM", "root": -1, "nb_rank": RANKS}
    return torch.onnx.ops.symbolic("tap::DistCollective", (x,), attributes, dtype=x.dtype, shape=x.shape, version=1)


def all_gather(x: torch.Tensor) -> torch.Tensor:
    """All ranks' values along axis 0."""
    attributes = {"collective_operation": "ALL_GATHER", "reduce_op": "NONE", "root": -1, "nb_rank": RANKS}
    shape = (RANKS * x.shape[0], *x.shape[1:])
    return torch.onnx.ops.symbolic("tap::DistCollective", (x,), attributes, dtype=x.dtype, shape=shape, version=1)


HERE = SimpleNamespace(rank=0)


class _Kind(type):
    def __instancecheck__(cls, x: object) -> bool:
        return hasattr(x, "placements")


class Distributed(metaclass=_Kind):
    """A tensor with a placement, as far as the rules use one."""

    def __init__(self, local: torch.Tensor, placement: Any) -> None:
        self.local, self.placements = local, (placement,)

    @staticmethod
    def from_local(x: torch.Tensor, mesh: Any, placements: Any, **_: Any) -> Distributed:
        """This rank's part of a tensor."""
        return Distributed(x, placements[0])

    def redistribute(self, placements: Any) -> Distributed:
        """The tensor under another placement."""
        old, new, x = self.placements[0], placements[0], self.local
        if isinstance(old, Partial):
            x, old = all_reduce(x), Replicate()
        if isinstance(old, Shard) and old != new:
            x = all_gather(x.transpose(0, old.dim).contiguous()).transpose(0, old.dim)
            old = Replicate()
        if isinstance(new, Shard) and isinstance(old, Replicate):
            x = x.chunk(RANKS, new.dim)[HERE.rank]
        return Distributed(x, new)

    def to_local(self, **_: Any) -> torch.Tensor:
        """This rank's part."""
        return self.local


def _distribute(t: torch.Tensor, mesh: Any, placements: Any, **_: Any) -> torch.Tensor:
    """This rank's part of a parameter; a strided shard is cut within each of its sections."""
    (p,) = placements
    if isinstance(p, Replicate):
        return t.detach().clone()
    sections = t.detach().chunk(getattr(p, "split_factor", 1), p.dim)
    return torch.cat([s.chunk(RANKS, p.dim)[HERE.rank] for s in sections], p.dim).contiguous()


class _Same:
    @staticmethod
    def apply(x: torch.Tensor, *_: Any) -> torch.Tensor:
        """The value itself: what differs is its gradient."""
        return x


class _Summed:
    @staticmethod
    def apply(x: torch.Tensor, *_: Any) -> torch.Tensor:
        """The sum over ranks."""
        return all_reduce(x)


def _stand_in() -> Any:
    """Put stand-ins for the process group under transformers' rules; a mesh of one axis."""
    tp.DTensor, tp.distribute_tensor = Distributed, _distribute
    tp._AllReduceBackward, tp._AllReduceForward = _Same, _Summed
    tp.dist = SimpleNamespace(all_reduce=lambda t, **_: t.copy_(all_reduce(t)), get_world_size=lambda *_: RANKS)
    return SimpleNamespace(
        size=lambda: RANKS, ndim=1, get_group=lambda *_: None, get_local_rank=lambda: HERE.rank, shape=(RANKS,)
    )


class _Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.m = model
        self.placed = "position_ids" in inspect.signature(model.forward).parameters

    def forward(self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The first output of a model of embedded tokens; a whole mask is given, because making one is data-dependent."""
        more = {"position_ids": positions} if self.placed else {}
        out = self.m(inputs_embeds=x, attention_mask=mask, use_cache=False, return_dict=True, **more)
        return out.logits if hasattr(out, "logits") else out.last_hidden_state


def _tiny(name: str, variant: dict[str, Any]) -> torch.nn.Module:
    """A tiny model of an architecture, with some sizes of its own."""
    config_class = transformers.CONFIG_MAPPING[name]
    known = config_class().to_dict()
    config = config_class(**{k: v for k, v in {**TINY, **variant}.items() if k in known})
    config._attn_implementation = "eager"
    config._experts_implementation = "batched_mm"  # no loop over the experts that are hit: that depends on the data
    torch.manual_seed(0)
    model = _class_of(config_class)._from_config(config, attn_implementation="eager")
    for p in model.parameters():
        torch.nn.init.uniform_(p, -0.5, 0.5)
    return model.eval().float()


def _class_of(config_class: type) -> Any:
    """The class of an architecture that has a head, or the one that has none, from the module beside its configuration."""
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING
    for found in (m[config_class] for m in known if config_class in m):
        return found
    module = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    mine = [c for c in vars(module).values() if inspect.isclass(c) and getattr(c, "config_class", None) is config_class]
    mine += [c for c in vars(module).values() if inspect.isclass(c) and getattr(c, "config", None) is config_class]
    ends = [c for end in ("ForCausalLM", "Model") for c in mine if c.__name__.endswith(end) and "PreTrained" not in c.__name__]
    return ends[0]


def _model(name: str) -> torch.nn.Module:
    """A model that runs: not every architecture takes every tiny size."""
    problem = Exception()
    for variant in VARIANTS if name not in CHOSEN else [CHOSEN[name]]:
        try:
            model = _tiny(name, variant)
            with torch.no_grad():
                _Logits(model)(*_inputs(model))
        except Exception as e:
            problem = problem if problem.args else e
            continue
        CHOSEN[name] = variant
        return model
    raise problem


def _inputs(model: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    width = model.config.get_text_config().hidden_size
    return torch.zeros(1, 6, width), torch.zeros(1, 1, 6, 6), torch.arange(6)[None]


def _export(model: torch.nn.Module, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        torch.onnx.export(
            _Logits(model), _inputs(model), str(path), dynamo=True, optimize=False, external_data=False,
            input_names=["x", "mask", "positions"], output_names=["y"], verbose=False,
        )  # fmt: skip


def export(name: str, folder: Path) -> None:
    """One architecture: ``NAME/model.onnx`` and ``NAME/program/rank*.onnx``."""
    whole = _model(name)
    if not whole.tp_plan:
        raise ValueError("no plan")
    _export(whole, folder / name / "model.onnx")
    mesh = _stand_in()
    for rank in range(RANKS):
        HERE.rank = rank
        model = _model(name)
        shapes = {n: p.shape for n, p in model.named_parameters(remove_duplicate=False)}
        tp.apply_tensor_parallelism(model, mesh)
        for n, p in model.named_parameters(remove_duplicate=False):
            if p.shape != shapes[n]:
                p.placements, p.to_local = (Shard(0),), (lambda p=p: p)
        for m in model.modules():
            own = list(m.parameters(recurse=False))
            if any(hasattr(p, "placements") for p in own):  # rules ask while torch.export has put tensors without them there
                m.parameters = lambda recurse=True, own=own: iter(own)
        _export(model, folder / name / "program" / f"rank{rank}.onnx")


def main() -> None:
    """Export what is named, or every architecture of transformers that ships a plan."""
    folder = Path(sys.argv[1])
    names = sys.argv[2:] or [n for n, c in transformers.CONFIG_MAPPING.items() if getattr(c, "base_model_tp_plan", None)]
    for name in names:
        if (folder / name / "program" / f"rank{RANKS - 1}.onnx").is_file():
            continue
        try:
            export(name, folder)
            print(name, "exported", flush=True)
        except Exception as e:  # whatever a model's own code or the exporter says: the next one may go
            print(name, "not exported:", type(e).__name__, str(e).replace("\n", " ")[-700:], flush=True)


if __name__ == "__main__":
    main()
