"""What `tapestry calibrate` measured, in topology files and builds: rates by class of kernel, and times of backend calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np

CLASSES = (
    "contraction",
    "convolution",
    "unfolded",
    "attention",
    "scored",
    "decoding",
    "computed",
    "row",
    "softmax",
    "map",
    "gather",
    "opaque",
)
PRODUCTS = CLASSES[:7]  # whose rates are of products
LIKE = {
    "unfolded": "convolution",
    "attention": "contraction",
    "scored": "attention",
    "decoding": "attention",
    "computed": "contraction",
    "softmax": "row",
}
"""What stands for classes that older calibrations did not tell apart."""
CALLS = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
    "batch_isend_irecv",
)
AGREE, BUSY = 0.15, 0.1  # what two rounds may differ by, and others take of the cores, where figures are sure
MAX_POINTS, MAX_TABLES, MAX_GROUP = 1024, 1024, 4096


@dataclass(frozen=True, slots=True)
class KernelRates:
    """A kernel of one class takes ``launch + work / rate + bytes / bandwidth`` seconds; ``head``: more for each of an
    attention's heads, whose rows and keys are no others'."""

    launch: float
    rate: float
    bandwidth: float
    head: float = 0.0


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Seconds of one backend call in groups of ``group`` ranks, all groups of the mesh at once.

    Attributes:
        points: (bytes, seconds), bytes rising and seconds not falling. The bytes are those of the larger of the two buffers
            that a rank hands to the call; of ``batch_isend_irecv`` what a rank sends to the ``group - 1`` others together.
        stride: how far apart neighbours of a group are in numbers of devices; 0: it does not matter.
        within: aligned devices, such as a host's, among which the group is; 0: it does not matter.
    """

    call: str
    group: int
    points: tuple[tuple[int, float], ...]
    stride: int = 0
    within: int = 0

    def seconds(self, nbytes: float) -> float:
        """Straight lines between the points; the first one's time below it, the last slope above the last one."""
        x, y = [n for n, _ in self.points], [s for _, s in self.points]
        if nbytes <= x[-1]:
            return float(np.interp(nbytes, x, y))
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else y[-1] / max(x[-1], 1)
        return y[-1] + slope * (nbytes - x[-1])


def read_figures(data: Mapping[str, Any]) -> dict[str, float]:
    """How sure the measured figures of a document are, as far as it says so (`runtime.calibration.automatic`)."""
    said: Mapping[str, Any] = data.get("measured", {})
    found = {k: float(said[k]) for k in ("when", "rounds", "agreement", "others") if said.get(k) is not None}
    if not all(isfinite(x) and x >= 0 for x in found.values()):
        raise ValueError("numbers of 'measured' must be finite and ≥ 0")
    return found if {"when", "others"} <= found.keys() else {}


def doubtful(figures: Mapping[str, float]) -> bool:
    """Whether it is worth while to measure again on an idle machine."""
    return bool(figures) and (figures.get("agreement", 1.0) > AGREE or figures["others"] > BUSY)


def read_classes(data: Mapping[str, Any]) -> dict[str, KernelRates]:
    """``device.classes`` of a file.

    Raises:
        ValueError, KeyError, TypeError: they are none.
    """
    unknown = next((k for k in data if k not in CLASSES), None)
    if unknown is not None:
        raise ValueError(f"'{unknown}' is no class of kernels: {', '.join(CLASSES)}")
    return {k: read_rates(k, v) for k, v in data.items()}


def read_rates(name: str, v: Mapping[str, Any]) -> KernelRates:
    """One class of kernels."""
    out = KernelRates(float(v["launch"]), float(v["rate"]), float(v["bandwidth"]), float(v.get("head", 0.0)))
    sane = all(map(isfinite, (out.launch, out.rate, out.bandwidth, out.head)))
    if not sane or min(out.launch, out.head) < 0 or min(out.rate, out.bandwidth) <= 0:
        raise ValueError(f"class '{name}': launch must not be negative, rates must be positive")
    return out


def read_calls(data: Iterable[Mapping[str, Any]]) -> tuple[CallTimes, ...]:
    """``collectives`` of a file; times that fall as bytes grow are raised to those before.

    Raises:
        ValueError, KeyError, TypeError: they are none.
    """
    out: list[CallTimes] = []
    for v in data:
        call, group, stride, within = str(v["call"]), int(v["group"]), int(v.get("stride", 0)), int(v.get("within", 0))
        points = [(int(n), float(s)) for n, s in v["points"]]
        if call not in CALLS:
            raise ValueError(f"'{call}' is no call: {', '.join(CALLS)}")
        if not (
            2 <= group <= MAX_GROUP
            and min(stride, within) >= 0
            and max(stride, within) <= MAX_GROUP
            and 1 <= len(points) <= MAX_POINTS
        ):
            raise ValueError(f"'{call}': a group of 2 to {MAX_GROUP} and 1 to {MAX_POINTS} points")
        rising = points[0][0] >= 0 and all(a < b for (a, _), (b, _) in pairwise(points))
        if not rising or not all(isfinite(s) and s >= 0 for _, s in points):
            raise ValueError(f"'{call}' in groups of {group}: bytes must rise, seconds must not be negative")
        highest = np.maximum.accumulate([s for _, s in points]).tolist()
        out.append(CallTimes(call, group, tuple((n, s) for (n, _), s in zip(points, highest, strict=True)), stride, within))
    if len(out) > MAX_TABLES or len({(c.call, c.group, c.stride) for c in out}) < len(out):
        raise ValueError("'collectives' say the times of a call and group twice, or of too many")
    return tuple(out)


def read_margin(data: Mapping[str, Any]) -> float:
    """``margin`` of a file; 0 where it says nothing."""
    found = float(data.get("margin", 0.0))
    if not 0 <= found <= 1:
        raise ValueError("'margin' is a share between 0 and 1")
    return found


def read_power(data: Mapping[str, Any]) -> float:
    """``power`` of a device; 1 where it says nothing."""
    found = float(data.get("power", 1.0))
    if not 1 <= found <= 64:
        raise ValueError("'power' is between 1 and 64")
    return found


def read_overlap(data: Mapping[str, Any]) -> bool:
    """``overlap`` of a file; true where it says nothing."""
    found = data.get("overlap", True)
    if not isinstance(found, bool):
        raise TypeError("'overlap' is true or false")
    return found


def classes_data(found: Mapping[str, KernelRates]) -> dict[str, dict[str, float]]:
    """`read_classes` reads it back."""
    return {k: {n: x for n, x in asdict(v).items() if n != "head" or x} for k, v in found.items()}


def calls_data(found: Sequence[CallTimes]) -> list[dict[str, Any]]:
    """`read_calls` reads it back."""
    places = ({k: n for k, n in (("stride", c.stride), ("within", c.within)) if n} for c in found)
    return [
        {"call": c.call, "group": c.group, **place, "points": [list(p) for p in c.points]}
        for c, place in zip(found, places, strict=True)
    ]
