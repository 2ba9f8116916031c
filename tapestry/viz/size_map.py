"""The map of a build for several sizes: which plan runs which size, and how good each is known to be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tapestry.viz.format import duration, human

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WIDE, TALL = 48, 12  # characters of the map
Region = Mapping[str, Any]


def size_map_lines(sizes: Mapping[str, Any]) -> Iterator[str]:
    """The regions, a line each and their map where two symbols vary; ``sizes`` is that of the report."""
    symbols, regions = sizes["symbols"], sizes["regions"]
    yield f"one build for {sizes['asked']}: {len(regions)} plan{'s' if len(regions) > 1 else ''}"
    for k, r in enumerate(regions):
        facts = f"{sum(r['laws'].values()):,} facts, each for all of them"
        yield f"  {_letter(k)}: {r['sizes']}: {facts}"
        yield f"     made at {_sizes_at(r['made_at'])}: {duration(r['objective_s'])}, gap {r['gap']:.1%}"
        for row in r["looked_at"]:
            own = f"a plan of its own {duration(row['best_s'])}"
            yield f"     at {_sizes_at(row['sizes'])}: {duration(row['objective_s'])}, gap {row['gap']:.1%}; {own}"
        yield f"     most memory: {', '.join(human(n) for n in dict.fromkeys(r['largest_peak_bytes']))} per device"
    low = {s: min(r["low"][s] for r in regions) for s in symbols}
    high = {s: max(r["high"][s] for r in regions) for s in symbols}
    if len(symbols) == 2 and all(low[s] < high[s] for s in symbols):  # the first symbol grows upwards
        up, right = symbols
        columns = _scale(low[right], high[right], WIDE)
        for n in reversed(_scale(low[up], high[up], TALL)):
            yield f"  {n:>8,} {''.join(_region(regions, {up: n, right: m}) for m in columns)}"
        yield f"  {up:>8.8} {columns[0]} … {columns[-1]:,} {right}"


def _sizes_at(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{s} {n}" for s, n in sizes.items())


def _letter(k: int) -> str:
    return LETTERS[k % len(LETTERS)]


def _scale(low: int, high: int, most: int) -> list[int]:
    """Sizes on a scale of powers."""
    if high - low < most:
        return list(range(low, high + 1))
    return sorted({round(low * math.exp(math.log(high / low) * k / (most - 1))) for k in range(most)})


def _region(regions: Sequence[Region], at: Mapping[str, int]) -> str:
    found = (k for k, r in enumerate(regions) if all(r["low"][s] <= n <= r["high"][s] for s, n in at.items()))
    k = next(found, None)
    return "." if k is None else _letter(k)
