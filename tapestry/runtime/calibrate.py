"""Measure this machine for the planner: contraction and element-wise rates, memory bandwidth, launch time, copies.

The logical devices of one process are threads of one machine: a "link" between them is a copy through its memory.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tapestry.build.atomic import new_file
from tapestry.errors import TapestryError
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
    with new_file(path) as temporary:
        temporary.write_text(json.dumps(document, indent=1))
        return topology((), str(temporary))


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


def from_trace(path: Path) -> dict[str, Any]:
    """A topology document from the trace of a real run (``run --trace``).

    Kernels: launch time and a common factor on all rates are fitted to measured against estimated seconds; transfers:
    latency and seconds per byte to the payload. Both by least squares of relative errors, none below zero.

    Raises:
        TapestryError: it is no such trace.
    """
    try:
        other = json.loads(path.read_text())["otherData"]
        before, steps = other["topology"], [s for s in other["steps"] if s["measured_s"] > 0]
        device, first = dict(before["device"]), before["links"][0]
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise TapestryError(
            f"not the trace of a real run: {e!r}", where=str(path), hint="tapestry run BUILD --trace FILE"
        ) from None
    kernels = [(max(s["estimated_s"] - device["launch"], 0.0), s["measured_s"]) for s in steps if s["kind"] == "compute"]
    launch, factor = _line(kernels) if kernels else (device["launch"], 1.0)
    moves = [(float(s["payload_bytes"]), s["measured_s"]) for s in steps if s.get("payload_bytes")]
    alpha, beta = _line(moves) if moves else (first["alpha"], first["beta"])
    factor = max(factor, 1e-6)
    for rate in ("bandwidth", "vector"):
        device[rate] = device[rate] / factor
    return {
        "device": {
            "memory": device["memory"], "bandwidth": device["bandwidth"], "launch": launch, "vector": device["vector"],
            "flops": {k: v / factor for k, v in dict(device["flops"]).items()},
        },
        "levels": [{"alpha": alpha, "beta": max(beta, 1e-15)}],
        "measured": {"trace": str(path), "steps": len(steps), "compute_factor": factor},
    }  # fmt: skip


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of y = a + b·x with the least relative errors, neither below zero."""
    w = [1 / y**2 for _, y in points]
    total = sum(w)
    mx = sum(k * x for k, (x, _) in zip(w, points, strict=True)) / total
    my = sum(k * y for k, (_, y) in zip(w, points, strict=True)) / total
    spread = sum(k * (x - mx) ** 2 for k, (x, _) in zip(w, points, strict=True))
    b = sum(k * (x - mx) * (y - my) for k, (x, y) in zip(w, points, strict=True)) / spread if spread else 0.0
    a = my - b * mx
    if b < 0:
        return my, 0.0
    if a < 0:
        square = sum(k * x * x for k, (x, _) in zip(w, points, strict=True))
        return 0.0, sum(k * x * y for k, (x, y) in zip(w, points, strict=True)) / square
    return a, b
