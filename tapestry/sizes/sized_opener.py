"""Opening sessions of one build at several sizes, on one copy of its weights."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from tapestry import flags
from tapestry.build import store
from tapestry.runtime.session import MakeExecutor, OnceRead, Session
from tapestry.verify.certificate import check_memory

if TYPE_CHECKING:
    from tapestry.runtime.target_protocol import Target


class SizedOpener:
    """Opens sessions of one build at several sizes, all on one copy of its weights, packed ones included.

    Args:
        make: the executor, where it is a rank's.
    """

    def __init__(self, make: MakeExecutor[Target] | None = None) -> None:
        self.once, self.make = OnceRead(), make
        self.packed: dict[Hashable, Any] = {}

    def __call__(self, build: store.Build, constants: bytes, compiles: bool, equal: Mapping[tuple[int, int], int]) -> Session:
        """A session with its kernels bound; they are compiled now, or are there. ``equal`` launches are one function."""
        flags.before_torch()
        from tapestry.codegen.torch_cpu import How, TorchCpu, compile_waiting
        from tapestry.runtime.one_process.logical_devices import LocalExecutor

        check_memory(build.plan, build.program)

        class Executor(LocalExecutor):
            reads_late = True

        slices = self.once.of(build)
        session = Session(build, constants, TorchCpu(How(True, compiles)), self.make or Executor, slices)
        assert isinstance(session.executor, LocalExecutor)
        session.executor.packed, session.executor.equal = self.packed, equal
        session.executor.bind()
        if compiles:
            compile_waiting()
        return session
