"""Commands that run a build, or measure this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tapestry import arguments
from tapestry.cli.outcome import Outcome, bar
from tapestry.errors import TapestryError

if TYPE_CHECKING:
    from tapestry import api
    from tapestry.runtime.target_protocol import Progress


def run(args: argparse.Namespace) -> Outcome:
    """``tapestry run``: run a plan, in this process or on ranks."""
    from tapestry.build import store

    store.check_beside(args.build, args.output)
    if args.schedule is None and (args.lose or args.lose_devices):
        raise TapestryError("only a run in another order loses blocks", where="--lose", hint="--schedule random")
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
    compiled = compiled.at_inputs(given) if given else compiled
    feeds = compiled.random_feeds(args.seed) | given
    random = made_up(compiled.build.plan.graph, given, args.seed, _tell)
    with bar(args, "run") as report:
        if args.schedule is None:
            result, document = api.run_checked(compiled, feeds, check=args.check, progress=report)
        else:
            result, document = _in_any_order(args, compiled, feeds, report)
    document |= random
    if args.output:
        from tapestry.runtime.outputs import write

        write(args.output, result.outputs)
    return Outcome(document, lambda: tables.show(tables.ran(document)), status=0 if document["passed"] else 1)


def _tell(text: str) -> None:
    print(f"tapestry run: {text}", file=sys.stderr)


def _in_any_order(args: argparse.Namespace, compiled: api.Compiled, feeds: Mapping[str, Any], report: Progress) -> Any:
    """(result, document) of a run block by block in a random order, beside one in the plan's."""
    from tapestry import api
    from tapestry.runtime.reordered import reordered_run
    from tapestry.runtime.reordered.block_walk import Asked

    _, document = api.run_checked(compiled, feeds, check=args.check)
    other = api.open_session(compiled.build, b"".join(compiled.constants.values()), make=reordered_run.AnyOrderExecutor)
    asked = Asked(seed=args.seed, lose=args.lose, devices=args.lose_devices)
    result, told = reordered_run.run_beside(compiled.session, other, feeds, asked, report)
    return result, document | {"passed": document["passed"] and told["same_bits"], "schedule": told}


def _inputs(items: list[str]) -> dict[str, Any]:
    """``--input name=file.npy …``."""
    import numpy as np

    out: dict[str, Any] = {}
    for item in items:
        name, eq, file = item.rpartition("=")
        if not eq:
            raise TapestryError(f"'{item}' is not name=file.npy", where="--input")
        try:
            out[name] = np.load(file, allow_pickle=False)
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
            where="tapestry run", hint="python -m tapestry.runtime BUILD for each rank, or --processes N to start ranks here",
        )  # fmt: skip
    request = launch.request(args)
    with bar(args, "run") as report:
        how = launch.Launch(
            processes=1 if args.processes is None else args.processes, restarts=args.max_restarts, port=args.port,
            check=args.check, progress=report, tell=_tell,
        )  # fmt: skip
        document = launch.run(request, how)
    return Outcome(document, lambda: tables.show(tables.ran_on_processes(document)), status=0 if document["passed"] else 1)


def shard_weights(args: argparse.Namespace) -> Outcome:
    """``tapestry shard-weights``: weights cut as the plan cuts them, a file per device."""
    from tapestry import launch
    from tapestry.build import store

    store.check_beside(args.build, args.output)
    done = launch.shard_weights(args.build, args.output)
    text = f"{args.output}: {done['slices']} slices in {done['files']} files, {sum(done['bytes']):,} bytes"
    return Outcome(done, lambda: print(text))


def tune(args: argparse.Namespace) -> Outcome:
    """``tapestry tune``: measure the kernels' configurations on this machine's GPU."""
    from tapestry import api
    from tapestry.viz import tables

    with bar(args, "tune") as report:
        done = api.tune(
            args.build, libraries=args.library, again=args.again, time_limit=args.time_limit, seed=args.seed, progress=report
        )
    return Outcome(done, lambda: tables.show(tables.tuned(done)))


def calibrate(args: argparse.Namespace) -> Outcome:
    """``tapestry calibrate``: measure this machine and write a topology file."""
    from tapestry import flags

    flags.before_torch()
    from tapestry.codegen.torch_cpu import TorchCpu
    from tapestry.plan.topology import device_data, parse_mesh, topology
    from tapestry.runtime.calibration import automatic, start, trace_fit
    from tapestry.runtime.calibration.document import write
    from tapestry.runtime.calibration.machine import memory_bytes
    from tapestry.runtime.calibration.rounds import ROUNDS, agreed
    from tapestry.viz import tables

    place = flags.world()
    if args.auto and (place.world > 1 or args.device or args.from_trace or args.threads):
        raise TapestryError("it is measured as a plan of N devices runs here", where="--auto", hint="with --processes N alone")
    output, processes = automatic.place(args.processes) if args.auto else (args.output, args.processes)
    most, seconds = (ROUNDS, args.seconds or automatic.SECONDS) if args.auto else (1, args.seconds or start.SECONDS)
    given = device_data(topology(parse_mesh("2"), args.device).device) if args.device else None
    with bar(args, "calibrate") as report:
        if args.from_trace:
            document = trace_fit.from_trace(args.from_trace, memory_bytes())
        elif place.world > 1:
            document = start.on_rank(TorchCpu, place, args.threads, seconds=seconds, given=given, say=report)
        else:
            how = partial(start.calibrate, TorchCpu, processes, args.threads, seconds=seconds, given=given, say=report)
            document = agreed(how, most)
    if document is None:  # rank 0 writes
        return Outcome({}, lambda: None)
    write(output, document)
    return Outcome(document, lambda: tables.show(tables.calibrated(document, output)))


def fuzz(args: argparse.Namespace) -> Outcome:
    """``tapestry fuzz``: random models under random plans against two references."""
    from tapestry import flags

    flags.before_torch()
    import_module("onnxruntime")  # without it there is one reference, and nobody to judge
    from tapestry.fuzz import campaign, series

    in_series = args.jobs is not None or args.log is not None
    with bar(args, "fuzz") as report:
        if in_series:
            what = series.Series(
                seed=args.seed, first=args.first, count=args.count, jobs=args.jobs or 1, log=args.log, limit=args.time,
                output=args.output,
            )  # fmt: skip
            document = series.run(what, report)
            passed, text = bool(document["passed"]), series.summary(document) + "\n"
        else:
            tally = campaign.fuzz(
                args.seed, args.count, first=args.first, limit=args.time, output=args.output, progress=report, stop=args.stop
            )
            document, passed, text = tally.document(), not tally.failures, campaign.text(tally)
    return Outcome(document, lambda: print(text, end=""), status=0 if passed else 1, insist=in_series)
