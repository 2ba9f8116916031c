"""Few numbers from many measurements, and how well they predict measurements that were kept back.

Errors are relative, and as bad above as below: what is least is the sum of ``(p - t)² / (p t)`` over predicted p and measured
t, by least squares with weights from the last round. A measurement that is off by more than `FAR` counts by its error and not
by the square of it (Huber 1964), so that few of another kind do not spoil the rest. No coefficient is below zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeVar

import numpy as np

from tapestry.ir.types import Array
from tapestry.plan.topology.measured_costs import PRODUCTS, KernelRates

ROUNDS = 20
VECTORS = 8  # rates of what products are computed with that are tried, each half of the one before
BEYOND = 8.0
MARGIN = 0.25  # at most: more says that little was learned, not that one device is better
FAR = 0.4  # of the logarithm of p / t
FASTEST = 1e18  # FLOP/s or B/s of what no measurement shows to cost anything
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KernelPoint:
    """One kernel as measured: FLOPs of its class (of a contraction: of its products), other FLOPs, bytes and seconds."""

    kind: str
    work: float
    light: float
    nbytes: float
    seconds: float
    dtype: str = "f32"


def kernel_point(kind: str, heavy: float, light: float, nbytes: float, seconds: float, dtype: str = "f32") -> KernelPoint:
    """A measurement with FLOPs as the cost model counts them: contractions', and others."""
    if kind in PRODUCTS:
        return KernelPoint(kind, heavy, light, nbytes, seconds, dtype)
    return KernelPoint(kind, heavy + light, 0.0, nbytes, seconds, dtype)


def coefficients(columns: Array, seconds: Array, least: Array | None = None) -> Array:
    """The x with the least relative errors of ``columns @ x`` against ``seconds`` (all above zero); none below ``least``."""
    low: Array = np.zeros(columns.shape[1]) if least is None else least
    found, predicted, rest = low, seconds, seconds - columns @ low
    for _ in range(ROUNDS):
        far = np.maximum(np.abs(np.log(predicted / seconds)) / FAR, 1.0)
        weight = 1 / np.sqrt(predicted * seconds * far)
        found = low + _not_negative(columns * weight[:, None], rest * weight)
        predicted = np.maximum(columns @ found, seconds * 1e-3)
    return found


def _not_negative(a: Array, b: Array) -> Array:
    """Least squares with no coefficient below zero: the best over the columns that take part (there are at most four)."""
    scale = np.where((norm := np.linalg.norm(a, axis=0)) > 0, norm, 1.0)
    best, out = np.inf, np.zeros(a.shape[1])
    for count in range(1, a.shape[1] + 1):
        for chosen in map(list, combinations(range(a.shape[1]), count)):
            x = np.linalg.lstsq(a[:, chosen] / scale[chosen], b, rcond=None)[0]
            error = float(np.sum((a[:, chosen] / scale[chosen] @ x - b) ** 2))
            if x.min() >= 0 and error < best * (1 - 1e-9):
                best, out = error, np.zeros(a.shape[1])
                out[chosen] = x / scale[chosen]
    return out


def kernel_rates(points: Sequence[KernelPoint], vector: float) -> KernelRates:
    """Launch time, rate and bandwidth of one class; ``vector`` is the rate of the other FLOPs (`KernelPoint.light`)."""
    columns = np.array([[1.0, p.work, p.nbytes] for p in points])
    seconds = np.array([max(p.seconds - p.light / vector, p.seconds / 10) for p in points])
    launch, work, byte = coefficients(columns, seconds, _least(columns, seconds)).tolist()
    return KernelRates(launch, 1 / max(work, 1 / FASTEST), 1 / max(byte, 1 / FASTEST))


