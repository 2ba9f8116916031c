"""Values of a graph at some cells of a tensor for drawn inputs: no more of any tensor than those cells depend on.

So a product of large matrices is compared at cells of its own size. Reductions merge their states pairwise, in order, however
many cells are asked for together.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from tapestry.ir.graph import Block, Graph, Read
from tapestry.ir.types import Array, numpy_dtype
from tapestry.verify import distinct_cells
from tapestry.verify.model.cell_values import CellValues
from tapestry.verify.rewriting.draws import Draw


class TooMuch(Exception):
    """The cells asked for depend on more points than may be computed."""


class _Deep(Exception):
    """Cells that are asked for far inside of others: they are computed first, and the others from the start."""

    def __init__(self, tensor: str, flat: Array) -> None:
        super().__init__(tensor)
        self.wanted = tensor, flat


NESTED = 32  # operations followed back inside each other: Python's stack holds some 100 of them

Place = tuple[tuple[int, ...], Array, Array, Array]
"""Of a read: the shape of its values, which are inside the tensor, the distinct cells, which of them each value inside is."""


class Cells(CellValues):
    """The cells of one graph for one draw of its inputs.

    Attributes:
        asked: the cells of each input that were read.
    """

    def __init__(
        self, graph: Graph, order: Mapping[str, int], draw: Draw, wide: bool, most: int, places: list[Place], real: bool = False
    ) -> None:
        """``order`` numbers the inputs, by which they are drawn: the same in the graphs that are compared. ``most`` points may
        be computed; ``real`` is as in `CellValues`. ``places`` says where each read looks, in the order in which they are met:
        the same for every draw, so they are found once."""
        super().__init__(graph, lambda tensor: None, wide=wide, plain=True, real=real)
        self.order, self.draw, self.most, self.places = order, draw, most, places
        self.points = self.met = self.depth = 0
        self.asked: dict[str, list[Array]] = {}
        self.before: dict[tuple[str, bytes], Array] = {}  # cells that were asked for too far inside of others

    def cells(self, tensor: str, flat: Array) -> Array:
        """Values of some cells of a tensor, given by their row-major positions.

        Raises:
            TooMuch: they depend on too many points; LawError: a read leaves its tensor.
        """
        wanted = [(tensor, flat)]
        while wanted:
            self.depth = 0
            try:
                made = self._cells(*wanted[-1])
            except _Deep as e:
                wanted.append(e.wanted)
                continue
            name, at = wanted.pop()
            self.before[name, at.tobytes()] = made
        return self.before.pop((tensor, flat.tobytes()))

    def _cells(self, tensor: str, flat: Array) -> Array:
        if self.depth >= NESTED and tensor in self.makers:
            if (tensor, flat.tobytes()) not in self.before:
                raise _Deep(tensor, flat)
            return self.before[tensor, flat.tobytes()]
        t = self.graph.tensors[tensor]
        dtype = numpy_dtype(t.dtype, self.wide)
        if tensor not in self.makers:
            self.asked.setdefault(tensor, []).append(flat)
            return self.draw.values(t, self.order[tensor], flat).astype(dtype)
        op = self.graph.ops[self.makers[tensor]]
        if not isinstance(op, Block):
            raise TooMuch
        self._count(len(flat) * op.merged_cells)
        coords = np.stack(np.unravel_index(flat, t.shape), axis=1) if t.shape else np.zeros((len(flat), 0), int)
        self.depth += 1
        made = self.block(op, coords)[op.outs.index(tensor)][0].astype(dtype)
        self.depth -= 1
        return made

    def read(self, op: Block, pos: int, env: Mapping[str, Array]) -> Array:
        r = op.reads[pos]
        t = self.graph.tensors[r.tensor]
        if self.met == len(self.places):
            self.places.append(self._place(op, r, env))
        shape, valid, wanted, back = self.places[self.met]
        self.met += 1
        out = np.full(shape, 0 if r.other is None else r.other, numpy_dtype(t.dtype, self.wide))
        if len(wanted):
            out[valid] = self._cells(r.tensor, wanted)[back]
        return out

    def _place(self, op: Block, r: Read, env: Mapping[str, Array]) -> Place:
        t = self.graph.tensors[r.tensor]
        index, valid = self.looked_at(op, r, env)
        shape = np.broadcast_shapes(valid.shape, *(i.shape for i in index))
        self._count(prod(shape))
        flat = np.zeros(shape, np.int64)
        for i, n in zip(index, t.shape, strict=True):
            flat = flat * n + np.clip(i, 0, max(0, n - 1))
        valid = np.broadcast_to(valid, shape)
        return shape, valid, *distinct_cells.distinct_cells(flat[valid], t.size)

    def _count(self, points: int) -> None:
        self.points += points
        if self.points > self.most:
            raise TooMuch
