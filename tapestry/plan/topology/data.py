"""Topologies as data, for build directories."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from tapestry.errors import TapestryError
from tapestry.ir.plan import MeshAxis, device_count
from tapestry.plan.topology.model import HOST, HOST_LATENCY, Device, Fabric, Link, Topology, Wire, divides
from tapestry.plan.topology.routing import routes


def to_data(topo: Topology) -> dict[str, Any]:
    """What a build directory keeps of a topology; `from_data` reads it back."""
    d = topo.device
    out: dict[str, Any] = {
        "name": topo.name, "mesh": [[a.name, a.size] for a in topo.mesh],
        "links": [{"alpha": k.alpha, "beta": k.beta} for k in topo.links],
        "device": {
            "memory": d.memory, "bandwidth": d.bandwidth, "launch": d.launch, "vector": d.vector, "flops": dict(d.flops),
            "host": d.host, "host_latency": d.host_latency,
        },
    }  # fmt: skip
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
    return out


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
            host=float(d.get("host", HOST)), host_latency=float(d.get("host_latency", HOST_LATENCY)),
        )  # fmt: skip
        mesh = tuple(MeshAxis(str(name), int(size)) for name, size in data["mesh"])
        links = tuple(Link(float(k["alpha"]), float(k["beta"])) for k in data["links"])
        found = Topology(
            name=str(data["name"]), mesh=mesh, links=links, device=device, joined=tuple(map(_fabric, data.get("joined", ()))),
            notes=tuple(map(str, data.get("notes", ()))),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise TapestryError(f"not a topology: {type(e).__name__} {e}", hint="compile the model again") from None
    rates = (device.bandwidth, device.vector, device.host, *device.flops.values())
    if len(links) != len(mesh) or "other" not in device.flops or min(rates) <= 0:
        raise TapestryError("not a topology: links or rates are missing", hint="compile the model again")
    if found.joined and not _whole(found):
        raise TapestryError("not a topology: what joins the devices is not the mesh", hint="compile the model again")
    return found


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
        raise ValueError("a link that cannot be")
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
