"""Labels that others beat: what is left has the same least cost, and what stands in for a label is no dearer and uses no more."""

from __future__ import annotations

import numpy as np
import pytest

from tapestry.plan.solver import dominance
from tapestry.plan.solver.dominance import FEW_LABELS, undominated
from tapestry.plan.solver.elimination import minimise

LABELS = 3 * FEW_LABELS  # more than are compared with all others first


def chain(seed: int, nodes: int = 4) -> tuple[list[int], list[tuple[tuple[int, ...], np.ndarray]]]:
    """A chain whose labels come in kinds, so that many beat others or are equal; some pairs are forbidden."""
    rng = np.random.default_rng(seed)
    tables: list[tuple[tuple[int, ...], np.ndarray]] = []
    for n in range(nodes):
        tables.append(((n,), rng.integers(0, 12, LABELS).astype(float)))
        if n:
            kinds = rng.integers(0, 9, (6, 6)).astype(float)
            kinds[rng.random((6, 6)) < 0.1] = np.inf
            rows, columns = rng.integers(0, 6, LABELS), rng.integers(0, 6, LABELS)
            tables.append(((n - 1, n), kinds[rows][:, columns]))
    return [LABELS] * nodes, tables


def cost(tables: list[tuple[tuple[int, ...], np.ndarray]], choice: list[int]) -> float:
    return float(sum(t[tuple(choice[n] for n in nodes)] for nodes, t in tables))


@pytest.mark.parametrize("small", [0, dominance.SMALL])
@pytest.mark.parametrize("seed", range(20))
def test_the_least_cost_stays(seed: int, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large tables are: equal columns are looked at once, or again."""
    monkeypatch.setattr(dominance, "SMALL", small)
    sizes, tables = chain(seed)
    fewer = undominated(sizes, tables)
    whole = minimise(sizes, tables, 10**6)
    assert fewer is not None and whole is not None and sum(fewer.sizes) < LABELS * len(sizes)
    small = minimise(fewer.sizes, fewer.restrict(tables), 10**6)
    assert small is not None and small[0] == whole[0] == cost(tables, fewer.restore(small[1]))


@pytest.mark.parametrize("seed", range(20))
def test_what_stands_in_is_no_worse(seed: int) -> None:
    """Of any choice of all labels, and of what it uses."""
    sizes, tables = chain(seed)
    rng = np.random.default_rng(seed)
    uses = [(n, rng.integers(0, 4, LABELS).astype(float)) for n in range(len(sizes))]
    fewer = undominated(sizes, tables, uses)
    assert fewer is not None
    for node, amounts in uses:
        assert (amounts[fewer.instead[node]] <= amounts).all()
    for _ in range(200):
        choice = rng.integers(0, LABELS, len(sizes)).tolist()
        instead = fewer.restore(fewer.shrink(choice))
        assert cost(tables, instead) <= cost(tables, choice)
