"""What operations are called: exports of twelve transformers architectures and six torchvision models.

    python -m bench names [--python PATH] [NAME ...]

For each: the share of operations with a name of the author's, the lines of ``explain`` and the longest of them, and how far the
outputs of the plan for two devices are from torch's own. Needs transformers and torchvision, or a Python that has them. Writes
bench/results/names.json; exits 1 where fewer than 95 % have a name, or ``explain`` has more than 120 lines or 80 columns.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import torch

import tapestry
from bench.exporters.author_nets import nets
from bench.support import other_python, record
from tapestry.ir.provenance import parts

NAMED, LINES, COLUMNS, ERROR = 0.95, 120, 80, 1e-4
SEARCH = 5.0  # seconds; what operations are called does not hang on how good the plan is


def measured(name: str) -> record.Row:
    """One model, planned for two devices and run."""
    torch.manual_seed(0)
    module, inputs = nets()[name]()
    build = tapestry.compile(module, example_inputs=inputs, devices=2, topology="cpu", time_limit=SEARCH)
    feeds: dict[str, Any] = {k: v for k, v in inputs.items() if k in build.build.plan.graph.inputs}
    out = next(iter(build.run(feeds).values()))
    with torch.no_grad():
        expected = module(**inputs)
    first = (expected if isinstance(expected, torch.Tensor) else expected[0]).numpy()
    error = float(np.linalg.norm(out - first) / np.linalg.norm(first))
    named = [bool(p) for p in parts(build.build.plan.graph)]
    lines = [x for x in build.explain().splitlines() if x != build.build.model]
    share, longest = sum(named) / len(named), max(map(len, lines))
    passed = share >= NAMED and len(lines) < LINES and longest <= COLUMNS and error <= ERROR
    sizes = {"operations": len(named), "named": share, "lines": len(lines) + 1, "columns": longest}
    return {"model": name, **sizes, "rel_err": error, "passed": passed}


def main() -> int:
    """Print a row per model, and write them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    other_python.add_python(parser)
    parser.add_argument("models", nargs="*")
    args = parser.parse_args()
    other_python.moved(args, "names")
    rows: list[record.Row] = []
    print(f"{'model':16} {'operations':>10} {'named':>7} {'explain':>8} {'rel_err':>9}")
    for name in args.models or nets():
        r = measured(name)
        said = "" if r["passed"] else "  missed"
        print(f"{name:16} {r['operations']:>10} {r['named']:>7.1%} {r['lines']:>8} {r['rel_err']:>9.1e}{said}", flush=True)
        rows.append(r)
        old = {r["model"]: r for r in record.read("names")}
        record.write("names", list((old | {r["model"]: r for r in rows}).values()))
    return 0 if all(r["passed"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
