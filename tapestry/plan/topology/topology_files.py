"""Topology files, and a topology for a mesh from a file or a preset (docs/reference/topology.md)."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import isfinite, prod
from pathlib import Path
from typing import Any, cast

import numpy as np

from tapestry.errors import TapestryError, similar
from tapestry.interop import instance_map
from tapestry.ir.plan import Mesh, MeshAxis, coordinates, device_count
from tapestry.plan.topology.fabric import (
    HOST,
    HOST_LATENCY,
    MAX_JOINED,
    CallTimes,
    Device,
    Fabric,
    Link,
    Topology,
    Wire,
    balanced,
    calls_data,
    classes_data,
    divides,
    of_map,
    pairs,
    read_calls,
    read_classes,
    read_figures,
    read_margin,
    read_overlap,
    read_power,
    routes,
    weakest,
    wires,
)
from tapestry.plugins import entry_points as plugins

# Topologies as data, for build directories.


def to_data(topo: Topology) -> dict[str, Any]:
    """What a build directory keeps of a topology; `from_data` reads it back."""
    out: dict[str, Any] = {
        "name": topo.name, "mesh": [_axis_data(a) for a in topo.mesh],
        "links": [{"alpha": k.alpha, "beta": k.beta} for k in topo.links],
        "device": device_data(topo.device),
    }  # fmt: skip
    if topo.native_sums:
        out["native_sums"] = True
    if topo.kinds:
        distinct = [d for n, d in enumerate(topo.kinds) if d not in topo.kinds[:n]]
        out["kinds"] = [device_data(d) for d in distinct]
        out["kind"] = [distinct.index(d) for d in topo.kinds]
    if topo.joined:
        out["joined"] = [
            {
                "kind": f.kind, "stride": f.stride, "size": f.size, "alpha": f.link.alpha, "beta": f.link.beta,
                "wires": [[w.src, w.dst, w.alpha, w.beta] for w in f.wires],
            }
            for f in topo.joined
        ]  # fmt: skip
    if topo.notes:
        out["notes"] = list(topo.notes)
    if topo.calls:
        out["collectives"] = calls_data(topo.calls)
    if not topo.overlap:
        out["overlap"] = False
    if topo.margin:
        out["margin"] = topo.margin
    if topo.alone:
        out["alone"] = device_data(topo.alone)
    return out


def _axis_data(axis: MeshAxis) -> list[Any]:
    more = [axis.weights, axis.order] if axis.order else [axis.weights] if axis.weights else []
    return [axis.name, axis.size, *more]


def from_data(data: Mapping[str, Any]) -> Topology:
    """The topology that `to_data` described.

    Raises:
        TapestryError: it describes none.
    """
    try:
        device = _device_of_topology_data(data["device"])
        found_kinds = [_device_of_topology_data(d) for d in data.get("kinds", ())]
        kinds = tuple(found_kinds[operator.index(k)] for k in data.get("kind", ()))
        mesh = tuple(
            MeshAxis(str(name), int(size), *(tuple(int(w) for w in numbers) for numbers in rest[:2]))
            for name, size, *rest in data["mesh"]
        )
        links = tuple(Link(float(k["alpha"]), float(k["beta"])) for k in data["links"])
        found = Topology(
            name=str(data["name"]), mesh=mesh, links=links, device=device, joined=tuple(map(_fabric, data.get("joined", ()))),
            notes=tuple(map(str, data.get("notes", ()))), kinds=kinds, calls=read_calls(data.get("collectives", ())),
            overlap=read_overlap(data), alone=_device_of_topology_data(data["alone"]) if "alone" in data else None,
            margin=read_margin(data), native_sums=data.get("native_sums", False) is True,
        )  # fmt: skip
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise TapestryError(f"not a topology: {type(e).__name__} {e}", hint="compile the model again") from None
    every = (device, *kinds, *([found.alone] if found.alone else []))
    rates = [r for d in every for r in (d.bandwidth, d.vector, d.host, *d.flops.values())]
    if any("other" not in d.flops for d in every) or (kinds and len(kinds) != device_count(mesh)):
        raise TapestryError("not a topology: devices are missing", hint="compile the model again")
    if any(a.weights and (len(a.weights) != a.size or min(a.weights) < 1) for a in mesh):
        raise TapestryError("not a topology: the shares of a mesh axis", hint="compile the model again")
    if any(a.order and sorted(a.order) != list(range(a.size)) for a in mesh):
        raise TapestryError("not a topology: the order of a mesh axis", hint="compile the model again")
    if len(links) != len(mesh) or min(rates) <= 0:
        raise TapestryError("not a topology: links or rates are missing", hint="compile the model again")
    if found.joined and not _whole(found):
        raise TapestryError("not a topology: what joins the devices is not the mesh", hint="compile the model again")
    return found


def device_data(d: Device) -> dict[str, Any]:
    out: dict[str, Any] = {
        "memory": d.memory,
        "host": d.host,
        "host_latency": d.host_latency,
        "bandwidth": d.bandwidth,
        "launch": d.launch,
        "vector": d.vector,
        "flops": dict(d.flops),
    }
    if d.classes:
        out["classes"] = classes_data(d.classes)
    out |= {"reserve": d.reserve} if d.reserve else {}
    out |= {"power": d.power} if d.power != 1 else {}
    return {**out, "name": d.name} if d.name else out


def _device_of_topology_data(d: Mapping[str, Any]) -> Device:
    return Device(
        memory=int(d["memory"]), bandwidth=float(d["bandwidth"]), launch=float(d["launch"]), vector=float(d["vector"]),
        flops={str(k): float(v) for k, v in d["flops"].items()}, name=str(d.get("name", "")),
        host=float(d.get("host", HOST)), host_latency=float(d.get("host_latency", HOST_LATENCY)),
        classes=read_classes(d.get("classes", {})), reserve=int(d.get("reserve", 0)), power=read_power(d),
    )  # fmt: skip


def _fabric(f: Mapping[str, Any]) -> Fabric:
    wires = tuple(Wire(int(i), int(j), float(alpha), float(beta)) for i, j, alpha, beta in f["wires"])
    out = Fabric(
        kind=str(f["kind"]), stride=int(f["stride"]), size=int(f["size"]), wires=wires,
        link=Link(float(f["alpha"]), float(f["beta"])),
    )  # fmt: skip
    costs = [c for k in (out.link, *wires) for c in (k.alpha, k.beta)]
    if not all(isfinite(c) and c >= 0 for c in costs) or not all(
        0 <= w.src < out.size and 0 <= w.dst < out.size for w in wires
    ):
        raise ValueError("costs of a link must be finite and ≥ 0, its ends below the size of its fabric")
    return out


def _whole(topo: Topology) -> bool:
    """Whether the fabrics are digits that make up the mesh, and each of them joins its devices."""
    stride = 1
    for f in sorted(topo.joined, key=lambda f: f.stride):
        if f.stride != stride or f.size < 2 or (f.kind == "switch") != (not f.wires):
            return False
        stride *= f.size
        if f.wires:
            routes(f.size, f.wires)
    return stride == device_count(topo.mesh) and divides(topo.mesh, tuple(f.stride for f in topo.joined))


# Topologies by name, for meshes of any size, and the rates of GPUs, which price plans and kernels alike.
#
# Of GPUs the figures are those of the vendor's data sheet (dense), times the shares of them that large products and copies
# reach: a product of 8192^3 in bf16 ran at 769 to 798 of 989 TFLOP/s on an H200, a copy at 4.3 of 4.8 TB/s.


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
) -> Device:  # fmt: skip
    """A GPU from its data sheet, in GiB that a process can use and TFLOP/s; ``vector``: of float32 without matrix units."""
    flops = {"bf16": half, "f16": half, **dict.fromkeys(("i8", "u8"), i8), **dict.fromkeys(EIGHTS, f8)}
    flops |= {"tf32": tf32} if tf32 else {}
    plain = vector * VECTOR * 1e12
    return Device(
        memory=int(memory * GiB), bandwidth=bandwidth * MEMORY, launch=3e-6, vector=plain, host=host, power=POWER,
        flops={**{t: x * MATRIX * 1e12 for t, x in flops.items()}, "f32": plain, "other": plain},
    )  # fmt: skip


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
    "h100": "sm90", "h200": "sm90", "a100-pcie": "sm80", "a40": "sm86", "l40s": "sm89", "b200": "sm100", "mi300x": "gfx942",
}  # fmt: skip
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


# The mesh that a user asks for.


MAX_DEVICES = 4096


def parse_mesh(text: str) -> Mesh:
    """``4``, ``2x4`` or ``dp=2,tp=4``."""
    named = (
        [i.partition("=")[::2] for i in text.split(",")]
        if "=" in text
        else [(f"d{i}", p) for i, p in enumerate(text.split("x"))]
    )
    right = all(re.fullmatch(r"[A-Za-z_]\w*", n) and re.fullmatch(r"0*[1-9][0-9]{0,5}", s) for n, s in named)
    if not right or len({n for n, _ in named}) < len(named):
        twice = next((f"{n} stands twice" for n, _ in named if [m for m, _ in named].count(n) > 1), "")
        raise TapestryError(f"'{text}' is not a mesh", where="--mesh", why=twice, hint="8, 2x4 or dp=2,tp=4")
    mesh = tuple(MeshAxis(n, int(s)) for n, s in named)
    if device_count(mesh) > MAX_DEVICES:
        raise TapestryError(f"a mesh of {device_count(mesh):,} devices", where="--mesh", hint=f"at most {MAX_DEVICES:,}")
    return mesh


# Uneven shares of mesh axes, where devices differ: in proportion to what the weakest device at each coordinate has.


FINEST = 32  # the largest weight
MEASURES: tuple[Callable[[Device], float], ...] = (
    lambda d: d.rate("f32"), lambda d: d.bandwidth, lambda d: float(d.memory),
)  # fmt: skip


def shared(topo: Topology) -> list[Topology]:
    """The topology with equal shares, and, where devices differ, with shares of every mesh axis in proportion to contraction
    rate, to memory bandwidth, and to memory."""
    out = [topo]
    for measure in MEASURES if topo.kinds else ():
        value = topo.each(measure)
        coords = np.array(coordinates(topo.mesh)).reshape(len(value), -1)
        mesh = tuple(_weighted(a, value, coords[:, k]) for k, a in enumerate(topo.mesh))
        if all(mesh != t.mesh for t in out):
            out.append(replace(topo, mesh=mesh))
    return out


def _weighted(axis: MeshAxis, value: np.ndarray, at: np.ndarray) -> MeshAxis:
    weakest = [float(value[at == k].min()) for k in range(axis.size)]
    part = [w / max(weakest) for w in weakest]
    tries = [tuple(max(1, round(scale * p)) for p in part) for scale in range(1, FINEST + 1)]
    weights = min(tries, key=lambda t: max(abs(w / max(t) - p) / p for w, p in zip(t, part, strict=True)))
    return replace(axis, weights=() if len({*weights}) == 1 else weights)


# The fabrics that join a mesh of a given size, from what a file or a preset says for any size.


Joined = tuple[tuple[Link, ...], tuple[Fabric, ...], tuple[str, ...]]
MAX_WIRES = 1 << 16
OPTION = {"tree": "children", "star": "centre", "linked rings": "rings"}


def joined(source: Source, mesh: Mesh) -> Joined:
    """(slowest link of each mesh axis, fabrics, notes).

    Raises:
        TapestryError: the mesh does not fit, or a device cannot reach another.
    """
    if source.levels:
        return _by_level(source.levels, mesh)
    n, notes = device_count(mesh), ()
    if source.whole:
        fabrics, notes = _spread(source.whole, n, 1, mesh)
    else:
        fabrics, stride = (), 1
        for a in reversed(mesh):
            if a.size > 1 and a.name not in source.axes:
                raise TapestryError(
                    f"nothing says how mesh axis '{a.name}' is joined", hint=f"'interconnect' names {', '.join(source.axes)}"
                )
            if a.size > 1:
                found, more = _spread(source.axes[a.name], a.size, stride, (a,))
                fabrics, notes = (*found, *fabrics), (*notes, *more)
            stride *= a.size
    return _slowest(fabrics, mesh), fabrics, notes


def _slowest(fabrics: tuple[Fabric, ...], mesh: Mesh) -> tuple[Link, ...]:
    out: list[Link] = []
    stride = 1
    for a in reversed(mesh):
        crossed = [f.link for f in fabrics if f.stride < stride * a.size and stride < f.stride * f.size]
        out.append(Link(max((k.alpha for k in crossed), default=0.0), max((k.beta for k in crossed), default=0.0)))
        stride *= a.size
    return tuple(reversed(out))


def _by_level(levels: tuple[Level, ...], mesh: Mesh) -> Joined:
    """A mesh axis inside one level is a switch (or the level's shape); one that spans several levels is cut where they end.
    Where the axis does not divide so, it is a switch of the slowest link."""
    links: list[Link] = []
    span, straddles = 1, False
    n = device_count(mesh)
    ends = tuple(v.reach for v in levels[:-1] if v.reach < n)
    for a in reversed(mesh):
        straddles |= any(span < e < span * a.size for e in ends)
        span *= a.size
        links.append(next(v.link for v in levels if span <= v.reach or v is levels[-1]))
    fits = divides(mesh, ends)
    shaped = any(v.spec for v in levels)
    if shaped and not fits:
        raise TapestryError(f"{n} devices do not divide into levels of {', '.join(map(str, ends))}", hint="another --mesh")
    if not fits or not (straddles or shaped):
        return tuple(reversed(links)), (), ()
    fabrics: tuple[Fabric, ...] = ()
    low = 1
    for v, end in zip(levels, (*ends, n), strict=False):
        if end > low:
            spec = v.spec or {"shape": "switch", "alpha": v.link.alpha, "beta": v.link.beta}
            fabrics, low = (*_spread(spec, end // low, low, ())[0], *fabrics), end
    return tuple(reversed(links)), fabrics, ()


def _spread(spec: Mapping[str, Any], size: int, stride: int, mesh: Mesh) -> tuple[tuple[Fabric, ...], tuple[str, ...]]:
    """Fabrics of one spec for ``size`` devices ``stride`` apart, which make up ``mesh`` (if they do), and notes."""
    link, shape, sizes, notes, kind = Link(spec["alpha"], spec["beta"]), spec.get("shape", ""), spec.get("sizes", ()), (), ""
    found: tuple[tuple[int, int], ...] = ()
    if "map" in spec:
        count, found, sizes, kind, notes = of_map(spec["map"])
        shape = "torus" if sizes else "map"
        if count != size:
            raise TapestryError(f"a map of {count} devices for {size}", hint=f"--devices {count}")
    if shape == "torus":
        if spec.get("links"):
            raise TapestryError("the links of a torus are all alike", hint="write it as a map with all its rows")
        return _torus(sizes or _sides(size, mesh), size, stride, link), notes
    if shape == "switch":
        return (Fabric(kind="switch", stride=stride, size=size, link=link),) if size > 1 else (), notes
    if size > MAX_JOINED:
        raise TapestryError(f"{size:,} devices joined link by link", hint=f"at most {MAX_JOINED:,}; more in levels, or a torus")
    found = found if shape == "map" else pairs(shape, size, _option(spec, shape, size))
    return (_wired(kind or shape, size, stride, wires(found, link, spec.get("links", {}))),) if size > 1 else (), notes


def _option(spec: Mapping[str, Any], shape: str, size: int) -> int:
    value = spec.get(OPTION.get(shape, ""), 0)
    if not 0 <= value < max(size, 1):
        raise TapestryError(f"'{OPTION[shape]}' of {value} for a {shape} of {size} devices")
    return value


def _wired(kind: str, size: int, stride: int, found: tuple[Any, ...]) -> Fabric:
    if len(found) > MAX_WIRES:
        raise TapestryError(f"{len(found):,} links in one {kind}", hint=f"at most {MAX_WIRES:,}; a switch, or levels")
    routes(size, found)
    slowest = Link(max((w.alpha for w in found), default=0.0), max((w.beta for w in found), default=0.0))
    return Fabric(kind=kind, stride=stride, size=size, link=slowest, wires=found)


def _sides(size: int, mesh: Mesh) -> tuple[int, ...]:
    """Sides of a torus when none are given: the mesh axes, the largest ones cut as evenly as may be until there are three."""
    sides = [[a.size] for a in mesh if a.size > 1] or [[size]]
    while sum(map(len, sides)) < 3:
        at = max(range(len(sides)), key=lambda k: max(sides[k]))
        halved = balanced(prod(sides[at]), len(sides[at]) + 1)
        if len(halved) <= len(sides[at]):
            break
        sides[at] = list(halved)
    return tuple(n for side in sides for n in side)


def _torus(sizes: tuple[int, ...], size: int, stride: int, link: Link) -> tuple[Fabric, ...]:
    """A ring per side; the last side is the fastest digit."""
    if prod(sizes) != size:
        raise TapestryError(f"a torus of {'x'.join(map(str, sizes))} for {size} devices", hint=f"--devices {prod(sizes)}")
    out: list[Fabric] = []
    for n in reversed(sizes):
        if n > MAX_JOINED:
            raise TapestryError(f"a ring of {n:,} devices", hint=f"at most {MAX_JOINED:,} on each side of a torus")
        if n > 1:
            out.append(_wired("ring", n, stride, wires(pairs("ring", n, 0), link, {})))
        stride *= n
    return tuple(reversed(out))


__all__ = ["GiB", "default_mesh", "linked", "parse_bytes", "topology"]
KIND = "topologies"  # of plug-ins
PAGE = "see docs/reference/topology.md"
KEYS = {
    "mesh", "device", "others", "levels", "interconnect", "instance_map", "link", "links", "collectives", "overlap",
    "margin", "alone", "measured", "fit", "memory", "bandwidth", "flops", "power", "vector", "launch", "host",
    "host_latency", "name", "classes", "reserve", "devices", "alpha", "beta", "shape", "children",
    "centre", "rings", "sizes", "map", "from", "to", "at", "call", "group", "stride", "points", "rate",
}  # fmt: skip
OWN_WORDS = ("flops", "interconnect", "classes", "at")  # what is in these may have any name


def topology(
    mesh: Mesh, source: str = "cpu", memory: int | None = None, *, precision: str = "ieee", reserve: str | None = None
) -> Topology:  # fmt: skip
    """A topology from a preset's name or a JSON file, for a mesh; ``memory`` (bytes per device) overrides its own.

    Args:
        precision: of products of f32, whose rate is then that of f32 where the devices have several.
        reserve: what plans leave free of each device's memory, in percent or bytes; by default the preset's share, and nothing
            where ``memory`` is given.

    Raises:
        TapestryError: the file does not read, or does not fit the mesh; a device that cannot reach another is named.
    """
    found = SOURCES[source] if source in SOURCES else _topology_source(source)
    try:
        links, fabrics, notes = joined(found, mesh)
        kinds = _kinds(found, mesh)
    except TapestryError as e:
        raise TapestryError(e.what, where=e.where or source, why=e.why, hint=e.hint) from None
    alone = found.alone
    if memory is not None:
        kinds = [replace(d, memory=memory, reserve=0) for d in kinds]
        alone = alone and replace(alone, memory=memory, reserve=0)
    keep = reserve or f"{0 if memory else found.reserve:.0%}"
    kinds = [_kept_back(d, keep).at_precision(precision) for d in kinds]
    alone = alone and _kept_back(alone, keep).at_precision(precision)
    if alone and device_count(mesh) == 1:  # no other works
        kinds = [alone]
    out = Topology(
        name=source, mesh=mesh, links=links, device=found.device, joined=fabrics, notes=notes, calls=found.calls,
        overlap=found.overlap, alone=alone, margin=found.margin, figures=found.figures,
    )  # fmt: skip
    alike = all(d == kinds[0] for d in kinds)
    return replace(out, device=kinds[0] if alike else weakest(kinds), kinds=() if alike else tuple(kinds))


def linked(topo: Topology, links: str) -> Topology:
    """A topology whose devices are joined as a map says, each link as its slowest one; what was measured of others goes.

    Raises:
        TapestryError: the map is of other devices, or a device cannot reach another.
    """
    slowest = Link(max(k.alpha for k in topo.links), max(k.beta for k in topo.links))
    spec: dict[str, Any] = {"map": links, "alpha": slowest.alpha, "beta": slowest.beta, "sizes": (), "links": {}}
    found, fabrics, notes = joined(Source(topo.device, (), {}, spec), topo.mesh)
    return replace(topo, name=f"{topo.name}, links of the model", links=found, joined=fabrics, notes=notes, calls=())


def _kept_back(d: Device, reserve: str) -> Device:
    """The device with the memory that plans may use."""
    percent = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*%\s*", reserve)
    zero = re.fullmatch(r"\s*0+\s*([kKMGT]?i?[bB])?\s*", reserve)
    kept = int(d.memory * float(percent.group(1)) / 100) if percent else 0 if zero else parse_bytes(reserve)
    if kept >= d.memory:
        what = f"'{reserve}' leaves nothing of {d.memory} bytes"
        raise TapestryError(what, where="--memory-reserve", hint="less than the memory: 8%, or 2GiB")
    return replace(d, memory=d.memory - kept, reserve=d.reserve + kept)


def _kinds(source: Source, mesh: Mesh) -> list[Device]:
    """Every device; what is said later of a device replaces what was said before."""
    out = [source.device] * device_count(mesh)
    names, where = [a.name for a in mesh], coordinates(mesh)
    for other in source.others:
        missing = [a for a in other.at if a not in names]
        far = [n for n in other.numbers if not 0 <= n < len(out)]
        if missing or far:
            raise TapestryError(
                f"there is no mesh axis '{missing[0]}'" if missing else f"there is no device {far[0]}",
                hint=f"of {len(out)} devices",
            )
        for n, at in enumerate(where):
            if n in other.numbers or (other.at and all(at[names.index(a)] in ks for a, ks in other.at.items())):
                out[n] = other.device
    return out


def default_mesh(source: str) -> Mesh | None:
    """The mesh that a topology file (or a plug-in's document) states, or the devices of its map, if any."""
    if source in SOURCES or not (Path(source).is_file() or plugins.has(KIND, source)):
        return None
    document = _document(source)
    if document.get("mesh") is None and isinstance(document.get("instance_map"), str):
        return (MeshAxis("d0", instance_map.parse_instances(document["instance_map"]).count),)
    text = document.get("mesh")
    return None if text is None else parse_mesh(str(text))


def _document(source: str) -> dict[str, Any]:
    """What a file holds, or what a plug-in gives in the place of one."""
    path = Path(source)
    if not path.is_file() and plugins.has(KIND, source):
        found = plugins.get(KIND, source)
        if not isinstance(found, dict):
            raise plugins.refused(KIND, source, "it is no dict of what a topology file says")
        return cast(dict[str, Any], found)
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as e:
        hint = f"{similar(source, ('auto', *PRESETS, *plugins.names(KIND)))}, or a JSON file"
        why = "no such preset or file" if isinstance(e, FileNotFoundError) else e
        raise TapestryError(f"not a topology: {why}", where=source, hint=hint) from None
    if not isinstance(found, dict):
        raise TapestryError("not a topology: not a JSON object", where=source)
    return cast(dict[str, Any], found)


def _topology_source(path: str) -> Source:
    data = _document(path)
    for word, meant in _misspelt(data):
        raise TapestryError(f"not a topology: there is no key '{word}'", where=path, hint=f"'{meant}' is similar; {PAGE}")
    try:
        device = _device(data["device"])
        levels = tuple(
            Level(int(v.get("devices", REST)), Link(float(v["alpha"]), float(v["beta"])), _spec(v))
            for v in data.get("levels", ())
        )
        axes, whole = _interconnect(data)
        others = tuple(_other(data["device"], o) for o in data.get("others", ()))
        calls, overlap, margin = read_calls(data.get("collectives", ())), read_overlap(data), read_margin(data)
        figures = read_figures(data)
        alone = _like(data["device"], data["alone"]) if "alone" in data else None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        what = f"the key {e} is missing" if isinstance(e, KeyError) else f"{type(e).__name__} {e}"
        raise TapestryError(f"not a topology: {what}", where=path, hint=PAGE) from None
    every = [device, *(o.device for o in others), *([alone] if alone else [])]
    rates = [(f"flops.{t}", r) for d in every for t, r in d.flops.items()]
    rates += [(k, getattr(d, k)) for d in every for k in ("bandwidth", "vector", "host")]
    rates += [("levels[].devices", v.reach) for v in levels]
    costs = [(k, getattr(d, k)) for d in every for k in ("launch", "host_latency")]
    costs += [(f"levels[].{k}", getattr(v.link, k)) for v in levels for k in ("alpha", "beta")]
    wrong = [f"rates must be positive, and '{k}' is {x:g}" for k, x in rates if not (isfinite(x) and x > 0)]
    wrong += [f"costs must not be negative, and '{k}' is {x:g}" for k, x in costs if not (isfinite(x) and x >= 0)]
    if (count := [bool(levels), bool(axes), bool(whole)].count(True)) != 1:
        wrong.append(f"one of 'levels', 'interconnect' and 'instance_map' must be given, and {count} are")
    if wrong:
        raise TapestryError(f"not a topology: {wrong[0]}", where=path, hint=PAGE)
    return Source(device, levels, axes, whole, others, calls, overlap, alone, margin, figures)


def _misspelt(found: Any, free: bool = False) -> Iterator[tuple[str, str]]:
    """Words in the place of keys that are none, but resemble one; ``free`` where names are the writer's own."""
    if isinstance(found, list):
        for x in cast(list[Any], found):
            yield from _misspelt(x)
    for key, x in cast(dict[str, Any], found).items() if isinstance(found, dict) else ():
        if not free and key not in KEYS:
            yield from ((key, meant) for meant in get_close_matches(key, KEYS, 1, 0.75))
        if key not in ("measured", "fit"):
            yield from _misspelt(x, key in OWN_WORDS)


def _other(base: Mapping[str, Any], o: Mapping[str, Any]) -> Other:
    """Devices that differ from the file's ``device`` in what is given."""
    numbers = tuple(int(n) for n in o.get("devices", ()))
    at = {str(a): tuple(int(k) for k in ks) for a, ks in o.get("at", {}).items()}
    if bool(numbers) == bool(at):
        raise ValueError("'others' need 'devices' or 'at'")
    return Other(_like(base, {k: v for k, v in o.items() if k not in ("devices", "at")}), numbers, at)


def _like(base: Mapping[str, Any], own: Mapping[str, Any]) -> Device:
    """Copy ``base``, overridden by ``own``. Own rates drop the base's measured classes."""
    rated = any(k in own for k in ("flops", "vector", "bandwidth", "launch"))
    return _device({**base, **({"classes": {}} if rated else {}), **own})


def _device(d: Mapping[str, Any]) -> Device:
    flops = {str(k): float(v) for k, v in d["flops"].items()}
    flops.setdefault("other", min(flops.values()))
    return Device(
        memory=parse_bytes(str(d["memory"])), bandwidth=float(d["bandwidth"]), launch=float(d.get("launch", 0.0)),
        vector=float(d.get("vector", flops["other"])), flops=flops, host=float(d.get("host", HOST)),
        host_latency=float(d.get("host_latency", HOST_LATENCY)), name=str(d.get("name", "")),
        classes=read_classes(d.get("classes", {})), reserve=int(d.get("reserve", 0)), power=read_power(d),
    )  # fmt: skip


def _interconnect(data: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """(specs by mesh axis, spec of the whole mesh); at most one of them is not empty."""
    given: dict[str, Any] | None = data.get("interconnect")
    if "instance_map" in data:
        link = data.get("link", {})
        given = {"map": str(data["instance_map"]), "alpha": link["alpha"], "beta": link["beta"], "links": data.get("links", [])}
    if given is None:
        return {}, {}
    if "shape" in given or "map" in given:
        return {}, _spec(given)
    return {str(name): _spec(spec) for name, spec in given.items()}, {}


def _spec(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of one shape, in the types that `join` expects; empty when no shape is named."""
    if "shape" not in given and "map" not in given:
        return {}
    out: dict[str, Any] = {k: str(given[k]) for k in ("shape", "map") if k in given}
    out |= {k: int(given[k]) for k in ("children", "centre", "rings") if k in given}
    out["sizes"] = tuple(int(n) for n in given.get("sizes", ()))
    out["alpha"], out["beta"] = float(given["alpha"]), float(given["beta"])
    out["links"] = {
        (int(v["from"]), int(v["to"])): Link(float(v.get("alpha", out["alpha"])), float(v.get("beta", out["beta"])))
        for v in given.get("links", ())
    }
    costs = [c for k in (Link(out["alpha"], out["beta"]), *out["links"].values()) for c in (k.alpha, k.beta)]
    if not all(isfinite(c) and c >= 0 for c in costs) or (
        out["sizes"] and (min(out["sizes"]) < 1 or prod(out["sizes"]) > 1 << 20)
    ):
        raise ValueError("costs must not be negative, sizes not below 1")
    return out


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
