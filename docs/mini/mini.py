"""A sharding compiler in one file: the idea of Tapestry, small enough to read in one sitting.

An operation is an index space, affine reads, and a body. Cut one dimension of the space over the devices, and everything
follows: what a device computes (its block), what it needs (the image of the block under the reads), and what must be sent to it
(what it needs less what it holds). Brute force tries every cut. A checker, which shares no code with the planner, goes through
every point.

Run it with ``python docs/mini/mini.py``; the walk-through is in README.md beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

# --------------------------------------------------------------------------------------------------------------------------
# 1. Data: four classes


@dataclass(frozen=True)
class Read:
    """A tensor, and for each of its axes the index that is read: a sum of dimensions with coefficients.

    ``Read("x", [{"i": 1}, {"m": 1}])`` is x[i, m]; ``Read("x", [{"i": 2, "r": 1}])`` is x[2*i + r].
    """

    tensor: str
    index: list[dict[str, int]]


@dataclass(frozen=True)
class Op:
    """``out[dims] = monoid over reduce of body(reads)``, with a last step ``then`` on every cell."""

    out: str
    dims: dict[str, int]  # name → size; these are the axes of the result
    reduce: dict[str, int]  # name → size; these are summed (or whatever the monoid does)
    reads: list[Read]
    body: Callable[..., np.ndarray]
    monoid: str = "sum"
    then: Callable[[np.ndarray], np.ndarray] = lambda x: x


@dataclass(frozen=True)
class Graph:
    """Input tensors with their shapes, and operations in an order in which they can be computed."""

    inputs: dict[str, tuple[int, ...]]
    ops: list[Op]

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of an input or a result."""
        return self.inputs.get(tensor) or next(tuple(op.dims.values()) for op in self.ops if op.out == tensor)


@dataclass(frozen=True)
class Plan:
    """For every operation the dimension that is cut over the devices (or None), and the messages before it."""

    graph: Graph
    devices: int
    cut: dict[str, str | None]
    messages: dict[str, list[Message]]


Box = tuple[range, ...]  # one range per axis or dimension
Message = tuple[int, int, str, Box]  # from device, to device, tensor, cells
MONOIDS: dict[str, tuple[np.ufunc, float]] = {"sum": (np.add, 0.0), "max": (np.maximum, -np.inf)}

# --------------------------------------------------------------------------------------------------------------------------
# 2. A split, and what follows from it


