"""Topologies by name, for meshes of any size, and the rates of GPUs, which price plans and kernels alike.

Of GPUs the figures are those of the vendor's data sheet (dense), times the shares of them that large products and copies
reach: a product of 8192^3 in bf16 ran at 769 to 798 of 989 TFLOP/s on an H200, a copy at 4.3 of 4.8 TB/s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tapestry.plan.topology.fabric import Device, Link
from tapestry.plan.topology.measured_costs import CallTimes

GiB = 1 << 30
REST = 1 << 30


@dataclass(frozen=True, slots=True)
class Level:
    """Devices up to ``reach`` (in all) are joined by a shape of links, or by a switch."""

    reach: int
    link: Link
    spec: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Other:
    """Devices of another kind: those of some numbers, or at some coordinates along mesh axes."""

    device: Device
    numbers: tuple[int, ...]
    at: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Source:
    """A topology before the mesh is known: a device, and either levels, or shapes by mesh axis or of the whole mesh."""

    device: Device
    levels: tuple[Level, ...] = ()
    axes: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    whole: dict[str, Any] = field(default_factory=dict[str, Any])
    others: tuple[Other, ...] = ()
    calls: tuple[CallTimes, ...] = ()
    overlap: bool = True
    alone: Device | None = None
    margin: float = 0.0
    figures: dict[str, float] = field(default_factory=dict[str, float])
    reserve: float = 0.0  # the share of memory that plans leave free


# Shares of a data sheet's figures that are reached. Of float32 without matrix units, which is also all element-wise work, it is
# an estimate: power limits an H100's clock less there.
MATRIX, VECTOR, MEMORY = 0.8, 0.9, 0.9
POWER = 4.0  # a kernel loads while it computes: where loads and products take equally long, 1.19 times either
EIGHTS = ("f8e4m3fn", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz")


def _gpu(
    memory: float, bandwidth: float, half: float, tf32: float, vector: float, i8: float, f8: float, host: float = 5.0e10
) -> Device:
    """A GPU from its data sheet, in GiB that a process can use and TFLOP/s; ``vector``: of float32 without matrix units."""
    flops = {"bf16": half, "f16": half, **dict.fromkeys(("i8", "u8"), i8), **dict.fromkeys(EIGHTS, f8)}
    flops |= {"tf32": tf32} if tf32 else {}
    plain = vector * VECTOR * 1e12
    return Device(
        memory=int(memory * GiB),
        bandwidth=bandwidth * MEMORY,
        launch=3e-6,
        vector=plain,
        host=host,
        power=POWER,
        flops={**{t: x * MATRIX * 1e12 for t, x in flops.items()}, "f32": plain, "other": plain},
    )


# Memory is what a process can use: what nvidia-smi shows (H100: 81559 MiB, H200: 143771 MiB, A100 PCIe: 40960 MiB) less what
# the driver keeps (torch says 79.2, 139.8 and 39.5 GiB) and a context takes (0.5 to 1 GiB). Cards that are no preset are here
# for their rates. What has no units for f8 widens it to f16.
GPUS = {
    "h100": _gpu(78, 3.35e12, 989, 495, 67, 1979, 1979),  # SXM, NVIDIA H100 data sheet
    "h200": _gpu(139, 4.8e12, 989, 495, 67, 1979, 1979),  # SXM, NVIDIA H200 data sheet
    "a100-pcie": _gpu(38.8, 1.555e12, 312, 156, 19.5, 624, 312, host=2.0e10),  # 40 GB, NVIDIA A100 data sheet
    "a40": _gpu(44, 6.96e11, 150, 74.8, 37.4, 299, 150),
    "l40s": _gpu(44, 8.64e11, 362, 183, 91.6, 733, 733),
    "b200": _gpu(175, 8.0e12, 2250, 1100, 75, 4500, 4500),
    "mi300x": _gpu(184, 5.3e12, 1300, 0, 163, 2600, 2600),  # Triton has no TF32 there
}
CHIP_OF = {
    "h100": "sm90",
    "h200": "sm90",
    "a100-pcie": "sm80",
    "a40": "sm86",
    "l40s": "sm89",
    "b200": "sm100",
    "mi300x": "gfx942",
}
NETWORK = Level(REST, Link(5e-6, 1 / 5.0e10))
NVLINK = (Level(8, Link(2e-6, 1 / 4.5e11)), NETWORK)
PCIE = (Level(REST, Link(4e-6, 1 / 2.5e10)),)  # version 4, 16 lanes: what messages get of its 3.2e10
RESERVE = 0.08  # of a GPU: contexts and buffers of communication libraries, and what fragments; an estimate

SOURCES = {
    "cpu": Source(
        Device(memory=16 * GiB, bandwidth=2.0e10, launch=5e-6, vector=1.0e10, flops={"f32": 1e11, "other": 5e10},
               host=5.0e9),
        (Level(REST, Link(5e-6, 1 / 1e10)),),
        overlap=False,  # what carries messages takes a core's time: a quarter to a third was hidden where it was measured
    ),
    "h100": Source(GPUS["h100"], NVLINK, reserve=RESERVE),
    "h200": Source(GPUS["h200"], NVLINK, reserve=RESERVE),
    "a100-pcie": Source(GPUS["a100-pcie"], PCIE, reserve=RESERVE),
    "a40": Source(GPUS["a40"], PCIE, reserve=RESERVE),
    "l40s": Source(GPUS["l40s"], PCIE, reserve=RESERVE),
    "b200": Source(GPUS["b200"], (Level(8, Link(2e-6, 1 / 9.0e11)), NETWORK), reserve=RESERVE),  # NVLink 5, as its data sheet
    "mi300x": Source(GPUS["mi300x"], (Level(8, Link(2e-6, 1 / 4.48e11)), NETWORK), reserve=RESERVE),  # 7 links of 6.4e10
    "tpu": Source(
        Device(memory=32 * GiB, bandwidth=1.2e12, launch=2e-6, vector=4.3e12,
               flops={"bf16": 2.75e14, "f16": 4.6e13, "f32": 4.6e13, "other": 4.3e12}, host=1.6e10),
        whole={"shape": "torus", "alpha": 1e-6, "beta": 1 / 5.0e10},
    ),
}  # fmt: skip
PRESETS = tuple(SOURCES)
