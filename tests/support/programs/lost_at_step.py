"""The command line, with one rank that is killed before a step of its first batch: `RANK STEP ARGUMENT …`."""

import os
import signal
import sys

from tapestry.cli import main
from tapestry.runtime.processes import worker


class Killed(worker.SurvivingExecutor):
    """What a rank runs, until it is killed."""

    def step(self, at: int) -> None:
        if self.first == int(sys.argv[1]) and not self.coming and at == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        super().step(at)


if __name__ == "__main__":
    worker.SurvivingExecutor = Killed  # type: ignore[misc]
    sys.exit(main(sys.argv[3:]))
