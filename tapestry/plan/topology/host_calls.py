"""How long calls of a communication library take inside a host, as few figures that are fitted to measured times.

For a call of n cards that moves m bytes (an all-reduce ``2 (n-1)/n B``, others ``(n-1)/n B``), with ``x = m / rate``:

    seconds = latency + x + ramp (1 - exp(-x / short))

The last term is what a message takes until the links are full; an all-to-all has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp

from tapestry.plan.topology.measured_costs import CallTimes

CARDS = (2, 4, 8)
CALLS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
POINTS = tuple(1 << k for k in range(11, 31))  # bytes
Three = tuple[float, float, float]  # of 2, 4 and 8 cards


@dataclass(frozen=True, slots=True)
class HostCalls:
    """Of one kind of host.

    Attributes:
        latency: microseconds of an all-reduce, of an all-gather or a reduce-scatter, and of an all-to-all.
        rate: GB/s of each of `CALLS`.
        ramp, short: microseconds.
        apart: whether cards of one group may be anywhere in the host; otherwise groups are of neighbours, which share a root.
    """

    latency: tuple[Three, Three, Three]
    rate: tuple[Three, Three, Three, Three]
    ramp: float
    short: float
    apart: bool = True

    def seconds(self, call: int, at: int, nbytes: float) -> float:
        """Of one of `CALLS` on one of `CARDS`, of so many bytes in the larger of the two buffers of a card."""
        n = CARDS[at]
        x = nbytes * (n - 1) / n * (2 if call == 0 else 1) / self.rate[call][at] / 1e9
        ramp = 0.0 if call == 3 else self.ramp * (1 - exp(-x / self.short * 1e6))
        return (self.latency[(0, 1, 1, 2)[call]][at] + ramp) / 1e6 + x

    def tables(self) -> Iterator[CallTimes]:
        """What the planner reads."""
        for at, n in enumerate(CARDS):
            for k, call in enumerate(CALLS):
                points = tuple((b, self.seconds(k, at, b)) for b in POINTS)
                yield CallTimes(call, n, points, within=CARDS[-1] if self.apart else n)
