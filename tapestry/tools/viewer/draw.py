"""SVG: elements, colours, and a drawing that is its own file."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from pathlib import Path
from typing import Any

from tapestry.build.store import Build, new_file
from tapestry.errors import TapestryError
from tapestry.interop.sharding_specs import TensorDictionary, tiling_of
from tapestry.interop.tile_patterns import Tiling
from tapestry.ir import space
from tapestry.ir.author_names import operation_names
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.kernel import Box, cut, intersect, shape, size
from tapestry.ir.plan import Plan
from tapestry.ir.program import Launch, Reduce, Transfer, allocated, transfer_bytes
from tapestry.ir.types import itemsize
from tapestry.tools.viewer import build_data
from tapestry.viz import explain, format
from tapestry.viz.format import duration, human, kind_text, shape_text, split_text, step_text
from tapestry.viz.tables import Sheet, sheets

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8566c9", "#7d8a2e")
"""Okabe and Ito's colours, which colour-blind people tell apart, as on the viewer's page."""
NONE = "#8c959f"
_STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328; }
.note { font-size: 11px; fill: #5c6670; } .name { font-weight: 600; } .on { fill: #ffffff; font-weight: 600; font-size: 11px; }
.card { fill: #f6f7f9; stroke: #d5dae1; } .ground { fill: #e9edf2; stroke: #d5dae1; } .edge { fill: none; stroke: #aab3be; }
.moved { fill: none; stroke: #d55e00; stroke-opacity: 0.8; } .tile { stroke: #ffffff; } .held { fill: none; stroke: #ffffff; }
.memory { fill: #0072b2; fill-opacity: 0.3; }
@media (prefers-color-scheme: dark) {
text { fill: #e6eaef; } .note { fill: #97a3b0; }
.card { fill: #171c23; stroke: #323a45; } .ground { fill: #222932; stroke: #323a45; }
.edge { stroke: #56616e; } .tile, .held { stroke: #0f1318; } .on { fill: #ffffff; }
}"""


