"""The command that cuts a file into pipeline stages."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from tapestry.arguments import shapes
from tapestry.cli.outcome import Outcome, bar
from tapestry.errors import TapestryError


def auto_shard(args: argparse.Namespace) -> Outcome:
    """``tapestry auto-shard``: pipeline stages for the nodes of an ONNX file."""
    from tapestry.tools.auto_shard import auto_shard
    from tapestry.viz import tables

    if args.num_devices is None and not args.cut:
        raise TapestryError("the number of devices is missing", where="--num-devices", hint="or --cut NODE …")
    devices = len(args.cut) + 1 if args.num_devices is None else args.num_devices
    if args.apart and not args.measure:
        raise TapestryError("nothing is run", where="--apart", hint="with --measure")
    options = auto_shard.Options(
        model=args.input_model,
        devices=devices,
        output=args.output_model,
        optimal=args.optimal_perf,
        processes=args.num_processes,
        proportions=args.memory_proportion or auto_shard.PROPORTIONS,
        shapes=shapes(args.shapes),
        topology=args.topology,
        memory=args.memory,
        cuts=args.cut,
        most=args.max_candidates,
        apart=args.apart,
    )
    with bar(args, "auto-shard") as advance, ExitStack() as open_trials:
        trials = turns = None
        if args.measure:
            from tapestry.tools.auto_shard.stage_trials import StageTrials

            trials = open_trials.enter_context(StageTrials(options))
            turns = trials.in_turns
        document = auto_shard.auto_shard(options, lambda stage: advance(None, None, stage), trials, turns)

    def text() -> None:
        tables.show(tables.sharded(document))
        print(*tables.sharding_lines(document), sep="\n")

    return Outcome(document, text)
