"""Wires of the usual shapes, and of maps in the notation of the multi-device slides."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt

from tapestry.errors import TapestryError
from tapestry.interop import instance_map
from tapestry.interop.instance_map import InstanceMap
from tapestry.plan.topology.fabric import Link, Topology, Wire

Pairs = tuple[tuple[int, int], ...]
MAX_JOINED = 1024
MAX_ROWS = 64  # of a map that only says that all are joined with all
SHAPES = ("switch", "full mesh", "ring", "one-way ring", "line", "tree", "star", "linked rings")


def pairs(shape: str, n: int, option: int) -> Pairs:
    """Directed links of a shape of n devices.

    Args:
        option: children per node of a tree (0: 2), the centre of a star, the number of linked rings (0: 2).
    """
    step = [(i, (i + 1) % n) for i in range(n)]
    match shape:
        case "full mesh":
            found = [(i, j) for i in range(n) for j in range(n)]
        case "ring":
            found = _both(step)
        case "one-way ring":
            found = step
        case "line":
            found = _both(step[:-1])
        case "tree":
            found = _both([((i - 1) // (option or 2), i) for i in range(1, n)])
        case "star":
            found = _both([(option, i) for i in range(n)])
        case "linked rings":
            found = _linked(n, option or 2)
        case _:
            raise TapestryError(f"'{shape}' is not a shape of links", hint=f"{', '.join(SHAPES)}, torus, or a map")
    return tuple(dict.fromkeys((i, j) for i, j in found if i != j))


def _both(found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [*found, *((j, i) for i, j in found)]


def _linked(n: int, rings: int) -> list[tuple[int, int]]:
    """Equal rings of consecutive devices; the last of each and the first of the next are linked, both ways."""
    if n % rings or n // rings < 2:
        raise TapestryError(f"{n} devices do not make {rings} rings", hint="a number of rings that divides the devices")
    size = n // rings
    inner = [(r * size + i, r * size + (i + 1) % size) for r in range(rings) for i in range(size)]
    return _both([*inner, *((r * size + size - 1, (r + 1) * size) for r in range(rings - 1))])


def wires(found: Pairs, link: Link, other: Mapping[tuple[int, int], Link]) -> tuple[Wire, ...]:
    """Wires of directed links: all alike, but for those that are given apart.

    Raises:
        TapestryError: one is given for a link that is not there.
    """
    missing = next((p for p in other if p not in found), None)
    if missing is not None:
        raise TapestryError(
            f"there is no link from {missing[0]} to {missing[1]}", hint="'links' changes links that the shape has"
        )
    return tuple(Wire(i, j, other.get((i, j), link).alpha, other.get((i, j), link).beta) for i, j in found)


def of_map(text: str) -> tuple[int, Pairs, tuple[int, ...], str, tuple[str, ...]]:
    """(devices, links, sizes if it is a torus, kind, notes) of a map such as ``{4, [[1],[2],[3],[0]]}``.

    Links are as written. Only where rows are left out (``...``), the shape that the written ones show is taken.

    Raises:
        TapestryError: it does not parse, or rows are left out of something that is not recognised.
    """
    m = instance_map.parse_instances(text)
    names = instance_map.recognise(m)
    torus = next((s for s in names if s.kind == "torus" and len(s.detail) > 1 and (m.given < m.count or not s.notes)), None)
    if torus is not None:
        return m.count, (), torus.detail, "torus", torus.notes
    if m.given < m.count:
        raise TapestryError("rows are left out of a map of no known shape", where=str(m)[:60], hint="write all rows")
    exact = [s for s in names if not s.notes]
    kind = exact[0].kind if exact else "map"
    return m.count, tuple(sorted(m.links)), (), "one-way ring" if kind == "ring" and not exact[0].two_way else kind, ()


def connections(topo: Topology, n: int) -> InstanceMap | None:
    """Which of n devices are joined, as a map; ``None`` where more than `MAX_ROWS` are all joined with all."""
    if not topo.joined:
        return None if n > MAX_ROWS else InstanceMap(n, tuple(tuple(j for j in range(n) if j != i) for i in range(n)))
    rows: list[set[int]] = [set() for _ in range(n)]
    for f in topo.joined:
        inside = [(i, j) for i in range(f.size) for j in range(f.size)] if not f.wires else [(w.src, w.dst) for w in f.wires]
        for d in range(n):
            at = d // f.stride % f.size
            rows[d] |= {d + (j - i) * f.stride for i, j in inside if i == at and i != j}
    return InstanceMap(n, tuple(tuple(sorted(r)) for r in rows))


def balanced(n: int, parts: int) -> tuple[int, ...]:
    """Up to ``parts`` factors of n, as near to each other as can be, the largest last."""
    if parts <= 1 or n <= 3:
        return (n,)
    target = round(n ** (1 / parts))
    best = max((f for f in range(2, isqrt(n) + 1) if n % f == 0 and f <= max(2, target)), default=0)
    return (n,) if best == 0 else (best, *balanced(n // best, parts - 1))
