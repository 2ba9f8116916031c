"""Benchmarks that need packages which are not the project's: run by another Python that has them, and the project's too."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def add_python(parser: argparse.ArgumentParser) -> None:
    """``--python PATH``."""
    parser.add_argument("--python", type=Path, metavar="PATH", help="a Python that has transformers and torchvision, too")


def moved(args: argparse.Namespace, name: str) -> None:
    """Go on in the Python that was asked for; does not come back then."""
    if args.python is not None and "BENCH_MOVED" not in os.environ:
        rest = [a for k, a in enumerate(sys.argv[1:], 1) if a != "--python" and sys.argv[k - 1] != "--python"]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "BENCH_MOVED": "1"}
        os.execve(args.python, [str(args.python), "-m", "bench", name, *rest], environment)
