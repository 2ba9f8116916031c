"""Compiling for a range of sizes: plans made at some sizes, each for the region in which it is proved and not much worse.

A region begins as all that is left of what was asked for, as far as the model is one there (`model_sizes`). A plan is made in
its middle; where the plan's laws say otherwise at some sizes, or another plan is much faster there (`settled_regions.WORSE`),
the region shrinks, and what it leaves is another one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from tapestry.build import store
from tapestry.build.sized_builds import SizedBuild, SizedRegion
from tapestry.compiler import model_evidence, pipeline
from tapestry.compiler.pass_runner import Report
from tapestry.errors import ModelError, TapestryError
from tapestry.ir.many_sizes.size_formula import Formula, Region, Sizes
from tapestry.ir.many_sizes.symbolic_plan import SymbolicPlan
from tapestry.lift import onnx_to_graph as lift
from tapestry.lift.file.structure import TEXT
from tapestry.lift.sizes.model_sizes import SameModel, Sum, follow, given_sizes, same_model
from tapestry.sizes.settled_regions import fixed, settled, without
from tapestry.sizes.sized_plans import OtherPlan, PlanAtSizes
from tapestry.verify.many_sizes.size_proofs import SizedLawError

# What ``--shape`` asks for: sizes of symbols, and ranges and lists of them.


MOST_LISTED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Symbols with more than one size, the sizes of all of them, and what is fixed."""

    symbols: tuple[str, ...]
    region: Region
    fixed: Mapping[str, Any]


def asked(model: Path, shapes: Mapping[str, Any]) -> Asked | None:
    """The ranges among the sizes that are asked for; ``None`` where there is none.

    Raises:
        TapestryError: a range is none, or is of no symbol of the model.
    """
    found = {name: value for name, value in shapes.items() if _several(value)}
    if not found or model.suffix == TEXT:
        return None
    proto = lift.read_model(model, False).model
    inputs = lift.input_dims(proto, set())
    found = {name: value for name, value in found.items() if name not in inputs}
    if not found:
        return None
    symbols = {s for dims in inputs.values() for s in dims if isinstance(s, str)}
    unknown = next((s for s in found if s not in symbols), None)
    if unknown is not None:
        what = f"'{unknown}' is no symbol of the model"
        why = f"its symbols are {', '.join(sorted(symbols))}" if symbols else f"it has none; its inputs are {', '.join(inputs)}"
        traced = any(re.fullmatch(r"s\d+", s) for s in symbols)
        hint = "with an ExportedProgram give its dynamic_shapes too: it keeps no names of sizes" if traced else ""
        raise TapestryError(what, where="--shape", why=why, hint=hint)
    some, fixed = (
        {s: _sizes_of_symbol(s, value) for s, value in found.items()},
        {s: v for s, v in shapes.items() if s not in found},
    )
    known, rules = given_sizes(proto, inputs, fixed)
    for s in reversed(found):
        others = {t: sizes for t, sizes in some.items() if t != s}
        if _follows(s, some[s], others, known, rules):
            some = others
    low, high = tuple(s[0] for s in some.values()), tuple(s[-1] for s in some.values())
    among = {k: tuple(s) for k, s in enumerate(some.values()) if not isinstance(s, range)}
    return Asked(symbols=tuple(some), region=Region(low, high, among), fixed=fixed)


def _follows(
    symbol: str, sizes: Sequence[int], others: Mapping[str, Sequence[int]], known: Mapping[str, int], rules: Sequence[Sum]
) -> bool:
    """Whether a symbol has no sizes of its own, but those that follow from others.

    Raises:
        TapestryError: those that are asked for are not the ones that follow.
    """
    ends = [{**known, **{s: some[k] for s, some in others.items()}} for k in (0, -1)]
    what = [follow(rules, end).get(symbol) for end in ends][-1]
    if what is None:
        return False
    low, high = sorted(end[symbol] for end in ends)
    if list(sizes) != list(others.get(str(what), range(low, high + 1))):
        why = f"{symbol} has to be {what} (because of {what.why}), which is {low}..{high}"
        raise TapestryError("--shape contradicts the model", where=symbol, why=why, hint=f"leave {symbol} out of --shape")
    return True


def _several(value: Any) -> bool:
    if isinstance(value, str):
        return ".." in value or "," in value
    return isinstance(value, range) or (isinstance(value, Sequence) and len(cast("Sequence[object]", value)) > 1)


