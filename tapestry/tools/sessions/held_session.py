"""``tapestry.Session``: a build whose weights are loaded once and stay, for any number of callers and steps."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from tapestry import api
from tapestry.api import Compiled
from tapestry.errors import RunError, TapestryError
from tapestry.ir.types import DTYPES

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Numpy's name of the dtype and the sizes, by name; of what is no array, what it is."""


class Engine(Protocol):
    """What computes a step."""

    def step(self, feeds: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
        """Outputs by name."""
        ...

    def close(self) -> None:
        """Give everything back; called again it does nothing."""
        ...


class Session(AbstractContextManager["Session"]):
    """Runs a build as often as it is asked to; it is a context manager, and ends with the process.

    Args:
        build: a build directory or what `tapestry.compile` returned, which may be for a range of sizes.
        processes: ranks on this host, which are started now and stay; by default everything is in this process.
        threads: of each rank; in this process torch's own setting counts.
        restart: ranks that fail are started again and the step is repeated, once; otherwise the session ends with the failure.
        timeout: seconds of silence after which a rank has failed.

    Raises:
        TapestryError: the build cannot be used. RunError: the ranks did not come up.
    """

    def __init__(
        self,
        build: str | Path | Compiled,
        *,
        processes: int | None = None,
        threads: int | None = None,
        restart: bool = False,
        timeout: float = 30.0,
    ) -> None:
        self._owned, self._turn = ExitStack(), Lock()
        self._given, self._compiled = build, build if isinstance(build, Compiled) else api.load(build)
        self._processes, self._threads, self._timeout = processes, threads, timeout
        self._restart, self.restarts = restart, 0
        self._engine: Engine | None = self._start()

    @property
    def inputs(self) -> Shapes:
        """What the build takes."""
        return self._about(self._compiled.build.plan.graph.inputs)

    @property
    def outputs(self) -> Shapes:
        """What the build gives."""
        return self._about(self._compiled.build.program.outputs)

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> dict[str, Any]:
        """One step. Any number of threads may call it; they take turns.

        Args:
            feeds: by name, arrays of numpy or torch, or whatever speaks DLPack. In this process they are read where they lie,
                so nobody may write them before this returns; ranks get one copy, in memory that they share.
            outputs: the names of those that are wanted; the others stay where they are.

        Returns:
            the outputs by name: new arrays, and lists for sequences.

        Raises:
            TapestryError: an input or a name is at fault, or the session is closed. RunError: a rank failed.
        """
        there = self._compiled.build.program.outputs
        unknown = next((n for n in outputs or () if n not in there), None)
        if unknown is not None:
            raise TapestryError(f"there is no output '{unknown}'", hint=f"the outputs are {', '.join(there)}")
        wanted = tuple(there) if outputs is None else tuple(outputs)
        with self._turn:
            if self._engine is None:
                raise TapestryError("the session is closed")
            try:
                return self._engine.step(feeds, wanted)
            except RunError:
                if not self._restart:
                    raise
                self._engine = self._start()
                self.restarts += 1
                return self._engine.step(feeds, wanted)

    def close(self) -> None:
        """Give everything back: no process, no descriptor and no weight is left. Called again it does nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        self._owned.close()

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _start(self) -> Engine:
        if self._processes is None:
            return InProcess(self._compiled)
        from tapestry.runtime.step_messages import owners
        from tapestry.tools.sessions.ranks import Ranks

        owners(self._compiled.build.program.devices, self._processes)
        return Ranks(self._compiled, self._folder(), self._processes, threads=self._threads, timeout=self._timeout)

    def _folder(self) -> Path:
        """Where the build is; one that was never saved is, for as long as the session lives."""
        if isinstance(self._given, Compiled):
            place = self._owned.enter_context(tempfile.TemporaryDirectory(prefix="tapestry-session-"))
            self._given = Path(place) / "build"
            self._compiled.save(self._given)
        return Path(self._given)

    def _about(self, names: Collection[str]) -> Shapes:
        tensors = [self._compiled.build.plan.graph.tensors[n] for n in names]
        return {t.name: (t.about, ()) if t.on_host else (DTYPES[t.dtype][1], t.shape) for t in tensors}


class InProcess:
    """Everything in this process; of a build for several sizes, the inputs of a step say which."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled, self.session = compiled, None
        if compiled.sized is not None:
            compiled.prepare()
            return
        self.session = api.open_session(compiled.build, b"".join(compiled.constants.values()))
        from tapestry.runtime.one_process.logical_devices import LocalExecutor

        if isinstance(self.session.executor, LocalExecutor):
            self.session.executor.bind()

    def step(self, feeds: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
        """Outputs by name."""
        session = self.session or self.compiled.at_inputs(feeds).session
        return session.compute(session.checked(feeds), wanted=wanted).outputs

    def close(self) -> None:
        """Nothing is held but memory."""
        self.session = None
