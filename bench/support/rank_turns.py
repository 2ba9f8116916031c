"""One rank of a build that runs a batch when it is told to: ``python -m bench.support.rank_turns BUILD INPUTS``, with the
variables of a launcher. It says a line when it is ready, reads a batch's number from a line, runs it, and says a line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

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
    from tapestry.runtime.processes.batches import stream

    place, compiled = flags.world(), api.load(Path(sys.argv[1]))
    feeds = [b.feeds(compiled.build.plan.graph) for b in stream([Path(sys.argv[2])], None, "")]
    job = launch.job_of(
        launch.Request(folder=Path(sys.argv[1]), threads=1, timeout=TIMEOUT), place.world, (), compiled, place.locals
    )
    launch.as_rank(place, replace(job, serve=partial(turns, feeds)))


if __name__ == "__main__":
    main()