def _sizes_of_symbol(symbol: str, value: Any) -> Sequence[int]:
    """All sizes of a symbol: a range, or a list in order.

    Raises:
        TapestryError: they are none.
    """
    try:
        if isinstance(value, range):
            some: Sequence[int] = value
        elif isinstance(value, str) and ".." in value:
            low, high = map(int, value.split(".."))
            some = range(low, high + 1)
        else:
            given = cast("str | Sequence[Any]", value)
            some = sorted({int(v) for v in (given.split(",") if isinstance(given, str) else given)})
    except ValueError:
        some = []
    step = some.step if isinstance(some, range) else 1
    if not some or some[0] < 1 or step != 1 or (not isinstance(some, range) and len(some) > MOST_LISTED):
        what = f"'{value}' is no range of sizes"
        raise TapestryError(what, where=f"--shape {symbol}", hint=f"{symbol}=1..64, or {symbol}=128,256,512")
    return some


def middle(region: Region, parts: int) -> Sizes:
    """Sizes for which the plan of a region is made: the geometric mean of each symbol's, even parts where there is room.

    Not 1, where there are others: an axis of 1 is broadcast.
    """
    out: list[int] = []
    for k in range(len(region.low)):
        some = region.along(k)
        mean = min(max(2, round(math.sqrt(some[0] * some[-1]))), some[-1])
        even = -(-mean // parts) * parts
        near = even if even <= some[-1] else mean
        out.append(near if k not in region.among else min(some, key=lambda n: abs(math.log(n / mean))))
    return tuple(out)


MOST_REGIONS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSizes:
    """A plan for each region; ``first`` is what the build directory itself has."""

    first: pipeline.Compiled
    sized: SizedBuild


@dataclass(slots=True)
class _Compilation:
    """Regions so far, and what is left to plan."""

    options: pipeline.Options
    asked: Asked
    report: Report
    source: lift.ModelSource
    left: list[Region]
    compiled: list[pipeline.Compiled] = field(default_factory=list[pipeline.Compiled])
    regions: list[SizedRegion] = field(default_factory=list[SizedRegion])


def compile_sizes(options: pipeline.Options, asked: Asked, report: Report) -> CompiledSizes:
    """Plans that cover all sizes that are asked for, each verified for its whole region.

    Raises:
        TapestryError: what a compilation refuses, or sizes that no few plans cover.
    """
    options = replace(options, stages="1", micro_batches="1") if options.stages == "auto" else options
    staged = options.stages != "1" or options.micro_batches not in ("1", "auto") or options.stage_at
    if staged or options.pareto or options.resume:
        what = "a range of sizes goes with one stage, and without --pareto and --resume"
        raise TapestryError(what, where="--shape", hint="one size, or none of these")
    if options.target != "torch-cpu":
        raise TapestryError("a range of sizes is for torch-cpu", where="--target", hint="a build for each size")
    work = _Compilation(options, asked, report, lift.read_model(options.model, False), [asked.region])
    while work.left:
        if len(work.regions) == MOST_REGIONS:
            raise _too_many(work, work.left[-1], [e for r in work.regions for e in r.about["ends"]])
        _plan(work, work.left.pop())
    graph = work.regions[0].build.plan.graph
    bound = lift.bound_inputs(work.source, asked.symbols, asked.fixed, work.regions[0].made_at)
    inputs = {t: bound.get(t, graph.tensors[t].shape) for t in graph.inputs}
    sized = SizedBuild(symbols=asked.symbols, asked=asked.region, inputs=inputs, regions=tuple(work.regions))
    first = work.compiled[0]
    document = {**first.build.report, "sizes": {**first.build.report["sizes"], **describe(sized)}}
    first = replace(first, build=replace(first.build, report=document))
    regions = (replace(sized.regions[0], build=first.build), *sized.regions[1:])
    return CompiledSizes(first=first, sized=replace(sized, regions=regions))


def _too_many(work: _Compilation, left: Region, why: Sequence[str]) -> TapestryError:
    reasons = "; ".join(dict.fromkeys(why))[:600]
    what = f"even {MOST_REGIONS} plans would not cover this range"
    return TapestryError(
        what,
        where="--shape",
        why=f"left: {left.shown(work.asked.symbols)}; {reasons}",
        hint="a smaller range, or a list of sizes",
    )


def describe(sized: SizedBuild) -> dict[str, Any]:
    """The map of regions, for the JSON of ``compile`` and ``explain``."""
    regions = [
        {
            "sizes": r.region.shown(sized.symbols),
            "low": dict(zip(sized.symbols, r.region.low, strict=True)),
            "high": dict(zip(sized.symbols, r.region.high, strict=True)),
            **r.about,
        }
        for r in sized.regions
    ]
    return {"symbols": list(sized.symbols), "asked": sized.asked.shown(sized.symbols), "regions": regions}


def _plan(work: _Compilation, whole: Region) -> None:
    """A plan in the middle of a region, for as much of it as it is good for; the rest is left."""
    symbols = work.asked.symbols
    work.report(
        "sizes", f"{len(work.regions)} plan{'s' * (len(work.regions) != 1)} done; the next is for {whole.shown(symbols)}"
    )
    same = _one_model(work, whole)
    work.left += without(whole, same.region)
    whole, made_at = same.region, same.grid.made_at
    options = replace(work.options, shapes=work.asked.fixed, kept=same.varying())
    at = replace(options, shapes={**options.shapes, **dict(zip(symbols, made_at, strict=True))})
    try:
        compiled = pipeline.compile_model(at, work.report)
    except TapestryError as e:
        e.why = f"{e.why}{', ' if e.why else ''}in a plan for {whole.shown(symbols)}"
        raise
    work.report("verify", "sizes")
    constants = model_evidence.arrays(compiled.build.plan.graph, compiled.constants)
    plans = PlanAtSizes(options, symbols, compiled.build, made_at, constants, same)
    region, places, plan, facts, why = _proved(plans, whole)
    work.left += without(whole, region)
    about = {
        "made_at": dict(zip(symbols, made_at, strict=True)),
        **{k: compiled.build.report[k] for k in ("objective_s", "lower_bound_s", "gap")},
        **facts, "numbers": len(places), "formulas": len(set(places.values())), "ends": [*same.reasons, *why],
    }  # fmt: skip
    row = SizedRegion(
        region=region,
        build=compiled.build,
        made_at=made_at,
        places=places,
        plan=plan,
        about=about,
        constants=b"".join(compiled.constants.values()),
        files=_files(compiled) if work.regions else {},
    )
    work.compiled.append(compiled)
    work.regions.append(row)


def _one_model(work: _Compilation, whole: Region) -> SameModel:
    """The part of a region in which the model is one, around sizes in the middle of that part."""
    symbols, fixed_sizes = work.asked.symbols, work.asked.fixed
    parts = math.prod(a.size for a in work.options.mesh) if work.options.mesh else 1
    while True:
        made_at = middle(whole, parts)
        found = same_model(
            work.source.model, lift.bound_inputs(work.source, symbols, fixed_sizes, made_at), symbols, whole, made_at
        )
        if not found.shapes and math.prod(map(len, found.grid.along)) > MOST_REGIONS - len(work.regions):
            raise _too_many(work, whole, found.reasons)
        if middle(found.region, parts) == made_at:
            return found
        whole = found.region


def _proved(plans: PlanAtSizes, region: Region) -> tuple[Region, dict[int, Formula], SymbolicPlan, dict[str, Any], list[str]]:
    """The plan with formulas, for as much of a region as it is good for; where sizes are beyond what is proved, with fewer
    symbols that vary.
    """
    why: list[str] = []
    while True:
        region, places, plan, more = _fitted(plans, region)
        why += more
        try:
            region, facts, reasons = settled(plans, plan, region)
        except SizedLawError as e:
            if e.sizes is not None:
                raise
            region = _fewer(plans, region, e, why)
        else:
            return region, places, plan, facts, [*why, *reasons]


def _fewer(plans: PlanAtSizes, region: Region, e: TapestryError, why: list[str]) -> Region:
    """A region in which the symbol with the fewest sizes has one; the error where all have."""
    free = [k for k in range(len(plans.symbols)) if len(region.along(k)) > 1]
    if not free:
        raise e
    least = min(free, key=lambda k: len(region.along(k)))
    why.append(f"one {plans.symbols[least]}: {e.what}{f' ({e.why})' if e.why else ''}")
    return fixed(region, least, plans.sizes[least])


def _fitted(plans: PlanAtSizes, region: Region) -> tuple[Region, dict[int, Formula], SymbolicPlan, list[str]]:
    """The plan with formulas; where none are found, with fewer symbols that vary."""
    why, far = list[str](), True
    while True:
        free = [k for k in range(len(plans.symbols)) if len(region.along(k)) > 1]
        try:
            near = _near(free, plans.sizes, region if far else None)
            telling = [n for n in plans.same.grid.telling() if n in region]
            return region, *plans.with_sizes(list(dict.fromkeys(near + telling))), why
        except (OtherPlan, ModelError) as e:
            if not far or not free:
                region = _fewer(plans, region, e, why)
            far = False


def _files(c: pipeline.Compiled) -> dict[str, bytes]:
    return store.files_of(c.build, c.constants, c.kernels, c.laws, c.rewrites, c.evidence)


def _near(free: Sequence[int], made_at: Sizes, region: Region | None) -> list[Sizes]:
    """Sizes from which formulas are guessed: one more of each symbol that varies, and more of all: the largest of a region,
    whose graph is looked at in any case."""
    out = [tuple(n + (j == k) for j, n in enumerate(made_at)) for k in free]
    most = tuple(n + 2 * (k in free) if region is None else region.along(k)[-1] for k, n in enumerate(made_at))
    return [*out, most] if free else []
