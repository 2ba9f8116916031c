"""From a checked ONNX model with sizes bound to a small, static one: inference, expansion, and onnx_ir's passes.

Weights are taken out first and stand as inputs (types without data), so that no pass can touch or load them; and the
size of every folded value is bounded before it is computed, since a 121-byte model can ask for 10^12 elements.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, cast

import numpy as np
import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto

from tapestry.errors import ModelError
from tapestry.lift.builder import about
from tapestry.lift.file.diagnosis import Contradiction, contradiction
from tapestry.lift.file.external_data import dtype_name, tensor_bytes
from tapestry.lift.file.protos import (
    SOURCE,
    STANDARD,
    attributes,
    captured,
    is_standard,
    nested,
    node_name,
    replace_nodes,
    source_of,
    standard_opset,
    static_shape,
    subgraphs,
)
from tapestry.lift.file.weight_data import stored_tensors
from tapestry.lift.nodes import Prepared
from tapestry.lift.normalize.inference import InferenceError, infer_shapes
from tapestry.lift.normalize.inference_fixes import (
    MISINFERRED,
    RESIZES,
    forget_sizes,
    name_cache,
    pad_loops,
    plain_casts,
    rewrite_misinferred,
    rewrite_scales,
    slice_sizes,
)
from tapestry.lift.normalize.libraries import ir, optimizer, passes
from tapestry.lift.normalize.ml_shapes import foreign_types, ml_types
from tapestry.lift.normalize.split_sequences import split_sequences
from tapestry.lift.normalize.unroll import LEVELS, STEPS, StepTypes, unroll
from tapestry.lift.own_operators import own_types
from tapestry.lift.registry import find
from tapestry.onnx_eval.opaque_node import RANDOM
from tapestry.onnx_eval.ort_session import inlined
from tapestry.onnx_eval.reference_evaluator import HALVES, SUMMING

FOLD_BYTES = 1 << 20  # no folded value is larger
FOLD_TOTAL = 1 << 28  # nor are all of them together
SMALL_FLOATS, SMALL_INTS = 1 << 8, 1 << 16  # bytes of an initializer that still takes part in folding
IOTA = 8  # a longer Range stays an operation: as an index expression it is worth more than as a table
KEPT = "tapestry.kept"
MISTREATED = frozenset({"SplitToSequence", "ConcatFromSequence", "SequenceAt"})
# the reference evaluator, which folds, takes no absolute values (p = 1), is wrong where a linear Resize shrinks, rounds sizes
# of pools in its own way, normalises as many channels as there are batches (LRN), and compares fractions with places (OneHot);
# what has windows or places between points is left to us; before opset 13 it takes one axis of a softmax for all from it on
MISJUDGED = frozenset(
    {
        "LpNormalization",
        "LRN",
        "OneHot",
        "Resize",
        "Upsample",
        "MaxPool",
        "AveragePool",
        "LpPool",
        "MaxUnpool",
        "MaxRoiPool",
        "RoiAlign",
        "GridSample",
        "AffineGrid",
        "Conv",
        "ConvTranspose",
        "DeformConv",
        "Col2Im",
    }
)
# of the first input: onnx has no inference for these, or a faulty one
ROWS_BEFORE = frozenset({"Softmax", "LogSoftmax", "Hardmax"})
SAME_SHAPE = frozenset({"GroupNormalization", "MeanVarianceNormalization"})
ROUNDS = 8  # of expansion of function bodies inside function bodies

log = logging.getLogger(__name__)
Types = dict[str, TypeProto]


def take_out_weights(model: ModelProto) -> dict[str, TensorProto]:
    """Replace every initializer that is not small by an input of its type; returns all initializers by name."""
    stored = stored_tensors(model)
    weights = {n: t for n, t in stored.items() if not _foldable(t)}
    graph = model.graph
    small = [t for t in graph.initializer if t.name not in weights]
    inputs = [i for i in graph.input if i.name not in stored]
    nodes = [n for n in graph.node if not (n.op_type == "Constant" and n.output and n.output[0] in weights)]
    graph.ClearField("initializer")
    graph.initializer.extend(small)
    graph.ClearField("input")
    graph.input.extend(inputs)
    graph.input.extend(onnx.helper.make_tensor_value_info(n, t.data_type, list(t.dims)) for n, t in weights.items())
    if len(nodes) < len(graph.node):
        replace_nodes(graph, nodes)
    model.ir_version = max(model.ir_version, 10)
    return stored


def _foldable(t: TensorProto) -> bool:
    if t.data_location == TensorProto.EXTERNAL:
        return False
    floating = t.data_type in (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    return t.data_type == TensorProto.STRING or tensor_bytes(t) <= (SMALL_FLOATS if floating else SMALL_INTS)


def infer(model: ModelProto, hints: Mapping[str, TypeProto] | None = None) -> Types:
    """Types of all values by onnx's shape inference, from the inputs' types alone (what the file declares is set aside, and
    what bodies declare where it contradicts them: it is dropped from the model).

    Args:
        hints: declared types of values whose shape inference cannot tell.

    Raises:
        ModelError: an operator's inputs contradict each other in dtype or shape.
    """
    hints = dict(hints or {})
    while True:
        try:
            types = _infer_once(model, hints)
        except Contradiction:
            stale = _forget_bodies(model)
            types = _infer_once(model, hints, branches=True)
            if stale:
                log.warning("sizes that the bodies of nodes declare are wrong, or of branches never taken, and not used")
        found = ml_types(model, types) | own_types(model, types) | foreign_types(model, types)
        more = {n: t for n, t in found.items() if n not in hints}
        if not more:
            return types
        hints |= more


def _infer_once(model: ModelProto, hints: Mapping[str, TypeProto], *, branches: bool = False) -> Types:
    bare = deepcopy(model)
    del bare.graph.value_info[:]
    bare.graph.value_info.extend(onnx.helper.make_value_info(n, t) for n, t in hints.items())
    for node in bare.graph.node:
        name_cache(node)
        if is_standard(node, *SAME_SHAPE):
            node.CopyFrom(onnx.helper.make_node("Identity", node.input[:1], node.output, name=node.name))
    folded = {t.name: onnx.helper.make_tensor_type_proto(t.data_type, list(t.dims)) for t in bare.graph.initializer}
    given = {i.name: i.type for i in bare.graph.input} | folded
    for o in bare.graph.output:
        o.type.Clear()
        if o.name in given:
            o.type.CopyFrom(given[o.name])  # an output without a type would hide the input's or constant's from its readers
        elif o.name in hints:
            o.type.CopyFrom(hints[o.name])
    try:
        done = infer_shapes(bare, check_type=True, strict_mode=True, data_prop=False)
    except InferenceError as e:
        untouched = deepcopy(bare)
        settled = _with_branches_that_fit(bare, str(e)) if branches else None
        if settled is None:
            raise contradiction(str(e), untouched, _as_far_as_it_goes(untouched) | folded) from None
        done = settled
    return _types(done.graph) | folded


def _forget_bodies(model: ModelProto) -> bool:
    """Drop the sizes that bodies declare of their values; whether there were any."""
    stack, found = [g for n in model.graph.node for g in subgraphs(n)], False
    while stack:
        g = stack.pop()
        stack += [inner for n in g.node for inner in subgraphs(n)]
        for v in (*g.value_info, *g.output):
            found |= v.type.tensor_type.HasField("shape")
            if v.type.HasField("tensor_type"):
                v.type.tensor_type.ClearField("shape")
    return found


def _with_branches_that_fit(model: ModelProto, said: str) -> ModelProto | None:
    """The model and its types where branches that these sizes contradict are not counted; they can never be taken.

    Those that are taken all the same at a run, fail there. A branch that contradicts is exchanged for the other one, in the
    model itself, from the inside to the outside.
    """
    for node in [n for n in nested(model.graph.node) if n.op_type == "If" and n.name][::-1]:
        branches = list(subgraphs(node))
        for kept, other in (branches, branches[::-1]) if f"node name: {node.name})" in said else ():
            before = deepcopy(other)
            other.CopyFrom(kept)
            try:
                return infer_shapes(model, check_type=True, strict_mode=True, data_prop=False)
            except InferenceError as e:
                if f"node name: {node.name})" not in str(e):
                    said = str(e)
                    break
                other.CopyFrom(before)
    return None


def _as_far_as_it_goes(model: ModelProto) -> Types:
    try:
        return _types(infer_shapes(model, check_type=False, strict_mode=False, data_prop=False).graph)
    except (InferenceError, ModelError):
        return {}


def _types(graph: GraphProto) -> Types:
    return {v.name: v.type for group in (graph.input, graph.output, graph.value_info) for v in group}


def settle_declared(model: ModelProto, types: Mapping[str, TypeProto]) -> None:
    """Hold what the file declares of its values to what inference says. Sizes that differ are dropped, with a warning, as
    onnxruntime does: exporters leave those of the example that they traced.

    Raises:
        ModelError: a value is of another element type; it names the value, its producer, and both types.
    """
    makers, stale = {o: n for n in model.graph.node for o in n.output}, dict[str, str]()
    for value in (*model.graph.value_info, *model.graph.output):
        inferred = types.get(value.name)
        if inferred is None or not (inferred.HasField("tensor_type") and value.type.HasField("tensor_type")):
            continue
        a, b = value.type.tensor_type, inferred.tensor_type
        if a.elem_type and b.elem_type and a.elem_type != b.elem_type:
            names = [dtype_name(t.elem_type) for t in (a, b)]
            where = f"node '{node_name(makers[value.name])}'" if value.name in makers else f"value '{value.name}'"
            why = f"'{value.name}' is declared {names[0]}, computed {names[1]}"
            hint = "export the model again; onnxruntime refuses it too"
            raise ModelError("dtypes contradict each other", where=where, why=why, hint=hint)
        if _contradicts(value.type, inferred):
            declared, computed = ([d.dim_value if d.HasField("dim_value") else None for d in t.shape.dim] for t in (a, b))
            stale[value.name] = f"'{value.name}' is declared {declared}, computed {computed}"
            a.ClearField("shape")
    if stale:
        said = "; ".join([*stale.values()][:3]) + ("; …" if len(stale) > 3 else "")
        log.warning("sizes that the file declares are wrong, and not used: %s", said)


def _contradicts(declared: TypeProto, inferred: TypeProto | None) -> bool:
    """Whether two types of a tensor have different ranks, or different sizes."""
    if inferred is None or not (declared.tensor_type.HasField("shape") and inferred.tensor_type.HasField("shape")):
        return False
    a, b = (t.tensor_type.shape.dim for t in (declared, inferred))
    stated = ((x, y) for x, y in zip(a, b, strict=False) if x.HasField("dim_value") and y.HasField("dim_value"))
    return len(a) != len(b) or any(x.dim_value != y.dim_value for x, y in stated)


def tag_sources(model: ModelProto) -> None:
    """Name unnamed nodes after their first output, and note each name where passes do not change it."""
    del model.configuration[:]
    for node in (*model.graph.node, *(n for f in model.functions for n in f.node)):
        node.name = node_name(node)
        del node.device_configurations[:]  # of no concern to what the node computes
        del node.metadata_props[:]
        node.metadata_props.add(key=SOURCE, value=node.name)


def add_defaults(model: ModelProto, version: int) -> None:
    """Write out the default attributes of operators that have no lifter: their function bodies refer to them."""
    for node in model.graph.node:
        if is_standard(node) and find(node, version) is None and not list(subgraphs(node)):
            defaults = onnx.defs.get_schema(node.op_type, version, "").attributes
            given = attributes(node)
            node.attribute.extend(d.default_value for a, d in defaults.items() if a not in given and d.default_value.type)


def expand_functions(model: ModelProto, types: Types, version: int, *, steps: bool = True) -> bool:
    """Replace operators that have no lifter by calls of their schema's function body; whether any was.

    Args:
        steps: whether bodies that are loops of few steps are taken as well.
    """
    taken = len(model.functions)
    for node in model.graph.node:
        loop = steps and _few_steps(node, types)
        if not is_standard(node) or (find(node, version) is not None and not loop):
            continue
        body = _function_body(node, types, version, loop=loop)
        if body is None:
            continue
        name = f"{node.op_type}_{len(model.functions)}"
        source = source_of(node)
        body.domain, body.name = "tapestry.expanded", name
        del body.output[len(node.output) :]
        body.ClearField("opset_import")
        body.opset_import.extend(onnx.helper.make_opsetid(o.domain, o.version) for o in model.opset_import)
        for k, inner in enumerate(body.node):
            inner.name = f"{source}/{inner.op_type}_{k}"
            inner.metadata_props.add(key=SOURCE, value=source)
        model.functions.append(body)
        node.domain, node.op_type = "tapestry.expanded", name
    if len(model.functions) == taken:
        return False
    model.opset_import.append(onnx.helper.make_opsetid("tapestry.expanded", 1))
    return True


def _few_steps(node: NodeProto, types: Types) -> bool:
    """Whether an operator is a loop over its second axis, of few enough steps to be written out."""
    shape = static_shape(types.get(node.input[0])) if node.op_type == "LinearAttention" else None
    return shape is not None and shape[1] <= STEPS


def _function_body(node: NodeProto, types: Types, version: int, *, loop: bool) -> FunctionProto | None:
    """The body of an operator's function at an opset, if it means the same there and has no sequences; loops if asked for."""
    schema: Any = onnx.defs.get_schema(node.op_type, version, "")  # (the stubs lack its function methods)
    body = FunctionProto()
    given = [types.get(i, TypeProto()) for i in node.input]
    if schema.has_function:
        usable = [v for v in schema.function_opset_versions if v <= version]
        if not usable:
            return None
        body.ParseFromString(schema.get_function_with_opset_version(max(usable)))
    elif schema.has_context_dependent_function and all(t.WhichOneof("value") for t, i in zip(given, node.input) if i):
        usable = [v for v in schema.context_dependent_function_opset_versions if v <= version]
        if not usable:
            return None
        text = schema.get_context_dependent_function_with_opset_version(
            max(usable), node.SerializeToString(), [t.SerializeToString() for t in given]
        )
        body.ParseFromString(text)
    else:
        return None
    return body if _means_the_same(body.node, max(usable), version, loop=loop) else None


