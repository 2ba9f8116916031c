"""For which sizes a plan is good: where its laws hold, where it is the model's, and where it is not much slower than another.

A region that has a size at which that is not so ends before it, on the side where the plan was made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tapestry.compiler import model_evidence, pipeline
from tapestry.errors import LawError, TapestryError
from tapestry.ir.many_sizes.size_formula import Region, Sizes
from tapestry.ir.many_sizes.symbolic_plan import SymbolicPlan, flat
from tapestry.plan.simulate import simulate
from tapestry.plan.topology import from_data
from tapestry.sizes.sized_plans import PlanAtSizes
from tapestry.verify.many_sizes import sized_laws
from tapestry.verify.many_sizes.size_proofs import SizedLawError

WORSE = 1.1  # times as slow as a plan made for the size, which then gets one
FEW = 8  # a size up to which a region's end moves one by one
STEPS = 40  # that a region may shrink


class Unfit(Exception):
    """Sizes at which a plan cannot be used, the symbols that are to blame, and why."""

    def __init__(self, sizes: Sizes, blame: Iterable[int], why: str) -> None:
        super().__init__(why)
        self.sizes, self.blame, self.why = sizes, tuple(blame), why


@dataclass(slots=True)
class _Seen:
    """What was found at single sizes, which is not looked for again when the region shrinks."""

    plans: PlanAtSizes
    plan: SymbolicPlan
    shown: dict[Sizes, str] = field(default_factory=dict[Sizes, str])
    rows: dict[Sizes, dict[str, Any]] = field(default_factory=dict[Sizes, dict[str, Any]])


def settled(plans: PlanAtSizes, plan: SymbolicPlan, region: Region) -> tuple[Region, dict[str, Any], list[str]]:
    """The part of a region that a plan is for.

    Returns:
        it, what was shown and measured of it, and why it ends where it does.

    Raises:
        LawError: a law does not hold where the plan was made.
    """
    seen, reasons = _Seen(plans, plan), list[str]()
    for _ in range(STEPS):
        try:
            laws, peaks = _laws(seen, region)
            free = [k for k in range(len(plans.symbols)) if len(region.along(k)) > 1]
            _model(seen, region, free)
            _slow_corner(seen, region, free)
        except Unfit as e:
            region = _ended_before(region, plans.sizes, e)
            reasons.append(f"{region.shown(plans.symbols)}: {e.why}")
            continue
        rows = [row for sizes, row in seen.rows.items() if sizes in region]
        shown = [{"sizes": _named(seen, n), "by": by} for n, by in seen.shown.items() if n in region]
        return region, {"laws": laws, "largest_peak_bytes": peaks, "graphs": shown, "looked_at": rows}, reasons
    raise TapestryError("no region is left that a plan can be proved for", where="--shape", why="; ".join(reasons)[-400:])


def _laws(seen: _Seen, region: Region) -> tuple[dict[str, int], list[int]]:
    build = seen.plans.build
    try:
        return sized_laws.check_sizes(seen.plan, region, seen.plans.symbols, [build.memory] * build.program.devices)
    except SizedLawError as e:
        if e.sizes is None or e.sizes == seen.plans.sizes:
            raise
        raise Unfit(e.sizes, e.blame, f"{e.what} {e.why}") from None


def _model(seen: _Seen, region: Region, free: list[int]) -> None:
    """Shapes are the model's at all sizes, and the graph is it at all corners.

    Raises:
        Unfit: it is not.
    """
    made_at = seen.plans.sizes
    other = seen.plans.same.differs(seen.plan.graph, region)
    if other is not None:
        raise Unfit(other[1], free, f"'{other[0]}' has another shape at {_text(seen, other[1])}")
    for sizes in region.corners():
        why = _other_graph(seen, sizes)
        if why:
            ends = {k: tuple(n if j == k else m for j, (n, m) in enumerate(zip(sizes, made_at, strict=True))) for k in free}
            blame = [k for k, end in ends.items() if end != made_at and len(free) > 1 and _other_graph(seen, end)]
            raise Unfit(sizes, blame or free, f"{why} at {_text(seen, sizes)}")


def _other_graph(seen: _Seen, sizes: Sizes) -> str:
    """Why the plan's graph is not the model's at some sizes, nothing where it is: lifted and rewritten there once more, or by
    its values where a size is smaller (1 is broadcast).
    """
    if sizes in seen.shown or sizes == seen.plans.sizes:
        return ""
    mine, why = replace(seen.plan.at(sizes)[0], weights={}), ""
    smaller = any(n < m for n, m in zip(sizes, seen.plans.sizes, strict=True))
    tried = smaller and "values" in seen.shown.values()  # another small size was another graph
    if tried and _same_values(seen, sizes):
        seen.shown[sizes] = "values"
        return ""
    try:
        if flat(seen.plans.graph(sizes)) == flat(mine):
            seen.shown[sizes] = "lifted again"
            return ""
        why = "the model's graph is another one"
    except TapestryError as e:
        why = e.what
    if not smaller or tried or not _same_values(seen, sizes):
        return why
    seen.shown[sizes] = "values"
    return ""


def _corner(region: Region, end: Any) -> Sizes:
    return tuple(end(region.along(k)) for k in range(len(region.low)))


def _same_values(seen: _Seen, sizes: Sizes) -> bool:
    """Whether the plan's graph at some sizes computes what the model does, by values at sampled cells."""
    build, graph = seen.plans.build, seen.plan.at(sizes)[0]
    if any(not w.sha256 for w in graph.weights.values()):
        return False
    try:
        _, evidence = model_evidence.compare(graph, Path(build.model), build.model_sha256, seen.plans.constants, special=False)
    except (LawError, TapestryError):
        return False
    return evidence["kind"] != "none"


