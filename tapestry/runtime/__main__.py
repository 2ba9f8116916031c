"""``torchrun --nproc-per-node N -m tapestry.runtime BUILD``: an entry point, which nothing imports."""

import os
import sys

from tapestry.launch import main

if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no thread or destructor of torch's network code may wait for a host that is gone
