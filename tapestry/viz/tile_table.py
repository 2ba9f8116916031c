"""What `tapestry tiles` prints: start, stop and size of every tile, a drawing, and what a change of tiling moves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tapestry.interop.tile_changes import Change, exact, naive
from tapestry.interop.tile_patterns import SUPPRESSED, Tiling, slide_slips
from tapestry.ir.kernel import cut, shape
from tapestry.ir.types import itemsize
from tapestry.viz.format import human, shape_text, wrapped

MOST_SHEETS = 8
ROWS, COLUMNS = 12, 60  # characters of a sheet


def document(extents: tuple[int, ...], tiling: Tiling, after: Tiling | None, dtype: str) -> dict[str, Any]:
    """Everything that is said of a tiling, as data; of a change to ``after`` the bytes of both evaluations."""
    rows: list[dict[str, Any]] = []
    for tile, instance in tiling.entries:
        box = tiling.tile(tile, extents)
        ends = {"start": [lo for lo, _ in box], "stop": [hi for _, hi in box], "size": list(shape(box))}
        rows.append({"tile": tile, "instance": None if instance == SUPPRESSED else instance, **ends})
    out: dict[str, Any] = {
        "shape": list(extents), "pattern": list(tiling.pattern), "assignment": list(tiling.instances),
        "text": str(Tiling(tiling.pattern, tiling.instances)), "count": tiling.count, "tiles": rows,
        "slides": slide_slips(tiling, extents),
    }  # fmt: skip
    if after is not None:
        ways = {"slides": naive(tiling, after, extents), "exact": exact(tiling, after, extents)}
        out["change"] = {"to": str(after), "dtype": dtype, **{k: _change(c, dtype) for k, c in ways.items()}}
    return out


def _change(c: Change, dtype: str) -> dict[str, Any]:
    sends = [{"from": s.src, "to": s.dst, "box": [list(p) for p in s.box]} for s in c.sends]
    return {"kind": c.kind, "bytes": c.cells() * itemsize(dtype), "sends": sends}


def text(d: Mapping[str, Any], extents: tuple[int, ...], tiling: Tiling) -> str:
    """The same for a person."""
    held = [r for r in d["tiles"] if r["instance"] is not None]
    what = f"{d['count']} tile{'s' * (d['count'] > 1)} on {len(held)} instance{'s' * (len(held) > 1)}"
    lines = [f"{d['text']} of {shape_text(extents)}: {what}", ""]
    table: list[tuple[str, ...]] = [("tile", "instance", "start", "stop", "size")]
    for r in d["tiles"]:
        ends = ("{" + ", ".join(map(str, r[k])) + "}" for k in ("start", "stop", "size"))
        table.append((str(r["tile"]), "none" if r["instance"] is None else str(r["instance"]), *ends))
    wide = [max(len(row[k]) for row in table) for k in range(5)]
    lines += [
        "  ".join(c.rjust(w) if k < 2 else c.ljust(w) for k, (c, w) in enumerate(zip(row, wide, strict=True))).rstrip()
        for row in table
    ]
    for sheet in sheets(tiling, extents):
        lines += ["", *drawn(sheet)]
    for note in d["slides"]:
        lines += wrapped(f"the slides' formulas differ: {note}")
    if "change" in d:
        lines += ["", f"to {d['change']['to']}, {d['change']['dtype']}:"]
        for k, name in (("slides", "as the slides say"), ("exact", "what is lacking")):
            c = d["change"][k]
            sends = f"{len(c['sends'])} message{'s' * (len(c['sends']) != 1)}"
            lines.append(f"  {name}: {human(c['bytes']):>10} in {sends} ({c['kind']})")
    return "\n".join(lines) + "\n"


# drawing


@dataclass(frozen=True, slots=True)
class Sheet:
    """A picture of two axes: rectangles (row ends, column ends, label), for one part of each further axis that is cut."""

    title: str
    rows: int
    columns: int
    tiles: tuple[tuple[tuple[int, int], tuple[int, int], str], ...]


def sheets(tiling: Tiling, extents: tuple[int, ...]) -> list[Sheet]:
    """A tiling as pictures: the two longest axes of those that are cut, and a sheet for each part of the others."""
    parts = tiling.over(len(extents))
    order = sorted(range(len(extents)), key=lambda k: (parts[k] > 1, extents[k], k), reverse=True)
    flat = sorted(order[:2])
    row, col = (flat[0], flat[1]) if len(flat) == 2 else (None, flat[0]) if flat else (None, None)
    rest = [k for k in range(len(extents)) if k not in flat and parts[k] > 1]
    on: dict[int, list[int]] = {}
    for tile, instance in tiling.entries:
        on.setdefault(tile, []).append(instance)
    out: list[Sheet] = []
    for at in itertools.islice(itertools.product(*(range(parts[k]) for k in rest)), MOST_SHEETS):
        chosen = {k: cut(extents[k], parts[k], c) for k, c in zip(rest, at, strict=True)}
        tiles = tuple(_rectangles(tiling, extents, (row, col), chosen, on))
        names = ", ".join(f"axis {k} = {lo}:{hi}" for k, (lo, hi) in chosen.items())
        axes = " by ".join(f"axis {k}" for k in (row, col) if k is not None)
        title = axes + (f", {names}" if names else "")
        out.append(Sheet(title, 1 if row is None else extents[row], 1 if col is None else extents[col], tiles))
    return out


def _rectangles(
    tiling: Tiling, extents: tuple[int, ...], axes: tuple[int | None, int | None], chosen: Mapping[int, tuple[int, int]],
    on: Mapping[int, list[int]],
) -> Iterator[tuple[tuple[int, int], tuple[int, int], str]]:  # fmt: skip
    for tile, instances in on.items():
        box = tiling.tile(tile, extents)
        if all(box[k] == ends for k, ends in chosen.items()):
            row, col = ((0, 1) if k is None else box[k] for k in axes)
            yield (row, col, ",".join("–" if i == SUPPRESSED else str(i) for i in instances))


def drawn(sheet: Sheet) -> list[str]:
    """A sheet in characters: each cell (or, of large axes, each sampled one) shows the instances that hold it."""
    wide = max((len(t[2]) for t in sheet.tiles), default=1)
    n, m = min(sheet.rows, ROWS), min(sheet.columns, max(1, COLUMNS // (wide + 1)))
    lines = [f"{sheet.title}{'' if (n, m) == (sheet.rows, sheet.columns) else ' (not every cell is shown)'}"]
    for i in range(n):
        r = i * sheet.rows // n
        row = [_label(sheet, r, j * sheet.columns // m) for j in range(m)]
        lines.append("  " + " ".join(x.rjust(wide) for x in row))
    return lines


def _label(sheet: Sheet, r: int, c: int) -> str:
    return next((x for (a, b), (p, q), x in sheet.tiles if a <= r < b and p <= c < q), "")
