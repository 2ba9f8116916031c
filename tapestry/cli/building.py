"""Commands that make a build, or look at a model or at a build."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tapestry import arguments, flags, options
from tapestry.arguments import shapes
from tapestry.cli.outcome import Outcome, bar
from tapestry.errors import TapestryError, some
from tapestry.plugins import tool
from tapestry.system.quoting import printable

if TYPE_CHECKING:
    from tapestry import api
    from tapestry.runtime.session import Result
    from tapestry.runtime.target_protocol import Progress


class KernelEvidence(Protocol):
    """Proofs of the kernels of a build: a row of a report for each."""

    def __call__(self, folder: Path, report: Callable[..., None], /) -> list[dict[str, str]]:
        """Prove them.

        Raises:
            LawError: a kernel is not its operation.
        """
        ...


class OtherOrder(Protocol):
    """A run in another order than the plan's."""

    def __call__(
        self, compiled: api.Compiled, feeds: Mapping[str, Any], seed: int, report: Progress, /
    ) -> tuple[Result, dict[str, Any]]:
        """What it made, and what is said of it beside a plain run."""
        ...


def compile_model(args: argparse.Namespace) -> Outcome:
    """``tapestry compile``: find, verify and write a plan."""
    from tapestry import api
    from tapestry.build import store
    from tapestry.compiler.pipeline import PASSES
    from tapestry.system.interrupts import Interrupts
    from tapestry.viz import progress, tables

    store.check_output(args.output)
    interrupts = Interrupts()
    with interrupts.listening(), progress.passes([p.name for p in PASSES], quiet=args.quiet) as watch:

        def report(phase: str, name: str) -> None:
            interrupts.stage(phase)
            watch.begin(phase, name)

        given: dict[str, Any] = {name: getattr(args, name) for name in options.FLAGS} | {"shapes": shapes(args.shapes)}
        build = api.compile(args.model, **given, interrupt=interrupts.asked, progress=report, found=watch.found)
        report("write", "write")
        seconds = {**build.report["seconds"], "total": round(time.perf_counter() - flags.STARTED, 4)}  # imports as well
        build.build = replace(build.build, report={**build.report, "seconds": seconds})
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
            if not args.weights:  # they need not be there
                run = f"tapestry verify {args.output}"
            elif args.target.startswith("triton"):
                run = f"tapestry verify {args.output} --kernels; on a GPU {run}"
            print(f"build {args.output}\nnext: tapestry explain {args.output}; {run}")

    printed = {"printed": dict(build.printed)} if args.print_after else {}
    return Outcome({**build.report, **printed}, text, insist=bool(args.print_after or args.print_passes))


def explain(args: argparse.Namespace) -> Outcome:
    """``tapestry explain``: the plan as a person reads it."""
    from tapestry.build import store
    from tapestry.viz import build_diff as build_diff_module
    from tapestry.viz import explain, measured

    if args.analyze:
        from tapestry import launch

        build, analysis = launch.analyze(args.build, args.processes)
        return Outcome({**build.report, "analysis": analysis}, lambda: print(measured.text(analysis), end=""), insist=True)
    if args.processes:
        raise TapestryError("nothing is run", where="--processes", hint="--analyze runs the build")
    build, _ = store.read(args.build)
    other = store.read(args.diff)[0] if args.diff else None
    document = explain.document(build, why=args.why)
    text = explain.text(build, document, critical=args.critical_path, every=args.verbose or args.why)
    if args.kernels:
        from tapestry.codegen.kernel_sources import chosen_kernels

        document["kernels"] = chosen_kernels(build.plan.graph, build.program, build.target)
        text += explain.chosen_text(document["kernels"], build.plan.graph)
    if other is not None:
        document["diff"] = build_diff_module.compare(build, other, document)
        text = build_diff_module.diff_text(document["diff"])
    return Outcome({**build.report, **document, "text": text}, lambda: print(text, end=""), insist=True)


