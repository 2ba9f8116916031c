"""Law 8, of plans that claim the same bits on any number of devices; it shares nothing with what the planner chooses by.

What is rounded in an order that a kernel chooses (sums of floats, elementary functions) is computed in blocks of one
dimension: the first of at least 24 points, else the longest. A device may have whole blocks of it, ``[k n / 24]`` to
``[l n / 24]``, and all of every other dimension. What IEEE 754 fixes cell by cell, and whole numbers, may be cut anywhere.
"""

from __future__ import annotations

from tapestry.errors import LawError
from tapestry.ir.expr import Call, distinct
from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.laws import where
from tapestry.ir.program import Launch, Program
from tapestry.ir.types import FLOATS

BLOCKS = 24
ROUNDED_ALIKE = frozenset(
    {"add", "sub", "mul", "div", "sqrt", "neg", "abs", "sign", "floor", "ceil", "round", "where", "cast", "isnan", "isinf"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "shl", "shr", "philox"}
)


def check_exact(graph: Graph, program: Program) -> int:
    """Check every split and every launch; returns how many were looked at.

    Raises:
        LawError: naming the operation and the cut.
    """
    free, along = [_cut_anywhere(op) for op in graph.ops], [_along(op) for op in graph.ops]
    for op, anywhere, axis in zip(graph.ops, free, along, strict=True):
        parts: dict[str, int] = {}
        for s in op.splits:
            parts[s.dim] = parts.get(s.dim, 1) * s.parts
        wrong = [d for d, n in parts.items() if axis is None or op.space[axis].name != d or BLOCKS % n]
        if wrong and not anywhere:
            raise LawError("exact", f"a cut of '{wrong[0]}' changes results in the last bits", where=where(op))
    launches = [s for s in program.steps if isinstance(s, Launch) and 0 <= s.op < len(free)]  # others the walk refuses
    for step in launches:
        if not free[step.op]:
            _blocks(graph.ops[step.op], along[step.op], step)
    return len(graph.ops) + len(launches)


def _blocks(op: Op, along: int | None, step: Launch) -> None:
    """A launch takes whole blocks of the one dimension, and all of the others."""
    for box in set(step.blocks) - {None}:
        assert box is not None
        for k, ((lo, hi), d) in enumerate(zip(box, op.space, strict=False)):
            edges = {n * d.size // BLOCKS for n in range(BLOCKS + 1)} if k == along else {0, d.size}
            if lo < hi and not {lo, hi} <= edges:
                what = f"a device computes {lo}:{hi} of '{d.name}', which is no canonical part of {d.size}"
                raise LawError("exact", what, where=where(op))


def _along(op: Op) -> int | None:
    """Which dimension is computed in blocks; None of an operation of single points."""
    sizes = [d.size for d in op.dims]
    long = [k for k, n in enumerate(sizes) if n >= BLOCKS]
    if long:
        return long[0]
    most = max(sizes, default=0)
    return sizes.index(most) if most > 1 else None


def _cut_anywhere(op: Op) -> bool:
    if not isinstance(op, Block) or (op.monoid is not None and any(e.dtype in FLOATS for e in op.body)):
        return False
    calls = [x for x in distinct((*op.point, *op.then)) if isinstance(x, Call)]
    return all(x.fn in ROUNDED_ALIKE or not FLOATS & {x.dtype, *(a.dtype for a in x.args)} for x in calls)
