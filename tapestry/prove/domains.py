"""Parts of a reduction's domain: a set of places per reduced dimension, and their product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Domain:
    """A product of sets of places, one per reduced dimension; each set as disjoint ranges in order."""

    axes: tuple[tuple[tuple[int, int], ...], ...]

    def whole(self, sizes: Sequence[int]) -> bool:
        """Whether it is all of a box that begins at 0."""
        return all(a == ((0, n),) for a, n in zip(self.axes, sizes, strict=True))

    def size(self) -> int:
        """How many points it has."""
        return prod(sum(hi - lo for lo, hi in a) for a in self.axes)

    def meets(self, other: Domain) -> bool:
        """Whether some point is in both."""
        return all(_meet(a, b) for a, b in zip(self.axes, other.axes, strict=True))

    def join(self, other: Domain, overlap: bool) -> Domain | None:
        """The union; None where it is no product, or where both have a point and may not (``overlap``)."""
        if self.meets(other) and not overlap:
            return None
        apart = [k for k, (a, b) in enumerate(zip(self.axes, other.axes, strict=True)) if a != b]
        if not apart:
            return self
        if len(apart) > 1:
            return None
        k = apart[0]
        return Domain((*self.axes[:k], _union((*self.axes[k], *other.axes[k])), *self.axes[k + 1 :]))

    def text(self) -> str:
        """As a person reads it."""
        return " x ".join("+".join(f"{lo}..{hi - 1}" for lo, hi in a) for a in self.axes)


def join_all(parts: Sequence[Domain], overlap: bool) -> Domain | None:
    """The union of parts, where it is a product; None where it is not, or where two have a point and may not."""
    if not overlap and any(a.meets(b) for k, a in enumerate(parts) for b in parts[:k]):
        return None
    rest = list(parts)
    while len(rest) > 1:
        first = rest.pop(0)
        for k, other in enumerate(rest):
            both = first.join(other, overlap)
            if both is not None:
                rest[k] = both
                break
        else:
            return None
    return rest[0]


def ranges_of(places: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Sorted distinct places as ranges."""
    out: list[tuple[int, int]] = []
    for p in places:
        if out and out[-1][1] == p:
            out[-1] = (out[-1][0], p + 1)
        else:
            out.append((p, p + 1))
    return tuple(out)


def _union(items: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    out: list[tuple[int, int]] = []
    for lo, hi in sorted(items):
        if out and lo <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], hi))
        else:
            out.append((lo, hi))
    return tuple(out)


def _meet(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> bool:
    return any(max(x[0], y[0]) < min(x[1], y[1]) for x in a for y in b)
