"""Whether somebody else's parallel program computes a model: both are written as values of one table, and compared there."""

from __future__ import annotations

import argparse

from tapestry.arguments import shapes
from tapestry.cli.outcome import Outcome


def prove(args: argparse.Namespace) -> Outcome:
    """``tapestry prove``: status 0 proved, 1 refuted, 2 not decided or not readable."""
    from tapestry.tools.prove.verdict import PROVED, REFUTED
    from tapestry.tools.prove.verdict import prove as decide

    verdict = decide(args.model, args.program, shapes(args.shapes))
    status = 0 if verdict.status == PROVED else 1 if verdict.status == REFUTED else 2
    return Outcome(verdict.document, lambda: print(verdict.text()), status)
