"""What every rank is doing, for whoever has to say which one is to blame when a run stalls.

On one host the slots are shared memory that the launcher reads. Under torchrun each rank publishes its own slot through the
rendezvous store twice a second; a slot that stands still belongs to a process that is stopped. A rank that cannot reach the
store for the timeout ends itself: nobody else can end it, and any call of its own may be waiting for an answer.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

START, WEIGHTS, COMPUTE, WAIT, IDLE, DONE = range(6)
NAMES = ("starting", "reading weights", "computing", "waiting", "between batches", "done")
PHASE, BATCH, STEP, PEER, CHANGED, BEAT = range(6)  # fields of a slot

Slots = np.ndarray[Any, np.dtype[np.float64]]


def shared(world: int) -> Slots:
    """Slots that forked processes share."""
    memory = mmap.mmap(-1, world * 6 * 8)
    return np.frombuffer(memory, np.float64).reshape(world, 6)


BEAT_FIELDS = struct.Struct("5d")  # of a slot, but for the beat


class Heartbeat:
    """One rank's slot: cheap enough to be written at every step."""

    def __init__(self, slots: Slots, rank: int) -> None:
        self.slot, self.rank, self.running = slots[rank], rank, float(slots[rank][BATCH])
        self._memory = memoryview(self.slot)
        self.at(-1, START)

    def at(self, step: int, phase: int, peer: int = -1) -> None:
        """Say what the rank does now; ``peer`` is whom it waits for."""
        BEAT_FIELDS.pack_into(self._memory, 0, phase, self.running, step, peer, time.monotonic())

    def batch(self, number: int) -> None:
        """Say which batch is running."""
        self.slot[BATCH] = self.running = number


class HeartbeatPublisher:
    """Publishes a slot through a store, and reads the others'.

    Args:
        timeout: seconds without an answer of the store after which this process ends.
    """

    def __init__(self, store: Any, heartbeat: Heartbeat, world: int, timeout: float, period: float = 0.5) -> None:
        self.store, self.heartbeat, self.world, self.period, self.timeout = store, heartbeat, world, period, timeout
        self.ended, self.answered = threading.Event(), time.monotonic()
        threading.Thread(target=self._run, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _run(self) -> None:
        own = self.store.clone()  # a connection that no other call keeps waiting
        while not self.ended.wait(self.period):
            self.heartbeat.slot[BEAT] += 1
            try:
                own.set(f"heartbeat/{self.heartbeat.rank}", self.heartbeat.slot.tobytes())
            except RuntimeError:  # the store went away with the job
                return
            self.answered = time.monotonic()

    def _watch(self) -> None:
        while not self.ended.wait(self.period):
            if time.monotonic() - self.answered > self.timeout:
                end_now(self.heartbeat, f"the rendezvous store has not answered for {self.timeout:g} s")

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


def end_now(heartbeat: Heartbeat, why: str) -> NoReturn:
    """End this process, with nothing that could wait for another one."""
    print(f"tapestry.runtime: rank {heartbeat.rank} ends, {describe(heartbeat.slot)}: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def end_soon(heartbeat: Heartbeat, seconds: float) -> threading.Timer:
    """End this process in some seconds, whatever it waits for then; the timer may be cancelled."""
    timer = threading.Timer(seconds, end_now, (heartbeat, "it could not part from the others"))
    timer.daemon = True
    timer.start()
    return timer


def guilty(slots: Slots, stopped: Mapping[int, str] | set[int]) -> list[int]:
    """The ranks that hold the others up: stopped ones; else those that wait for nobody and are not done, least advanced first;
    else whoever is waited for by the least advanced. Ranks that are done hold up nobody."""
    ranks = [r for r in range(len(slots)) if slots[r, PHASE] != DONE] or range(len(slots))
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
