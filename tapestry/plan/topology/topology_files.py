"""Topology files, and a topology for a mesh from a file or a preset (docs/reference/topology.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from math import isfinite, prod
from pathlib import Path
from typing import Any, cast

from tapestry.errors import TapestryError, similar
from tapestry.interop import instance_map
from tapestry.ir.plan import Mesh, MeshAxis, coordinates, device_count
from tapestry.plan.topology.fabric import Device, Link, Topology, of_devices, slowest
from tapestry.plan.topology.join import joined
from tapestry.plan.topology.measured_costs import read_calls, read_figures, read_margin, read_overlap
from tapestry.plan.topology.meshes import parse_mesh
from tapestry.plan.topology.presets import PRESETS, REST, SOURCES, GiB, Level, Other, Source
from tapestry.plan.topology.topology_data import read_device
from tapestry.plugins import entry_points as plugins

__all__ = ["GiB", "default_mesh", "linked", "parse_bytes", "topology"]
KIND = "topologies"  # of plug-ins
PAGE = "see docs/reference/topology.md"
KEYS = {
    "mesh", "device", "others", "levels", "interconnect", "instance_map", "link", "links", "collectives", "overlap",
    "margin", "alone", "measured", "fit", "memory", "bandwidth", "flops", "power", "vector", "launch", "host",
    "host_latency", "name", "classes", "reserve", "devices", "alpha", "beta", "shape", "children",
    "centre", "rings", "sizes", "map", "from", "to", "at", "call", "group", "stride", "within", "points", "rate",
}  # fmt: skip
OWN_WORDS = ("flops", "interconnect", "classes", "at")  # what is in these may have any name


def topology(
    mesh: Mesh, source: str = "cpu", memory: int | None = None, *, precision: str = "ieee", reserve: str | None = None
) -> Topology:
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
        name=source,
        mesh=mesh,
        links=links,
        device=found.device,
        joined=fabrics,
        notes=notes,
        calls=found.calls,
        overlap=found.overlap,
        alone=alone,
        margin=found.margin,
        figures=found.figures,
        native_sums=found.native_sums,
    )
    return of_devices(out, kinds)


def linked(topo: Topology, links: str) -> Topology:
    """A topology whose devices are joined as a map says, each link as its slowest one; what was measured of others goes.

    Raises:
        TapestryError: the map is of other devices, or a device cannot reach another.
    """
    link = slowest(topo.links)
    spec: dict[str, Any] = {"map": links, "alpha": link.alpha, "beta": link.beta, "sizes": (), "links": {}}
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
    memory = parse_bytes(str(d["memory"]))
    return read_device({"launch": 0.0, "vector": flops["other"], **d, "memory": memory, "flops": flops})


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
