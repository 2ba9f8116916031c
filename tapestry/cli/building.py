"""Commands that make a build, or look at a model or at a build."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from tapestry.cli.outcome import Outcome, bar, shapes
from tapestry.errors import TapestryError, some


def compile_model(args: argparse.Namespace) -> Outcome:
    """``tapestry compile``: find, verify and write a plan."""
    from tapestry import api
    from tapestry.build import store
    from tapestry.interrupt import Interrupts
    from tapestry.pipeline import PASSES, mesh_of
    from tapestry.viz import progress, tables

    store.check_output(args.output)
    interrupts = Interrupts()
    with interrupts.listening(), progress.passes([p.name for p in PASSES], quiet=args.quiet) as watch:

        def report(phase: str, name: str) -> None:
            interrupts.stage(phase)
            watch.begin(phase, name)

        build = api.compile(
            args.model, mesh=mesh_of(args.devices, args.mesh), topology=args.topology, shapes=shapes(args.shape),
            memory=args.memory, memory_reserve=args.memory_reserve, reduce_in=args.reduce_in, target=args.target,
            assume_finite=args.assume_finite, for_format=args.for_format, precision=args.precision,
            pins=args.pin, layouts=args.layout, accumulate=args.accumulate, rules=args.rules,
            weights=not args.no_weights, time_limit=args.time_limit, seed=args.seed, pareto=args.pareto,
            exact=args.exact, without=args.without_rule, sharding=not args.ignore_sharding, resume=args.resume,
            interrupt=interrupts.asked, configuration=args.configuration, stages=args.stages, stage_at=args.stage_at,
            micro_batches=args.micro_batches, print_after=args.print_after, progress=report, found=watch.found,
            state=args.state, max_devices=args.max_devices, objective=args.objective, limits=args.limit,
        )  # fmt: skip
        report("write", "write")
        build.save(args.output, bundle=args.bundle or None)
    if build.report["search"]["interrupted"]:
        gap = build.report["gap"]
        print(f"interrupted: the plan is the best so far, gap {gap:.2%}; go on with --resume {args.output}", file=sys.stderr)

    def text() -> None:
        if args.print_after:  # nothing else: what is printed reads back
            print(*build.printed.values(), sep="\n", end="")
        if args.print_passes:
            tables.show(tables.passes(build.report["passes"]), stderr=bool(args.print_after))
        if not args.print_after and not args.print_passes:
            tables.show(tables.compiled(build.report))
            run = f"tapestry run {args.output} --check"
            if args.no_weights:  # they need not be there
                run = f"tapestry verify {args.output}"
            elif args.target.startswith("triton"):
                run = f"tapestry verify {args.output} --kernels; on a GPU {run}"
            print(f"build {args.output}\nnext: tapestry explain {args.output}; {run}")

    printed = {"printed": dict(build.printed)} if args.print_after else {}
    return Outcome({**build.report, **printed}, text, insist=bool(args.print_after or args.print_passes))


def explain(args: argparse.Namespace) -> Outcome:
    """``tapestry explain``: the plan as a person reads it."""
    from tapestry.build import store
    from tapestry.viz import build_diff, explain, trace

    if args.analyze:
        return _analyze(args)
    if args.processes:
        raise TapestryError("nothing is run", where="--processes", hint="--analyze runs the build")
    build, _ = store.read(args.build)
    other = store.read(args.diff)[0] if args.diff else None
    timed = explain.schedule(build)
    document = explain.document(build, why=args.why, timed=timed)
    text = explain.text(build, document, critical=args.critical_path, every=args.verbose or args.why)
    if other is not None:
        document["diff"] = build_diff.compare(build, other, document)
        text = build_diff.text(document["diff"])
    if args.trace:
        document["trace"] = {"file": str(args.trace), **trace.write(args.trace, build.plan, timed)}
        text += explain.trace_text(document["trace"])
    return Outcome({**build.report, **document, "text": text}, lambda: print(text, end=""), insist=True)


def _analyze(args: argparse.Namespace) -> Outcome:
    from tapestry import launch
    from tapestry.viz import measured

    build, analysis = launch.analyze(args.build, args.processes, args.trace)
    return Outcome({**build.report, "analysis": analysis}, lambda: print(measured.text(analysis), end=""), insist=True)


def verify(args: argparse.Namespace) -> Outcome:
    """``tapestry verify``: re-check every law from the files alone."""
    from tapestry.saved_build import prove_kernels, replay_rewrites, verify_build
    from tapestry.viz.format import evidence_text, kernels_text
    from tapestry.viz.tables import rewrites_text

    build, laws, evidence = verify_build(args.build, args.model)
    replayed = replay_rewrites(args.build, build.plan.graph)
    rewrites = None if replayed is None else {"steps": replayed.steps, "shown": dict(replayed.shown)}
    with bar(args, "verify") as report:
        kernels = prove_kernels(args.build, report) if args.kernels else None

    def text() -> None:
        print(f"{args.build}: {sum(laws.values()):,} checks of {len(laws)} laws, all hold")
        for name, count in laws.items():
            print(f"  {name:18} {count:>10,}")
        print(f"{args.build}: {rewrites_text(rewrites)}")
        for row in evidence:
            print(evidence_text(row))
        for line in kernels_text(kernels or []):
            print(line)

    document: dict[str, Any] = {
        "model": build.model, "passed": True, "laws": laws, "rewrites": rewrites, "evidence": evidence, "kernels": kernels,
    }  # fmt: skip
    return Outcome(document, text)


def kernels(args: argparse.Namespace) -> Outcome:
    """``tapestry kernels``: Triton source, compiled objects and a resource table."""
    from tapestry.saved_build import emit_kernels
    from tapestry.viz import tables

    with bar(args, "kernels") as report:
        document = emit_kernels(args.build, args.output, args.target, report)
    return Outcome(document, lambda: print(tables.kernels(document)))


def export(args: argparse.Namespace) -> Outcome:
    """``tapestry export``: the plan in the words of another tool."""
    from tapestry.exports import formats

    target = args.output or args.into
    if target is None:
        raise TapestryError("nowhere to write", where="-o", hint="a file; with --into it may be left out")
    done = formats.export(
        args.build, args.format, target, nearest=args.nearest, copy=args.copy_data, into=args.into,
        configuration=args.configuration,
    )  # fmt: skip
    return Outcome(done, lambda: print(*formats.text(done), sep="\n"))


def check_sharding(args: argparse.Namespace) -> Outcome:
    """``tapestry check-sharding``: whether a model's multi-device annotations are right."""
    from tapestry.sharding.check_sharding import check_file

    findings = check_file(args.model, shapes(args.shape))
    errors = [f for f in findings if f.level == "error" or (args.strict and f.code != "no-annotations")]
    rows = {k: [asdict(f) for f in findings if (f in errors) == (k == "errors")] for k in ("errors", "warnings")}

    def text() -> None:
        for f in findings:
            if f in errors or not args.quiet:
                print(f)
        if not args.quiet:
            print(f"{args.model}: {some(len(errors), 'error')}, {some(len(findings) - len(errors), 'warning')}")

    document = {"model": str(args.model), "passed": not errors, **rows}
    return Outcome(document, text, status=1 if errors else 0, insist=True)


