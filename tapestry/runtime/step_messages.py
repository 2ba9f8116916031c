"""What one step of a Program moves between devices: pieces by name, as messages where devices are in different processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tapestry.errors import TapestryError
from tapestry.ir.kernel import cut
from tapestry.runtime.target_protocol import Array

if TYPE_CHECKING:
    from tapestry.runtime.processes.wire import Wire

Piece = tuple[str, tuple[int, ...], torch.dtype]
"""(what it is, shape, dtype): both ends name the same pieces in the same order."""
Sends = defaultdict[int, list[tuple[Piece, torch.Tensor]]]
Receives = defaultdict[int, list[Piece]]


def owners(devices: int, world: int) -> tuple[int, ...]:
    """The rank of every device.

    Raises:
        TapestryError: there are more ranks than devices.
    """
    if not 1 <= world <= devices:
        raise TapestryError(
            f"{world} processes for the {devices} devices of the plan", hint=f"at most {devices}: a process runs whole devices"
        )
    return tuple(r for r in range(world) for _ in range(*cut(devices, world, r)))


@dataclass(frozen=True, slots=True)
class Route:
    """Which process runs each device, which one this is, and the wire to the others (``None``: there are no others)."""

    owner: tuple[int, ...]
    wire: Wire | None = None

    @property
    def rank(self) -> int:
        """This process."""
        return 0 if self.wire is None else self.wire.rank

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of this process."""
        return tuple(d for d, r in enumerate(self.owner) if r == self.rank)


@dataclass(slots=True)
class StepMessages:
    """What one step, or a part of it, sends and expects, per rank, and what stays in the process, by the name of the piece.

    With ``dry`` it takes no data: it says what is expected.
    """

    route: Route
    step: int
    part: int = 0
    dry: bool = False
    sends: Sends = field(default_factory=lambda: Sends(list))
    receives: Receives = field(default_factory=lambda: Receives(list))
    here: dict[str, Array] = field(default_factory=dict[str, Array])
    sent: int = 0

    def carry(
        self, name: str, ends: tuple[int, int], extents: tuple[int, ...], dtype: torch.dtype, take: Callable[[], Array]
    ) -> None:
        """A piece from one device to another (``ends``); ``take`` gives the data on the sender's side."""
        mine, (sender, receiver) = self.route.rank, (self.route.owner[d] for d in ends)
        if sender == mine:
            if self.dry:
                return
            data = take()
            assert isinstance(data, torch.Tensor), f"'{name}' is no array and cannot travel between devices"
            self.sent += data.numel() * data.element_size()
            if receiver == mine:
                self.here[name] = data
            else:
                self.sends[receiver].append(((name, extents, dtype), data))
        elif receiver == mine:
            self.receives[sender].append((name, extents, dtype))

    def post(self) -> Callable[[], dict[str, Array]]:
        """Send everything; the function returned waits, and gives every piece for this process by name."""
        here, expected = self.here, dict(self.receives)
        if self.route.wire is None:
            return lambda: here
        wait = self.route.wire.post((self.step, self.part), self.sends, self.receives)

        def arrive() -> dict[str, Array]:
            came = wait()
            return here | {p[0]: a for r, pieces in expected.items() for p, a in zip(pieces, came[r], strict=True)}

        return arrive
