"""The processes of ``tapestry calibrate``: forked here, or one rank of those that torchrun has started on several hosts."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from tapestry import flags
from tapestry.errors import RunError
from tapestry.runtime.calibration.automatic import versions
from tapestry.runtime.calibration.call_clock import api
from tapestry.runtime.calibration.document import document
from tapestry.runtime.calibration.machine import memory_bytes
from tapestry.runtime.calibration.measure import Say, Task, measure
from tapestry.runtime.processes.process_backend import BACKENDS, device_of
from tapestry.runtime.processes.rendezvous import LOOPBACK, join
from tapestry.runtime.target_protocol import Target
from tapestry.system import cores

mp: Any = torch.multiprocessing  # its types are known in part
TIMEOUT = timedelta(seconds=120)
START_SECONDS = 40.0  # about how long a calibration takes


Given = Mapping[str, Any] | None


def _target_measured(make: Callable[[], Target], given: Given, rank: int, local: int) -> Target | torch.device:
    """The target whose kernels are measured, or the device that makes calls: each rank's own GPU, if there are any."""
    return make() if given is None else device_of("triton", rank, local)


def _backend(where: Target | torch.device) -> str:
    return BACKENDS[(where if isinstance(where, torch.device) else where.device).type]


def calibrate(
    make: Callable[[], Target],
    processes: int,
    threads: int | None,
    *,
    seconds: float = START_SECONDS,
    given: Given = None,
    say: Say = lambda done, total: None,
) -> dict[str, Any]:
    """A topology document of this machine, where so many processes work at the same time.

    Args:
        make: makes the target whose kernels are measured.
        threads: of torch, in each process; by default the cores, shared evenly.
        given: the ``device`` of the document: then calls alone are measured, between GPUs where there are some.

    Raises:
        RunError: a process failed.
    """
    task = Task(processes=processes, here=processes, threads=cores.share(processes, threads), seconds=seconds)
    with tempfile.TemporaryDirectory(prefix="tapestry-calibrate-") as folder:
        _forked(make, task, given, Path(folder), say)
        return json.loads((Path(folder) / "document").read_text())


def _forked(make: Callable[[], Target], task: Task, given: Given, folder: Path, say: Say) -> None:
    """Run the task on processes of this host; the first one writes the document into the folder."""
    progress = mp.get_context("fork").SimpleQueue()
    started = mp.start_processes(
        _child, (make, task, given, folder, progress), task.processes, join=False, daemon=True, start_method="fork"
    )
    try:
        while not started.join(0.1):
            while not progress.empty():
                say(*progress.get())
    except (ProcessRaisedException, ProcessExitedException) as e:
        raise RunError(f"rank {e.error_index} failed", why=str(e).strip().splitlines()[-1]) from None


def _child(rank: int, make: Callable[[], Target], task: Task, given: Given, folder: Path, progress: Any) -> None:
    where = _target_measured(make, given, rank, rank)
    if task.processes > 1:
        flags.network(LOOPBACK)
        store = FileStore(str(folder / "store"), task.processes)
        api.init_process_group(_backend(where), store=store, rank=rank, world_size=task.processes, timeout=TIMEOUT)
    say: Say = (lambda done, total: progress.put((done, total))) if rank == 0 else lambda done, total: None
    found = measure(rank, task, where, memory_bytes(), say)
    if rank == 0:
        (folder / "document").write_text(json.dumps(document(found, versions(), given)))
    if task.processes > 1:
        api.destroy_process_group()


def on_rank(
    make: Callable[[], Target],
    place: flags.World,
    threads: int | None,
    *,
    seconds: float = START_SECONDS,
    given: Given = None,
    say: Say = lambda done, total: None,
) -> dict[str, Any] | None:
    """What `calibrate` does, as one rank of those that a launcher started; the document on rank 0.

    Raises:
        RunError: the ranks did not meet.
    """
    store, _ = join(place, TIMEOUT.total_seconds())
    rank, world = place.rank, place.world
    where = _target_measured(make, given, rank, place.local)
    api.init_process_group(_backend(where), store=PrefixStore("calibrate", store), rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        store.set(f"host/{rank}", socket.gethostname())
        hosts: list[bytes] = [store.get(f"host/{r}") for r in range(world)]
        here = hosts.count(hosts[rank])
        each = cores.share(here, threads)
        task = Task(processes=world, here=here, threads=each, seconds=seconds, strided=world > 2)
        found = measure(rank, task, where, memory_bytes(), say)
        return document(found, {**versions(), "hosts": str(len({*hosts}))}, given) if rank == 0 else None
    finally:
        api.destroy_process_group()
