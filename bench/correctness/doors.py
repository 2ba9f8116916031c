"""Plans of ours run by transformers: ``tapestry export --format tp-plan`` for decoders of transformers, on two gloo ranks.

For each architecture a tiny model is exported, planned for two devices, its plan written as a ``tp_plan``, and that applied by
transformers' own tensor parallelism; logits are compared with the whole model's. ``python -m bench doors [NAME ...]``; needs
transformers. JSON goes to bench/results/doors.json.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import tapestry
from bench.support import record
from bench.support.transformers_tp_rank import TOKENS, model_of
from tapestry.exports import tp_plan
from tapestry.exports.onnx_blocks.onnx_nodes import NotExpressible

NAMES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "olmo", "olmo2", "granite", "cohere", "stablelm",
    "starcoder2", "glm", "glm4", "smollm3", "helium", "ernie4_5", "arcee", "seed_oss", "apertus", "nemotron", "opt", "gpt_neox",
    "exaone4", "hunyuan_v1_dense", "gpt_neo", "falcon", "bloom",
)  # fmt: skip
RANKS, CLOSE = 2, 1e-5
# a machine on which cutting pays even for small models
FAST = {
    "device": {"memory": "1GiB", "bandwidth": 1e6, "launch": 0, "vector": 1e6, "flops": {"f32": 1e6, "other": 1e6}},
    "levels": [{"alpha": 1e-9, "beta": 1e-9}],
}


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
        done = tp_plan.export(build.build, folder / "plan.json", nearest=False)
    except NotExpressible:
        done = tp_plan.export(build.build, folder / "plan.json", nearest=True)
    return {
        "styles": done["styles"], "different": len(done["different"]), "operations": len(build.build.plan.graph.ops),
        "bytes": done["bytes"], "plan_bytes": done["plan_bytes"],
    }  # fmt: skip


def run(name: str, folder: Path) -> dict[str, Any]:
    """The plan on two ranks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    more = {
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(record.ROOT), *sys.path]),
    }
    command = [
        sys.executable,
        "-m",
        "bench.support.transformers_tp_rank",
        name,
        str(folder / "plan.json"),
        str(folder / "out.json"),
    ]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **more, "RANK": str(r)}, stderr=subprocess.PIPE, text=True)
        for r in range(RANKS)
    ]
    said = [r.communicate(timeout=200)[1] for r in ranks]
    if any(r.returncode for r in ranks):
        raise RuntimeError(next(t for t in said if t.strip()).strip().splitlines()[-1][:200])
    return json.loads((folder / "out.json").read_text())


def main() -> None:
    """Print a row per architecture, and write them all."""
    rows: list[dict[str, Any]] = []
    for name in sys.argv[1:] or NAMES:
        start = time.process_time()
        row: dict[str, Any] = {"name": name}
        with tempfile.TemporaryDirectory() as folder:
            try:
                row |= planned(name, Path(folder))
                row |= run(name, Path(folder))
                row["equal"] = row["rel_err"] <= CLOSE and row["cut_parameters"] > 0
            except Exception as e:  # a model that is not exported, or a plan that does not run, is a row too
                row["error"] = f"{type(e).__name__}: {e}".replace("\n", " ")[:300]
        rows.append(row)
        text = row.get("error") or f"{row['rel_err']:.1e}, {len(row['styles'])} styles, {row['cut_parameters']} parameters cut"
        print(
            f"{name:18} {'equal' if row.get('equal') else 'not equal':10} {text} ({time.process_time() - start:.0f} s)",
            flush=True,
        )
    print(f"{sum(bool(r.get('equal')) for r in rows)} of {len(rows)} equal to {CLOSE:g}")
    if not sys.argv[1:]:
        record.write("doors", rows)


if __name__ == "__main__":
    main()
