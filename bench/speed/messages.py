"""What a message costs this program's own code: host work of a rank beside that of torch.distributed.

    .venv/bin/python -m bench messages [--ranks 2 4 8] [--bytes 8192] [--batches 200]

A chain of 16 products whose partial sums are merged by an all-reduce each, one thread a rank, all ranks on this machine. Per
all-reduce and rank: processor seconds of the rank's main thread in starting and finishing it, without those spent inside
torch.distributed (its functions and the waiting for its works), and without what the watching itself takes, which is measured
right after (`watching_s`): the mean over a batch, the median over batches, of the rank
with the most; and how many calls of torch.distributed a batch makes. The same of a reduce-scatter, which on gloo is messages
and a merge of our own (a kernel, and counted). Writes bench/results/messages.json; exits 1 where an all-reduce of 8 KiB takes
50 µs or more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from bench.support import record
from bench.support.record import Row

LIMIT = 50e-6  # seconds of our own for an all-reduce of 8 KiB
WIDTH, LAYERS = 512, 16


class Clock:
    """Processor seconds of this thread, inside torch.distributed and in all."""

    def __init__(self) -> None:
        self.inside = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time is counted as torch.distributed's."""

        def run(*args: Any, **more: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **more)
            finally:
                self.inside += time.thread_time() - start

        return run

    def own(self, work: Callable[[], Any]) -> float:
        """Processor seconds of some work that are not torch.distributed's."""
        before, start = self.inside, time.thread_time()
        work()
        return time.thread_time() - start - (self.inside - before)


def watch(clock: Clock) -> None:
    """Count what is asked of torch.distributed, and the waiting for it."""
    import torch.distributed as dist

    from tapestry.runtime.processes import wire

    for name in ("all_reduce", "batch_isend_irecv"):
        setattr(dist, name, clock.timed(getattr(dist, name)))
    wire.wait_for = clock.timed(wire.wait_for)


def layers(rows: int) -> str:
    """A chain of products, in the notation of graphs."""
    lines = ["graph g", f"input x0: f32[{rows}, {WIDTH}]", f"input w: f32[{WIDTH}, {WIDTH}]"]
    for k in range(LAYERS):
        lines += [
            f"x{k + 1}: f32[{rows}, {WIDTH}] = op [i: {rows}, j: {WIDTH} | k: {WIDTH} sum]",
            f"  reads x{k}[i, k], w[k, j]",
            f"  body x{k} * w",
        ]
    return "\n".join([*lines, f"output x{LAYERS}", ""])


def program(ranks: int, nbytes: int, scattered: bool) -> tuple[Any, Any]:
    """A graph, and a program of it in which the states of every product are merged between all ranks."""
    from tapestry.ir.plan import MeshAxis, Plan
    from tapestry.ir.syntax.parser import parse
    from tapestry.plan.lower import lower
    from tapestry.plan.strategy import strategies

    graph, mesh = parse(layers(nbytes // 4 // WIDTH)), (MeshAxis("d0", ranks),)
    out = (1,) if scattered else (None,)
    chosen = tuple(next(s for s in strategies(op, mesh) if s.dims == ("k",) and s.out == out) for op in graph.ops)
    plan = Plan(graph=graph, mesh=mesh, strategies=chosen)
    return graph, lower(plan)


def rank_main(rank: int, asked: tuple[int, int, bool, int], port: int, slots: Any, pipe: Any) -> None:
    """One rank: run, measure, report."""
    import torch
    import torch.distributed as dist

    from tapestry.codegen.torch_cpu import TorchCpu
    from tapestry.runtime.processes.distributed import RankExecutor
    from tapestry.runtime.processes.heartbeat import Heartbeat
    from tapestry.runtime.processes.wire import Wire

    world, nbytes, scattered, batches = asked
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=not rank, timeout=timedelta(seconds=60), wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    graph, steps = program(world, nbytes, scattered)
    data = {t: torch.ones(x.shape) for t, x in graph.tensors.items()}
    source = lambda t, box: data[t][tuple(slice(*b) for b in box)].clone()  # noqa: E731
    wire, clock = Wire(rank, world, bytes(16), Heartbeat(slots, rank)), Clock()
    watch(clock)
    machine = RankExecutor(graph, steps, TorchCpu(), source, wire=wire)
    machine.connect([world])
    moved, watching, found, empty = [0.0], [0.0], list[tuple[float, float]](), clock.timed(lambda: None)
    work = {f for m in machine.moves.values() for f in (m.start, m.finish)}

    def timed(function: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            moved[0] += clock.own(function)
            watching[0] += clock.own(empty)

        return run

    machine.actions = [tuple(timed(f) if f in work else f for f in actions) for actions in machine.actions]
    for _ in range(batches):
        dist.barrier()
        moved[0] = watching[0] = 0.0
        machine.run(source)
        found.append((moved[0] - watching[0], watching[0]))
    own, watched = (statistics.median(x) / LAYERS for x in zip(*found, strict=True))
    pipe.send({"own_s": own, "watching_s": watched, "calls": machine.backend_calls})
    dist.barrier()
    os._exit(0)


def case(world: int, nbytes: int, scattered: bool, batches: int) -> Row:
    """One program on so many ranks."""
    import socket

    from tapestry.runtime.processes.heartbeat import shared

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    context, slots, pipes = multiprocessing.get_context("fork"), shared(world), list[Any]()
    for r in range(world):
        ours, theirs = context.Pipe()
        context.Process(target=rank_main, args=(r, (world, nbytes, scattered, batches), port, slots, theirs)).start()
        theirs.close()
        pipes.append(ours)
    ranks = [p.recv() for p in pipes]
    slowest = max(ranks, key=lambda r: r["own_s"])
    worst = slowest["own_s"]
    return {
        "merge": "reduce_scatter" if scattered else "all_reduce", "ranks": world, "bytes": nbytes, "own_s": worst,
        "watching_s": slowest["watching_s"],
        "backend_calls": ranks[0]["calls"],
        "ok": scattered or nbytes > 8192 or worst < LIMIT,
    }  # fmt: skip


def main() -> int:
    """Run the cases, and write what they cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4, 8])
    parser.add_argument("--bytes", nargs="*", type=int, default=[8192, 1 << 20])
    parser.add_argument("--batches", type=int, default=200)
    args = parser.parse_args()
    import tapestry.codegen.torch_cpu  # noqa: F401  (forked ranks find it imported)

    rows: list[Row] = []
    for world in args.ranks:
        for nbytes in args.bytes:
            for scattered in (False, True):
                rows.append(case(world, nbytes, scattered, args.batches))
                print(json.dumps(rows[-1]), flush=True)
    record.write("messages", rows, limit_s=LIMIT)
    return 0 if all(r["ok"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
