"""What a model does with its sizes, done at all sizes of a region at once: where it is one model, and where another one.

A model computes with sizes: ``Shape``, arithmetic, comparisons, tables, and what ``Reshape``, ``Slice`` or ``If`` make of
it. All of it is done here at every size of a region, in the model's own types. A model is the same one at two sizes if each
number that an operator takes from sizes (of a tensor's axes, of its own arguments) is given by one expression at both, and
every branch, every axis that is broadcast, every end that is clamped is the same. Where a number follows from sizes by
something that is not understood, nothing is said of any other size, and the node is named.
"""

from __future__ import annotations

import math
import random
from collections import ChainMap, Counter
from collections.abc import Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any, cast

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from tapestry.errors import ModelError, TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.many_sizes.size_formula import Formula, Region, Sizes, formula_of
from tapestry.ir.types import Array
from tapestry.lift.file.protos import attributes, captured, is_standard, node_name, standard_opset, static_shape, subgraphs
from tapestry.lift.file.symbols import Given, bind
from tapestry.lift.normalize.inference import InferenceError, infer_shapes
from tapestry.lift.normalize.inference_fixes import rewrite_misinferred
from tapestry.lift.normalize.prepare import infer
from tapestry.lift.registry import find
from tapestry.lift.sizes.shape_rules import BROADCAST, RULES, Known, NoRule, Shape, Site
from tapestry.lift.sizes.size_columns import Grid, box_without
from tapestry.lift.sizes.static_values import CELLS, Call, evaluated
from tapestry.onnx_eval.ort_session import inlined
from tapestry.onnx_eval.reference_evaluator import reference_evaluator

