"""The ``tapestry`` command: `entry` has the commands' arguments and ends, the other files what the commands do."""

from tapestry.cli.entry import main

__all__ = ["main"]
