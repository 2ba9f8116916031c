"""Operators that onnxruntime's optimiser and quantiser write (com.microsoft, layer norms below opset 17), as functions.

A model saved by onnxruntime is full of them. Each node gets a model-local function of standard operators, for its own
attributes and inputs, before anything else looks at the model; so they are expanded, split, fused and checked like any
function. Definitions: onnxruntime's docs/ContribOperators.md. What a node needs and no definition here gives (ranks that the
file does not say, packed inputs) leaves it as it is: an unknown operator, refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tapestry.lift.file.protos import MICROSOFT, STANDARD, attributes, node_name, standard_opset, subgraphs
from tapestry.onnx_eval.reference_fixes import EVALUATORS
from tapestry.plugins import entry_points as plugins

DOMAIN = "tapestry.vendor"
KIND = "operators"  # of plug-ins
CASTS = 15  # the first opset that has CastLike


class Undefined(Exception):
    """There is no definition for this node."""


class Body:
    """A function body under construction for one node: every call adds a node and gives the name of its (first) output."""

    def __init__(self, node: NodeProto, version: int, ranks: dict[str, int], codes: dict[str, int]) -> None:
        self.nodes: list[NodeProto] = []
        self.version, self.name, self.node_kind = version, node_name(node), node.op_type
        self.attributes = attributes(node)
        self.ins = [f"i{k}" if name else "" for k, name in enumerate(node.input)]
        self.wanted = [bool(o) for o in node.output]
        self.ranks = {f"i{k}": ranks[i] for k, i in enumerate(node.input) if i in ranks}
        self.codes = {f"i{k}": codes[i] for k, i in enumerate(node.input) if i in codes}

    def __call__(self, op: str, *ins: str, outs: int = 1, **attributes: Any) -> str:
        """The name of the first output; the others are that name with ``.1``, ``.2`` behind it."""
        name = f"t{len(self.nodes)}"
        names = [name, *(f"{name}.{k}" for k in range(1, outs))]
        self.nodes.append(helper.make_node(op, list(ins), names, self.name, **attributes))
        return name

    def get(self, name: str, default: Any) -> Any:
        """An attribute of the type of its default."""
        value = self.attributes.get(name, default)
        value = value.decode() if isinstance(value, bytes) else value
        if not isinstance(value, type(default)):
            raise Undefined
        return value

    def has(self, k: int) -> bool:
        """Whether input k is given."""
        return k < len(self.ins) and bool(self.ins[k])

    def need(self, fact: bool) -> None:
        """Decline the node unless this holds."""
        if not fact:
            raise Undefined

    def add(self, x: str, k: int) -> str:
        """x plus input k, if there is one."""
        return self("Add", x, self.ins[k]) if self.has(k) else x

    def const(self, value: Any, dtype: Any = np.float32) -> str:
        """A constant."""
        return self("Constant", value=numpy_helper.from_array(np.asarray(value, dtype)))

    def real(self, x: str) -> str:
        """x in float32, in which onnxruntime computes what it fuses."""
        return self("Cast", x, to=TensorProto.FLOAT)

    def like(self, y: str, x: str) -> str:
        """y in the type of x (below opset 15 both are float32 in what onnxruntime writes)."""
        return self("CastLike", y, x) if self.version >= CASTS else y

    def scalar(self, value: float, x: str) -> str:
        """A number in the type of x."""
        return self.like(self.const(value), x)

    def mean(self, x: str, axis: int) -> str:
        """Along one axis, which is kept."""
        if self.version >= 18:
            return self("ReduceMean", x, self.const([axis], np.int64), keepdims=1)
        return self("ReduceMean", x, axes=[axis], keepdims=1)

    def unsqueeze(self, x: str, axis: int) -> str:
        """With a new axis of size 1."""
        return self("Unsqueeze", x, self.const([axis], np.int64)) if self.version >= 13 else self("Unsqueeze", x, axes=[axis])

    def shaped(self, x: str, *shape: int) -> str:
        """Reshaped: 0 keeps a size, -1 is what is left."""
        return self("Reshape", x, self.const(shape, np.int64))


Definition = Callable[[Body], list[str]]  # what it returns: a name per output, "" for those it does not define
DEFINITIONS: dict[tuple[str, str], Definition] = {}


def defines(*ops: str, domains: Iterable[str] = (MICROSOFT,)) -> Callable[[Definition], Definition]:
    """Register the definition of operators."""

    def add(f: Definition) -> Definition:
        DEFINITIONS.update({(d, op): f for d in domains for op in ops})
        return f

    return add


def _of_plugin(domain: str, op: str) -> Definition | None:
    """The definition of an operator of a domain of its own, which another package brings under the name ``DOMAIN.OPERATOR``."""
    name = f"{domain}.{op}"
    if domain in (*STANDARD, MICROSOFT, DOMAIN) or not plugins.has(KIND, name):
        return None
    definition = plugins.get(KIND, name)

    def defined(b: Body) -> list[str]:
        with plugins.blamed(KIND, name):
            try:
                outs = definition(b)
            except Undefined:
                outs = None
        if outs is None:
            raise Undefined
        if not isinstance(outs, list) or not all(isinstance(o, str) for o in cast("list[object]", outs)):
            raise plugins.refused(KIND, name, "its definition gives no list of names")
        return cast("list[str]", outs)

    return defined


def define(model: ModelProto, *, vendor: bool = True) -> bool:
    """Give every node of such an operator a function of the model, in place; whether there was any.

    Args:
        vendor: also the operators of onnxruntime; else those of plug-ins alone.

    Raises:
        PluginError: a plug-in is broken.
    """
    version = standard_opset(model)
    own = {(f.domain, f.name) for f in model.functions}
    ranks, codes = _known(model.graph)
    made: list[FunctionProto] = []
    stack: list[NodeProto] = list(model.graph.node)
    while stack:
        node = stack.pop()
        stack.extend(n for g in subgraphs(node) for n in g.node)
        domain = "" if node.domain == "ai.onnx" else node.domain
        found = (DEFINITIONS.get((domain, node.op_type)) if vendor else None) or _of_plugin(domain, node.op_type)
        standard = domain == "" and onnx.defs.has(node.op_type, version, "")
        if found is None or standard or version < 7 or (node.domain, node.op_type) in own | EVALUATORS.keys():
            continue
        try:
            body = Body(node, version, ranks, codes)
            outs = found(body)
        except (Undefined, IndexError, TypeError, ValueError):  # inputs that are not there, attributes that are nonsense
            continue
        if all(k < len(outs) and outs[k] for k, wanted in enumerate(body.wanted) if wanted):
            made.append(_function(node, body, outs, f"{node.op_type}_{len(made)}", model))
    if made:
        model.functions.extend(made)
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return bool(made)


def _function(node: NodeProto, body: Body, outs: list[str], name: str, model: ModelProto) -> FunctionProto:
    """The function of a node, which is made a call of it: of the inputs that are there, for the outputs that are asked for."""
    keep = [k for k, wanted in enumerate(body.wanted) if wanted]
    results = [body("Identity", outs[k]) for k in keep]  # no name twice, and none of an input
    opsets = [o for o in model.opset_import if o.domain in STANDARD]
    function = helper.make_function(DOMAIN, name, [i for i in body.ins if i], results, body.nodes, opsets)
    ins, outputs = [i for i in node.input if i], [node.output[k] for k in keep]
    node.ClearField("attribute")
    del node.input[:], node.output[:]
    node.input.extend(ins)
    node.output.extend(outputs)
    node.domain, node.op_type = DOMAIN, name
    return function


def _known(graph: GraphProto) -> tuple[dict[str, int], dict[str, int]]:
    """Ranks and element types of values, as far as the file says them."""
    values = [v for v in (*graph.input, *graph.output, *graph.value_info) if v.type.HasField("tensor_type")]
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in values if v.type.tensor_type.HasField("shape")}
    codes = {v.name: v.type.tensor_type.elem_type for v in values}
    ranks.update({t.name: len(t.dims) for t in graph.initializer})
    codes.update({t.name: t.data_type for t in graph.initializer})
    return ranks, codes


# onnxruntime's fused attention (one product, several heads, grouped heads, caches), rotary embeddings. See `contrib`.


def _heads(b: Body, x: str, heads: int) -> str:
    return b("Transpose", b("Reshape", x, b.const([0, 0, heads, -1], np.int64)), perm=[0, 2, 1, 3])


def _attend(b: Body, q: str, k: str, v: str, masks: list[str]) -> str:
    """Heads of queries (B, N, S, d) with keys and values; back to (B, S, N d)."""
    scores = b("Mul", b("MatMul", q, b("Transpose", k, perm=[0, 1, 3, 2])), _scale(b, q))
    for mask in masks:
        scores = b("Add", scores, mask)
    if b.get("unidirectional", 0):
        scores = b("Add", scores, _causal(b, q, k))
    mixed = b("MatMul", b("Softmax", scores, axis=-1), v)
    return b("Reshape", b("Transpose", mixed, perm=[0, 2, 1, 3]), b.const([0, 0, -1], np.int64))


def _scale(b: Body, q: str) -> str:
    """The factor of scores: as given, or one over the root of the width of the heads of q."""
    scale = b.get("scale", 0.0)
    if scale:
        return b.scalar(scale, q)
    width = b("Cast", b("Gather", b("Shape", q), b.const(3, np.int64)), to=TensorProto.FLOAT)
    return b.like(b("Reciprocal", b("Sqrt", width)), q)


def _causal(b: Body, q: str, k: str) -> str:
    """0 where a query may look, the filter value at keys after its own place; the last query is at the last key."""
    one, zero = b.const(1, np.int64), b.const(0, np.int64)
    rows, columns = (b("Gather", b("Shape", x), b.const(2, np.int64)) for x in (q, k))
    query = b("Add", b("Range", zero, rows, one), b("Sub", columns, rows))
    later = b("Less", b.unsqueeze(query, 1), b.unsqueeze(b("Range", zero, columns, one), 0))
    filtered = b.scalar(b.get("mask_filter_value", -10000.0), q)
    return b("Where", later, filtered, b.scalar(0, q))


def _padding(b: Body, k: int, like: str) -> str:
    """A mask of (batch, keys) or (batch, queries, keys), 1 where there is a token, as what to add to scores."""
    rank = b.ranks.get(f"i{k}")
    b.need(rank in (2, 3))
    mask = b.ins[k] if rank == 3 else b.unsqueeze(b.ins[k], 1)
    there = b("Cast", b.unsqueeze(mask, 1), to=TensorProto.BOOL)
    return b("Where", there, b.scalar(0, like), b.scalar(b.get("mask_filter_value", -10000.0), like))


def _bias_parts(b: Body, q: str, v: str) -> list[str]:
    """The bias of queries, keys and values, apart: the first two are as wide as q, the last as v."""
    wide, last = (b("Gather", b("Shape", x), b.const([2], np.int64)) for x in (q, v))
    first = b("Split", b.ins[3], b("Concat", wide, wide, last, axis=0), axis=0, outs=3)
    return [first, f"{first}.1", f"{first}.2"]


@defines("MultiHeadAttention")
def multi_head_attention(b: Body) -> list[str]:
    """query, key, value (batch, length, heads * width; key and value perhaps with heads already), bias of all three,
    padding mask, bias of the scores, past key and value."""
    b.need(all(b.has(k) for k in range(3)) and not any(b.has(k) for k in range(8, len(b.ins))) and b.version >= 13)
    b.need(b.ranks.get("i0") == 3 and b.ranks.get("i1") == b.ranks.get("i2") and b.ranks.get("i1") in (3, 4))
    heads, apart = b.get("num_heads", 0), b.ranks["i1"] == 4
    b.need(heads > 0 and not (apart and (b.has(6) or b.has(3))))
    q, k, v = b.ins[:3]
    if b.has(3):
        q, k, v = (b("Add", x, part) for x, part in zip((q, k, v), _bias_parts(b, q, v), strict=True))
    q = _heads(b, q, heads)
    k, v = (x if apart else _heads(b, x, heads) for x in (k, v))
    if b.has(6) and b.has(7):
        k, v = b("Concat", b.ins[6], k, axis=2), b("Concat", b.ins[7], v, axis=2)
    masks = [_padding(b, 4, q)] if b.has(4) else []
    return [_attend(b, q, k, v, masks + ([b.ins[5]] if b.has(5) else [])), k, v]


@defines("Attention")
def attention(b: Body) -> list[str]:
    """The same with one product for queries, keys and values: input, weights, bias, mask, past, bias of the scores.
    The past, and the second output, are (2, batch, heads, length, width): keys and values."""
    b.need(not any(b.has(k) for k in range(6, len(b.ins))) and not b.get("past_present_share_buffer", 0))
    b.need(not b.get("do_rotary", 0) and b.version >= 13)
    heads, sizes = b.get("num_heads", 0), [int(v) for v in b.attributes.get("qkv_hidden_sizes", [])]
    b.need(heads > 0 and len(sizes) in (0, 3))
    joined = b.add(b("MatMul", b.ins[0], b.ins[1]), 2)
    if sizes:
        first = b("Split", joined, b.const(sizes, np.int64), axis=-1, outs=3)
    else:
        first = b("Split", joined, axis=-1, outs=3, **({"num_outputs": 3} if b.version >= 18 else {}))
    q, k, v = (_heads(b, x, heads) for x in (first, f"{first}.1", f"{first}.2"))
    if b.has(4):
        k, v = (b("Concat", b("Gather", b.ins[4], b.const(n, np.int64), axis=0), x, axis=2) for n, x in enumerate((k, v)))
    present = b("Concat", b.unsqueeze(k, 0), b.unsqueeze(v, 0), axis=0) if len(b.wanted) > 1 and not sizes else ""
    masks = [_padding(b, 3, q)] if b.has(3) else []
    return [_attend(b, q, k, v, masks + ([b.ins[5]] if b.has(5) else [])), present]


# rotary embeddings


def _sized(b: Body, x: str, axis: int) -> str:
    """One size, as a tensor of one number."""
    return b("Gather", b("Shape", x), b.const([axis], np.int64))


def _slice_of(b: Body, x: str, start: str, end: str, axis: int) -> str:
    return b("Slice", x, start, end, b.const([axis], np.int64))


def _turned(b: Body, x: str, places: str, cos: str, sin: str, *, interleaved: bool) -> str:
    """x (batch, length, heads, width) with its first columns turned by the angles of its places (batch or 1, length)."""
    cos, sin = (b.unsqueeze(b("Gather", table, places, axis=0), 2) for table in (cos, sin))
    zero, half, end = b.const([0], np.int64), _sized(b, cos, 3), b.const([2**31 - 1], np.int64)
    whole = b("Add", half, half)
    head, rest = _slice_of(b, x, zero, whole, 3), _slice_of(b, x, whole, end, 3)
    if interleaved:
        pairs = b("Reshape", head, b.const([0, 0, 0, -1, 2], np.int64))
        first, last = (b("Gather", pairs, b.const(k, np.int64), axis=4) for k in range(2))
    else:
        first, last = _slice_of(b, head, zero, half, 3), _slice_of(b, head, half, end, 3)
    turned = [
        b("Sub", b("Mul", first, cos), b("Mul", last, sin)),
        b("Add", b("Mul", first, sin), b("Mul", last, cos)),
    ]
    if interleaved:
        joined = b("Reshape", b("Concat", *(b.unsqueeze(t, 4) for t in turned), axis=4), b.const([0, 0, 0, -1], np.int64))
        return b("Concat", joined, rest, axis=3)
    return b("Concat", *turned, rest, axis=3)


@defines("RotaryEmbedding")
def rotary_embedding(b: Body) -> list[str]:
    """x (batch, length, heads * width) or (batch, heads, length, width), places (batch, length) or one to start from, tables of
    cosines and sines (place, half of what is turned)."""
    rank, places = b.ranks.get("i0"), b.ins[1]
    b.need(rank in (3, 4) and b.ranks.get("i1") in (1, 2) and b.version >= 13)
    b.need(b.get("scale", 1.0) == 1.0 and not b.get("is_packed_batching", 0))
    heads = b.get("num_heads", 0)
    b.need(heads > 0 or not b.get("rotary_embedding_dim", 0))
    if rank == 4:
        x = b("Transpose", b.ins[0], perm=[0, 2, 1, 3])
    elif heads:
        x = b.shaped(b.ins[0], 0, 0, heads, -1)
    else:
        half = _sized(b, b.ins[2], 1)
        x = b("Reshape", b.ins[0], b("Concat", b.const([0, 0, -1], np.int64), b("Add", half, half), axis=0))
    if b.ranks["i1"] == 1:
        places = b.unsqueeze(b("Add", places, _count(b, _sized(b, x, 1))), 0)
    y = _turned(b, x, places, b.ins[2], b.ins[3], interleaved=bool(b.get("interleaved", 0)))
    return [b("Transpose", y, perm=[0, 2, 1, 3]) if rank == 4 else b.shaped(y, 0, 0, -1)]


def _count(b: Body, size: str) -> str:
    """0, 1, ... below a size that is a tensor of one number."""
    last = b("Squeeze", size, b.const([0], np.int64))
    return b("Range", b.const(0, np.int64), last, b.const(1, np.int64))


# grouped heads and caches


@defines("GroupQueryAttention")
def group_query_attention(b: Body) -> list[str]:
    """query (batch, length, heads * width), key and value (or all three in the first), past key and value (batch, groups,
    length, width), the last place of every row, their greatest number, tables of cosines and sines, places, bias of the
    scores, a sink per head. The new keys of a row come behind its own past ones, also where the cache is longer.
    """
    heads, groups = b.get("num_heads", 0), b.get("kv_num_heads", 0)
    b.need(heads > 0 and groups > 0 and heads % groups == 0 and b.version >= 13)
    b.need(not any(b.has(k) for k in range(12, len(b.ins))) and all(b.has(k) for k in (3, 4, 5, 6)) and b.has(1) == b.has(2))
    b.need(not b.get("sliding_window_cache", 0) and not b.get("qk_output", 0))
    b.need(all(b.get(f"{x}_quant_type", "NONE") == "NONE" for x in "kv"))
    if b.has(1):
        q, k, v = (b.shaped(x, 0, 0, n, -1) for x, n in zip(b.ins[:3], (heads, groups, groups), strict=True))
    else:
        parts = b.const([heads, groups, groups], np.int64)
        q = b("Split", b.shaped(b.ins[0], 0, 0, heads + 2 * groups, -1), parts, axis=2, outs=3)
        k, v = f"{q}.1", f"{q}.2"
    length, last = _sized(b, q, 1), b("Cast", b.ins[5], to=TensorProto.INT64)
    total = b("Reshape", b("Cast", b.ins[6], to=TensorProto.INT64), b.const([1], np.int64))
    behind = b("Sub", b("Add", last, b.const([1], np.int64)), length)
    past = b("Where", b("Equal", total, length), b("Sub", last, last), behind)  # (batch); a prompt is padded at its end
    rows = b("Add", b.unsqueeze(past, 1), b.unsqueeze(_count(b, length), 0))  # (batch, length): the places of the queries
    if b.get("do_rotary", 0):
        b.need(b.has(7) and b.has(8))
        places, turn = b.ins[9] if b.has(9) else rows, bool(b.get("rotary_interleaved", 0))
        q, k = (_turned(b, x, places, b.ins[7], b.ins[8], interleaved=turn) for x in (q, k))
    size = b("Max", total, _sized(b, b.ins[3], 2))
    columns = _count(b, size)
    k, v = (_present(b, b.ins[n], x, past, columns, size) for n, x in ((3, k), (4, v)))
    seen = _seen(b, rows, columns, last)
    q = b("Transpose", q, perm=[0, 2, 1, 3])
    mixed = b("MatMul", _weights(b, q, _repeated(b, k, heads, groups), seen), _repeated(b, v, heads, groups))
    return [b.shaped(b("Transpose", mixed, perm=[0, 2, 1, 3]), 0, 0, -1), k, v]


def _present(b: Body, cache: str, new: str, past: str, columns: str, size: str) -> str:
    """The cache (batch, groups, size, width): past rows, behind them new ones (batch, length, groups, width), then zeros."""
    three, zero = b.const([0, 0, 0], np.int64), b.const([0], np.int64)
    more = b("Sub", size, _sized(b, cache, 2))
    old = b("Pad", cache, b("Concat", three, three, more, zero, axis=0))
    new = b("Transpose", new, perm=[0, 2, 1, 3])
    at = b("Sub", b.unsqueeze(columns, 0), b.unsqueeze(past, 1))  # (batch, size): which new row, or one before or behind them
    last = b("Sub", _sized(b, new, 2), b.const([1], np.int64))
    inside = b("Max", b("Min", at, last), zero)
    wide = b("Shape", old)
    rows = b("GatherElements", new, b("Expand", b.unsqueeze(b.unsqueeze(inside, 1), 3), wide), axis=2)
    fresh, before = (b.unsqueeze(b.unsqueeze(m, 1), 3) for m in (b("LessOrEqual", at, last), b("Less", at, zero)))
    return b("Where", before, old, b("Where", fresh, rows, b.scalar(0, new)))


def _seen(b: Body, rows: str, columns: str, last: str) -> str:
    """Which keys a query looks at, (batch, 1, length, size): up to its own place and the last one, within the window."""
    rows, columns = b.unsqueeze(b.unsqueeze(rows, 1), 3), b.unsqueeze(b.unsqueeze(b.unsqueeze(columns, 0), 0), 0)
    seen = b("LessOrEqual", columns, b.unsqueeze(b.unsqueeze(b.unsqueeze(last, 1), 2), 3))
    window = b.get("local_window_size", -1)
    if not b.get("causal", 1):
        b.need(window < 0)
        return seen
    seen = b("And", seen, b("LessOrEqual", columns, rows))
    if window < 0:
        return seen
    return b("And", seen, b("Greater", columns, b("Sub", rows, b.const(window, np.int64))))


def _repeated(b: Body, x: str, heads: int, groups: int) -> str:
    """(batch, groups, size, width) with every group once per head."""
    if heads == groups:
        return x
    sizes = [_sized(b, x, k) for k in range(4)]
    many = b("Expand", b.unsqueeze(x, 2), b("Concat", *sizes[:2], b.const([heads // groups], np.int64), *sizes[2:], axis=0))
    return b("Reshape", many, b("Concat", b.const([0, heads], np.int64), *sizes[2:], axis=0))


def _weights(b: Body, q: str, k: str, seen: str) -> str:
    """The softmax of the scores (batch, heads, length, size), with a sink in its sum where there is one."""
    scores = b("Mul", b("MatMul", q, b("Transpose", k, perm=[0, 1, 3, 2])), _scale(b, q))
    cap = b.get("softcap", 0.0)
    if cap:
        scores = b("Mul", b("Tanh", b("Div", scores, b.scalar(cap, q))), b.scalar(cap, q))
    scores = b("Where", seen, b.add(scores, 10), b.scalar(-np.inf, q))
    if not b.has(11) and not b.get("smooth_softmax", 0):
        return b("Softmax", scores, axis=-1)
    sink = b.shaped(b.ins[11], 1, -1, 1, 1) if b.has(11) else b.scalar(0, q)
    shape = b("Concat", *(_sized(b, scores, n) for n in range(3)), b.const([1], np.int64), axis=0)
    weights = b("Softmax", b("Concat", scores, b("Expand", sink, shape), axis=-1), axis=-1)
    return _slice_of(b, weights, b.const([0], np.int64), b.const([-1], np.int64), 3)


# onnxruntime's fused operators on floats: norms, activations, products. See `lift.operators.microsoft`.


def _norm(b: Body, x: str, scale: str, bias: str, epsilon: float, *, centred: bool) -> list[str]:
    """Over the last axis, in float32: the result, the mean, one over the deviation."""
    f = b.real(x)
    mean = b.mean(f, -1) if centred else ""
    gap = b("Sub", f, mean) if centred else f
    deviation = b("Sqrt", b("Add", b.mean(b("Mul", gap, gap), -1), b.const(b.get("epsilon", epsilon))))
    y = b("Mul", b.like(b("Div", gap, deviation), x), scale)
    return [b("Add", y, bias) if bias else y, mean, b("Reciprocal", deviation)]


@defines("LayerNormalization", "SimplifiedLayerNormalization", domains=("", MICROSOFT))
def layer_norm(b: Body) -> list[str]:
    """Before opset 17: x, scale, bias. The simplified one divides by the root of the mean of squares and has no bias."""
    axis, centred = b.get("axis", -1), b.node_kind == "LayerNormalization"
    b.need(axis == -1 or axis + 1 == b.ranks.get("i0"))
    y, mean, spread = _norm(b, b.ins[0], b.ins[1], b.ins[2] if centred and b.has(2) else "", 1e-5, centred=centred)
    return [y, mean, spread] if centred else [y, spread]


@defines("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
def skip_layer_norm(b: Body) -> list[str]:
    """The norm of input + skip (+ bias), and that sum as fourth output: input, skip, gamma, beta, bias.

    The simplified one has neither beta nor mean.
    """
    centred = b.node_kind == "SkipLayerNormalization"
    total = b.add(b("Add", b.ins[0], b.ins[1]), 4 if centred else 3)
    return [*_norm(b, total, b.ins[2], b.ins[3] if centred and b.has(3) else "", 1e-12, centred=centred), total]


@defines("EmbedLayerNormalization")
def embed_layer_norm(b: Body) -> list[str]:
    """Words, places and segments of tokens, added and normalised; the second output counts the tokens of a mask."""
    b.need(b.version >= 13)
    ids, positions = b.ins[0], b.ins[8] if b.has(8) else ""
    if not positions:
        length = b("Gather", b("Shape", ids), b.const(1, np.int64))
        positions = b("Range", b.const(0, np.int64), length, b.const(1, np.int64))
    total = b("Add", b("Gather", b.ins[2], ids), b("Gather", b.ins[3], positions))
    if b.has(1):
        total = b("Add", total, b("Gather", b.ins[4], b.ins[1]))
    y = _norm(b, total, b.ins[5], b.ins[6], 1e-12, centred=True)[0]
    mask = b("Cast", b.ins[7] if b.has(7) else b("Sub", ids, ids), to=TensorProto.INT32)
    counts = "" if b.get("mask_index_type", 0) else b("ReduceSum", mask, b.const([1], np.int64), keepdims=0)
    return [y, counts, total]


# activations


@defines("Gelu", "BiasGelu")
def gelu(b: Body) -> list[str]:
    """x (+ bias) times the normal distribution."""
    x = b.add(b.ins[0], 1)
    half = b("Add", b("Erf", b("Div", x, b.scalar(2**0.5, x))), b.scalar(1, x))
    return [b("Mul", b("Mul", x, half), b.scalar(0.5, x))]


@defines("FastGelu")
def fast_gelu(b: Body) -> list[str]:
    """The same by tanh."""
    x = b.add(b.ins[0], 1)
    inner = b("Mul", x, b("Add", b("Mul", b("Mul", x, x), b.scalar(0.035677408136300125, x)), b.scalar(0.7978845608028654, x)))
    return [b("Mul", b("Mul", x, b.scalar(0.5, x)), b("Add", b("Tanh", inner), b.scalar(1, x)))]


@defines("QuickGelu")
def quick_gelu(b: Body) -> list[str]:
    """x times the logistic function of alpha x."""
    x = b.ins[0]
    return [b("Mul", x, b("Sigmoid", b("Mul", x, b.scalar(b.get("alpha", 1.702), x))))]


def _activated(b: Body, y: str, kind: str, given: list[float]) -> str:
    if not kind:
        return y
    names = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "Relu": (), "Tanh": (), "Sigmoid": (), "Clip": ("", "")}
    b.need(kind in names and (not given or len(given) == len(names[kind])))
    if kind == "Clip":
        b.need(len(given) == 2)
        return b("Min", b("Max", y, b.scalar(given[0], y)), b.scalar(given[1], y))
    attributes: dict[str, Any] = dict(zip(names[kind], given, strict=False))
    return b(kind, y, **attributes)


@defines("FusedConv")
def fused_conv(b: Body) -> list[str]:
    """A convolution, a sum (the fourth input) and an activation."""
    own = ("activation", "activation_params")
    conv = b("Conv", *b.ins[:3], **{k: v for k, v in b.attributes.items() if k not in own})
    return [_activated(b, b.add(conv, 3), b.get("activation", ""), [float(v) for v in b.attributes.get(own[1], [])])]


@defines("FusedGemm")
def fused_gemm(b: Body) -> list[str]:
    """A Gemm and an activation."""
    gemm = b("Gemm", *b.ins, **{k: v for k, v in b.attributes.items() if not k.startswith("activation")})
    b.need(not {"activation_gamma"} & set(b.attributes))
    given = [float(b.attributes[k]) for k in ("activation_alpha", "activation_beta") if k in b.attributes]
    return [_activated(b, gemm, b.get("activation", ""), given)]


@defines("FusedMatMul", "TransposeMatMul")
def fused_matmul(b: Body) -> list[str]:
    """alpha A B, either of them with its last two axes swapped."""
    b.need(not b.get("transBatchA", 0) and not b.get("transBatchB", 0))
    factors = [_swapped(b, k) if b.get(f"trans{x}", 0) else b.ins[k] for k, x in enumerate("AB")]
    y = b("MatMul", *factors)
    alpha = b.get("alpha", 1.0)
    return [y if alpha == 1.0 else b("Mul", y, b.scalar(alpha, y))]


def _swapped(b: Body, k: int) -> str:
    rank = b.ranks.get(f"i{k}", 0)
    if not rank:
        raise Undefined
    return b("Transpose", b.ins[k], perm=[*range(rank - 2), rank - 1, rank - 2]) if rank > 1 else b.ins[k]


CONTRIB_STANDARD = {"Range": 11, "Trilu": 14, "GatherND": 11, "GridSample": 16}
NEW_NAMES = {"bilinear": "linear", "bicubic": "cubic"}  # of GridSample's modes from opset 20


@defines(*CONTRIB_STANDARD)
def standard(b: Body) -> list[str]:
    """What has become an operator of ONNX, from the opset that has it; tf2onnx and older exporters of torch write these."""
    b.need(b.version >= CONTRIB_STANDARD[b.node_kind])
    if b.node_kind == "Range":
        return [b("Range", *_bounds(b))]
    attributes = dict(b.attributes)
    if b.node_kind == "GridSample" and b.version >= 20:
        mode = b.get("mode", "bilinear")
        attributes["mode"] = NEW_NAMES.get(mode, mode)
    return [b(b.node_kind, *b.ins, **attributes)]


def _bounds(b: Body) -> list[str]:
    """Start, limit and step as scalars: a list of one will do, and the step is 1 where it is not given."""
    start, limit, *step = (b("Squeeze", i) for i in b.ins)
    if not step:
        code = b.codes.get(b.ins[0], 0)
        b.need(code != 0 or b.version >= CASTS)
        step = [b("Cast", b.const(1.0), to=code) if code else b.scalar(1.0, start)]
    return [start, limit, *step]


# onnxruntime's quantised operators: integers to floats, the operator, and back. See `lift.operators.microsoft`.


RANGE: dict[int, tuple[int, int]] = {TensorProto.UINT16: (0, 65535), TensorProto.INT16: (-32768, 32767)}
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def _real(b: Body, k: int, *, axis: int | None = None) -> str:
    """Input k as floats, its scale and zero point behind it."""
    ins = [i for i in b.ins[k : k + 3] if i]
    return b("DequantizeLinear", *ins, **({} if axis is None else {"axis": axis}))


def _quantised(b: Body, y: str, k: int) -> str:
    """Floats as integers by the scale and zero point from input k on."""
    return b("QuantizeLinear", y, *[i for i in b.ins[k : k + 2] if i])


@defines("QuantizeLinear", "DequantizeLinear")
def quantize(b: Body) -> list[str]:
    """ONNX's own, in onnxruntime's domain, which had 16 bits before ONNX."""
    ins = [i for i in b.ins if i]
    code = b.codes.get(f"i{len(ins) - 1}", 0)
    b.need(bool(code))
    if code not in RANGE or b.version >= 21:
        return [b(b.node_kind, *ins, **b.attributes)]
    b.need(b.has(2) and b.ranks.get("i1") == 0 == b.ranks.get("i2"))
    x, zero = b.real(b.ins[0]), b.real(b.ins[2])
    if b.node_kind == "DequantizeLinear":
        return [b("Mul", b("Sub", x, zero), b.ins[1])]
    low, high = (b.const(v) for v in RANGE[code])
    whole = b("Add", b("Round", b("Div", x, b.ins[1])), zero)
    return [b("Cast", b("Min", b("Max", whole, low), high), to=code)]


@defines("QLinearAdd", "QLinearMul")
def arithmetic(b: Body) -> list[str]:
    """Of two quantised tensors."""
    return [_quantised(b, b(b.node_kind.removeprefix("QLinear"), _real(b, 0), _real(b, 3)), 6)]


@defines("QLinearSigmoid", "QLinearLeakyRelu", "QLinearGlobalAveragePool", "QLinearAveragePool", "QLinearSoftmax")
def of_one(b: Body) -> list[str]:
    """Of one quantised tensor."""
    kind, attributes = b.node_kind.removeprefix("QLinear"), dict(b.attributes)
    b.need(not attributes.pop("channels_last", 0))
    b.need(kind != "Softmax" or (attributes.pop("opset", 13) >= 13 and b.version >= 13))
    return [_quantised(b, b(kind, _real(b, 0), **attributes), 3)]


@defines("QLinearConcat")
def concat(b: Body) -> list[str]:
    """The result's scale and zero point, then three inputs for each part."""
    b.need(len(b.ins) % 3 == 2)
    return [_quantised(b, b("Concat", *(_real(b, k) for k in range(2, len(b.ins), 3)), axis=b.get("axis", 0)), 0)]


