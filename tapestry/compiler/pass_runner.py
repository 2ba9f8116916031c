"""What a compiler pass is, and the one runner that all passes go through.

A pass is a function from a `Compilation` to the next one. The runner reports it (progress, and Ctrl-C, which ends a search and
aborts anything else), times it, measures what it makes, prints the IR after it where that is
asked for, and checks the laws between passes with ``TAPESTRY_DEBUG=2`` or more.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from tapestry import flags
from tapestry.compiler.compilation import Compilation
from tapestry.errors import TapestryError, similar
from tapestry.ir import laws
from tapestry.plugins.entry_points import Plugin, taking_part
from tapestry.viz.ir_dump import dump, graph_of, sizes
from tapestry.viz.tables import sizes_text

log = logging.getLogger("tapestry")
Report = Callable[[str, str], None]
Function = Callable[[Compilation], Compilation]
FIELDS = tuple(f.name for f in fields(Compilation))
OBJECTS = 50_000  # new ones before the collector looks at them, within a pass


def unreported(phase: str, name: str) -> None:
    """Nobody watches."""


@contextmanager
def _collected_seldom() -> Generator[None]:
    """The collector of cycles looks at what is made meanwhile less often: passes make many objects, and hardly a cycle."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], OBJECTS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(frozen=True, slots=True)
class Pass:
    """One line of the compiler.

    Attributes:
        phase: the part of the compiler that its seconds count for: "lift", "simplify", "search", "verify" or "codegen".
        why: why it is there, or at this place.
    """

    function: Function
    phase: str
    why: str

    @property
    def name(self) -> str:
        """The function's: ``hoist_transfers`` is the pass ``hoist-transfers``."""
        return self.function.__name__.replace("_", "-")


@dataclass(slots=True, kw_only=True)
class Runner:
    """Runs passes.

    Attributes:
        at: the compilation after the passes that ran so far.
        began: when, on the clock of `time.perf_counter`.
        report: told the phase and the name of every pass as it begins.
        print_after: passes after which the IR is printed, into ``printed``.
        rows: what ran, as ``tapestry compile --print-passes`` shows it.
        seconds: by phase.
        plugins: the plug-ins that took part.
    """

    at: Compilation
    report: Report
    began: float = field(default_factory=time.perf_counter)
    print_after: Collection[str] = ()
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    printed: dict[str, str] = field(default_factory=dict[str, str])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    plugins: dict[Plugin, None] = field(default_factory=dict[Plugin, None])

    def run(self, passes: Sequence[Pass]) -> None:
        """Run all passes, in order.

        Raises:
            TapestryError: what a pass refuses.
        """
        with taking_part(self.plugins):
            for p in passes:
                with _collected_seldom():
                    self._run(p)

    def _run(self, p: Pass) -> None:
        self.report(p.phase, p.name)
        before, start, worked = self.at, time.perf_counter(), time.process_time()
        self.at = p.function(before)
        seconds, worked = round(time.perf_counter() - start, 4), round(time.process_time() - worked, 4)
        new = {name: v for name in FIELDS if (v := getattr(self.at, name)) is not getattr(before, name)}
        self.seconds[p.phase] = round(self.seconds.get(p.phase, 0.0) + seconds, 4)
        row = {"name": p.name, "phase": p.phase, "gives": [*new], "seconds": seconds, "processor_seconds": worked}
        row |= sizes(new.values())
        self.rows.append(row)
        level = flags.debug_level()
        log.log(logging.WARNING if level else logging.INFO, "%s: %.3f s; %s", p.name, row["seconds"], sizes_text(row))
        if p.name in self.print_after or level >= 3:
            text = dump(p.name, [*new.values(), *(getattr(self.at, name) for name in reversed(FIELDS))])
            if p.name in self.print_after:
                self.printed[p.name] = text
            if level >= 3:
                log.warning("%s", text)
        for graph in filter(None, map(graph_of, new.values())) if level >= 2 else ():
            laws.check(graph)


def check_names(names: Collection[str], passes: Sequence[Pass]) -> None:
    """Whether there are passes of these names.

    Raises:
        TapestryError: there is none; names the closest one.
    """
    there = [p.name for p in passes]
    for name in names:
        if name not in there:
            hint = similar(name, there) or "--print-passes shows them"
            raise TapestryError(f"there is no pass '{name}'", where="--print-after", hint=hint)
