"""Curves as a picture (SVG): what a number does as another one grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, EDGE, NAMES = 720, 400, 64, 200
COLOURS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad", "#d68910", "#555555")
Points = Sequence[tuple[float, float]]


def svg(title: str, across: str, up: str, curves: Mapping[str, Points]) -> str:
    """A picture of curves by name, both axes from 0."""
    most = [max(p[k] for c in curves.values() for p in c) or 1.0 for k in (0, 1)]

    def place(p: tuple[float, float]) -> tuple[float, float]:
        return EDGE + p[0] / most[0] * (WIDTH - 2 * EDGE), HEIGHT - EDGE - p[1] / most[1] * (HEIGHT - 2 * EDGE)

    def text(x: float, y: float, s: str, anchor: str = "middle", colour: str = "#222") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}">{escape(s)}</text>'

    out = [f'<path d="M{EDGE} {EDGE}V{HEIGHT - EDGE}H{WIDTH - EDGE}" fill="none" stroke="#222"/>', text(WIDTH / 2, 24, title)]
    out += [text(WIDTH / 2, HEIGHT - 12, across), text(12, EDGE - 12, up, "start")]
    for part in (0.0, 0.5, 1.0):
        x, y = place((part * most[0], part * most[1]))
        out += [text(x, HEIGHT - EDGE + 18, f"{part * most[0]:.4g}"), text(EDGE - 6, y + 4, f"{part * most[1]:.3g}", "end")]
    for k, (name, points) in enumerate(curves.items()):
        colour, at = COLOURS[k % len(COLOURS)], [place(p) for p in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in at]
        out.append(text(WIDTH - EDGE + 12, EDGE + 18 * k, name, "start", colour))
    box = f'viewBox="0 0 {WIDTH + NAMES} {HEIGHT}" font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *out, "</svg>\n"])
