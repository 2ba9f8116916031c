"""Random models under random plans, many of them in one logged run: whether any goes wrong.

    .venv/bin/python -m bench fuzz_series --seed S [--count 20000] [--jobs 2] [--log FILE]

The same as `python -m tests.fuzz --jobs --log` (a run that was ended goes on where its log ends), with the sums written to
bench/results/fuzz_series.json: cases by family of nodes, operator, rewrite rule, way of running and mesh; what was refused;
what failed. Exits 1 if a case failed, or did not run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.support import record
from tests.fuzz.series import Series, run, summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--log", type=Path, help="default: build/bench/fuzz_SEED.log")
    parser.add_argument("--output", type=Path, help="where cases that fail are written")
    args = parser.parse_args()
    log = args.log or record.WORK / f"fuzz_{args.seed}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    found = run(Series(seed=args.seed, first=0, count=args.count, jobs=args.jobs, log=log, output=args.output))
    print(summary(found))
    found.pop("seconds")  # of this call alone; busy_seconds are those of every chunk
    print(record.write("fuzz_series", [found]))
    return 0 if found["passed"] and found["cases"] == args.count else 1


if __name__ == "__main__":
    sys.exit(main())