@defines("QLinearWhere")
def where(b: Body) -> list[str]:
    """A condition, and two quantised tensors."""
    return [_quantised(b, b("Where", b.ins[0], _real(b, 1), _real(b, 4)), 7)]


@defines("QGemm")
def gemm(b: Body) -> list[str]:
    """alpha A B + C, where C counts in units of alpha times both scales; floats where the result has no scale."""
    alpha, swapped = b.get("alpha", 1.0), b.get("transB", 0)
    factors = [_real(b, 0), _real(b, 3, axis=0 if swapped else 1)]
    y = b("Gemm", *factors, alpha=alpha, transA=b.get("transA", 0), transB=swapped)
    if b.has(6):
        unit = b("Mul", b("Mul", b.ins[1], b.ins[4]), b.const(alpha))
        y = b("Add", y, b("Mul", b("Cast", b.ins[6], to=TensorProto.FLOAT), unit))
    return [_quantised(b, y, 7) if b.has(7) else y]


@defines("MatMulIntegerToFloat")
def integer_product(b: Body) -> list[str]:
    """A, B, their scales, their zero points, a bias: an exact product of integers, then floats."""
    whole = b("MatMulInteger", *b.ins[:2], *(b.ins[4:6] if b.has(4) or b.has(5) else []))
    y = b("Mul", b("Cast", whole, to=TensorProto.FLOAT), b("Mul", b.ins[2], b.ins[3]))
    return [b.add(y, 6)]


