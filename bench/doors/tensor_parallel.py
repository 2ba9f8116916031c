"""Plans of ours run by transformers: ``tp-plan`` for its decoders, on two gloo ranks.

For each architecture a tiny model is exported, planned for two devices, its plan written as a ``tp_plan``, and that applied by
transformers' own tensor parallelism; logits are compared with the whole model's. Needs transformers.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import tapestry
from bench.doors.machine import FAST
from bench.doors.tensor_parallel_rank import TOKENS, model_of
from bench.support import record
from tapestry.exports import tp_plan
from tapestry.exports.onnx_blocks.onnx_nodes import NotExpressible

NAMES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "olmo", "olmo2", "granite", "cohere", "stablelm",
    "starcoder2", "glm", "glm4", "smollm3", "helium", "ernie4_5", "arcee", "seed_oss", "apertus", "nemotron", "opt", "gpt_neox",
    "exaone4", "hunyuan_v1_dense", "gpt_neo", "falcon", "bloom",
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


def planned(name: str, folder: Path) -> dict[str, Any]:
    """The architecture's plan, written; what it says, and what it costs."""
    (folder / "fast.json").write_text(json.dumps(FAST))
    ids = torch.arange(3, 3 + TOKENS)[None]
    build = tapestry.compile(
        Logits(model_of(name)), example_inputs=(ids,), mesh={"tp": RANKS}, topology=str(folder / "fast.json")
    )
    try:
        done = tp_plan.export(build.build, folder / f"{name}.plan.json", nearest=False)
    except NotExpressible:
        done = tp_plan.export(build.build, folder / f"{name}.plan.json", nearest=True)
    return {
        "styles": done["styles"], "different": len(done["different"]), "operations": len(build.build.plan.graph.ops),
        "bytes": done["bytes"], "plan_bytes": done["plan_bytes"],
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
