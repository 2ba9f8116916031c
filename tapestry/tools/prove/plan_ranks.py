"""Each rank's program of a tensor-parallel plan: the model's own nodes on parts of weights, with the plan's collectives.

A plan is transformers' ``tp_plan``: patterns of module names, each with a style. A module is found by its parameters' names
(``layers.0.mlp.up_proj.weight``), or by what the file says of the nodes that read them. Numbers that an export wrote where its
source had a size of a tensor (heads in a Reshape, pieces in a Split) are scaled as that tensor's axis is; all else is as the
file has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tapestry.errors import ModelError, PlanError, TapestryError, refusing
from tapestry.lift.file.protos import attributes, node_name, source_of, static_shape, subgraphs
from tapestry.lift.file.read_author_names import read_names
from tapestry.lift.normalize.inference import InferenceError, infer_shapes
from tapestry.onnx_eval.reference_evaluator import reference_evaluator

Shape = tuple[int, ...]
STYLES = {
    "colwise": "out", "colwise_rep": "out", "colwise_gather_output": "out", "rowwise": "in", "rowwise_rep": "in",
    "rowwise_split_input": "in", "replicate": "", "replicated_with_grad_allreduce": "", "embedding_rowwise": "",
    "embedding_colwise": "",
}  # fmt: skip
TABLES = {"embedding_rowwise", "embedding_colwise"}
GATHERED, SPLIT = {"colwise_rep", "colwise_gather_output"}, {"rowwise_rep", "rowwise_split_input"}
FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
SMALL = 64  # cells of a constant that may say sizes
END = 1 << 31  # an end of a Slice beyond this means all that is there


def rank_models(model: ModelProto, folder: Path, plan: Mapping[str, str], ranks: int) -> tuple[list[ModelProto], list[str]]:
    """The program of every rank, and the patterns that are of nothing in the model (they are passed over, as by transformers).

    Args:
        model: of static shapes, with the data of its weights in it or beside it.
        plan: patterns (``*`` is a number) and styles.

    Raises:
        ModelError: the plan does not say how, or what it says cannot be done.
    """
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ModelError(f"the style '{style}' is not known", where=f"tp_plan, '{pattern}'", hint=", ".join(STYLES))
    shapes = _shapes(inferred(model))
    styles, unused = _styles(model, plan)
    with refusing(ModelError, "the plan cannot be applied", "tp_plan", "a model of linear layers"):
        return [_Rank(model, folder, shapes, styles, r, ranks).made() for r in range(ranks)], unused


def inferred(model: ModelProto) -> ModelProto:
    """A model with the types of its values.

    Raises:
        ModelError: they contradict each other.
    """
    try:
        return infer_shapes(model, data_prop=True)
    except InferenceError as e:
        raise ModelError("shapes contradict each other", where="shape inference", why=str(e)[:300]) from None


def _styles(model: ModelProto, plan: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The style of each parameter by its name; patterns of no parameter. An error where none is of any, or where modules of
    several styles read one parameter."""
    called, out = _called(model), dict[str, str]()
    texts = [re.escape(pattern).replace(r"\*", r"\d+") for pattern in plan]
    styles = dict(zip((re.compile(rf"(^|\.){text}(\.weight|\.bias)?$") for text in texts), plan.values(), strict=True))
    for t, names in called.items():
        found = {next((s for k, s in reversed(styles.items()) if k.search(n)), "") for n in names}
        if len(found) > 1:
            why = f"{', '.join(sorted(names)[:3])} are one"
            raise ModelError("modules of several styles share a parameter", where=f"'{t}'", why=why)
        out[t] = found.pop()
    out = {t: s for t, s in out.items() if s}
    if not out:
        names = [n for t in called.values() for n in t if n.endswith(".weight")]
        why = f"it has {names[:4]}" if names else "its weights have lost their names"
        raise ModelError("the plan's modules are not in the model", where=f"'{next(iter(plan), '')}'", why=why)
    every = {n for names in called.values() for n in names}
    return out, [p for p, k in zip(plan, styles, strict=True) if not any(map(k.search, every))]


