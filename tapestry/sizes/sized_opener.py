"""Opening sessions of one build at several sizes, on one copy of its weights."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from tapestry import flags
from tapestry.build import store
from tapestry.runtime.session import OnceRead, Session


class SizedOpener:
    """Opens sessions of one build at several sizes, all on one copy of its weights, packed ones included."""

    def __init__(self) -> None:
        self.once = OnceRead()
        self.packed: dict[Hashable, Any] = {}

    def __call__(self, build: store.Build, constants: bytes, compiles: bool, equal: Mapping[tuple[int, int], int]) -> Session:
        """A session with its kernels bound; they are compiled now, or are there. ``equal`` launches are one function."""
        flags.before_torch()
        from tapestry.codegen.torch_cpu import How, TorchCpu, compile_waiting
        from tapestry.runtime.one_process.logical_devices import LocalExecutor

        class Executor(LocalExecutor):
            reads_late = True

        session = Session(build, constants, TorchCpu(build.exact, How(True, compiles)), Executor, self.once.of(build))
        assert isinstance(session.executor, LocalExecutor)
        session.executor.packed, session.executor.equal = self.packed, equal
        session.executor.bind()
        if compiles:
            compile_waiting()
        return session
