"""Progress on a terminal, on standard error; nothing when it is a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

STAGES = ("lift", "simplify", "search", "verify", "codegen", "write")


@contextmanager
def stages(*, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar over the compiler's stages; call it with each stage's name."""
    with bar("compile", quiet=quiet) as advance:

        def report(stage: str, seconds: float) -> None:
            del seconds
            advance(STAGES.index(stage) if stage in STAGES else 0, len(STAGES), stage)

        yield report
        advance(len(STAGES), len(STAGES), "done")


@contextmanager
def bar(title: str, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """A bar; call it with (done, total) and, if the title changes, the new one."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)

        def advance(done: int, total: int, text: str = title) -> None:
            progress.update(task, completed=done, total=total, description=text)

        yield advance
