"""A certified lower bound from prices of the resource and messages of the pairs, and what it rules out.

For any prices over time and any messages, the sum of the minima of all moved costs less the price of the limits is at most
the cost of every choice that keeps to the limits (Lagrangian duality: Geoffrion 1974). So a label or a joint choice that
raises it above the cost of a known choice is in no better one (reduced-cost fixing: Dantzig, Fulkerson and Johnson 1954).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tapestry.plan.solver.pairs import PROVED, Pairs


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Price over time, and for each number of `Pairs.slots` the cost moved from the node's label to the pair."""

    price: np.ndarray
    tails: np.ndarray
    heads: np.ndarray


@dataclass(frozen=True, slots=True)
class Certificate:
    """The bound, and how much each label and each joint choice adds to it at least."""

    bound: float
    label: np.ndarray
    joint: np.ndarray


def certify(net: Pairs, given: Multipliers) -> Certificate:
    """Evaluate the bound from scratch, whoever found the multipliers."""
    price = np.maximum(given.price, 0.0)
    sa, of_a, sb, of_b = net.slots()
    moved = net.unary + net.usage.priced(price, len(net.unary))
    moved = moved - np.bincount(of_a, given.tails, len(moved)) - np.bincount(of_b, given.heads, len(moved))
    least = np.full(len(net.gone), np.inf)
    np.minimum.at(least, net.node, moved)
    joint = net.cost + given.tails[sa] + given.heads[sb]
    least_pair = np.full(len(net.tail), np.inf)
    np.minimum.at(least_pair, net.edge, joint)
    left = np.isfinite(least)
    bound = net.constant + float(least[left].sum() + least_pair.sum() - (price * net.usage.limit).sum())
    joint = joint - least_pair[net.edge]
    extra = np.where(net.alive(), moved - np.where(left, least, 0.0)[net.node], np.inf)
    best_a, best_b = np.full(len(of_a), np.inf), np.full(len(of_b), np.inf)
    np.minimum.at(best_a, sa, joint)
    np.minimum.at(best_b, sb, joint)
    for best, of in ((best_a, of_a), (best_b, of_b)):
        best[~net.alive()[of]] = 0.0
        extra = extra + np.bincount(of, best, len(extra))
    joint = joint + (extra[net.a] - best_a[sa]) + (extra[net.b] - best_b[sb])
    return Certificate(bound, extra, joint)


def rule_out(net: Pairs, proof: Certificate, cost: float) -> int:
    """Forbid labels and joint choices that only choices dearer than ``cost`` can use; how many."""
    slack = cost - proof.bound + PROVED * abs(cost)
    dead = (proof.label > slack) & net.alive()
    net.unary[dead] = np.inf
    keep = proof.joint <= slack
    net.keep(keep)
    return int(dead.sum()) + int((~keep).sum())