def _called(model: ModelProto) -> dict[str, set[str]]:
    """What each parameter is called: by the modules that read it, where an export folded it or merged equal vectors of several,
    else by its own name."""
    scopes, weights = read_names(model).scopes, {t.name: t for t in model.graph.initializer if t.data_type in FLOATS and t.dims}
    out = {t: set[str]() for t in weights}
    for node in model.graph.node:
        part, _ = scopes.get(source_of(node), ("", ""))
        for i in (i for i in node.input if part and i in weights):
            if len(weights[i].dims) == 1 or "." not in i:
                out[i].add(f"{part}.{'bias' if len(weights[i].dims) == 1 else 'weight'}")
    return {t: found or {t} for t, found in out.items()}


def _shapes(model: ModelProto) -> dict[str, Shape]:
    values = (*model.graph.output, *model.graph.value_info, *model.graph.input)
    out = {v.name: tuple(shape) for v in values if (shape := static_shape(v.type)) is not None}
    return out | {t.name: tuple(t.dims) for t in model.graph.initializer}


class _Rank:
    """One rank's program, node by node, with the sizes that its tensors have."""

    def __init__(
        self, model: ModelProto, folder: Path, whole: dict[str, Shape], styles: Mapping[str, str], rank: int, ranks: int
    ) -> None:
        self.model, self.folder, self.whole, self.styles, self.rank, self.ranks = model, folder, whole, styles, rank, ranks
        self.weights = {t.name: t for t in model.graph.initializer}
        self.makers = {o: n for n in model.graph.node for o in n.output}
        self.types = {v.name: v.type for v in model.graph.input}
        self.types |= {t.name: helper.make_tensor_type_proto(t.data_type, list(t.dims)) for t in model.graph.initializer}
        self.nodes: list[NodeProto] = []
        self.more: list[TensorProto] = []
        self.parts: dict[str, tuple[int, int]] = {}  # of a weight: the axis that is cut, and in how many sections
        self.value = cache(self._evaluated)

    def made(self) -> ModelProto:
        """The program."""
        for node in self.model.graph.node:
            self._node(NodeProto.FromString(node.SerializeToString()))
        out = ModelProto()
        out.CopyFrom(self.model)
        del out.graph.node[:], out.graph.initializer[:], out.graph.value_info[:]
        out.graph.node.extend(self.nodes)
        out.graph.initializer.extend([self._cut(t) for t in self.model.graph.initializer] + self.more)
        sent = {t: self.types[t] for n in self.nodes if n.op_type == "DistCollective" for t in (*n.input, *n.output)}
        out.graph.value_info.extend(helper.make_value_info(t, kind) for t, kind in sent.items())
        for o in out.graph.output:
            o.type.CopyFrom(self.types[o.name])
        return out

    # a node

    def _node(self, node: NodeProto) -> None:
        linear = self._linear(node)
        if linear is not None:
            self._apply(node, *linear)
        elif node.op_type == "Gather" and self.styles.get(node.input[0]) in TABLES and not attributes(node).get("axis", 0):
            self._embedding(node, self.styles[node.input[0]])
        elif node.op_type == "Add" and any(i in self.styles and len(self.whole[i]) == 1 for i in node.input):
            self._bias(node)
        else:
            self._plain(node)

    def _linear(self, node: NodeProto) -> tuple[str, str, int] | None:
        """The weight of a module that a node multiplies by, its style, and the axis of its outputs."""
        if node.op_type not in ("MatMul", "Gemm"):
            return None
        name, turned = node.input[1], node.op_type == "Gemm" and attributes(node).get("transB", 0) == 1
        maker = self.makers.get(name)
        if maker is not None and maker.op_type == "Transpose":
            name, turned = maker.input[0], not turned
        style = self.styles.get(name, "")
        return (name, style, 0 if turned else 1) if STYLES.get(style) and len(self.whole[name]) == 2 else None

    def _apply(self, node: NodeProto, weight: str, style: str, out: int) -> None:
        """A linear layer on a rank's part of its weight."""
        axis = out if STYLES[style] == "out" else 1 - out
        self._cut_weight(weight, axis)
        for t in (n for n in self.nodes if n.op_type == "Transpose" and n.input[0] == weight):
            self._infer(t)
        if STYLES[style] == "out":
            if node.op_type == "Gemm" and len(node.input) > 2:
                self._cut_weight(node.input[2], len(self.whole[node.input[2]]) - 1)
            self._end(node, style, gemm=node.op_type == "Gemm")
            return
        if style in SPLIT:
            node.input[0] = self._piece(node.input[0])
        bias = node.input[2] if node.op_type == "Gemm" and len(node.input) > 2 else ""
        result, node.output[0] = node.output[0], f"{node.output[0]}.part"
        if bias:
            del node.input[2:]
        self._plain(node)
        self._collective("ALL_REDUCE", node.output[0], f"{result}.sum" if bias else result)
        if bias:
            self._computed("Add", [f"{result}.sum", bias], result)

    def _bias(self, node: NodeProto) -> None:
        """The bias of a module that was written as a node of its own."""
        name = next(i for i in node.input if i in self.styles and len(self.whole[i]) == 1)
        if STYLES[self.styles[name]] == "out":
            self._cut_weight(name, 0)
            self._end(node, self.styles[name], gemm=True)
        else:
            self._plain(node)

    def _embedding(self, node: NodeProto, style: str) -> None:
        """A lookup in a part of a table: rows of other ranks are 0, and all ranks' are added; columns are gathered."""
        table, ids = node.input
        (out,) = node.output
        if style == "embedding_colwise":
            self._cut_weight(table, 1)
            self._gathered(node)
            return
        self._cut_weight(table, 0)
        rows, of_ids = self._shape(table)[0], self.types[ids].tensor_type.elem_type
        zero, last = self._stored(f"{out}.zero", [0], of_ids), self._stored(f"{out}.rows", [rows], of_ids)
        first = self._stored(f"{out}.first", [self.rank * rows], of_ids)
        nothing = self._stored(f"{out}.nothing", [0], self.weights[table].data_type)
        self._computed("Sub", [ids, first], f"{out}.at")
        self._computed("Less", [f"{out}.at", zero], f"{out}.below")
        self._computed("Less", [f"{out}.at", last], f"{out}.under")
        self._computed("Not", [f"{out}.below"], f"{out}.from")
        self._computed("And", [f"{out}.from", f"{out}.under"], f"{out}.mine")
        self._computed("Where", [f"{out}.mine", f"{out}.at", zero], f"{out}.row")
        self._computed("Gather", [table, f"{out}.row"], f"{out}.any")
        axis = self._stored(f"{out}.axis", [len(self._shape(ids))], TensorProto.INT64)
        self._computed("Unsqueeze", [f"{out}.mine", axis], f"{out}.wide")
        self._computed("Where", [f"{out}.wide", f"{out}.any", nothing], f"{out}.part")
        self._collective("ALL_REDUCE", f"{out}.part", out)

    def _end(self, node: NodeProto, style: str, *, gemm: bool) -> None:
        """A node whose last axis is a rank's part; gathered where the style says so, after the bias if there is one."""
        result = node.output[0]
        readers = [n for n in self.model.graph.node if result in n.input]
        later = not gemm and any(n.op_type == "Add" and any(self.styles.get(i) == style for i in n.input) for n in readers)
        if style not in GATHERED or later:
            self._plain(node)
        else:
            self._gathered(node)

    def _gathered(self, node: NodeProto) -> None:
        """A node whose last axis is a rank's part, and all ranks' parts of its result."""
        result = node.output[0]
        node.output[0] = f"{result}.part"
        self._plain(node)
        rank = len(self._shape(node.output[0]))
        turn = [rank - 1, *range(1, rank - 1), 0] if rank > 1 else [0]
        self._add(helper.make_node("Transpose", [node.output[0]], [f"{result}.turned"], perm=turn))
        self._collective("ALL_GATHER", f"{result}.turned", f"{result}.all")
        self._computed("Transpose", [f"{result}.all"], result, perm=turn)

    def _plain(self, node: NodeProto) -> None:
        """A node as it is, but for numbers that are sizes."""
        if node.op_type in ("Reshape", "Expand", "Split", "Slice") and len(node.input) > 1:
            self._sizes(node)
        self._add(node)

    # sizes

    def _sizes(self, node: NodeProto) -> None:
        x = node.input[0]
        mine, all_of = self._shape(x), self.whole[x]
        if mine == all_of:
            return
        if node.op_type == "Reshape":
            self._number(node, 1, _reshaped(mine, all_of, self.whole[node.output[0]]))
        elif node.op_type == "Expand":
            out = self.whole[node.output[0]]
            aligned = [(1, 1)] * (len(out) - len(mine)) + list(zip(mine, all_of, strict=True))
            self._number(node, 1, [m if m != w else n for n, (m, w) in zip(out, aligned, strict=True)])
        elif node.op_type == "Split":
            axis = int(attributes(node).get("axis", 0)) % len(mine)
            self._scaled(node, 1, [(mine[axis], all_of[axis])] * len(node.output))
        else:
            count = len(self._constant(node.input[1]))
            axes: list[int] = self._constant(node.input[3]) if len(node.input) > 3 and node.input[3] else list(range(count))
            for k in (1, 2):
                self._scaled(node, k, [(mine[a], all_of[a]) for a in axes])

    def _scaled(self, node: NodeProto, at: int, ratios: Sequence[tuple[int, int]]) -> None:
        """Numbers of places along axes, in a rank's part of them."""
        numbers: list[int] = []
        for n, (mine, all_of) in zip(self._constant(node.input[at]), ratios, strict=True):
            if mine != all_of and abs(n) < END and n * mine % all_of:
                what = "a piece does not divide among the ranks"
                raise ModelError(what, where=f"node '{node_name(node)}'", why=f"{n} of {all_of} cells")
            numbers.append(n if abs(n) >= END else n * mine // all_of)
        self._number(node, at, numbers)

    def _constant(self, name: str) -> list[int]:
        """The numbers of a constant; an error where it is computed of what is none."""
        value = self.value(name)
        if value is None:
            raise ModelError("a size on a part of a tensor is computed", where=f"'{name}'", hint="export with fixed shapes")
        return [int(n) for n in value.reshape(-1)]

    def _evaluated(self, name: str) -> np.ndarray | None:
        """A small constant, or what nodes make of small constants; None of any other value."""
        if name in self.weights:
            t = self.weights[name]
            small = prod(t.dims) < SMALL and t.data_location != TensorProto.EXTERNAL
            return numpy_helper.to_array(t) if small and name not in self.styles else None
        maker = self.makers.get(name)
        if maker is None or next(subgraphs(maker), None) is not None:
            return None
        names = [i for i in maker.input if i]
        feeds = {i: a for i in names if (a := self.value(i)) is not None}
        if len(feeds) < len(set(names)) or prod(self.whole.get(name, (SMALL,))) >= SMALL:
            return None
        infos = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()]
        outs = [helper.make_empty_tensor_value_info(o) for o in maker.output]
        graph = helper.make_graph([maker], "constant", infos, outs)
        one = helper.make_model(graph, opset_imports=list(self.model.opset_import), ir_version=self.model.ir_version)
        return np.asarray(reference_evaluator(one).run(None, feeds)[list(maker.output).index(name)])

    def _number(self, node: NodeProto, at: int, numbers: Sequence[int]) -> None:
        node.input[at] = self._stored(f"{node.output[0]}.sizes{at}", numbers, TensorProto.INT64)

    def _stored(self, name: str, numbers: Sequence[int], dtype: int) -> str:
        """A constant of the rank's own."""
        self.more.append(helper.make_tensor(name, dtype, [len(numbers)], list(numbers)))
        self.types[name] = helper.make_tensor_type_proto(dtype, [len(numbers)])
        return name

    def _shape(self, name: str) -> Shape:
        return tuple(d.dim_value for d in self.types[name].tensor_type.shape.dim)

    # what a rank has, and sends

    def _cut_weight(self, name: str, axis: int) -> None:
        shape = list(self.whole[name])
        if shape[axis] % self.ranks:
            raise ModelError("a weight does not divide among the ranks", where=f"'{name}'", why=f"{shape} in {self.ranks}")
        shape[axis] //= self.ranks
        self.parts[name] = axis, shape[axis]
        self.types[name] = helper.make_tensor_type_proto(self.weights[name].data_type, shape)

    def _cut(self, t: TensorProto) -> TensorProto:
        """A weight as the rank has it; one whose data is not there stays so."""
        if t.name not in self.parts:
            return t
        axis, size = self.parts[t.name]
        try:
            a = numpy_helper.to_array(t, str(self.folder))
        except (OSError, ValueError, onnx.checker.ValidationError):
            bare = TensorProto.FromString(t.SerializeToString())
            bare.dims[axis] = size
            return bare
        places = range(self.rank * size, (self.rank + 1) * size)
        return numpy_helper.from_array(np.ascontiguousarray(np.take(a, places, axis)), t.name)

    def _piece(self, name: str) -> str:
        """A rank's part of the last axis of a value that every rank has whole."""
        shape = self._shape(name)
        at = f"{name}.piece"
        if at in self.types:  # another module has split it
            return at
        numbers = [self.rank * (shape[-1] // self.ranks), (self.rank + 1) * (shape[-1] // self.ranks), len(shape) - 1]
        given = [self._stored(f"{at}{k}", [n], TensorProto.INT64) for k, n in enumerate(numbers)]
        self._computed("Slice", [name, *given], at)
        return at

    def _collective(self, kind: str, source: str, target: str) -> None:
        """A collective over all ranks."""
        t = self.types[source].tensor_type
        dims = list(self._shape(source))
        dims[0] *= self.ranks if kind == "ALL_GATHER" else 1
        op = "SUM" if kind == "ALL_REDUCE" else "NONE"
        stated: dict[str, Any] = {"collective_operation": kind, "reduce_op": op, "nb_rank": self.ranks, "root": -1}
        self.nodes.append(helper.make_node("DistCollective", [source], [target], name=target, **stated))
        self.types[target] = helper.make_tensor_type_proto(t.elem_type, dims)

    def _computed(self, kind: str, ins: Sequence[str], out: str, **attributes: Any) -> None:
        """A node of the rank's own."""
        self._add(helper.make_node(kind, ins, [out], **attributes))

    def _add(self, node: NodeProto) -> None:
        self._infer(node)
        self.nodes.append(node)

    def _infer(self, node: NodeProto) -> None:
        """Types of a node's results; an error where it cannot run on what the rank has."""
        version = next(o.version for o in self.model.opset_import if o.domain in (node.domain, node.domain or "ai.onnx"))
        held = {i: self.types[i] for i in node.input if i in self.types}
        data = {t.name: t for t in self.more if t.name in node.input}
        data |= {i: numpy_helper.from_array(a) for i in node.input if i not in data and (a := self.value(i)) is not None}
        try:
            schema = onnx.defs.get_schema(node.op_type, version, node.domain)
            found = onnx.shape_inference.infer_node_outputs(
                schema, node, held, data, opset_imports=list(self.model.opset_import), ir_version=self.model.ir_version
            )
        except (onnx.shape_inference.InferenceError, onnx.defs.SchemaError) as e:
            shapes = ", ".join(str(list(self._shape(i))) for i in held)
            where = f"node '{node_name(node)}' ({node.op_type})"
            raise PlanError("a rank cannot run it on its parts", where=where, why=f"{shapes}: {str(e)[:200]}") from None
        cut = any(self._shape(i) != self.whole.get(i) for i in held)
        for name in node.output:
            if name:
                self.types[name] = self._checked(name, found.get(name), cut)

    def _checked(self, name: str, found: Any, cut: bool) -> Any:
        """A type with sizes, which must be known: those of the whole model, where a node reads nothing that is cut."""
        if static_shape(found) is not None:
            return found
        if name not in self.whole or cut or found is None:
            raise TapestryError("the size of a value is not known", where=f"'{name}'", hint="give --shape")
        return helper.make_tensor_type_proto(found.tensor_type.elem_type, list(self.whole[name]))


def _reshaped(mine: Shape, all_of: Shape, out: Shape) -> list[int]:
    """The sizes that a Reshape gives of a part of its input, by the groups of axes that it turns into each other.

    >>> _reshaped((1, 6, 16), (1, 6, 32), (1, 6, 4, 8))
    [1, 6, 2, 8]
    """
    found = list(out)
    for ins, outs in _groups(all_of, out):
        ratio = prod(all_of[k] for k in ins) // max(prod(mine[k] for k in ins), 1)
        at = next((a for a in outs if out[a] % ratio == 0 and out[a] > 1), None)
        if ratio > 1 and at is None:
            why = f"{list(all_of)} to {list(out)}, on a rank {list(mine)}"
            raise ModelError("a Reshape does not divide among the ranks", why=why)
        if ratio > 1 and at is not None:
            found[at] //= ratio
    return found


def _groups(a: Shape, b: Shape) -> Iterator[tuple[range, range]]:
    """Runs of axes of two shapes that hold as many cells each, as short as they can be."""
    i = j = 0
    while i < len(a) or j < len(b):
        m, n = min(i + 1, len(a)), min(j + 1, len(b))
        x, y = prod(a[i:m]), prod(b[j:n])
        while x != y:
            if (x < y and m < len(a)) or n >= len(b):
                x, m = x * a[m], m + 1
            else:
                y, n = y * b[n], n + 1
        yield range(i, m), range(j, n)
        i, j = m, n