def _means_the_same(nodes: Iterable[NodeProto], written: int, version: int, *, loop: bool) -> bool:
    for inner in nodes:
        if not is_standard(inner) or "Sequence" in inner.op_type:
            return False
        if not all(loop and _means_the_same(g.node, written, version, loop=loop) for g in subgraphs(inner)):
            return False
        if not onnx.defs.has(inner.op_type, version, ""):
            return False
        old = onnx.defs.get_schema(inner.op_type, max(written, 1), "").since_version
        new = onnx.defs.get_schema(inner.op_type, version, "").since_version
        if old != new and _changed(inner.op_type, old, version):
            return False
    return True


def _changed(op: str, since: int, version: int) -> bool:
    """Whether an operator's inputs or attributes changed between two versions (a wider list of types does not matter)."""

    def face(v: int) -> tuple[list[str], list[str]]:
        s = onnx.defs.get_schema(op, v, "")
        return [i.name for i in s.inputs], sorted(s.attributes)

    return face(since) != face(version)


class _Budget:
    """Decides, before a value is computed, whether it is small enough to fold, and none that is to be kept."""

    def __init__(self, kept: frozenset[str], version: int) -> None:
        self.left, self.kept = FOLD_TOTAL, kept
        self.left_to_us: frozenset[str] = RANDOM | MISJUDGED | (ROWS_BEFORE if version < 13 else frozenset[str]())

    def __call__(self, node: ir.Node) -> bool | None:
        if node.op_type in self.left_to_us or node.domain not in STANDARD or any(o.name in self.kept for o in node.outputs):
            return False
        total = 0
        for out in node.outputs:
            if out.shape is None or not all(isinstance(d, int) for d in out.shape) or out.dtype is None:
                return False
            count = math.prod(int(d) for d in out.shape)  # type: ignore[arg-type]
            total += count * max(1, int(out.dtype.itemsize))
            summed = out.dtype.name in HALVES and any(part in node.op_type for part in SUMMING)
            if summed or count > {"Range": IOTA, "ConstantOfShape": IOTA * IOTA}.get(node.op_type, count):
                return False
        if total > FOLD_BYTES or total > self.left:
            return False
        self.left -= total
        return True if node.op_type == "ConstantOfShape" else None


