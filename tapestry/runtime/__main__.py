"""``torchrun --nproc-per-node N -m tapestry.runtime BUILD``: an entry point, which nothing imports."""

import sys

from tapestry.launch import main

if __name__ == "__main__":
    sys.exit(main())
