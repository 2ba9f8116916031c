"""The graph of a plan against its model file: every operation, at sampled cells, from the reference's own values.

The file is run by a reference with its intermediate values kept (`model_values`). A tensor of the graph stands for the value of
the same name: the operation that writes it is computed at some cells (`cell_sample`) from the reference's values of what it
reads, and must give the reference's value there (`cell_tolerance`). By induction over the graph, a plan whose operations all do
computes the model. Tensors that the model does not have (states, parts, results that were fused away) are followed back
to those that it has; one whose name begins with a value's is taken for a slice of it, or for it with its axes in another
order, where the cells agree.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from tapestry.errors import LawError, TapestryError
from tapestry.ir.graph import Block, Dim, Graph, Op, Opaque, Split
from tapestry.ir.laws import where
from tapestry.ir.syntax.printer import signature
from tapestry.ir.types import FLOATS, STORED, Array, numpy_dtype
from tapestry.onnx_eval.opaque_node import HostValue, draws
from tapestry.onnx_eval.value_kinds import is_array
from tapestry.verify.interp import opaque
from tapestry.verify.model import bodies, model_facts
from tapestry.verify.model.awkward_operands import APART, AwkwardOperands
from tapestry.verify.model.cell_sample import cells
from tapestry.verify.model.cell_tolerance import explained, other_distribution, same
from tapestry.verify.model.cell_values import UNIT, CellValues
from tapestry.verify.model.counterparts import Counterparts
from tapestry.verify.model.model_facts import LAW, Reader
from tapestry.verify.model.model_inputs import awkward
from tapestry.verify.model.model_values import ModelFile, ReferenceValues, at_cells, has_body, outer_names
from tapestry.verify.model.rounded_inputs import within_rounding

View = Callable[[Array], Array]
Claim = tuple[str, View]
"""A value of the model, and what a tensor of the plan is of it."""
CELLS, WORK = 192, 1 << 21  # of the first of equal operations: cells, and index points for them
AGAIN, AGAIN_WORK = 12, 1 << 17  # of every other one
BEHIND = 8  # index points that a cell which is followed back may take before fewer cells are looked at
ALL = 1 << 12  # cells of an operation that reads constants which the model does not have
MOST_AXES = 6  # of an array whose axes may be in any order
MOSTLY = 0.75  # of the cells, which an order of axes must give to be taken for a tensor's; what is left may be rounding
DRAWS = 4096  # cells of a random operation
SECOND_OPINION = 1 << 18  # index points of an operation on awkward numbers for which the slow reference is asked


class Disputed(LawError):
    """The plan and two references give three values where an operator may have no meaning: it is no difference between the plan
    and its model, nor agreement."""


@dataclass(slots=True)
class Compared:
    """What was compared: the counts of a certificate."""

    by: str
    counts: Counter[str] = field(default_factory=Counter[str])
    refused: list[str] = field(default_factory=list[str])

    def evidence(self) -> dict[str, Any]:
        """As a certificate has it."""
        least = self.counts["least cells"]
        return {
            "kind": "sampled cells",
            "what": "the graph's operations",
            "against": f"the model file, by {self.by}",
            "counts": dict(sorted(self.counts.items())),
            "power": f"a fault in a share p of an operation's cells is missed with probability (1 - p)^{least} at most"
            if least
            else "every cell of every distinct operation",
            **({"refused by onnxruntime": self.refused} if self.refused else {}),
        }


@dataclass(slots=True)
class _Check:
    graph: Graph
    model: ModelFile
    run: ReferenceValues
    read: Reader
    compared: Compared
    seed: int
    lenient: bool = False  # of awkward values: where two references differ, nothing is asked
    claims: dict[str, Claim] = field(default_factory=dict[str, Claim])
    held: dict[str, Array] = field(default_factory=dict[str, Array])
    values: CellValues = field(init=False)
    makers: dict[str, Op] = field(init=False)

    def __post_init__(self) -> None:
        units = [UNIT[d] for d in self.model.floats()] or [1.0]
        self.values = CellValues(self.graph, self.known, coarsest=max(units))
        self.makers = {t: op for op in self.graph.ops for t in op.outs}

    def behind(self, op: Block) -> int:
        """Index points that a cell takes which an operation reads and the model does not have, the most of any."""
        makers = [self.makers[t] for t in op.inputs if t in self.makers and t not in self.run.values and t not in self.claims]
        return max([m.merged_cells for m in makers if isinstance(m, Block)], default=1)

    def known(self, name: str) -> Any:
        """The value of a tensor that has a counterpart."""
        if name in self.graph.weights:
            return self.read(name)
        if name in self.claims:
            if name not in self.held:
                base, view = self.claims[name]
                self.held[name] = view(np.asarray(self.run.values[base]))
            return self.held[name]
        value = self.run.values.get(name)
        if name in self.run.values and self.graph.tensors[name].on_host:
            return HostValue(value)
        return value


def check(
    graph: Graph,
    model: ModelFile,
    feeds: Mapping[str, Any],
    read: Reader,
    *,
    seed: int = 0,
    special: bool = True,
    lifted: Graph | None = None,
    operands: bool = True,
) -> Compared:
    """Compare a graph with its model.

    Args:
        feeds: an array for every input, on which the reference runs.
        read: the data of a weight, as the plan's run reads it.
        special: run once more with infinities, NaN, -0 and the like among the inputs; and hold each operation to the model on
            such operands of its own, whatever the inputs lead to.
        lifted: the graph before it was rewritten, if it was: its operations are those that are held to the model on operands
            of their own. What rewrites made is proved by their log, and may be another function of infinities.
        operands: False: that graph is too large for it.

    Raises:
        LawError: naming the operation, and a cell where it differs; `Disputed` where two references differ as well.
        TapestryError: no reference runs the model on these inputs.
    """
    counts = Counter[str](facts(graph, model, read))
    own = (graph if lifted is None else lifted) if special and operands else None
    wanted = {t for g in (graph, own) if g for t in g.tensors if t not in g.weights or t not in model.initializers}
    wanted |= {base for t in graph.tensors for base in _bases(t)}
    run = ReferenceValues(model, feeds, wanted)
    c = _Check(graph, model, run, read, Compared(run.by, counts, run.refused), seed)
    _types(c)
    _constants(c)
    seen: dict[str, int] = {}
    for i, op in enumerate(graph.ops):
        first = seen.setdefault(signature(op, graph), i) == i
        counts["operations"] += 1
        counts["distinct"] += first
        _operation(c, op, first, i)
    if special and (odd := awkward(feeds, seed)):
        _awkward(c, odd, wanted, set(seen.values()))
    if own is not None:
        _operands(c, own)
    elif special:
        counts[f"{APART} (beyond the budget)"] += sum(isinstance(op, Block) for op in graph.ops)
    return c.compared


def facts(graph: Graph, model: ModelFile, read: Reader) -> dict[str, int]:
    """What is compared without running anything: inputs, outputs, weights, and the attributes of opaque nodes.

    Raises:
        LawError: naming the tensor or the operation.
    """
    opaque_ops = [op for op in graph.ops if isinstance(op, Opaque)]
    for op in opaque_ops:
        model_facts.node_of_opaque(op, model)
    return {
        "inputs and outputs": model_facts.interface(graph, model),
        "weights": model_facts.weights(graph, model, read),
        "opaque nodes": len(opaque_ops),
    }


def _awkward(c: _Check, feeds: Mapping[str, Any], wanted: Collection[str], ops: set[int]) -> None:
    """Distinct operations on values that infinities and the like lead to; what no reference takes is left out."""
    try:
        run = ReferenceValues(c.model, feeds, wanted)
    except (TapestryError, ArithmeticError, ValueError):
        return
    odd = _Check(c.graph, c.model, run, c.read, Compared(run.by), c.seed, lenient=True, claims=c.claims)
    for i in sorted(ops):
        op = c.graph.ops[i]
        if isinstance(op, Block) and all(t in run.values for t in op.outs):
            _block(odd, op, True, i)
    c.compared.counts["awkward cells"] = odd.compared.counts["cells"]
    for what in ("references differ", "NaN differs"):
        c.compared.counts[what] = odd.compared.counts[what]


def _operands(c: _Check, graph: Graph) -> None:
    """Operations on awkward operands of their own."""
    for name, value in list(c.run.values.items()):  # of those that rewrites took out of the plan's graph
        t = graph.tensors.get(name)
        if t is not None and name not in c.graph.tensors and not t.on_host:
            if is_array(value) and t.dtype in STORED and value.dtype == np.uint8:
                c.run.values[name] = value = value.view(numpy_dtype(t.dtype))
            if not is_array(value) or value.shape != t.shape or value.dtype != numpy_dtype(t.dtype):
                del c.run.values[name]
    blocks = [op for op in graph.ops if isinstance(op, Block)]
    distinct = len({signature(op, graph) for op in blocks})
    parts = Counterparts(graph, c.model, c.run, c.read)
    odd = AwkwardOperands(graph, parts, c.seed, c.values.coarsest, distinct, c.compared.counts)
    with np.errstate(all="ignore"):
        for i, op in enumerate(blocks):
            odd.check(op, i)


def _types(c: _Check) -> None:
    """Tensors that the model has are of its type and shape.

    Raises:
        LawError: one is not.
        TapestryError: its sizes are those that the file declares, and other values give others.
    """
    for name, sizes in c.model.states():  # opset 8 has a batch before a Scan's: then there is one axis more
        value = _any_value(c, name)
        if is_array(value) and len(value.shape) == len(sizes) and value.shape != sizes:
            raise TapestryError(f"the sizes of '{name}' depend on values")
    for name, value in c.run.values.items():
        t = c.graph.tensors.get(name)
        if t is None or t.on_host or not is_array(value):
            continue
        if t.dtype in STORED and value.dtype == np.uint8:  # as onnxruntime gives elements that numpy does not have
            value = c.run.values[name] = value.view(numpy_dtype(t.dtype))
        if value.shape != t.shape and c.model.declared(name) == t.shape:  # true of the user's values, not of those drawn here
            raise TapestryError(f"the sizes of '{name}' depend on values")
        if value.dtype != numpy_dtype(t.dtype) == c.model.declared_type(name) and c.run.by != "onnxruntime":
            value = c.run.values[name] = value.astype(numpy_dtype(t.dtype))  # the reference computes some in float64
        if value.shape != t.shape or value.dtype != numpy_dtype(t.dtype):
            why = f"{t.dtype}{list(t.shape)} in the plan, {value.dtype.name}{list(value.shape)} by {c.run.by}"
            raise LawError(LAW, f"'{name}' is of another type", where="the graph", why=why)


def _constants(c: _Check) -> None:
    """Constants under the name of a value that the model computes are that value."""
    for name, ref in c.graph.weights.items():
        if ref.file or name not in c.model.makers or name in c.model.initializers:
            continue
        mine = c.read(name)
        if not bodies.alike(mine, np.asarray(c.run.values[name])) and not bodies.alike(mine, c.run.again(name)):
            raise LawError(LAW, "a derived constant is not the model's value", where=f"constant '{name}'")
        c.compared.counts["constants"] += 1


def _operation(c: _Check, op: Op, first: bool, number: int) -> None:
    if isinstance(op, Opaque):
        _opaque(c, op, number, first)
    elif all(t in c.run.values for t in op.outs):
        _block(c, op, first, number)
    else:
        if named := [k for k, t in enumerate(op.outs) if t in c.run.values]:
            _block(c, op, first, number, named)
        if not _claimed(c, op, first, number, [t for t in op.outs if t not in c.run.values]) and not named:
            c.compared.counts["followed back"] += 1


def _block(c: _Check, op: Block, first: bool, number: int, which: Collection[int] | None = None) -> None:
    """A block operation at sampled cells."""
    rng = np.random.default_rng((c.seed, number))
    loose = any(t in c.graph.weights and not c.graph.weights[t].file and t not in c.model.makers for t in op.inputs)
    count, work = (CELLS, WORK) if first else (AGAIN, AGAIN_WORK)
    points = cells(op, c.graph, rng, ALL if loose else count, work // max(1, c.behind(op) // BEHIND))
    c.values.unit, c.values.random, c.values.whole_numbers = 0.0, False, False
    made = c.values.block(op, points)
    if c.values.random:
        return _random(c, op, rng)
    c.compared.counts["cells"] += len(points)
    if len(points) < np.prod([d.size for d in op.dims], dtype=float) and first:
        c.compared.counts["least cells"] = min(c.compared.counts["least cells"] or len(points), len(points))
    for k in range(len(op.outs)) if which is None else which:
        _held(c, op, k, points, made[k], number)
    return None


def _held(c: _Check, op: Block, k: int, points: Array, made: tuple[Array, Array], number: int) -> None:
    """One output at some cells: near, or explained by rounding, or what another evaluator says."""
    name = op.outs[k]
    dtype = c.graph.tensors[name].dtype
    reference = at_cells(np.asarray(c.run.values[name]), points)
    unit = c.values.unit
    good = same(*made, reference, dtype, unit)
    if good.all():
        return
    bad = np.flatnonzero(~good)
    why = explained(c.values, op, k, points[bad], reference[bad], dtype, number)
    c.compared.counts["by rounding"] += int(why.sum())
    bad = bad[~why]
    if not len(bad):
        return
    if c.lenient:  # what becomes of a NaN beside masks and maxima, or as a whole number, is a policy: evaluators differ
        odd = np.isnan(made[0][bad].astype(np.float64)) != np.isnan(reference[bad].astype(np.float64))
        odd |= dtype not in FLOATS or c.values.whole_numbers
        c.compared.counts["NaN differs"] += int(odd.sum())
        bad = bad[~odd]
        if not len(bad):
            return
    slow = c.lenient and math.prod(d.size for d in op.space) > SECOND_OPINION
    other, law = None if slow else c.run.again(name), LawError
    if is_array(other) and other.shape == c.graph.tensors[name].shape:
        there = at_cells(other, points[bad])
        agrees = same(made[0][bad], made[1][bad], there, dtype, unit)
        agrees |= explained(c.values, op, k, points[bad], there, dtype, number)
        c.compared.counts["by the other reference"] += int(agrees.sum())
        differ = ~same(there.astype(made[0].dtype), made[1][bad], reference[bad], dtype, unit) if c.lenient else ~agrees & False
        c.compared.counts["references differ"] += int((differ & ~agrees).sum())
        bad = bad[~agrees & ~differ]
        if len(bad) and not same(there[~agrees].astype(made[0].dtype), made[1][bad], reference[bad], dtype, unit).any():
            law = Disputed
    elif c.lenient:
        c.compared.counts["references differ"] += len(bad)
        return
    if len(bad) and not slow and (left := _defined(c, op, k, points[bad], made, bad, number)) is not None:
        c.compared.counts["by higher precision"] += len(bad) - len(left)
        bad = bad[left]
    if len(bad):
        at, cell = bad[0], tuple(points[bad[0]])
        others = {f"by {c.run.by}": reference[at], "by onnx.reference": other, "in float64": c.run.again(name, double=True)}
        opinions = ", ".join(f"{v[cell] if is_array(v) and v.ndim else v!s} {by}" for by, v in others.items() if v is not None)
        why = f"cell {points[at].tolist()} is {made[0][at]!s} by the plan, {opinions}; {len(bad)} of {len(points)} cells differ"
        raise law(LAW, f"'{name}' is not the model's", where=where(op), why=why)


def _defined(c: _Check, op: Block, k: int, points: Array, made: tuple[Array, Array], bad: Array, number: int) -> Array | None:
    """Which cells differ from the definition in higher precision as well: ONNX's own evaluator in float64, and no code of the
    plan's. None where it cannot say."""
    name, dtype = op.outs[k], c.graph.tensors[op.outs[k]].dtype
    exact = c.run.again(name, double=True)
    if dtype not in FLOATS or not is_array(exact) or exact.shape != c.graph.tensors[name].shape:
        return None
    there = at_cells(exact, points)
    agrees = same(made[0][bad], made[1][bad], there, dtype, c.values.unit)
    return np.flatnonzero(~(agrees | explained(c.values, op, k, points, there, dtype, number)))


