"""The checker of a plan whose sizes are symbols: what `certificate` proves of boxes, for every size of a region.

What a program does to names (what is alive, what a buffer holds, who sends to whom) is the same at every size: `certificate`
replays it at the sizes at which the plan was made. Here the steps are walked once more for their boxes alone, by no part of
the planner. The largest peak is that of some size near the region's ends (`_peaks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tapestry.ir.graph import Block, Dim, Graph, Op
from tapestry.ir.kernel import Box
from tapestry.ir.laws import where
from tapestry.ir.program import Launch, Program, Reduce, Transfer
from tapestry.ir.sizes.size_formula import Region
from tapestry.ir.sizes.symbolic_plan import SymbolicPlan
from tapestry.ir.state import varies
from tapestry.verify.sizes.size_proofs import Proofs, SizedLawError, sized
from tapestry.verify.sizes.sized_memory import largest_peaks

Parts = dict[int, list[Box]]
"""By device, the boxes of the reduced dimensions that its states have merged."""


@dataclass(slots=True)
class _Walk:
    """The steps so far: parts that states hold, and the blocks of each operation by mode."""

    graph: Graph
    program: Program
    proofs: Proofs
    holds: dict[str, Parts] = field(default_factory=dict[str, Parts])
    blocks: dict[int, dict[str, dict[str, Box]]] = field(default_factory=dict[int, dict[str, dict[str, Box]]])
    merged: set[int] = field(default_factory=set[int])


def check(
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
    walk = _Walk(plan.graph, plan.program, Proofs(region, symbols))
    for op in plan.graph.ops:
        _operation(walk, op)
    _declared(walk)
    for i, step in enumerate(plan.program.steps):
        name = f"step {i} ({type(step).__name__.lower()})"
        match step:
            case Launch():
                _launch(walk, step, f"{name} of {where(plan.graph.ops[step.op])}")
            case Transfer():
                _transfer(walk, step, name)
            case Reduce():
                _reduce(walk, step, name)
            case _:
                pass
    for i, op in enumerate(plan.graph.ops):
        _cover(walk, i, op)
    for t in plan.graph.outputs:
        whole = tuple((0, n) for n in plan.graph.tensors[t].shape)
        parts = _distinct(plan.program.buffers[plan.program.outputs[t]].boxes)
        walk.proofs.covered("written_once", f"output '{t}' misses a cell", f"output '{t}'", whole, parts)
    peaks, at = largest_peaks(plan, region)
    for d, peak in enumerate(peaks):
        walk.proofs.laws["memory"] += 1
        if limits is not None and peak > limits[d]:
            sizes = ", ".join(f"{s} = {n}" for s, n in zip(symbols, at[d], strict=True))
            what, blame = f"device {d} needs {peak:,} bytes of {limits[d]:,}", range(len(symbols))
            raise SizedLawError("memory", what, where="", why=f"at {sizes}", sizes=at[d], blame=blame)
    return dict(walk.proofs.laws), peaks


def cover(regions: Sequence[Region], asked: Region, symbols: Sequence[str]) -> int:
    """Every size that was asked for is in a region; how many facts that is.

    Raises:
        SizedLawError: one is not.
    """
    proofs = Proofs(asked, symbols)
    missing = " and ".join(f"not ({r.text()})" for r in regions)
    proofs.never("sizes", "a size is in no region", "sizes.json", (), missing)
    return proofs.laws["sizes"]


def _distinct(boxes: Sequence[Box | None]) -> list[Box]:
    """The boxes that differ as text."""
    return list({str(b): b for b in boxes if b is not None}.values())


def _operation(walk: _Walk, op: Op) -> None:
    """Laws 1 to 3 at all sizes: results are as large as the dimensions, and reads without another value stay inside."""
    tensors, name, extents = walk.graph.tensors, where(op), tuple((0, d.size) for d in op.dims)
    if isinstance(op, Block):
        for t in op.outs:
            walk.proofs.same("agreement", f"'{t}' is not of its size", name, tuple((0, n) for n in tensors[t].shape), extents)
        space = tuple((0, d.size) for d in op.space)
        for r in op.reads:
            if r.other is None:
                whole = tuple((0, n) for n in tensors[r.tensor].shape)
                given = op.space, space, r, tensors[r.tensor].shape
                walk.proofs.reads("access", f"it reads outside of '{r.tensor}'", name, given, whole)
        return
    for names, axes in ((op.ins, op.in_axes), (op.outs, op.out_axes)):
        for t, at in zip(names, axes, strict=True):
            for d, axis in zip(op.dims, at, strict=True):
                if t and axis is not None:
                    ends = ((0, tensors[t].shape[axis]),)
                    walk.proofs.same("agreement", f"'{t}' is not of its size", name, ends, ((0, d.size),))


def _declared(walk: _Walk) -> None:
    """Every buffer lies in its tensor."""
    for b in walk.program.buffers.values():
        whole = tuple((0, n) for n in walk.graph.tensors[b.tensor].shape)
        for d, box in enumerate(b.boxes):
            if box is not None:
                walk.proofs.within("agreement", f"not inside '{b.tensor}'", f"buffer '{b.name}', device {d}", box, whole)


def _dims(op: Op, mode: str) -> tuple[Dim, ...]:
    return op.dims if mode == "finish" else op.space


def _launch(walk: _Walk, step: Launch, name: str) -> None:
    op, proofs = walk.graph.ops[step.op], walk.proofs
    dims, n = _dims(op, step.mode), len(op.dims)
    inner = len(op.inner_dims) if isinstance(op, Block) else 0
    uncut = {"full": range(n, len(dims)), "partial": range(len(dims) - inner, len(dims)), "finish": range(0)}[step.mode]
    seen = walk.blocks.setdefault(step.op, {}).setdefault(step.mode, {})
    parts: Parts = {}
    for d, block in enumerate(step.blocks):
        if block is None:
            continue
        here = f"{name}, device {d}"
        proofs.within("split_partition", "a block is not in the index space", here, block, tuple((0, x.size) for x in dims))
        for (lo, hi), x in zip(block, dims, strict=True):
            if sized(lo, hi):
                proofs.never("split_partition", "a block is empty", here, (), f"{hi} <= {lo} and 0 < {x.size}")
        whole = tuple((0, dims[k].size) for k in uncut)
        proofs.same("split_partition", "a reduction over a part is not merged", here, tuple(block[k] for k in uncut), whole)
        _block_reads(walk, step, op, block, (d, here))
        _block_results(walk, step, op, block, (d, here))
        seen[str(block)] = block
        if step.mode == "partial":
            before = walk.holds[step.states[0]][d] if step.states else []
            parts[d] = [*before, block[n : len(dims) - inner]]
            proofs.apart("written_once", "part of a reduction is merged twice", here, parts[d])
        if step.mode == "finish":
            _complete(walk, op, walk.holds[step.states[0]][d], here)
    if step.mode == "partial":
        walk.holds |= dict.fromkeys(step.outs, parts)


def _block_reads(walk: _Walk, step: Launch, op: Op, block: Box, at: tuple[int, str]) -> None:
    """What a device's block reads is in the buffers that it is given."""
    (d, here), tensors = at, walk.graph.tensors
    if isinstance(op, Block):
        dims = op.space if step.mode != "finish" else (*op.dims, *op.reduce, *op.inner_dims)
        points = (*block, *((0, x.size) for x in dims[len(block) :]))
        used = {"full": op.body_reads() | op.then_reads(), "partial": op.body_reads(), "finish": op.then_reads()}[step.mode]
        for k in sorted(used):
            held = walk.program.buffers[step.ins[k]].boxes[d]
            assert held is not None  # `certificate` has seen that it is alive
            r = op.reads[k]
            what = f"device {d} reads '{r.tensor}' outside its buffer '{step.ins[k]}'"
            walk.proofs.reads("access_preserved", what, here, (dims, points, r, tensors[r.tensor].shape), held)
        return
    for k, t in enumerate(op.ins):
        held = walk.program.buffers[step.ins[k]].boxes[d] if t else None
        if held is not None:
            need = _of_axes(tuple((0, n) for n in tensors[t].shape), op.in_axes[k], block)
            walk.proofs.within("access_preserved", f"device {d} reads '{t}' outside its buffer", here, need, held)


