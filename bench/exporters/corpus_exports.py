"""Architectures of torchvision, timm and transformers, exported as their users would.

    PYTHON bench/exporters/corpus_exports.py FOLDER [NAME …]

Run it with an interpreter that has these packages (it imports nothing of ours). Each model is a file NAME.onnx in FOLDER, with
random weights, fixed sizes and the configuration that its publishers give, but for fewer layers or narrower ones where weights
would be large. What does not export is a line on standard error. A third of the names, by a hash of them, is the part that is
kept unopened (`kept_unopened`).
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

Case = tuple[Any, dict[str, Any]]
"""A module, and its inputs by name."""

VISION = (
    "alexnet", "vgg11", "squeezenet1_1", "resnet34", "densenet121", "googlenet", "inception_v3", "shufflenet_v2_x1_0",
    "mobilenet_v3_large", "mnasnet0_5", "efficientnet_b0", "regnet_y_400mf", "convnext_tiny", "swin_t", "maxvit_t",
)  # fmt: skip
SEGMENTATION = ("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")
VIDEO = ("r3d_18", "s3d", "mvit_v2_s")
TIMM = (
    "mixer_s32_224", "levit_128s", "ghostnet_100", "poolformer_s12", "res2net50_26w_4s", "hrnet_w18_small", "mobilevit_xs",
    "cait_xxs24_224", "edgenext_xx_small", "repvgg_a0", "pit_ti_224", "nf_regnet_b1", "coatnet_0_rw_224", "efficientvit_b0",
)  # fmt: skip
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}), "albert": ("AlbertModel", {}), "electra": ("ElectraModel", {}), "mpnet": ("MPNetModel", {}),
    "deberta_v2": ("DebertaV2Model", {}), "xlnet": ("XLNetModel", {"n_layer": 4, "d_model": 256, "n_head": 4, "d_inner": 1024}),
    "fnet": ("FNetModel", {}), "convbert": ("ConvBertModel", {}), "squeezebert": ("SqueezeBertModel", {}),
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 4}), "opt": ("OPTForCausalLM", {}), "bloom": ("BloomForCausalLM", {"n_layer": 4}),
    "gpt_neo": ("GPTNeoForCausalLM", {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}),
    "gptj": ("GPTJForCausalLM", {"n_layer": 4, "n_embd": 512, "n_head": 8, "rotary_dim": 32}),
    "falcon": ("FalconForCausalLM", {}), "mistral": ("MistralForCausalLM", {}), "mixtral": ("MixtralForCausalLM", {}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {}), "gemma2": ("Gemma2ForCausalLM", {}), "phi3": ("Phi3ForCausalLM", {}),
    "mamba": ("MambaForCausalLM", {"hidden_size": 256, "num_hidden_layers": 4}), "olmo2": ("Olmo2ForCausalLM", {}),
    "rwkv": ("RwkvForCausalLM", {"hidden_size": 256, "num_hidden_layers": 4, "attention_hidden_size": 256}),
    "t5": ("T5EncoderModel", {"num_layers": 4}), "longt5": ("LongT5EncoderModel", {"num_layers": 4, "d_model": 256}),
}  # fmt: skip
SPEECH: dict[str, tuple[str, dict[str, Any]]] = {
    "wav2vec2": ("Wav2Vec2Model", {"num_hidden_layers": 4}), "hubert": ("HubertModel", {"num_hidden_layers": 4}),
    "sew": ("SEWModel", {"num_hidden_layers": 4}), "data2vec_audio": ("Data2VecAudioModel", {"num_hidden_layers": 4}),
}  # fmt: skip
IMAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "segformer": ("SegformerForSemanticSegmentation", {}), "detr_like_vit": ("YolosModel", {"num_hidden_layers": 4}),
    "dinov2": ("Dinov2Model", {"num_hidden_layers": 4}), "beit": ("BeitModel", {"num_hidden_layers": 4}),
    "swinv2": ("Swinv2Model", {}), "mobilevitv2": ("MobileViTV2Model", {}), "cvt": ("CvtModel", {}),
    "poolformer": ("PoolFormerModel", {}), "pvt_v2": ("PvtV2Model", {}),
    "depth": ("DPTForDepthEstimation", {"num_hidden_layers": 12}),
}  # fmt: skip
NARROW: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 8192, "ffn_dim": 1024, "head_dim": 32, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0, "embedding_size": 128,
    "word_embed_proj_dim": 256,
}  # fmt: skip


def kept_unopened(name: str) -> bool:
    """Whether a model is of the third that is not looked at while anything is improved."""
    return hashlib.sha256(name.encode()).digest()[0] % 3 == 0


def _torchvision(name: str, size: int) -> Case:
    import torch
    import torchvision

    make = torchvision.models.get_model
    more = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    shape = (1, 3, 16, size, size) if name in VIDEO else (1, 3, size, size)
    return make(name, weights=None, **({"weights_backbone": None} if name in SEGMENTATION else {}), **more), {
        "x": torch.randn(shape)
    }


def _timm(name: str) -> Case:
    import timm
    import torch

    return timm.create_model(name), {"x": torch.randn(1, 3, 224, 224)}


def _transformers(kind: str, sizes: dict[str, Any], inputs: Callable[[Any], dict[str, Any]]) -> Case:
    import transformers

    made = getattr(transformers, kind)
    known = inspect.signature(made.config_class.__init__).parameters
    narrow = {k: v for k, v in NARROW.items() if k in known} if inputs is _tokens else {}
    config = made.config_class(**{**narrow, **sizes})
    config.use_cache = False
    module = made(config)
    return module, inputs(config)


def _tokens(config: Any) -> dict[str, Any]:
    import torch

    return {"input_ids": torch.randint(1, config.vocab_size - 1, (1, 128))}


def _samples(config: Any) -> dict[str, Any]:
    import torch

    return {"input_values": torch.randn(1, 16000)}


def _pixels(config: Any) -> dict[str, Any]:
    import torch

    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return {"pixel_values": torch.randn(1, 3, min(height, 384), min(width, 384))}


def cases() -> dict[str, Callable[[], Case]]:
    """All models by name: how each is made."""
    out: dict[str, Callable[[], Case]] = {n: partial(_torchvision, n, 299 if n == "inception_v3" else 224) for n in VISION}
    out |= {n: partial(_torchvision, n, 224) for n in SEGMENTATION}
    out |= {n: partial(_torchvision, n, 224 if n == "mvit_v2_s" else 112) for n in VIDEO}
    out |= {f"timm_{n}": partial(_timm, n) for n in TIMM}
    for table, inputs in ((TEXT, _tokens), (SPEECH, _samples), (IMAGE, _pixels)):
        out |= {f"hf_{n}": partial(_transformers, kind, sizes, inputs) for n, (kind, sizes) in table.items()}
    return out


def export(name: str, folder: Path) -> None:
    """Write one model."""
    import torch

    torch.manual_seed(0)
    module, inputs = cases()[name]()
    program = torch.onnx.export(module.eval(), (), kwargs=inputs, dynamo=True, verbose=False) if name.startswith("hf_") else (
        torch.onnx.export(module.eval(), tuple(inputs.values()), dynamo=True, verbose=False)
    )  # fmt: skip
    assert program is not None
    program.save(folder / f"{name}.onnx")


def without_own_operators() -> None:
    """Import torchvision where the library of its operators does not load (it is linked against CUDA)."""
    import torch

    described = torch.library.register_fake

    def lenient(name: str, *args: Any, **more: Any) -> Callable[[Any], Any]:
        return (lambda function: function) if str(name).startswith("torchvision::") else described(name, *args, **more)

    torch.library.register_fake = lenient
    with suppress(ImportError):
        import torchvision  # noqa: F401
    torch.library.register_fake = described


def main() -> int:
    """Export what is asked for; all by default, those that are there left as they are."""
    without_own_operators()
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    failed = 0
    for name in sys.argv[2:] or cases():
        if (folder / f"{name}.onnx").is_file():
            continue
        try:
            export(name, folder)
        except Exception as e:  # what an exporter raises is not ours to know
            failed += 1
            print(f"{name}: {type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}", file=sys.stderr, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
