"""Inputs, weights and constants of the model and of the ranks, as cells of the model's tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from tapestry.ir.expr import Const
from tapestry.ir.graph import Op
from tapestry.ir.index import Aff, const, dim, evaluate, floordiv, modulo
from tapestry.ir.types import FLOATS, INTEGERS, Array, Tensor
from tapestry.lift.affine_values import fit
from tapestry.tools.prove.rank_parts import Placed, apart, by_data, runs_by_data, starts_in_order
from tapestry.tools.prove.rank_programs import OneFile, Program
from tapestry.tools.prove.values import Ref, Table, Value, extents
from tapestry.verify import interp

MOST_CELLS = 1 << 22  # of a constant that the model computes
EXACT = 1 << 24  # whole numbers below are floats of any type that models count in


@dataclass(slots=True)
class Leaves:
    """Where ranks' tensors lie in the model's.

    Attributes:
        data: reads of weights, each once.
        placed: (rank, tensor) to what it is of the model's.
        own: (rank, weight) that is nothing of the model's.
        unchecked: weights whose data is not there, so that where they lie is taken from the order of ranks or what is said.
        open: tensors whose parts may lie on the ranks in more than one order, as far as anybody said.
        values: the model's.
        computed: what the model computes of nothing but constants, in its own types; made when it is first asked for.
        order: which of two orders inputs have, where shapes leave both: neighbours hold neighbouring parts, or equal ones.
    """

    table: Table
    model: OneFile
    program: Program
    data: dict[tuple[int, str], Array | None] = field(default_factory=dict[tuple[int, str], Array | None])
    placed: dict[tuple[int, str], Placed] = field(default_factory=dict[tuple[int, str], Placed])
    own: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    unchecked: set[str] = field(default_factory=set[str])
    open: set[str] = field(default_factory=set[str])
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    computed: dict[str, Array] | None = None
    order: int = 0

    def read(self, rank: int, name: str) -> Array | None:
        """Data of a weight of a rank; of the model for rank -1."""
        key = (rank, name)
        if key not in self.data:
            self.data[key] = (self.model if rank < 0 else self.program.ranks[rank]).data(name)
        return self.data[key]

    def of_model(self, name: str) -> Value:
        """A tensor that the model is given."""
        t = self.model.graph.tensors[name]
        simple = self._simple(self.model, name, t)
        return simple if simple is not None else self._leaf(name, t.dtype, here(t.shape))

    def _leaf(self, name: str, dtype: str, index: Sequence[Aff]) -> Ref:
        return Ref(self.table.leaf(name, len(index), dtype), tuple(index))

    def _simple(self, file: OneFile, name: str, t: Tensor) -> Value | None:
        """A derived constant that is one number, or the value of an index expression (a float of one, if all are whole)."""
        a = _constant(file, name, t)
        if a is None or a.size == 0:
            return None
        first = a.reshape(-1)[0]
        if np.all(a == first):
            return Const(first.item(), t.dtype)
        ranges = extents(a.shape)
        if t.dtype == "bool":
            place = _half(a)
            return None if place is None else self.table.test("ge", place, ranges)
        exact = t.dtype in INTEGERS or (t.dtype in FLOATS and np.all(np.abs(a) < EXACT) and np.all(a == np.rint(a)))
        found = fit(a.astype(np.int64)) if exact else None
        if found is None:
            return None
        place = sum((e * step for e, step in zip(here(a.shape), found[1], strict=True)), const(found[0]))
        whole = self.table.iota(place, t.dtype if t.dtype in INTEGERS else "i64")
        return self.table.call("cast", (whole,), t.dtype, ranges)

    def of_rank(self, rank: int, name: str) -> Value:
        """A tensor that a rank is given."""
        file = self.program.ranks[rank]
        t = file.graph.tensors[name]
        simple = self._simple(file, name, t)
        if simple is not None:
            return simple
        found = self._place(rank, name, t)
        if found is None:
            a = self.read(rank, name)
            folded = self._folded(a, t) if a is not None and _constant(file, name, t) is not None else None
            if folded is not None:
                return folded
            self.own.append((rank, name))
            digest = hashlib.sha256(a.tobytes()).hexdigest()[:12] if a is not None else f"{rank}"
            return self._leaf(f"{name} of rank {rank} ({digest})", t.dtype, here(t.shape))
        self.placed[rank, name] = found
        if found.runs:
            return self._joined(found, t)
        env = {f"y{k}": e for k, e in enumerate(found.places(t.shape))}
        return self.table.read(self.of_model(found.tensor), env, extents(t.shape))

    def _folded(self, a: Array, t: Tensor) -> Value | None:
        """A constant as a part of what the model computes of constants: whoever wrote the rank has computed it before."""
        tensors, mine = self.model.graph.tensors, a.squeeze()
        if self.computed is None:
            self.computed = _computed(self.model)
        for name, whole in self.computed.items():
            axes = [k for k, n in enumerate(whole.shape) if n != 1]
            if tensors[name].dtype == t.dtype and name in self.values and len(axes) == mine.ndim:
                start = by_data(mine, whole.squeeze().astype(a.dtype), [])
                if start is not None:
                    places = (e for e in here(a.shape) if e.terms)
                    env = {f"y{k}": e + s for k, e, s in zip(axes, places, start, strict=True)}
                    return self.table.read(self.values[name], env, extents(a.shape))
        return None

    def _joined(self, found: Placed, t: Tensor) -> Value:
        """A tensor made of runs of the model's along one axis: one expression where they are regular, else a choice of them."""
        size, name, places = found.runs[0].size, f"y{found.axis}", list(found.places(t.shape))
        ranges = extents(t.shape)
        step = found.runs[1].there - found.runs[0].there
        if all(r.size == size and r.there == found.runs[0].there + k * step for k, r in enumerate(found.runs)):
            number, inside = floordiv(dim(name), size, ranges), modulo(dim(name), size, ranges)
            places[found.axis] = number * step + inside + found.runs[0].there
            return self._leaf(found.tensor, t.dtype, places)
        out: Value | None = None
        for r in reversed(found.runs):
            places[found.axis] = dim(name) + (r.there - r.here)
            here = self._leaf(found.tensor, t.dtype, places)
            test = self.table.test("ge", dim(name) * -1 + (r.here + r.size - 1), ranges)
            out = here if out is None else self.table.call("where", (test, here, out), t.dtype, ranges)
        assert out is not None
        return out

    def _place(self, rank: int, name: str, t: Tensor) -> Placed | None:
        graph = self.model.graph
        theirs = self.program.names.get(name, name)
        given = theirs in graph.inputs or theirs in graph.weights
        if given and graph.tensors[theirs].dtype == t.dtype:
            found = self._of(rank, name, t, theirs)
            if found is not None or name in self.program.ranks[rank].graph.inputs:
                return found
        a = self.read(rank, name)
        if a is None:
            return None
        for other in graph.weights:
            whole = self.read(-1, other) if graph.tensors[other].dtype == t.dtype and other != theirs else None
            if whole is not None and whole.ndim == a.ndim:
                start = by_data(a, whole, starts_in_order(rank, len(self.program.ranks), t.shape, whole.shape))
                if start is not None:
                    return Placed(other, start, "data")
        return None

    def _of(self, rank: int, name: str, t: Tensor, theirs: str) -> Placed | None:
        """Which box of a tensor of the model a rank's tensor is."""
        whole = self.model.graph.tensors[theirs].shape
        first = self.program.starts(rank, theirs, t.shape, whole)
        source = "shape" if t.shape == whole else "order of ranks"
        if theirs in self.program.placement:
            source = "program.json"
        if theirs in self.model.graph.inputs:
            if len(first) > 1:
                self.open.add(theirs)
            return Placed(theirs, first[min(self.order, len(first) - 1)], source) if first else None
        mine, all_of = self.read(rank, name), self.read(-1, theirs)
        if mine is None or all_of is None:
            self.unchecked.add(name)
            return Placed(theirs, first[0], source) if first else None
        start = by_data(mine, all_of, first)
        if start is not None:
            return Placed(theirs, start, "data" if start not in first else f"{source}, data")
        runs = runs_by_data(mine, all_of)
        if runs is not None:
            return Placed(theirs, (0,) * len(whole), "data", *runs)
        if first:
            self.table.rank, self.table.tensor = rank, name
            self.table.miss(f"{apart(mine, all_of, first[0])}", theirs)
        return None