class Drawing(str):
    """An SVG file as text."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)

    def save(self, file: str | Path) -> Path:
        """Write it, whole or not at all."""
        with new_file(Path(file)) as temporary:
            temporary.write_text(self, "utf-8")
        return Path(file)


def build_of(build: object) -> Build:
    """A build, or that of what `tapestry.compile` and `tapestry.load` return."""
    found = getattr(build, "build", build)
    if not isinstance(found, Build):
        raise TypeError(f"a build is drawn, not {type(build).__name__}")
    return found


def drawing(width: float, height: float, about: str, parts: Iterable[str]) -> Drawing:
    """A picture of a size in pixels, and what it shows, in words."""
    sizes = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {sizes} role="img" aria-label="{html.escape(about)}">'
    return Drawing("\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>\n"]))


def tag(name: str, content: str = "", **attributes: Any) -> str:
    """An element; numbers have one digit behind the point, ``_`` in a name stands for ``-``, and a last one is dropped."""
    pairs = ((k.rstrip("_").replace("_", "-"), f"{v:.1f}" if isinstance(v, float) else v) for k, v in attributes.items())
    text = "".join(f' {k}="{html.escape(str(v))}"' for k, v in pairs if v is not None)
    return f"<{name}{text}>{content}</{name}>" if content else f"<{name}{text}/>"


def words(x: float, y: float, text: object, **attributes: Any) -> str:
    """Text."""
    return tag("text", html.escape(str(text)), x=float(x), y=float(y), **attributes)


def rect(x: float, y: float, width: float, height: float, title: str = "", **attributes: Any) -> str:
    """A rectangle, and what it says when it is pointed at."""
    said = tag("title", html.escape(title)) if title else ""
    return tag("rect", said, x=float(x), y=float(y), width=float(width), height=float(height), **attributes)


def polygon(points: Sequence[tuple[float, float]], **attributes: Any) -> str:
    """A polygon."""
    return tag("polygon", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), **attributes)


def card(
    x: float, y: float, sizes: tuple[float, float], name: str, note: str, colours: Sequence[str], title: str = ""
) -> list[str]:
    """A box with a name, a note below it, and marks in some colours at its foot."""
    wide, tall = sizes
    step, middle = (wide - 16) / max(1, len(colours)), y + tall / 2
    return [
        rect(x, y, wide, tall, title, class_="card", rx=7),
        *(rect(x + 8 + k * step, y + tall - 5, step, 3, fill=c) for k, c in enumerate(colours)),
        words(x + 10, middle - 4, name, class_="name"),
        words(x + 10, middle + 10, note, class_="note"),
    ]


def colour(device: int) -> str:
    """The colour of a device."""
    return PALETTE[device % len(PALETTE)]


def ranges(devices: Sequence[int]) -> str:
    """Devices as short ranges: ``0–3, 8``."""
    out: list[list[int]] = []
    for d in devices:
        if out and out[-1][1] == d - 1:
            out[-1][1] = d
        else:
            out.append([d, d])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in out)


def by_box(boxes: Sequence[Box | None]) -> dict[Box, list[int]]:
    """The devices of each box, of those that have one."""
    out: dict[Box, list[int]] = {}
    for d, box in enumerate(boxes):
        if box is not None:
            out.setdefault(box, []).append(d)
    return out


def tail(text: str, most: int) -> str:
    """The end of a name, which says more than its beginning."""
    return text if len(text) <= most else "…" + text[1 - most :]


def short(text: str, most: int) -> str:
    """At most so many letters."""
    return text if len(text) <= most else text[: most - 1] + "…"


# The forms of a small graph and the rewrites between them, in rows by the number of moves: what each costs.


FORM_WIDE, FORM_TALL, FORM_GAP, FORM_LEVEL = 118.0, 38.0, 14.0, 92.0
SHOWN = 14  # forms in a row, the cheapest
Row = Mapping[str, Any]


def derivation(document: Row) -> Drawing:
    """The picture of what ``tapestry rules --derive --json`` says; of a long row the cheapest forms, and those before them."""
    rows = _chosen(document["forms"])
    levels = [[r for r in rows if r["depth"] == d] for d in range(max(r["depth"] for r in rows) + 1)]
    wide = max(map(len, levels)) * (FORM_WIDE + FORM_GAP) + 30
    place: dict[int, tuple[float, float]] = {}
    for d, level in enumerate(levels):
        level.sort(key=lambda r: place.get(r["of"], (0.0, 0.0))[0])
        left = wide / 2 - (len(level) - 1) * (FORM_WIDE + FORM_GAP) / 2
        place |= {r["form"]: (left + k * (FORM_WIDE + FORM_GAP), d * FORM_LEVEL + 10) for k, r in enumerate(level)}
    best, small = (min(rows, key=lambda r: r[key])["form"] for key in ("seconds", "peak_bytes"))
    parts = [p for r in rows if r["of"] is not None for p in _edge(place[r["of"]], place[r["form"]], _short(r["by"]))]
    again = [e for e in document["again"] if e["of"] in place and e["form"] in place]
    parts += [p for e in again for p in _edge(place[e["of"]], place[e["form"]], "")]
    parts += [p for r in rows for p in _form(place[r["form"]], r, r["form"] == best, r["form"] == small)]
    left_out = len(document["forms"]) - len(rows)
    note = f"{len(rows)} of {len(document['forms'])} forms" if left_out else f"{len(rows)} forms"
    tall = len(levels) * FORM_LEVEL + 10
    parts.append(words(12, tall - 8, f"{note}; blue: fastest, orange: least memory", class_="note"))
    return drawing(wide, tall, "equivalent forms of a graph", parts)


def _chosen(forms: Sequence[Row]) -> list[Row]:
    """The cheapest forms of each number of moves, with all that they were made of."""
    chosen, by_number = set[int](), {r["form"]: r for r in forms}
    for depth in range(max(r["depth"] for r in forms) + 1):
        row = sorted((r for r in forms if r["depth"] == depth), key=lambda r: (r["seconds"], r["peak_bytes"]))
        chosen |= {r["form"] for r in row[:SHOWN]}
    chosen.add(min(forms, key=lambda r: r["peak_bytes"])["form"])
    for number in sorted(chosen, reverse=True):
        at = by_number[number]["of"]
        while at is not None:
            chosen.add(at)
            at = by_number[at]["of"]
    return [r for r in forms if r["form"] in chosen]


def _short(move: str) -> str:
    """A move in a few letters: its rule, and what it cuts."""
    rule, _, rest = move.partition("@")
    found = {k: v for k, _, v in (item.partition("=") for item in rest.partition("{")[2].rstrip("}").split(",")) if v}
    return f"{rule} {found['dim']}" + (f"/{found['parts']}" if "parts" in found else "") if "dim" in found else rule


def _edge(a: tuple[float, float], b: tuple[float, float], by: str) -> list[str]:
    (x0, y0), (x1, y1) = (a[0], a[1] + FORM_TALL), b
    half = (y0 + y1) / 2
    path = f"M{x0:.1f},{y0:.1f}C{x0:.1f},{half:.1f} {x1:.1f},{half:.1f} {x1:.1f},{y1:.1f}"
    dashed = None if by else "3 4"
    out = [tag("path", d=path, class_="edge", stroke_width=1.2, stroke_dasharray=dashed)]
    return [*out, words(x1, y1 - 6, by, class_="note", text_anchor="middle")] if by else out


def _form(at: tuple[float, float], r: Row, fastest: bool, smallest: bool) -> list[str]:
    marks = [c for c, on in ((PALETTE[0], fastest), (PALETTE[1], smallest)) if on]
    name, note = f"{r['form']}: {duration(r['seconds'])}", human(r["peak_bytes"])
    return card(at[0] - FORM_WIDE / 2, at[1], (FORM_WIDE, FORM_TALL), name, note, marks, title=r["graph"])


# An operation's index space: its box, the cut, each device's tile, and what one tile reads of every tensor.


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
            for b in boxes for lo, hi in (cut(b[k][1] - b[k][0], s.parts, j) for j in range(s.parts))
        ]  # fmt: skip
    return {b: [d] for d, b in enumerate(boxes)}


def shown(op: Op, tiles: Tiles) -> tuple[int | None, int | None, int | None]:
    """The dimensions of rows, columns and depth: those that are cut first, then the longest; a reduced one is the depth."""
    several = [len({b[k] for b in tiles}) > 1 for k in range(len(op.space))]
    rank = {k: (several[k], d.size) for k, d in enumerate(op.space)}
    maps = sorted(range(len(op.dims)), key=lambda k: rank[k], reverse=True)
    rest = sorted(range(len(op.dims), len(op.space)), key=lambda k: rank[k], reverse=True)
    flat = sorted(maps[:2])
    row, col = (flat[0], flat[1]) if len(flat) == 2 else (None, flat[0]) if flat else (None, None)
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
        box = intersect(image.hull(), tuple((0, n) for n in t.shape)) if image is not None else None
        svg, w, h = sheet(t.shape, [(box, colour(device or 0))] if box is not None else [])
        note = "nothing" if box is None else f"{shape_text(shape(box))}, {human(size(box) * t.nbytes // max(1, t.size))}"
        text = f"{r.tensor}[{', '.join(map(str, r.index))}]"
        label = words(0, 10, short(text, 30), class_="name") + words(0, 25, f"reads {note}", class_="note")
        out.append((label + tag("g", svg, transform="translate(0 32)"), max(w, 7.0 * min(30, len(text))), h + 32))
    return out


def sheet(extents: Sequence[int], boxes: Sequence[tuple[Box, str]], held: Sequence[Box] = ()) -> tuple[str, float, float]:
    """A tensor by its two longest axes, with some of its boxes in colours; (elements, width, height)."""
    axes = sorted(sorted(range(len(extents)), key=lambda k: (-extents[k], k))[:2])
    row, col = (axes[0], axes[1]) if len(axes) == 2 else (None, axes[0]) if axes else (None, None)
    wide, tall = (16.0 if k is None else _length(extents[k], 130) * 0.8 for k in (col, row))

    def place(b: Box) -> tuple[float, float, float, float]:
        (x0, x1), (y0, y1) = ((0, n) if k is None else b[k] for k, n in ((col, 1), (row, 1)))
        sx, sy = (wide / (1 if col is None else extents[col])), tall / (1 if row is None else extents[row])
        return x0 * sx, y0 * sy, max(1.0, (x1 - x0) * sx), max(1.0, (y1 - y0) * sy)

    parts = [rect(0, 0, wide, tall, class_="ground"), *(rect(*place(b), fill=c) for b, c in boxes)]
    return "".join([*parts, *(rect(*place(b), class_="held") for b in held)]), wide, tall


# What every device does when, as the cost model has it: kernels, transfers, and memory; equal devices share a lane.


LANES_LEFT, ROW, MEMORY, MOST = 150.0, 15.0, 40.0, 4
KINDS = ("", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "halo", "broadcast", "permute")


def split_colours(plan: Plan) -> list[str]:
    """A colour for every operation by what is cut; the most frequent cuts have one of their own."""
    both = zip(plan.graph.ops, plan.strategies, strict=True)
    texts = [split_text(op, s, plan.stage(i).mesh) for i, (op, s) in enumerate(both)]
    order = sorted(dict.fromkeys(t for t in texts if t != "none"), key=lambda t: -texts.count(t))
    known = dict(zip(order, PALETTE, strict=False))
    return [known.get(t, NONE) for t in texts]


def lanes(build: object, *, width: int = 760, most: int = MOST) -> Drawing:
    """The picture of a build's simulated schedule.

    Args:
        most: lanes that are drawn; a lane is of all devices that do the same at the same time.
    """
    b = build_of(build)
    timed = explain.schedule(b)
    total, table = timed.total or 1.0, build_data.lanes(timed)
    memory = build_data.memory(b.program, dict(enumerate(b.peak_bytes)))
    colours = split_colours(b.plan)
    scale = (width - LANES_LEFT - 12) / total
    parts = [words(12, 16, f"simulated {duration(timed.total)}; {timed.assumption.split(';')[0]}"[:120], class_="note")]
    y = 30.0
    classes: list[list[int]] = table["classes"][:most]
    for k, devices in enumerate(classes):
        names = [f"device {ranges(devices)}" if len(devices) == 1 else f"devices {ranges(devices)}", "kernels", "transfers"]
        parts += [words(12, y + 11, names[0][:14], class_="name")]
        parts += [words(LANES_LEFT - 6, y + 11 + n * (ROW + 1), names[n + 1], class_="note", text_anchor="end") for n in (0, 1)]
        parts += [_bar(b, row, k, (y, scale), colours) for row in table["steps"] if row["begin"][k] is not None]
        parts.append(_memory(b, memory, table, (k, devices[0]), (y + 2 * ROW + 6, scale, total)))
        peak = human(b.peak_bytes[devices[0]])
        parts.append(words(LANES_LEFT - 6, y + 2 * ROW + 24, f"memory {peak}", class_="note", text_anchor="end"))
        y += 2 * ROW + MEMORY + 22
    return drawing(width, y, "what every device does when", parts)


def _bar(b: Any, row: dict[str, Any], k: int, place: tuple[float, float], colours: list[str]) -> str:
    y, scale = place
    step = b.program.steps[row["step"]]
    begin, end = row["begin"][k], row["end"][k]
    if isinstance(step, Transfer | Reduce):
        fill = PALETTE[KINDS.index(step.kind) if step.kind in KINDS else 0]
    else:
        fill = colours[step.op] if isinstance(step, Launch) else NONE
    title = f"{step_text(step, b.program, b.plan.graph.ops)}: {duration(end - begin)}"
    top, wide = y + row["stream"] * (ROW + 1), max(0.8, (end - begin) * scale)
    return rect(LANES_LEFT + begin * scale, top, wide, ROW, title, fill=fill)


def _memory(b: Any, memory: Any, table: Any, which: tuple[int, int], place: tuple[float, float, float]) -> str:
    """Bytes alive, as an area over the time of the steps."""
    (lane, device), (y, scale, total) = which, place
    alive = memory["alive"][next(k for k, c in enumerate(memory["classes"]) if device in c)]
    begins = {r["step"]: r["begin"][lane] for r in table["steps"]}
    most, now, path = max(1, *alive), 0.0, ""
    for step, n in enumerate(alive):
        now = max(now, begins.get(step) or 0.0)
        at = f"{LANES_LEFT + now * scale:.1f}", f"{y + MEMORY * (1 - n / most):.1f}"
        path += f"H{at[0]}V{at[1]}" if path else f"M{at[0]},{at[1]}"
    right = LANES_LEFT + total * scale
    return tag("path", d=f"{path}H{right:.1f}V{y + MEMORY:.1f}H{LANES_LEFT:.1f}Z", class_="memory")


# The graph of a plan, folded by repeated structure, in layers; the width of an edge is what travels on it.


WIDE, TALL, GAP, LEVEL = 170.0, 40.0, 22.0, 86.0


@dataclass(slots=True)
class _Node:
    """A box of the picture: an operation or a fold; ``colours`` are of what is cut in it."""

    name: str
    note: str
    colours: list[str]
    level: int = 0
    x: float = 0.0
    ins: dict[int, tuple[float, set[str]]] = field(default_factory=dict[int, tuple[float, set[str]]])


def graph(build: object) -> Drawing:
    """The picture of a build's graph; bytes are those on the wire, all senders together and all repetitions of a fold."""
    b = build_of(build)
    nodes = _nodes(b)
    rows: dict[int, list[int]] = {}
    for k, n in enumerate(nodes):
        n.level = 1 + max((nodes[j].level for j in n.ins if j < k), default=-1)
        rows.setdefault(n.level, []).append(k)
    for level in sorted(rows):  # each beside what it reads
        rows[level].sort(key=lambda k: sum(nodes[j].x for j in nodes[k].ins) / max(1, len(nodes[k].ins)))
        left = -(len(rows[level]) - 1) * (WIDE + GAP) / 2
        for at, k in enumerate(rows[level]):
            nodes[k].x = left + at * (WIDE + GAP)
    most = max((moved for n in nodes for moved, _ in n.ins.values()), default=0) or 1
    wide = max(map(len, rows.values())) * (WIDE + GAP) + 40
    edges = [(nodes[j], n, moved, kinds) for n in nodes for j, (moved, kinds) in n.ins.items()]
    parts = [p for e in edges for p in _edge_of_graph_picture(*e, most, wide / 2)]
    for n in nodes:
        at = wide / 2 + n.x - WIDE / 2, n.level * LEVEL + 10
        parts += card(*at, (WIDE, TALL), tail(n.name, 20), short(n.note, 25), n.colours)
    return drawing(wide, len(rows) * LEVEL + 10, f"the graph of {b.plan.graph.name}", parts)


