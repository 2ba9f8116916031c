"""The model file run by a reference, its intermediate values kept: onnxruntime without optimisations, else node by node.

Where a value of onnxruntime's is doubted, the nodes behind it are asked again of the ONNX reference evaluator.
"""
# pyright: basic

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from tapestry.errors import TapestryError
from tapestry.ir.graph import Opaque
from tapestry.ir.types import HOST, Array
from tapestry.onnx_eval import opaque_node
from tapestry.onnx_eval.opaque_node import RANDOM, Asked
from tapestry.onnx_eval.ort_session import OrtError, apart, inlined

# onnx and onnxruntime come without complete types


TYPED = frozenset({"to", "dtype", "output_dtype", "softmax_precision", "stash_type", "output_datatype"})  # attributes
SHORT = frozenset({"f16", "bf16"})
SIZES = frozenset({"Shape", "Size"})  # their results are of no value's cells
BY_VALUES = frozenset({"NonZero", "Compress", "Unique", "NonMaxSuppression", "Range", "ConstantOfShape"})  # have sizes of these
PLAIN = frozenset({  # where inputs beside the first are no sizes and no places
    "Add", "Sub", "Mul", "Div", "Pow", "Mod", "And", "Or", "Xor", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual",
    "Min", "Max", "Sum", "Mean", "Where", "MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "Concat", "PRelu", "Attention",
    "LayerNormalization", "RMSNormalization", "BatchNormalization", "InstanceNormalization", "GroupNormalization",
})  # fmt: skip
FLOAT_NAMES: dict[int, str] = {
    TensorProto.DOUBLE: "f64",
    TensorProto.FLOAT: "f32",
    TensorProto.FLOAT16: "f16",
    TensorProto.BFLOAT16: "bf16",
}


