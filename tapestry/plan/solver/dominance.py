"""Labels that another label of the same node beats whatever the neighbours choose (dead-end elimination).

Label b of a node may go when some label a costs no more in itself and, over all its tables together, no more against any
labels of the neighbours: ``u[a] - u[b] + sum_e max_r (T_e[a, r] - T_e[b, r]) <= 0`` (Goldstein 1994). Some optimal choice is
left then, so that the least cost, and every bound of it, stay what they were. Equal nodes with equal tables are done once:
the time grows with what is distinct, and layers that repeat cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

PairTable = tuple[tuple[int, ...], np.ndarray]
ROUNDS = 8
FEW_LABELS = 16  # labels that all others are compared with first: the cheapest ones beat most
LARGEST = 1 << 28  # differences that one table may take
SMALL = 1 << 17  # differences that are all worked out, equal columns again


@dataclass(slots=True)
class Undominated:
    """The labels of each node that are left, and for all of them the one that stands in for it.

    A choice in which every label gives way to the one that stands in for it costs no more.
    """

    kept: list[np.ndarray]
    instead: list[np.ndarray]

    @property
    def sizes(self) -> list[int]:
        """Number of labels left of each node."""
        return [len(k) for k in self.kept]

    def restrict(self, tables: Sequence[PairTable]) -> list[PairTable]:
        """The same tables over the labels that are left; one array where it was one."""
        made: dict[tuple[int | bytes, ...], np.ndarray] = {}
        out: list[PairTable] = []
        for nodes, table in tables:
            key = (id(table), *(self.kept[n].tobytes() for n in nodes))
            if key not in made:
                made[key] = np.ascontiguousarray(table[np.ix_(*(self.kept[n] for n in nodes))])
            out.append((nodes, made[key]))
        return out

    def shrink(self, choice: Sequence[int]) -> list[int]:
        """A choice of all labels as one of those that are left."""
        return [int(np.flatnonzero(k == i[c])[0]) for k, i, c in zip(self.kept, self.instead, choice, strict=True)]

    def restore(self, choice: Sequence[int]) -> list[int]:
        """A choice of the labels that are left as one of all."""
        return [int(k[c]) for k, c in zip(self.kept, choice, strict=True)]


def undominated(
    sizes: Sequence[int], tables: Sequence[PairTable], uses: Sequence[tuple[int, np.ndarray]] = ()
) -> Undominated | None:
    """Remove labels until no more go; None where none does.

    Args:
        tables: costs by node or by pair of nodes; nodes of larger groups keep all labels.
        uses: of a node, what each of its labels uses of something limited: only a label that uses no more may stand in.
    """
    state = _State(sizes, tables, uses)
    if max(sizes, default=0) > 2 * FEW_LABELS:
        state.round(FEW_LABELS)
    for _ in range(ROUNDS):
        if not state.round():
            break
    left = state.left
    return left if any(len(k) < n for k, n in zip(left.kept, sizes, strict=True)) else None


@dataclass(slots=True)
class _State:
    sizes: Sequence[int]
    tables: Sequence[PairTable]
    uses: Sequence[tuple[int, np.ndarray]]
    left: Undominated = field(init=False)
    unary: list[np.ndarray] = field(init=False)
    used: list[list[np.ndarray]] = field(init=False)
    near: list[list[tuple[np.ndarray, int, int]]] = field(init=False)
    stay: set[int] = field(default_factory=set[int])
    sets: dict[bytes, int] = field(default_factory=dict[bytes, int])
    most: dict[tuple[int | bytes, ...], np.ndarray] = field(default_factory=dict[tuple[int | bytes, ...], np.ndarray])

    def __post_init__(self) -> None:
        every = {n: np.arange(n) for n in set(self.sizes)}
        self.left = Undominated([every[n] for n in self.sizes], [every[n] for n in self.sizes])
        self.unary = [np.zeros(n) for n in self.sizes]
        self.near = [[] for _ in self.sizes]
        self.used = [[] for _ in self.sizes]
        for node, amounts in self.uses:
            self.used[node].append(amounts)
        for nodes, table in self.tables:
            if len(nodes) == 1:
                self.unary[nodes[0]] = self.unary[nodes[0]] + table
            elif len(set(nodes)) == 2 and max(table.shape) * table.size <= LARGEST:
                self.near[nodes[0]].append((table, 0, nodes[1]))
                self.near[nodes[1]].append((table, 1, nodes[0]))
            else:
                self.stay |= set(nodes)

    def round(self, few: int = 0) -> bool:
        """Every node once, against what the others had before; whether any label went.

        Args:
            few: labels of each node that the others are compared with, the cheapest ones; 0: all of them.
        """
        kept = self.left.kept
        numbers = [self.sets.setdefault(k.tobytes(), len(self.sets)) for k in kept]
        classes: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = {}
        after = Undominated(list(kept), list(self.left.instead))
        for i, near in enumerate(self.near):
            if i in self.stay or len(kept[i]) < 2:
                continue
            tables = sorted((id(t), side, numbers[j]) for t, side, j in near)
            key = (numbers[i], self.unary[i].tobytes(), *tables, *(u.tobytes() for u in self.used[i]))
            if key not in classes:
                by = self.cheapest(i, few) if few else np.arange(len(kept[i]))
                classes[key] = _dominated(self.differences(i, numbers, by), kept[i], by, self.sizes[i])
            after.kept[i] = classes[key][0]
            after.instead[i] = classes[key][1][self.left.instead[i]]
        changed = any(len(a) < len(b) for a, b in zip(after.kept, kept, strict=True))
        self.left = after
        return changed

    def cheapest(self, i: int, few: int) -> np.ndarray:
        """Some labels of a node, by their places among those that are left: the cheapest with the best labels of neighbours."""
        kept = self.left.kept
        least = self.unary[i][kept[i]]
        for table, side, j in self.near[i]:
            least = least + (table if side == 0 else table.T)[np.ix_(kept[i], kept[j])].min(axis=1)
        return np.sort(np.argsort(least, kind="stable")[:few])

    def differences(self, i: int, numbers: list[int], by: np.ndarray) -> np.ndarray:
        """[a, b]: by how much label a of a node, one of some, may at most cost more than label b, of those that are left;
        infinite where it uses more of anything."""
        own = self.left.kept[i]
        with np.errstate(invalid="ignore"):  # infinity less infinity says nothing: never at most 0
            out = self.unary[i][own[by], None] - self.unary[i][None, own]
            for table, side, j in self.near[i]:
                key = (id(table), side, numbers[i], numbers[j], by.tobytes())
                if key not in self.most:
                    whole = table if side == 0 else table.T
                    self.most[key] = _most(whole[np.ix_(own, self.left.kept[j])], by)
                out = out + self.most[key]
        for u in self.used[i]:
            out = np.where(u[own[by], None] <= u[None, own], out, np.inf)
        return out


def _most(table: np.ndarray, by: np.ndarray) -> np.ndarray:
    """[a, b]: the largest of ``table[a, r] - table[b, r]`` over the columns, for some rows and all."""
    if len(by) * table.size <= SMALL:
        return (table[by, None] - table[None]).max(axis=2)
    rows = _distinct(table)
    out = np.empty((len(by), len(rows)))
    for a, row in enumerate(rows[by]):
        (row - rows).max(axis=1, out=out[a])
    return out


def _distinct(table: np.ndarray) -> np.ndarray:
    """A table without columns that are there already: found by numbers that equal columns have alike, and looked at."""
    mix = np.random.default_rng(0).integers(1 << 63, size=(len(table), 1), dtype=np.uint64)
    _, first, of = np.unique((table.view(np.uint64) * mix).sum(axis=0), return_index=True, return_inverse=True)
    few = table[:, first]
    return few if np.array_equal(few[:, of], table) else table


def _dominated(differences: np.ndarray, kept: np.ndarray, by: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(labels left, by label the one that stands in for it) of those that were ``kept``; of equals the first one stays."""
    beats = differences <= 0
    order, mutual = np.arange(len(by)), beats[:, by]
    beats[:, by] = mutual & (~mutual.T | (order[:, None] < order[None, :]))
    left: np.ndarray = ~np.any(beats, axis=0)
    instead = np.arange(size)
    for b in np.flatnonzero(~left):
        standing = np.flatnonzero(beats[:, b] & left[by])
        left[b] = not len(standing)  # (by rounding alone)
        instead[kept[b]] = kept[by[standing[0]]] if len(standing) else kept[b]
    return kept[left], instead
