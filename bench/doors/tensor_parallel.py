"""Plans of ours run by transformers: ``tp-plan`` for its decoders, on two gloo ranks.

For each architecture a tiny model is exported, planned for two devices, its plan written as a ``tp_plan``, and that applied by
transformers' own tensor parallelism; logits are compared with the whole model's. Needs transformers.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import tapestry
from bench.doors.onnx_folders import FAST
from bench.doors.tensor_parallel_rank import TOKENS, model_of
from bench.support import record
from tapestry.errors import TapestryError
from tapestry.tools.exports import tp_plan

NAMES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "olmo", "olmo2", "granite", "cohere", "stablelm",
    "starcoder2", "glm", "glm4", "smollm3", "helium", "ernie4_5", "arcee", "seed_oss", "nemotron", "opt", "gpt_neox", "gpt_neo",
    "mixtral", "qwen2_moe", "falcon", "bloom", "gpt2",
)  # fmt: skip
RANKS, CLOSE = 2, 1e-5


class Logits(torch.nn.Module):
    """A model that gives its logits alone."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.m = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of tokens."""
        return self.m(input_ids=ids, use_cache=False).logits


def shipped(model: Any) -> list[str]:
    """What the plan that transformers ships for an architecture cuts, as pins."""
    plan: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    ends = {p: "out" if "colwise" in style else "in" for p, style in plan.items() if re.search("colwise|rowwise", style)}
    return [f"**.{p}:{end}=tp" for p, end in ends.items() if "embed" not in p and ".experts." not in p]


def planned(name: str, folder: Path) -> dict[str, Any]:
    """The architecture's plan, written; what it says, and what it costs.

    The search is held to what transformers' own plan cuts, where it ships one whose modules are operations.
    """
    (folder / "fast.json").write_text(json.dumps(FAST))
    module = Logits(model_of(name))
    given: dict[str, Any] = {
        "example_inputs": (torch.arange(3, 3 + TOKENS)[None],), "mesh": {"tp": RANKS}, "topology": str(folder / "fast.json"),
        "stages": 1,
    }  # fmt: skip
    pins = shipped(module.m)
    try:
        build = tapestry.compile(module, pins=pins, **given)
    except TapestryError:
        pins = []
        build = tapestry.compile(module, **given)
    done = tp_plan.export_tp_plan(build.build, folder / f"{name}.plan.json", nearest=True)
    return {
        "pins": len(pins), "styles": done["styles"], "different": len(done["different"]),
        "operations": len(build.build.plan.graph.ops), "bytes": done["bytes"], "plan_bytes": done["plan_bytes"],
    }  # fmt: skip


def run(folder: Path) -> dict[str, Any]:
    """All plans of a folder on two ranks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    path = os.pathsep.join([str(record.ROOT), *sys.path])
    more = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": path}
    command = [sys.executable, "-m", "bench.doors.tensor_parallel_rank", str(folder)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **more, "RANK": str(r)}, stderr=subprocess.PIPE, text=True)
        for r in range(RANKS)
    ]
    said = [r.communicate(timeout=600)[1] for r in ranks]
    if any(r.returncode for r in ranks):
        raise RuntimeError(next(t for t in said if t.strip()).strip().splitlines()[-1][:200])
    return json.loads((folder / "out.json").read_text())


def rows(names: list[str]) -> list[dict[str, Any]]:
    """A row for each architecture."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or NAMES:
            try:
                found[name] = {"door": "tp-plan", "name": name, **planned(name, Path(folder))}
            except Exception as e:  # a model that is not exported or has no plan is a row too
                said = f"{type(e).__name__}: {e}".replace("\n", " ")[:300]
                found[name] = {"door": "tp-plan", "name": name, "error": said}
        for name, row in run(Path(folder)).items():
            found[name] |= row
    for row in found.values():
        row["equal"] = "error" not in row and row["rel_err"] <= CLOSE and row["cut_parameters"] > 0
    return list(found.values())


def line(row: dict[str, Any]) -> str:
    """A row as a line."""
    if "error" in row:
        return row["error"]
    return f"{row['rel_err']:.1e}, {len(row['styles'])} styles, {row['cut_parameters']} parameters cut"
