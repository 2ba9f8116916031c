"""Tiles of a tensor, in the colours of the instances that hold them."""

from __future__ import annotations

from collections.abc import Sequence

from tapestry.interop.tensor_dictionary import TensorDictionary, tiling_of
from tapestry.interop.tile_patterns import Tiling
from tapestry.tools.viewer.draw import NONE, Drawing, colour, drawing, rect, tag, words
from tapestry.viz.format import shape_text
from tapestry.viz.tables import Sheet, sheets

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