@defines("DynamicQuantizeMatMul")
def dynamic_product(b: Body) -> list[str]:
    """A in floats, B with its scale and zero point, a bias."""
    a = b("DynamicQuantizeLinear", b.ins[0], outs=3)
    whole = b("MatMulInteger", a, b.ins[1], f"{a}.2", *([b.ins[3]] if b.has(3) else []))
    return [b.add(b("Mul", b("Cast", whole, to=TensorProto.FLOAT), b("Mul", f"{a}.1", b.ins[2])), 4)]


def _unpacked(b: Body, x: str, bits: int) -> str:
    """Numbers of some bits out of bytes, the lowest bits first, along a new last axis."""
    x = b("Cast", x, to=TensorProto.INT32)
    parts: list[str] = []
    for k in range(8 // bits):
        shifted = b("Div", x, b.const(1 << bits * k, np.int32)) if k else x
        parts.append(b.unsqueeze(b("Mod", shifted, b.const(1 << bits, np.int32)), -1))
    return b("Concat", *parts, axis=-1) if len(parts) > 1 else parts[0]


@defines("MatMulNBits", domains=(MICROSOFT,))
def nbits(b: Body) -> list[str]:
    """A times a weight of 2, 4 or 8 bits: B (N, blocks, bytes), a scale and perhaps a zero point per block, a bias."""
    bits, size, columns, rows = (b.get(k, d) for k, d in (("bits", 4), ("block_size", 0), ("N", 0), ("K", 0)))
    b.need(bits in (2, 4, 8) and min(size, columns, rows) > 0 and not b.has(4) and b.version >= 13)
    blocks = -(-rows // size)
    q = b("Cast", b.shaped(_unpacked(b, b.ins[1], bits), columns, blocks, size), to=TensorProto.FLOAT)
    zero = b.const(1 << bits - 1)
    if b.has(3):
        code = b.codes.get("i3")
        b.need(code == TensorProto.UINT8 or code in FLOATS)
        if code == TensorProto.UINT8:
            flat = b.shaped(_unpacked(b, b.shaped(b.ins[3], columns, -1), bits), columns, -1)
            whole = b("Slice", flat, *(b.const([v], np.int64) for v in (0, blocks, 1)))
            zero = b("Cast", b.shaped(whole, columns, blocks, 1), to=TensorProto.FLOAT)
        else:
            zero = b.shaped(b.real(b.ins[3]), columns, blocks, 1)
    scaled = b("Mul", b("Sub", q, zero), b.shaped(b.real(b.ins[2]), columns, blocks, 1))
    weight = b("Slice", b.shaped(scaled, columns, -1), *(b.const([v], np.int64) for v in (0, rows, 1)))
    return [b.add(b("MatMul", b.ins[0], b("Transpose", b.like(weight, b.ins[0]), perm=[1, 0])), 5)]