def verify(args: argparse.Namespace) -> Outcome:
    """``tapestry verify``: re-check every law from the files alone."""
    from tapestry.compiler.saved_build import replay_rewrites, verify_build
    from tapestry.viz.format import evidence_text, kernels_text
    from tapestry.viz.tables import rewrites_text

    build, laws, evidence = verify_build(args.build, args.model)
    replayed = replay_rewrites(args.build, build.plan.graph)
    rewrites = None if replayed is None else {"steps": replayed.steps, "shown": dict(replayed.shown)}
    with bar(args, "verify") as report:
        kernels = tool(KernelEvidence)(args.build, report) if args.kernels else None

    def text() -> None:
        print(f"{args.build}: {sum(laws.values()):,} checks of {len(laws)} laws, all hold")
        for name, count in laws.items():
            print(f"  {name:18} {count:>10,}")
        print(f"{args.build}: {rewrites_text(rewrites)}")
        for row in evidence:
            print(evidence_text(row, every=args.verbose))
        for line in kernels_text(kernels or []):
            print(line)

    document: dict[str, Any] = {
        "model": build.model,
        "passed": True,
        "laws": laws,
        "rewrites": rewrites,
        "evidence": evidence,
        "kernels": kernels,
    }
    return Outcome(document, text)


def kernels(args: argparse.Namespace) -> Outcome:
    """``tapestry kernels``: Triton source, compiled objects and a resource table."""
    from tapestry.compiler.saved_build import emit_kernels
    from tapestry.viz import tables

    with bar(args, "kernels") as report:
        document = emit_kernels(args.build, args.output, args.target, report)
    return Outcome(document, lambda: print(tables.kernels(document)))


def check_sharding(args: argparse.Namespace) -> Outcome:
    """``tapestry check-sharding``: whether a model's multi-device annotations are right."""
    from tapestry.sharding.check_sharding import check_file

    findings = check_file(args.model, shapes(args.shapes))
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
    from tapestry.viz import doctor as doctor_module

    with plugins.taking_part() as parts:
        document = doctor_module.dump_document(args.model, examine(args.model, shapes(args.shapes), weights=args.weights))
    document["plugins"] = [p.data() for p in sorted(parts)]
    status = 1 if document["unsupported"] else 0
    return Outcome(
        document, lambda: print(doctor_module.dump_text(document, all_nodes=args.verbose), end=""), status, insist=True
    )


def run(args: argparse.Namespace) -> Outcome:
    """``tapestry run``: run a plan, in this process or on ranks."""
    from tapestry.build import store

    store.check_beside(args.build, args.output)
    if arguments.by_ranks(args):
        if args.schedule is not None:
            raise TapestryError(
                "another order is for devices in one process", where="--schedule", hint="without ranks' options"
            )
        if args.library:
            raise TapestryError("a run by ranks uses no vendor library", where="--library", hint="leave it out")
        return _run_processes(args)
    from tapestry import api
    from tapestry.runtime.feeds import made_up
    from tapestry.viz import tables

    compiled = api.load(args.build, args.model)
    compiled.libraries = args.library
    given = _inputs(args.input)
    with _said_of_files(args.input):
        if args.shapes:
            compiled = compiled.at(shapes(args.shapes))
        elif given:
            compiled = compiled.at_inputs(given)
    feeds = compiled.random_feeds(args.seed) | given
    random = made_up(compiled.build.plan.graph, given, args.seed, _tell)
    with bar(args, "run") as report, _said_of_files(args.input):
        if args.schedule is None:
            result, document = api.run_checked(compiled, feeds, check=args.check, progress=report)
        else:
            _, document = api.run_checked(compiled, feeds, check=args.check)
            result, told = tool(OtherOrder)(compiled, feeds, args.seed, report)
            document |= {"passed": document["passed"] and told["same_bits"], "schedule": told}
    document |= random
    if args.output:
        from tapestry.runtime.outputs import write_outputs

        write_outputs(args.output, result.outputs)
    return Outcome(document, lambda: tables.show(tables.ran(document)), status=0 if document["passed"] else 1)