def _nodes(build: Build) -> list[_Node]:
    """Operations and runs of them in program order, with what they read from which."""
    plan, colours = build.plan, split_colours(build.plan)
    node_of = list(range(len(plan.graph.ops)))
    runs = {f.first: f for f in format.runs(plan)}
    names = operation_names(plan.graph)
    nodes: list[_Node] = []
    i = 0
    while i < len(plan.graph.ops):
        f = runs.get(i)
        count = f.length * f.times if f else 1
        node_of[i : i + count] = [len(nodes)] * count
        op = plan.graph.ops[i]
        if f:
            nodes.append(_Node(f"{f.label} ×{f.times}", f"{f.length} operations each", colours[i : i + f.length]))
        else:
            cut = split_text(op, plan.strategies[i], plan.stage(i).mesh)
            nodes.append(_Node(names[i], f"{kind_text(op)} · {'not cut' if cut == 'none' else cut}", [colours[i]]))
        i += count
    makers = plan.graph.producers()
    for i, reads in enumerate(build_data.edges(build.program)):
        for t, moved, kind, _, _ in reads:
            if t in makers and node_of[makers[t]] != node_of[i]:
                n, kinds = nodes[node_of[i]].ins.get(node_of[makers[t]], (0.0, set[str]()))
                nodes[node_of[i]].ins[node_of[makers[t]]] = (n + moved, kinds | ({kind} if kind else set()))
    return nodes


