"""Whether a node with bodies (If, Loop, Scan) is the model's: both are run on the same inputs, conditions and counts varied.

The compiler folds and shortens bodies, so that their text differs; every branch is taken, and loops run once and more.
"""
# pyright: basic

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from tapestry.errors import LawError
from tapestry.ir.graph import Graph, Opaque
from tapestry.ir.types import Array
from tapestry.onnx_eval.opaque_node import RANDOM, HostValue, draws
from tapestry.verify.interp import opaque
from tapestry.verify.model.cell_tolerance import other_distribution
from tapestry.verify.model.model_values import ModelFile, by_name, outer_names, run_node, subgraphs

# onnx comes without complete types


TRIALS = 6
OTHER_SEED = 4711.0


def check_operation(
    op: Opaque,
    graph: Graph,
    node: NodeProto,
    model: ModelFile,
    values: Mapping[str, Any],
    seed: int,
    known: Callable[[str], Any],
) -> int:
    """Check an operation against the model's node; returns on how many variants both ran.

    What the node reads and the operation does not may be made of what the operation reads: then it is made anew of that.

    Args:
        values: of the model, by name; those that the node reads among them.
        known: any value of the model.

    Raises:
        LawError: they differ on one.
    """
    ins = [n for n in (*node.input, *outer_names(node)) if n]
    theirs = {n: values[n] if n in values else model.constant(n) for n in ins}
    count = 0
    folded = {n for n in node.input if n in outer_names(node) and model.constant(n) is not None}
    between = _between(model, [n for n in ins if n not in op.inputs], {*op.inputs})
    for drawn in _variants(node, theirs, {*op.inputs} - folded, np.random.default_rng(seed)):
        variant = drawn | _made(between, model, {t: drawn.get(t, values.get(t)) for t in op.inputs}, known, ins)
        expected = _expected(node, model, variant)
        if expected is None:
            continue
        given = {t: _given(variant.get(t, values.get(t)), graph, t) for t in op.inputs}
        where = f"operation '{op.outs[0]}' ({op.kind})"
        try:
            found = opaque(op, _free(graph, op), given, wide=False)
        except Exception as e:
            raise LawError("model", "a body does not run where the model's does", where=where, why=str(e)[:200]) from e
        made = dict(zip(op.outs, found, strict=True))
        wanted = {t: a for t, a in by_name(node, expected).items() if t in made}
        wrong = next((t for t, a in wanted.items() if not alike(made[t], a)), None)
        if wrong is not None and draws(op):
            other = _expected(_reseeded(node), model, variant) or expected
            again = by_name(node, other)
            wrong = next((t for t, a in wanted.items() if not _may_be(made[t], a, again[t])), None)
        if wrong is not None:
            changed = [n for n in ins if variant[n] is not theirs[n]]
            raise LawError("model", "a body is not the model's", where=where, why=f"'{wrong}' differs, with other {changed}")
        count += 1
    return count


def _between(model: ModelFile, names: list[str], ends: set[str]) -> list[NodeProto]:
    """The nodes that some names are made by of others, in the model's order."""
    behind: dict[str, bool] = dict.fromkeys(ends, True)

    def inputs(name: str) -> list[str]:
        node = model.makers[name]
        return [i for i in (*node.input, *outer_names(node)) if i]

    stack = list(names)
    while stack:
        name = stack[-1]
        later = [i for i in inputs(name) if i not in behind] if name in model.makers and name not in behind else []
        stack += later
        if not later:
            stack.pop()
            behind.setdefault(name, name in model.makers and any(behind[i] for i in inputs(name)))
    places = {model.places[n] for n, made in behind.items() if made and n not in ends}
    return [model.nodes[k] for k in sorted(places)]


def _made(
    nodes: list[NodeProto], model: ModelFile, given: Mapping[str, Any], known: Callable[[str], Any], wanted: list[str]
) -> dict[str, Any]:
    """What nodes make of given values, and of known ones of the model, as far as it is wanted."""
    values = dict(given)
    for node in nodes:
        names = (*node.input, *outer_names(node))
        arrays = [None if not i else values[i] if i in values else known(i) for i in names]
        outs = run_node(node, model.opsets, arrays, True)
        values |= {o: a for o, a in by_name(node, outs).items() if o not in given}
    return {o: values[o] for n in nodes for o in n.output if o in wanted and o in values}


