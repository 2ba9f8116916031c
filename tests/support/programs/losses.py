"""Random plans of small models on forked ranks, some of which end themselves in the middle; those that are left must end with
the bits of the run in one process, in that batch and in the next. Prints one JSON document: what was tried, what was computed
again, and everything that differed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.kernels import from_numpy, to_numpy
from tapestry.runtime.processes.survivors import SurvivingExecutor, lost, sockets
from tapestry.runtime.processes.wire import Heartbeat, PeerLost, Wire, shared
from tapestry.runtime.processes.worker import Rank
from tests.support.programs.ranks import Trial

LIMIT = timedelta(seconds=60)


class Killed(SurvivingExecutor):
    """Ends itself before a step of the first batch, or (where it is told a task) in the middle of what is left after a loss, or
    (at -2) as soon as it sees one, while the others wait for what it holds."""

    at = task = -1

    def step(self, at: int) -> None:
        if at == self.at and not self.coming:
            os.kill(os.getpid(), signal.SIGKILL)
        super().step(at)

    def _part(self) -> None:
        if self.at == -2:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._part()

    def _do(self, t: Any) -> None:
        self.task -= 1
        if self.task == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._do(t)


def rank_main(rank: int, world: int, trial: Trial, kills: dict[int, tuple[int, int]], slots: Any, pipe: Any) -> None:
    port = pipe.recv()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    others = frozenset(sockets().values())
    dist.init_process_group("gloo", store=dist.PrefixStore("first", store), rank=rank, world_size=world, timeout=LIMIT)
    wire = Wire(rank, world, bytes(16), Heartbeat(slots, rank))
    me = Rank(rank=rank, world=world, store=store, slots=slots, port=port)
    source = lambda arrays: lambda name, box: from_numpy(np.array(arrays[name][tuple(slice(lo, hi) for lo, hi in box)]))  # noqa: E731
    t, weights = trial, source(trial.case.weights)
    machine = Killed(t.case.graph, t.program, TorchCpu(), weights, frozenset(), wire=wire, me=me, others=others)
    machine.at, machine.task = kills.get(rank, (-1, -1))
    found: list[Any] = []
    machine.connect()
    while len(found) < 2:
        try:
            if not machine.rest:  # as ranks do before each batch
                dist.barrier()
            found.append({k: to_numpy(v) for k, v in machine.run(source(trial.case.feeds))[0].items()})
            if len(found) == 2:
                dist.barrier()
        except (PeerLost, RuntimeError) as e:
            machine.settle(lost(e))
            del found[machine.coming :]
    pipe.send((wire.rank, found, machine.told))
    os._exit(0)


def outlived(world: int, trial: Trial, kills: dict[int, tuple[int, int]]) -> tuple[list[Any], list[Any]]:
    """What the first rank that is left found, and was told, as `processes.supervisor` tells who is gone."""
    context, slots = multiprocessing.get_context("fork"), shared(world)
    pipes, processes = [], []
    for r in range(world):
        ours, theirs = context.Pipe()
        p = context.Process(target=rank_main, args=(r, world, trial, kills, slots, theirs))
        p.start()
        theirs.close()
        pipes.append(ours)
        processes.append(p)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    for p in pipes:
        p.send(store.port)
    left, gone, said, losses = dict(enumerate(processes)), list[int](), dict[int, Any](), 0
    while left:
        wait([p.sentinel for p in left.values()] + [pipes[r] for r in left if r not in said], timeout=100)
        for r in [r for r in left if r not in said and pipes[r].poll()]:
            try:
                said[r] = pipes[r].recv()
            except EOFError:
                said[r] = None
        ended = [r for r, p in left.items() if p.exitcode is not None]
        dead = [r for r in ended if left[r].exitcode]
        left = {r: p for r, p in left.items() if r not in ended}
        if dead:
            gone += dead
            losses += 1
            store.set(f"lost/{losses}", json.dumps(gone))
    (first,) = [x for x in said.values() if x and x[0] == 0]
    return first[1], first[2]


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    wrong, rows = [], []
    for n in range(asked["runs"]):
        rng = random.Random(f"{asked['seed']} {n}")
        trial = Trial(rng.choice(asked["models"]), rng.choice(asked["meshes"]), rng.randrange(1000))
        trial.prepare()
        devices, steps = trial.program.devices, len(trial.program.steps)
        world = rng.randint(2, devices)
        kills = {rng.randrange(world): (rng.randrange(steps), -1)}
        if world > 2 and rng.random() < 0.4:
            later = (-1, rng.randrange(1, 20)) if rng.random() < 0.5 else (rng.randrange(steps), -1)
            kills.setdefault(rng.randrange(world), later)
        if n == 0 and world > 2:
            kills = {1: (steps // 2, -1), 0: (-2, -1)}
        found, told = outlived(world, trial, kills)
        alone, _ = trial.alone
        for batch in found:
            wrong += [f"run {n}: {k}" for k, a in alone.items() if a.tobytes() != batch[k].tobytes()]
        rows.append({"model": trial.name, "mesh": trial.mesh, "world": world, "kills": kills, "told": told})
    print(json.dumps({"wrong": wrong, "rows": rows}))


if __name__ == "__main__":
    main()
