"""``python -m tests.fuzz``: random models under random plans against onnxruntime and the ONNX reference evaluator."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

from tapestry import flags
from tapestry.arguments import seconds, whole
from tapestry.errors import TapestryError


def arguments() -> argparse.ArgumentParser:
    """How many cases, and when to end."""
    p = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__, allow_abbrev=False)
    p.add_argument("--seed", type=whole(0), default=0)
    p.add_argument("--count", type=int, default=1000, metavar="N", help="cases: a model, a mesh, moves, strategies, layouts")
    p.add_argument("--first", type=int, default=0, metavar="N", help="number of the first case")
    p.add_argument("--time", type=seconds, default=float("inf"), metavar="S", help="seconds after which no case is begun")
    p.add_argument("--stop", type=whole(1), default=20, metavar="N", help="different failures after which to end")
    p.add_argument("--output", type=Path, metavar="DIR", help="a folder for what failed, shrunk: model.onnx, case.json, data")
    p.add_argument("--jobs", type=whole(1), metavar="J", help="in so many processes at a time, some on Triton's interpreter")
    p.add_argument("--log", type=Path, metavar="FILE", help="a line per 250 cases; with the same file a series goes on")
    p.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return p


def main(words: list[str] | None = None) -> int:
    """The exit status: 1 where a case failed."""
    args = arguments().parse_args(words)
    flags.before_torch()
    import_module("onnxruntime")  # without it there is one reference, and nobody to judge
    from tests.fuzz import campaign, series

    try:
        if args.jobs is not None or args.log is not None:
            what = series.Series(
                seed=args.seed, first=args.first, count=args.count, jobs=args.jobs or 1, log=args.log, limit=args.time,
                output=args.output,
            )  # fmt: skip
            document = series.run(what)
            passed, text = bool(document["passed"]), series.summary(document) + "\n"
        else:
            tally = campaign.fuzz(args.seed, args.count, first=args.first, limit=args.time, output=args.output, stop=args.stop)
            document, passed, text = tally.document(), not tally.failures, campaign.text(tally)
    except TapestryError as e:
        print(f"fuzz: {e}", file=sys.stderr)
        return 2
    print(json.dumps(document) if args.json else text, end="\n" if args.json else "")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
