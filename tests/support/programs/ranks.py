"""Random plans of small models on forked ranks, compared with the one-process run; a program of its own, because a process that
has used torch's threads must not fork. Prints one JSON document: what was tried, and everything that differed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.kernels import from_numpy, to_numpy
from tapestry.ir.program import Reduce, Transfer, peak_bytes, transfer_bytes
from tapestry.ir.types import FLOATS
from tapestry.plan.lower import lower
from tapestry.runtime.messages.message_schedule import calls_of
from tapestry.runtime.processes.distributed import RankExecutor
from tapestry.runtime.processes.heartbeat import Heartbeat, shared
from tapestry.runtime.processes.wire import Wire
from tests.support.small_models import case, execute, mesh_of, random_plan


@dataclass
class Trial:
    name: str
    mesh: str
    seed: int

    def prepare(self) -> None:
        self.case = case(self.name)
        plan = random_plan(self.case.graph, mesh_of(self.mesh), random.Random(f"{self.name} {self.mesh} {self.seed}"))
        self.program = lower(replace(plan, native_sums=self.seed % 2 == 0))
        self.alone = execute(self.case.graph, self.program, self.case)
        self.rounded = any(
            c.op in ("sum", "prod") and len(c.groups[0]) > 2 and self.dtype_of(at) in FLOATS
            for at, c in calls_of(self.case.graph, self.program, "gloo").items()
        )

    def dtype_of(self, at: int) -> str:
        """The dtype of what a reduction sends."""
        step = self.program.steps[at]
        assert isinstance(step, Reduce)
        return step.sent_as or self.program.buffers[step.sent[0]].dtype


def rank_main(rank: int, world: int, trials: list[Trial], slots: Any, pipe: Any) -> None:
    client = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False, timeout=timedelta(seconds=60))
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=client, rank=rank, world_size=world, timeout=limit)
    found = []
    for n, t in enumerate(trials):
        if t.program.devices < world:
            continue
        wire = Wire(rank, world, bytes([n % 251] * 16), Heartbeat(slots, rank), batch=n)
        source = lambda arrays: lambda name, box: from_numpy(np.array(arrays[name][tuple(slice(lo, hi) for lo, hi in box)]))  # noqa: E731
        machine = RankExecutor(t.case.graph, t.program, TorchCpu(), source(t.case.weights), frozenset(), wire=wire)
        outs, measured = machine.run(source(t.case.feeds))
        payload, sent = wire.payload, dict(measured.transfers)
        again, _ = machine.run(source(t.case.feeds))
        found.append({
            "outs": {k: to_numpy(v) for k, v in outs.items()}, "again": {k: to_numpy(v) for k, v in again.items()}, "peak": {d: measured.peak[d] for d in machine.devices},
            "sent": {k: b for k, (_, b) in sent.items()}, "payload": payload,
        })  # fmt: skip
    pipe.send(found)
    dist.destroy_process_group()
    os._exit(0)


def ranks_of(world: int, trials: list[Trial]) -> list[list[dict]]:
    """What every rank found, by trial."""
    context, slots = multiprocessing.get_context("fork"), shared(world)
    pipes, processes = [], []
    for r in range(world):
        ours, theirs = context.Pipe()
        p = context.Process(target=rank_main, args=(r, world, trials, slots, theirs))
        p.start()
        theirs.close()
        pipes.append(ours)
        processes.append(p)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    for p in pipes:  # only now: a process forked beside the store's thread may inherit a lock that nobody opens
        p.send(store.port)
    found = [p.recv() for p in pipes]
    for p in processes:
        p.join()
    return [list(x) for x in zip(*found, strict=True)]


def near(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether floats are the same but for rounding."""
    few = {2: 2e-2, 4: 1e-5, 8: 1e-13}[a.dtype.itemsize]
    return a.dtype.kind not in "biu" and np.allclose(a.astype(np.float64), b.astype(np.float64), rtol=few, atol=few)


def differences(world: int, t: Trial, ranks: list[dict]) -> list[str]:
    """Bits of outputs (where the backend adds floats of more than two devices: all but the last ones, and the same in two runs),
    peaks, bytes counted by kind, and bytes handed to the network."""
    out = []
    alone, _ = t.alone
    rounded = t.rounded and world == t.program.devices
    for k, a in alone.items():
        b, again = ranks[0]["outs"][k], ranks[0]["again"][k]
        if b.tobytes() != again.tobytes():
            out.append(f"output {k} differs between two runs")
        if a.dtype == b.dtype and a.shape == b.shape and (a.tobytes() == b.tobytes() or (rounded and near(a, b))):
            continue
        worst = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0))
        out.append(f"output {k} differs by {worst}")
    peaks = {d: n for r in ranks for d, n in r["peak"].items()}
    if [peaks[d] for d in range(t.program.devices)] != peak_bytes(t.program)[0]:
        out.append(f"peaks {peaks}, planned {peak_bytes(t.program)[0]}")
    planned: dict[str, int] = {}
    for s in t.program.steps:
        if isinstance(s, Transfer | Reduce):
            planned[s.kind] = planned.get(s.kind, 0) + transfer_bytes(s, t.program)
    sent = {k: sum(r["sent"].get(k, 0) for r in ranks) for k in planned}
    if sent != planned:
        out.append(f"sent {sent}, planned {planned}")
    if world == t.program.devices and sum(r["payload"] for r in ranks) != sum(planned.values()):
        out.append(f"on the network {sum(r['payload'] for r in ranks)}, planned {planned}")
    return [f"{t.name} on {t.mesh}, seed {t.seed}, {world} processes: {x}" for x in out]


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    trials = [Trial(n, m, s) for n in asked["models"] for m in asked["meshes"] for s in range(asked["seeds"])]
    for t in trials:
        t.prepare()
    wrong, tried = [], 0
    for world in asked["worlds"]:
        mine = [t for t in trials if t.program.devices >= world]
        for t, ranks in zip(mine, ranks_of(world, mine), strict=True):
            tried += 1
            wrong += differences(world, t, ranks)
    rounded = [f"{t.name} on {t.mesh}, seed {t.seed}" for t in trials if t.rounded]
    print(json.dumps({"tried": tried, "wrong": wrong, "rounded": rounded}))


if __name__ == "__main__":
    main()
