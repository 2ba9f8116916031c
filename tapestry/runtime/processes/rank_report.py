"""What every rank has measured, brought to rank 0 as JSON of a fixed form, and put together there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from tapestry.errors import RunError

LIMIT = 1 << 30  # bytes of a rank's report; an interval of its trace takes 64


class RunReport(msgspec.Struct, forbid_unknown_fields=True):
    """One run on one rank: seconds on the clock and of the processor, what its devices used, (count, bytes) sent by kind."""

    seconds: float
    cpu: float
    peak: list[int]
    packed: list[int]
    sent: dict[str, tuple[int, int]]


class RankReport(msgspec.Struct, forbid_unknown_fields=True):
    """One rank's measurements; ``trace`` has rows of six int64: batch, step, device, stream, start, end; ``backend_calls`` are
    those of torch.distributed in the last run, by name."""

    rank: int
    devices: list[int]
    runs: list[RunReport]
    payload_bytes: int
    gathered_bytes: int
    messages: int
    staged_bytes: int
    resident_bytes: dict[str, int]
    private_bytes: int
    weight_bytes: int
    trace: bytes
    backend_calls: dict[str, int]

    def row(self) -> dict[str, Any]:
        """Its row in the document of a run."""
        out = {k: v for k, v in msgspec.to_builtins(self).items() if k not in ("runs", "trace")}
        return out | {"cpu_seconds": [r.cpu for r in self.runs]}

    def slices(self) -> np.ndarray[Any, Any]:
        """The rows of the trace."""
        return np.frombuffer(self.trace, np.int64).reshape(-1, 6)


def gather(mine: RankReport, world: int, waiting: Callable[[int], None]) -> list[RankReport]:
    """The reports of all ranks on rank 0, nothing on the others; ``waiting`` is told for whom.

    Raises:
        RunError: what came is no report.
    """
    if mine.rank:
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(mine)), dtype=torch.uint8)
        waiting(0)
        dist.send(torch.tensor([data.numel()]), 0)
        dist.send(data, 0)
        return []
    return [mine] + [_received(r, waiting) for r in range(1, world)]


def _received(rank: int, waiting: Callable[[int], None]) -> RankReport:
    waiting(rank)
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank)
    if not 0 < int(size) <= LIMIT:
        raise RunError(f"rank {rank} reports {int(size)} bytes", where=f"rank {rank}", hint="a run without --trace")
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, rank)
    try:
        found = msgspec.msgpack.decode(data.numpy().data, type=RankReport)
        found.slices()
    except (msgspec.MsgspecError, ValueError) as e:
        raise RunError(f"rank {rank} reports what is no report: {e}", where=f"rank {rank}") from None
    return found
