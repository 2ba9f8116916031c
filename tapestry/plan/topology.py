"""Devices and links as data: presets, files, and the mesh that a user asks for.

Costs of communication follow the alpha-beta model (Hockney 1994): a message of n bytes takes ``alpha + beta * n`` seconds
on the slowest mesh axis that it crosses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from tapestry.errors import TapestryError
from tapestry.ir.plan import Mesh, MeshAxis, device_count

GiB = 1 << 30
MAX_DEVICES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of device: memory in bytes, bandwidth of its memory in B/s, time to start a kernel in s.

    ``flops`` gives FLOP/s of contractions by dtype ("other" for the rest); element-wise work runs at ``vector`` FLOP/s.
    """

    memory: int
    bandwidth: float
    launch: float
    vector: float
    flops: Mapping[str, float]

    def rate(self, dtype: str) -> float:
        """FLOP/s of contractions in a dtype."""
        return self.flops.get(dtype, self.flops["other"])


@dataclass(frozen=True, slots=True)
class Link:
    """Latency in s and inverse bandwidth in s/B (per device, each direction)."""

    alpha: float
    beta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A mesh of equal devices with one link per mesh axis."""

    name: str
    mesh: Mesh
    links: tuple[Link, ...]
    device: Device


_PRESETS: dict[str, tuple[Device, tuple[tuple[int, Link], ...]]] = {
    # device, then (number of devices that a level spans, its link), innermost first; the last level spans the rest
    "cpu": (
        Device(memory=16 * GiB, bandwidth=2.0e10, launch=5e-6, vector=1.0e10, flops={"f32": 1e11, "other": 5e10}),
        ((1 << 30, Link(5e-6, 1 / 1e10)),),
    ),
    "h100": (
        Device(memory=80 * GiB, bandwidth=3.35e12, launch=3e-6, vector=6.0e13,
               flops={"bf16": 7.9e14, "f16": 7.9e14, "f32": 4.0e14, "other": 6.0e13}),
        ((8, Link(2e-6, 1 / 4.5e11)), (1 << 30, Link(5e-6, 1 / 5.0e10))),
    ),
    "a100-pcie": (
        Device(memory=40 * GiB, bandwidth=1.55e12, launch=3e-6, vector=1.9e13,
               flops={"bf16": 2.5e14, "f16": 2.5e14, "f32": 1.2e14, "other": 1.9e13}),
        ((1 << 30, Link(4e-6, 1 / 2.5e10)),),
    ),
}  # fmt: skip
PRESETS = tuple(_PRESETS)


def parse_mesh(text: str) -> Mesh:
    """``4``, ``2x4`` or ``dp=2,tp=4``."""
    named = (
        [i.partition("=")[::2] for i in text.split(",")]
        if "=" in text
        else [(f"d{i}", p) for i, p in enumerate(text.split("x"))]
    )
    right = all(re.fullmatch(r"[A-Za-z_]\w*", n) and re.fullmatch(r"0*[1-9][0-9]{0,5}", s) for n, s in named)
    if not right or len({n for n, _ in named}) < len(named):
        raise TapestryError(f"'{text}' is not a mesh", where="--mesh", hint="8, 2x4 or dp=2,tp=4")
    mesh = tuple(MeshAxis(n, int(s)) for n, s in named)
    if device_count(mesh) > MAX_DEVICES:
        raise TapestryError(f"a mesh of {device_count(mesh):,} devices", where="--mesh", hint=f"at most {MAX_DEVICES:,}")
    return mesh


def topology(mesh: Mesh, source: str = "cpu", memory: int | None = None) -> Topology:
    """A topology from a preset's name or a JSON file, for a mesh; ``memory`` (bytes per device) overrides its own.

    A mesh axis gets the link of the smallest level that spans it and all faster axes.
    """
    device, levels = _PRESETS[source] if source in _PRESETS else _read(Path(source))
    links: list[Link] = []
    span = 1
    for a in reversed(mesh):
        span *= a.size
        links.append(next(link for reach, link in levels if span <= reach or reach == levels[-1][0]))
    found = Topology(name=source, mesh=mesh, links=tuple(reversed(links)), device=device)
    return found if memory is None else replace(found, device=replace(device, memory=memory))


def to_data(topo: Topology) -> dict[str, Any]:
    """What a build directory keeps of a topology; `from_data` reads it back."""
    d = topo.device
    return {
        "name": topo.name, "mesh": [[a.name, a.size] for a in topo.mesh],
        "links": [{"alpha": k.alpha, "beta": k.beta} for k in topo.links],
        "device": {
            "memory": d.memory, "bandwidth": d.bandwidth, "launch": d.launch, "vector": d.vector, "flops": dict(d.flops),
        },
    }  # fmt: skip


def from_data(data: Mapping[str, Any]) -> Topology:
    """The topology that `to_data` described.

    Raises:
        TapestryError: it describes none.
    """
    try:
        d = data["device"]
        device = Device(
            memory=int(d["memory"]), bandwidth=float(d["bandwidth"]), launch=float(d["launch"]), vector=float(d["vector"]),
            flops={str(k): float(v) for k, v in d["flops"].items()},
        )  # fmt: skip
        mesh = tuple(MeshAxis(str(name), int(size)) for name, size in data["mesh"])
        links = tuple(Link(float(k["alpha"]), float(k["beta"])) for k in data["links"])
        found = Topology(name=str(data["name"]), mesh=mesh, links=links, device=device)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise TapestryError(f"not a topology: {type(e).__name__} {e}", hint="compile the model again") from None
    rates = (device.bandwidth, device.vector, *device.flops.values())
    if len(links) != len(mesh) or "other" not in device.flops or min(rates) <= 0:
        raise TapestryError("not a topology: links or rates are missing", hint="compile the model again")
    return found


def default_mesh(source: str) -> Mesh | None:
    """The mesh that a topology file states, if any."""
    if source in _PRESETS or not Path(source).is_file():
        return None
    text = _document(Path(source)).get("mesh")
    return None if text is None else parse_mesh(str(text))


def _document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise TapestryError(
            f"not a topology: {e}", where=str(path), hint=f"a JSON file, or one of {', '.join(PRESETS)}"
        ) from None
    if not isinstance(found, dict):
        raise TapestryError("not a topology: not a JSON object", where=str(path))
    return found


def _read(path: Path) -> tuple[Device, tuple[tuple[int, Link], ...]]:
    """``{"mesh": "2x4", "device": {memory, bandwidth, launch, vector, flops}, "levels": [{devices, alpha, beta}, …]}``."""
    data = _document(path)
    try:
        d = data["device"]
        flops = {str(k): float(v) for k, v in d["flops"].items()}
        flops.setdefault("other", min(flops.values()))
        device = Device(
            memory=parse_bytes(str(d["memory"])), bandwidth=float(d["bandwidth"]), launch=float(d.get("launch", 0.0)),
            vector=float(d.get("vector", flops["other"])), flops=flops,
        )  # fmt: skip
        levels = tuple((int(v.get("devices", 1 << 30)), Link(float(v["alpha"]), float(v["beta"]))) for v in data["levels"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise TapestryError(f"not a topology: {type(e).__name__} {e}", where=str(path), hint="see docs/topology.md") from None
    rates = [device.bandwidth, device.vector, *flops.values(), *(reach for reach, _ in levels)]
    costs = [device.launch, *(c for _, link in levels for c in (link.alpha, link.beta))]
    sane = all(isfinite(x) and x > 0 for x in rates) and all(isfinite(x) and x >= 0 for x in costs)
    if not levels or not sane:
        raise TapestryError("not a topology: rates must be positive, costs not negative, levels not empty", where=str(path))
    return device, levels


def parse_bytes(text: str) -> int:
    """``16GiB``, ``800MB`` or a number of bytes."""
    m = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kKMGT]?)(i?)[bB]?\s*", text)
    if not m:
        raise TapestryError(f"'{text}' is not an amount of memory", hint="16GiB, 800MB or a number of bytes")
    power = " KMGT".index(m.group(2).upper() or " ")
    value = int(float(m.group(1)) * (1024 if m.group(3) else 1000) ** power)
    if value <= 0:
        raise TapestryError(f"'{text}' is no memory at all")
    return value
