"""Models of transformers on CPUs: ours beside eager torch and `torch.compile` (Inductor, freezing), all at their defaults.

    python -m bench torch_compile [NAME …]

Six models (``resnet50``, ``bert``, ``mobilenet_v2``, ``gpt2``, ``convnext``, ``vit``), made anew with random weights, batch 1.
Stretches follow each other in turns with a pause; the ratios are those of the medians. Needs transformers. Exits 1 if a result
is further than 1e-4 from torch's. Nothing is written.
"""
# pyright: basic

from __future__ import annotations

import importlib
import math
import statistics
import sys
from typing import Any

from bench.speed.cpu import TURNS, stretch

NAMES = ("resnet50", "bert", "mobilenet_v2", "gpt2", "convnext", "vit")
FAR = 1e-4
RUNS = 9


def made(name: str) -> tuple[Any, Any]:
    """A module and its input."""
    import torch

    t: Any = importlib.import_module("transformers")

    torch.manual_seed(0)
    six = {"num_hidden_layers": 6}
    model, shape = {
        "resnet50": lambda: (t.ResNetModel(t.ResNetConfig()), (1, 3, 224, 224)),
        "mobilenet_v2": lambda: (t.MobileNetV2Model(t.MobileNetV2Config()), (1, 3, 224, 224)),
        "convnext": lambda: (t.ConvNextModel(t.ConvNextConfig()), (1, 3, 224, 224)),
        "vit": lambda: (t.ViTModel(t.ViTConfig(**six)), (1, 3, 224, 224)),
        "bert": lambda: (t.BertModel(t.BertConfig(**six)), (1, 128)),
        "gpt2": lambda: (t.GPT2Model(t.GPT2Config(n_layer=6, use_cache=False)), (1, 128)),
    }[name]()

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any) -> Any:
            return self.model(x).last_hidden_state

    return Hidden().eval(), torch.randn(shape) if len(shape) == 4 else torch.randint(0, 1000, shape)


def measure(name: str) -> tuple[float, float, float]:
    """Print a row; (ours over eager torch's, ours over Inductor's, the relative difference)."""
    import torch

    import tapestry

    module, x = made(name)
    with torch.no_grad():
        inductor, plan = torch.compile(module), tapestry.compile(module, x)
        want, feeds = module(x), {next(iter(plan.inputs)): x.numpy()}
        far = float((torch.from_numpy(next(iter(plan.run(feeds).values()))) - want).abs().max() / want.abs().max())
        runs = {"eager": lambda: module(x), "Inductor": lambda: inductor(x), "ours": lambda: plan.run(feeds)}
        times: dict[str, list[float]] = {k: [] for k in runs}
        for _ in range(TURNS):
            for k, run in runs.items():
                times[k] += [wall for _, wall in stretch(run, RUNS)]
    ms = {k: statistics.median(of) * 1e3 for k, of in times.items()}
    eager, other = ms["ours"] / ms["eager"], ms["ours"] / ms["Inductor"]
    shown = ", ".join(f"{k} {v:.1f} ms" for k, v in ms.items())
    print(f"{name}: {shown}; of eager {eager:.2f}, of Inductor {other:.2f}; relative difference {far:.0e}", flush=True)
    return eager, other, far


def main() -> int:
    """Measure and print."""
    import torch._inductor.config

    torch._inductor.config.freezing = True
    rows = [measure(n) for n in sys.argv[1:] or NAMES]
    print(f"geometric mean: of Inductor {math.exp(statistics.mean(math.log(r[1]) for r in rows)):.2f}")
    return int(any(not r[2] <= FAR for r in rows))


if __name__ == "__main__":
    sys.exit(main())
