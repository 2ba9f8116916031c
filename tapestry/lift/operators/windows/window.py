"""Sliding windows: what convolution and pooling share (names, padding, projections, how much of a window is inside)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul

from tapestry.ir.expr import Expr, Index, call, number
from tapestry.ir.graph import Dim, ranges_of
from tapestry.ir.index import Aff, const, dim, floordiv, span
from tapestry.lift.builder import Node

SPATIAL = {1: ("w",), 2: ("h", "w"), 3: ("t", "h", "w")}
KERNEL = {1: ("s",), 2: ("r", "s"), 3: ("q", "r", "s")}


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window, axis by axis: sizes of the input, kernel and output, and how positions relate.

    Position ``o`` of the output and ``k`` of the kernel read ``stride * o + dilation * k - before`` of the input.
    """

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    out: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def places(self) -> tuple[Dim, ...]:
        """The output's spatial dimensions."""
        return tuple(Dim(n, s) for n, s in zip(SPATIAL[len(self.out)], self.out, strict=True))

    @property
    def taps(self) -> tuple[Dim, ...]:
        """The kernel's dimensions."""
        return tuple(Dim(n, s) for n, s in zip(KERNEL[len(self.kernel)], self.kernel, strict=True))

    def start(self, axis: int) -> Aff:
        """First input position of a window."""
        return dim(SPATIAL[len(self.out)][axis]) * self.stride[axis] - self.before[axis]

    def index(self) -> list[Aff]:
        """Input position per spatial axis."""
        taps = KERNEL[len(self.kernel)]
        return [self.start(a) + dim(taps[a]) * self.dilation[a] for a in range(len(self.size))]

    @property
    def leaves(self) -> bool:
        """Whether some position is outside the input."""
        ranges = ranges_of((*self.places, *self.taps))
        spans = [span(e, ranges) for e in self.index()]
        return any(lo < 0 or hi >= s for (lo, hi), s in zip(spans, self.size, strict=True))

    def count(self, padded: bool) -> Expr:
        """How many taps of a window are inside the input (or inside the padded input), as an i64 expression."""
        return reduce(mul, (self._inside(a, padded) for a in range(len(self.size))))

    def _inside(self, a: int, padded: bool) -> Expr:
        k, d, end = self.kernel[a], self.dilation[a], self.size[a] + (self.after[a] if padded else 0)
        ranges = {SPATIAL[len(self.out)][a]: self.out[a]}
        first = self.start(a)
        stop = floordiv(const(end - 1) - first, d, ranges) + 1  # taps below it are before the end
        skip = floordiv(const(d - 1) - first, d, ranges)  # taps from it on are after the beginning
        high = number(k, "i64") if span(stop, ranges)[0] >= k else call("min", k, Index(stop))
        if padded or span(skip, ranges)[1] <= 0:
            return high
        return high - call("max", 0, Index(skip))


def pads_of(n: Node, size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[int]:
    rank = len(size)
    mode = n.attr("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        return [int(p) for p in n.attr("pads", [0] * 2 * rank)]
    if mode == "VALID":
        return [0] * 2 * rank
    before: list[int] = []
    after: list[int] = []
    for s, k, st, d in zip(size, kernel, stride, dilation, strict=True):
        need = max((-(-s // st) - 1) * st + d * (k - 1) + 1 - s, 0)
        small = need // 2
        before.append(small if mode == "SAME_UPPER" else need - small)
        after.append(need - before[-1])
    return before + after