def _random(c: _Check, op: Block, rng: np.random.Generator) -> None:
    """Draws differ from generator to generator: their distributions must not."""
    points = cells(op, c.graph, rng, DRAWS, 1 << 22)
    made = c.values.block(op, points)
    c.compared.counts["random operations"] += 1
    for k, name in enumerate(op.outs):
        theirs, node = c.run.values[name], c.model.makers.get(name)
        if node is not None and node.op_type == "Bernoulli" and c.run.by == "onnxruntime":
            theirs = 1 - np.asarray(
                theirs
            )  # it takes the standard's function body, whose test is turned round: 1 has the chance 1 - p
        _drawn_alike(theirs, made[k][0], name, op)


def _drawn_alike(theirs: Any, mine: Any, name: str, op: Op) -> None:
    if why := other_distribution(np.asarray(theirs), np.asarray(mine)):
        raise LawError(LAW, f"'{name}' is drawn from another distribution", where=where(op), why=why)


def _claimed(c: _Check, op: Block, first: bool, number: int, outs: Sequence[str]) -> bool:
    """Whether outputs are slices of values that their names begin with, at the cells that were looked at, or these with their
    axes in another order, which most cells show and rounding explains of the others. What is neither is followed back.
    """
    rng = np.random.default_rng((c.seed, number))
    bases = {t: next((b for b in _bases(t) if is_array(c.run.values.get(b))), None) for t in outs}
    if any(b is None for b in bases.values()):
        return False
    points = cells(op, c.graph, rng, *((CELLS, WORK) if first else (AGAIN, AGAIN_WORK)))
    c.values.unit, c.values.random = 0.0, False
    made = c.values.block(op, points)
    found: dict[str, Claim] = {}
    for t, base in bases.items():
        assert base is not None
        shape, dtype, values = c.graph.tensors[t].shape, c.graph.tensors[t].dtype, made[op.outs.index(t)]
        whole = np.asarray(c.run.values[base])
        views = [] if whole.dtype != numpy_dtype(dtype) else [*_slices(whole.shape, shape), *_orders(whole.shape, shape)]
        right = [same(*values, v(whole)[tuple(points.T)], dtype, c.values.unit).mean() for v in views]
        best = int(np.argmax(right)) if right else 0
        if not right or right[best] < (MOSTLY if math.prod(whole.shape) == math.prod(shape) else 1):
            return False
        reference = np.asarray(views[best](whole)[tuple(points.T)]).reshape(len(points))  # of rank 0 it is a scalar
        bad = np.flatnonzero(~same(*values, reference, dtype, c.values.unit))
        if not explained(c.values, op, op.outs.index(t), points[bad], reference[bad], dtype, number).all():
            return False
        found[t] = base, views[best]
    c.claims |= found
    c.compared.counts["cells"] += len(points)
    c.compared.counts["slices"] += len(found)
    return True


