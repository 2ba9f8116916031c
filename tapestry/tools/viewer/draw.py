"""SVG: elements, colours, and a drawing that is its own file."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tapestry.build.atomic import write_text
from tapestry.build.store import Build
from tapestry.ir.kernel import Box
from tapestry.viz.format import together

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
        write_text(Path(file), self)
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
    return {box: devices for box, devices in together(range(len(boxes)), boxes.__getitem__).items() if box is not None}


def tail(text: str, most: int) -> str:
    """The end of a name, which says more than its beginning."""
    return text if len(text) <= most else "…" + text[1 - most :]


def short(text: str, most: int) -> str:
    """At most so many letters."""
    return text if len(text) <= most else text[: most - 1] + "…"
