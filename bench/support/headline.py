"""Every benchmark that the README cites, on the code as it is here: figures of one commit.

    .venv/bin/python -m bench headline [--minutes 100] [--only NAME …] [--jax PYTHON]

Each is a process of its own, with the command that a user would type, the cheapest first. One whose result in bench/results
carries the hash of its sources as they are is not run again, so that a call that was broken off is gone on with by the same
call. A benchmark writes to build/bench/headline, and its result is taken when it has ended: what is broken off (Ctrl-C too)
leaves the result there was. After ``--minutes`` nothing further is begun. Exits 1 if a benchmark says that something is not as
it should be, or if something was not run. `communication` needs jax, for its peer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

from bench.support import record

PIECES: dict[str, tuple[tuple[str, ...], ...]] = {  # the commands of each, the cheapest first
    "communication": ((),),
    "cpu": ((),),
    "mutations": ((),),
    "conformance": ((), ("--sharded",)),
    "faults": (("--jobs", "2"),),
    "models": ((),),
    "scale": ((),),
    "clock": (("--again",),),
}
COMMAND = (sys.executable, "-m", "bench")
FOLDER = record.WORK / "headline"
COMPLETE = (0, 1)  # exit statuses of a benchmark that came to its end; `bench.__main__` gives others to one that broke off


def is_current(name: str) -> bool:
    """Whether the result is of the sources as they are, all of its rows."""
    rows = record.read(name)
    return bool(rows) and all(r["measured"].get("code") == record.code(name) for r in rows)


def measured(name: str, jax: str | None) -> str:
    """Run the commands of a benchmark, and take its result if it came to its end; what became of it."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    status = 0
    for words in PIECES[name]:
        command = [*COMMAND, name, *words, *(["--jax", jax] if jax and name == "communication" else [])]
        print(f"\n$ python {' '.join(command[1:])}", flush=True)
        one = subprocess.run(command, cwd=record.ROOT, env={**os.environ, "BENCH_RESULTS": str(folder)}, check=False).returncode
        if one not in COMPLETE:
            return f"broke off, exit status {one}"
        status |= one
    made = folder / f"{name}.json"
    if not made.is_file():
        return "wrote no result"
    if not json.loads(made.read_text())["code"]:
        return "sources changed meanwhile"
    made.replace(record.RESULTS / made.name)
    return "not all as it should be" if status else "measured"


def one(name: str, left: float, jax: str | None) -> str:
    """What becomes of a benchmark, with so many seconds left."""
    if is_current(name):
        return "current"
    if left <= 0:
        return "not run: no time left"
    if name == "communication" and not (jax or importlib.util.find_spec("jax")):
        return "not run: needs --jax PYTHON"
    return measured(name, jax)


def show(found: dict[str, tuple[float, str]]) -> None:
    """The table at the end."""
    out = Table(title="the README's figures", title_justify="left")
    for c in ("name", "seconds", "status", "commit", "date"):
        out.add_column(c, justify="right" if c == "seconds" else "left")
    for name in found:
        of = [record.read_more(name, k, "") for k in ("commit", "date")]
        out.add_row(name, f"{found[name][0]:.0f}", found[name][1], *of)
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(out)


def main() -> int:
    """Run what is not current, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=100, help="after these nothing further is begun")
    parser.add_argument("--only", nargs="+", choices=list(PIECES), metavar="NAME", default=list(PIECES))
    parser.add_argument("--jax", metavar="PYTHON", help="an interpreter that has jax")
    args = parser.parse_args()
    end, found = time.monotonic() + 60 * args.minutes, dict[str, tuple[float, str]]()
    try:
        for name in (n for n in PIECES if n in args.only):
            start = time.monotonic()
            found[name] = 0.0, "broken off"
            status = one(name, end - start, args.jax)
            found[name] = time.monotonic() - start, status
    except KeyboardInterrupt:
        found |= {n: (0.0, "not run") for n in PIECES if n in args.only and n not in found}
    show(found)
    print("then write the figures into the pages: python -m tests.docs.update --generated")
    return 0 if all(s in ("current", "measured") for _, s in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