def _tell_random_apart(graph: ir.Graph) -> None:
    """Give every random node an attribute of its own: nodes that differ are not a common subexpression.

    onnx_ir's pass would merge two Bernoulli nodes otherwise. The attribute is also what the node's key is made from, so
    that a function called twice does not draw the same numbers twice.
    """
    seen: dict[str, int] = {}
    for node in graph:
        if node.op_type in RANDOM and node.domain in STANDARD and SOURCE not in node.attributes:
            name = node.name or str(node.outputs[0].name)
            seen[name] = seen.get(name, 0) + 1
            tag = name if seen[name] == 1 else f"{name}#{seen[name]}"
            node.attributes.add(ir.AttrString(SOURCE, tag))


def _keep(graph: ir.Graph) -> None:
    """Hide nodes from onnxscript's folding where its own rewrites fail or write another opset's nodes."""
    for node in graph:
        if node.op_type in MISTREATED and node.domain in STANDARD:
            node.domain = KEPT


def _release(graph: ir.Graph) -> None:
    for node in graph:
        if node.domain == KEPT:
            node.domain = ""


def run_passes(model: ModelProto, kept: frozenset[str] = frozenset()) -> ModelProto:
    """Inline functions, fold constants, merge common subexpressions, drop dead nodes, sort: onnx_ir's and onnxscript's own."""
    maps = {o.name: o.type for o in model.graph.output if "map(" in about(o.type)}
    try:
        graph = ir.serde.deserialize_model(_without_types(model, maps))
        if graph.functions:
            passes.InlinePass()(graph)
        _tell_random_apart(graph.graph)
        _keep(graph.graph)
        limits: dict[str, Any] = {"input_size_limit": FOLD_BYTES, "output_size_limit": FOLD_BYTES}
        with warnings.catch_warnings(), np.errstate(all="ignore"):  # what a model computes with its constants is its own affair
            warnings.simplefilter("ignore")
            cast(Any, optimizer).fold_constants(
                graph, onnx_shape_inference=True, should_fold=_Budget(kept, standard_opset(model)), **limits
            )
        passes.CommonSubexpressionEliminationPass()(graph)
        passes.RemoveUnusedNodesPass()(graph)
        passes.TopologicalSortPass()(graph)
        _release(graph.graph)
        done = ir.serde.serialize_model(graph)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as e:
        cause = e.__cause__ or e
        raise ModelError("the graph cannot be simplified", where="constant folding", why=f"{e}: {cause}"[:300]) from None
    for o in done.graph.output:
        o.type.CopyFrom(maps.get(o.name, o.type))
    _store_sizes(done)
    pad_loops(done.graph)
    return done


