"""The process groups that a program's collectives run in: axes of one DeviceMesh, and others that steps need, made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout  # pyright: ignore[reportPrivateUsage]

_dist: Any = dist  # its functions have no types
Partition = tuple[tuple[int, ...], ...]
"""Ranks that call together; every rank is in one group at most."""


@dataclass(frozen=True, slots=True)
class Team:
    """Ranks that call together, this one among them, and their process group."""

    ranks: tuple[int, ...]
    group: Any

    def others(self, rank: int) -> tuple[int, ...]:
        """All but one."""
        return tuple(r for r in self.ranks if r != rank)


class Groups:
    """Teams by partition. Every rank must make them for the same list of partitions, since making one is a collective.

    Args:
        teams: those that there are already, of programs before; new ones are added.
    """

    def __init__(
        self,
        device: str,
        mesh: Sequence[int],
        partitions: Sequence[Partition],
        timeout: timedelta,
        teams: dict[Partition, Team | None],
    ) -> None:
        self.rank, self.teams = dist.get_rank(), teams
        everybody = tuple(range(dist.get_world_size()))
        teams[(everybody,)] = Team(everybody, dist.group.WORLD)
        wanted = {p: None for p in map(ordered, partitions) if p not in teams}
        if prod(mesh) == len(everybody) and any(axis_groups(mesh, a) in wanted for a in range(len(mesh))):
            self._axes(device, mesh, timeout)
        for partition in wanted:
            if partition not in teams:
                mine, _ = _dist.new_subgroups_by_enumeration([list(g) for g in partition], timeout=timeout)
                self._keep(partition, mine)

    def _axes(self, device: str, mesh: Sequence[int], timeout: timedelta) -> None:
        """One group per axis of the plan's mesh."""
        devices = init_device_mesh(device, tuple(mesh))
        for axis in range(len(mesh)):
            group: Any = devices.get_group(axis)
            _set_pg_timeout(timeout, group)
            self._keep(axis_groups(mesh, axis), group)

    def _keep(self, partition: Partition, group: Any) -> None:
        ranks = next((g for g in partition if self.rank in g), None)
        self.teams.setdefault(partition, None if ranks is None else Team(ranks, group))

    def team(self, partition: Partition) -> Team | None:
        """The team of this rank, its ranks in ascending order; ``None`` where it takes no part."""
        return self.teams[ordered(partition)]


def ordered(partition: Partition) -> Partition:
    """A partition with its ranks in ascending order, as process groups have them."""
    return tuple(sorted(tuple(sorted(g)) for g in partition))


def axis_groups(mesh: Sequence[int], axis: int) -> Partition:
    """Ranks that differ along one axis of a mesh alone (numbered row by row)."""
    stride = prod(mesh[axis + 1 :])
    firsts = (sum(k * prod(mesh[a + 1 :]) for a, k in enumerate(c)) for c in product(*map(range, mesh)) if c[axis] == 0)
    return tuple(sorted(tuple(first + k * stride for k in range(mesh[axis])) for first in firsts))
