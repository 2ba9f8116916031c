"""From measurements to a topology document, which says how well it predicts what was kept back of them."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tapestry.build.atomic import new_file
from tapestry.ir.collective_calls import EXCHANGE
from tapestry.plan.topology import Topology, topology
from tapestry.plan.topology.measured_costs import CLASSES, CallTimes, KernelRates, calls_data, classes_data
from tapestry.runtime.calibration.call_clock import CallPoint
from tapestry.runtime.calibration.measure import Measurements
from tapestry.runtime.calibration.rate_fit import (
    KernelPoint,
    fit_kernels,
    fit_line,
    fit_table,
    judged,
    kept_back,
    kernel_seconds,
    margin,
    vector_rate,
)

ENOUGH = 6  # kernels of a class for a factor of its own
HIDDEN = 0.5  # of the shorter one of a transfer and a kernel: with less they take turns rather than run beside each other
Fit = dict[str, dict[str, Any]]


def write(path: Path, found: Mapping[str, Any]) -> Topology:
    """Write a document in one step, and read it back as a topology.

    Raises:
        TapestryError: the measurements make no topology (a rate that is not positive).
    """
    with new_file(path) as temporary:
        temporary.write_text(json.dumps(found, indent=1))
        return topology((), str(temporary))


def document(found: Measurements, versions: Mapping[str, str], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A topology document (docs/reference/topology.md) of what was measured.

    Args:
        versions: what else to say under ``measured``.
        given: the ``device``, where no kernels were measured.
    """
    task, first = found.task, found.alone or found.kernels
    classes, fit = fit_classes(first)
    vector, out = vector_rate(first), dict[str, Any]()
    if found.alone:
        out["alone"] = measured_device(classes, vector, found.alone, found.dtypes, found.memory)
        classes, vector, beside = slowed(classes, vector, found.kernels, found.alone)
        fit = beside | {f"{k} alone": v for k, v in fit.items()}
    memory = found.memory // task.here
    out["device"] = given or measured_device(classes, vector, found.kernels, found.dtypes, memory)
    tables, more = fit_calls(found.calls)
    fit |= more
    out["levels"] = _levels(found)
    if tables:
        out |= {"collectives": calls_data(tables), "overlap": found.hidden is None or found.hidden >= HIDDEN}
    points = [[p.kind, p.work, p.light, p.nbytes, p.seconds] for p in found.kernels]
    measured = {"processes": task.processes, "threads": task.threads, "hidden": found.hidden, **versions, "kernels": points}
    return {**out, "margin": margin(fit), "measured": measured, "fit": fit}


def fit_classes(points: Sequence[KernelPoint]) -> tuple[dict[str, KernelRates], Fit]:
    """Rates by class, and how well they predict. What contractions compute beside their products has one rate."""
    classes, fit = dict[str, KernelRates](), Fit()
    of: dict[str, list[KernelPoint]] = defaultdict(list)
    for p in points:
        of[p.kind].append(p)
    vector = vector_rate(points)
    for kind in (k for k in CLASSES if k in of):
        classes[kind], fit[kind] = fit_kernels(of[kind], vector)
    return classes, fit


def slowed(
    alone: Mapping[str, KernelRates], vector: float, points: Sequence[KernelPoint], same: Sequence[KernelPoint]
) -> tuple[dict[str, KernelRates], float, Fit]:
    """Rates where all processes work, of those of one alone: slower by the median over a class of what the same kernel took the
    one way and, just after, the other. Fitted by themselves, rates of times in which processes wait for each other would
    say more of when they waited than of the kernels.

    Args:
        points: with all processes at work; ``same``: alone, in the same order.

    Returns:
        also the rate of what products are computed with, and how well the rates predict what was kept back.
    """
    pairs = defaultdict[str, list[tuple[KernelPoint, KernelPoint]]](list)
    for p, a in zip(points, same, strict=True):
        pairs[p.kind].append((p, a))
    mine, held = dict[str, list[float]](), dict[str, list[KernelPoint]]()
    for kind, own in pairs.items():
        kept, back = kept_back(sorted(own, key=lambda pair: pair[1].seconds))
        mine[kind], held[kind] = [p.seconds / a.seconds for p, a in kept], [p for p, _ in back]
    common = statistics.median(x for ratios in mine.values() for x in ratios)
    rates, fit = dict[str, KernelRates](), Fit()
    for kind, ratios in mine.items():
        by = statistics.median(ratios) if len(ratios) >= ENOUGH else common
        k = alone[kind]
        rates[kind] = KernelRates(k.launch * by, k.rate / by, k.bandwidth / by)
        guessed = [(kernel_seconds(rates[kind], p, vector / common), p.seconds) for p in held[kind]]
        fit[kind] = judged(len(pairs[kind]), guessed)
    return rates, vector / common, fit


def measured_device(
    classes: Mapping[str, KernelRates], vector: float, points: Sequence[KernelPoint], dtypes: Sequence[KernelPoint], memory: int
) -> dict[str, Any]:
    """The ``device`` of a document: its common rates are what maps reach, and products by dtype."""
    mapped, heavy = classes["map"], classes["contraction"]
    bandwidth = max(p.nbytes / p.seconds for p in points if p.kind == "map")
    same = next((p.seconds for p in dtypes if p.dtype == "f32"), 1.0)
    flops = {p.dtype: heavy.rate * same / p.seconds for p in dtypes} or {"f32": heavy.rate}
    return {
        "memory": memory,
        "bandwidth": bandwidth,
        "launch": mapped.launch,
        "vector": vector,
        "flops": {**flops, "other": min(flops.values())},
        "classes": classes_data(classes),
    }


def fit_calls(points: Sequence[CallPoint]) -> tuple[list[CallTimes], Fit]:
    """Tables of calls by group, and how well lines between the points that they keep predict the others."""
    of: dict[tuple[str, int, int], list[tuple[int, float]]] = defaultdict(list)
    for p in points:
        of[p.call, p.group, p.stride].append((p.nbytes, p.seconds))
    strided = {
        (call, group)
        for (call, group, a), (again, same, b) in pairwise(sorted(of))
        if (call, group) == (again, same) and a != b
    }
    tables, fit = list[CallTimes](), Fit()
    for (call, group, stride), own in of.items():
        empty = CallTimes(call, group, (), stride if (call, group) in strided else 0)
        table, how = fit_table(own, lambda kept, n, empty=empty: replace(empty, points=tuple(kept)).seconds(n))
        tables.append(replace(empty, points=tuple(table)))
        fit[f"{call} of {group}" + f", {stride} apart" * bool(tables[-1].stride)] = how
    return tables, fit


def _levels(found: Measurements) -> list[dict[str, Any]]:
    """Latency and seconds per byte of a message between two: inside a host, and, where ranks that are apart differ, across."""
    pairs: dict[int, list[tuple[int, float]]] = defaultdict(list)
    smallest = min((c.group for c in found.calls), default=0)
    for c in found.calls:
        if c.call == EXCHANGE and c.group == smallest:
            pairs[c.stride].append((c.nbytes, c.seconds))
    if not pairs:
        pairs[1] = list(found.copies)
    lines = [{"alpha": a, "beta": max(b, 1e-18)} for a, b in (fit_line(pairs[s]) for s in sorted(pairs))]
    if len(lines) == 1 or found.task.here == found.task.processes:
        return lines[:1]
    return [{"devices": found.task.here, **lines[0]}, lines[-1]]


# Measuring this machine until two rounds agree; the document says how far they do, and how busy the machine was.


ROUNDS, LONG = 4, 60.0  # at most so many, and none that would end after so many seconds
Document = dict[str, Any]
