"""`micro_batch`: the whole graph run part after part along a dimension of its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tapestry.ir.graph import Block, Graph, Op
from tapestry.rewrites.core.edit import accept
from tapestry.rewrites.core.rule import Move, Refusal, Rule, refuse, register
from tapestry.rewrites.splitting.tiled_region import Clones, Cut, clone, even, grow, reads_of


@register
class MicroBatch(Rule):
    """Run everything that depends on an axis of an input point by point, once per part of that axis.

    before:
        graph two_layers
        input x: f32[4, 3]
        input w: f32[3, 3]
        h: f32[4, 3] = op [i: 4, n: 3 | m: 3 sum]
          reads x[i, m], w[m, n]
          body x * w
        y: f32[4, 3] = op [i: 4, n: 3]
          reads h[i, n], x[i, n]
          body tanh(h) + x
        output y

    move: micro_batch@x{axis=0,parts=2}

    after:
        graph two_layers
        input x: f32[4, 3]
        input w: f32[3, 3]
        "h@0": f32[2, 3] = op [i: 2, n: 3 | m: 3 sum]
          reads x[i, m], w[m, n]
          body x * w
        "y@0": f32[2, 3] = op [i: 2, n: 3]
          reads a0 = "h@0"[i, n], x[i, n]
          body tanh(a0) + x
        "h@1": f32[2, 3] = op [i: 2, n: 3 | m: 3 sum]
          reads x[i + 2, m], w[m, n]
          body x * w
        "y@1": f32[2, 3] = op [i: 2, n: 3]
          reads a0 = "h@1"[i, n], x[i + 2, n]
          body tanh(a0) + x
        y: f32[4, 3] = op [x0: 4, x1: 3]
          reads a0 = "y@0"[x0, x1] else 0.0, a1 = "y@1"[x0 - 2, x1] else 0.0
          body where(lt(index(x0), 2), a0, a1)
        output y

    legal when:
        no part is empty, no operation is split already, and some operation has a dimension of which every part reads its
        own part of the axis. Operations that mix the parts stay after the region.
    """

    name = "micro_batch"
    phase = "fit"

    def find(self, graph: Graph) -> Iterator[Move | Refusal]:
        """The first axis of every input, in two parts."""
        for t in graph.inputs:
            move = Move(self.name, t, (("axis", 0), ("parts", 2)))
            yield self.offered(move, _region(graph, move))

    def apply(self, graph: Graph, move: Move) -> Graph:
        """The graph with everything that follows the axis once per part."""
        return micro_batch(graph, move).graph


def micro_batch(graph: Graph, move: Move) -> Clones:
    """Apply the move; says which part each operation belongs to (-1: to none).

    Raises:
        TapestryError: it is not legal here.
    """
    return clone(graph, accept(_region(graph, move), move))


def batch_move(graph: Graph, parts: int) -> Move | None:
    """The move over the first axis of the input that the most operations follow; ``None`` when no input has one."""
    found: list[tuple[int, Move]] = []
    for t in graph.inputs:
        move = Move("micro_batch", t, (("axis", 0), ("parts", parts)))
        region = _region(graph, move)
        if not isinstance(region, Refusal):
            found.append((len(region), move))
    return max(found, key=lambda f: f[0])[1] if found else None


def _region(graph: Graph, move: Move) -> dict[int, Cut] | Refusal:
    axis, parts = move.number("axis"), move.number("parts")
    shape = graph.tensors[move.at].shape if move.at in graph.inputs else ()
    if not 0 <= axis < len(shape):
        return refuse(f"'{move.at}' is no input with an axis {axis}", f"its shape is {list(shape)}")
    if not 2 <= parts <= shape[axis]:
        return refuse(f"{shape[axis]} points cannot be cut into {parts} non-empty parts", f"part {min(parts - 1, shape[axis])}")
    split = next((op for op in graph.ops if op.splits), None)
    if split is not None:
        return refuse("an operation is split already", f"'{split.outs[0]}' {split.splits[0]}")
    seeds = _follow(graph, move.at, axis, parts)
    cuts = grow(graph, seeds, 0) if seeds else {}
    return cuts or refuse(f"no operation follows axis {axis} of '{move.at}' part by part", "part 0 reads all of it")


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis of a tensor along which item k is cells ``[k * grain, (k + 1) * grain)``."""

    axis: int
    grain: int


def _follow(graph: Graph, source: str, axis: int, parts: int) -> dict[int, Cut]:
    """Operations with a dimension of which each part reads its own part of the axis."""
    items = graph.tensors[source].shape[axis]
    known: dict[str, _Axis] = {
        t: _Axis(axis, 1) for t in graph.inputs if len(graph.tensors[t].shape) > axis and graph.tensors[t].shape[axis] == items
    }
    seeds: dict[int, Cut] = {}
    for i, op in enumerate(graph.ops):
        for d in op.dims if any(t in known for t in op.inputs) else ():
            if not d.size or d.size % items:
                continue
            cut = even(d.name, d.size, parts, d.size // items)
            if _own_part(op, graph, cut, known, items, parts):
                seeds[i] = cut
                known |= {t: _Axis(a, d.size // items) for t, a in _out_axes(op, d.name)}
                break
    return seeds


def _own_part(op: Op, graph: Graph, cut: Cut, known: Mapping[str, _Axis], items: int, parts: int) -> bool:
    for tensor, boxes in reads_of(op, graph, cut):
        place = known.get(tensor)
        if place is None:
            continue
        own = even("", items * place.grain, parts, place.grain).parts
        for box, (lo, hi) in zip(boxes, own, strict=True):
            first, last = box[place.axis]
            if first < last and not lo <= first < last <= hi:
                return False
    return True


def _out_axes(op: Op, name: str) -> list[tuple[str, int]]:
    at = [d.name for d in op.dims].index(name)
    if isinstance(op, Block):
        return [(t, at) for t in op.outs]
    return [(t, a) for t, axes in zip(op.outs, op.out_axes, strict=True) if (a := axes[at]) is not None]
