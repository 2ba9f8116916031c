"""Opaque operators that commute with splitting along some axes: batches, channels, rows that know nothing of each other."""

from __future__ import annotations

from collections.abc import Sequence

from tapestry.ir.graph import Dim
from tapestry.lift.builder import Node
from tapestry.lift.opaque import emit_cells, emit_opaque
from tapestry.lift.operators.gather import check_known
from tapestry.lift.registry import Declined, lifts

Axes = dict[int, list[int | None]]


def along(n: Node, why: str, axes: Sequence[int], ins: Sequence[int] = (0,), outs: Sequence[int] = (0,)) -> None:
    """Opaque, splittable along some axes of input 0, which inputs ``ins`` and the outputs share."""
    shared: Axes = {k: list(axes) for k in (*ins, *outs)}
    dims = [Dim(f"x{a}", n.shape(0)[a]) for a in axes]
    emit_opaque(n, why, dims, {k: shared[k] for k in ins if n.has(k)}, {k: shared[k] for k in outs})


ROWS: dict[
    str, tuple[str, int, tuple[int, ...]]
] = {  # why; how many of the first axes (or all but the last ones); inputs with them
    "Det": ("a determinant mixes a whole matrix", -2, (0,)),
    "Col2Im": ("adds overlapping blocks", 1, (0,)),  # channels are interleaved with the cells of a block
    "STFT": ("Fourier transforms of overlapping frames", 1, (0,)),
    "TensorScatter": ("positions depend on the data", 1, (0, 1, 2)),
    "TfIdfVectorizer": ("counts sequences of a row's values", -1, (0,)),
}
BATCHES: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {  # why; inputs and outputs whose first axis is the batch
    "GridSample": ("samples where the grid says", (0, 1), (0,)),
    "DeformConv": ("samples at offsets that depend on the data", (0, 2, 4), (0,)),
    "LinearAttention": ("a state that runs over the positions", (0, 1, 2, 3, 4, 5), (0, 1)),
}


@lifts(*ROWS)
def lift_rows(n: Node) -> None:
    """Row by row, matrix by matrix or signal by signal: whatever the first axes count."""
    why, count, ins = ROWS[n.kind]
    if n.kind == "TensorScatter" and n.attr("mode", "linear") == "linear":
        axis = int(n.attr("axis", -2))
        check_known(n, n.shape(0)[axis] - n.shape(1)[axis] + 1, at=2, least=0)
    along(n, why, range(len(n.shape(0)))[:count], ins)


@lifts(*BATCHES)
def lift_batches(n: Node) -> None:
    """Entry by entry of a batch."""
    why, ins, outs = BATCHES[n.kind]
    emit_opaque(n, why, [Dim("b", n.shape(0)[0])], {k: [0] for k in ins if n.has(k)}, {k: [0] for k in outs})


@lifts("TopK")
def lift_top_k(n: Node) -> None:
    """Selection by value along one axis: independent along the others."""
    rank = len(n.shape(0))
    at = n.axis(-1, rank)
    along(n, f"selects by value along axis {at}", [a for a in range(rank) if a != at], outs=range(len(n.outs)))


@lifts("RoiAlign")
def lift_roi_align(n: Node) -> None:
    """Region by region, channel by channel; a region may lie in any image."""
    dims = [Dim("r", n.shape(1)[0]), Dim("c", n.shape(0)[1])]
    emit_opaque(
        n, "samples inside regions that depend on the data", dims, {0: [None, 1], 1: [0, None], 2: [0, None]}, {0: [0, 1]}
    )


@lifts("ReverseSequence")
def lift_reverse_sequence(n: Node) -> None:
    """Every batch entry has a length of its own; all axes but time commute."""
    batch, time = int(n.attr("batch_axis", 1)), int(n.attr("time_axis", 0))
    axes: list[int | None] = [a for a in range(len(n.shape(0))) if a != time]
    dims = [Dim(f"x{a}", n.shape(0)[a]) for a in axes if a is not None]
    emit_opaque(n, "lengths depend on the data", dims, {0: axes, 1: [0 if a == batch else None for a in axes]}, {0: axes})


@lifts("DFT")
def lift_dft(n: Node) -> None:
    """A Fourier transform along one axis: the others commute, but for the last one, which holds real and imaginary parts."""
    rank = len(n.shape(0))
    axis = n.const(2) if n.has(2) else None
    if n.has(2) and axis is None:
        raise Declined
    at = int(axis.reshape(-1)[0]) if axis is not None else int(n.attr("axis", 1 if n.version < 20 else -2))
    axes: list[int | None] = [a for a in range(rank - 1) if a != at % rank]
    emit_opaque(n, "a Fourier transform", [Dim(f"x{a}", n.shape(0)[a]) for a in axes if a is not None], {0: axes}, {0: axes})


@lifts("BitCast")
def lift_bit_cast(n: Node) -> None:
    """Cell by cell, where both types are equally wide."""
    if n.shape(0) != n.out().shape:
        raise Declined
    emit_cells(n, "reads bits as another type")


def opaque_integer_conv(n: Node) -> None:
    """Image by image, and by output channel where there is one group."""
    w = 1 if n.kind == "ConvInteger" else 3
    dims, ins = [Dim("b", n.shape(0)[0])], {0: [0], w: [None]}
    out: Axes = {0: [0]}
    filters = n.shape(w)[0]
    own = [w + 1, w + 2] if n.kind == "QLinearConv" else [w + 2]  # scales and zero points that each filter may have its own of
    shared = all(n.tensor(k).size == 1 for k in range(len(n.ins)) if k not in (0, w, 8, *own) and n.has(k))
    each = [k for k in own if n.has(k) and n.shape(k) == (filters,) and filters > 1]
    if int(n.attr("group", 1)) == 1 and shared and all(n.tensor(k).size == 1 for k in own if n.has(k) and k not in each):
        dims.append(Dim("o", filters))
        ins = {0: [0, None], w: [None, 0], **({8: [None, 0]} if n.has(8) else {}), **{k: [None, 0] for k in each}}
        out = {0: [0, 1]}
    emit_opaque(n, "products of shifted integers", dims, ins, out)
