"""Parts of other packages, and the programs of `tapestry.tools`: found by name, and imported when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def tool(name: str) -> Any:
    """A module of `tapestry.tools`, such as ``exports.formats``: the compiler knows its tools by name alone."""
    return import_module(f"tapestry.tools.{name}")
