"""``python -m tapestry``: the command line."""

import sys

from tapestry.cli import main

sys.exit(main())