def _store_sizes(model: ModelProto) -> None:
    """Make initializers of the Constants of integers that folding writes for shapes: opset 12 has them, not every opset."""
    others: list[NodeProto] = []
    for node in model.graph.node:
        given = attributes(node) if node.op_type == "Constant" else {}
        values = given.get("value_ints", given.get("value_int"))
        if values is None:
            others.append(node)
        else:
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values, np.int64), node.output[0]))
    replace_nodes(model.graph, others)


def _without_types(model: ModelProto, names: Mapping[str, TypeProto]) -> ModelProto:
    """The model with some outputs untyped: onnx_ir has no maps."""
    if not names:
        return model
    bare = deepcopy(model)
    for o in bare.graph.output:
        if o.name in names:
            o.ClearField("type")
    return bare


def prepare(model: ModelProto, step_types: StepTypes, *, steps: bool = True, kept: frozenset[str] = frozenset()) -> Prepared:
    """The static model to lift; ``model`` has its sizes bound and its weights taken out.

    Args:
        step_types: tells which loops are linear recurrences (see `unroll`).
        steps: whether loops of few steps are written out.
        kept: values that are not folded.
    """
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    version = standard_opset(model)
    tag_sources(model)
    if any(n.op_type in MISINFERRED for f in model.functions for n in f.node):  # inference is wrong inside of functions too
        model = inlined(model)
    declared = deepcopy(model)
    scaled = any(n.op_type in RESIZES for n in model.graph.node) and _infer(model, version)[1]
    if rewrite_misinferred(model) or scaled:
        forget_sizes(declared)
    add_defaults(model, version)
    del model.graph.value_info[:]
    types = infer(model)
    settle_declared(declared, types)
    for o in model.graph.output:
        o.type.CopyFrom(types.get(o.name, o.type))
    for level in range(ROUNDS):
        plain_casts(model, types)
        model.graph.value_info.extend(onnx.helper.make_value_info(n, t) for n, t in types.items() if _static(t))
        model = run_passes(model, kept)
        del model.graph.value_info[:]
        if rewrite_misinferred(model):  # what a branch that is gone now hid
            forget_sizes(declared)
        add_defaults(model, version)
        types, _ = _infer(model, version)
        written = unroll(model, types, step_types, loops=steps and level < LEVELS)
        written = plain_casts(model, types) or written or slice_sizes(model, types, version) or split_sequences(model, types)
        sized = [n.input[0] for n in model.graph.node if n.op_type in ("Shape", "Size")]
        open_shapes = any(_static(types.get(name, TypeProto())) for name in sized)
        if not expand_functions(model, types, version, steps=steps) and not written and not open_shapes:
            break
    settle_declared(declared, types)
    hints = {v.name: v.type for v in (*declared.graph.value_info, *declared.graph.output) if _static(v.type)}
    return _with_hints(model, types, hints)


def _infer(model: ModelProto, version: int) -> tuple[Types, bool]:
    """`infer`, after every Resize by scales that it would get wrong is written anew, one after another; whether any was."""
    types, changed = infer(model), False
    while rewrite_scales(model, types, version):
        types, changed = infer(model), True
    return types, changed


def _with_hints(model: ModelProto, types: Types, hints: Types) -> Prepared:
    """Types where the file's declarations fill what inference leaves open; only where it cannot go on without them."""
    used: Types = {}
    while True:
        pending, needed = set[str](), dict[str, TypeProto]()
        for node in model.graph.node:
            behind = pending.intersection((*node.input, *captured(node)))
            for o in node.output:
                if o not in types or not _static(types[o]):
                    if o in hints and o not in used and not behind:
                        needed[o] = hints[o]
                    if behind or (o in hints and o not in used):
                        pending.add(o)
        if not needed:
            return Prepared(model, types, frozenset(used))
        used |= needed
        types = infer(model, used)


def _static(type_: TypeProto) -> bool:
    """Whether a tensor type has a dtype and a size for every axis."""
    return bool(type_.tensor_type.elem_type) and static_shape(type_) is not None
