"""Arguments that ``tapestry run`` and ``python -m tapestry.runtime`` share. Light: it is imported for every ``--help``."""

from __future__ import annotations

import argparse
from pathlib import Path


def run(p: argparse.ArgumentParser) -> None:
    """What is run, on what, and how long silence is borne."""
    p.add_argument("build", type=Path)
    p.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy")
    p.add_argument("--inputs", nargs="+", type=Path, default=[], metavar="DIR_OR_NPZ", help="many batches; a rerun goes on")
    p.add_argument("--output", type=Path, metavar="DIR", help="write every output as a .npy file")
    p.add_argument("--seed", type=int, default=0, help="of random inputs, where none are given")
    p.add_argument("--weights", type=Path, metavar="DIR", help="slices written by tapestry shard-weights")
    p.add_argument("--timeout", type=float, default=30.0, metavar="S", help="silence for so long is a failure (30)")
    p.add_argument("--trace", type=Path, metavar="FILE", help="the real run on a clock, for https://ui.perfetto.dev")
    p.add_argument("--threads", type=int, metavar="T", help="of each process (default: the cores, shared evenly)")


def processes(p: argparse.ArgumentParser) -> None:
    """How ranks are started on this host."""
    p.add_argument("--processes", type=int, metavar="N", help="run on N processes, devices shared evenly")
    p.add_argument("--max-restarts", type=int, default=0, metavar="R", help="start again after a failure")
    p.add_argument("--port", type=int, default=0, help="of the rendezvous; a free one by default")
