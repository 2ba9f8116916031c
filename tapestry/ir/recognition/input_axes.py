"""Which axes of a graph's inputs each operation's dimensions run along."""

from __future__ import annotations

from collections.abc import Iterator

from tapestry.ir.graph import Block, Graph, Op
from tapestry.ir.index import Aff, dim, dims_of

Axes = frozenset[tuple[str, int]]
NONE: Axes = frozenset()


def input_axes(graph: Graph) -> list[dict[str, Axes]]:
    """For each operation, by dimension: the axes of inputs that it runs along, followed through projections. Rows of a
    flattened axis run along several; a dimension that comes of weights alone is left out."""
    inputs = (t for t in graph.inputs if t not in graph.weights)
    known = {(t, k): frozenset({(t, k)}) for t in inputs for k in range(len(graph.tensors[t].shape))}
    out: list[dict[str, Axes]] = []
    for op in graph.ops:
        found: dict[str, Axes] = {}
        for t, k, index in _places_read(op):
            for d, axes in _along(index, known.get((t, k), NONE)):
                found[d] = found.get(d, NONE) | axes
        ends = zip(op.outs, [range(len(op.dims))] * len(op.outs) if isinstance(op, Block) else op.out_axes, strict=True)
        known |= {(t, k): found.get(d.name, NONE) for t, ks in ends for k, d in zip(ks, op.dims, strict=True) if k is not None}
        out.append(found)
    return out


def _places_read(op: Op) -> Iterator[tuple[str, int, Aff]]:
    """The (tensor, axis, index) that an operation reads."""
    if isinstance(op, Block):
        yield from ((r.tensor, k, index) for r in op.reads for k, index in enumerate(r.index))
    else:
        axes = zip(op.ins, op.in_axes, strict=True)
        yield from ((t, k, dim(d.name)) for t, ks in axes for k, d in zip(ks, op.dims, strict=True) if k is not None)


def _along(index: Aff, axes: Axes) -> Iterator[tuple[str, Axes]]:
    """What of an axis's axes the dimensions of an index run along: where as many are flattened as there are dimensions, the
    one with the longest step runs along the first, and so on."""
    steps = [a for a, _ in sorted(index.terms, key=lambda x: -x[1]) if isinstance(a, str)]
    for d in dims_of(index):
        flat = d in steps and all(len({k for u, k in axes if u == t}) == len(steps) for t, _ in axes)
        yield d, frozenset({sorted(x for x in axes if x[0] == t)[steps.index(d)] for t, _ in axes}) if flat else axes
