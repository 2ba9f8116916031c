"""What operations are called: exports of twelve transformers architectures and six torchvision models.

For each: the share of operations with a name of the author's, the lines of ``explain``, and how far the plan's outputs are from
torch's own. ``python -m bench names [NAME ...]``; needs transformers and torchvision. JSON goes to bench/results/names.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tapestry
from bench.support.author_nets import nets
from tapestry.ir.naming.author_names import parts

RESULTS = Path(__file__).resolve().parents[1] / "results" / "names.json"


def measured(name: str) -> dict[str, Any]:
    """One model, planned for two devices and run."""
    torch.manual_seed(0)
    module, inputs = nets()[name]()
    build = tapestry.compile(module, example_inputs=inputs, devices=2, topology="cpu")
    graph = build.build.plan.graph
    feeds = {k: v for k, v in inputs.items() if k in graph.inputs}
    with torch.no_grad():
        expected = module(**inputs)
    first = expected if isinstance(expected, torch.Tensor) else expected[0]
    out = next(iter(build.run(feeds).values()))
    error = float(np.linalg.norm(out - first.numpy()) / np.linalg.norm(first.numpy()))
    named = [bool(p) for p in parts(graph)]
    return {"operations": len(named), "named": sum(named) / len(named), "lines": build.explain().count("\n"), "rel_err": error}


def main() -> None:
    """Print a row per model, and write them all."""
    rows: dict[str, Any] = {}
    print(f"{'model':16} {'operations':>10} {'named':>7} {'explain':>8} {'rel_err':>9}")
    for name in sys.argv[1:] or nets():
        try:
            row = measured(name)
            print(
                f"{name:16} {row['operations']:>10} {row['named']:>7.1%} {row['lines']:>8} {row['rel_err']:>9.1e}", flush=True
            )
        except Exception as e:  # a model that does not export is a row too
            row = {"error": f"{type(e).__name__}: {e}"[:200]}
            print(f"{name:16} {row['error']}", flush=True)
        rows[name] = row
    if not sys.argv[1:]:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
