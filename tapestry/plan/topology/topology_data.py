"""Topologies as data, for build directories."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import asdict, astuple
from math import isfinite
from typing import Any

from tapestry.errors import TapestryError
from tapestry.ir.plan import MeshAxis, device_count
from tapestry.plan.topology.fabric import HOST, HOST_LATENCY, Device, Fabric, Link, Topology, Wire, divides
from tapestry.plan.topology.measured_costs import (
    calls_data,
    classes_data,
    read_calls,
    read_classes,
    read_margin,
    read_overlap,
    read_power,
)
from tapestry.plan.topology.routing import routes


def to_data(topo: Topology) -> dict[str, Any]:
    """What a build directory keeps of a topology; `from_data` reads it back."""
    out: dict[str, Any] = {
        "name": topo.name, "mesh": [_axis_data(a) for a in topo.mesh],
        "links": [*map(asdict, topo.links)],
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
                "kind": f.kind,
                "stride": f.stride,
                "size": f.size,
                "alpha": f.link.alpha,
                "beta": f.link.beta,
                "wires": [list(astuple(w)) for w in f.wires],
            }
            for f in topo.joined
        ]
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
        device = read_device(data["device"])
        found_kinds = [read_device(d) for d in data.get("kinds", ())]
        kinds = tuple(found_kinds[operator.index(k)] for k in data.get("kind", ()))
        mesh = tuple(
            MeshAxis(str(name), int(size), *(tuple(int(w) for w in numbers) for numbers in rest[:2]))
            for name, size, *rest in data["mesh"]
        )
        links = tuple(Link(float(k["alpha"]), float(k["beta"])) for k in data["links"])
        found = Topology(
            name=str(data["name"]),
            mesh=mesh,
            links=links,
            device=device,
            joined=tuple(map(_fabric, data.get("joined", ()))),
            notes=tuple(map(str, data.get("notes", ()))),
            kinds=kinds,
            calls=read_calls(data.get("collectives", ())),
            overlap=read_overlap(data),
            alone=read_device(data["alone"]) if "alone" in data else None,
            margin=read_margin(data),
            native_sums=data.get("native_sums", False) is True,
        )
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


def read_device(d: Mapping[str, Any]) -> Device:
    return Device(
        memory=int(d["memory"]),
        bandwidth=float(d["bandwidth"]),
        launch=float(d["launch"]),
        vector=float(d["vector"]),
        flops={str(k): float(v) for k, v in d["flops"].items()},
        name=str(d.get("name", "")),
        host=float(d.get("host", HOST)),
        host_latency=float(d.get("host_latency", HOST_LATENCY)),
        classes=read_classes(d.get("classes", {})),
        reserve=int(d.get("reserve", 0)),
        power=read_power(d),
    )


def _fabric(f: Mapping[str, Any]) -> Fabric:
    wires = tuple(Wire(int(i), int(j), float(alpha), float(beta)) for i, j, alpha, beta in f["wires"])
    out = Fabric(
        kind=str(f["kind"]),
        stride=int(f["stride"]),
        size=int(f["size"]),
        wires=wires,
        link=Link(float(f["alpha"]), float(f["beta"])),
    )
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
