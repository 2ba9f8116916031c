"""The forms of a small graph and the rewrites between them, in rows by the number of moves: what each costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tapestry.tools.viewer.draw import PALETTE, Drawing, card, drawing, tag, words
from tapestry.viz.format import duration, human

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
