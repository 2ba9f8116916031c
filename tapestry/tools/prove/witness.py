"""Where a program and a model differ, by running both: every rank's operations and collectives, on random input.

Both are run in float64, where the order of sums makes no difference. An index that is computed from a logarithm can be
another one there than in the model's own types; so what differs is run again in those, and only what differs in both is a
witness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tapestry.ir.graph import Op
from tapestry.ir.types import FLOATS, Array
from tapestry.lift.file.structure import load
from tapestry.runtime.feeds import random_feeds
from tapestry.tools.prove.collectives import Collective
from tapestry.tools.prove.proof import Comparison
from tapestry.tools.prove.rank_programs import OneFile, Program
from tapestry.verify import interp

APART = 1e-9  # of the largest value; float64 sums in another order differ by 1e-13 or so
Run = tuple[Mapping[str, Array], Sequence[Mapping[str, Array]]]  # every value of the model, and of each rank
ROUNDED = 2.0**-6  # of the largest value: more than bfloat16 is off by itself
MOST_POINTS = 1 << 28  # of all operations and ranks together; beyond it nothing is run


@dataclass(frozen=True, slots=True)
class Difference:
    """An output of a rank that is another value than the model's, at a cell of each."""

    output: str
    rank: int
    cell: tuple[int, ...]
    model_cell: tuple[int, ...]
    value: float
    expected: float
    seed: int


def difference(model: OneFile, program: Program, found: Comparison, seed: int = 0) -> Difference | str:
    """The first cell where a rank's output is not the model's, in float64 and in the model's own types; in words why there is
    none."""
    points = sum(prod(d.size for d in op.space) for f in (model, *program.ranks) for op in f.graph.ops if op.space)
    if points > MOST_POINTS:
        return f"running both would take {points:.3g} points, so that no difference was looked for"
    weights = _weights(model, program, found, seed)
    if weights is None:
        return "weights that are no part of the model's have no data, so that no difference was looked for"
    mine = {**random_feeds(model.graph, seed), **weights}
    every = replace(model.graph, outputs=(*model.outputs, *(t for op in model.graph.ops for t in op.outs)))

    def both(wide: bool) -> Run:
        return interp.run(every, mine, wide=wide), _run_ranks(program, found, mine, wide)

    try:
        first = _first(program, found, seed, wide := both(True))
        if first is None:
            return "both were run on random input and agree"
        return _first(program, found, seed, wide, own := both(False)) or _rounding_step(model, first, wide[0], own[0])
    except (ArithmeticError, KeyError, ValueError, IndexError, TypeError) as e:
        return f"one of them does not run ({type(e).__name__} {e}), so that no difference was found"


def _weights(model: OneFile, program: Program, found: Comparison, seed: int) -> dict[str, Array] | None:
    """Weights of the model: random ones where every rank's are parts of them, so that no zero hides a fault; else its own."""
    rng, out = np.random.default_rng(seed), dict[str, Array]()
    for name in model.graph.weights:
        t = model.graph.tensors[name]
        if name in model.lifted.constants or found.leaves.own or t.dtype not in FLOATS:
            data = model.data(name)
            if data is None:
                return None
        else:
            fan = max(1, t.shape[-2] if len(t.shape) > 1 else 1)
            data = rng.uniform(0.2, 1.0, t.shape) * rng.choice([1.0, -1.0] if len(t.shape) > 1 else [1.0], t.shape) / fan**0.5
        out[name] = np.asarray(data)
    return out


def _run_ranks(program: Program, found: Comparison, model: Mapping[str, Array], wide: bool) -> list[dict[str, Array]]:
    """Every value of every rank, collectives among them."""
    values: list[dict[str, Array]] = []
    for rank, file in enumerate(program.ranks):
        targets = {c.target for c in file.collectives}
        given = (t for t in (*file.graph.inputs, *file.graph.weights) if t not in targets)
        values.append({t: _given(found, file, rank, t, model) for t in given})
    for meeting in found.meetings:
        group = meeting[0].group
        for r in group:
            _advance(program.ranks[r], values[r], wide)
        results = collective(meeting[0], [values[r].get(c.source) for r, c in zip(group, meeting, strict=True)])
        for r, c, a in zip(group, meeting, results, strict=True):
            if c.target and a is not None:
                values[r][c.target] = a
    for rank, file in enumerate(program.ranks):
        _advance(file, values[rank], wide)
    return values


def _given(found: Comparison, file: OneFile, rank: int, name: str, model: Mapping[str, Array]) -> Array:
    """A rank's input or weight: its part of the model's."""
    placed = found.leaves.placed.get((rank, name))
    if placed is not None:
        return placed.of(np.asarray(model[placed.tensor]), file.graph.tensors[name].shape)
    data = file.data(name)
    if data is None:
        raise KeyError(name)
    return data


