"""Progress on standard error: a live line on a terminal; elsewhere a line every few seconds, of the search alone."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tapestry.viz.format import duration

EVERY = 5.0  # seconds between lines where there is no terminal


@dataclass(slots=True)
class Watch:
    """What a person sees of a compilation: the pass that runs, and of the search the best plan so far.

    Attributes:
        names: of all passes, in order.
        advance: moves the bar.
        began: on the monotonic clock. Seconds are shown, and decide nothing.
        seconds, bound: of the best plan that was found; a bound is of the form of the graph that was last looked at.
        region: of sizes, where there are several plans: how many are done, and what is planned now.
    """

    names: Sequence[str]
    advance: Callable[..., None]
    began: float = field(default_factory=time.monotonic)
    now: str = ""
    searching: bool = False
    seconds: float = math.inf
    bound: float = -math.inf
    region: str = ""

    def begin(self, phase: str, name: str) -> None:
        """A pass begins."""
        if phase == "sizes":
            self.region = name
        self.now, self.searching = "" if phase == "sizes" else name, phase == "search"
        self._show()

    def found(self, seconds: float, bound: float) -> None:
        """A plan was found: simulated seconds, and what none of its form is under."""
        if seconds <= self.seconds:
            self.seconds, self.bound = seconds, bound
            self._show()

    def _show(self) -> None:
        at = self.names.index(self.now) if self.now in self.names else len(self.names)
        self.advance(at, len(self.names), " · ".join(filter(None, (self.region, self.now, self.best()))))

    def best(self) -> str:
        """The best plan so far, its bound and the gap; empty outside the search, before there is one, and of one of several."""
        if not self.searching or self.region or not math.isfinite(self.seconds):
            return ""
        text = f"plan {duration(self.seconds)}"
        if not 0 < self.bound <= self.seconds:
            return f"{text}, no bound yet"
        return f"{text}, bound {duration(self.bound)}, gap {1 - self.bound / self.seconds:.2%}"

    def line(self) -> str:
        """For a log; empty outside the search."""
        if self.region:
            return f"{time.monotonic() - self.began:.0f} s: {self.region}: {self.now}".removesuffix(": ")
        if not self.searching:
            return ""
        return f"{time.monotonic() - self.began:.0f} s: {self.now}: {self.best() or 'no plan yet'}"


@contextmanager
def passes(names: Sequence[str], *, quiet: bool, every: float = EVERY) -> Generator[Watch]:
    """What to tell of the compiler's passes as they begin, and of plans as they are found.

    Args:
        every: seconds between lines where standard error is no terminal.
    """
    with bar("compile", quiet=quiet) as advance:
        watch, done = Watch(names, advance), threading.Event()

        def lines() -> None:
            while not done.wait(every):
                if text := watch.line():
                    print(text, file=sys.stderr, flush=True)

        if not quiet and not Console(stderr=True).is_terminal:
            threading.Thread(target=lines, daemon=True).start()
        try:
            yield watch
        finally:
            done.set()
        advance(len(names), len(names), "done")


@contextmanager
def bar(title: str, *, quiet: bool) -> Generator[Callable[..., None]]:
    """A bar; call it with (done, total) and, if the title changes, the new one."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)

        def advance(done: int, total: int, text: str = title) -> None:
            progress.update(task, completed=done, total=total, description=text)

        yield advance
