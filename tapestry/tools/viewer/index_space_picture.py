"""An operation's index space: its box, the cut, each device's tile, and what one tile reads of every tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2

from tapestry.errors import TapestryError
from tapestry.ir import space
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.kernel import Box, cut, intersect, shape, size, whole
from tapestry.ir.program import Launch
from tapestry.ir.provenance import operation_names
from tapestry.tools.viewer.draw import Drawing, build_of, by_box, colour, drawing, polygon, rect, short, tag, words
from tapestry.viz.format import human, shape_text

Tiles = Mapping[Box, Sequence[int]]
LEFT, TOP = 64.0, 16.0


def index_space(op: Op | str, of: object = None, *, device: int | None = None) -> Drawing:
    """The picture of an operation.

    Args:
        op: an operation, whose tiles are those of its ``splits``; or the name of one of a build.
        of: the graph of the operation, for the tensors that it reads; or the build.
        device: whose tile, and what it reads, is shown beside the box.

    Raises:
        TapestryError: the build has no operation of that name.
    """
    if isinstance(op, str):
        build = build_of(of)
        names = operation_names(build.plan.graph)
        at = names.index(op) if op in names else build.plan.graph.find(op)
        if at < 0:
            raise TapestryError(f"there is no operation '{op}'", hint="tapestry explain shows their names")
        found, graph = build.plan.graph.ops[at], build.plan.graph
        launches = (s for s in build.program.steps if isinstance(s, Launch) and s.op == at and s.mode != "finish")
        return _drawn(found, graph, by_box(next(launches).blocks), device)
    return _drawn(op, of if isinstance(of, Graph) else None, _tiles(op), device)


def _tiles(op: Op) -> Tiles:
    """The tiles of an operation's splits, numbered row-major in the order of the splits."""
    boxes: list[Box] = [tuple((0, d.size) for d in op.space)]
    for s in op.splits:
        k = next(i for i, d in enumerate(op.space) if d.name == s.dim)
        boxes = [
            (*b[:k], (b[k][0] + lo, b[k][0] + hi), *b[k + 1 :])
            for b in boxes
            for lo, hi in (cut(b[k][1] - b[k][0], s.parts, j) for j in range(s.parts))
        ]
    return {b: [d] for d, b in enumerate(boxes)}


def shown(op: Op, tiles: Tiles) -> tuple[int | None, int | None, int | None]:
    """The dimensions of rows, columns and depth: those that are cut first, then the longest; a reduced one is the depth."""
    several = [len({b[k] for b in tiles}) > 1 for k in range(len(op.space))]
    rank = {k: (several[k], d.size) for k, d in enumerate(op.space)}
    maps = sorted(range(len(op.dims)), key=lambda k: rank[k], reverse=True)
    rest = sorted(range(len(op.dims), len(op.space)), key=lambda k: rank[k], reverse=True)
    flat = sorted(maps[:2])
    row, col = (None, None, *flat)[-2:]
    deep = rest[0] if rest else maps[2] if len(maps) > 2 else None
    return row, col, deep


def _length(n: int, most: float) -> float:
    return max(26.0, min(most, 26 + 27 * log2(max(1, n))))


def _drawn(op: Op, graph: Graph | None, tiles: Tiles, device: int | None) -> Drawing:
    own = next((b for b, ds in tiles.items() if device in ds), None)
    parts, width, height = _box(op, tiles, device)
    reads = _reads(op, graph, own, device) if graph is not None and own is not None and isinstance(op, Block) else []
    x, most = 20.0, 0.0
    for svg, w, h in reads:
        parts.append(tag("g", svg, transform=f"translate({x:.1f} {height + 14:.1f})"))
        x, most = x + w + 24, max(most, h)
    return drawing(max(width, x), height + (most + 24 if reads else 0), f"the index space of {op.outs[0]}", parts)


