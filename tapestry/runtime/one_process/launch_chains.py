"""Launches that run as one, each reading what the one before makes while it makes it."""

from __future__ import annotations

from collections.abc import Callable

Follows = Callable[[int, int], int | None]
