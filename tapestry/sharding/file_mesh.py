"""The mesh of a file's annotations: the one that it names, or one of few axes that can say all its specs, in an order of its
devices where they do not count on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from tapestry.errors import PlanError
from tapestry.interop import onnx_annotations
from tapestry.interop.onnx_annotations import read_json
from tapestry.interop.placement import layout_of, placement
from tapestry.interop.sharding_specs import ShardedDim, ShardingSpec, SimpleShard
from tapestry.ir.plan import Mesh, MeshAxis, coordinates, device_count
from tapestry.plan.topology import parse_mesh
from tapestry.sharding.annotations import Annotations

MESH_AXES = 3  # of a mesh that is guessed from a file's specs
MAX_SHARE = 1 << 20

Orders = dict[int, tuple[int, ...]]
"""By mesh axis, which of the devices along it has each coordinate."""


def mesh(a: Annotations) -> Mesh:
    """The mesh that the file names, or else the first of few axes that can say all its specs; where none can, one in which
    devices along an axis have another order.

    Sizes do not matter for that: every cut axis is given as many cells as a multiple of its parts.

    Raises:
        PlanError: the named mesh has another number of devices.
    """
    if onnx_annotations.MESH in a.model:
        named = _stated(a, parse_mesh(a.model[onnx_annotations.MESH]))
        if device_count(named) != a.devices:
            what = f"{onnx_annotations.MESH} has {device_count(named)} devices, the configuration {a.devices}"
            raise PlanError(what, where=a.model[onnx_annotations.MESH])
        return named
    given = (*a.outs.values(), *a.reads.values(), *a.values.values())
    specs = list(dict.fromkeys(parts_alone(replace(s, tensor=None)) for s in given if s.dims))
    guesses = [
        tuple(MeshAxis(f"d{i}", n) for i, n in enumerate(sizes))
        for k in range(1, MESH_AXES + 1)
        for sizes in _divisors(a.devices, k)
    ]
    plain = (g for g in guesses if all(layout_of(*s, g) is not None for s in specs))
    ordered = (g for guess in guesses if (g := in_order(guess, specs)) is not None)
    return next(plain, None) or next(ordered, None) or (MeshAxis("d0", a.devices),)


def in_order(mesh: Mesh, specs: Sequence[tuple[ShardingSpec, tuple[int, ...]]]) -> Mesh | None:
    """The mesh with orders of its devices in which all specs (each of a tensor of a shape) are layouts, if there are such."""
    choices = dict.fromkeys(tuple(tuple(sorted(o.items())) for o in _orders(s, shape, mesh)) for s, shape in specs)
    found = joined([[dict(o) for o in c] for c in choices], {})
    if found is None:
        return None
    plain = {a: tuple(range(axis.size)) for a, axis in enumerate(mesh)}
    return tuple(replace(axis, order=() if found.get(a, plain[a]) == plain[a] else found[a]) for a, axis in enumerate(mesh))


def joined(choices: Sequence[Sequence[Orders]], chosen: Orders) -> Orders | None:
    """One choice for every spec, such that no two want another order of one axis; each call fixes an axis more."""
    for k, orders in enumerate(choices):
        fitting = [o for o in orders if all(chosen.get(a, order) == order for a, order in o.items())]
        if not any(o.keys() <= chosen.keys() for o in fitting):
            found = (joined(choices[k + 1 :], chosen | o) for o in fitting)
            return next((f for f in found if f is not None), None)
    return chosen


def _orders(spec: ShardingSpec, shape: tuple[int, ...], mesh: Mesh) -> Iterator[Orders]:
    """Orders of the axes that some layout of a spec cuts along, for every layout; sizes of axes are numbers of parts."""
    boxes = [placement(spec, shape).box(d) for d in range(device_count(mesh))]
    for layout in itertools.product((None, *range(len(shape))), repeat=len(mesh)):
        cuts = [[a for a, t in enumerate(layout) if t == k] for k in range(len(shape))]
        if any(prod(mesh[a].size for a in by) != n for by, n in zip(cuts, shape, strict=True)):
            continue
        found: dict[int, dict[int, set[int]]] = {}
        for box, digits in zip(boxes, coordinates(mesh), strict=True):
            for k, by in enumerate(cuts):
                rest = -1 if box is None else box[k][0]
                for a in reversed(by):
                    found.setdefault(a, {}).setdefault(rest % mesh[a].size if rest >= 0 else -1, set()).add(digits[a])
                    rest //= mesh[a].size
        if all(len(of) == mesh[a].size and all(len(d) == 1 for d in of.values()) for a, of in found.items()):
            yield {a: tuple(min(of[c]) for c in range(mesh[a].size)) for a, of in found.items() if -1 not in of}


def _stated(a: Annotations, mesh: Mesh) -> Mesh:
    """The mesh with the shares and orders that the file gives its axes.

    Raises:
        PlanError: they do not fit the axes.
    """
    shares = _numbers(a, onnx_annotations.SHARES, mesh)
    orders = _numbers(a, onnx_annotations.ORDER, mesh)
    wrong = next((n for n, w in shares.items() if not all(1 <= x <= MAX_SHARE for x in w)), None)
    if wrong is not None:
        why = f"{wrong}: {str(shares[wrong])[:60]}"
        raise PlanError("the shares do not fit the mesh", where=onnx_annotations.SHARES, why=why)
    wrong = next((n for n, o in orders.items() if sorted(o) != list(range(len(o)))), None)
    if wrong is not None:
        why = f"{wrong}: {str(orders[wrong])[:60]} is no order of {len(orders[wrong])} devices"
        raise PlanError("the orders do not fit the mesh", where=onnx_annotations.ORDER, why=why)
    return tuple(replace(axis, weights=shares.get(axis.name, ()), order=orders.get(axis.name, ())) for axis in mesh)


def _numbers(a: Annotations, key: str, mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """A number for each coordinate of some mesh axes, as metadata gives them.

    Raises:
        PlanError: it gives something else.
    """
    given: dict[str, list[Any]] = read_json(a.model, key, dict)
    sizes = {axis.name: axis.size for axis in mesh}
    for name, numbers in given.items():
        right = type(numbers) is list and all(type(w) is int for w in numbers)
        if not right or len(numbers) != sizes.get(name):
            what = f"the {key.rpartition('.')[2].removesuffix('s')}s do not fit the mesh"
            raise PlanError(what, where=key, why=f"{name}: {str(numbers)[:60]}")
    return {name: tuple(numbers) for name, numbers in given.items()}


def parts_alone(s: ShardingSpec) -> tuple[ShardingSpec, tuple[int, ...]]:
    """The spec for a tensor that has the cut axes and no others, each of those that were fused as one of its own."""
    counts = [x.num_shards or 1 for d in s.dims for x in d.shards]
    return replace(s, dims=tuple(ShardedDim(k, (SimpleShard(n, n),)) for k, n in enumerate(counts))), tuple(counts)


def _divisors(n: int, k: int) -> Iterator[tuple[int, ...]]:
    if k == 1:
        if n > 0:
            yield (n,)
        return
    for f in range(2, n // 2 + 1):
        if n % f == 0:
            yield from ((f, *rest) for rest in _divisors(n // f, k - 1) if 1 not in rest)
