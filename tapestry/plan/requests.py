"""What a user asks of a plan: pinned splits and fixed layouts, checked against the graph and the mesh.

``conv1:h=8@d0`` cuts dimension h of operation conv1 in 8 parts over mesh axis d0 (``@d0+d1`` over both), ``conv1:h=d0`` in as
many as the axis has, ``conv1:h=d0,w=d1`` two dimensions; ``conv1:replicated`` cuts none, ``conv1:replicated@d0`` none over d0.
``x:2=8@d0`` lays axis 2 of tensor x over d0; ``x:replicated`` puts all of x on every device. Operations, tensors, dimensions
and axes may be called as the model's author calls them, and by patterns: ``layers.*.self_attn.q_proj:out=tp``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod

from tapestry.errors import PlanError, similar
from tapestry.ir.graph import Block, Graph, Op, Opaque, Split
from tapestry.ir.kernel import cut
from tapestry.ir.plan import Layout, Mesh
from tapestry.ir.provenance import dim_names, matches, operation_names, weight_names
from tapestry.ir.provenance import parts as parts_of_model
from tapestry.ir.recognition.running_state import as_scan
from tapestry.plan.strategy import Pin
from tapestry.rewrites.core.applied import apply_moves
from tapestry.rewrites.core.rule import Move, Refusal
from tapestry.rewrites.splitting import block_scan
from tapestry.rewrites.splitting.split import refusal


def parse_pins(texts: Sequence[str], graph: Graph, mesh: Mesh, folded: Sequence[str] = ()) -> dict[int, tuple[Pin, ...]]:
    """Pins by operation.

    Args:
        folded: names of nodes of the model that became views or constants, for the message.

    Raises:
        PlanError: the operation, dimension or axis does not exist, or the split is impossible; says why, with a witness.
    """
    out: dict[int, tuple[Pin, ...]] = {}
    for i, p in read_pins(texts, graph, mesh, folded):
        axes = _axes("+".join(p.axes), p.parts, mesh, p.text)
        taken = [mesh[known.axis].name for known in out.get(i, ()) if known.axis in axes and known.dim != p.dim]
        if taken:
            raise PlanError(f"mesh axis '{taken[0]}' is pinned twice for this operation", where=f"--pin '{p.text}'")
        out[i] = tuple(dict.fromkeys((*out.get(i, ()), *(Pin(p.dim, a) for a in axes))))
        why = _impossible(graph.ops[i], out[i], mesh)
        if why is not None:
            raise PlanError(f"the pin is impossible: {why.reason}", where=f"--pin '{p.text}'", why=why.witness)
    return out


def _impossible(op: Op, pins: Sequence[Pin], mesh: Mesh) -> Refusal | None:
    """Why an operation cannot be cut as its pins say; ``None`` where it can."""
    cuts = {p.dim: prod(mesh[q.axis].size for q in pins if q.dim == p.dim) for p in pins if p.dim}
    found = (refusal(op, Split(d, n, f"mesh.{mesh[pins[0].axis].name}")) for d, n in cuts.items())
    return next((why for why in found if why is not None), None)


def held(pins: Mapping[str, tuple[Pin, ...]], ops: Sequence[Op], mesh: Mesh) -> dict[int, tuple[Pin, ...]] | None:
    """Pins by operation, of those by first result; ``None`` where an operation is gone, or cannot be cut so any more."""
    makers = {t: i for i, op in enumerate(ops) for t in op.outs if t in pins}
    out: dict[int, tuple[Pin, ...]] = {}
    for t, mine in pins.items() if len(makers) == len(pins) else ():  # (several of them may be one operation now)
        i = makers[t]
        out[i] = tuple(dict.fromkeys((*out.get(i, ()), *mine)))
        if len({p.axis for p in out[i]}) < len(out[i]) or _impossible(ops[i], out[i], mesh):
            return None
    return out if len(makers) == len(pins) else None


@dataclass(frozen=True, slots=True)
class AskedPin:
    """A pin of an operation before it is known on which devices that runs; ``parts`` where they are given. Without a dimension
    no axis cuts it."""

    dim: str
    axes: tuple[str, ...]
    parts: str | None
    text: str = field(compare=False)

    def on(self, op: Op, mesh: Mesh) -> tuple[Pin, ...] | None:
        """On a mesh; ``None`` where that lacks an axis, has another number of devices along it, or the split is impossible."""
        at = {a.name: k for k, a in enumerate(mesh)}
        if any(a not in at for a in self.axes):
            return None
        found = tuple(Pin(self.dim, k) for k in sorted(at[a] for a in self.axes))
        parts = prod(mesh[p.axis].size for p in found)
        return None if self.parts not in (None, str(parts)) or _impossible(op, found, mesh) else found


def read_pins(texts: Sequence[str], graph: Graph, mesh: Mesh, folded: Sequence[str] = ()) -> Iterator[tuple[int, AskedPin]]:
    """(operation, pin) of everything that pins name, of whatever number of parts.

    Raises:
        PlanError: the operation, dimension or axis does not exist.
    """
    for text in texts:
        name, _, said = text.rpartition(":")
        for item in said.split(","):
            m = re.fullmatch(r"(?:(\w+)=(?:(\d+)@)?|replicated(?:@|$))([\w+]*)", item)
            if not name or not m or (m.group(1) and not m.group(3)):
                hint = "OPERATION:dim=parts@axis or OPERATION:dim=axis, as in conv1:h=8@d0 or layers.*.mlp.up_proj:out=d0"
                hint += ", OPERATION:dim=axis,dim=axis or OPERATION:replicated"
                raise PlanError(f"'{text}' is not a pin", where="--pin", hint=hint)
            axes = m.group(3) or "+".join(a.name for a in mesh)
            _axes(axes, None, mesh, text)
            for i, dim in _operations(name, m.group(1) or "", graph, text, folded):
                yield i, AskedPin(dim, tuple(axes.split("+")), m.group(2), text)


def scan_blocks(pins: Mapping[int, tuple[Pin, ...]], graph: Graph, mesh: Mesh) -> tuple[Graph, list[Move], list[str]]:
    """Scans that are pinned along the dimension in which they run, put into as many blocks, so that only totals travel.

    Returns:
        the graph, the moves to it, and further pins: each device makes the totals of its own blocks.
    """
    moves: list[Move] = []
    more: list[str] = []
    for op, given in [(graph.ops[i], given) for i, given in pins.items()]:
        scan = as_scan(op)
        if scan is None or not isinstance(op, Block):
            continue
        axes = [mesh[p.axis] for p in given if p.dim == scan.dim]
        parts = prod(a.size for a in axes)
        if block_scan.refusal_of_scan(op, parts) is not None:
            continue
        moves.append(Move("block_scan", op.outs[0], (("parts", parts),)))
        graph = apply_moves(graph, moves[-1:])
        totals = graph.ops[graph.find(op.outs[0]) - 2]
        block = next(d for d, old in zip(totals.dims, op.dims, strict=True) if old.name == scan.dim)
        if block.size == parts:  # else the last device would have none
            more.append(f"{totals.outs[0]}:{block.name}={parts}@{'+'.join(a.name for a in axes)}")
    return graph, moves, more


def _axes(text: str, parts: str | None, mesh: Mesh, whole: str) -> list[int]:
    """Mesh axes by name; ``parts``, where it is given, is how many devices they have together."""
    names = [a.name for a in mesh]
    axes = text.split("+")
    unknown = [a for a in axes if a not in names]
    if unknown:
        raise PlanError(f"there is no mesh axis '{unknown[0]}'", where=f"'{whole}'", hint=similar("", names) or "a --mesh")
    found = sorted(names.index(a) for a in axes)
    size = prod(mesh[a].size for a in found)
    if parts is not None and size != int(parts):
        raise PlanError(
            f"{parts} parts over mesh axis {text} of {size} devices",
            where=f"'{whole}'",
            hint=f"{size} parts, or another --mesh",
        )
    return found


def _operations(name: str, wanted: str, graph: Graph, text: str, folded: Sequence[str]) -> list[tuple[int, str]]:
    """Operations of an ONNX node, a tensor or a part of the model that have the dimension."""
    found = _called(name, graph)
    if not found:
        if name in folded:
            raise PlanError(
                f"'{name}' has no index space of its own: it became a view or a constant, or nothing needs it",
                where=f"--pin '{text}'",
                hint="pin an operation that reads its result",
            )
        known = sorted({*(s for op in graph.ops for s in (*op.source, *op.outs)), *operation_names(graph)})
        close = get_close_matches(name, known, 4) or known[:6]
        raise PlanError(f"there is no operation '{name}'", where=f"--pin '{text}'", hint=f"for example {', '.join(close)}")
    if not wanted:
        return [(i, "") for i in found]
    out = [(i, d) for i in found for d in _dimensions(graph.ops[i], wanted, graph)]
    out = out or [(i, d) for i in found for d in _axis(graph.ops[i], wanted)]
    if not out:
        raise PlanError(_no_dim(graph, found[-1], name, wanted), where=f"--pin '{text}'")
    return out


def _called(name: str, graph: Graph) -> list[int]:
    """Operations by the name of a node or tensor, else by the author's, else by a pattern of any of these."""
    found = [i for i, op in enumerate(graph.ops) if name in op.source or name in op.outs]
    if found:
        return found
    named = list(zip(operation_names(graph), parts_of_model(graph), strict=True))
    found = [i for i, names in enumerate(named) if any(n and matches(name, n) for n in names)]
    if found or "*" not in name:
        return found
    return [i for i, op in enumerate(graph.ops) if any(matches(name, n) for n in (*op.source, *op.outs))]


