"""Measure this machine for the planner: contraction and element-wise rates, memory bandwidth, launch time, copies.

The logical devices of one process are threads of one machine: a "link" between them is a copy through its memory.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tapestry.plan.topology import Topology, topology

SIZE = 768  # side of the square matrices
CELLS = 1 << 23  # floats of the element-wise and copy measurements: 32 MiB, beyond most caches
REPEATS = 7


def calibrate(threads: int | None = None) -> dict[str, Any]:
    """A topology document (as in docs/topology.md) of this machine: medians over several repetitions.

    Args:
        threads: of torch, while measuring and for the devices that are planned; all by default.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        big, small = torch.ones(CELLS), torch.ones(8)
        launch = _median(lambda: torch.add(small, small), 200)
        stream = _median(lambda: torch.add(big, big))
        vector = _median(lambda: torch.exp(big))
        flops = {name: 2 * SIZE**3 / _matmul(dtype) for name, dtype in (("f32", torch.float32), ("f64", torch.float64))}
        alpha, beta = _copies()
    finally:
        torch.set_num_threads(before)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device": {
            "memory": memory, "bandwidth": 3 * 4 * CELLS / stream, "launch": launch,
            "vector": CELLS / max(vector - stream * 2 / 3, vector / 10), "flops": {**flops, "other": min(flops.values())},
        },
        "levels": [{"alpha": alpha, "beta": beta}],
        "measured": {"torch": torch.__version__, "threads": threads or before, "repeats": REPEATS},
    }  # fmt: skip


def write(path: Path, document: dict[str, Any]) -> Topology:
    """Write the document in one step, and read it back as a topology.

    Raises:
        TapestryError: the measurements make no topology (a rate that is not positive).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as f:
        json.dump(document, f, indent=1)
    try:
        found = topology((), f.name)
        os.replace(f.name, path)
    finally:
        Path(f.name).unlink(missing_ok=True)
    return found


def _matmul(dtype: torch.dtype) -> float:
    a = torch.randn(SIZE, SIZE, dtype=dtype)
    return _median(lambda: torch.matmul(a, a))


def _copies() -> tuple[float, float]:
    """(seconds to hand over one element, seconds per byte) of the copies that carry messages between logical devices."""

    def hand_over(n: int) -> Callable[[], object]:
        array = torch.ones(n)
        return lambda: torch.empty(n).copy_(array[0:n].clone())  # out of the sender's buffer, into the receiver's

    alpha = _median(hand_over(1), 100)
    return alpha, max(_median(hand_over(CELLS)) - alpha, 1e-9) / (4 * CELLS)


def _median(run: Callable[[], object], times: int = 1) -> float:
    """Seconds of one call: the median over repetitions of the mean over ``times`` calls, after a warm-up."""
    run()
    samples: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(times):
            run()
        samples.append((time.perf_counter() - start) / times)
    return statistics.median(samples)