def _of_axes(whole: Box, axes: Sequence[int | None], block: Box) -> Box:
    """A whole tensor, but for the axes that a block's dimensions index."""
    cut = {axis: ends for axis, ends in zip(axes, block, strict=True) if axis is not None}
    return tuple(cut.get(k, ends) for k, ends in enumerate(whole))


def _block_results(walk: _Walk, step: Launch, op: Op, block: Box, at: tuple[int, str]) -> None:
    """A device's new buffers are what its block computes."""
    d, here = at
    for k, out in enumerate(step.outs):
        b = walk.program.buffers[out]
        if isinstance(op, Block):
            wanted = _state(op, k, block) if step.mode == "partial" else block[: len(op.dims)]
        else:
            shape = walk.graph.tensors[op.outs[k]].shape
            wanted = _of_axes(tuple((0, n) for n in shape), op.out_axes[k], block)
        held = b.boxes[d]
        assert held is not None
        walk.proofs.same("written_once", f"'{out}' is not what a device computes", here, held, wanted)
    for k, s in enumerate(step.states if isinstance(op, Block) else ()):
        held = walk.program.buffers[s].boxes[d]
        assert held is not None and isinstance(op, Block)
        walk.proofs.same("read_after_write", f"'{s}' does not hold field {k} of the block", here, held, _state(op, k, block))