def vector_rate(points: Sequence[KernelPoint]) -> float:
    """FLOP/s of what products are computed with (activations, the exponentials of attention): the one rate with which the
    rates of all classes of products, fitted each by itself, predict best."""
    mine = [[p for p in points if p.kind == kind] for kind in PRODUCTS]
    mine = [own for own in mine if any(p.light for p in own)]
    if not mine:
        return max((p.work / p.seconds for p in points if p.kind == "map" and p.work), default=FASTEST)

    def off(vector: float) -> float:
        fits = [(own, kernel_rates(own, vector)) for own in mine]
        return sum(abs(math.log(kernel_seconds(r, p, vector) / p.seconds)) for own, r in fits for p in own)

    fastest = BEYOND * max(p.light / p.seconds for own in mine for p in own)
    return min((fastest / 2**k for k in range(VECTORS)), key=off)


def _least(columns: Array, seconds: Array) -> Array:
    """Rates of at most `BEYOND` times what the fastest measurement reached, so that nothing large comes out free; a launch
    may take no time."""
    best = np.max(columns / seconds[:, None], axis=0)
    out = np.where(best > 0, 1 / np.maximum(BEYOND * best, 1e-300), 0.0)
    out[0] = 0.0
    return out


def kernel_seconds(rates: KernelRates, p: KernelPoint, vector: float) -> float:
    """What the rates say that a kernel takes."""
    return rates.launch + p.work / rates.rate + p.nbytes / rates.bandwidth + p.light / vector


def kept_back(points: Sequence[T]) -> tuple[list[T], list[T]]:
    """(points to fit, a third of them to judge the fit by); the first and the last are fitted, so that none lies outside."""
    back = [k for k in range(1, len(points) - 1) if k % 3 == 1]
    return [p for k, p in enumerate(points) if k not in back], [points[k] for k in back]


def judged(points: int, held: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """What ``fit`` says of a class.

    Args:
        held: (predicted, measured) seconds of what was kept back. An error of 0.5 is half as much again, or as little.
    """
    errors = [max(p / t, t / p) - 1 if p > 0 else np.inf for p, t in held]
    median, worst = (statistics.median(errors), max(errors)) if errors else (None, None)
    return {"points": points, "held_back": len(held), "median_error": median, "worst_error": worst}


def margin(fit: Mapping[str, Mapping[str, Any]]) -> float:
    """How far a plan's time may be off: the median over classes and calls, of which a plan has some of each."""
    errors = [v["median_error"] for v in fit.values() if v.get("median_error") is not None]
    return min(statistics.median(errors), MARGIN) if errors else 0.0


def fit_kernels(points: Sequence[KernelPoint], vector: float = FASTEST) -> tuple[KernelRates, dict[str, Any]]:
    """Rates of one class, and how well they predict."""
    ordered = sorted(points, key=lambda p: p.seconds)
    mine, held = kept_back(ordered)
    rates = kernel_rates(mine, vector)
    return rates, judged(len(points), [(kernel_seconds(rates, p, vector), p.seconds) for p in held])


def rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Times by bytes that do not fall: neighbours that do are both their (geometric) mean, as often as that takes."""
    pools: list[tuple[float, list[int]]] = []  # (logarithm of the time, bytes)
    for n, s in sorted(points):
        pools.append((float(np.log(s)), [n]))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, left), (b, right) = pools.pop(-2), pools.pop()
            pools.append(((a * len(left) + b * len(right)) / (len(left) + len(right)), left + right))
    return [(n, float(np.exp(s))) for s, of in pools for n in of]


def fit_table(
    points: Sequence[tuple[int, float]], predict: Callable[[list[tuple[int, float]], int], float]
) -> tuple[list[tuple[int, float]], dict[str, Any]]:
    """A table of times by bytes without a third of the points, and how well it predicts those."""
    mine, held = kept_back(sorted(points))
    table = rising(mine)
    return table, judged(len(points), [(predict(table, n), s) for n, s in held])


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(α, β) of seconds = α + β · bytes."""
    columns = np.array([[1.0, float(n)] for n, _ in points])
    alpha, beta = coefficients(columns, np.array([s for _, s in points])).tolist()
    return alpha, beta
