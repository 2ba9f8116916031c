"""A program run step by step, as if none of its kernels could be bound to places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def unrecorded(executor: Any) -> Iterator[None]:
    """Within it a `LocalExecutor` has no schedule, and has counted nothing."""
    kept = executor.schedule, executor.counted
    executor.schedule = executor.counted = None
    try:
        yield
    finally:
        executor.schedule, executor.counted = kept
