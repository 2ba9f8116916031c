"""What a model does with its sizes, done at all sizes of a region at once: where it is one model, and where another one.

A model computes with sizes: ``Shape``, arithmetic, comparisons, tables, and what ``Reshape``, ``Slice`` or ``If`` make of
it. All of it is done here at every size of a region, in the model's own types. A model is the same one at two sizes if each
number that an operator takes from sizes (of a tensor's axes, of its own arguments) is given by one expression at both, and
every branch, every axis that is broadcast, every end that is clamped is the same. Where a number follows from sizes by
something that is not understood, nothing is said of any other size, and the node is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from tapestry.ir.graph import Graph
from tapestry.ir.sizes.size_formula import Formula, Region, Sizes, formula_of
from tapestry.lift.sizes.size_columns import Array, Grid, box_without
from tapestry.lift.sizes.size_walk import MALFORMED, Dims, NotUnderstood, Walk


@dataclass(frozen=True, slots=True, kw_only=True)
class SameModel:
    """The sizes of a region at which a model is the one that it is at ``made_at``.

    Attributes:
        reasons: the nodes that are others elsewhere, and an example of where.
        shapes: sizes of tensors of the top-level graph, by name, at all sizes of the grid.
    """

    region: Region
    grid: Grid
    reasons: tuple[str, ...]
    shapes: Mapping[str, tuple[Array, ...]]

    def varying(self) -> frozenset[str]:
        """Tensors that have other sizes elsewhere in the region: as constants they would be other ones, however small."""
        return frozenset(n for n, columns in self.shapes.items() if any(c.size > 1 for c in columns))

    def differs(self, graph: Graph, region: Region) -> tuple[str, Sizes] | None:
        """A tensor whose shape a graph has wrong at some sizes of a part of the region; its name, and such sizes.

        Args:
            graph: its sizes are symbols, made at the same sizes.
        """
        seen = set[tuple[Formula | None, int]]()
        for name, columns in self.shapes.items():
            shape = graph.tensors[name].shape if name in graph.tensors else ()
            if len(shape) != len(columns) or any(self.grid.here(c) != int(n) for c, n in zip(columns, shape, strict=True)):
                continue  # another tensor of that name
            for n, column in zip(shape, columns, strict=True):
                formula = formula_of(n)
                if (formula, id(column)) in seen:
                    continue
                seen.add((formula, id(column)))
                given = self.grid.constant(int(n)) if formula is None else self.grid.given_by(formula)
                wrong = self.grid.first((given != column), region)
                if wrong is not None:
                    return name, wrong
        return None


def same_model(
    model: ModelProto, inputs: Mapping[str, Dims], symbols: Sequence[str], region: Region, made_at: Sizes
) -> SameModel:
    """Where in a region a model is the one that it is at some sizes.

    Args:
        model: as it was read; stays as it is.
        inputs: for every input, a symbol, a size or a formula of symbols for each axis.
    """
    grid = Grid(region, made_at)
    own = {o for n in model.graph.node for o in n.output} | set(inputs)
    copied = ModelProto()
    copied.CopyFrom(model)
    try:
        walk = Walk(copied, grid, symbols)
        walk.top(inputs)
    except (NotUnderstood, *MALFORMED) as e:
        return SameModel(region=Region(made_at, made_at, {}), grid=grid, reasons=(str(e),), shapes={})
    bad = ~walk.good
    if bad[grid.place]:  # the model contradicts itself there, as lifting says
        box = Region(made_at, made_at, {})
    else:
        box = box_without(grid, bad) if bad.any() else region
    named = [f"{where} lifts to another operation at {_text(grid, mask, symbols)}" for where, mask in walk.other.items()]
    shapes = {n: k.shape for n, k in walk.known.items() if k.shape is not None and n in own}
    return SameModel(region=box, grid=grid, reasons=tuple(named), shapes=shapes)


def _text(grid: Grid, mask: Array, symbols: Sequence[str]) -> str:
    """The sizes nearest to ``made_at`` at which a mask is not set, of the symbols that it follows from."""
    at = min(np.argwhere(~mask).tolist(), key=lambda p: sum(abs(a - b) for a, b in zip(p, grid.place, strict=True)))
    parts = zip(symbols, grid.along, at, mask.shape, strict=True)
    return ", ".join(f"{s} = {some[p]}" for s, some, p, n in parts if n > 1)
