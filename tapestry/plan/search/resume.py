"""Going on from an earlier search: its strategies as a start, and its bound where the problem is the very same.

A bound holds for one network of costs, one topology and one memory limit. So it is kept with a hash of all of these, and used
again only where a problem that was built anew has the same hash; strategies are only a choice, which any problem may try.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tapestry.ir.plan import Plan, Strategy


@dataclass(frozen=True, slots=True)
class Start:
    """What an earlier search found.

    Attributes:
        strategies: of the operations that make a tensor, by its name.
        bound: seconds; no plan of the problem with this key is faster.
        key: `fingerprint` of the problem.
    """

    strategies: Mapping[str, Strategy] = field(default_factory=dict[str, Strategy])
    bound: float = -np.inf
    key: str = ""


def start_of(plan: Plan, bound: float = -np.inf, key: str = "") -> Start:
    """The strategies of a plan, by the first tensor that each operation makes."""
    return Start({op.outs[0]: s for op, s in zip(plan.graph.ops, plan.strategies, strict=True)}, bound, key)