def _bases(name: str) -> Iterator[str]:
    """The names that a tensor's name begins with, up to a dot, the longest first."""
    while "." in name:
        yield (name := name.rpartition(".")[0])


def _slices(whole: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[View]:
    """The parts of an array along one axis, of some shape."""
    longer = [a for a, (n, m) in enumerate(zip(whole, shape, strict=False)) if n != m]
    if len(whole) != len(shape) or len(longer) > 1 or any(whole[a] < shape[a] for a in longer):
        return
    for start in range(whole[longer[0]] - shape[longer[0]] + 1) if longer else (0,):
        part = [slice(start, start + m) if a in longer else slice(None) for a, m in enumerate(shape)]
        yield lambda x, part=tuple(part): x[part]


def _orders(whole: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[View]:
    """The array with its axes in another order, neighbours joined where the shape has fewer."""
    if math.prod(whole) != math.prod(shape) or len(whole) > MOST_AXES:
        return
    for order in itertools.permutations(range(len(whole))):
        ends, wanted = ({*itertools.accumulate(sizes, operator.mul)} for sizes in ([whole[a] for a in order], shape))
        if wanted <= ends:  # each axis of the shape ends where one of the array's does
            yield lambda x, order=order: x.transpose(order).reshape(shape)


def _opaque(c: _Check, op: Opaque, number: int, first: bool) -> None:
    """An ONNX node: its bodies, and what it gives for the reference's values, whole and in parts."""
    node = model_facts.node_of_opaque(op, c.model)
    values = {t: c.values.stored(t, c.values.whole(t)) for t in op.inputs}
    if node is not None and first and has_body(node):
        plain = {t: v.value if isinstance(v, HostValue) else v for t, v in values.items()}
        outer = {n: v for n in (*node.input, *outer_names(node)) if (v := _any_value(c, n)) is not None}
        found = bodies.check_operation(op, c.graph, node, c.model, {**plain, **outer}, number, partial(_any_value, c))
        c.compared.counts["variants of bodies"] += found
    named = [t for t in op.outs if t in c.run.values]
    if not named:
        return
    drawn = draws(op)
    for part in (op, *(_cut(op, d) for d in op.dims if first and d.size > 1 and not drawn)):
        _node_values(c, part, named, values, drawn)


def _cut(op: Opaque, d: Dim) -> Opaque:
    """The operation in two parts along a dimension that it says it commutes with."""
    return replace(op, splits=(Split(d.name, 2, "time"),))


def _node_values(c: _Check, op: Opaque, named: list[str], values: Mapping[str, Any], drawn: bool) -> None:
    made = dict(zip(op.outs, opaque(op, c.graph, values, wide=False), strict=True))
    for t in named:
        if drawn and is_array(made[t]) and made[t].dtype.kind in "fiub":
            _drawn_alike(c.run.values[t], made[t], t, op)
        elif (
            not drawn
            and not bodies.alike(made[t], c.run.values[t])
            and not bodies.alike(made[t], other := c.run.again(t))
            and not bodies.alike(made[t], c.run.again(t, double=True))
        ):
            names, k = list(values), op.outs.index(t)
            compute = partial(_result, c.graph, op, names, k)
            if within_rounding(compute, list(values.values()), made[t], c.run.values[t], c.seed):
                c.compared.counts["nodes that rounding decides"] += 1
                continue
            law = LawError if other is None or bodies.alike(other, c.run.values[t]) else Disputed
            raise law(LAW, f"'{t}' is not the model's", where=where(op), why=f"the node gives other values than {c.run.by}")


def _result(graph: Graph, op: Opaque, names: Sequence[str], k: int, values: Sequence[Any]) -> Any:
    """An output of a node for the values of some tensors."""
    return opaque(op, graph, dict(zip(names, values, strict=True)), wide=False)[k]


def _any_value(c: _Check, name: str) -> Any:
    """A value of the model, computed if it was not kept."""
    if not name:
        return None
    found = c.run.get(name)
    return c.run.computed(name) if found is None else found