@contextmanager
def _said_of_files(items: Sequence[str]) -> Generator[None]:
    """What is wrong with an input is said of the file that it came from."""
    try:
        yield
    except TapestryError as e:
        names = ((printable(name), file) for name, _, file in (i.rpartition("=") for i in items))
        e.where = e.where or next((file for name, file in names if f"'{name}'" in e.what), "")
        raise


def _tell(text: str) -> None:
    print(f"tapestry run: {text}", file=sys.stderr)


def _inputs(items: list[str]) -> dict[str, Any]:
    """``--input name=file.npy …``."""
    import numpy as np

    out: dict[str, Any] = {}
    for item in items:
        name, eq, file = item.rpartition("=")
        if not eq:
            raise TapestryError(f"'{item}' is not name=file.npy", where="--input")
        try:
            out[printable(name)] = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as e:
            raise TapestryError(f"not an array: {e}", where=file, hint="a .npy file written by numpy.save") from None
    return out


def _run_processes(args: argparse.Namespace) -> Outcome:
    from tapestry import flags, launch
    from tapestry.viz import tables

    if (
        args.processes is None and (place := flags.world()).world > 1
    ):  # else every one of them would run all of it, and nothing be said
        raise TapestryError(
            f"this is rank {place.rank} of the {place.world} that {place.by} has started, and would run all of it by itself",
            where="tapestry run",
            hint="python -m tapestry.runtime BUILD for each rank, or --processes N to start ranks here",
        )
    request = launch.request(args)
    processes = 1 if args.processes is None else args.processes
    document = launch.run(request, launch.Launch(processes=processes, port=args.port, check=args.check, tell=_tell))
    return Outcome(document, lambda: tables.show(tables.ran_on_processes(document)), status=0 if document["passed"] else 1)


def tune(args: argparse.Namespace) -> Outcome:
    """``tapestry tune``: measure the kernels' configurations on this machine's GPU."""
    from tapestry import api
    from tapestry.viz import tables

    with bar(args, "tune") as report:
        done = api.tune(
            args.build, libraries=args.library, again=args.again, time_limit=args.time_limit, seed=args.seed, progress=report
        )
    return Outcome(done, lambda: tables.show(tables.tuned(done)), status=0 if done["passed"] else 1)


def calibrate(args: argparse.Namespace) -> Outcome:
    """``tapestry calibrate``: measure this machine and write a topology file."""
    from tapestry import flags

    flags.before_torch()
    from tapestry.codegen.torch_cpu import TorchCpu
    from tapestry.plan.topology import device_data, parse_mesh, topology
    from tapestry.runtime.calibration import automatic, start
    from tapestry.runtime.calibration.document import ROUNDS, write
    from tapestry.runtime.calibration.rounds import agreed
    from tapestry.viz import tables

    place = flags.world()
    if args.auto and (place.world > 1 or args.device or args.threads):
        raise TapestryError("it is measured as a plan of N devices runs here", where="--auto", hint="with --processes N alone")
    output, processes = automatic.place(args.processes) if args.auto else (args.output, args.processes)
    most, seconds = (ROUNDS, args.seconds or automatic.SECONDS) if args.auto else (1, args.seconds or start.START_SECONDS)
    given = device_data(topology(parse_mesh("2"), args.device).device) if args.device else None
    with bar(args, "calibrate") as report:
        if place.world > 1:
            document = start.on_rank(TorchCpu, place, args.threads, seconds=seconds, given=given, say=report)
        else:
            how = partial(start.calibrate, TorchCpu, processes, args.threads, seconds=seconds, given=given, say=report)
            document = agreed(how, most)
    if document is None:  # rank 0 writes
        return Outcome({}, lambda: None)
    write(output, document)
    return Outcome(document, lambda: tables.show(tables.calibrated(document, output)))
