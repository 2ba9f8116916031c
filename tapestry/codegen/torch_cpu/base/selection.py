"""One element picked out of a reduced dimension: rows of a table, gathered without the sum that says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tapestry.codegen.torch_cpu.base.point_values import Expressions
from tapestry.codegen.torch_cpu.base.strided_reads import SAME_BITS, Frame, Tensor
from tapestry.ir.graph import Block, Graph
from tapestry.ir.kernel import Kernel
from tapestry.ir.recognise.contraction import dims_read
from tapestry.ir.recognise.selection_sum import selection


def gather(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> Callable[[Sequence[Tensor | None]], list[Tensor]] | None:
    """``sum_v where(i == v, x[v], 0)`` without the sum: a masked gather, exact on any block of v."""
    selected = selection(op)
    if selected is None or selected.shift or 0 in frame.extents:
        return None
    where_index, picked = selected.wanted, selected.picked
    base = Frame(op.dims, kernel.block[: len(op.dims)])
    lo, hi = kernel.block[-1]
    index = Expressions(op, graph, kernel, (where_index,), base)
    rows = Expressions(op, graph, kernel, (picked,), frame)
    of_index, of_rows = dims_read(op, where_index), dims_read(op, picked)
    outer = [i for i, d in enumerate(op.dims) if d.name in of_index]
    inner = [i for i, d in enumerate(op.dims) if d.name not in of_index]
    back = [(*outer, *inner).index(i) for i in range(len(op.dims))]
    apart = not of_index & of_rows

    def states(ins: Sequence[Tensor | None]) -> list[Tensor]:
        at = index.values(ins, [])[0] - lo
        table = rows.values(ins, [])[0]
        dtype = table.dtype
        table = table.view(SAME_BITS.get(dtype, dtype))
        inside = (at >= 0) & (at < hi - lo)
        place = at.clamp(0, hi - lo - 1)
        if apart:  # whole rows of a table
            order = [len(op.dims), *inner, *outer]
            table = table.expand([*(n if i in inner else 1 for i, n in enumerate(base.extents)), hi - lo]).permute(order)
            table = table.flatten(len(inner) + 1) if outer else table
            table = table[..., 0] if outer else table
            place = place.expand([n if i in outer else 1 for i, n in enumerate(base.extents)])
            taken = table.index_select(0, place.reshape(-1))
            taken = taken.reshape([base.extents[i] for i in (*outer, *inner)]).permute(back)
        else:
            table = table.expand([*base.extents, hi - lo])
            taken = torch.gather(table, -1, place.expand(base.extents).unsqueeze(-1)).squeeze(-1)
        taken = taken if bool(inside.all()) else torch.where(inside, taken, torch.zeros((), dtype=taken.dtype))
        return [taken.view(dtype)]

    return states
