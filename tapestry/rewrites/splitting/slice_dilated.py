"""`slice_dilated`: a dilated convolution as dense ones, one per phase, whose results interleave."""

from __future__ import annotations

from math import gcd

from tapestry.ir.expr import Arg, Const, Expr, Index, call, number
from tapestry.ir.graph import Block, Graph, Guard, Read, ranges_of
from tapestry.ir.index import dim, floordiv, modulo
from tapestry.rewrites.core.edit import fresh, plain_index, splits_in
from tapestry.rewrites.core.rule import Refusal, refuse, register
from tapestry.rewrites.splitting.phases import points_in, too_many, windows
from tapestry.rewrites.splitting.slice_strided import Sliced, Slicing, sliced


@register
class SliceDilated(Slicing):
    """Cut a dilated window into phases: slice ``X[r::d]``, convolve each densely, interleave Y.

    A window that reads ``x[h + d*r - p]`` touches, from output h, only cells of one residue class modulo d. Output phase
    ``h = d*h' + q`` therefore reads phase ``(q - p) mod d`` of x, densely: neighbouring outputs of a phase share cells,
    so that a block's halo is of r cells, not of d*r.

    before:
      graph dilated
      input x: f32[7]
      input k: f32[2]
      y: f32[5] = op [h: 5 | r: 2 sum]
        reads x[h + 2*r], k[r]
        body x * k
      output y

    move: slice_dilated@y{dim=h}

    after:
      graph dilated
      input x: f32[7]
      input k: f32[2]
      x.x0.s0: f32[4] = op [x0: 4]
        reads x[2*x0]
        body x
      x.x0.s1: f32[3] = op [x0: 3]
        reads x[2*x0 + 1]
        body x
      y.h0: f32[3] = op [h: 3 | r: 2 sum]
        reads a0 = x.x0.s0[h + r], k[r]
        body a0 * k
      y.h1: f32[2] = op [h: 2 | r: 2 sum]
        reads a0 = x.x0.s1[h + r], k[r]
        body a0 * k
      y: f32[5] = op [h: 5]
        reads a0 = y.h0[floor((h)/2)] when ((h) mod 2) == 0 else 0.0, a1 = y.h1[floor((h)/2)] when ((h) mod 2) - 1 == 0 else 0.0
        body where(eq(index(((h) mod 2)), 0), a0, a1)
      output y

    legal when:
        some read walks an axis by ``h + Σ coef*other + const`` where the greatest common divisor d of the coefficients
        is above 1 and at most 64; every phase of x and of y has a cell; h is not split already.
    """

    name = "slice_dilated"

    def plan(self, graph: Graph, op: Block, name: str) -> Sliced | Refusal:
        """The operation once per phase of its output, or why not."""
        size = ranges_of(op.dims).get(name)
        if size is None:
            return refuse(
                f"'{name}' is not a map dimension", "the map dimensions are " + ", ".join(f"'{d.name}'" for d in op.dims)
            )
        found = windows(op, name)
        if not found:
            return refuse(f"no window slides along '{name}'", f"no read is at {name} + (a reduced dimension)")
        dense = next((w for w in found if w.step == 1), None)
        if dense is None:
            w = found[0]
            return refuse(
                f"the window strides along '{name}': see slice_strided", f"'{name}' 0 and 1 read '{w.tensor}' {w.step} apart"
            )
        step = gcd(*(c for w in found if w.step == 1 for _, c in w.others))
        if step == 1:
            other, coef = min(dense.others, key=lambda t: abs(t[1]))
            return refuse(f"the window is dense along '{name}'", f"'{other}' 0 and 1 read '{dense.tensor}' {abs(coef)} apart")
        if many := too_many(step):
            return many
        if size < step:
            return refuse(f"{size} points of '{name}' leave one of {step} phases empty", f"no point is {size} modulo {step}")
        if any(s.dim == name for s in op.splits):
            return refuse(f"'{name}' is split already")
        outs = [tuple(fresh(graph, f"{t}.{name}{q}") for t in op.outs) for q in range(step)]
        return sliced(graph, op, name, step, outs) or refuse(
            f"'{dense.tensor}' has fewer than {step} cells along axis {dense.axis}", f"phase {step - 1} of it is empty"
        )

    def rest(self, graph: Graph, op: Block, plan: Sliced) -> list[Block]:
        """The operation that interleaves the phases."""
        return [_interleave(graph, op, plan.name, plan.parts)]


def _interleave(graph: Graph, op: Block, name: str, parts: tuple[Block, ...]) -> Block:
    """Assemble the output: cell h is cell ``h // d`` of phase ``h mod d``."""
    step, ranges = len(parts), op.ranges
    assert sum(points_in(ranges[name], step, q) for q in range(step)) == ranges[name]
    phase, place = modulo(dim(name), step, ranges), floordiv(dim(name), step, ranges)
    index = tuple(place if d.name == name else e for d, e in zip(op.dims, plain_index(op.dims), strict=True))
    reads: list[Read] = []
    body: list[Expr] = []
    for i, t in enumerate(op.outs):
        dtype = graph.tensors[t].dtype
        first = len(reads)
        other = number(0, dtype).value
        reads += [
            Read(tensor=part.outs[i], index=index, other=other, when=(Guard(phase - q, "eq"),)) for q, part in enumerate(parts)
        ]
        e: Expr = Arg(first + step - 1, dtype)
        for q in reversed(range(step - 1)):
            e = call("where", call("eq", Index(phase), Const(q, "i64")), Arg(first + q, dtype), e)
        body.append(e)
    return Block(
        outs=op.outs, dims=op.dims, reads=tuple(reads), body=tuple(body), source=op.source, splits=splits_in(op, op.dims)
    )
