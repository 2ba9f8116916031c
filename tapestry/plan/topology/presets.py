"""Topologies by name, for meshes of any size, and the rates of GPUs, which price plans and kernels alike.

Of GPUs the figures are those of the vendor's data sheet (dense), times the shares of them that large products and copies
reach: a product of 8192^3 in bf16 ran at 769 to 798 of 989 TFLOP/s on an H200, a copy at 4.3 of 4.8 TB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tapestry.plan.topology.fabric import Device, Link
from tapestry.plan.topology.host_calls import HostCalls
from tapestry.plan.topology.measured_costs import CallTimes, KernelRates

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
    native_sums: bool = False
    origins: dict[str, str] = field(default_factory=dict[str, str])  # where figures come from


# Shares of a data sheet's figures that are reached: products, other FLOP, bytes. Of float32 without matrix units, which is also
# all element-wise work, it is an estimate: power limits an H100's clock less there.
REACHED = (0.8, 0.9, 0.9)
POWER = 4.0  # a kernel loads while it computes: where loads and products take equally long, 1.19 times either
EIGHTS = ("f8e4m3fn", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz")


def _gpu(
    memory: float, bandwidth: float, half: float, tf32: float, vector: float, i8: float, f8: float, host: float = 5.0e10,
    launch: float = 3e-6, reached: tuple[float, float, float] = REACHED,
    attention: Sequence[tuple[float, float, float, float]] = (),
) -> Device:  # fmt: skip
    """A GPU from its data sheet, in GiB that a process can use and TFLOP/s.

    Args:
        vector: of float32 without matrix units.
        attention: (µs of a launch, TFLOP/s, TB/s, ns of a head) of attention in 16 bits: of many rows, of few.
    """
    flops = {"bf16": half, "f16": half, **dict.fromkeys(("i8", "u8"), i8), **dict.fromkeys(EIGHTS, f8)}
    flops |= {"tf32": tf32} if tf32 else {}
    products, others, moved = reached
    plain = vector * others * 1e12
    return Device(
        memory=int(memory * GiB),
        bandwidth=bandwidth * moved,
        launch=launch,
        vector=plain,
        host=host,
        power=POWER,
        classes={
            name: KernelRates(start / 1e6, rate * 1e12 * plain / (half * products * 1e12), memory * 1e12, head / 1e9)
            for name, (start, rate, memory, head) in zip(("attention", "decoding"), attention, strict=False)
        },
        flops={**{t: x * products * 1e12 for t, x in flops.items()}, "f32": plain, "other": plain},
    )


# Memory is what a process can use: what nvidia-smi shows (H100: 81559 MiB, H200: 143771 MiB, A100 PCIe: 40960 MiB) less what
# the driver keeps (torch says 79.2, 139.8 and 39.5 GiB) and a context takes (0.5 to 1 GiB). Cards that are no preset are here
# for their rates. What has no units for f8 widens it to f16.
GPUS = {
    "h100": _gpu(78, 3.35e12, 989, 495, 67, 1979, 1979, attention=((15, 397, 0.778, 27.3), (10.1, 22, 2.53, 5.4))),  # SXM
    "h200": _gpu(139, 4.8e12, 989, 495, 67, 1979, 1979, attention=((14.8, 417, 0.8, 28.4), (9.5, 36, 3.14, 6.9))),  # SXM
    "a100": _gpu(38.8, 1.555e12, 312, 156, 19.5, 624, 312, 2.0e10, 4.5e-6, (0.8, 0.9, 1.0),
                 ((13.3, 122, 0.478, 27.8), (14.3, 23, 1.78, 9.6))),  # SXM, 40 GB
    "a100-pcie": _gpu(38.8, 1.555e12, 312, 156, 19.5, 624, 312, host=2.0e10),  # 40 GB, NVIDIA A100 data sheet
    "a40": _gpu(44, 6.96e11, 150, 74.8, 37.4, 299, 150),
    "l40s": _gpu(44, 8.64e11, 362, 183, 91.6, 733, 733, reached=(0.62, 0.9, 0.8),
                 attention=((9.1, 120, 0.46, 7), (7.6, 10, 0.87, 4.8))),
    "b200": _gpu(175, 8.0e12, 2250, 1100, 75, 4500, 4500, reached=(0.7, 0.9, 0.76),
                 attention=((15.4, 874, 1.22, 22.7), (11.2, 102, 6.96, 1.5))),
    "mi300x": _gpu(184, 5.3e12, 1300, 0, 163, 2600, 2600),  # Triton has no TF32 there
}  # fmt: skip
CHIP_OF = {
    "h100": "sm90",
    "h200": "sm90",
    "a100": "sm80",
    "a100-pcie": "sm80",
    "a40": "sm86",
    "l40s": "sm89",
    "b200": "sm100",
    "mi300x": "gfx942",
}
RESERVE = 0.08  # of a GPU: contexts and buffers of communication libraries, and what fragments; an estimate
NETWORK = Level(REST, Link(5e-6, 1 / 5.0e10))

# Fitted to times of NCCL's calls on hosts of eight cards (aiconfigurator's tables of August 2026). The form was fitted to half
# of the rows and held against the others: medians of measured by fitted 0.98 to 1.01, nine tenths within 0.78 and 1.42.
HOSTS = {
    "a100": HostCalls(((11.4, 14.3, 22), (10.3, 12.4, 15.4), (13.9, 14.6, 16)),
                      ((188, 207, 217), (147, 184, 200), (169, 201, 206), (135, 159, 166)), 26.5, 11),
    "h100": HostCalls(((6.79, 9.96, 17.2), (5.89, 7.72, 10.9), (12, 12, 11.1)),
                      ((301, 353, 413), (251, 308, 333), (249, 323, 361), (255, 268, 270)), 21.2, 17.1),
    "h200": HostCalls(((6.83, 10, 18.3), (5.67, 7.7, 11.7), (11.3, 10.8, 12.1)),
                      ((307, 354, 416), (249, 311, 338), (249, 323, 356), (263, 280, 276)), 18.1, 14.5),
    "b200": HostCalls(((10.4, 15.5, 26.4), (9.32, 12.1, 17.3), (14, 14.5, 15.5)),
                      ((571, 661, 616), (479, 604, 639), (467, 590, 647), (296, 447, 478)), 22.3, 12.1),
    "l40s": HostCalls(((6.33, 9.88, 19.6), (6.31, 7.67, 12.5), (10.3, 11.2, 12.6)),
                      ((20.2, 5.32, 1.5), (19.8, 4.96, 1.17), (19.1, 5.02, 1.52), (21, 4.55, 1.16)), 21.9, 26.8, apart=False),
}  # fmt: skip


def _host(device: Device, of: str, assumed: str = "") -> Source:
    """GPUs of one kind in hosts of eight on a network, whose links are those of a measured host: as a switch, an all-gather of
    eight; on PCIe, which cards share, a level for each two, four and eight."""
    calls = HOSTS[of]

    def level(at: int) -> Level:
        n = 1 << at + 1
        return Level(n, Link(calls.latency[1][at] / (at + 1) / 1e6, 1e-9 / calls.rate[1][at]))

    levels = (level(2), NETWORK) if calls.apart else (level(0), level(1), level(2), Level(REST, level(2).link))
    origins = {
        "flops, bandwidth": "the data sheet, times shares: of an H200, measured; of A100, B200 and L40S, fitted",
        "attention": "fitted to a library's times" if device.classes else "assumed: the rate of products",
        "memory": "the data sheet",
        "launch, power, reserve": "assumed",
        "links in a host, calls": assumed or f"fitted to NCCL's times on eight {of.upper()} (aiconfigurator, August 2026)",
        "network": "assumed: 400 Gbit/s for each card" if calls.apart else "assumed: no faster than a host's PCIe",
    }
    measured = () if assumed else tuple(calls.tables())
    return Source(device, levels, calls=measured, reserve=RESERVE, native_sums=True, origins=origins)


SOURCES = {
    "cpu": Source(
        Device(memory=16 * GiB, bandwidth=2.0e10, launch=5e-6, vector=1.0e10, flops={"f32": 1e11, "other": 5e10},
               host=5.0e9),
        (Level(REST, Link(5e-6, 1 / 1e10)),),
        overlap=False,  # what carries messages takes a core's time: a quarter to a third was hidden where it was measured
    ),
    "h100": _host(GPUS["h100"], "h100"),
    "h200": _host(GPUS["h200"], "h200"),
    "a100": _host(GPUS["a100"], "a100"),
    "a100-pcie": _host(GPUS["a100-pcie"], "l40s", assumed="assumed: as of L40S, which share a host's PCIe too"),
    "a40": _host(GPUS["a40"], "l40s", assumed="assumed: as of L40S, which share a host's PCIe too"),
    "l40s": _host(GPUS["l40s"], "l40s"),
    "b200": _host(GPUS["b200"], "b200"),
    "mi300x": _host(GPUS["mi300x"], "h100", assumed="assumed: as of H100, whose links' data sheet says as much"),
    "tpu": Source(
        Device(memory=32 * GiB, bandwidth=1.2e12, launch=2e-6, vector=4.3e12,
               flops={"bf16": 2.75e14, "f16": 4.6e13, "f32": 4.6e13, "other": 4.3e12}, host=1.6e10),
        whole={"shape": "torus", "alpha": 1e-6, "beta": 1 / 5.0e10},
    ),
}  # fmt: skip
PRESETS = tuple(SOURCES)
