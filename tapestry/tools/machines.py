"""``compile --max-devices N --objective EXPRESSION``: plans for 1 to N devices, of which an objective over time, devices,
memory, energy and money prefers one; so the number of devices is found, not given.

A number of devices is left out where even the least that its plan could cost is more than a plan in hand: an objective that
never falls (`Objective.rising`) at the least seconds of the simplified graph (`plan.cost.compute`), with no bytes. That says
nothing of graphs that equations rewrite so that they have less to compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tapestry import pipeline
from tapestry.errors import PlanError, TapestryError, some
from tapestry.ir.plan import MeshAxis, device_count
from tapestry.ir.program import peak_bytes
from tapestry.pass_runner import Report, Runner
from tapestry.plan.cost.compute import least_seconds
from tapestry.plan.cost.objective import TERMS, Limit, Objective, limits, needs_figures, objective, terms
from tapestry.plan.topology import MAX_DEVICES, default_mesh, parse_bytes, topology
from tapestry.runtime.calibration.automatic import AUTO

FRONT = ("seconds", "devices", "bytes", "energy", "money")


def _memory_there(options: pipeline.Options) -> float:
    """Bytes that plans may use of a device of a preset or a file, before a reserve that is asked for."""
    if options.topology == AUTO:
        return math.inf
    mesh = options.mesh or default_mesh(options.topology) or (MeshAxis("d0", 1),)
    return min(topology(mesh, options.topology, reserve="0" if options.memory_reserve else None).memories())


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked for: the objective, limits, and the most devices (``None``: the mesh is given)."""

    objective: Objective
    limits: tuple[Limit, ...]
    most: int | None

    @property
    def names(self) -> set[str]:
        """The terms that count."""
        return self.objective.names | {x.term for x in self.limits}

    def least(self, term: str) -> float:
        """The tightest limit of a term."""
        return min((x.most for x in self.limits if x.term == term), default=math.inf)

    def broken(self, of: Mapping[str, float]) -> list[Limit]:
        """Limits that a plan does not keep."""
        return [x for x in self.limits if of[x.term] > x.most]


def asked_of(max_devices: int | None, text: str | None, limit: Sequence[str], *, mesh: bool) -> Asked | None:
    """What the options ask for; ``None``: nothing, the mesh is given and time is the objective.

    Raises:
        TapestryError: they make no sense.
    """
    if max_devices is None and text is None and not limit:
        return None
    if max_devices is not None and mesh:
        raise TapestryError("--max-devices, and a mesh", where="--max-devices", hint="one of --max-devices, --devices, --mesh")
    if max_devices is not None and not 1 <= max_devices <= MAX_DEVICES:
        raise TapestryError(f"{max_devices} devices", where="--max-devices", hint=f"1 to {MAX_DEVICES:,}")
    return Asked(objective=objective("seconds" if text is None else text), limits=limits(limit), most=max_devices)


@dataclass(slots=True)
class _Tried:
    """A plan in hand: the search that found it, its topology, and its terms."""

    runner: Runner | None
    of: dict[str, float]
    memory: str | None

    def data(self, asked: Asked) -> dict[str, Any]:
        """For the report."""
        row = {**self.of, "devices": int(self.of["devices"]), "bytes": int(self.of["bytes"])}
        value = asked.objective.value(self.of)
        kept = {"value": value if math.isfinite(value) else None, "within_limits": not asked.broken(self.of)}
        return {**row, **kept}


