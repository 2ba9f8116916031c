"""Topologies by name, for meshes of any size. Where the figures come from: docs/topology.md."""

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
    costs: str = ""


SOURCES = {
    "cpu": Source(
        Device(memory=16 * GiB, bandwidth=2.0e10, launch=5e-6, vector=1.0e10, flops={"f32": 1e11, "other": 5e10},
               host=5.0e9),
        (Level(REST, Link(5e-6, 1 / 1e10)),),
        overlap=False,  # what carries messages takes a core's time: a quarter to a third was hidden where it was measured
    ),
    "h100": Source(
        Device(memory=80 * GiB, bandwidth=3.35e12, launch=3e-6, vector=6.0e13,
               flops={"bf16": 7.9e14, "f16": 7.9e14, "f32": 4.0e14, "other": 6.0e13,
                      **dict.fromkeys(("f8e4m3fn", "f8e5m2", "i8", "u8"), 1.58e15)}, host=5.0e10),
        (Level(8, Link(2e-6, 1 / 4.5e11)), Level(REST, Link(5e-6, 1 / 5.0e10))),
    ),
    "a100-pcie": Source(
        Device(memory=40 * GiB, bandwidth=1.55e12, launch=3e-6, vector=1.9e13,
               flops={"bf16": 2.5e14, "f16": 2.5e14, "f32": 1.2e14, "other": 1.9e13,
                      **dict.fromkeys(("f8e4m3fn", "f8e5m2"), 2.5e14), **dict.fromkeys(("i8", "u8"), 5.0e14)}, host=2.0e10),
        (Level(REST, Link(4e-6, 1 / 2.5e10)),),
    ),
    "tpu": Source(
        Device(memory=32 * GiB, bandwidth=1.2e12, launch=2e-6, vector=4.3e12,
               flops={"bf16": 2.75e14, "f16": 4.6e13, "f32": 4.6e13, "other": 4.3e12}, host=1.6e10),
        whole={"shape": "torus", "alpha": 1e-6, "beta": 1 / 5.0e10},
    ),
}  # fmt: skip
PRESETS = tuple(SOURCES)
