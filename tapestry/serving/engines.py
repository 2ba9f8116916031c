"""What runs the builds of a session: this process, where weights are loaded once for all of them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tapestry import api, flags
from tapestry.build.store import Build
from tapestry.errors import TapestryError
from tapestry.runtime.session import MakeExecutor, OnceRead, Session, Slices
from tapestry.runtime.target_protocol import Array, Target
from tapestry.serving.members import Member
from tapestry.sizes.sized_opener import SizedOpener

if TYPE_CHECKING:
    from tapestry.runtime.one_process.held_state import Carry, HeldState, Places


class Engine(Protocol):
    """Runs one member of a session at a time."""

    def step(
        self, member: int, feeds: Mapping[str, Any], wanted: Collection[str], at: Places, fresh: Collection[int]
    ) -> dict[str, Any]:
        """Outputs by name, from inputs that were checked.

        Args:
            at: where caches are appended to.
            fresh: rows of them that are emptied first.
        """
        ...

    def close(self) -> None:
        """Give everything back; called again it does nothing."""
        ...


class Loader:
    """Opens sessions of builds of one model, in this process; a weight that several read in one form is there once."""

    def __init__(self, members: Sequence[Member], state: HeldState, libraries: bool = False) -> None:
        self.members, self.state, self.libraries = members, state, libraries
        self.once = OnceRead()
        self.packed: dict[Hashable, Array] = {}
        self.weights: Slices | None = None

    def opener(self, make: MakeExecutor[Target] | None) -> SizedOpener:
        """What opens a build for several sizes, on the same weights."""
        found = SizedOpener(make, self.weights)
        found.once, found.packed = self.once, self.packed
        return found

    def __call__(
        self, build: Build, constants: bytes, *, weights: Slices | None = None, make: MakeExecutor[Target] | None = None
    ) -> Session:
        """A session; see `api.open_session`. Of a build for several sizes at those at which it was made."""
        from tapestry.runtime.one_process.logical_devices import LocalExecutor

        self.weights, slices = weights, self.once.of(build, weights)
        member = next(m for m in self.members if m.compiled.build is build)
        if member.compiled.sized is not None:
            return self.opener(make)(build, constants, True, {})
        session = api.open_session(build, constants, weights=slices, make=make, libraries=self.libraries)
        if isinstance(session.executor, LocalExecutor):
            session.executor.packed = self.packed
        keep(member, session, self.state)
        return session


def keep(member: Member, session: Session, state: HeldState) -> None:
    """Let a session keep its caches there, before it is bound.

    Raises:
        TapestryError: its target has no place for them.
    """
    from tapestry.runtime.one_process.logical_devices import LocalExecutor

    if not member.caches:
        return
    if not isinstance(session.executor, LocalExecutor):
        raise TapestryError(f"no caches stay on {member.compiled.build.target}", hint="--target torch-cpu, or without --state")
    state.join(session.executor, member.caches)


def held(members: Sequence[Member], carry: Carry | None = None) -> HeldState:
    """Where the caches of all members are going to be."""
    from tapestry.runtime.one_process.held_state import HeldState

    longest = max((m.state.new for m in members if m.state), default=0)
    return HeldState(longest, max(m.rows for m in members), carry)


class InProcess:
    """Everything in this process."""

    def __init__(self, members: Sequence[Member], libraries: bool = False) -> None:
        flags.before_torch()
        from tapestry.runtime.one_process.logical_devices import LocalExecutor

        self.members, self.state = members, held(members)
        loader = Loader(members, self.state, libraries)
        self.sessions = [loader(m.compiled.build, b"".join(m.compiled.constants.values())) for m in members]
        for s in self.sessions:
            if isinstance(s.executor, LocalExecutor):
                s.executor.bind()

    def step(
        self, member: int, feeds: Mapping[str, Any], wanted: Collection[str], at: Places, fresh: Collection[int]
    ) -> dict[str, Any]:
        """Outputs by name."""
        self.state.clear(fresh)
        if (kept := self.members[member].state) is not None:
            self.state.expect(at, kept.caches[0], feeds[kept.mask])
        return self.sessions[member].compute(feeds, wanted=wanted).outputs

    def close(self) -> None:
        """Nothing is held but memory."""
        self.sessions.clear()


class AnySize:
    """A build for several sizes, in this process: the inputs of a step say which."""

    def __init__(self, member: Member) -> None:
        self.compiled = member.compiled
        self.compiled.prepare()

    def step(
        self, member: int, feeds: Mapping[str, Any], wanted: Collection[str], at: Places, fresh: Collection[int]
    ) -> dict[str, Any]:
        """Outputs by name, from inputs that are checked here, where their sizes are known."""
        one = Member(self.compiled.at_inputs(feeds))
        return one.compiled.session.compute(one.checked(feeds), wanted=wanted).outputs

    def close(self) -> None:
        """Nothing is held but memory."""