@dataclass(slots=True)
class _Search:
    options: pipeline.Options
    asked: Asked
    report: Report
    tried: list[_Tried] = field(default_factory=list[_Tried])
    skipped: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    bounds: list[float] = field(default_factory=list[float])
    error: TapestryError | None = None

    def best(self) -> _Tried | None:
        """The plan with the least objective among those within limits that have one; of equal ones the first found."""
        fitting = [t for t in self.tried if not self.asked.broken(t.of) and math.isfinite(self.asked.objective.value(t.of))]
        return min(fitting, key=lambda t: self.asked.objective.value(t.of), default=None)

    def run(self) -> _Tried:
        """Plans for every number of devices that may pay.

        Raises:
            PlanError: no plan keeps the limits.
        """
        for n in numbers(self.asked.most) if self.asked.most else (None,):
            self.number(n)
        best = self.best()
        if best is None:
            raise self.error if self.error and not self.tried else self.refusal()
        return best

    def number(self, n: int | None) -> None:
        """The plans of one number of devices."""
        options = self.options if n is None else replace(self.options, mesh=(MeshAxis("d0", n),))
        limit = self.asked.least("bytes")
        if limit < math.inf:
            given = parse_bytes(options.memory) if options.memory else _memory_there(options)
            options = replace(options, memory=str(int(min(limit, given))))
        try:
            runner = pipeline.begun(options, self.report)
        except TapestryError as e:
            self.refused(n, e)
            return
        needs_figures(self.asked.names, runner.at.topology)
        if n is not None and not self.worth(runner, n):
            return
        try:
            found = self.plan(runner, options)
            for memory in self.smaller(found, runner) if "bytes" in self.asked.objective.names else ():
                self.plan(pipeline.begun(replace(options, memory=memory), self.report), replace(options, memory=memory))
        except TapestryError as e:
            self.refused(n, e)

    def refused(self, n: int | None, error: TapestryError) -> None:
        """There is no plan for so many devices."""
        if n is None:
            raise error
        self.error = self.error or error
        self.skipped.append({"devices": n, "because": str(error).splitlines()[0]})

    def worth(self, runner: Runner, n: int) -> bool:
        """Whether the least that a plan could cost is less than what is in hand."""
        topo = runner.at.topology
        least = terms(topo, least_seconds(runner.at.graph, topo, everywhere=False), 0)
        bound = self.asked.objective.value(least) if self.asked.objective.rising else -math.inf
        bound = bound if math.isfinite(bound) else -math.inf  # no bytes times an infinite number are no number
        self.bounds.append(bound)
        best, broken = self.best(), self.asked.broken(least)
        value = self.asked.objective.value(best.of) if best else math.inf
        if not broken and bound < value:
            return True
        why = f"at the least {broken[0].term} {least[broken[0].term]:.6g}" if broken else f"at the least {bound:.6g}"
        self.skipped.append({"devices": n, "because": why})
        return False

    def plan(self, runner: Runner, options: pipeline.Options) -> _Tried:
        """Search on, and take the plan into account."""
        pareto = runner.at.options.pareto or "bytes" in self.asked.objective.names
        runner.at = runner.at.made(options=replace(runner.at.options, pareto=pareto))
        pipeline.searched(runner, options)
        priced, topo = runner.at.plan, runner.at.topology
        found = _Tried(runner, terms(topo, priced.objective, max(peak_bytes(priced.program)[0])), options.memory)
        self.tried.append(found)
        best = self.best()
        for t in self.tried:  # what was searched is large
            if t is not best and t is not found:
                t.runner = None
        return found

    def smaller(self, found: _Tried, runner: Runner) -> list[str]:
        """The memory of a point of the front that the objective would prefer to the plan, as a limit for another search."""
        values = {p.peak_bytes: self.asked.objective.value({**found.of, "seconds": p.objective_s, "bytes": float(p.peak_bytes)})
                  for p in runner.at.front or () if p.peak_bytes < found.of["bytes"]}  # fmt: skip
        best = min(values, key=lambda b: values[b], default=None)
        return [str(best)] if best is not None and values[best] < self.asked.objective.value(found.of) else []

    def refusal(self) -> PlanError:
        """Which limit the nearest plan breaks, or that the objective has no value."""
        kept = next((t for t in self.tried if not self.asked.broken(t.of)), None)
        if kept is not None:
            what, why = (
                f"'{self.asked.objective.text}' has no finite value",
                ", ".join(f"{k} {v:.6g}" for k, v in kept.of.items()),
            )
            return PlanError(what, where="--objective", why=f"for a plan with {why}", hint="another objective")
        asked = " and ".join(map(str, self.asked.limits)) or "the memory"
        why = "; ".join(f"{some(r['devices'], 'device')}: {r['because']}" for r in self.skipped[:4])
        if self.tried:
            near = min(self.tried, key=lambda t: max(t.of[x.term] / max(x.most, 1e-300) for x in self.asked.limits))
            bad = self.asked.broken(near.of)[0]
            why = f"the nearest, on {some(round(near.of['devices']), 'device')}, has {bad.term} {near.of[bad.term]:.6g}"
        return PlanError(f"no plan keeps {asked}", where="--limit", why=why, hint="other limits, or a larger --max-devices")

    def document(self, best: _Tried) -> dict[str, Any]:
        """What was looked at, for the report."""
        names = [k for k in FRONT if any(t.of[k] for t in self.tried)]
        rows = [t.data(self.asked) for t in sorted(self.tried, key=lambda t: (t.of["devices"], t.of["seconds"]))]
        return {
            "objective": self.asked.objective.text, "limits": list(map(str, self.asked.limits)),
            "max_devices": self.asked.most, "value": self.asked.objective.value(best.of),
            "terms": {k: best.data(self.asked)[k] for k in TERMS}, "tried": rows, "skipped": self.skipped,
            "least": least if math.isfinite(least := min(self.bounds, default=-math.inf)) else None,
            "front": [r for r in rows if not any(_beats(s, r, names) for s in rows)],
        }  # fmt: skip


def _beats(a: Mapping[str, Any], b: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether one plan is as good in every term, and better in one."""
    return all(a[k] <= b[k] for k in names) and any(a[k] < b[k] for k in names)


def numbers(most: int) -> Iterator[int]:
    """1 to ``most``: powers of two first, so that there soon is a good plan to hold the others to."""
    powers = [1 << k for k in range(most.bit_length()) if 1 << k <= most]
    yield from powers
    yield from (n for n in range(1, most + 1) if n not in powers)


def compile_model(options: pipeline.Options, asked: Asked, report: Report) -> pipeline.Compiled:
    """The verified plan that the objective prefers; its report has ``machines``.

    Raises:
        TapestryError: what a compilation refuses, or no plan keeps the limits.
    """
    search = _Search(options, asked, report)
    best = search.run()
    document = search.document(best)
    assert best.runner
    assert device_count(best.runner.at.topology.mesh) == document["terms"]["devices"]
    return pipeline.finished(best.runner, {"machines": document})