def doctor(args: argparse.Namespace) -> Outcome:
    """``tapestry doctor``: what splits, what is opaque, unbound or unsupported."""
    from tapestry.lift.examine import examine
    from tapestry.plugins import entry_points as plugins
    from tapestry.viz import doctor

    with plugins.taking_part() as parts:
        document = doctor.document(args.model, examine(args.model, shapes(args.shape), weights=not args.no_weights))
    document["plugins"] = [p.data() for p in sorted(parts)]
    status = 1 if document["unsupported"] else 0
    return Outcome(document, lambda: print(doctor.text(document, all_nodes=args.verbose), end=""), status, insist=True)


def auto_shard(args: argparse.Namespace) -> Outcome:
    """``tapestry auto-shard``: pipeline stages for the nodes of an ONNX file."""
    from tapestry.sharding.auto_shard import auto_shard
    from tapestry.viz import tables

    if args.num_devices is None and not args.cut:
        raise TapestryError("the number of devices is missing", where="--num-devices", hint="or --cut NODE …")
    devices = len(args.cut) + 1 if args.num_devices is None else args.num_devices
    if args.apart and not args.measure:
        raise TapestryError("nothing is run", where="--apart", hint="with --measure")
    options = auto_shard.Options(
        model=args.input_model, devices=devices, output=args.output_model, optimal=args.optimal_perf,
        processes=args.num_processes, proportions=args.memory_proportion or auto_shard.PROPORTIONS, shapes=shapes(args.shape),
        topology=args.topology, memory=args.memory, cuts=args.cut, most=args.max_candidates, apart=args.apart,
    )  # fmt: skip
    with bar(args, "auto-shard") as advance, ExitStack() as open_trials:
        trials = turns = None
        if args.measure:
            from tapestry.cli.stage_trials import StageTrials

            trials = open_trials.enter_context(StageTrials(options))
            turns = trials.in_turns
        document = auto_shard.auto_shard(options, lambda stage: advance(None, None, stage), trials, turns)

    def text() -> None:
        tables.show(tables.sharded(document))
        print(*tables.sharding_lines(document), sep="\n")

    return Outcome(document, text)
