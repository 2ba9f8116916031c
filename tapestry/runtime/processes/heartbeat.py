"""What every rank is doing, for whoever has to say which one is to blame when a run stalls.

On one host the slots are shared memory that the launcher reads. Under torchrun each rank publishes its own slot through the
rendezvous store twice a second; a slot that stands still belongs to a process that is stopped.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

START, WEIGHTS, COMPUTE, WAIT, IDLE, DONE = range(6)
NAMES = ("starting", "reading weights", "computing", "waiting", "between batches", "done")
PHASE, BATCH, STEP, PEER, CHANGED, BEAT = range(6)  # fields of a slot

Slots = np.ndarray[Any, np.dtype[np.float64]]


def shared(world: int) -> Slots:
    """Slots that forked processes share."""
    memory = mmap.mmap(-1, world * 6 * 8)
    return np.frombuffer(memory, np.float64).reshape(world, 6)


class Heartbeat:
    """One rank's slot: cheap enough to be written at every step."""

    def __init__(self, slots: Slots, rank: int) -> None:
        self.slot, self.rank = slots[rank], rank
        self.at(-1, START)

    def at(self, step: int, phase: int, peer: int = -1) -> None:
        """Say what the rank does now; ``peer`` is whom it waits for."""
        self.slot[:5] = (phase, self.slot[BATCH], step, peer, time.monotonic())

    def batch(self, number: int) -> None:
        """Say which batch is running."""
        self.slot[BATCH] = number


class HeartbeatPublisher:
    """Publishes a slot through a store, and reads the others'."""

    def __init__(self, store: Any, heartbeat: Heartbeat, world: int, period: float = 0.5) -> None:
        self.store, self.heartbeat, self.world, self.period = store, heartbeat, world, period
        self.ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.ended.wait(self.period):
            self.heartbeat.slot[BEAT] += 1
            try:
                self.store.set(f"heartbeat/{self.heartbeat.rank}", self.heartbeat.slot.tobytes())
            except RuntimeError:  # the store went away with the job
                return

    def read(self) -> tuple[Slots, set[int]]:
        """(slots of all ranks, ranks whose slot stands still)."""
        before = self._all()
        time.sleep(3 * self.period)
        now = self._all()
        still = {r for r in range(self.world) if r != self.heartbeat.rank and now[r, BEAT] == before[r, BEAT]}
        return now, still

    def _all(self) -> Slots:
        out = np.zeros((self.world, 6))
        for r in range(self.world):
            if r == self.heartbeat.rank:
                out[r] = self.heartbeat.slot
            elif self.store.check([f"heartbeat/{r}"]):
                out[r] = np.frombuffer(self.store.get(f"heartbeat/{r}"), np.float64)
        return out


def guilty(slots: Slots, stopped: Mapping[int, str] | set[int]) -> list[int]:
    """The ranks that hold the others up: stopped ones; else those that wait for nobody and are not done, least advanced first;
    else whoever is waited for by the least advanced."""
    ranks = range(len(slots))
    if stopped:
        return sorted(stopped)
    behind = sorted(ranks, key=lambda r: (slots[r, BATCH], slots[r, STEP]))
    working = [r for r in behind if slots[r, PHASE] not in (WAIT, IDLE, DONE)]
    if working:
        return working[:1]
    awaited = [int(slots[r, PEER]) for r in behind if slots[r, PHASE] == WAIT and slots[r, PEER] >= 0]
    return awaited[:1] or behind[:1]


def describe(slot: Slots) -> str:
    """What a rank was doing, in words."""
    phase, step = int(slot[PHASE]), int(slot[STEP])
    where = f" at step {step}" if step >= 0 and phase in (COMPUTE, WAIT) else ""
    peer = f" for rank {int(slot[PEER])}" if phase == WAIT and slot[PEER] >= 0 else ""
    batch = f" of batch {int(slot[BATCH])}" if where and slot[BATCH] > 0 else ""
    return f"{NAMES[phase]}{peer}{where}{batch}"
