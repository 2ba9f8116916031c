"""What a model does with its sizes, done at all sizes of a region at once: where it is one model, and where another one.

A model computes with sizes: ``Shape``, arithmetic, comparisons, tables, and what ``Reshape``, ``Slice`` or ``If`` make of
it. All of it is done here at every size of a region, in the model's own types. A model is the same one at two sizes if each
number that an operator takes from sizes (of a tensor's axes, of its own arguments) is given by one expression at both, and
every branch, every axis that is broadcast, every end that is clamped is the same. Where a number follows from sizes by
something that is not understood, nothing is said of any other size, and the node is named.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from tapestry.errors import ModelError, TapestryError
from tapestry.ir.graph import Graph
from tapestry.ir.sizes.size_formula import Formula, Region, Sizes, formula_of
from tapestry.lift.building.registry import find
from tapestry.lift.file.protos import attributes, captured, is_standard, node_name, standard_opset, static_shape, subgraphs
from tapestry.lift.normalize.inference import InferenceError, infer_shapes
from tapestry.lift.normalize.inference_fixes import rewrite_misinferred
from tapestry.lift.normalize.prepare import infer
from tapestry.lift.sizes.shape_rules import RULES, Known, NoRule, Shape, Site
from tapestry.lift.sizes.size_columns import Array, Grid, box_without
from tapestry.lift.sizes.static_values import CELLS, Call, evaluated
from tapestry.onnx_eval.inlined_functions import inlined
from tapestry.onnx_eval.one_rounding import reference_evaluator

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
    copied = ModelProto()
    copied.CopyFrom(model)
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
            [node], "one", [helper.make_value_info(i, TypeProto()) for i in dict.fromkeys(filter(None, names))],
            [helper.make_value_info(o, TypeProto()) for o in node.output if o],
        )  # fmt: skip
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
            copy = NodeProto()
            copy.CopyFrom(node)
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
