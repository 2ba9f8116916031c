"""Plans that people make by one idea, as pins and layouts of a graph.

- ``megatron`` (Shoeybi 2019): of two products, one after the other, the first is cut along what it writes and the second along
  what it sums, over the mesh's last axis; what is between follows. The batch is cut over the other axes.
- ``fsdp`` (Zhao 2023): every device has a part of the batch, and of each weight a part, which is gathered where it is used.
- ``sequence``: everything is cut along the second axis of the inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tapestry.errors import PlanError
from tapestry.ir.graph import Block, Graph
from tapestry.ir.index import Aff, dims_of, span
from tapestry.ir.plan import Mesh, device_count
from tapestry.ir.provenance import operation_names
from tapestry.ir.recognition.contraction import products
from tapestry.ir.recognition.input_axes import NONE, input_axes
from tapestry.plan.requests import read_pins

Cuts = dict[int, dict[str, str]]
"""By operation, what cuts each dimension: mesh axes, joined by ``+``."""
LARGE = 1 << 12  # cells; smaller weights stay whole


def megatron(graph: Graph, mesh: Mesh) -> tuple[list[str], list[str]]:
    """Pins, and no layouts."""
    cuts = {i: {d: mesh[-1].name} for i, d in _pairs(graph).items()}
    for i, found in _along(graph, mesh[:-1], 0).items() if len(mesh) > 1 else ():
        cuts[i] = found | cuts.get(i, {})
    return pins_of(graph, mesh, cuts), []


def fsdp(graph: Graph, mesh: Mesh) -> tuple[list[str], list[str]]:
    """Pins along the batch, and layouts of weights."""
    n, axes = device_count(mesh), "+".join(a.name for a in mesh)
    shapes = {t: graph.tensors[t].shape for t in graph.weights if graph.tensors[t].size >= LARGE}
    places = {t: next((k for k, m in enumerate(shape) if m % n == 0), None) for t, shape in shapes.items()}
    return pins_of(graph, mesh, _along(graph, mesh, 0)), [f"{t}:{k}={axes}" for t, k in places.items() if k is not None]


def sequence(graph: Graph, mesh: Mesh) -> tuple[list[str], list[str]]:
    """Pins, and no layouts."""
    return pins_of(graph, mesh, _along(graph, mesh, 1)), []


IDEAS = {"megatron": megatron, "fsdp": fsdp, "sequence": sequence}


def _along(graph: Graph, mesh: Mesh, axis: int) -> Cuts:
    """Every operation cut along a dimension that runs along an axis of the inputs, where there is one.

    Raises:
        PlanError: no input is so long.
    """
    n, axes = device_count(mesh), "+".join(a.name for a in mesh)
    inputs = {(t, axis) for t in graph.inputs if t not in graph.weights and graph.tensors[t].shape[axis : axis + 1] >= (n,)}
    if not inputs:
        raise PlanError(f"no input has {n} cells along axis {axis}", where="--with", hint="another --mesh or --shape")
    out: Cuts = {}
    for i, (op, found) in enumerate(zip(graph.ops, input_axes(graph), strict=True)):
        dims = [d.name for d in op.dims if d.size >= n and found.get(d.name, NONE) & inputs]
        out |= {i: {dims[0]: axes}} if dims else {}
    return out


def _pairs(graph: Graph) -> dict[int, str]:
    """The dimension along which each product of a pair is cut: what the first one writes, what the second one sums."""
    made: dict[str, tuple[int, frozenset[int]]] = {}  # tensor to the axis that is cut, and the products that cut it
    first, out = dict[int, str](), dict[int, str]()
    for i, op in enumerate(graph.ops):
        if not isinstance(op, Block):
            continue
        found = [(_outer(r.index[made[r.tensor][0]], op), made[r.tensor][1]) for r in op.reads if r.tensor in made]
        cut = {d: frozenset[int]().union(*(by for e, by in found if e == d)) for d, _ in found if d}
        weights = [r for r in op.reads if r.tensor in graph.weights and len(graph.tensors[r.tensor].shape) > 1]
        summed = next((d.name for d in op.reduce if d.name in cut), None)
        if op.monoid and products(op) and weights and summed:
            out |= {i: summed, **{k: first[k] for k in cut[summed]}}
        elif op.monoid and products(op) and weights:
            own = {d for r in weights for e in r.index for d in dims_of(e)}
            first[i] = next((d.name for d in op.dims if d.name in own), "")
            cut = {first[i]: frozenset({i})}
        at = next((k for k, d in enumerate(op.dims) if d.name in cut), None)
        made |= dict.fromkeys(op.outs, (at, cut[op.dims[at].name])) if at is not None else {}
    return out


def _outer(index: Aff, op: Block) -> str | None:
    """The dimension that moves an index furthest: of heads and what is in each, the heads."""
    reach = {d: _reach(index, d, op.ranges[d]) for d in dims_of(index)}
    return max(reach, key=lambda d: reach[d], default=None)


def _reach(index: Aff, dim: str, size: int) -> int:
    low, high = span(index, {d: size if d == dim else 1 for d in dims_of(index)})
    return high - low


def pins_of(graph: Graph, mesh: Mesh, cuts: Cuts) -> list[str]:
    """Pins, one for all layers' operations of a name where they are cut alike, else by what they write."""
    names, groups = operation_names(graph), dict[tuple[str, str], list[int]]()
    for i, found in cuts.items():
        said = ",".join(f"{d}={a}" for d, a in found.items()) or "replicated"
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "*", names[i]), said), []).append(i)
    return [text for (name, said), ops in groups.items() for text in _texts(name, said, ops, graph, mesh)]


def _texts(name: str, said: str, ops: list[int], graph: Graph, mesh: Mesh) -> Iterator[str]:
    try:
        named = {i for i, _ in read_pins([f"{name}:{said}"], graph, mesh)} == set(ops)
    except PlanError:
        named = False
    yield from [f"{name}:{said}"] if named else (f"{graph.ops[i].outs[0]}:{said}" for i in ops)


def cuts_of(graph: Graph, mesh: Mesh, strategies: Mapping[int, tuple[str | None, ...]]) -> Cuts:
    """What cuts each dimension of some operations, by what each mesh axis cuts."""
    return {
        i: {d: "+".join(a.name for e, a in zip(dims, mesh, strict=True) if e == d) for d in dict.fromkeys(dims) if d}
        for i, dims in strategies.items()
    }
