"""Rounds of measuring: until two agree, and how much others worked meanwhile."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

from tapestry.plan.topology.measured_costs import AGREE
from tapestry.runtime.calibration.document import LONG, ROUNDS, Document


def agreed(measure: Callable[[], Document], most: int = ROUNDS) -> Document:
    """Of the two rounds that differ least the faster one, because what others do on the machine only adds to times."""
    start, before, rounds = time.monotonic(), others(), [measure()]
    agreement, found = None, rounds[0]
    while len(rounds) < most and (agreement is None or agreement > AGREE):
        if (time.monotonic() - start) * (1 + 1 / len(rounds)) > LONG:
            break
        rounds.append(measure())
        pairs = [(differ(a, b), min(a, b, key=_seconds)) for a, b in combinations(rounds, 2)]
        agreement, found = min(pairs, key=lambda pair: pair[0])
    spent = time.monotonic() - start
    share = (others() - before) / max(spent * (os.cpu_count() or 1), 1e-9)
    sure = {"when": time.time(), "rounds": len(rounds), "agreement": agreement, "others": min(1.0, max(0.0, share))}
    return {**found, "margin": max(found["margin"], min(agreement or 0.0, 0.25)), "measured": {**found["measured"], **sure}}


def differ(a: Document, b: Document) -> float:
    """By what share times of two rounds differ: the median over a class of kernels, or over calls; the largest of these."""
    one, two, logs = _measured_seconds(a), _measured_seconds(b), defaultdict[str, list[float]](list)
    for key in (k for k in one.keys() & two.keys() if one[k] > 0 < two[k]):
        logs[key[0]].append(math.log(one[key] / two[key]))
    return max((math.exp(abs(statistics.median(x))) - 1 for x in logs.values()), default=0.0)


def _seconds(document: Document) -> float:
    return sum(p[-1] for p in document["measured"]["kernels"])


def _measured_seconds(document: Document) -> dict[tuple[str, Any], float]:
    """Seconds of each kernel and call."""
    kernels = {(p[0], k): p[-1] for k, p in enumerate(document["measured"]["kernels"])}
    tables = document.get("collectives", ())
    return kernels | {("calls", (t["call"], t["group"], t.get("stride"), n)): s for t in tables for n, s in t["points"]}


def others() -> float:
    """Seconds that cores worked until now for others than this process and the children that have ended, as Linux says it."""
    stat = Path("/proc/stat")
    user, nice, system, _, _, *interrupts = map(int, stat.read_text().split()[1:9]) if stat.exists() else (0,) * 8
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
