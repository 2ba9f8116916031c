"""Packages that are there for one test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapestry.plugins import entry_points
from tests.support.plugins.plugin_packages import Installer


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    """Puts packages on the path; what other tests have loaded is forgotten."""
    monkeypatch.setattr(entry_points, "_loaded", {})
    return Installer(tmp_path / "packages", monkeypatch)
