"""Questions about integers under conditions, answered by isl: does a condition follow, are two expressions equal."""

from __future__ import annotations

OPERATIONS = 2_000_000  # of isl, for one question