def _constant(file: OneFile, name: str, t: Tensor) -> Array | None:
    """The data of what is no weight: a derived constant, or whole numbers that the file has."""
    return file.data(name) if t.dtype not in FLOATS or name in file.lifted.constants else None


def _computed(model: OneFile) -> dict[str, Array]:
    """What a model computes of nothing but constants."""
    graph, ops = model.graph, list[Op]()
    given = {n: c for n, c in model.lifted.constants.items() if not graph.tensors[n].on_host}
    names = {*given}
    for op in graph.ops:
        outs = [graph.tensors[o] for o in op.outs]
        if names.issuperset(op.inputs) and not any(o.on_host or prod(o.shape) > MOST_CELLS for o in outs):
            ops.append(op)
            names.update(op.outs)
    outputs = tuple(n for op in ops for n in op.outs)
    with np.errstate(all="ignore"):
        return interp.run(replace(graph, ops=tuple(ops), inputs=tuple(given), weights=(), outputs=outputs), given)


def _half(mask: Array) -> Aff | None:
    """What is at least 0 where a mask is true: up to a place of an axis, from one on, or on one side of a diagonal."""
    axes = [e for e in here(mask.shape) if e.terms]
    grids: Any = np.indices(tuple(mask.shape), sparse=True)
    env: dict[str, Any] = {f"y{k}": grids[k] for k in range(mask.ndim)}
    for place in (*axes, *(e * -1 for e in axes), *(a - b for a in axes for b in axes if a is not b)):
        cells = np.broadcast_to(evaluate(place, env), mask.shape)
        if (low := int(cells[mask].min())) > cells[~mask].max():
            return place - low
    return None


def here(shape: Sequence[int]) -> list[Aff]:
    """Places of a tensor's own cells."""
    return [dim(f"y{k}") if n != 1 else const(0) for k, n in enumerate(shape)]
