"""Going on from an earlier search: its strategies as a start, and its bound where the problem is the very same.

A bound holds for one network of costs, one topology and one memory limit. So it is kept with a hash of all of these, and used
again only where a problem that was built anew has the same hash; strategies are only a choice, which any problem may try.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tapestry.ir.plan import Plan, Strategy, still
from tapestry.ir.syntax.printer import to_text
from tapestry.plan.search.problem import Problem
from tapestry.plan.topology import to_data


@dataclass(frozen=True, slots=True)
class Start:
    """What an earlier search found.

    Attributes:
        strategies: of the operations that make a tensor, by its name.
        bound: seconds; no plan of the problem with this key is faster.
        key: `fingerprint` of the problem.
    """

    strategies: Mapping[str, Strategy] = field(default_factory=dict[str, Strategy])
    bound: float = -np.inf
    key: str = ""


def start_of(plan: Plan, bound: float = -np.inf, key: str = "") -> Start:
    """The strategies of a plan, by the first tensor that each operation makes."""
    return Start({op.outs[0]: s for op, s in zip(plan.graph.ops, plan.strategies, strict=True)}, bound, key)


def beginning(problem: Problem, start: Start) -> list[int] | None:
    """The earlier strategies as a choice; None when hardly any is offered here.

    An operation without one takes the choice that is cheapest together with those of its neighbours.
    """
    choice = [-1] * len(problem.menus)
    for i, (op, menu) in enumerate(zip(problem.graph.ops, problem.menus, strict=True)):
        known = start.strategies.get(op.outs[0])
        known = None if known is None else still(known)
        if known is not None and known in menu.strategies:
            choice[i] = menu.strategies.index(known)
    if 2 * sum(c >= 0 for c in choice) < len(choice):
        return None
    return _completed(problem, choice)


def _completed(problem: Problem, choice: list[int]) -> list[int]:
    out, missing = list(choice), {i for i, c in enumerate(choice) if c < 0}
    total = {i: np.zeros(len(problem.menus[i].strategies)) for i in missing}
    for f in problem.factors:
        for k, n in enumerate(f.nodes):
            if n in missing and all(out[m] >= 0 for m in f.nodes if m != n):
                total[n] = total[n] + f.table[tuple(slice(None) if j == k else out[m] for j, m in enumerate(f.nodes))]
    for i in missing:
        out[i] = int(total[i].argmin())
    return out


def fingerprint(problem: Problem) -> str:
    """SHA-256 of all that the bound of a problem depends on: graph, devices, layouts, strategies, costs and memory."""
    found = hashlib.sha256(b"simulated seconds")
    seen: dict[int, int] = {}

    def add(*arrays: np.ndarray) -> None:
        for a in arrays:
            found.update(f"{a.dtype.str}{a.shape}".encode())
            found.update(np.ascontiguousarray(a).tobytes())

    found.update(to_text(problem.graph).encode())
    for part in (
        to_data(problem.topo),
        sorted(problem.inputs.items()),
        sorted(problem.outputs.items()),
        sorted(problem.streamed),
    ):
        found.update(repr(part).encode())
    for menu in problem.menus:
        if id(menu) not in seen:
            seen[id(menu)] = len(seen)
            found.update(repr(menu.strategies).encode())
            add(menu.seconds, menu.state_bytes, menu.outs_bytes)
        found.update(f"menu {seen[id(menu)]}".encode())
    for f in problem.factors:
        if id(f.table) not in seen:
            seen[id(f.table)] = len(seen)
            add(f.table)
        found.update(f"table {f.nodes} {seen[id(f.table)]}".encode())
    return found.hexdigest()