def _state(op: Block, field: int, block: Box) -> Box:
    """What a block, which is not empty, has of a field: one cell where it does not vary along a dimension."""
    return tuple(e if v else (0, 1) for e, v in zip(block, varies(op)[field], strict=False))


def _complete(walk: _Walk, op: Op, parts: list[Box], here: str) -> None:
    assert isinstance(op, Block)
    whole = tuple((0, d.size) for d in op.reduce)
    walk.proofs.covered("written_once", "part of a reduction is missing", here, whole, parts)


def _transfer(walk: _Walk, step: Transfer, name: str) -> None:
    """Messages are parts of what is sent and of what is wanted; with what a device has they make up its box, nothing twice."""
    src, dst, proofs = walk.program.buffers[step.src], walk.program.buffers[step.dst], walk.proofs
    pieces: dict[int, list[Box]] = {d: [] for d, b in enumerate(dst.boxes) if b is not None}
    for m in step.messages:
        held, wanted = src.boxes[m.src], dst.boxes[m.dst]
        assert held is not None and wanted is not None
        proofs.within("read_after_write", f"device {m.src} sends what it does not have", name, m.box, held)
        proofs.within("agreement", f"device {m.dst} is sent what it has no place for", name, m.box, wanted)
        pieces[m.dst].append(m.box)
    for d, sent in pieces.items():
        box, own = dst.boxes[d], src.boxes[d]
        assert box is not None
        here, held = f"{name}, device {d}", [*sent, *([own] if own is not None else [])]
        proofs.covered("read_after_write", f"device {d} lacks cells after the transfer", here, box, held)
        proofs.apart("written_once", f"device {d} receives a cell twice", here, held)


def _reduce(walk: _Walk, step: Reduce, name: str) -> None:
    """Every member of a group has the states that another one's results need; no part of the reduction is merged twice."""
    op, proofs = walk.graph.ops[step.op], walk.proofs
    assert isinstance(op, Block)
    if step.known and any(sized(*e) for parts in walk.holds[step.srcs[0]].values() for box in parts for e in box):
        raise proofs.fails("agreement", "a count that is known follows from a size", name)
    for k, (s, t) in enumerate(zip(step.srcs, step.dsts, strict=True)):
        src, dst, parts, after = walk.program.buffers[s], walk.program.buffers[t], walk.holds[s], Parts()
        for g in step.groups:
            merged = [b for d in g for b in parts[d]]
            if k == 0:
                proofs.apart("written_once", "a state is merged twice", name, merged)
            for d in g:
                wanted = dst.boxes[d]
                assert wanted is not None
                for e in g:
                    held = src.boxes[e]
                    assert held is not None
                    proofs.within("read_after_write", "a device has no states for another's part", name, wanted, held)
                after[d] = merged
                if dst.field is None:
                    _complete(walk, op, merged, f"{name}, device {d}")
        if dst.field is None:
            walk.merged.add(step.op)
        walk.holds[t] = after


def _cover(walk: _Walk, i: int, op: Op) -> None:
    """Law 4: the blocks of an operation cover its index space, no point is in two that differ; results likewise."""
    launched, name = walk.blocks.get(i, {}), where(op)
    mine = list((launched.get("full") or launched.get("partial") or {}).values())
    space = tuple((0, d.size) for d in op.space)
    walk.proofs.covered("split_partition", "a point is computed by no device", name, space, mine)
    walk.proofs.apart("split_partition", "a point is in two different blocks", name, mine)
    if "finish" in launched:
        ends = list(launched["finish"].values())
        walk.proofs.covered("written_once", "an output cell is never finished", name, space[: len(op.dims)], ends)
