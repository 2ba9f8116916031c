"""Which process runs which device."""

from __future__ import annotations

from tapestry.errors import TapestryError
from tapestry.ir.kernel import cut


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
