"""Every benchmark that the README cites, on the code as it is here: figures of one commit.

    .venv/bin/python -m bench headline [--minutes 100] [--only NAME …] [--jax PYTHON]

Each is a process of its own, with the command that a user would type, the cheapest first. One whose result in bench/results
carries the hash of its sources as they are is not run again: the same call goes on where one was broken off. A benchmark writes
to build/bench/headline, and its result is taken when it has ended: what is broken off (Ctrl-C too) leaves the result there was.
After ``--minutes`` nothing further is begun. Exits 1 if something was not run, or is not as it should be.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

from bench.support import record

PIECES: dict[str, tuple[tuple[str, ...], ...]] = {  # the commands of each
    "cpu": ((),), "communication": ((),), "conformance": ((), ("--sharded",)), "faults": (("--jobs", "2"),), "models": ((),),
    "mutations": ((),), "scale": ((),), "clock": (("--again",),),
}  # fmt: skip
COMMAND, FOLDER = (sys.executable, "-m", "bench"), record.WORK / "headline"


def is_current(name: str) -> bool:
    """Whether the result is of the sources as they are, all of its rows."""
    rows = record.read(name)
    return bool(rows) and all(r["measured"]["code"] == record.code(name) for r in rows)


def measured(name: str, end: float, jax: str | None) -> str:
    """Run a benchmark that is not current, and take its result if it came to its end; what became of it."""
    if is_current(name):
        return "current"
    if time.monotonic() >= end:
        return "not run: no time left"
    if name == "communication" and not (jax or importlib.util.find_spec("jax")):
        return "not run: needs --jax PYTHON"
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    (FOLDER / name).mkdir(parents=True)
    environment, worst = {**os.environ, "BENCH_RESULTS": str(FOLDER / name)}, 0
    for words in PIECES[name]:
        command = [*COMMAND, name, *words, *(["--jax", jax] if jax and name == "communication" else [])]
        print("\n$ python", *command[1:], flush=True)
        status = subprocess.run(command, cwd=record.ROOT, env=environment, check=False).returncode
        if status not in (0, 1):  # `bench.__main__` gives others to what broke off
            return f"broke off, exit status {status}"
        worst |= status
    if not (made := FOLDER / name / f"{name}.json").is_file():
        return "wrote no result"
    made.replace(record.RESULTS / made.name)
    return "sources changed" if not is_current(name) else "not all as it should be" if worst else "measured"


def main() -> int:
    """Run what is not current, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=100, help="after these nothing further is begun")
    parser.add_argument("--only", nargs="+", choices=list(PIECES), metavar="NAME", default=list(PIECES))
    parser.add_argument("--jax", metavar="PYTHON", help="an interpreter that has jax, the peer of `communication`")
    args = parser.parse_args()
    names, begun = [n for n in PIECES if n in args.only], time.monotonic()
    found, took = dict.fromkeys(names, "not run"), dict.fromkeys(names, 0.0)
    try:
        for name in names:
            start, found[name] = time.monotonic(), "broken off"
            found[name] = measured(name, begun + 60 * args.minutes, args.jax)
            took[name] = time.monotonic() - start
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    table = Table("name", "seconds", "status", "commit", "date", title="the README's figures", title_justify="left")
    for name in names:
        of = (record.read_more(name, k, "") for k in ("commit", "date"))
        table.add_row(name, f"{took[name]:.0f}", found[name], *of)
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table)
    print("then write the figures into the pages: python -m tests.docs.update --generated")
    return 0 if {*found.values()} <= {"current", "measured"} else 1


if __name__ == "__main__":
    sys.exit(main())
