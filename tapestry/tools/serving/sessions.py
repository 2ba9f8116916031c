"""``tapestry.Session``: builds of one model whose weights are loaded once and stay, for any number of callers and steps."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from tapestry.api import Compiled
from tapestry.errors import RunError, TapestryError
from tapestry.ir.types import DTYPES, Tensor
from tapestry.tools.serving.engines import AnySize, Engine, Given, InProcess, Member, Turns, chosen, members

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Numpy's name of the dtype and the sizes, by name; of what is no array, what it is."""


class Session(AbstractContextManager["Session"]):
    """Runs builds of one model as often as it is asked to; it is a context manager, and ends with the process.

    Args:
        build: a build directory or what `tapestry.compile` returned, which may be for a range of sizes; several are one model
            at several sizes, of which those of the inputs choose one.
        processes: ranks on this host, which are started now and stay; by default everything is in this process.
        threads: of each rank; in this process torch's own setting counts.
        queue: how many callers may wait for their turn; one more gets `Busy` at once.
        restart: ranks that fail are started again and the step is repeated, once; otherwise the session ends with the failure.
        timeout: seconds of silence after which a rank has failed.

    Raises:
        TapestryError: a build cannot be used, or the builds are not of one model. RunError: the ranks did not come up.
    """

    def __init__(
        self, build: Given | Sequence[Given], *, processes: int | None = None, threads: int | None = None, queue: int = 64,
        restart: bool = False, timeout: float = 30.0,
    ) -> None:  # fmt: skip
        self._owned = ExitStack()
        self._given = [build] if isinstance(build, str | Path | Compiled) else list(build)
        self._members: Sequence[Member] = members(self._given)
        self._processes, self._threads, self._timeout = processes, threads, timeout
        self._turns, self._restart, self.restarts = Turns(queue), restart, 0
        self._engine: Engine | None = self._start()

    @property
    def sizes(self) -> list[tuple[Shapes, Shapes]]:
        """What each build takes, and what it gives."""
        return [(_about(m.inputs), _about(m.outputs)) for m in self._members]

    @property
    def inputs(self) -> Shapes:
        """What the first build takes."""
        return self.sizes[0][0]

    @property
    def outputs(self) -> Shapes:
        """What the first build gives."""
        return self.sizes[0][1]

    def run(
        self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """One step. Any number of threads may call it; they take turns in the order in which they came.

        Args:
            feeds: by name, arrays of numpy or torch, or whatever speaks DLPack. In this process they are read where they lie,
                so nobody may write them before this returns; ranks get one copy, in memory that they share.
            outputs: the names of those that are wanted; the others stay where they are.
            timeout: seconds that the caller waits for its turn at most.

        Returns:
            the outputs by name: new arrays, and lists for sequences.

        Raises:
            TapestryError: an input or a name is at fault, or the session is closed. Busy: too many callers wait.
            RunError: a rank failed.
        """
        k = chosen(self._members, feeds)
        member = self._members[k]
        checked, wanted = member.checked(feeds), member.wanted(outputs)
        with self._turns.turn(timeout):
            return self._step(k, checked, wanted)

    def close(self) -> None:
        """Give everything back: no process, no descriptor and no weight is left. Called again it does nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        self._owned.close()

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _step(self, k: int, checked: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
        if self._engine is None:
            raise TapestryError("the session is closed")
        try:
            return self._engine.step(k, checked, wanted)
        except RunError:
            if not self._restart:
                raise
            self._engine = self._start()
            self.restarts += 1
            return self._engine.step(k, checked, wanted)

    def _start(self) -> Engine:
        if any(m.compiled.sized for m in self._members):
            if len(self._members) > 1:
                raise TapestryError("a build for several sizes is alone in a session", hint="one session for each")
            if self._processes is None:
                return AnySize(self._members[0])
        if self._processes is None:
            return InProcess(self._members)
        from tapestry.runtime.executor import owners
        from tapestry.tools.serving.rank_engine import Ranks

        owners(self._members[0].compiled.build.program.devices, self._processes)
        return Ranks(self._members, self._folders(), self._processes, threads=self._threads, timeout=self._timeout)

    def _folders(self) -> list[Path]:
        """Where the builds are; those that were never saved are, for as long as the session lives."""
        out: list[Path] = []
        for k, (given, member) in enumerate(zip(self._given, self._members, strict=True)):
            if isinstance(given, str | Path):
                out.append(Path(given))
                continue
            scratch = self._owned.enter_context(tempfile.TemporaryDirectory(prefix="tapestry-session-"))
            out.append(Path(scratch) / f"build-{k}")
            member.compiled.save(out[-1])
        return out


def _about(tensors: Mapping[str, Tensor]) -> Shapes:
    return {n: (t.about, ()) if t.on_host else (DTYPES[t.dtype][1], t.shape) for n, t in tensors.items()}
