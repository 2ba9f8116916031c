"""What runs the builds of a session: this process, where weights are loaded once for all of them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np

from tapestry import api, flags
from tapestry.build.store import Build
from tapestry.ir.kernel import Box
from tapestry.runtime.session import MakeExecutor, ModelFiles, Session, Slices
from tapestry.runtime.target_protocol import Array, Target


class Engine(Protocol):
    """Runs one member of a session at a time."""

    def step(self, member: int, feeds: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
        """Outputs by name, from inputs that were checked."""
        ...

    def close(self) -> None:
        """Give everything back; called again it does nothing."""
        ...


class OnceRead:
    """Slices of weights that are read once for all members, for as long as one of them holds them."""

    def __init__(self, source: Slices) -> None:
        self.source = source
        self._there: WeakValueDictionary[tuple[str, Box], np.ndarray[Any, Any]] = WeakValueDictionary()

    def __call__(self, tensor: str, box: Box) -> np.ndarray[Any, Any]:
        """A box of a weight, which nobody may write."""
        found = self._there.get((tensor, box))
        if found is None:
            found = self._there[tensor, box] = self.source(tensor, box)
        return found


class Loader:
    """Opens sessions of builds of one model, in this process; a weight that several read in one form is there once."""

    def __init__(self, libraries: bool = False) -> None:
        self.libraries = libraries
        self.once: OnceRead | None = None
        self.packed: dict[Hashable, Array] = {}

    def __call__(
        self, build: Build, constants: bytes, *, weights: Slices | None = None, make: MakeExecutor[Target] | None = None
    ) -> Session:
        """A session; see `api.open_session`."""
        from tapestry.runtime.one_process.logical_devices import LocalExecutor

        self.once = self.once or OnceRead(weights or ModelFiles(build))
        session = api.open_session(build, constants, weights=self.once, make=make, libraries=self.libraries)
        if isinstance(session.executor, LocalExecutor):
            session.executor.packed = self.packed
        return session


class InProcess:
    """Everything in this process."""

    def __init__(self, builds: Sequence[tuple[Build, bytes]], libraries: bool = False) -> None:
        flags.before_torch()
        from tapestry.runtime.one_process.logical_devices import LocalExecutor

        loader = Loader(libraries)
        self.sessions = [loader(build, constants) for build, constants in builds]
        for s in self.sessions:
            if isinstance(s.executor, LocalExecutor):
                s.executor.bind()

    def step(self, member: int, feeds: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
        """Outputs by name."""
        return self.sessions[member].compute(feeds, wanted=wanted).outputs

    def close(self) -> None:
        """Nothing is held but memory."""
        self.sessions.clear()
