"""Nodes without an affine form: they stay ONNX nodes, with the dimensions along which they may still be split.

Nodes that work cell by cell, on types that no expression computes with, are opaque too, and split along every axis.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from copy import deepcopy

from onnx import NodeProto, helper

from tapestry.ir.graph import Dim, Opaque
from tapestry.ir.types import FLOAT8, FLOATS, STORED
from tapestry.lift.builder import Node
from tapestry.lift.file.protos import WHY_NOT, attributes, captured, is_standard, nested, rename_captured, subgraphs
from tapestry.onnx_eval.opaque_node import RANDOM
from tapestry.system.quoting import printable

Axes = Mapping[int, Sequence[int | None]]
MOVES = frozenset(
    {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Transpose", "Expand", "Tile", "Slice", "Split", "Concat"}
)
WIDENING = frozenset({"Cast", "DequantizeLinear"})
CELL_BY_CELL = frozenset({"Cast", "BitCast", "QuantizeLinear", "DequantizeLinear"})


def emit_opaque(n: Node, why: str, dims: Sequence[Dim] = (), in_axes: Axes = {}, out_axes: Axes = {}) -> None:  # noqa: B006
    """Emit a node as an `Opaque`: inputs renamed in0.., outputs out0.., outer names of its subgraphs made inputs too.

    Args:
        why: what keeps the node from being block operations.
        dims: dimensions that the node commutes with splitting along.
        in_axes, out_axes: for each input and output, its axis along every one of ``dims``; None where it has none.
    """
    proto = deepcopy(n.proto)
    proto.ClearField("metadata_props")
    for k in reversed(range(len(proto.attribute))):
        if proto.attribute[k].name.startswith("tapestry."):  # notes of our own
            del proto.attribute[k]
    proto.name = ""
    _seed(proto, n)
    ins = [*n.ins, *captured(n.proto)]
    rename = {name: f"in{k}" for k, name in reversed(list(enumerate(ins))) if name and k >= len(n.ins)}
    for g in subgraphs(proto):
        rename_captured(g, rename)
    del proto.input[:]
    proto.input.extend(f"in{k}" if i else "" for k, i in enumerate(n.ins))
    del proto.output[:]
    proto.output.extend(f"out{k}" if o else "" for k, o in enumerate(n.outs))
    outs = [n.b.tensor(o) for o in n.outs if o]
    for i in ins:
        if i:
            n.b.tensor(i)
    none = (None,) * len(dims)
    domains = {"", *("" if at.domain == "ai.onnx" else at.domain for at in nested([proto]))}
    op = Opaque(
        outs=tuple(t.name for t in outs),
        ins=tuple(ins),
        kind=n.kind,
        node=proto.SerializeToString(deterministic=True),
        opsets=tuple(sorted((d, v) for d, v in n.b.opsets.items() if d in domains)),
        dims=tuple(dims),
        in_axes=tuple(tuple(in_axes.get(k, none)) for k in range(len(ins))),
        out_axes=tuple(tuple(out_axes.get(k, none)) for k, o in enumerate(n.outs) if o),
        source=(n.source,),
        why=printable(why),
    )
    n.b.emit(op, outs)


WHY = {
    "Loop": "how often it runs depends on the data, or is more than the steps that are written out",
    "Scan": "it has more steps, or more weights inside, than are written out",
    "If": "which branch is taken depends on the data",
    **dict.fromkeys(("NonZero", "Compress", "Unique", "NonMaxSuppression"), "how many results there are depends on the data"),
    "MaxUnpool": "its indices count positions through the whole tensor",
    "ImageDecoder": "it decodes a file",
    "Range": "its length depends on the data",
}


def reason(n: Node, why: str) -> str:
    """Why a node without a lifter that takes it is opaque: what the operator is, then what this one reads or writes."""
    own = WHY.get(n.kind, "")
    not_linear = str(n.attr(WHY_NOT, ""))
    own = f"{own}; {not_linear}" if own and not_linear else own
    return f"{own}: {why}" if own and why else own or why or "no affine form is known"


def _seed(node: NodeProto, n: Node) -> None:
    """Give random operators without a seed one of the node's own, so that every device draws the same numbers."""
    for at in nested([node]):
        if is_standard(at, *RANDOM) and "seed" not in attributes(at):
            text = f"{n.b.seed}|{n.source}|{at.output[0]}"
            value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:2], "little")
            at.attribute.append(helper.make_attribute("seed", value if at.op_type == "Dropout" else float(value)))


# cell by cell


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
        emit_opaque(n, why)
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
        if not n.has(k):
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
