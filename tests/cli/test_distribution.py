"""What `make dist` makes: everything below `tapestry/`, a licence, and a version that the changelog has."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True, capture_output=True)
    return folder


def ours() -> set[str]:
    """Code and data of the package, by path."""
    files = (p for p in (ROOT / "tapestry").rglob("*") if p.is_file() and p.suffix not in (".pyc", ".pyo"))
    return {str(p.relative_to(ROOT)) for p in files}


def test_a_wheel_has_every_file_of_the_package_and_a_licence(made):
    (wheel,) = made.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {n for n in names if not n.split("/")[0].endswith(".dist-info")} == ours()
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_an_sdist_has_them_too(made):
    (sdist,) = made.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert ours() | {"README.md", "LICENSE", "pyproject.toml", "CHANGELOG.md"} <= names


def test_the_changelog_begins_with_the_version():
    head = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert head is not None and head[1] in (PROJECT["version"], "Unreleased")


def test_the_install_line_of_the_readme_names_this_version():
    assert f"dist/tapestry-{PROJECT['version']}-py3-none-any.whl" in (ROOT / "README.md").read_text()
