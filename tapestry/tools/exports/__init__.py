"""Plans in the words of other tools: one module for each format that `tapestry export` writes."""

from __future__ import annotations

import argparse

from tapestry.cli.outcome import Outcome
from tapestry.errors import TapestryError
from tapestry.tools.exports import formats


def export(args: argparse.Namespace) -> Outcome:
    """``tapestry export``: the plan in the words of another tool."""
    target = args.output or args.into
    if target is None:
        raise TapestryError("nowhere to write", where="-o", hint="a file; with --into it may be left out")
    done = formats.export(
        args.build,
        args.format,
        target,
        nearest=args.nearest,
        copy=args.copy_data,
        into=args.into,
        configuration=args.configuration,
    )
    return Outcome(done, lambda: print(*formats.text(done), sep="\n"))