@dataclass(slots=True, eq=False)
class ModelFile:
    """A model as its file says it, functions written out; external data is read when it is needed.

    Attributes:
        folder: of the file, for external data.
        given: arrays that stand for initializers without data.
    """

    proto: ModelProto
    folder: Path
    given: Mapping[str, Array] = field(default_factory=dict)
    nodes: list[NodeProto] = field(init=False)
    makers: dict[str, NodeProto] = field(init=False)
    places: dict[str, int] = field(init=False)
    initializers: dict[str, TensorProto] = field(init=False)

    def __post_init__(self) -> None:
        self.proto = inlined(self.proto)
        self.initializers = {t.name: t for t in self.proto.graph.initializer}
        self.nodes = list(self.proto.graph.node)
        self.places = {o: k for k, n in enumerate(self.nodes) for o in n.output if o}
        self.makers = {o: self.nodes[k] for o, k in self.places.items()}

    @property
    def inputs(self) -> list[Any]:
        """Declared inputs that are no initializers."""
        return [i for i in self.proto.graph.input if i.name not in self.initializers]

    @property
    def opsets(self) -> tuple[tuple[str, int], ...]:
        """The version of each operator domain."""
        return tuple(sorted(("" if o.domain == "ai.onnx" else o.domain, o.version) for o in self.proto.opset_import))

    def declared(self, name: str) -> tuple[int, ...] | None:
        """The sizes that the file states of a value, where it states them all."""
        dims = next((t.shape.dim for t in self._declared(name) if t.HasField("shape")), None)
        return tuple(d.dim_value for d in dims) if dims is not None and all(d.HasField("dim_value") for d in dims) else None

    def declared_type(self, name: str) -> np.dtype[Any] | None:
        """The element type that the file states of a value, where it states one."""
        return next((helper.tensor_dtype_to_np_dtype(t.elem_type) for t in self._declared(name) if t.elem_type), None)

    def _declared(self, name: str) -> list[Any]:
        graph = self.proto.graph
        return [v.type.tensor_type for v in (*graph.value_info, *graph.output) if v.name == name]

    def states(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Values that begin a state of a Loop or a Scan, with the sizes that its body states of it, if it states all."""
        for node in self.nodes:
            skipped = {"Loop": 2, "Scan": 0}.get(node.op_type)
            for body in subgraphs(node) if skipped is not None else ():
                scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
                last = len(node.input) - scanned
                for name, inner in zip(node.input[skipped:last], body.input[skipped:], strict=False):
                    t = inner.type.tensor_type
                    if t.HasField("shape") and all(d.HasField("dim_value") for d in t.shape.dim):
                        yield name, tuple(d.dim_value for d in t.shape.dim)

    def fixed(self) -> set[str]:
        """Values that are the same whatever is given, for inputs of the same sizes."""
        found = set(self.initializers)
        for node in self.nodes:
            free = node.op_type in RANDOM or has_body(node)
            if node.op_type in SIZES or (not free and all(i in found for i in node.input if i)):
                found.update(o for o in node.output if o)
        return found

    def of_sizes(self, node: NodeProto) -> bool:
        """Whether what a node reads has sizes, and whole numbers beside its first input, that no given value decides."""
        fixed, stack, seen = self.fixed(), list(node.input[:1]), set[str]()
        deciding = node.input[node.op_type != "If" :]  # of an If its first one decides already what is run
        if any(i and i not in fixed for i in deciding) and node.op_type not in PLAIN:
            return False
        stack += [i for i in node.input[1:] if i]
        while stack:
            at = stack.pop()
            maker = self.makers.get(at)
            if maker is None or at in fixed or at in seen:
                continue
            seen.add(at)
            late = any(i and i not in fixed for i in maker.input[1:])
            if maker.op_type in BY_VALUES or has_body(maker) or (late and maker.op_type not in PLAIN):
                return False
            stack += [i for i in maker.input if i]
        return True

    def floats(self) -> set[str]:
        """The float types that the model names anywhere: of inputs, constants, and what nodes are told to compute in."""
        found = {t.data_type for t in self.initializers.values()} | {i.type.tensor_type.elem_type for i in self.inputs}
        for node in with_bodies(self.nodes):
            for a in node.attribute:
                found |= {a.t.data_type} if a.type == AttributeProto.TENSOR else {a.i} if a.name in TYPED else set()
        return {FLOAT_NAMES[t] for t in found if t in FLOAT_NAMES}

    def constant(self, name: str) -> Array | None:
        """The data of an initializer, or of a Constant node's tensor; None of any other value."""
        if name in self.given:
            return self.given[name]
        stored = self.initializers.get(name)
        if stored is None and name in self.makers and self.makers[name].op_type == "Constant":
            stored = next((a.t for a in self.makers[name].attribute if a.name == "value"), None)
        return None if stored is None else numpy_helper.to_array(stored, str(self.folder))


class WrongSizes(TapestryError):
    """onnxruntime refuses a node of a model, and no other evaluator runs it, whatever the values of the inputs are."""


class ReferenceValues:
    """Values of a model for one set of inputs.

    Attributes:
        by: the evaluator, or both where they were asked node by node, as reports name it.
        values: by the model's names.
        refused: what onnxruntime said of nodes that another evaluator runs.
    """

    def __init__(
        self,
        model: ModelFile,
        feeds: Mapping[str, Any],
        wanted: Collection[str],
        *,
        independent: bool = False,
        until: float | None = None,
    ) -> None:
        """Run the model, keeping what is ``wanted`` of its values; ``independent``: by the ONNX reference where it can.

        Args:
            until: float32 is computed in float64, which may take until then (`time.monotonic`).

        Raises:
            TapestryError: no evaluator runs it, or not in time.
            WrongSizes: it is of these sizes that onnxruntime does not.
        """
        self.model, self.feeds, self.until, asked = model, dict(feeds), until, Asked()
        names = [n for n in model.makers if n in wanted]
        apart = not model.floats().isdisjoint(SHORT)  # onnxruntime keeps float32 from node to node
        try:
            if apart or independent or any(n.op_type in opaque_node.ASKED_APART for n in with_bodies(model.nodes)):
                raise OrtError("to be run node by node")
            self.by, self.values = "onnxruntime", _onnxruntime(model, feeds, names)
        except Exception:  # what it cannot run, or what is too large for it, is run node by node
            self.values = self._nodes(names, {}, independent=independent, by=asked)
            self.by = " and ".join(sorted(set(asked.libraries)))
        self.refused = asked.refused
        self.values |= self.feeds
        self._again: dict[tuple[str, bool], Any] = {}

    def get(self, name: str) -> Any:
        """A value of the model's, an initializer among them; None where it has none of that name."""
        return self.values[name] if name in self.values else self.model.constant(name)

    def computed(self, name: str) -> Any:
        """A value that was not kept, from those that were."""
        return self._nodes([name], self.values, independent=False)[name]

    def again(self, name: str, *, double: bool = False) -> Any:
        """A value once more, by the ONNX reference evaluator, from the nearest values that are kept; None if it cannot.

        ``double``: each node in float64, and rounded once: the definition, where two evaluators differ in their roundings.
        """
        if (name, double) not in self._again:
            others = {n: v for n, v in self.values.items() if n != name}
            try:
                found = self._nodes([name], others, independent=True, double=double)[name]
            except Exception:  # no other opinion
                found = None
            self._again[name, double] = found
        return self._again[name, double]

    def _nodes(
        self,
        names: Collection[str],
        known: Mapping[str, Any],
        *,
        independent: bool,
        by: Asked | None = None,
        double: bool = False,
    ) -> dict[str, Any]:
        """Values computed node by node from others; ``by`` notes the library of each."""
        values = {**self.feeds, **known}
        for node in _behind(self.model, names, values):
            ins = [*node.input, *outer_names(node)]
            arrays = [None if not i else values[i] if i in values else self.model.constant(i) for i in ins]
            if self.until is not None:
                if time.monotonic() > self.until:
                    raise TapestryError("it takes too long", where=str(self.model.folder))
                arrays = [a.astype(np.float64) if isinstance(a, np.ndarray) and a.dtype == np.float32 else a for a in arrays]
            try:
                outs = run_node(node, self.model.opsets, arrays, independent, by, double=double)
            except opaque_node.Refused as e:
                if not self.model.of_sizes(node):
                    raise
                raise WrongSizes(e.what, where=e.where, why=e.why) from None
            values |= by_name(node, outs)
        return {n: values[n] for n in names}


def run_node(
    node: NodeProto,
    opsets: tuple[tuple[str, int], ...],
    arrays: list[Any],
    independent: bool,
    by: Asked | None = None,
    *,
    double: bool = False,
) -> list[Any]:
    """The outputs that a node has for arrays, one for each of its inputs and of the outer names that its bodies read.

    ``by`` notes the library; ``double``: in float64, and rounded once.

    Raises:
        TapestryError: no evaluator runs it.
    """
    names = (*node.input, *outer_names(node))
    arrays = [np.asarray(a) if isinstance(a, np.generic) else a for a in arrays]
    given = [a if a is None or (isinstance(a, np.ndarray) and a.dtype != object) else opaque_node.HostValue(a) for a in arrays]
    outs, source, bodies = tuple(o for o in node.output if o), (node.name or node.op_type,), has_body(node)
    if not bodies:  # evaluators are made once for all that are alike
        node = nameless(node)
        names = tuple(node.input)
    op = Opaque(outs=outs, ins=names, kind=node.op_type, node=node.SerializeToString(), opsets=opsets, source=source)
    return opaque_node.run(op, given, [(HOST, ())] * len(outs), independent=independent, names=names, by=by, double=double)


def nameless(node: NodeProto) -> NodeProto:
    """A node by places; inputs of one name stay so."""
    out, places = NodeProto(), {n: f"i{k}" for k, n in enumerate(node.input)}
    out.CopyFrom(node)
    for said in ("name", "doc_string", "metadata_props"):
        out.ClearField(said)
    out.input[:] = [places[n] if n else "" for n in node.input]
    out.output[:] = [f"o{k}" if n else "" for k, n in enumerate(node.output)]
    return out


def _behind(model: ModelFile, names: Collection[str], known: Mapping[str, Any]) -> list[NodeProto]:
    """The nodes that some values are made of, from others that are known, in the model's order."""
    found, stack = set[int](), list(names)
    while stack:
        at = model.places.get(stack.pop())
        if at is None or at in found:
            continue
        found.add(at)
        node = model.nodes[at]
        stack += [i for i in (*node.input, *outer_names(node)) if i and i not in known]
    return [model.nodes[k] for k in sorted(found)]


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The bodies of a node."""
    for a in node.attribute:
        if a.type == AttributeProto.GRAPH:
            yield a.g
        yield from a.graphs


def outer_names(node: NodeProto) -> list[str]:
    """Names that the bodies of a node read of the graph around it, each once."""
    out: dict[str, None] = {}
    for g in subgraphs(node):
        inside = {i.name for i in g.input} | {t.name for t in g.initializer} | {o for n in g.node for o in n.output}
        used = [i for n in g.node for i in (*n.input, *outer_names(n))] + [o.name for o in g.output]
        out.update(dict.fromkeys(i for i in used if i and i not in inside))
    return list(out)


def has_body(node: NodeProto) -> bool:
    """Whether it has a graph in an attribute."""
    return next(subgraphs(node), None) is not None


def at_cells(array: Array, points: Array) -> Array:
    """The numbers of an array at some cells."""
    return array[tuple(points.T)].reshape(len(points))


def by_name(node: NodeProto, outs: Sequence[Any]) -> dict[str, Any]:
    """What a node gives, by the names of its outputs."""
    return dict(zip([o for o in node.output if o], outs, strict=True))


def with_bodies(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Nodes, and those of their bodies."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        stack += [n for g in subgraphs(node) for n in g.node]


def _onnxruntime(model: ModelFile, feeds: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Values by onnxruntime, no node fused or moved; a model whose outputs it is not to keep is left as it was."""
    entries = {
        "session.disable_quant_qdq": "1", "session.disable_prepacking": "1",
        "session.model_external_initializers_file_folder_path": str(model.folder),
    }  # fmt: skip
    graph, before = model.proto.graph, list(model.proto.graph.output)
    del graph.output[:]
    graph.output.extend(helper.make_value_info(n, TypeProto()) for n in names)
    try:
        data = (_without_data(model) if model.given else model.proto).SerializeToString()
    finally:
        del graph.output[:]
        graph.output.extend(before)
    return dict(zip(names, apart(data, {**model.given, **feeds}, names, optimized=False, entries=entries), strict=True))


def _without_data(model: ModelFile) -> ModelProto:
    """The model with inputs in the place of the initializers that arrays stand for."""
    copy = ModelProto()
    copy.CopyFrom(model.proto)
    inputs = {i.name for i in copy.graph.input}
    kept = [t for t in copy.graph.initializer if t.name not in model.given]
    taken = [t for t in copy.graph.initializer if t.name in model.given and t.name not in inputs]
    new = [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in taken]
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(kept)
    copy.graph.input.extend(new)
    return copy
