"""Operators that work cell by cell, on types that no expression computes with: opaque, yet splittable along every axis."""

from __future__ import annotations

from tapestry.ir.types import FLOAT8, FLOATS, STORED
from tapestry.lift.building.builder import Node
from tapestry.lift.building.opaque import emit_opaque

MOVES = frozenset(
    {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Transpose", "Expand", "Tile", "Slice", "Split", "Concat"}
)
WIDENING = frozenset({"Cast", "CastLike", "DequantizeLinear"})
CELL_BY_CELL = frozenset({"Cast", "CastLike", "BitCast", "QuantizeLinear", "DequantizeLinear"})


def touches_stored(n: Node) -> bool:
    """Whether the node computes with a type that is only stored (8 bits of float, 4 of integer, complex)."""
    if n.kind in WIDENING and n.dtype(0) in FLOAT8 and n.out().dtype in FLOATS:
        return False
    names = [*n.ins, *n.outs]
    return any(n.b.tensor(name).dtype in STORED for name in names if name)


def lift_stored(n: Node) -> None:
    """A node on stored types that does more than move them."""
    why = "its types are stored, not computed with"
    x, y = n.tensor(0) if n.has(0) else None, n.out()
    if n.kind not in CELL_BY_CELL or x is None or x.shape != y.shape:
        n.opaque(why)
        return
    emit_cells(n, why)


def emit_cells(n: Node, why: str) -> None:
    """Emit a node that maps every cell of its first input to the same cell of its output.

    Scales and zero points go along with the axis they are given for; blocked ones only along the axes they share.
    """
    x = n.tensor(0)
    dims = n.out_dims()
    axis = min(n.axis(1, len(x.shape)), len(x.shape) - 1) if len(x.shape) > 1 else 0  # of the scales
    in_axes: dict[int, list[int | None]] = {0: list(range(len(dims)))}
    blocked = bool(n.attr("block_size", 0))
    for k in range(1, len(n.ins)):
        if not n.has(k) or n.kind == "CastLike":
            continue
        shape = n.shape(k)
        if blocked and len(shape) == len(dims):
            in_axes[k] = [a if a != axis and shape[a] == x.shape[a] else None for a in range(len(dims))]
        elif len(shape) == 1 and shape != (1,) and len(x.shape) > 0:
            in_axes[k] = [0 if a == axis else None for a in range(len(dims))]
        elif len(shape) == len(dims) and len(dims) > 1:
            blocked = True
            in_axes[k] = [a if shape[a] == x.shape[a] else None for a in range(len(dims))]
    axes = [a for a in range(len(dims)) if not (blocked and a == axis)]
    emit_opaque(n, why, [dims[a] for a in axes], {k: [v[a] for a in axes] for k, v in in_axes.items()}, {0: axes})