def _edge_of_graph_picture(a: _Node, b: _Node, moved: float, kinds: set[str], most: float, middle: float) -> list[str]:
    (x0, y0), (x1, y1) = (middle + a.x, a.level * LEVEL + 10 + TALL), (middle + b.x, b.level * LEVEL + 10)
    bend = 0.0 if b.level - a.level < 2 or abs(x1 - x0) > 1 else WIDE / 2 + 16  # past what stands between
    half = (y0 + y1) / 2
    path = f"M{x0:.1f},{y0:.1f}C{x0 + bend:.1f},{half:.1f} {x1 + bend:.1f},{half:.1f} {x1:.1f},{y1:.1f}"
    width = 1.0 if not kinds else 1.5 + 6 * (moved / most) ** 0.5
    out = [tag("path", d=path, class_="moved" if kinds else "edge", stroke_width=width)]
    if kinds:
        said = f"{', '.join(sorted(kinds))} {human(moved)}"
        out.append(words((x0 + x1) / 2 + bend * 0.75 + 8, half + 4, said, class_="note"))
    return out


# Who holds what of a tensor: a sheet for every buffer of it, parts in the colours of their devices.


def tensor(build: object, name: str) -> Drawing:
    """The picture of a tensor's buffers, in the order in which they are made.

    Raises:
        TapestryError: the build has no tensor of that name.
    """
    b = build_of(build)
    if name not in b.plan.graph.tensors:
        raise TapestryError(f"there is no tensor '{name}'", hint="tapestry explain shows their names")
    t, program = b.plan.graph.tensors[name], b.program
    made = {n: s for s in program.steps for n in allocated(s)}
    x, y, parts = 20.0, 40.0, [words(20, 20, f"{name}: {t.dtype} {shape_text(t.shape)}, {human(t.nbytes)}", class_="name")]
    for buffer in (v for v in program.buffers.values() if v.tensor == name and v.field is None):
        held = by_box(buffer.boxes)
        one = len(held) == 1
        svg, wide, tall = sheet(t.shape, [(k, NONE if one else colour(ds[0])) for k, ds in held.items()], list(held))
        step = made.get(buffer.name)
        how = step.kind if isinstance(step, Transfer | Reduce) else "computed" if hasattr(step, "op") else "loaded"
        moved = f", {human(transfer_bytes(step, program))} moved" if isinstance(step, Transfer | Reduce) else ""
        most = max(map(size, held)) * itemsize(t.dtype)
        where = f"whole on {len(next(iter(held.values())))} devices" if one else f"{len(held)} parts of at most {human(most)}"
        notes = words(0, tall + 16, f"{how}{moved}", class_="note") + words(0, tall + 30, where, class_="note")
        parts.append(tag("g", svg + notes, transform=f"translate({x:.1f} {y:.1f})"))
        x, y = (x + max(wide, 190) + 20, y) if x < 500 else (20.0, y + tall + 50)
    parts.append(words(20, y + 175, f"devices: {ranges(range(program.devices))}, in their colours", class_="note"))
    return drawing(760, y + 190, f"who holds what of {name}", parts)


