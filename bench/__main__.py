"""``python -m bench NAME [ARGS]``: run a benchmark by its name, in whichever folder its file lies."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent


def benchmarks() -> dict[str, str]:
    """The module of every benchmark, by its name: every file below this folder with a ``main`` of its own."""
    files = [p for p in sorted(HERE.glob("*/*.py")) if '__name__ == "__main__"' in p.read_text()]
    return {p.stem: f"bench.{p.parent.name}.{p.stem}" for p in files}


def main() -> None:
    """Run what is asked for; exit with status 2 and the list of names where there is no such benchmark."""
    found = benchmarks()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in found:
        print(f"usage: python -m bench NAME [ARGS]; NAME is one of {', '.join(sorted(found))}", file=sys.stderr)
        sys.exit(0 if name in ("-h", "--help") else 2)
    sys.path.insert(0, str(HERE.parent))
    sys.argv = [f"bench {name}", *sys.argv[2:]]
    try:
        runpy.run_module(found[name], run_name="__main__", alter_sys=True)
    except (Exception, SystemExit) as e:  # status 3, broken off, is apart from 1: measured, and not as it should be
        if isinstance(e, SystemExit) and not isinstance(e.code, str):
            raise
        print(e.code if isinstance(e, SystemExit) else traceback.format_exc(), file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
