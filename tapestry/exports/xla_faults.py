"""What XLA on CPUs (JAX 0.10.2) may compute wrongly where a plan's layouts are left to its partitioner.

Both were seen with functions of JAX's own: a convolution whose image is cut in space, and whole along another mesh axis, while
its weights are cut along any; and the greatest or least of floats across devices, which loses a NaN. ``shardy-ranks`` leaves
XLA nothing to cut, and merges extremes as integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tapestry.build.store import Build
from tapestry.ir.graph import Block
from tapestry.ir.monoid import MONOIDS, Best, ByPrimitive, Monoid, Product
from tapestry.ir.naming.author_names import operation_names
from tapestry.ir.plan import Layout, Strategy
from tapestry.ir.recognise.convolution import Conv, convolution
from tapestry.ir.types import FLOATS

INSTEAD = "shardy-ranks"
Reads = Callable[[int, str], Layout]
"""The layout in which an operation, by its number, reads a tensor."""


def wrong_in_xla(build: Build, reads: Reads) -> list[dict[str, str]]:
    """Operations that XLA may compute wrongly under a plan's layouts: ``operation``, ``why``, and what to use ``instead``."""
    graph, called = build.plan.graph, operation_names(build.plan.graph)
    return [
        {"operation": called[k], "why": why, "instead": INSTEAD}
        for k, (op, s) in enumerate(zip(graph.ops, build.plan.strategies, strict=True))
        if isinstance(op, Block)
        for why in (*_convolutions(build, reads, k, op), *_extremes(op, s))
    ]


def _convolutions(build: Build, reads: Reads, k: int, op: Block) -> Iterator[str]:
    found = convolution(op)
    if found is None:
        return
    mesh = build.plan.mesh
    image, weights = (reads(k, op.reads[i].tensor) for i in (found.x, found.w))
    space, cut = _axes(image, 2), _axes(weights)
    whole = any(a.size > 1 and axis is None for a, axis in zip(mesh, image, strict=True))
    if space and cut and whole and (_axes(weights, 2) or any(_overlaps(op, found, image[a]) for a in space)):
        names = [", ".join(mesh[a].name for a in sorted(some)) for some in (space, cut)]
        yield f"a convolution of an image cut in space along {names[0]}, and not by all axes, by weights cut along {names[1]}"


def _axes(layout: Layout, first: int = 0) -> set[int]:
    """The mesh axes that cut a tensor along its axes from the first on."""
    return {a for a, axis in enumerate(layout) if axis is not None and axis >= first}


def _overlaps(op: Block, conv: Conv, axis: int | None) -> bool:
    """Whether a cell of the result reads other cells than its own place along an axis of the image."""
    v = conv.windows[axis - 2] if axis is not None else None
    return v is not None and (v.stride > 1 or (v.window != "" and op.ranges[v.window] > 1))


def _extremes(op: Block, s: Strategy) -> Iterator[str]:
    merged = {d.name for d in op.reduce} & set(s.dims)
    if op.monoid and merged and _extreme(MONOIDS[op.monoid], [e.dtype for e in op.body]):
        yield "the greatest or least of values across devices, which loses a NaN"


def _extreme(monoid: Monoid, dtypes: list[str]) -> bool:
    """Whether a result is the greatest or least float."""
    match monoid.structure:
        case ByPrimitive(fn):
            return fn in ("max", "min") and dtypes[0] in FLOATS
        case Best():
            return dtypes[0] in FLOATS
        case Product(parts):
            at = 0
            for part in parts:
                if _extreme(part, dtypes[at : at + len(part.fields)]):
                    return True
                at += len(part.fields)
        case _:
            pass
    return False
