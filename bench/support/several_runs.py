"""A build that runs several times on the same inputs: ``python -m bench.support.several_runs BUILD --runs N …``.

The other arguments are those of ``run``. By itself it starts the ranks; with the variables of a launcher it is one of them.
Prints what the ranks measured, with ``run_seconds``; the trace of ``--trace`` is of all runs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from tapestry import api, arguments, flags, launch
from tapestry.viz import measured


def main() -> None:
    """Run, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    arguments.run_arguments(parser)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="as in any case")
    args = parser.parse_args()
    request, place, compiled = launch.request(args), flags.world(), api.load(args.build)
    world, here = (place.world, place.locals) if place.world > 1 else (args.processes, 0)
    job = replace(launch.job_of(request, world, compiled, here), runs=args.runs)
    if place.world > 1:
        report = launch.as_rank(place, job)
    else:
        from tapestry.runtime.processes.supervisor import supervise

        report = supervise(job, world, api.open_session)
    if report and request.trace is not None:
        measured.write_measured(request.trace, compiled.build, report["slices"])
    if report:
        print(json.dumps({k: v for k, v in report.items() if k not in ("slices", "hosted")}))


if __name__ == "__main__":
    main()
