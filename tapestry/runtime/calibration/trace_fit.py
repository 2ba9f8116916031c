"""A topology document from the trace of a real run: every class of kernels and every call is fitted by itself.

What the trace shows too little of keeps what the build's topology said, and ``fit`` says so.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tapestry.errors import TapestryError
from tapestry.plan.topology import Topology, device_data, from_data
from tapestry.plan.topology.measured_costs import CLASSES, CallTimes, KernelRates, calls_data, classes_data
from tapestry.runtime.calibration.rate_fit import KernelPoint, fit_kernels, fit_table, kernel_point, margin

FEWEST = 4  # sizes of a class of kernels for its three numbers
FEWEST_SIZES = 3  # of a call
HEAVY = ("contraction", "convolution")  # their rates are those of f32


def from_trace(path: Path, memory: int) -> dict[str, Any]:
    """The document.

    Args:
        memory: bytes of this machine; what the build was limited to is no property of the device.

    Raises:
        TapestryError: it is no trace of a real run.
    """
    try:
        other = json.loads(path.read_text())["otherData"]
        steps: list[Mapping[str, Any]] = [s for s in other["steps"] if s["measured_s"] > 0]
        before = from_data(other["topology"])
        kernels = [_kernel(s) for s in steps if "class" in s and (s["dtype"] == "f32" or s["class"] not in HEAVY)]
        calls: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for s in steps:
            if "call" in s and s["group"] > 1:
                calls[str(s["call"]), int(s["group"])][int(s["call_bytes"])].append(float(s["measured_s"]))
    except (ValueError, KeyError, TypeError, IndexError, OSError) as e:
        raise TapestryError(
            f"not the trace of a real run: {e!r}", where=str(path), hint="tapestry run BUILD --trace FILE"
        ) from None
    classes, fit = _classes(kernels, before)
    tables, more = _tables(calls, before)
    device = before.device
    out: dict[str, Any] = {
        "device": {**device_data(device), "memory": memory, "classes": classes_data(classes)},
        "levels": [*map(asdict, before.links[:1])] or [{"alpha": 0.0, "beta": 1e-12}],
        "overlap": before.overlap,
    }
    if before.alone:
        out["alone"] = {**device_data(before.alone), "memory": memory}
    if tables:
        out["collectives"] = calls_data(tables)
    both = {**fit, **more}
    return {**out, "margin": margin(both), "measured": {"trace": str(path), "steps": len(steps)}, "fit": both}


def _kernel(s: Mapping[str, Any]) -> KernelPoint:
    heavy, light, moved = (float(v) for v in s["work"])
    return kernel_point(str(s["class"]), heavy, light, moved, float(s["measured_s"]), str(s["dtype"]))


def _classes(points: Sequence[KernelPoint], before: Topology) -> tuple[dict[str, KernelRates], dict[str, Any]]:
    """Rates by class, those of before where there are too few measurements."""
    out, fit = dict(before.device.classes), dict[str, Any]()
    for kind in CLASSES:
        own = [p for p in points if p.kind == kind]
        if len({(p.work, p.nbytes) for p in own}) < FEWEST:
            fit[kind] = {"points": len(own), "kept": "too few sizes in the trace"}
            continue
        out[kind], fit[kind] = fit_kernels(own, before.device.vector)
    return out, fit


def _tables(
    calls: Mapping[tuple[str, int], Mapping[int, Sequence[float]]], before: Topology
) -> tuple[list[CallTimes], dict[str, Any]]:
    """Times of calls, those of before where there are too few sizes."""
    fit = dict[str, Any]()
    found = {(c.call, c.group, c.stride): c for c in before.calls}
    for (call, group), sizes in sorted(calls.items()):
        points = [(n, sorted(s)[len(s) // 2]) for n, s in sorted(sizes.items())]
        name = f"{call} of {group}"
        if len(points) < FEWEST_SIZES:
            fit[name] = {"points": len(points), "kept": "too few sizes in the trace"}
            continue
        table, fit[name] = fit_table(points, lambda kept, n: CallTimes("", 0, tuple(kept)).seconds(n))
        found = {k: c for k, c in found.items() if k[:2] != (call, group)}
        found[call, group, 0] = CallTimes(call, group, tuple(table))
    return list(found.values()), fit
