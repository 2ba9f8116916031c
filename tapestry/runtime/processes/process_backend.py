"""Where a rank's tensors are, and which backend of torch.distributed carries them: gloo on CPUs, NCCL on GPUs.

One GPU per rank: that of its number on its host, as torchrun counts (``LOCAL_RANK``). Beside NCCL a gloo backend carries what
is on the host (reports, values of the host), as torch does by default.
"""

from __future__ import annotations

import torch

from tapestry import flags
from tapestry.errors import RunError

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def device_of(target: str, rank: int, local: int) -> torch.device:
    """The device of a rank; its GPU becomes the current one.

    Args:
        target: what the build's kernels are for.
        local: the rank's number on its host.

    Raises:
        RunError: this host has no GPU for it.
    """
    if not target.startswith("triton") or flags.interprets() or not torch.cuda.is_available():
        return torch.device("cpu")  # without a GPU, who opens the session says what is missing
    count = torch.cuda.device_count()
    if local >= count:
        raise RunError(
            f"there is no GPU for rank {rank}",
            where=f"rank {rank}, before the first step",
            why=f"it is number {local} on its host, which has {count}",
            hint="as many processes as GPUs",
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device
