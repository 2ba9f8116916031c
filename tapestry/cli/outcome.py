"""What a command gives back: a document, the same for a person, and an exit status."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TextIO

from tapestry.arguments import print_json


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a command.

    Attributes:
        document: what ``--json`` prints.
        show: prints the same for a person; with ``--quiet`` only what was asked for by ``insist``.
        status: of the process.
    """

    document: object
    show: Callable[[], None]
    status: int = 0
    insist: bool = False

    def end(self, args: argparse.Namespace, out: TextIO) -> int:
        """Print it in the way that was asked for; a document to ``out``."""
        if args.json:
            print_json(self.document, out)
        elif self.insist or not args.quiet:
            self.show()
        return self.status


class Command(Protocol):
    """What a command runs."""

    def __call__(self, args: argparse.Namespace, /) -> Outcome:
        """How it ends."""
        ...


def bar(args: argparse.Namespace, title: str) -> AbstractContextManager[Callable[..., None]]:
    """Progress on standard error, where that is a terminal and nobody asked for silence."""
    from tapestry.viz import progress

    return progress.bar(title, quiet=args.quiet or args.json)
