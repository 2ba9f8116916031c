"""``{n, [[…], …]}``: which instances are connected, as in the slides' ``TopoProto``; and what such a map is called.

A row lists what an instance can send to; itself is implied. Instance numbers may be digits of base 36 (the slides write
``A`` for 10); ``...`` at the end stands for rows left out. The slides' rows have slips (a torus row that names itself in
the place of a neighbour), so that a map is also recognised when making every link two-way repairs it, which is then noted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from tapestry.errors import TapestryError

Links = frozenset[tuple[int, int]]
MAX_INSTANCES = 1 << 16


@dataclass(frozen=True, slots=True)
class InstanceMap:
    """Instances and directed links; ``given`` rows were written out, the rest (if fewer) left out by ``...``."""

    count: int
    rows: tuple[tuple[int, ...], ...]

    @property
    def links(self) -> Links:
        """(from, to), without the implied links of an instance to itself."""
        return frozenset((i, j) for i, row in enumerate(self.rows) for j in row if i != j)

    @property
    def given(self) -> int:
        """Number of rows written out."""
        return len(self.rows)

    @property
    def complete(self) -> bool:
        """Whether all are joined with all."""
        return len(self.links) == self.count * (self.count - 1)

    def __str__(self) -> str:
        rows = ",".join("[" + ",".join(map(str, r)) + "]" for r in self.rows)
        return f"{{{self.count}, [{rows}{',...' if self.given < self.count else ''}]}}"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a map is: ``full mesh``, ``ring``, ``star``, ``tree``, ``torus``, ``linked rings`` or ``other``.

    Attributes:
        detail: sizes of a torus, the centre of a star, the root of a tree, links between rings.
        notes: what had to be assumed.
    """

    kind: str
    detail: tuple[int, ...] = ()
    two_way: bool = True
    notes: tuple[str, ...] = ()


def parse_instances(text: str) -> InstanceMap:
    """A map from the slides' text.

    Raises:
        TapestryError: it does not parse, or names instances that do not exist.
    """
    m = re.fullmatch(r"\s*\{\s*(\d+)\s*,\s*\[(.*)\]\s*\}\s*", text, re.DOTALL)
    if m is None or not 0 < int(m.group(1)) <= MAX_INSTANCES:
        raise TapestryError(f"'{text[:40]}' is not an instance map", hint="{4, [[1],[2],[3],[0]]}")
    count, body = int(m.group(1)), m.group(2).strip()
    written = re.findall(r"\[([^\[\]]*)\]", body)
    rest = re.sub(r"\[[^\[\]]*\]|[\s,]", "", body)
    if rest not in ("", "...", "…"):
        raise TapestryError(f"'{rest[:20]}' in an instance map", hint="rows in brackets, or ... at the end")
    if len(written) != count and not (rest and len(written) < count):
        raise TapestryError(f"{count} instances and {len(written)} rows", hint="one row per instance")
    rows = tuple(tuple(dict.fromkeys(_number(x, count) for x in row.split(",") if x.strip())) for row in written)
    return InstanceMap(count, rows)


def _number(text: str, count: int) -> int:
    text = text.strip()
    try:
        value = int(text) if text.isdigit() else int(text, 36) if len(text) == 1 else -1
    except ValueError:
        value = -1
    if not 0 <= value < count:
        raise TapestryError(f"instance '{text}' does not exist", hint=f"0 to {count - 1}")
    return value


def recognise(m: InstanceMap) -> tuple[Shape, ...]:
    """All names of a map, the most specific first; ``other`` when it has none."""
    if m.given < m.count:
        return tuple(_partly(m)) or (Shape("other", notes=("rows are left out",)),)
    links, notes = m.links, ()
    shapes = list(_topology_names(links, m.count))
    both = links | {(j, i) for i, j in links}
    if not shapes and both != links:
        one_way = sorted((i, j) for i, j in links if (j, i) not in links)
        notes = tuple(f"{i} sends to {j} and not the other way round; taken as two-way" for i, j in one_way)
        shapes = list(_topology_names(both, m.count))
    return tuple(Shape(s.kind, s.detail, s.two_way, notes) for s in shapes) or (Shape("other"),)


