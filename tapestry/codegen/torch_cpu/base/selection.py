"""One element picked out of a reduced dimension: rows of a table, gathered without the sum that says so; and rows times the
matrix that each picks, computed group by group.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from tapestry.codegen.torch_cpu.base.point_values import Expressions, States
from tapestry.codegen.torch_cpu.base.strided_reads import SAME_BITS, Frame, Tensor
from tapestry.codegen.torch_cpu.base.ways import Refusal
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import dims_of, evaluate
from tapestry.ir.kernel import Kernel
from tapestry.ir.recognition.contraction import dims_read
from tapestry.ir.recognition.selection_sum import routed, selection


def product_by_groups(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> States | Refusal:
    """``sum_v where(i == v, sum_m x * w[v], 0)``: for each v one product, of the rows that want it; exact on any block of v."""
    found = routed(op)
    if found is None or found.base.const or 0 in frame.extents:
        return Refusal("no matrix is picked for each row")
    of_base = dims_of(found.base)
    names, extent = [d.name for d in op.space], dict(zip((d.name for d in op.space), frame.extents, strict=True))
    rows, columns = ([d.name for d in dims if d.name not in of_base] for dims in (found.of_rows, found.of_columns))
    groups = [d.name for d in op.dims if d.name in of_base]
    inner, over = [d.name for d in op.inner_dims], found.over.name
    n, (lo, hi) = len(op.dims), kernel.block[len(op.dims)]
    index = Expressions(op, graph, kernel, (found.wanted,), Frame(op.dims, kernel.block[:n]))
    factors = Expressions(op, graph, kernel, (found.rows, found.matrices), frame)
    back = [[*groups, *rows, *columns].index(d.name) for d in op.dims]
    at = np.meshgrid(*(np.arange(*kernel.block[[d.name for d in op.dims].index(g)]) for g in groups), indexing="ij")
    bases = np.atleast_1d(evaluate(found.base, dict(zip(groups, at, strict=True)))).ravel().tolist()

    def matrix(x: Tensor, *groups: list[str]) -> Tensor:
        """A value with an axis for each group of dimensions, in that order."""
        order = [d for group in groups for d in group]
        x = x.reshape([1] * (len(names) - x.dim()) + list(x.shape))
        x = x.expand([extent[d] if d in order else 1 for d in names])
        x = x.permute([names.index(d) for d in order] + [i for i, d in enumerate(names) if d not in order])
        return x.reshape([prod(extent[d] for d in group) for group in groups])

    def states(ins: Sequence[Tensor | None]) -> list[Tensor]:
        wanted = index.values(ins, [])[0] - lo
        place = matrix(wanted.reshape(*wanted.shape, *[1] * (len(names) - n)) if wanted.dim() == n else wanted, rows)
        x, w = factors.values(ins, [])
        x, w = matrix(x, groups, rows, inner), matrix(w, groups, [over], columns, inner)
        out = torch.zeros(len(bases), len(place), w.shape[2], dtype=w.dtype)
        picked = sorted(set(place.flatten().numpy().tolist()))
        for k, base in enumerate(bases):
            for v in (v for v in picked if base <= v < base + hi - lo):
                mine = place == v
                out[k, mine] = x[k, mine] @ w[k, v - base].T
        return [out.reshape([extent[d] for d in (*groups, *rows, *columns)]).permute(back)]

    return states


def gather(op: Block, graph: Graph, kernel: Kernel, frame: Frame) -> States | Refusal:
    """``sum_v where(i == v, x[v], 0)`` without the sum: a masked gather, exact on any block of v."""
    selected = selection(op)
    if selected is None or selected.shift or 0 in frame.extents:
        return Refusal("no row of a table is picked")
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
