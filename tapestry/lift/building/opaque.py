"""Operators without an affine form: kept as ONNX nodes, with the dimensions along which they may still be split."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from onnx import NodeProto, helper

from tapestry.ir.graph import Dim, Opaque
from tapestry.lift.building.builder import Node
from tapestry.lift.building.registry import lifts
from tapestry.lift.file.structure import captured, subgraphs
from tapestry.lift.normalize.unroll import WHY_NOT, rename_captured
from tapestry.onnx_eval.opaque_node import RANDOM

Axes = Mapping[int, Sequence[int | None]]


def emit_opaque(n: Node, why: str, dims: Sequence[Dim], in_axes: Axes, out_axes: Axes) -> None:
    """Emit a node as an `Opaque`: inputs renamed in0.., outputs out0.., outer names of its subgraphs made inputs too."""
    proto = NodeProto()
    proto.CopyFrom(n.proto)
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
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    op = Opaque(
        outs=tuple(t.name for t in outs), ins=tuple(ins), kind=n.kind, node=proto.SerializeToString(deterministic=True),
        opsets=tuple(sorted((d, v) for d, v in n.b.opsets.items() if d in ("", domain))), dims=tuple(dims),
        in_axes=tuple(tuple(in_axes.get(k, none)) for k in range(len(ins))),
        out_axes=tuple(tuple(out_axes.get(k, none)) for k, o in enumerate(n.outs) if o), source=(n.source,), why=why,
    )  # fmt: skip
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
    stack = [node]
    while stack:
        at = stack.pop()
        if at.op_type in RANDOM and at.domain in ("", "ai.onnx") and not any(a.name == "seed" for a in at.attribute):
            text = f"{n.b.seed}|{n.source}|{at.output[0]}"
            value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:2], "little")
            at.attribute.append(helper.make_attribute("seed", value if at.op_type == "Dropout" else float(value)))
        stack += [inner for g in subgraphs(at) for inner in g.node]


def _along(n: Node, why: str, axes: Sequence[int], ins: Sequence[int] = (0,)) -> None:
    """Opaque, splittable along the given axes of the first input, which some inputs and all outputs share."""
    shape = n.shape(0)
    dims = [Dim(f"x{a}", shape[a]) for a in axes]
    in_axes = {k: list(axes) for k in ins if n.has(k)}
    n.opaque(why, dims, in_axes, {k: list(axes) for k in range(len(n.outs))})


@lifts("TopK")
def lift_sorted(n: Node) -> None:
    """Selection by value along one axis: independent along the others."""
    rank = len(n.shape(0))
    at = n.axis(-1, rank)
    _along(n, f"selects by value along axis {at}", [a for a in range(rank) if a != at])


@lifts("GridSample")
def lift_grid_sample(n: Node) -> None:
    """Sampling at computed places, image by image."""
    n.opaque("samples where the grid says", [Dim("b", n.shape(0)[0])], {0: [0], 1: [0]}, {0: [0]})
