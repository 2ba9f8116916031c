"""Progress on a terminal, on standard error; nothing when it is a file."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def passes(names: Sequence[str], *, quiet: bool) -> Generator[Callable[[str], None]]:
    """A bar over the compiler's passes; call it with each one's name as it begins."""
    with bar("compile", quiet=quiet) as advance:
        yield lambda name: advance(names.index(name) if name in names else len(names), len(names), name)
        advance(len(names), len(names), "done")


@contextmanager
def bar(title: str, *, quiet: bool) -> Generator[Callable[..., None]]:
    """A bar; call it with (done, total) and, if the title changes, the new one."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)

        def advance(done: int, total: int, text: str = title) -> None:
            progress.update(task, completed=done, total=total, description=text)

        yield advance