def _advance(file: OneFile, values: dict[str, Array], wide: bool) -> None:
    """Run the operations whose inputs are there."""
    ready, have = list[Op](), set(values)
    for op in file.graph.ops:
        if op.outs[0] not in values and have.issuperset(op.inputs):
            ready.append(op)
            have.update(op.outs)
    if not ready:
        return
    used = {t for op in ready for t in op.inputs} & values.keys()
    outs = tuple(t for op in ready for t in op.outs)
    part = replace(file.graph, ops=tuple(ready), inputs=tuple(used), outputs=outs)
    values.update(interp.run(part, {t: values[t] for t in used}, wide=wide))


def collective(c: Collective, arrays: Sequence[Array | None]) -> list[Array | None]:
    """What each member has after a collective, from its definition."""
    n = len(c.group)
    root = c.group.index(c.root) if c.root in c.group else 0
    given = [a for a in arrays if a is not None]
    if c.kind == "BROADCAST":
        return [arrays[root]] * n
    if c.kind == "SCATTER":
        sent = arrays[root]
        assert sent is not None
        return list(np.split(sent, n))
    if c.kind in ("ALL_GATHER", "GATHER"):
        whole = np.concatenate(given)
        return [whole if c.kind == "ALL_GATHER" or k == root else None for k in range(n)]
    if c.kind == "ALL_TO_ALL":
        pieces = [np.split(a, n) for a in given]
        return [np.concatenate([p[k] for p in pieces]) for k in range(n)]
    fold = {"SUM": np.add, "AVG": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum}[c.op]
    total = fold.reduce(np.stack(given))
    if c.op == "AVG":
        total = total / n
    if c.kind == "REDUCE_SCATTER":
        return list(np.split(total, n))
    return [total if c.kind == "ALL_REDUCE" or k == root else None for k in range(n)]


def _first(program: Program, found: Comparison, seed: int, wide: Run, own: Run | None = None) -> Difference | None:
    """The first cell that differs in float64; with ``own``, by about as much as it does there."""
    names = {theirs: mine for mine, theirs in program.names.items()}
    for name, starts in found.placed.items():
        for rank, start in enumerate(starts):
            mine = names.get(name, name)
            if start is None or mine not in wide[1][rank]:
                continue
            a, box, apart, most = _box(wide, name, mine, rank, start)
            wrong = ~(np.abs(apart) <= APART * max(most, 1e-30))
            if own is not None:
                with np.errstate(invalid="ignore"):
                    there = _box(own, name, mine, rank, start)[2]
                    wrong &= np.where(np.isfinite(apart), np.abs(there - apart) <= np.abs(apart) / 2, there != 0)
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                model_cell = tuple(i + s for i, s in zip(at, start, strict=True))
                return Difference(name, rank, at, model_cell, float(a[at]), float(box[at]), seed)
    return None


def _box(run: Run, name: str, mine: str, rank: int, start: Sequence[int]) -> tuple[Array, Array, Array, float]:
    """A rank's output, its box of the model's, how far they are apart (0 where they are equal, NaN too), the largest cell."""
    a, whole = (np.asarray(x).astype(np.float64) for x in (run[1][rank][mine], run[0][name]))
    box = whole[tuple(slice(s, s + n) for s, n in zip(start, a.shape, strict=True))]
    with np.errstate(invalid="ignore"):
        apart = np.where((a == box) | ((a != a) & (box != box)), 0.0, a - box)
    return a, box, apart, float(np.max(np.abs(whole), initial=0.0, where=np.isfinite(whole)))


def _rounding_step(model: OneFile, first: Difference, wide: Mapping[str, Array], own: Mapping[str, Array]) -> str:
    """Which of the model's operations makes of a rounded value another one than of the value itself."""
    text = f"they differ in float64 alone, at {first.output}{list(first.cell)} of rank {first.rank}"
    tensors = model.graph.tensors

    def close(name: str) -> bool:
        x, y = (np.asarray(v[name]).astype(np.float64) for v in (wide, own))
        with np.errstate(invalid="ignore"):
            near = np.abs(x - y) <= ROUNDED * np.max(np.abs(x), initial=0.0, where=np.isfinite(x))
        return bool(np.all(near | (x == y) | ((x != x) & (y != y))))

    for op in model.graph.ops:
        ins = [t for t in op.inputs if t in wide and not tensors[t].on_host and tensors[t].dtype in FLOATS]
        if ins and all(map(close, ins)) and not all(close(t) for t in op.outs if not tensors[t].on_host):
            kind = next((n.op_type for n in load(model.path).graph.node if op.outs[0] in n.output), op.outs[0])
            return f"{text}: '{ins[0]}' is computed in {tensors[ins[0]].dtype}, near a step of {kind}"
    return f"{text}: rounding hides it in the model's own types"
