"""Plug-ins: entry points of installed packages in the groups ``tapestry.KIND``.

A plug-in is looked up by its name, where something of that name is asked for and the package has none of its own; its code is
imported then, and not before. Files (models, builds, topologies) say such names and nothing else: what is imported is what the
user has installed. ``TAPESTRY_PLUGINS=0`` switches all of them off.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, cast

from tapestry import flags
from tapestry.errors import PluginError, TapestryError

log = logging.getLogger("tapestry")
KINDS = ("targets", "monoids", "topologies", "operators", "rules")
OFF = "TAPESTRY_PLUGINS=0 switches plug-ins off"


@dataclass(frozen=True, slots=True, order=True)
class Plugin:
    """A plug-in by its kind and name, and the package that brings it."""

    kind: str
    name: str
    package: str
    version: str

    def __str__(self) -> str:
        return f"'{self.name}' (tapestry.{self.kind}) of {self.package} {self.version}"

    def data(self) -> dict[str, str]:
        """As reports have it."""
        return asdict(self)


Found = Mapping[tuple[str, str], Sequence[tuple[Plugin, EntryPoint]]]
_watching: ContextVar[tuple[dict[Plugin, None], ...]] = ContextVar("watching", default=())
_loaded: dict[tuple[Plugin, str], Any] = {}


def has(kind: str, name: str) -> bool:
    """Whether a package brings a plug-in of this kind and name; nothing is imported."""
    return (kind, name) in _found()


def names(kind: str) -> list[str]:
    """The names of a kind that packages bring; nothing is imported."""
    return sorted(n for k, n in _found() if k == kind)


def one(kind: str, name: str) -> Plugin:
    """The plug-in of a kind and name; nothing is imported.

    Raises:
        PluginError: there is none, or there are several.
    """
    return _one(kind, name)[0]


def brought_by(kind: str, name: str) -> str:
    """The package and version that brings a plug-in, "" where none does; nothing is imported."""
    return str(one(kind, name)) if has(kind, name) else ""


def get(kind: str, name: str) -> Any:
    """What an entry point stands for; it is imported the first time.

    Raises:
        PluginError: no package brings it, several do, or its code does not import; names the packages.
    """
    plugin, entry = _one(kind, name)
    for seen in _watching.get():
        seen[plugin] = None
    key = (plugin, entry.value)
    if key not in _loaded:
        try:
            _loaded[key] = entry.load()
        except (Exception, SystemExit) as e:  # whatever a package does when it is imported
            hint = f"install {plugin.package} anew or remove it; {OFF}"
            raise PluginError(
                f"the plug-in {plugin} does not load", where=entry.value, why=_exception_text(e), hint=hint
            ) from e
    return _loaded[key]


def refused(kind: str, name: str, why: str) -> PluginError:
    """The error of a plug-in that loads and is not what its kind asks for."""
    return PluginError(f"the plug-in {one(kind, name)} is of no use", why=why, hint="docs/howto/plugin.md")


@contextmanager
def blamed(kind: str, name: str) -> Generator[None]:
    """What the code of a plug-in raises becomes an error that names its package."""
    try:
        yield
    except (TapestryError, MemoryError):
        raise
    except (Exception, SystemExit) as e:
        raise PluginError(
            f"the plug-in {one(kind, name)} failed", why=_exception_text(e), hint=f"ask its authors; {OFF}"
        ) from e


@contextmanager
def taking_part(before: dict[Plugin, None] | None = None) -> Generator[dict[Plugin, None]]:
    """The plug-ins that are asked for inside of the block, in order, after those of ``before``, which grows."""
    seen: dict[Plugin, None] = {} if before is None else before
    token = _watching.set((*_watching.get(), seen))
    try:
        yield seen
    finally:
        _watching.reset(token)


def require(rows: object, kinds: Collection[str], where: str) -> None:
    """Refuse a build that was made with plug-ins which are not here; nothing is imported.

    Args:
        rows: plug-ins as its report has them (`Plugin.data`).

    Raises:
        PluginError: naming the plug-in and the package.
    """
    for row in cast("list[object]", rows) if isinstance(rows, list) else ():
        if not isinstance(row, dict):
            continue
        kind, name, package, version = (str(cast("dict[str, object]", row).get(k)) for k in Plugin.__slots__)
        if kind not in kinds:
            continue
        if not has(kind, name):
            what = f"it needs the plug-in {Plugin(kind, name, package, version)}, which is not here"
            raise PluginError(what, where=where, why="" if flags.plugins() else OFF, hint=f"install {package}")
        here = one(kind, name)
        if (here.package, here.version) != (package, version):
            log.warning("%s: made with %s %s, here it is %s", where, package, version, here)


def listed(own: Mapping[str, Collection[str]]) -> list[dict[str, str]]:
    """Every plug-in that packages bring, imported to see whether it loads; ``state`` is "loads", or why it is of no use.

    Args:
        own: names that the package has itself, by kind, which come before those of plug-ins.
    """
    rows: list[dict[str, str]] = []
    for (kind, name), there in sorted(_found().items()):
        for plugin, entry in there:
            state = "loads"
            if name in own.get(kind, ()):
                state = "not used: Tapestry's own has this name"
            else:
                try:
                    get(kind, name)
                except PluginError as e:
                    state = " ".join(f"{e.what}: {e.why}".split())
            rows.append({**plugin.data(), "object": entry.value, "state": state})
    return rows


def _one(kind: str, name: str) -> tuple[Plugin, EntryPoint]:
    """The only plug-in of a kind and name.

    Raises:
        PluginError: there is none, or there are several.
    """
    there = _found().get((kind, name), ())
    if len(there) == 1:
        return there[0]
    if there:
        why = ", ".join(f"{p.package} {p.version}" for p, _ in there)
        raise PluginError(f"several packages bring '{name}' (tapestry.{kind})", why=why, hint="remove all but one of them")
    known = ", ".join(names(kind))
    hint = "install the package that brings it" + (f"; there are {known}" if known else "")
    raise PluginError(f"there is no plug-in '{name}' (tapestry.{kind})", why="" if flags.plugins() else OFF, hint=hint)


def _found() -> Found:
    return _scanned(tuple(sys.path)) if flags.plugins() else {}


@lru_cache(maxsize=4)
def _scanned(path: tuple[str, ...]) -> Found:
    """The entry points of all packages on a path; of a package that is there twice, those of the first."""
    out: dict[tuple[str, str], list[tuple[Plugin, EntryPoint]]] = {}
    seen = set[str]()
    for package in distributions(path=list(path)):
        name, version, entries = _entries(package)
        normal = re.sub(r"[-_.]+", "-", name).lower()
        for e in entries if normal not in seen else ():
            kind = e.group.removeprefix("tapestry.")
            if kind in KINDS and e.group != kind:
                out.setdefault((kind, e.name), []).append((Plugin(kind, e.name, name, version), e))
        seen.add(normal)
    return out


def _entries(package: Distribution) -> tuple[str, str, Sequence[EntryPoint]]:
    """A package's name, its version and its entry points; one whose metadata cannot be read has none, and is named."""
    try:
        return str(package.metadata["Name"]), str(package.version), list(package.entry_points)
    except Exception as e:  # importlib lets whatever a damaged file makes it raise through
        where = getattr(package, "_path", package)
        log.warning("%s: its metadata cannot be read, so it brings no plug-ins: %s", where, _exception_text(e))
        return str(where), "", ()


def _exception_text(e: BaseException) -> str:
    return " ".join(f"{type(e).__name__}: {e}".split())[:300]
