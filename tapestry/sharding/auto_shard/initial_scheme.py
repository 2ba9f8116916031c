"""The scheme that traversal starts from: the list of subgraphs cut where the weights balance."""

from __future__ import annotations

from itertools import accumulate, pairwise

from tapestry.sharding.auto_shard.scheme_cost import Problem, Scheme


def initial(problem: Problem, devices: int) -> Scheme:
    """Contiguous groups of about equal bytes, none empty.

    Bytes are the weights', as in PopRT; of a model without weights, the seconds.
    """
    count = len(problem.units)
    assert count >= devices
    sizes = problem.bytes if sum(problem.bytes) else problem.time
    before = [0, *accumulate(sizes)]
    cuts = [0]
    for k in range(1, devices):
        target = before[-1] * k / devices
        allowed = range(cuts[-1] + 1, count - (devices - k) + 1)  # every group keeps at least one subgraph
        cuts.append(min(allowed, key=lambda i: abs(before[i] - target)))
    cuts.append(count)
    return tuple(((1 << b) - 1) ^ ((1 << a) - 1) for a, b in pairwise(cuts))