UNALIGNED = frozenset({"ConvTranspose", "GRU", "LSTM", "RNN"})  # of several inputs, none of which is broadcast
CASES = 4096  # at which a node is run or inferred one by one
MALFORMED = (ValueError, IndexError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What goes wrong on a model that contradicts itself, which is said where it is lifted."""
Scope = MutableMapping[str, Known]
Dims = tuple[int | str | Formula, ...]
"""For each axis of an input its size, a symbol, or what follows from symbols."""


class NotUnderstood(Exception):
    """Something follows from sizes in a way that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SameModel:
    """The sizes of a region at which a model is the one that it is at ``made_at``.

    Attributes:
        reasons: the nodes that are others elsewhere, and an example of where.
        shapes: sizes of tensors of the top-level graph, by name, at all sizes of the grid.
    """

    region: Region
    grid: Grid
    reasons: tuple[str, ...]
    shapes: Mapping[str, tuple[Array, ...]]

    def varying(self) -> frozenset[str]:
        """Tensors that have other sizes elsewhere in the region: as constants they would be other ones, however small."""
        return frozenset(n for n, columns in self.shapes.items() if any(c.size > 1 for c in columns))

    def differs(self, graph: Graph, region: Region) -> tuple[str, Sizes] | None:
        """A tensor whose shape a graph has wrong at some sizes of a part of the region; its name, and such sizes.

        Args:
            graph: its sizes are symbols, made at the same sizes.
        """
        seen = set[tuple[Formula | None, int]]()
        for name, columns in self.shapes.items():
            shape = graph.tensors[name].shape if name in graph.tensors else ()
            if len(shape) != len(columns) or any(self.grid.here(c) != int(n) for c, n in zip(columns, shape, strict=True)):
                continue  # another tensor of that name
            for n, column in zip(shape, columns, strict=True):
                formula = formula_of(n)
                if (formula, id(column)) in seen:
                    continue
                seen.add((formula, id(column)))
                given = self.grid.constant(int(n)) if formula is None else self.grid.given_by(formula)
                wrong = self.grid.first((given != column), region)
                if wrong is not None:
                    return name, wrong
        return None


def same_model(
    model: ModelProto, inputs: Mapping[str, Dims], symbols: Sequence[str], region: Region, made_at: Sizes
) -> SameModel:
    """Where in a region a model is the one that it is at some sizes.

    Args:
        model: as it was read; stays as it is.
        inputs: for every input, a symbol, a size or a formula of symbols for each axis.
    """
    grid = Grid(region, made_at)
    own = {o for n in model.graph.node for o in n.output} | set(inputs)
    copied = deepcopy(model)
    try:
        walk = Walk(copied, grid, symbols)
        walk.top(inputs)
    except (NotUnderstood, *MALFORMED) as e:
        return SameModel(region=Region(made_at, made_at, {}), grid=grid, reasons=(str(e),), shapes={})
    bad = ~walk.good
    if bad[grid.place]:  # the model contradicts itself there, as lifting says
        box = Region(made_at, made_at, {})
    else:
        box = box_without(grid, bad) if bad.any() else region
    named = [f"{where} lifts to another operation at {_text(grid, mask, symbols)}" for where, mask in walk.other.items()]
    shapes = {n: k.shape for n, k in walk.known.items() if k.shape is not None and n in own}
    return SameModel(region=box, grid=grid, reasons=tuple(named), shapes=shapes)


def _text(grid: Grid, mask: Array, symbols: Sequence[str]) -> str:
    """The sizes nearest to ``made_at`` at which a mask is not set, of the symbols that it follows from."""
    at = min(np.argwhere(~mask).tolist(), key=lambda p: sum(abs(a - b) for a, b in zip(p, grid.place, strict=True)))
    parts = zip(symbols, grid.along, at, mask.shape, strict=True)
    return ", ".join(f"{s} = {some[p]}" for s, some, p, n in parts if n > 1)


@dataclass
class Walk:
    """A model, node by node.

    Attributes:
        good: the sizes at which all is as at ``made_at``.
        other: nodes that are another one at some sizes, with those at which they are not.
        known: values of the top-level graph.
    """

    model: ModelProto
    grid: Grid
    symbols: Sequence[str]
    other: dict[str, Array] = field(default_factory=dict[str, Array])
    known: dict[str, Known] = field(default_factory=dict[str, Known])
    _types: dict[str, TypeProto] = field(default_factory=dict[str, TypeProto])
    _checked: dict[int, tuple[Array, Array]] = field(default_factory=dict[int, tuple[Array, Array]])
    _columns: dict[tuple[Any, ...], Array] = field(default_factory=dict[tuple[Any, ...], Array])

    def __post_init__(self) -> None:
        """Write out functions; find the types of all values."""
        self.model = inlined(self.model)
        self.good = np.ones([len(some) for some in self.grid.along], bool)
        self.version = standard_opset(self.model)
        try:
            done = infer_shapes(self.model, check_type=False, strict_mode=False, data_prop=False)
        except (InferenceError, ModelError) as e:
            raise NotUnderstood(str(e)) from None
        self._note_types(done.graph)

    def _note_types(self, graph: GraphProto) -> None:
        for v in (*graph.input, *graph.output, *graph.value_info):
            self._types[v.name] = v.type
        for node in graph.node:
            for inner in subgraphs(node):
                self._note_types(inner)

    def top(self, inputs: Mapping[str, Dims]) -> None:
        """The whole model."""
        for i in self.model.graph.input:
            dims = inputs.get(i.name)
            if dims is None:
                stated = static_shape(i.type)
                self.known[i.name] = Known(None if stated is None else tuple(map(self.column, stated)))
            else:
                self.known[i.name] = Known(tuple(self.column(d) for d in dims))
        self.graph(self.model.graph, self.known)
        for o in self.model.graph.output:
            if o.name in self.known:
                self.consume(f"output '{o.name}'", self.known[o.name])

    def column(self, d: int | str | Formula) -> Array:
        """A size, a symbol's, or one that follows from those of symbols."""
        if isinstance(d, Formula):
            return self.interned(self.grid.given_by(d))
        at = self.grid.constant(np.int64(d)) if isinstance(d, int) else self.grid.axis(self.symbols.index(d))
        return self.interned(at)

    def interned(self, column: Array) -> Array:
        """The one array that holds such numbers, with axes of length 1 where nothing follows from a symbol."""
        for k, n in enumerate(column.shape):
            if n > 1 and (column == np.take(column, [0], axis=k)).all():
                column = np.take(column, [0], axis=k)
        column = np.ascontiguousarray(column)
        return self._columns.setdefault((column.shape, column.dtype.str, column.tobytes()), column)

    # nodes

    def graph(self, graph: GraphProto, scope: Scope) -> None:
        """All nodes of a graph that its outputs need."""
        for t in graph.initializer:
            scope[t.name] = self.stored(t)
        needed, nodes = {o.name for o in graph.output}, list[NodeProto]()
        for node in reversed(graph.node):
            if needed.intersection(node.output):
                nodes.append(node)
                needed.update((*node.input, *captured(node)))
        for node in reversed(nodes):
            self.node(node, scope)

    def stored(self, t: TensorProto) -> Known:
        """A constant."""
        shape = tuple(self.column(n) for n in t.dims)
        small = int(np.prod(t.dims, dtype=np.int64)) <= CELLS and t.data_type != TensorProto.STRING
        if not small or t.data_location == TensorProto.EXTERNAL:
            return Known(shape, data=False)
        value = numpy_helper.to_array(t)
        return Known(shape, value.reshape(*(1,) * len(self.symbols), *value.shape), data=False)

    def node(self, node: NodeProto, scope: Scope) -> None:
        """What a node gives."""
        where = f"node '{node_name(node)}' ({node.op_type})"
        given = attributes(node)
        if is_standard(node, "Constant"):
            scope[node.output[0]] = self.constant(given)
            return
        if is_standard(node, "If") and self.branch(node, given, scope, where):
            return
        ins = [scope.get(i) if i else None for i in node.input]
        if any(i and i not in scope for i in node.input):
            raise NotUnderstood(f"{where} reads what nothing makes")
        outs = self.results(node, given, ins, scope, where)
        for name, known in zip(node.output, outs, strict=False):
            if name:
                scope[name] = known

    def constant(self, given: Mapping[str, Any]) -> Known:
        """What a Constant node holds."""
        value = given.get("value")
        if isinstance(value, TensorProto):
            return self.stored(value)
        kind, found = next(iter(given.items()))
        if kind not in ("value_int", "value_ints", "value_float", "value_floats"):
            return Known(None, data=False)
        array = np.array(found, np.int64 if "int" in kind else np.float32)
        return self.stored(numpy_helper.from_array(array))

    def branch(self, node: NodeProto, given: Mapping[str, Any], scope: Scope, where: str) -> bool:
        """An If whose condition follows from sizes: the branch that is taken at ``made_at``."""
        condition = scope[node.input[0]]
        if condition.value is None:
            if not condition.data:
                raise NotUnderstood(f"{where} branches on what follows from sizes in a way that is not understood")
            return False
        test = condition.value.reshape(condition.value.shape[: len(self.symbols)])
        taken = bool(self.grid.here(test))
        self.demand(where, test == taken)
        graph = given["then_branch" if taken else "else_branch"]
        inner: Scope = ChainMap(dict[str, Known](), cast("dict[str, Known]", scope))
        self.graph(graph, inner)
        for name, o in zip(node.output, graph.output, strict=True):
            scope[name] = inner[o.name]
        return True

    def results(
        self, node: NodeProto, given: Mapping[str, Any], ins: Sequence[Known | None], scope: Scope, where: str
    ) -> list[Known]:
        """What is known of a node's results."""
        there = [k for k in ins if k is not None]
        outer = [scope[c] for c in captured(node)]
        if is_standard(node, "Shape", "Size") and there[0].shape is not None:
            return [self.measured(node.op_type, given, there[0].shape)]
        static = all(k.value is not None for k in there) and not outer
        if static and is_standard(node) and there:
            values = [None if k is None else k.value for k in ins]
            call = Call(node.op_type, values, len(self.symbols), given, self.version)
            found = evaluated(call)
            for mask in call.needs if found is not None else ():
                self.demand(where, mask)
            if found is not None:
                return [self.value(found)]
        for k in there:
            self.consume(where, k)
        data = any(k.data for k in (*there, *outer))
        varies = any(k.sized or k.shape is None or any(n.size > 1 for n in k.shape) for k in (*there, *outer))
        if any(k.shape is None for k in there) or outer or (varies and not is_standard(node)):
            if not data or (varies and (outer or not is_standard(node))):
                raise NotUnderstood(f"{where} is not understood for sizes that vary")
            return [Known(None)] * len(node.output)
        return self.shaped(node, given, ins, where, (data, varies))

    def measured(self, kind: str, given: Mapping[str, Any], shape: Sequence[Array]) -> Known:
        """A tensor's Shape, or its Size."""
        if kind == "Size":
            count = np.array(1).reshape((1,) * len(self.symbols))
            for n in shape:
                count = count * n
            return self.value(count)
        rank = len(shape)
        part = shape[slice(*(given.get(name, default) for name, default in (("start", 0), ("end", rank))))]
        if not part:
            return self.value(np.zeros((*(1,) * len(self.symbols), 0), np.int64))
        return self.value(np.stack(np.broadcast_arrays(*part), axis=-1))

    def value(self, value: Array) -> Known:
        """A value that is known."""
        axes = len(self.symbols)
        for k in range(axes):
            if value.shape[k] > 1 and (value == np.take(value, [0], axis=k)).all():
                value = np.take(value, [0], axis=k)
        shape = tuple(self.column(n) for n in value.shape[axes:])
        return Known(shape, value, data=False, sized=any(n > 1 for n in value.shape[:axes]))

    def shaped(
        self, node: NodeProto, given: Mapping[str, Any], ins: Sequence[Known | None], where: str, of: tuple[bool, bool]
    ) -> list[Known]:
        """The results of a node whose operator has a rule, or which is inferred case by case."""
        data, varies = of
        site = Site(node.op_type, ins, given, len(node.output), self.grid)
        rule = RULES.get(node.op_type)
        try:
            if rule is None:
                raise NoRule
            shapes: Sequence[Shape | None] = rule(site)
        except NoRule:
            site.needs.clear()
            if any(k is not None and k.value is None and k.sized and not k.data for k in ins):
                raise NotUnderstood(f"{where} takes what follows from sizes in a way that is not understood") from None
            return self.cases(node, ins, where, of)
        for mask in site.needs:
            self.demand(where, mask)
        for a, b in site.equal:
            self.equate(where, a, b)
        return [self.result(where, shape, data, varies) for shape in shapes]

    def result(self, where: str, shape: Shape | None, data: bool, varies: bool) -> Known:
        """A value of a shape that has to be one expression's, of which each axis is empty at all sizes or at none."""
        if shape is None:
            return Known(None, data=data)
        shape = [self.interned(np.asarray(n, np.int64)) for n in shape]
        for n in shape:
            self.held(where, n)
            self.demand(where, (n <= 0) == (self.grid.here(n) <= 0))
        if not data and varies and all(n.size == 1 for n in shape):
            raise NotUnderstood(f"{where} gives what follows from sizes in a way that is not understood")
        return Known(tuple(shape), data=data, sized=varies)

    # what is demanded

    def demand(self, where: str, mask: Array) -> None:
        """Take away the sizes at which a mask is not set."""
        if not mask.all():
            self.other.setdefault(where, mask)
            self.good &= mask

    def equate(self, where: str, a: Array, b: Array) -> None:
        """Two sizes are the same one, or the node is none."""
        self.demand(where, a == b)

    def held(self, where: str, column: Array) -> None:
        """Take away the sizes at which a column is not what gives it at ``made_at``."""
        if column.size == 1:
            return
        found = self._checked.get(id(column))
        if found is None:
            found = self._checked[id(column)] = (column, self.grid.uniform(column))
        self.demand(where, found[1])

    def consume(self, where: str, known: Known) -> None:
        """A value that is known is an argument of a node: its numbers have to be one expression's, and of one sign."""
        if known.value is None or not known.sized:
            return
        found = known.value.reshape(*known.value.shape[: len(self.symbols)], -1)
        for k in range(found.shape[-1]):
            column = self.interned(found[..., k])
            self.held(where, column)
            if column.dtype.kind == "i":
                self.demand(where, (column < 0) == (self.grid.here(column) < 0))

    # case by case

    def cases(self, node: NodeProto, ins: Sequence[Known | None], where: str, of: tuple[bool, bool]) -> list[Known]:
        """A node without a rule, run or inferred at each of the sizes and values that its inputs have."""
        data, varies = of
        hidden = onnx.defs.has(node.op_type, self.version, "") and find(node, self.version) is None and _is_function(node)
        if varies and (hidden or list(subgraphs(node))):
            raise NotUnderstood(f"{where} is not understood for sizes that vary")
        there = [k for k in ins if k is not None]
        aligned = sum(k.data for k in there) > 1 and node.op_type not in UNALIGNED
        for k in there if aligned else ():
            for n in k.shape or ():
                self.demand(where, (n == 1) == (self.grid.here(n) == 1))
        parts = [n for k in there for n in (k.shape or ())]
        for k in there:
            if k.value is not None:
                flat = k.value.reshape(*k.value.shape[: len(self.symbols)], -1)
                parts += [flat[..., j] for j in range(flat.shape[-1])] if k.sized else []
        wide = np.broadcast_arrays(*parts) if parts else [self.column(1)]
        table = np.stack([w.reshape(-1).astype(np.float64) for w in wide], axis=-1)
        _, first, which = np.unique(table, axis=0, return_index=True, return_inverse=True)
        if len(first) > CASES:
            raise NotUnderstood(f"{where} is not understood: it has {len(first):,} cases")
        places: list[Any] = [np.unravel_index(at, wide[0].shape) for at in first]
        dims = self._inferred(node, ins, places, where)
        if all(k.value is not None for k in there):
            if any(math.prod(shape) > CELLS for found in dims for shape in found or ()):
                raise NotUnderstood(f"{where} gives a large tensor of what follows from sizes")
            return self._run(node, ins, places, which.reshape(wide[0].shape), where)
        out: list[Known] = []
        for found in dims:
            if found is None:
                out.append(self.result(where, None, data, varies))
                continue
            columns = np.array(found, np.int64).reshape(len(places), -1)[which.reshape(wide[0].shape)]
            out.append(self.result(where, [columns[..., a] for a in range(columns.shape[-1])], data, varies))
        return out

    def _run(
        self, node: NodeProto, ins: Sequence[Known | None], places: Sequence[Any], which: Array, where: str
    ) -> list[Known]:
        """By onnx's reference, as folding does."""
        values = [None if k is None else k.value for k in ins]
        names = [i if i else "" for i in node.input]
        graph = helper.make_graph(
            [node],
            "one",
            [helper.make_value_info(i, TypeProto()) for i in dict.fromkeys(filter(None, names))],
            [helper.make_value_info(o, TypeProto()) for o in node.output if o],
        )
        model = helper.make_model(graph, opset_imports=list(self.model.opset_import))
        try:
            run = reference_evaluator(model)
            with np.errstate(all="ignore"):
                rows = [
                    run.run(None, {i: _at(v, p) for i, v in zip(names, values, strict=True) if v is not None}) for p in places
                ]
        except Exception as e:  # of any kind: it is another library's interpreter
            raise NotUnderstood(f"{where} is not understood: {e}"[:200]) from None
        out: list[Known] = []
        for k in range(len(rows[0])):
            found = [np.asarray(row[k]) for row in rows]
            if len({(f.shape, f.dtype) for f in found}) > 1:
                raise NotUnderstood(f"{where} gives tensors of several shapes")
            out.append(self.value(np.stack(found)[which]))
        return out

    def _inferred(
        self, node: NodeProto, ins: Sequence[Known | None], places: Sequence[Any], where: str
    ) -> list[list[list[int]] | None]:
        """Shapes of a node's results by onnx's inference, a node for each case; None of what only the data says."""
        graph = GraphProto(name="cases")
        for c, place in enumerate(places):
            copy = deepcopy(node)
            copy.name = ""
            for k, (name, known) in enumerate(zip(node.input, ins, strict=True)):
                if known is None:
                    continue
                copy.input[k] = f"i{c}_{k}"
                if known.value is not None:
                    graph.initializer.append(numpy_helper.from_array(_at(known.value, place), copy.input[k]))
                    continue
                kind = self._types.get(name, TypeProto()).tensor_type.elem_type
                shape = [int(_at(n, place)) for n in known.shape or ()]
                graph.input.append(helper.make_tensor_value_info(copy.input[k], kind, shape))
            for k, o in enumerate(node.output):
                copy.output[k] = f"o{c}_{k}" if o else ""
            graph.node.append(copy)
        model = helper.make_model(graph, opset_imports=list(self.model.opset_import))
        try:
            rewrite_misinferred(model)
            types = infer(model)
        except TapestryError as e:
            raise NotUnderstood(f"{where}: {e.what} {e.why}"[:200]) from None
        out: list[list[list[int]] | None] = []
        for k in range(len(node.output)):
            found = [static_shape(types.get(f"o{c}_{k}")) for c in range(len(places))]
            shapes = [f for f in found if f is not None]
            out.append(shapes if len(shapes) == len(found) and len({len(f) for f in shapes}) == 1 else None)
        return out


def _at(value: Array, place: Sequence[Any]) -> Array:
    """A value at some sizes."""
    return value[tuple(int(p) if n > 1 else 0 for p, n in zip(place, value.shape, strict=False))]


def _is_function(node: NodeProto) -> bool:
    """Whether an operator is a function of others, which may compute with sizes of their own."""
    schema: Any = onnx.defs.get_schema(node.op_type)
    return bool(schema.has_function or schema.has_context_dependent_function)


# Sizes of symbols that follow from those of others, because an operator takes no other ones.
#
# A model's shapes are computed at sizes of its symbols that have nothing in common. Two sizes that an operator wants to be
# equal (up to an axis of 1, which is broadcast) are an equation if their difference is one linear sum of symbols at all of
# them; so are an axis in which places are looked up, and their number, if nothing else reads it. A symbol in no equation has
# to be given.


OTHERS, LARGEST = 10, 5000  # sizes at which an equation is held to what it says; beyond the tables that models have of places
LOOKS = ("Gather", "GatherND")
MOVES = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")  # the integers of a tensor stay
PLAIN = (*" ".join(BROADCAST).split(), "Concat", "Not", "Shape", "Slice", *({*MOVES} - {"Expand", "Reshape"}))
"""No cell of what they give follows from several cells of what they read."""
Pair = tuple[str, Array, Array]
Inputs = Mapping[str, Sequence[int | str]]


@dataclass(frozen=True, slots=True)
class Sum:
    """Symbols with their factors, and a number, which an equation (of one of them, or all) says to be 0; ``why`` is a node."""

    terms: Mapping[str, int]
    const: int
    why: str
    of: str = ""

    def solved(self, unknown: str) -> Sum | None:
        """What a symbol of the equation is, if it is a whole number whatever the others are."""
        by, rest = -self.terms[unknown], {s: c for s, c in self.terms.items() if s != unknown}
        if self.of not in ("", unknown) or any(c % by for c in (*rest.values(), self.const)):
            return None
        return Sum({s: c // by for s, c in rest.items()}, self.const // by, self.why)

    def at(self, sizes: Mapping[str, int]) -> int:
        """What it is at some sizes."""
        return sum(c * sizes[s] for s, c in self.terms.items()) + self.const

    def __str__(self) -> str:
        parts = [f"{'-' if c < 0 else '+'} {f'{abs(c)}*' * (abs(c) > 1)}{s}" for s, c in self.terms.items()]
        parts += [f"{'-' if self.const < 0 else '+'} {abs(self.const)}"] if self.const or not parts else []
        return " ".join(parts).removeprefix("+ ")


@dataclass
class _Equations(Walk):
    """A walk that notes what has to be equal, and goes on after what is not understood.

    Attributes:
        at: the sizes of each symbol: some, one more of each symbol in turn, and others.
        equal: what a node wants to be the same.
        looked_up: an axis in which a node looks up places, and how many there are up to the last one.
        tops: the largest integers of a tensor that has no negative ones, for each component along its last axis or for all.
        whole: symbols whose axes something else than a look-up reads.
    """

    at: Mapping[str, Array] = field(default_factory=dict[str, Array])
    equal: list[Pair] = field(default_factory=list[Pair])
    looked_up: list[Pair] = field(default_factory=list[Pair])
    tops: dict[str, list[Array]] = field(default_factory=dict[str, list[Array]])
    whole: set[str] = field(default_factory=set[str])

    def column(self, d: Any) -> Array:
        """A size, or a symbol's."""
        return self.interned(self.at[d] if isinstance(d, str) else self.grid.constant(np.int64(d)))

    def node(self, node: NodeProto, scope: Scope) -> None:
        """What a node gives, nothing where that is not known."""
        try:
            super().node(node, scope)
            self.look(node, scope)
        except (NotUnderstood, *MALFORMED):
            scope.update({o: Known(None) for o in node.output if o})
        ins, outs = [scope[i] for i in (*node.input, *captured(node)) if i in scope], [scope[o] for o in node.output if o]
        behind = self.symbols_of(*outs)
        if any(o.shape is None for o in outs) or not is_standard(node, *PLAIN, *LOOKS):
            self.whole |= self.symbols_of(*ins)
        elif node.op_type != "Shape":
            read = [k for k in (ins[1:] if node.op_type in LOOKS else ins) if k.value is None]
            sized = [] if node.op_type in (*MOVES, *LOOKS, "Concat", "Slice") else [k for k in ins if k.value is not None]
            self.whole |= self.symbols_of(*read) - behind | self.symbols_of(*sized)

    def symbols_of(self, *some: Known) -> set[str]:
        """From which symbols sizes and numbers of tensors follow."""
        rows = [np.asarray(n).reshape(-1, 1) for k in some for n in k.shape or ()]
        rows += [k.value.reshape(len(k.value), -1) for k in some if k.value is not None]
        return {s for k, s in enumerate(self.at) if any(len(n) > 1 and (n[1 + k] != n[0]).any() for n in rows)}

    def look(self, node: NodeProto, scope: Scope) -> None:
        """Note the largest integers of a node's result, or which places it looks up."""
        kind, ins, given = node.op_type, [scope[i] for i in node.input if i], attributes(node)
        tops, found = [self.largest(i, scope) for i in node.input], list[Array]()
        if kind == "Range" and all(k.value is not None for k in ins):
            start, limit, delta = (np.asarray(k.value).reshape(-1) for k in ins)
            found = [limit - 1] if (delta == 1).all() and (start >= 0).all() and (limit > start).all() else []
        elif kind in MOVES and len(tops[0]) == 1:
            found = tops[0]
        elif (
            kind == "Add" and all(len(t) == 1 for t in tops) and any(k.value is not None and k.value[0].size == 1 for k in ins)
        ):
            found = [tops[0][0] + tops[1][0]]
        elif kind == "Concat" and given["axis"] in (-1, len(ins[0].shape or ()) - 1) and all(len(t) == 1 for t in tops):
            found = [t[0] for t in tops] if all(k.shape and (k.shape[-1] == 1).all() for k in ins) else []
        elif kind in LOOKS and ins[0].shape and (kind == "Gather" or (ins[1].shape or [0])[-1] == len(tops[1])):
            dims, where = ins[0].shape[given.get("axis", 0) :], f"node '{node_name(node)}' ({kind})"
            self.looked_up += [(where, n, t + 1) for n, t in zip(dims, tops[1], strict=False) if not given.get("batch_dims", 0)]
        self.tops[node.output[0]] = found

    def largest(self, name: str, scope: Scope) -> list[Array]:
        """The largest integers of a tensor; nothing if they are not known."""
        value = scope[name].value if name else None
        if value is None or value.dtype.kind != "i" or value.size == 0 or value.min() < 0:
            return self.tops.get(name, [])
        return [value.reshape(len(value), -1).max(axis=1)] if value.ndim < 3 or value.shape[-1] == 1 else []

    def branch(self, node: NodeProto, given: Mapping[str, Any], scope: Scope, where: str) -> bool:
        """An If, unless it takes another branch at other sizes."""
        test = scope[node.input[0]].value
        if test is not None and test.size > 1:
            raise NotUnderstood
        return super().branch(node, given, scope, where)

    def equate(self, where: str, a: Array, b: Array) -> None:
        """Note it."""
        self.equal += [(where, a, b)] if a is not b else []


def equations(model: ModelProto, inputs: Inputs) -> list[Sum]:
    """What the symbols of a model's inputs have to come to; the model stays as it is."""
    symbols = list(dict.fromkeys(d for dims in inputs.values() for d in dims if isinstance(d, str)))
    points, copy = _probe_sizes(len(symbols)), deepcopy(model)
    grid, walk = Grid(Region((1,), (len(points),), {}), (1,)), None
    try:
        walk = _Equations(copy, grid, ("sample",), at=dict(zip(symbols, points.T, strict=True)))
        walk.top({name: tuple(dims) for name, dims in inputs.items()})
    except (NotUnderstood, *MALFORMED):
        if walk is None:
            return []
        walk.looked_up.clear()  # what else reads these axes was not seen; what has to be equal is right
    walk.whole |= walk.symbols_of(*(walk.known[o.name] for o in copy.graph.output if o.name in walk.known))
    out, looks = ([e for row in rows if (e := _equation(symbols, points, *row))] for rows in (walk.equal, walk.looked_up))
    for s in (s for s in symbols if s not in walk.whole):
        of = {str(e): e for e in looks if e.terms.get(s, 0) > 0}
        out += [
            replace(e, of=s, why=f"{e.why}, which reads so many, and nothing reads more") for e in of.values() if len(of) == 1
        ]
    return out


def given_sizes(
    model: ModelProto, inputs: Mapping[str, Sequence[int | str]], shapes: Given
) -> tuple[dict[str, int], list[Sum]]:
    """The sizes that ``--shape`` gives, and equations for the others: of the model, and such as ``total=past+sequence``."""
    symbols = {d for dims in inputs.values() for d in dims if isinstance(d, str)}
    said = [e for s, value in shapes.items() if s in symbols and (e := _said(s, str(value), symbols))]
    env = bind(inputs, {s: value for s, value in shapes.items() if not any(e.of == s for e in said)})
    return env, [*said, *equations(model, inputs)] if symbols > env.keys() else []


def _said(symbol: str, value: str, symbols: set[str]) -> Sum | None:
    parts = [p.strip() for p in value.split("+")]
    if symbols.isdisjoint(parts) or not all(p in symbols or p.isdecimal() for p in parts):
        return None
    terms = Counter({symbol: -1})
    terms.update(p for p in parts if p in symbols)
    return Sum(terms, sum(int(p) for p in parts if p not in symbols), "--shape", symbol)


def _probe_sizes(count: int) -> Array:
    """Sizes of so many symbols: some, each of them with one more, and others in any order; all of 2 and more."""
    draw = random.Random(0)  # noqa: S311
    first = np.array([draw.randrange(100, 1000) for _ in range(count)], np.int64)
    others = [[int(2 * (LARGEST / 2) ** draw.random()) for _ in range(count)] for _ in range(OTHERS)]
    return np.array([first, *(first + np.eye(count, dtype=np.int64)), *others], np.int64).reshape(1 + count + OTHERS, count)


def _equation(symbols: Sequence[str], points: Array, where: str, a: Array, b: Array) -> Sum | None:
    """That two columns are equal, where their difference is a sum of symbols."""
    gap = np.broadcast_to(np.asarray(a, np.int64) - np.asarray(b, np.int64), len(points))
    factors = gap[1 : 1 + len(symbols)] - gap[0]
    const = int(gap[0] - points[0] @ factors)
    if not factors.any() or (points @ factors + const != gap).any():
        return None
    by = gcd(const, *factors.tolist())
    return Sum({s: int(c) // by for s, c in zip(symbols, factors, strict=True) if c}, const // by, where)


def follow(found: Sequence[Sum], sizes: dict[str, int]) -> dict[str, Sum]:
    """What follows from the symbols that have a size; ``sizes`` gets it, too.

    Raises:
        ModelError: it would be negative.
    """
    out = dict[str, Sum]()
    while True:
        left = [(e, [s for s in e.terms if s not in sizes]) for e in found]
        solved = ((names[0], e.solved(names[0])) for e, names in left if len(names) == 1)
        symbol, what = next(((s, w) for s, w in solved if w is not None), ("", None))
        if what is None:
            return out
        sizes[symbol], out[symbol] = what.at(sizes), what
        if sizes[symbol] < 0:
            why = f"{symbol} has to be {what}, which is {sizes[symbol]}"
            raise ModelError("--shape contradicts the model", where=what.why, why=why, hint="other sizes")
