"""One rank of a build that runs a batch when it is told to: ``python -m bench.support.rank_turns BUILD INPUTS``, with the
variables of a launcher. It says a line when it is ready, reads a batch's number from a line, runs it, and says a line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tapestry import api, flags, launch

TIMEOUT = 120.0  # seconds: many ranks start at once, and a batch over a slow link takes long


def turns(feeds: Sequence[Mapping[str, Any]], me: Any, session: Any, wire: Any) -> None:
    """Until there is no line left."""
    from tapestry.runtime.processes.heartbeat import IDLE

    checked = [session.checked(f) for f in feeds]
    print("ready", flush=True)
    for line in sys.stdin:
        session.compute(checked[int(line)], wanted=())
        wire.heartbeat.at(-1, IDLE)
        print("done", flush=True)


def main() -> None:
    """Load the build, and take turns."""
    place, compiled = flags.world(), api.load(Path(sys.argv[1]))
    feeds = [dict(np.load(p)) for p in sorted(Path(sys.argv[2]).glob("*.npz"))]
    request = launch.Request(folder=Path(sys.argv[1]), threads=1, timeout=TIMEOUT)
    job = launch.job_of(request, place.world, compiled, place.locals)
    launch.as_rank(place, replace(job, serve=partial(turns, feeds)))


if __name__ == "__main__":
    main()
