"""Pages, pictures and notebooks are tested with nothing set that a reader has not set."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def as_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAPESTRY_TOPOLOGY", raising=False)
