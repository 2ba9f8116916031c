"""The only reader of the environment."""

from __future__ import annotations

import os


def debug_level() -> int:
    """``TAPESTRY_DEBUG``: 1 stages and times, 2 plan and cost, 3 IR after each stage, 4 kernels."""
    value = os.environ.get("TAPESTRY_DEBUG", "0")
    return int(value) if value.isdigit() else 0