def _dimensions(op: Op, wanted: str, graph: Graph) -> list[str]:
    """The dimension of an operation by its own name, or by the author's."""
    return [wanted] if wanted in op.ranges else [d for d, n in dim_names(op, graph).items() if n == wanted]


def _axis(op: Op, wanted: str) -> list[str]:
    """``x<k>`` also names axis k of the result."""
    axis = int(wanted[1:]) if re.fullmatch(r"x\d+", wanted) else len(op.dims)
    return [op.dims[axis].name] if axis < len(op.dims) else []


def _no_dim(graph: Graph, i: int, name: str, wanted: str) -> str:
    op = graph.ops[i]
    better = dim_names(op, graph)
    dims = ", ".join(f"{d.name}{f' or {better[d.name]}' if d.name in better else ''} ({d.size})" for d in op.space) or "none"
    why = f" (it is opaque: {op.why})" if isinstance(op, Opaque) else ""
    return f"'{name}' has no dimension '{wanted}'; its dimensions are: {dims}{why}"


def parse_layouts(texts: Sequence[str], graph: Graph, mesh: Mesh) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Layouts of graph inputs (or weights), and of graph outputs.

    Raises:
        PlanError: the tensor is neither, the axis does not exist, or the cut is impossible.
    """
    inputs: dict[str, Layout] = {}
    outputs: dict[str, Layout] = {}
    for text in texts:
        tensor, _, spec = text.rpartition(":")
        if not tensor or not spec:
            raise PlanError(f"'{text}' is not a layout", where="--layout", hint="TENSOR:axis=parts@axis or TENSOR:replicated")
        for name in _named_ends(tensor, graph, text):
            axes = dict(enumerate(graph.names.axes.get(name, ())))
            layout = _layout(spec, graph.tensors[name].shape, mesh, text, {n: k for k, n in axes.items() if n})
            (outputs if name in graph.outputs else inputs)[name] = layout
    return inputs, outputs


def _named_ends(name: str, graph: Graph, text: str) -> list[str]:
    """Inputs, outputs and weights by name, by that of the parameter that a weight was, or by a pattern."""
    ends = [*graph.inputs, *graph.outputs, *graph.weights]
    if name in ends:
        return [name]
    better = weight_names(graph)
    found = [t for t in dict.fromkeys(ends) if matches(name, t) or matches(name, better.get(t, t))]
    if not found:
        first = [*graph.inputs, *graph.outputs, *list(graph.weights)[:4]]
        close = get_close_matches(name, [*ends, *better.values()], 4) or first
        hint = f"one of {', '.join(close)}"
        raise PlanError(f"'{name}' is no input and no output", where=f"--layout '{text}'", hint=hint)
    return found


def _layout(spec: str, shape: tuple[int, ...], mesh: Mesh, text: str, named: Mapping[str, int]) -> Layout:
    """A layout of a tensor of this shape, whose axes may have names."""
    out: list[int | None] = [None] * len(mesh)
    parts_of: dict[int, int] = {}
    for item in [] if spec == "replicated" else spec.split(","):
        m = re.fullmatch(r"(\w+)=(?:(\d+)@)?([\w+]+)", item)
        if m and not m.group(1).isdecimal() and m.group(1) not in named:
            m = None
        if not m:
            raise PlanError(
                f"'{item}' is not axis=parts@axis", where=f"--layout '{text}'", hint="as in x:2=8@d0, or x:replicated"
            )
        axis = named[m.group(1)] if m.group(1) in named else int(m.group(1))
        if axis >= len(shape):
            raise PlanError(f"the tensor has {len(shape)} axes, not {axis + 1}", where=f"--layout '{text}'")
        cut_by = _axes(m.group(3), m.group(2), mesh, text)
        for a in cut_by:
            if out[a] is not None:
                raise PlanError(f"mesh axis '{mesh[a].name}' is used twice", where=f"--layout '{text}'")
            out[a] = axis
        parts_of[axis] = parts_of.get(axis, 1) * prod(mesh[a].size for a in cut_by)
    for axis, parts in parts_of.items():
        if parts > shape[axis]:
            empty = next(k for k in range(parts) if cut(shape[axis], parts, k)[0] == cut(shape[axis], parts, k)[1])
            raise PlanError(
                f"axis {axis} has {shape[axis]} elements and cannot be cut into {parts} non-empty parts",
                where=f"--layout '{text}'",
                why=f"part {empty} would hold nothing",
            )
    return tuple(out)
