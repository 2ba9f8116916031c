"""Memory over time, in characters."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"


def columns(values: Sequence[int], width: int) -> list[int]:
    """At most ``width`` values: the largest of each of so many equal stretches, so that no peak is lost."""
    n = len(values)
    if n <= width:
        return list(values)
    return [max(values[k * n // width : (k + 1) * n // width]) for k in range(width)]


def area(values: Sequence[int], width: int = 72, height: int = 3) -> list[str]:
    """An area chart from 0 to the largest value, in lines of block characters; anything above 0 shows."""
    found = columns(values, width)
    top = max(found, default=0) or 1
    steps = len(BLOCKS) - 1
    levels = [0 if v <= 0 else max(1, round(v / top * height * steps)) for v in found]
    rows = range(height - 1, -1, -1)
    return ["".join(BLOCKS[min(steps, max(0, level - row * steps))] for level in levels) for row in rows]
