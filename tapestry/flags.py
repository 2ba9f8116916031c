"""The only place that reads or sets the environment."""

from __future__ import annotations

import os


def debug_level() -> int:
    """``TAPESTRY_DEBUG``: 1 stages and times, 2 plan and cost, 3 IR after each stage, 4 kernels."""
    value = os.environ.get("TAPESTRY_DEBUG", "0")
    return int(value) if value.isdigit() else 0


def sleep_when_idle() -> None:
    """Let idle OpenMP threads sleep, unless the user said otherwise; it must come before torch is imported.

    Spinning threads on busy cores make small operators up to sixteen times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
