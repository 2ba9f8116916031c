"""The fabrics that join a mesh of a given size, from what a file or a preset says for any size."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from tapestry.errors import TapestryError
from tapestry.ir.plan import Mesh, device_count
from tapestry.plan.topology.fabric import Fabric, Link, divides, slowest
from tapestry.plan.topology.presets import Level, Source
from tapestry.plan.topology.routing import routes
from tapestry.plan.topology.wire_shapes import MAX_JOINED, balanced, of_map, pairs, wires

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
        out.append(slowest(crossed))
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
    return Fabric(kind=kind, stride=stride, size=size, link=slowest(found), wires=found)


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
