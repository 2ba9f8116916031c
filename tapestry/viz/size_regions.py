"""A build for several sizes: which plan runs which size, and how good each is known to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tapestry.viz.format import duration, human

LETTERS = "abcdefghijklmnopqrstuvwxyz"
Region = Mapping[str, Any]


def size_region_lines(sizes: Mapping[str, Any]) -> Iterator[str]:
    """The regions; ``sizes`` is that of the report."""
    regions = sizes["regions"]
    yield f"one build for {sizes['asked']}: {len(regions)} plan{'s' if len(regions) > 1 else ''}"
    for k, r in enumerate(regions):
        facts = f"{sum(r['laws'].values()):,} facts, each for all of them"
        yield f"  {_letter(k)}: {r['sizes']}: {facts}"
        yield f"     made at {_sizes_at(r['made_at'])}: {duration(r['objective_s'])}, gap {r['gap']:.1%}"
        for row in r["looked_at"]:
            own = f"a plan of its own {duration(row['best_s'])}"
            yield f"     at {_sizes_at(row['sizes'])}: {duration(row['objective_s'])}, gap {row['gap']:.1%}; {own}"
        yield f"     most memory: {', '.join(human(n) for n in dict.fromkeys(r['largest_peak_bytes']))} per device"


def _sizes_at(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{s} {n}" for s, n in sizes.items())


def _letter(k: int) -> str:
    return LETTERS[k % len(LETTERS)]
