"""Packages with plug-ins, as an installer would leave them: modules on the path, and metadata made of their pyproject."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from tapestry.plugins import entry_points
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples" / "plugins"


class Installer:
    """Puts packages on the path for a test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch

    def example(self, name: str) -> None:
        """One of examples/plugins."""
        told = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())
        self.metadata(told["project"]["name"], told["project"]["version"], told["project"]["entry-points"])
        self.monkeypatch.syspath_prepend(EXAMPLES / name)

    def module(self, package: str, source: str, entries: dict[str, dict[str, str]], version: str = "0.1") -> None:
        """A package of one module, with entry points by group."""
        home = self.folder / f"{package}-{version}"
        home.mkdir(parents=True)
        (home / f"{package}.py").write_text(source)
        self.metadata(package, version, entries)
        self.monkeypatch.syspath_prepend(home)
        self.monkeypatch.delitem(sys.modules, package, raising=False)

    def metadata(self, package: str, version: str, entries: dict[str, dict[str, str]]) -> None:
        """What an installer writes of a package."""
        info = self.folder / "site" / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        groups = (f"[{g}]\n" + "".join(f"{n} = {o}\n" for n, o in of.items()) for g, of in entries.items())
        (info / "entry_points.txt").write_text("\n".join(groups))
        self.monkeypatch.syspath_prepend(self.folder / "site")
        entry_points._scanned.cache_clear()