def _slow_corner(seen: _Seen, region: Region, free: list[int]) -> None:
    """At the region's corners the plan must not be much slower than what a search finds there.

    Raises:
        Unfit: it is.
    """
    if not free:
        return
    plans, topology = seen.plans, from_data(seen.plans.build.topology)
    for sizes in (_corner(region, min), _corner(region, max)):
        if sizes not in seen.rows and sizes != plans.sizes:
            graph, program = seen.plan.at(sizes)
            kept = simulate(
                replace(plans.build.plan, graph=graph), program, replace(topology, mesh=plans.build.plan.mesh)
            ).total
            found = pipeline.search_again(plans.options_at(sizes), plans.build, graph)
            best, bound = min(kept, found.objective), min(kept, found.bound)
            seen.rows[sizes] = {
                "sizes": _named(seen, sizes),
                "objective_s": kept,
                "best_s": best,
                "lower_bound_s": bound,
                "gap": (kept - bound) / kept if kept else 0.0,
            }
        row = seen.rows.get(sizes)
        if row and row["objective_s"] > WORSE * row["best_s"]:
            ratio = row["objective_s"] / row["best_s"]
            far = max(free, key=lambda k: abs(math.log(sizes[k] / plans.sizes[k])))
            raise Unfit(sizes, (far,), f"another plan is {ratio:.2f} times as fast at {_text(seen, sizes)}")


def _named(seen: _Seen, sizes: Sizes) -> dict[str, int]:
    return dict(zip(seen.plans.symbols, sizes, strict=True))


def _text(seen: _Seen, sizes: Sizes) -> str:
    return ", ".join(f"{s} = {n}" for s, n in zip(seen.plans.symbols, sizes, strict=True))


# regions


def _ended_before(region: Region, made_at: Sizes, e: Unfit) -> Region:
    """The region without some sizes, ended along the symbol to blame that is furthest from where the plan was made."""
    blame = [k for k in e.blame if e.sizes[k] != made_at[k]] or [k for k, n in enumerate(e.sizes) if n != made_at[k]]
    k = max(blame, key=lambda k: abs(math.log(e.sizes[k] / made_at[k])))
    n, m = e.sizes[k], made_at[k]
    end = n if min(n, m) <= FEW and abs(n - m) <= FEW else round(math.sqrt(n * m))
    end = n if end == m else end
    low, high = (max(end, n) + 1, region.high[k]) if n < m else (region.low[k], min(end, n) - 1)
    return _with(region, k, min(low, m), max(high, m))


def _with(region: Region, k: int, low: int, high: int) -> Region:
    lows, highs = list(region.low), list(region.high)
    lows[k], highs[k] = low, high
    return replace(region, low=tuple(lows), high=tuple(highs))


def fixed(region: Region, k: int, n: int) -> Region:
    """The sizes of a region at which a symbol is n."""
    return _with(region, k, n, n)


def without(whole: Region, part: Region) -> list[Region]:
    """Regions that make up what a part leaves of a region; those that have a size."""
    out: list[Region] = []
    for k in range(len(whole.low)):
        out += [_with(whole, k, whole.low[k], part.low[k] - 1), _with(whole, k, part.high[k] + 1, whole.high[k])]
        whole = _with(whole, k, part.low[k], part.high[k])
    return [r for r in out if all(r.along(k) for k in range(len(r.low)))]
