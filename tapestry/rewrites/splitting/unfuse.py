"""`unfuse`: an axis that several were fused into, computed as two axes again, so that each can be cut on its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tapestry.ir.expr import Arg
from tapestry.ir.graph import Block, Dim, Graph, Read, ranges_of, replace_op
from tapestry.ir.index import dim, floordiv, modulo
from tapestry.rewrites.core.edit import accept, block_at, fresh, fresh_dim, is_view, plain_index, reindex, results, splits_in
from tapestry.rewrites.core.rule import Move, Refusal, Rule, refuse, register


@register
class Unfuse(Rule):
    """Compute ``d = inner*d_out + d_in`` as two dimensions; the result is then a view of the tensor that has both axes.

    Cutting both gives each device cells that are interleaved in the result: what several ``simple_sharding`` entries of an ONNX
    sharding spec say.

    before:
        graph fused
        input x: f32[3, 12]
        y: f32[3, 12] = op [i: 3, n: 12]
          reads x[i, n]
          body exp(x)
        output y

    move: unfuse@y{dim=n,inner=4}

    after:
        graph fused
        input x: f32[3, 12]
        y.n: f32[3, 3, 4] = op [i: 3, n_out: 3, n_in: 4]
          reads x[i, n_in + 4*n_out]
          body exp(x)
        y: f32[3, 12] = op [i: 3, n: 12]
          reads a0 = y.n[i, floor((n)/4), ((n) mod 4)]
          body a0
        output y

    legal when:
        the dimension is a map dimension that is not split, of a size that the inner one divides, both parts being more than 1.
    """

    name = "unfuse"
    phase = "request"
    exact = True

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """Every map dimension that has a divisor, with the smallest one inside."""
        for op in graph.blocks:
            for d in op.dims if not is_view(op) else ():
                inner = next((k for k in range(2, int(d.size**0.5) + 1) if d.size % k == 0), 0)
                if inner:
                    move = Move(self.name, op.outs[0], (("dim", d.name), ("inner", inner)))
                    yield self.offered(move, unfuse_refusal(op, d.name, inner))

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with the operation over both dimensions, and its results as views."""
        at, op = block_at(graph, move)
        name, inner = move.text("dim"), move.number("inner")
        accept(unfuse_refusal(op, name, inner), move)
        k = next(i for i, d in enumerate(op.dims) if d.name == name)
        slow = Dim(fresh_dim(op, f"{name}_out"), op.dims[k].size // inner)
        fast = Dim(fresh_dim(op, f"{name}_in"), inner)
        dims = (*op.dims[:k], slow, fast, *op.dims[k + 1 :])
        names = tuple(fresh(graph, f"{t}.{name}") for t in op.outs)
        apart = replace(
            reindex(op, {name: dim(slow.name) * inner + dim(fast.name)}, (*dims, *op.reduce)), dims=dims, outs=names
        )
        apart = replace(apart, splits=splits_in(op, (*dims, *op.reduce)))
        here, ranges = plain_index(op.dims), {name: op.dims[k].size}
        place = (*here[:k], floordiv(here[k], inner, ranges), modulo(here[k], inner, ranges), *here[k + 1 :])
        made = results(apart)
        views = tuple(
            Block(outs=(t,), dims=op.dims, reads=(Read(tensor=n.name, index=place),), body=(Arg(0, n.dtype),), source=op.source)
            for t, n in zip(op.outs, made, strict=True)
        )
        return replace_op(graph, at, (apart, *views), made)


def unfuse_refusal(op: Block, name: str, inner: int) -> Refusal | None:
    """Why a dimension is not taken apart so; ``None`` when it is."""
    size = ranges_of(op.dims).get(name)
    if size is None:
        return refuse(f"'{name}' is not a map dimension", "the map dimensions are " + ", ".join(f"'{d.name}'" for d in op.dims))
    if inner < 2 or size % inner or size == inner:
        rows, left = divmod(size, max(inner, 1))
        return refuse(f"{size} points of '{name}' are not two or more rows of two or more", f"{size} = {rows}*{inner} + {left}")
    split = next((s for s in op.splits if s.dim == name), None)
    return refuse(f"'{name}' is split already", str(split)) if split else None