# Tiles of a tensor, in the colours of the instances that hold them.


LONGEST, LEAST = 260.0, 26.0  # pixels


def tiles(
    of: TensorDictionary | Sequence[int], pattern: str | Sequence[int] | Tiling = (1,), assignment: Sequence[int] | None = None
) -> Drawing:
    """The picture of a tensor dictionary, or of a shape with a pattern and an assignment."""
    extents, tiling = (of.shape, of.tiling) if isinstance(of, TensorDictionary) else (tuple(of), tiling_of(pattern, assignment))
    what = f"{Tiling(tiling.pattern, tiling.instances)} of {shape_text(extents)}"
    parts, x, tall = [words(20, 20, what, class_="name")], 20.0, 0.0
    for sheet in sheets(tiling, extents):
        svg, w, h = _sheet(sheet)
        parts.append(tag("g", svg, transform=f"translate({x:.1f} 36)"))
        x, tall = x + max(w, 150) + 24, max(tall, h)
    return drawing(max(x, 300.0), tall + 66, what, parts)


def _sheet(sheet: Sheet) -> tuple[str, float, float]:
    scale = LONGEST / max(sheet.rows, sheet.columns)
    wide, tall = (max(LEAST, n * scale) for n in (sheet.columns, sheet.rows))
    parts: list[str] = []
    for (r0, r1), (c0, c1), label in sheet.tiles:
        x, y = c0 / sheet.columns * wide, r0 / sheet.rows * tall
        w, h = (c1 - c0) / sheet.columns * wide, (r1 - r0) / sheet.rows * tall
        fill = colour(int(label)) if label.isdecimal() else NONE
        parts.append(rect(x, y, w, h, f"instance {label}: {r0}:{r1}, {c0}:{c1}", fill=fill, class_="tile"))
        if w >= 7 * len(label) and h >= 12:
            parts.append(words(x + w / 2, y + h / 2 + 4, label, class_="on", text_anchor="middle"))
    return "".join([*parts, words(0, tall + 16, sheet.title, class_="note")]), wide, tall
