"""What the programs of `tapestry.tools` offer to the compiler and to each other, by kind (those of commands are in `cli`).

Light, because every ``--help`` imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tapestry.errors import TapestryError, similar
from tapestry.plugins import offered, tool

if TYPE_CHECKING:
    from tapestry.build.store import Build
    from tapestry.interop.tile_patterns import Tiling
    from tapestry.ir.plan import Strategy
    from tapestry.plan.layout_constraints import Language
    from tapestry.plan.search.priced_plan import PricedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A build, and what is asked of its export.

    Attributes:
        constants: data of derived constants.
        rewrites: the log of rewrites, as it is stored; nothing where the build has none.
        nearest: whether the nearest plan that the format can say will do.
        copy: whether external data that would be out of reach is copied.
        into: an annotated file whose configurations are kept; ``configuration`` is the name of the plan's.
    """

    build: Build
    constants: bytes
    rewrites: bytes
    target: Path
    nearest: bool
    copy: bool
    into: Path | None
    configuration: str


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """A format: what it is, what writes it, and a line or more of what was written, of the document that writing gives.

    Attributes:
        language: what it can say of a graph's operations, for a search of such plans alone; none: that cannot be asked for.
        said: the strategies of a plan that was found so, as the format says them: one choice, or several. It raises
            NotExpressible where it cannot. None: it says every plan as it is.
        nearest: whether it can write the nearest plan that it can say.
        folder: whether it writes a folder.
    """

    about: str
    written: Callable[[Asked], dict[str, Any]]
    text: Callable[[dict[str, Any]], list[str]]
    language: Language | None = None
    said: Callable[[PricedPlan], Sequence[tuple[Strategy, ...]]] | None = None
    nearest: bool = False
    folder: bool = False


def write(form: str, asked: Asked) -> dict[str, Any]:
    """Write a build in a format.

    Raises:
        TapestryError: it cannot be written there; NotExpressible: the format cannot say the plan.
    """
    from tapestry.interop.sharding_specs import OURS

    target, names = asked.target, offered(ExportFormat)
    if form not in names:
        raise TapestryError(f"no format named '{form}'", hint=similar(form, names) or f"one of {', '.join(names)}")
    format = tool(ExportFormat, form)
    if asked.nearest and not format.nearest:
        what, able = "the format says a plan as it is, or not at all", sorted(f for f in names if tool(ExportFormat, f).nearest)
        raise TapestryError(what, where=f"--nearest, --format {form}", hint=f"formats with it: {', '.join(able)}")
    if form != "onnx" and (asked.into is not None or asked.configuration != OURS):
        what = "only annotations have configurations"
        raise TapestryError(what, where=f"--into or --configuration, --format {form}", hint="--format onnx")
    if target.is_dir() and not format.folder:
        raise TapestryError("cannot write there", where=str(target), why="it is a folder", hint="another -o")
    if target.resolve() == Path(asked.build.model).resolve():
        raise TapestryError("cannot write there", where=str(target), why="it is the build's model", hint="another -o")
    return {"format": form, **format.written(asked)}


class Drawing(Protocol):
    """A picture in a file."""

    def save(self, file: str | Path) -> Path:
        """Write it, whole or not at all."""
        ...


class Page(Drawing, Protocol):
    """One HTML file that needs nothing else; a notebook shows it."""

    def open(self) -> Path:
        """Show it in the browser, from a temporary file."""
        ...


class Pictures(Protocol):
    """Pictures of what is no build: ``tapestry.draw`` has those of builds too."""

    def tiles(self, of: Sequence[int], pattern: Tiling, /) -> Drawing:
        """The tiles of a tensor."""
        ...


class Pages(Protocol):
    """Pages of builds."""

    def view(self, builds: Sequence[tuple[Build, Mapping[str, int], Sequence[Mapping[str, Any]], bytes]]) -> Page:
        """The page of one build, or of two: each with the laws and the evidence of its certificate, and its log of rewrites."""
        ...


class Sessions(Protocol):
    """``tapestry.Session``, as programs use it."""

    def __call__(self, build: Path, *, processes: int | None = None) -> AbstractContextManager[Any]:
        """What runs a build that stays loaded, in this process or on ranks of this host."""
        ...
