"""Parts of other packages, and the programs of `tapestry.tools`: found by kind and name, and imported when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeVar, cast

Kind = TypeVar("Kind")


def offered(kind: type[Any]) -> Sequence[str]:
    """The names of what the programs of `tapestry.tools` offer of a kind; nothing is imported."""
    from tapestry.tools import OFFERED

    return tuple(OFFERED[kind.__name__])


def tool(kind: type[Kind], name: str = "") -> Kind:
    """What a program offers of a kind, and of a name where there are several; its module is imported now."""
    from tapestry.tools import OFFERED

    module, attribute = OFFERED[kind.__name__][name]
    found: Any = import_module(module)
    found = getattr(found, attribute) if attribute else found
    return cast("Kind", found[name] if isinstance(found, dict) else found)
