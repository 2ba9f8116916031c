"""Large neighbourhood search (Shaw 1998): integer programs around the best choice.

A neighbourhood keeps the best choice, and either the labels and joint choices that the bound says are nearly free, or those
of the nodes around a few random ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tapestry.plan.solver.bound import Certificate
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.incumbent import Search, Stage, integer
from tapestry.plan.solver.network_reduction import Reduction, reduce
from tapestry.plan.solver.pairs import Infeasible, Pairs

PART = 30_000  # joint choices of a neighbourhood, at first
TURN = 0.05  # of the budget, for one, at first
LEAST = 0.2 * SECOND  # below which none is begun


@dataclass(slots=True)
class Kind:
    """One kind of neighbourhood: its size in joint choices and the work for one, fitted to what was solved before."""

    units: float
    size: int = field(default_factory=lambda: PART)
    worth: float = 1.0  # improvements of late

    def learn(self, solved: bool, spent: float, won: float, most: int) -> None:
        """After one that took so many units and made the best choice cheaper by this part."""
        if not solved:
            self.size = int(self.size * 0.8) + 1
            self.units *= 1.0 if won else 1.3
        else:  # the same one again would bring nothing
            self.size = min(int(self.size * (1.3 if spent < self.units / 4 else 1.1)) + 1, most)
        self.worth = max(0.7 * self.worth + 0.3 * min(won / max(spent / SECOND, 0.1) * 1e4, 1.0), 0.1)


def kinds(units: float) -> dict[str, Kind]:
    """Of a search that has so many units."""
    turn = min(max(TURN * units, 5.0 * SECOND), 60.0 * SECOND)
    return {"cheapest": Kind(turn), "around": Kind(turn)}


def improve(state: Search, stage: Stage, budget: Budget, known: dict[str, Kind], rng: np.random.Generator) -> None:
    """Search neighbourhoods of the best choice for a while; the last one may go on for its turn."""
    proof, most = stage.proof(), stage.net.weight()
    for k in known.values():
        k.worth = 1.0
    while budget.left() > LEAST and not state.closed():
        part, cost, begin = stage.done.copy(), state.cost, budget.meter.spent
        share = known["cheapest"].worth / sum(k.worth for k in known.values())
        name = "cheapest" if not np.isfinite(cost) or rng.random() < share else "around"
        kind = known[name]
        if name == "cheapest":
            small = _cheapest(state, stage.net, part, proof, kind.size)
        else:
            small = _around(state, stage.net, part, proof, kind.size, rng)
        if small is None or not len(small.nodes()):
            if small is not None:
                state.offer(small, part, np.zeros(0, np.int64))
            kind.size = min(int(kind.size * 1.2) + 1, most)
            budget.spend(100 * most)
            continue
        solved, _ = integer(state, small, part, state.budget.part(min(kind.units, 0.2 * state.budget.left() + SECOND)))
        won = (cost - state.cost) / abs(cost) if np.isfinite(cost) and cost else 0.0
        budget.spend(100 * most)
        kind.learn(solved, budget.meter.spent - begin, won, most)
        state.note(f"neighbourhood ({name}) of {len(small.a)} joint choices{'' if solved else ', cut off'}")


def _restrict(state: Search, net: Pairs, done: Reduction, labels: np.ndarray, joint: np.ndarray) -> Pairs:
    """Only these labels and joint choices, and those of the best choice."""
    small = net.copy()
    best = np.zeros(len(net.unary), bool)
    if np.isfinite(state.cost):
        best[state.labels(net)] = True
    small.unary[~(labels | best)] = np.inf
    small.keep(joint | (best[net.a] & best[net.b]))
    reduce(small, done)
    return small


def _cheapest(state: Search, net: Pairs, done: Reduction, proof: Certificate, size: int) -> Pairs | None:
    """The labels and joint choices that add least to the bound, as many as ``size`` joint choices."""
    order = np.sort(proof.joint)
    at, out, kept = size // 2, None, done
    while at < 2 * len(order):
        most = order[min(at, len(order) - 1)]
        steps = done.copy()
        try:
            small = _restrict(state, net, steps, proof.label <= most, proof.joint <= most)
        except Infeasible:  # too few, while no choice is known
            at = int(at * 1.5)
            continue
        if len(small.a) > size and out is not None:
            break
        out, kept = small, steps
        at = int(at * 1.5)
    if out is not None:
        done.steps = kept.steps
    return out


def _around(
    state: Search, net: Pairs, done: Reduction, proof: Certificate, size: int, rng: np.random.Generator
) -> Pairs | None:
    """What adds little to the bound on the nodes around a random one, and the best choice elsewhere."""
    most = (state.cost - proof.bound) * float(rng.choice([1.0, 0.5, 0.2, 0.1, 0.05]))
    free = np.zeros(len(net.gone), bool)
    free[rng.choice(net.nodes(), int(rng.integers(1, 4)))] = True
    weight = np.bincount(net.edge, proof.joint <= most, len(net.tail))
    while True:
        inside = free[net.tail] & free[net.head]
        border = np.unique(np.concatenate([net.head[free[net.tail]], net.tail[free[net.head]]]))
        border = rng.permutation(border[~free[border]])
        border = border[: max(1, len(border) // 2)]
        if weight[inside].sum() > size or free[net.nodes()].all():
            break
        free[border if len(border) else rng.choice(net.nodes())] = True
    label = free[net.node] & (proof.label <= most)
    return _restrict(state, net, done, label, proof.joint <= most)
