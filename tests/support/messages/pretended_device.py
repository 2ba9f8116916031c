"""A device without data and a backend that carries nothing: what runs there can neither look at a value nor bring one to the
host, as on a GPU it should not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")


def _backend(common: Any, options: Any) -> Any:
    return FakeProcessGroup._create_internal(common.group_rank, common.group_size, options)


@contextmanager
def pretended_ranks(rank: int, world: int) -> Iterator[None]:
    """torch.distributed as one rank of many sees it, for tensors on `META`."""
    if not hasattr(dist.Backend, "PRETENDED"):
        dist.Backend.register_backend("pretended", _backend, extended_api=True, devices=["meta"])
    hook = sys.excepthook  # which torch.distributed replaces by one that names the rank
    dist.init_process_group("pretended", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


class OnDevice(TorchDispatchMode):
    """Refuses every operation that touches the host, brings a value there, or makes memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation."""
        name = str(func)
        self.seen.append(name)
        new = ("empty", "clone", "_to_copy", "zeros", "ones", "full", "cat", "stack", "_local_scalar_dense")
        if any(name.startswith(f"aten.{x}") for x in new):
            raise AssertionError(f"{name} in the path of messages")
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, torch.Tensor) and x.device != META:
                raise AssertionError(f"{name} touches the host")
        return out