def _topology_names(links: Links, n: int) -> Iterator[Shape]:
    if n == 1:
        yield Shape("full mesh")
        return
    near = _neighbours(links, n)
    if len(links) == n * (n - 1):
        yield Shape("full mesh")
    cycle = all(near) and len(_reach(near, 0)) == n
    if cycle and all(len(r) == 1 for r in near) and len({j for r in near for j in r}) == n:
        yield Shape("ring", two_way=n == 2)
    symmetric = all((j, i) in links for i, j in links)
    if symmetric and n > 2 and cycle and all(len(r) == 2 for r in near):
        yield Shape("ring")
    if symmetric:
        yield from _trees(links, near, n)
        for sizes in _torus_sizes(n):
            if links == torus(sizes):
                yield Shape("torus", sizes)
    yield from _linked(links, n)


def _trees(links: Links, near: list[set[int]], n: int) -> Iterator[Shape]:
    if len(links) != 2 * (n - 1) or len(_reach(near, 0)) != n:
        return
    centre = next((i for i in range(n) if len(near[i]) == n - 1), None)
    if centre is not None:
        yield Shape("star", (centre,))
    yield Shape("tree", (0,))


def torus(sizes: tuple[int, ...]) -> Links:
    """Links of a torus, instances numbered with the last axis fastest."""
    out: set[tuple[int, int]] = set()
    for i in range(prod(sizes)):
        step = 1
        for n in reversed(sizes):
            k = i // step % n
            out |= {(i, i + ((k + d) % n - k) * step) for d in (1, -1)}
            step *= n
    return frozenset((i, j) for i, j in out if i != j)


def _torus_sizes(n: int, least: int = 3) -> Iterator[tuple[int, ...]]:
    """Ways to write n as a product of factors of at least 3 (a torus axis of 2 is one link), one axis first."""
    yield (n,)
    for f in range(least, n // least + 1):
        if n % f == 0:
            yield from ((f, *rest) for rest in _torus_sizes(n // f, least))


def _linked(links: Links, n: int) -> Iterator[Shape]:
    """Equal rings of consecutive instances, with at most one link each way between two of them."""
    for size in range(3, n // 2 + 1):
        if n % size:
            continue
        inner = frozenset((i, j) for i, j in links if i // size == j // size)
        across = sorted(links - inner)
        both = inner | {(j, i) for i, j in inner}
        near = _neighbours(both, n)
        whole = all(len(r) == 2 for r in near) and all(len(_reach(near, g)) == size for g in range(0, n, size))
        ways = [(i // size, j // size) for i, j in across]
        if whole and across and len(set(ways)) == len(ways):
            yield Shape("linked rings", tuple(x for link in across for x in link))


def _partly(m: InstanceMap) -> Iterator[Shape]:
    """A torus whose written rows these are, but for few that lack one neighbour."""
    for sizes in _torus_sizes(m.count):
        near = _neighbours(torus(sizes), m.count)
        rows = [set(row) - {i} for i, row in enumerate(m.rows)]
        wrong = [i for i, row in enumerate(rows) if row != near[i]]
        if 3 * len(wrong) <= m.given and all(rows[i] < near[i] and len(near[i] - rows[i]) == 1 for i in wrong):
            text = f"{m.count - m.given} rows are left out"
            yield Shape("torus", sizes, notes=(text, *(f"row {i} should be {sorted(near[i])}" for i in wrong)))


def _neighbours(links: Links, n: int) -> list[set[int]]:
    out: list[set[int]] = [set() for _ in range(n)]
    for i, j in links:
        out[i].add(j)
    return out


def _reach(near: list[set[int]], start: int) -> set[int]:
    seen, todo = {start}, [start]
    while todo:
        for j in near[todo.pop()] - seen:
            seen.add(j)
            todo.append(j)
    return seen
