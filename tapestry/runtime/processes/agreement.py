"""What all ranks must have in common, before the first step and before each batch: ranks of different worlds would give a
wrong answer, and no error."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from tapestry import flags
from tapestry.errors import RunError
from tapestry.ir.graph import Graph
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.plugins import entry_points as plugins
from tapestry.runtime.processes import host_values
from tapestry.runtime.processes.rendezvous import seal, unseal
from tapestry.runtime.processes.wire import VERSION, PeerLost, reason
from tapestry.runtime.session import check_feeds

if TYPE_CHECKING:
    from tapestry.runtime.processes.worker import Job, Rank

_dist: Any = dist  # its functions have no types
DIGEST = 32  # bytes of SHA-256
HINTS = {
    "threads": "--threads, the same on all hosts", "seed": "--seed, the same on all hosts",
    "batches": "--inputs, the same on all hosts", "inputs": "--input, the same on all hosts",
}  # fmt: skip


def world_of(job: Job, device: torch.device) -> dict[str, Any]:
    """All that results depend on and that a rank cannot see of another one."""
    matmul = torch.backends.cuda.matmul
    return {
        "build": job.identity, "tapestry": importlib.metadata.version("tapestry"), "messages": VERSION,
        "torch": str(torch.__version__), "byte order": sys.byteorder, "devices": job.build.program.devices,
        "batches": [b.name for b in job.batches], "inputs": sorted({n for b in job.batches for n, _ in b.inputs}),
        "seed": sorted({b.seed for b in job.batches if b.source is None}), "threads": job.threads,
        "target": plugins.brought_by("targets", job.build.target),
        "kind of device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        **{f"set of kernels ({k})": v for k, v in job.kernels.items()},
        "precision of products": [torch.get_float32_matmul_precision(), matmul.allow_tf32],
        **{f"environment ({k})": v for k, v in flags.of_results().items()},
    }  # fmt: skip


def agree(me: Rank, job: Job, device: torch.device, todo: list[int]) -> set[int]:
    """The batches that rank 0 wants done, once all ranks are of one world.

    Raises:
        RunError: a rank differs (in what, and which), or did not come.
    """
    about = {"agree": world_of(job, device), "host": socket.gethostname(), "pid": os.getpid(), "local": me.local, "todo": todo}
    me.store.set(f"hello/{me.rank}", seal(me.secret, about | {"machine": platform.machine()}))
    everybody = _collect(me, job.timeout)
    for r, other in enumerate(everybody):
        for key, value in other["agree"].items():
            if value != everybody[0]["agree"][key]:
                raise RunError(
                    f"rank {r} has another {key} than rank 0", where=f"rank {r} on {other['host']}, before the first step",
                    why=f"{value!r}, not {everybody[0]['agree'][key]!r}"[:400],
                    hint=HINTS.get(key, "the same build directory, versions and settings everywhere"),
                )  # fmt: skip
    if device.type == "cuda":
        gpus = [(other["host"], other["local"]) for other in everybody]
        twice = next((r for r, gpu in enumerate(gpus) if gpu in gpus[:r]), None)
        if twice is not None:
            host, local = gpus[twice]
            raise RunError(
                f"ranks {gpus.index(gpus[twice])} and {twice} are both number {local} on {host}", hint="LOCAL_RANK for each"
            )
    return set(everybody[0]["todo"])


def _collect(me: Rank, timeout: float) -> list[dict[str, Any]]:
    """What every rank has said of itself."""
    end = time.monotonic() + timeout
    missing = list(range(me.world))
    while missing:
        missing = [r for r in missing if not me.store.check([f"hello/{r}"])]
        if missing and time.monotonic() > end:
            raise RunError(
                f"rank {', '.join(map(str, missing))} did not come within {timeout:g} s",
                where=f"rank {missing[0]}, before the first step",
            )
        if missing:
            time.sleep(0.01)
    return [unseal(me.secret, me.store.get(f"hello/{r}"), r) for r in range(me.world)]


def same_inputs(me: Rank, graph: Graph, batch: str, feeds: Mapping[str, Any], waiting: Callable[[], None]) -> None:
    """Compare the inputs of a batch, as the ranks have read them, by their hashes; all ranks go on, or none.

    Raises:
        RunError: an input differs. PeerLost: a rank is gone. TapestryError: one is missing, or of another shape or dtype.
    """
    checked = check_feeds(feeds, [graph.tensors[t] for t in graph.inputs])
    if me.world == 1 or not graph.inputs:
        return
    own = torch.frombuffer(bytearray(b"".join(_digest(checked[t]) for t in graph.inputs)), dtype=torch.uint8)
    extremes = torch.cat((own, 255 - own))
    waiting()
    try:
        _dist.all_reduce(extremes, dist.ReduceOp.MAX)
    except RuntimeError as e:
        raise PeerLost([r for r in range(me.world) if r != me.rank], -1, reason(e)) from None
    greatest, least = extremes.chunk(2)
    if bool((greatest == 255 - least).all()):
        return
    everybody = [torch.empty_like(own) for _ in range(me.world)]  # all ranks come here, or none
    _dist.all_gather(everybody, own)
    rank = next(r for r, theirs in enumerate(everybody) if not torch.equal(theirs, everybody[0]))
    first = int(torch.nonzero(everybody[rank] != everybody[0])[0])
    raise RunError(
        f"rank {rank} has another input '{graph.inputs[first // DIGEST]}' than rank 0 in {batch}",
        where=f"rank {rank}, before the first step of {batch}", hint="the same files on all hosts",
    )  # fmt: skip


def _digest(value: Any) -> bytes:
    if isinstance(value, HostValue):
        return hashlib.sha256(host_values.encode(value.value)).digest()
    return hashlib.sha256(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data).digest()
