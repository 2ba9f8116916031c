"""What one step of a Program sends from process to process, and expects: pieces by name, packed per pair of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tapestry.errors import TapestryError
from tapestry.ir.kernel import Box, cut
from tapestry.runtime.processes.wire import Piece, Wire

Array = Any
Memory = list[dict[str, Array]]
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


@dataclass(slots=True)
class Parcels:
    """What one step, or a part of it, sends and expects, per rank, and what stays in the process, by the name of the piece.

    A ``dry`` one takes no data: it says what is expected.
    """

    wire: Wire
    owner: tuple[int, ...]
    step: int
    part: int = 0
    dry: bool = False
    sends: Sends = field(default_factory=lambda: defaultdict(list))
    receives: Receives = field(default_factory=lambda: defaultdict(list))
    here: dict[str, torch.Tensor] = field(default_factory=dict)
    sent: int = 0

    def carry(
        self, name: str, src: int, dst: int, extents: tuple[int, ...], dtype: torch.dtype, take: Callable[[], Array]
    ) -> None:
        """A piece from one device to another; ``take`` gives the data on the sender's side."""
        mine = self.wire.rank
        if self.owner[src] == mine:
            if self.dry:
                return
            data = take()
            assert isinstance(data, torch.Tensor), f"'{name}' is no array and cannot travel between processes"
            self.sent += data.numel() * data.element_size()
            if self.owner[dst] == mine:
                self.here[name] = data
            else:
                self.sends[self.owner[dst]].append(((name, extents, dtype), data))
        elif self.owner[dst] == mine:
            self.receives[self.owner[src]].append((name, extents, dtype))

    def go(self) -> Callable[[], dict[str, torch.Tensor]]:
        """Post everything; the function returned waits, and gives every piece for this process by name."""
        wait = self.wire.post((self.step, self.part), self.sends, self.receives)
        here, expected = self.here, dict(self.receives)

        def arrive() -> dict[str, torch.Tensor]:
            came = wait()
            return here | {p[0]: a for r, pieces in expected.items() for p, a in zip(pieces, came[r], strict=True)}

        return arrive


def part(array: Array, box: Box, origin: Box | None) -> Array:
    """A view of a box of an array that holds ``origin``."""
    assert origin is not None
    return array[tuple(slice(lo - o, hi - o) for (lo, hi), (o, _) in zip(box, origin, strict=True))]


def present(box: Box | None) -> Box:
    """A box that must be there."""
    assert box is not None
    return box
