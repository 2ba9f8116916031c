"""A module in five lines: imported, planned for two devices and run, as a user writes it.

The modules of `bench names` (small configurations of transformers, and models of torchvision). `LINES` are run as they stand; a
row is equal where what comes out is within 1e-4 of the module's own output, relative to its norm.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from bench.exporters.author_nets import nets
from bench.support import record

LINES = """\
import tapestry
module = module.eval()
plan = tapestry.compile(module, example_inputs=inputs, devices=2, topology="cpu")
outputs = plan.run(inputs)
first = next(iter(outputs.values()))
"""
CLOSE = 1e-4


def rows(names: list[str]) -> Iterator[record.Row]:
    """A row for each module."""
    for name, made in nets().items():
        if names and name not in names:
            continue
        torch.manual_seed(0)
        try:
            module, inputs = made()
        except ModuleNotFoundError as e:
            print(f"{name} is left out: {e}")
            continue
        space: dict[str, Any] = {"module": module, "inputs": inputs}
        start = time.process_time()
        exec(LINES, space)
        seconds = time.process_time() - start
        with torch.no_grad():
            given = module(**inputs)
        want = (given if isinstance(given, torch.Tensor) else given[0]).numpy()
        error = float(np.linalg.norm(space["first"] - want) / np.linalg.norm(want))
        operations = len(space["plan"].build.plan.graph.ops)
        row = {"door": "module", "name": name, "lines": len(LINES.splitlines()), "operations": operations, "cpu_s": seconds}
        yield {**row, "rel_err": error, "equal": error <= CLOSE}


def line(row: record.Row) -> str:
    """A row as a line."""
    return f"{row['lines']} lines, {row['operations']} operations, {row['cpu_s']:.1f} s, rel. error {row['rel_err']:.1e}"
