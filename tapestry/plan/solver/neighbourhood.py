"""Large neighbourhood search (Shaw 1998): integer programs around the best choice.

A neighbourhood keeps the best choice, and either the labels and joint choices that the bound says are nearly free, or those
of the nodes around a few random ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tapestry.plan.solver.ascent import Messages
from tapestry.plan.solver.budget import SECOND, Budget
from tapestry.plan.solver.crossover import Mixture
from tapestry.plan.solver.incumbent import Search, Stage, begin, integer, take
from tapestry.plan.solver.network_reduction import Reduction, reduce
from tapestry.plan.solver.pairs import Certificate, Infeasible, Pairs

PART = 30_000  # joint choices of a neighbourhood, at first
TURN = 0.05  # of the budget, for one, at first
ROUNDS = 20  # of mixing without a better choice before something else is tried
PRICES = (0.95, 1.0, 1.05, 1.1, 1.2)  # times the best prices, for choices to mix
SEEDS = 300  # nodes for each random one that others are near to
HELD = (0.05, 0.1, 0.3, 0.5, 0.7)  # part of the nodes that keep their labels
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
    return {"cheapest": Kind(turn), "around": Kind(turn), "mixed": Kind(turn)}


def improve(state: Search, stage: Stage, budget: Budget, known: dict[str, Kind], rng: np.random.Generator) -> None:
    """Search neighbourhoods of the best choice for a while; the last one may go on for its turn."""
    proof, most = stage.proof(), stage.net.weight()
    names, near = list(known), None
    for k in known.values():
        k.worth = 1.0
    while budget.left() > LEAST and not state.closed():
        cost, begin = state.cost, budget.meter.spent
        worth = np.array([known[n].worth if np.isfinite(cost) or n == "cheapest" else 0.0 for n in names])
        name = names[int(rng.choice(len(names), p=worth / worth.sum()))]
        budget.spend(100 * most)
        if name == "mixed":
            near = near or Nearby(stage)
            solved, size = near.run(state, budget, rng), most
        else:
            solved, size = _solve(state, stage, proof, known[name], name, rng)
        won = (cost - state.cost) / abs(cost) if np.isfinite(cost) and cost else 0.0
        if size:
            known[name].learn(solved, budget.meter.spent - begin, won, most)
            state.note(f"neighbourhood ({name}) of {size} joint choices{'' if solved else ', cut off'}")


def _solve(
    state: Search, stage: Stage, proof: Certificate, kind: Kind, name: str, rng: np.random.Generator
) -> tuple[bool, int]:
    """The integer program of a neighbourhood: (whether to the end, joint choices: none where it was too small)."""
    part, most = stage.done.copy(), stage.net.weight()
    if name == "cheapest":
        small = _cheapest(state, stage.net, part, proof, kind.size)
    else:
        small = _around(state, stage.net, part, proof, kind.size, rng)
    if small is None or not len(small.nodes()):
        if small is not None:
            state.offer(small, part, np.zeros(0, np.int64))
        kind.size = min(int(kind.size * 1.2) + 1, most)
        return True, 0
    solved, _ = integer(state, small, part, state.budget.part(min(kind.units, 0.2 * state.budget.left() + SECOND)))
    return solved, len(small.a)


class Nearby:
    """Choices that messages find where some random nodes keep the labels of the best one, mixed into it.

    The nodes that are held cut the network into small parts, for which messages are nearly exact, all at once; whether a part
    takes its new labels is decided by what it saves and by the limits (`plan.solver.ascent`).
    """

    def __init__(self, stage: Stage) -> None:
        self.stage, self.messages = stage, Messages(stage.net)
        self.mixture = Mixture(self.messages)
        self.degree = stage.net.degree()[self.messages.nodes] + 1.0

    def run(self, state: Search, budget: Budget, rng: np.random.Generator) -> bool:
        """Some rounds, more while they bring something; whether the budget held."""
        if self.mixture.best is None or self.mixture.cost + self.stage.net.constant > state.cost:
            begin(state, self.stage.net, self.mixture)
        if self.mixture.best is None:  # ruled out: it is optimal, but for what the bound cannot tell
            return True
        stall = 0
        while stall < ROUNDS and not budget.over() and not state.closed():
            stall = 0 if self._round(budget, rng) else stall + 1
            if not stall:
                take(state, self.stage, self.mixture)
        return not budget.over()

    def _round(self, budget: Budget, rng: np.random.Generator) -> bool:
        """One choice more; whether the best is better."""
        messages = self.messages
        price = self.stage.price * float(rng.choice(PRICES))
        unary = messages.priced(price)
        best = messages.first + self.mixture.ranks()
        held = self._held(rng)
        unary = unary + np.where(np.repeat(held, messages.count), messages.large, 0.0)
        unary[best] -= np.where(held, messages.large, 0.0)
        if rng.random() < 0.5:
            messages.message = np.zeros_like(messages.message)
        sweeps = int(rng.choice([1, 3]))
        for _ in range(sweeps):
            messages.sweep(unary, reverse=False)
            messages.sweep(unary, reverse=True)
        choice = messages.descend(unary, messages.decode(unary), 5)
        budget.spend((2 * sweeps + 2) * messages.work + self.mixture.work)
        return self.mixture.add(self.mixture.labels(choice), price)

    def _held(self, rng: np.random.Generator) -> np.ndarray:
        """Nodes that keep their labels: some anywhere, and half the time all those that are not near a random one."""
        net, nodes = self.stage.net, self.messages.nodes
        weight = self.degree if rng.random() < 0.7 else np.ones(len(nodes))
        held = rng.random(len(nodes)) < np.minimum(weight / weight.mean() * float(rng.choice(HELD)), 0.95)
        if rng.random() < 0.5:
            return held
        near = np.zeros(len(net.gone), bool)
        near[rng.choice(nodes, int(rng.integers(1, 1 + max(1, len(nodes) // SEEDS))))] = True
        for _ in range(int(rng.integers(2, 12))):
            a, b = near[net.tail], near[net.head]
            near[net.head[a]] = True
            near[net.tail[b]] = True
            if near.sum() > 0.3 * len(nodes):
                break
        return held & (rng.random() < 0.5) | ~near[nodes]


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