def _box(op: Op, tiles: Tiles, device: int | None) -> tuple[list[str], float, float]:
    """The box in oblique projection, far tiles first; (elements, width, height)."""
    row, col, deep = shown(op, tiles)
    n = [1 if k is None else op.space[k].size for k in (row, col, deep)]
    tall, wide = (_length(m, most) if k is not None else 26.0 for m, most, k in ((n[0], 200, row), (n[1], 280, col)))
    back = _length(n[2], 140) * 0.6 if deep is not None else 0.0
    top = TOP + back * 0.62

    def at(c: int, r: int, d: int) -> tuple[float, float]:
        z = d / n[2] * back
        return LEFT + c / n[1] * wide + z, top + r / n[0] * tall - z * 0.62

    def span(b: Box, k: int | None) -> tuple[int, int]:
        return (0, 1) if k is None else b[k]

    parts: list[str] = []
    for b, ds in sorted(tiles.items(), key=lambda t: -span(t[0], deep)[0]):
        (r0, r1), (c0, c1), (d0, d1) = (span(b, k) for k in (row, col, deep))
        edge = {"stroke_width": 2.5, "style": "stroke: currentColor"} if device in ds else {"class_": "tile"}
        lid, side = [at(c0, r0, d0), at(c1, r0, d0), at(c1, r0, d1), at(c0, r0, d1)], [(c1, r0, d0), (c1, r1, d0), (c1, r1, d1)]
        wall = [*(at(*p) for p in side), at(c1, r0, d1)]
        for face, there, shade in ((lid, r0 == 0, ("#ffffff", 0.3)), (wall, c1 == n[1], ("#000000", 0.25))):
            if deep is not None and there:
                parts += [polygon(face, fill=colour(ds[0]), **edge), polygon(face, fill=shade[0], fill_opacity=shade[1])]
        front = [at(c0, r0, d0), at(c1, r0, d0), at(c1, r1, d0), at(c0, r1, d0)]
        parts.append(polygon(front, fill=colour(ds[0]), **edge))
        face = front if d0 == 0 else wall
        label = str(ds[0]) if len(ds) == 1 else f"{ds[0]}…×{len(ds)}"
        if abs(face[2][0] - face[0][0]) > 12 and abs(face[2][1] - face[0][1]) > 12:
            middle = (face[0][0] + face[2][0]) / 2, (face[0][1] + face[2][1]) / 2 + 4
            parts.append(words(*middle, label, class_="on", text_anchor="middle"))
    parts += _axes(op, (row, col, deep), (wide, tall, back, top))
    return parts, LEFT + wide + back + 130, top + tall + 28


def _axes(op: Op, dims: tuple[int | None, ...], place: tuple[float, float, float, float]) -> list[str]:
    (row, col, deep), (wide, tall, back, top) = dims, place

    def said(k: int) -> str:
        d = op.space[k]
        return f"{d.name}: {d.size:,}" + (f" ({op.monoid})" if isinstance(op, Block) and k >= len(op.dims) else "")

    out: list[str] = []
    if col is not None:
        out.append(words(LEFT + wide / 2, top + tall + 18, said(col), class_="note", text_anchor="middle"))
    if row is not None:
        turn = f"rotate(-90 {LEFT - 14:.1f} {top + tall / 2:.1f})"
        out.append(words(LEFT - 8, top + tall / 2, said(row), class_="note", text_anchor="middle", transform=turn))
    if deep is not None:
        out.append(words(LEFT + wide + back + 8, top + tall / 2 - back * 0.31, said(deep), class_="note"))
    return out


def _reads(op: Block, graph: Graph, tile: Box, device: int | None) -> list[tuple[str, float, float]]:
    """What a tile reads of every tensor: the exact footprint, as isl has it."""
    out: list[tuple[str, float, float]] = []
    for r in op.reads:
        t = graph.tensors[r.tensor]
        image = space.access(op, r, t.shape).image(tile)
        box = intersect(image.hull(), whole(t.shape)) if image is not None else None
        svg, w, h = sheet(t.shape, [(box, colour(device or 0))] if box is not None else [])
        note = "nothing" if box is None else f"{shape_text(shape(box))}, {human(size(box) * t.nbytes // max(1, t.size))}"
        text = f"{r.tensor}[{', '.join(map(str, r.index))}]"
        label = words(0, 10, short(text, 30), class_="name") + words(0, 25, f"reads {note}", class_="note")
        out.append((label + tag("g", svg, transform="translate(0 32)"), max(w, 7.0 * min(30, len(text))), h + 32))
    return out


def sheet(extents: Sequence[int], boxes: Sequence[tuple[Box, str]], held: Sequence[Box] = ()) -> tuple[str, float, float]:
    """A tensor by its two longest axes, with some of its boxes in colours; (elements, width, height)."""
    axes = sorted(sorted(range(len(extents)), key=lambda k: (-extents[k], k))[:2])
    row, col = (None, None, *axes)[-2:]
    wide, tall = (16.0 if k is None else _length(extents[k], 130) * 0.8 for k in (col, row))

    def place(b: Box) -> tuple[float, float, float, float]:
        (x0, x1), (y0, y1) = ((0, n) if k is None else b[k] for k, n in ((col, 1), (row, 1)))
        sx, sy = (wide / (1 if col is None else extents[col])), tall / (1 if row is None else extents[row])
        return x0 * sx, y0 * sy, max(1.0, (x1 - x0) * sx), max(1.0, (y1 - y0) * sy)

    parts = [rect(0, 0, wide, tall, class_="ground"), *(rect(*place(b), fill=c) for b, c in boxes)]
    return "".join([*parts, *(rect(*place(b), class_="held") for b in held)]), wide, tall