def part(k: int, n: int, parts: int) -> range:
    """Part ``k`` of ``n`` cells in ``parts`` balanced parts; sizes differ by at most one."""
    return range(k * n // parts, (k + 1) * n // parts)


def block(plan: Plan, op: Op, device: int) -> dict[str, range]:
    """What a device computes of an operation: a range for every dimension."""
    sizes = {**op.dims, **op.reduce}
    return {d: part(device, n, plan.devices) if d == plan.cut[op.out] else range(n) for d, n in sizes.items()}


def image(read: Read, ranges: Mapping[str, range]) -> Box:
    """What a block reads: the smallest box that holds every cell. Coefficients are not negative here."""
    if any(not ranges[d] for terms in read.index for d in terms):
        return tuple(range(0) for _ in read.index)
    low = [sum(c * ranges[d][0] for d, c in terms.items()) for terms in read.index]
    high = [sum(c * ranges[d][-1] for d, c in terms.items()) for terms in read.index]
    return tuple(range(a, b + 1) for a, b in zip(low, high))


def held(plan: Plan, tensor: str, device: int) -> Box | None:
    """What a device has of a result: its block, or everything where a reduced dimension was cut (and then all-reduced)."""
    op = next((o for o in plan.graph.ops if o.out == tensor), None)
    if op is None:
        return None  # an input: every device loads what it needs from the host
    ranges = {d: range(n) for d, n in op.dims.items()} if plan.cut[tensor] in op.reduce else block(plan, op, device)
    return tuple(ranges[d] for d in op.dims)


def needed(plan: Plan, op: Op, device: int) -> Iterator[Message]:
    """The messages to a device before an operation: what it needs less what it holds, from whoever holds it."""
    for read in op.reads:
        mine = held(plan, read.tensor, device)
        if mine is None:
            continue
        need = image(read, block(plan, op, device))
        for axis, (want, have) in enumerate(zip(need, mine)):
            if want and not (have and have[0] <= want[0] and want[-1] <= have[-1]):  # only the cut axis can fall short
                for source in range(plan.devices):
                    theirs = held(plan, read.tensor, source)[axis]
                    cells = range(max(want.start, theirs.start), min(want.stop, theirs.stop))
                    if source != device and cells:
                        yield source, device, read.tensor, (*need[:axis], cells, *need[axis + 1 :])
                break


def plan_for(graph: Graph, devices: int, cut: dict[str, str | None]) -> Plan:
    """The plan that cuts each operation so: only the messages are worked out."""
    bare = Plan(graph, devices, cut, {})
    return Plan(graph, devices, cut, {op.out: [m for d in range(devices) for m in needed(bare, op, d)] for op in graph.ops})


# --------------------------------------------------------------------------------------------------------------------------
# 3. Brute force

FLOPS, LINK, HOST, LATENCY = 1e9, 1e8, 1e9, 1e-6  # per second; bytes per second; bytes per second; seconds


def cells(box: Box) -> int:
    """How many cells a box has."""
    return int(np.prod([len(r) for r in box]))


def cost(plan: Plan) -> float:
    """Estimated seconds: for every operation the slowest device's loads, messages and arithmetic, then its all-reduce."""
    total = 0.0
    for op in plan.graph.ops:
        slowest = 0.0
        for device in range(plan.devices):
            mine = block(plan, op, device)
            loads = sum(4 * cells(image(r, mine)) / HOST for r in op.reads if r.tensor in plan.graph.inputs)
            arrivals = [m for m in plan.messages[op.out] if m[1] == device]
            wire = sum(LATENCY + 4 * cells(m[3]) / LINK for m in arrivals)
            slowest = max(slowest, loads + wire + 2 * cells(tuple(mine.values())) / FLOPS)
        if plan.cut[op.out] in op.reduce:  # a ring all-reduce
            rounds = 2 * (plan.devices - 1)
            slowest += rounds * (LATENCY + 4 * np.prod(list(op.dims.values())) / plan.devices / LINK)
        total += slowest
    return total


def best(graph: Graph, devices: int) -> Plan:
    """The cheapest of all plans. Tapestry solves this exactly without trying them all."""
    choices = [[None, *op.dims, *op.reduce] for op in graph.ops]
    names = [op.out for op in graph.ops]
    return min((plan_for(graph, devices, dict(zip(names, c))) for c in itertools.product(*choices)), key=cost)


# --------------------------------------------------------------------------------------------------------------------------
# 4. Running: every device has its own memory, and nothing else


def compute(op: Op, ranges: Mapping[str, range], tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """The state of a block: its points' values, merged over the reduced dimensions (``then`` is not applied)."""
    names = [*op.dims, *op.reduce]
    grid = dict(zip(names, np.ix_(*[list(ranges[d]) for d in names])))
    values = [
        tensors[r.tensor][tuple(sum((c * grid[d] for d, c in t.items()), np.zeros((1,) * len(names), int)) for t in r.index)]
        for r in op.reads
    ]
    points = np.broadcast_to(op.body(*values), [len(ranges[d]) for d in names])
    merge, identity = MONOIDS[op.monoid]
    return merge.reduce(points, axis=tuple(range(len(op.dims), len(names))), initial=identity) if op.reduce else points


def run(plan: Plan, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All results, put together from what the devices hold. Cells that nobody computed or sent stay NaN."""
    memory = [{t: np.full(plan.graph.shape(t), np.nan) for t in plan.cut} | dict(inputs) for _ in range(plan.devices)]
    for op in plan.graph.ops:
        for source, target, tensor, box in plan.messages[op.out]:
            memory[target][tensor][np.ix_(*box)] = memory[source][tensor][np.ix_(*box)]
        states = [compute(op, block(plan, op, d), memory[d]) for d in range(plan.devices)]
        if plan.cut[op.out] in op.reduce:
            states = [MONOIDS[op.monoid][0].reduce(states)] * plan.devices
        for device, state in enumerate(states):
            memory[device][op.out][np.ix_(*held(plan, op.out, device))] = op.then(state)
    return {t: _gathered([m[t] for m in memory]) for t in plan.cut}


def _gathered(copies: list[np.ndarray]) -> np.ndarray:
    out = copies[0].copy()
    for copy in copies[1:]:
        out = np.where(np.isnan(out), copy, out)
    return out


# --------------------------------------------------------------------------------------------------------------------------
# 5. The checker: point by point, with none of the code of part 2


class Broken(Exception):
    """A plan that would compute something else; the message names a point."""


def check(plan: Plan) -> int:
    """Replay a plan on sets of cells; returns how many reads were checked, raises `Broken` at the first that is not there."""
    graph, checked = plan.graph, 0
    have: dict[tuple[int, str], set[tuple[int, ...]]] = {}
    for op in graph.ops:
        for source, target, tensor, box in plan.messages[op.out]:
            sent = set(itertools.product(*box))
            if not sent <= have.get((source, tensor), set()):
                raise Broken(f"device {source} sends cells of {tensor} that it does not have")
            have.setdefault((target, tensor), set()).update(sent)
        names, sizes = [*op.dims, *op.reduce], [*op.dims.values(), *op.reduce.values()]
        cut = plan.cut[op.out]
        owners: dict[tuple[int, ...], list[int]] = {}
        for point in itertools.product(*map(range, sizes)):
            at = dict(zip(names, point))
            devices = list(range(plan.devices))
            if cut:  # part k begins at ⌊k·n/P⌋: the last one that has begun has this point
                devices = [k for k in devices if k * sizes[names.index(cut)] // plan.devices <= at[cut]][-1:]
            for device in devices:
                owners.setdefault(point, []).append(device)
                for read in op.reads:
                    cell = tuple(sum(c * at[d] for d, c in terms.items()) for terms in read.index)
                    if any(not 0 <= c < n for c, n in zip(cell, graph.shape(read.tensor))):
                        raise Broken(f"{op.out} at {at} reads {read.tensor}{list(cell)}, which is outside")
                    if read.tensor not in graph.inputs and cell not in have.get((device, read.tensor), set()):
                        raise Broken(f"device {device} lacks {read.tensor}{list(cell)} for {op.out} at {at}")
                    checked += 1
        for point, devices in owners.items():
            cell = point[: len(op.dims)]
            for device in range(plan.devices) if cut in op.reduce else devices:
                have.setdefault((device, op.out), set()).add(cell)
    return checked


# --------------------------------------------------------------------------------------------------------------------------
# 6. Examples


def mlp(batch: int, width: int, hidden: int) -> Graph:
    """``relu(x @ w) @ v``."""
    i, n, m = {"i": 1}, {"n": 1}, {"m": 1}
    first, second = [Read("x", [i, m]), Read("w", [m, n])], [Read("h", [i, m]), Read("v", [m, n])]
    up = Op("h", {"i": batch, "n": hidden}, {"m": width}, first, np.multiply, then=lambda a: np.maximum(a, 0))
    down = Op("y", {"i": batch, "n": width}, {"m": hidden}, second, np.multiply)
    return Graph({"x": (batch, width), "w": (width, hidden), "v": (hidden, width)}, [up, down])


def stencil(length: int, window: int = 3) -> Graph:
    """Two convolutions in a row: neighbours exchange a halo."""
    read = [{"i": 1, "r": 1}]
    a = Op("a", {"i": length - window + 1}, {"r": window}, [Read("x", read), Read("f", [{"r": 1}])], np.multiply)
    b = Op("b", {"i": length - 2 * (window - 1)}, {"r": window}, [Read("a", read), Read("f", [{"r": 1}])], np.multiply)
    return Graph({"x": (length,), "f": (window,)}, [a, b])


def main() -> None:
    """Plan, check and run the examples on four devices."""
    rng = np.random.default_rng(0)
    examples = {"mlp, batch 4": mlp(4, 32, 256), "mlp, batch 256": mlp(256, 8, 16), "stencil": stencil(4004)}
    for name, graph in examples.items():
        plan = best(graph, 4)
        inputs = {t: rng.standard_normal(s) for t, s in graph.inputs.items()}
        alone = run(plan_for(graph, 1, dict.fromkeys(plan.cut)), inputs)
        error = max(np.abs(alone[t] - x).max() for t, x in run(plan, inputs).items())
        cuts = ", ".join(f"{t} by {d}" for t, d in plan.cut.items())
        print(f"{name}: cut {cuts}; {sum(map(len, plan.messages.values()))} messages, {cost(plan) * 1e6:.1f} µs")
        print(f"  {check(plan):,} reads checked, {'right' if error < 1e-12 else 'WRONG'}")


if __name__ == "__main__":
    main()
