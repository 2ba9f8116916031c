"""The checker of a plan whose sizes are symbols: what `certificate` proves of boxes, for every size of a region.

`certificate` walks the steps and states the laws. It asks what holds of boxes; here isl answers, for every size of a region.
The largest peak is that of some size near the region's ends (`_peaks`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.kernel import whole
from tapestry.ir.laws import where
from tapestry.ir.many_sizes.size_formula import Region
from tapestry.ir.many_sizes.symbolic_plan import SymbolicPlan
from tapestry.verify import certificate
from tapestry.verify.box_lists import Breach, everywhere
from tapestry.verify.many_sizes.size_proofs import Proofs, SizedLawError, named
from tapestry.verify.many_sizes.sized_memory import largest_peaks


def check_sizes(
    plan: SymbolicPlan, region: Region, symbols: Sequence[str], limits: Sequence[int] | None = None
) -> tuple[dict[str, int], list[int]]:
    """Prove the boxes of a plan for every size of a region.

    Args:
        limits: bytes that each device has.

    Returns:
        how many facts of each law, and the largest peak of every device in bytes, at whatever size it is reached.

    Raises:
        SizedLawError: one does not hold at some size; with that size and a cell.
    """
    facts = Proofs(region=region, symbols=symbols)
    for op in plan.graph.ops:
        _operation(facts, plan.graph, op)
    certificate.check_boxes(plan.graph, plan.program, facts)
    peaks, at = largest_peaks(plan, region)
    for d, peak in enumerate(peaks):
        facts.laws["memory"] += 1
        if limits is not None and peak > limits[d]:
            what, blame = f"device {d} needs {peak:,} bytes of {limits[d]:,}", range(len(symbols))
            raise SizedLawError("memory", what, where="", why=f"at {named(symbols, at[d])}", sizes=at[d], blame=blame)
    return dict(facts.laws), peaks


def cover(regions: Sequence[Region], asked: Region, symbols: Sequence[str]) -> int:
    """Every size that was asked for is in a region; how many facts that is.

    Raises:
        SizedLawError: one is not.
    """
    facts, missing = Proofs(region=asked, symbols=symbols), " and ".join(f"not ({r.text()})" for r in regions)
    if facts.somewhere((), missing) is not None:
        raise facts.broken(Breach("sizes", "a size is in no region"), "sizes.json")
    return 1


def _operation(facts: Proofs, graph: Graph, op: Op) -> None:
    """Laws 1 to 3 at all sizes: results are as large as the dimensions, and reads without another value stay inside."""
    tensors, name, everything = graph.tensors, where(op), list[tuple[str, Sequence[int], Sequence[int]]]()
    points = facts.spans((whole(tuple(d.size for d in op.space)),), len(op.space))
    if isinstance(op, Block):
        everything += [(t, tensors[t].shape, [d.size for d in op.dims]) for t in op.outs]
        for k, r in enumerate(op.reads):
            if r.other is None:
                facts.laws["access"] += 1
                if facts.reads_outside(op, graph, k, points, everywhere(tensors[r.tensor].shape, points), ())[0] >= 0:
                    raise facts.broken(Breach("access", f"it reads outside of '{r.tensor}'"), name)
    else:
        for t, axes in zip((*op.ins, *op.outs), (*op.in_axes, *op.out_axes), strict=True):
            cut = [(axis, d.size) for d, axis in zip(op.dims, axes, strict=True) if t and axis is not None]
            everything.append((t, [tensors[t].shape[axis] for axis, _ in cut], [n for _, n in cut]))
    for t, shape, wanted in everything:
        facts.laws["agreement"] += 1
        if facts.differ(everywhere(shape, points), everywhere(wanted, points)) >= 0:
            raise facts.broken(Breach("agreement", f"'{t}' is not of its size"), name)
