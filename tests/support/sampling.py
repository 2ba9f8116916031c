"""Which cases of a test `make test` runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def sample(cases: Iterable[str], count: int) -> set[str]:
    """The cases with the smallest hashes: one case more or less exchanges at most one of them."""
    return set(sorted(cases, key=lambda c: hashlib.sha256(c.encode()).digest())[:count])
