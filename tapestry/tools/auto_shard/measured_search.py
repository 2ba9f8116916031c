"""PopRT's search as it is: every candidate is compiled, the ones that fit are run, and the clock decides: at the end, between
the fastest of them and the stages of the exact search, which are run once more in turns.

A candidate does not fit when a device of the compiled plan needs more than its share of memory. Where none fits, the one that
is least over is tried with the next shares. PopRT says which share of memory it holds back for operators' temporaries
(``available_memory_proportion``), here the proportion is the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tapestry.errors import PlanError
from tapestry.tools.auto_shard.manual import ends
from tapestry.tools.auto_shard.node_graph import PICO
from tapestry.tools.auto_shard.scheme_cost import Evaluation, Problem, Scheme, bits
from tapestry.tools.auto_shard.traversal import Traversal, initial, traverse

FINALISTS = 3  # candidates of the traversal that are run once more, in turns
UNKNOWN = 1 << 62  # bytes of a candidate that could not be compiled


@dataclass(frozen=True, slots=True)
class Trial:
    """A compiled candidate.

    Attributes:
        peaks: bytes of each device; none: it could not be compiled.
        seconds: of a run of one batch through all stages; ``None``: it does not fit, and was not run.
        refused: why it could not be compiled.
    """

    peaks: tuple[int, ...]
    seconds: float | None = None
    refused: str = ""


Trials = Callable[[Sequence[Sequence[int]], int], list[Trial]]
"""Compiles candidates, each the stage of every node, and runs those whose devices need no more than some bytes."""

Turns = Callable[[Sequence[Sequence[int]]], list[float]]
"""Seconds of candidates that were compiled, run in turns."""


@dataclass(frozen=True, slots=True)
class Measured(Evaluation):
    """A scheme with the peaks and the seconds of its compiled plan."""

    trial: Trial

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is better: measured seconds; of what was not run, estimated ones, behind all others."""
        run = self.trial.seconds
        return (0, round(run * PICO)) if run is not None else (1, self.latency)


@dataclass(slots=True)
class Search:
    """The candidates of one model.

    Attributes:
        capacities: (proportion, bytes), tried in order.
        fitting: candidates that fit and were run; ``optimal``: whether the fastest is looked for.
        limit: candidates that are compiled at most; ``batch`` at a time.
    """

    problem: Problem
    devices: int
    capacities: Sequence[tuple[float, int]]
    trials: Trials
    limit: int
    batch: int
    refused: int = 0
    last: str = ""
    optimal: bool = False
    fitting: list[Measured] = field(default_factory=list[Measured])

    def traversal(self, *, optimal: bool) -> dict[str, Any]:
        """The first candidate that fits, or with ``optimal`` the fastest of all that were compiled.

        Raises:
            PlanError: none fits, whatever the proportion.
        """
        start = time.perf_counter()
        self.optimal = optimal
        proportion, capacity = self.capacities[0]
        seen = traverse(
            self.problem,
            initial(self.problem, self.devices),
            capacity,
            partial(self.evaluate, capacity=capacity),
            optimal=optimal,
            limit=self.limit,
            batch=None if optimal else self.batch,
        )
        best, least = seen.best, seen.least
        larger = [(p, c) for p, c in self.capacities if least is not None and least.memory <= c]
        if best is None and least is not None and larger:
            proportion, capacity = larger[0]
            best = self.evaluate([least.scheme], capacity)[0]
        if best is None:
            raise self.too_large(seen)
        return {
            **self.row(best, proportion),
            "candidates": seen.schemes,
            "refused": self.refused,
            "search_s": round(time.perf_counter() - start, 4),
        }

    def exact(self, best: Evaluation, problem: Problem, proportion: float, searched: float) -> dict[str, Any]:
        """The scheme of the exact search, compiled and run as well; ``searched`` are the seconds that finding it took."""
        start = time.perf_counter()
        capacity = dict(self.capacities)[proportion]
        trial = self.trials([stages_of(problem, best.scheme)], capacity)[0]
        took = {"search_s": round(searched, 4), "compile_s": round(time.perf_counter() - start, 4)}
        return {**self.row(_measured(best, trial), proportion, problem), "refused": trial.refused, **took}

    def evaluate(self, schemes: Sequence[Scheme], capacity: int) -> list[Evaluation]:
        """The schemes compiled and, where they fit, run."""
        done = self.trials([stages_of(self.problem, s) for s in schemes], capacity)
        for t in done:
            self.refused += bool(t.refused)
            self.last = t.refused or self.last
        found = [_measured(self.problem.evaluate(s), t) for s, t in zip(schemes, done, strict=True)]
        self.fitting += [m for m in found if m.trial.seconds is not None]
        return [*found]

    def final(self, found: dict[str, dict[str, Any]], turns: Turns) -> dict[str, dict[str, Any]]:
        """What was found, with times of runs in turns: the traversal's is the fastest of its fastest candidates then."""
        mine, others = found["traversal"], {k: f for k, f in found.items() if k != "traversal" and f["fits"]}
        first = sorted(self.fitting, key=lambda m: m.rank)[:FINALISTS]
        rows = [r for r in (self.row(m, mine["proportion"]) for m in first) if r["node_stages"] != mine["node_stages"]]
        rows = [mine, *(rows if self.optimal else [])]
        seconds = turns([r["node_stages"] for r in (*rows, *others.values())])
        pairs = zip((*rows, *others.values()), seconds, strict=True)
        timed = [{**r, "latency_s": s, "throughput_per_s": 1 / s} for r, s in pairs]
        best = min(timed[: len(rows)], key=lambda r: r["latency_s"])
        ran = [r["latency_s"] for r in timed[: len(rows)]]
        again = dict(zip(others, timed[len(rows) :], strict=True))
        return {**found, "traversal": {**mine, **best, "finalists_s": ran}, **again}

    def row(self, found: Evaluation, proportion: float, problem: Problem | None = None) -> dict[str, Any]:
        """One scheme as data."""
        assert isinstance(found, Measured)
        of, run = problem or self.problem, found.trial.seconds
        return {
            "proportion": proportion,
            "available_memory_proportion": round(1 - proportion, 6),
            "fits": run is not None,
            "sharding_nodes": [ends(of, mask) for mask in found.scheme[:-1]],
            "node_stages": stages_of(of, found.scheme),
            "peak_bytes": list(found.trial.peaks),
            "latency_s": run,
            "throughput_per_s": 1 / run if run else None,
        }

    def too_large(self, seen: Traversal) -> PlanError:
        """Why nothing fits."""
        least = seen.least.memory if seen.least else UNKNOWN
        if least >= UNKNOWN:
            return PlanError("no candidate could be compiled", where="--measure", why=self.last)
        share, capacity = max(self.capacities)
        return PlanError(
            f"none of {seen.schemes} compiled candidates fits: {least - capacity:,} bytes too many",
            where="--measure",
            why=f"the fullest device of the smallest needs {least:,}; {share:g} of its memory are {capacity:,}",
            hint="more devices, a larger --memory, or more --max-candidates",
        )


def stages_of(problem: Problem, scheme: Scheme) -> list[int]:
    """The stage of every node."""
    out = [0] * len(problem.graph.names)
    for stage, mask in enumerate(scheme):
        for k in (k for u in bits(mask) for k in problem.units[u]):
            out[k] = stage
    return out


def _measured(e: Evaluation, trial: Trial) -> Measured:
    peaks = trial.peaks or (UNKNOWN,) * len(e.stages)
    stages = tuple(replace(s, weights=0, peak=p) for s, p in zip(e.stages, peaks, strict=True))
    return Measured(e.scheme, stages, trial)
