"""``python -m tests.support.programs.slow_ranks MARK SECONDS MODULE ARGUMENT …``: a module of ours whose ranks take some time for
each step, so that something can happen to them meanwhile."""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from tapestry import flags


def slow_down(mark: Path, seconds: float) -> None:
    """Each step of each rank of this process and its forks takes so long; rank 0 adds a line to the mark at its first one."""
    from tapestry.runtime.processes.distributed import RankExecutor

    before, seen = RankExecutor.step, set[int]()

    def step(self: Any, at: int) -> None:
        if self.wire.rank == 0 and os.getpid() not in seen:
            seen.add(os.getpid())
            with mark.open("a") as f:
                f.write("started\n")
        time.sleep(seconds)
        before(self, at)

    RankExecutor.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    flags.before_torch()
    slow_down(Path(sys.argv[1]), float(sys.argv[2]))
    del sys.argv[:3]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