def _expected(node: NodeProto, model: ModelFile, variant: Mapping[str, Any]) -> list[Any] | None:
    """What the model's node gives; None for inputs that it does not take."""
    try:
        return run_node(node, model.opsets, [variant.get(n) for n in (*node.input, *outer_names(node))], True)
    except Exception:  # evaluators raise many kinds
        return None


def _reseeded(node: NodeProto) -> NodeProto:
    """A node that draws other random numbers in its bodies, and is else the same."""
    copy = NodeProto()
    copy.CopyFrom(node)
    graphs = list(subgraphs(copy))
    while graphs:
        for n in graphs.pop().node:
            graphs += subgraphs(n)
            if n.op_type in RANDOM:
                kept = [a for a in n.attribute if a.name != "seed"]
                del n.attribute[:]
                n.attribute.extend([*kept, helper.make_attribute("seed", OTHER_SEED)])
    return copy


def _may_be(mine: Any, theirs: Any, again: Any) -> bool:
    """Whether a result is the model's, or drawn as the model draws: two seeds differ, the distributions do not."""
    if alike(mine, theirs):
        return True
    drawn = not alike(theirs, again) and np.shape(mine) == np.shape(theirs) and np.asarray(mine).dtype.kind in "fiub"
    return drawn and not other_distribution(np.asarray(theirs), np.asarray(mine))


def _free(graph: Graph, op: Opaque) -> Graph:
    """The graph with results of any shape, as other trip counts give them."""
    tensors = {t: replace(graph.tensors[t], dtype="host", shape=()) for t in op.outs}
    return replace(graph, tensors={**graph.tensors, **tensors})


def _given(value: Any, graph: Graph, name: str) -> Any:
    if graph.tensors[name].on_host and not isinstance(value, HostValue):
        return HostValue(value)
    return value


def _variants(node: NodeProto, own: Mapping[str, Any], open_: set[str], rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """The node's own inputs, and others: conditions turned, counts of steps of 0 to 3, numbers drawn anew.

    Only those of ``open_`` are varied: what the plan does not read any more was a constant, and is part of its body. So may
    be a constant that the node reads outside as well.
    """
    flags = [n for n, a in own.items() if n in open_ and isinstance(a, np.ndarray) and a.dtype == bool and a.size == 1]
    yield dict(own)
    for n in flags:
        yield {**own, n: np.asarray(~own[n])}
    if node.op_type == "Loop" and node.input[0] in open_:
        count = own[node.input[0]]
        for steps in (1, 3, 2):
            yield {**own, node.input[0]: np.full_like(count, steps), **{n: np.ones_like(own[n]) for n in flags}}
    for k in range(TRIALS):
        drawn = {n: _drawn(a, rng) if n in open_ else a for n, a in own.items()}
        yield {**drawn, **{n: own[n] if k % 2 else np.asarray(~own[n]) for n in flags}} | _count(node, own)


def _count(node: NodeProto, own: Mapping[str, Any]) -> dict[str, Any]:
    return {node.input[0]: own[node.input[0]]} if node.op_type == "Loop" and node.input[0] else {}


def _drawn(a: Any, rng: np.random.Generator) -> Any:
    """Other numbers of the same type and shape: floats anew, integers in another order."""
    if not isinstance(a, np.ndarray) or a.dtype == object:
        return a
    if a.dtype.kind == "f":
        return rng.standard_normal(a.shape).astype(a.dtype)
    return rng.permutation(a.reshape(-1)).reshape(a.shape) if a.size else a  # numpy shuffles an empty one in place


def alike(a: Any, b: Any) -> bool:
    """Whether two values are the same, or a few roundings apart: the same node ran, perhaps by another evaluator."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    if a is None or b is None:
        return a is b
    x, y = np.asarray(a), np.asarray(b)
    if x.shape != y.shape or (x.dtype != y.dtype and object not in (x.dtype, y.dtype)):
        return False
    return bool(np.all(near(x, y)))


def near(x: Array, y: Array) -> Array:
    """Cells that are the same, or a few roundings apart."""
    if x.dtype.kind in "OUS" or x.dtype.kind not in "fcV":
        return np.asarray(x == y)
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    unit = {8: 1e-12, 4: 1e-5, 2: 1e-2}.get(x.dtype.itemsize, 1e-1) if x.dtype.kind == "f" else 1e-2
    p, q = x.astype(wide), y.astype(wide)
    with np.errstate(all="ignore"):
        size = np.abs(q[np.isfinite(q)])
        limit = unit * (np.abs(q) + (size.mean() if size.size else 0))
        return (np.abs(p - q) <= limit) | (p == q) | (np.isnan(p) & np.isnan(q))
