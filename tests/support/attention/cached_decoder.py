"""A small decoder with caches, as exporters of transformers and optimum write one, and ways in which another may differ."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper, numpy_helper

VOCABULARY, WIDTH, HEADS, PLACES = 37, 16, 2, 64


def _weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    out = {"tokens": rng.standard_normal((VOCABULARY, WIDTH)), "places": rng.standard_normal((PLACES, WIDTH)) * 0.7}
    for layer in range(2):
        out |= {f"{n}{layer}": rng.standard_normal((WIDTH, WIDTH)) * 0.4 for n in ("q", "k", "v", "o")}
    out["head"] = rng.standard_normal((WIDTH, VOCABULARY)) * 0.5
    return {n: a.astype(np.float32) for n, a in out.items()}


def _node(nodes: list[onnx.NodeProto], op: str, *ins: str, out: str, **attributes: object) -> str:
    nodes.append(helper.make_node(op, list(ins), [out], **attributes))
    return out


def _among_all(nodes: list[onnx.NodeProto], x: str) -> str:
    """Numbers over the largest one of all rows."""
    largest = _node(nodes, "ReduceMax", _node(nodes, "Abs", x, out="size"), out="largest", keepdims=0)
    return _node(nodes, "Div", x, largest, out="part")


def _constant(constants: dict[str, np.ndarray], name: str, value: object, dtype: type = np.int64) -> str:
    constants[name] = np.array(value, dtype)
    return name


def decoder(
    *, cached: bool = True, positions: bool = True, masked: bool = True, order: str = "past first", coupled: bool = False
) -> onnx.ModelProto:  # fmt: skip
    """A decoder of two layers.

    Args:
        cached: with ``past_key_values.N.key`` and so on; without, it takes whole sequences.
        positions: they are an input; otherwise the model counts them from the length of its past.
        masked: the mask reaches the scores; otherwise only its length is used.
        order: of the caches: ``past first`` or ``new first``.
        coupled: scores are divided by the largest of all rows.
    """
    nodes, constants = list[onnx.NodeProto](), dict[str, np.ndarray]()

    node, constant = partial(_node, nodes), partial(_constant, constants)
    zero, one = constant("zero", 0), constant("one", 1)
    new = node("Squeeze", node("Shape", "input_ids", out="new1", start=1, end=2), out="new")
    total = node("Squeeze", node("Shape", "attention_mask", out="total1", start=1, end=2), out="total")
    queries = node("Add", node("Range", zero, new, one, out="r"), node("Sub", total, new, out="past"), out="queries")
    column = node("Reshape", queries, constant("column", [1, 1, -1, 1]), out="column_queries")
    causal = node("LessOrEqual", node("Range", zero, total, one, out="keys"), column, out="causal")
    wide = node("Unsqueeze", node("Cast", "attention_mask", out="seen", to=T.BOOL), constant("axes", [1, 2]), out="wide")
    open_ = node("And", causal, wide, out="open") if masked else causal
    bias = node("Where", open_, constant("nothing", 0.0, np.float32), constant("never", -1e9, np.float32), out="bias")
    where = "position_ids" if positions else queries
    x = node("Add", node("Gather", "tokens", "input_ids", out="e"), node("Gather", "places", where, out="p"), out="x")
    split, join = constant("split", [0, 0, HEADS, WIDTH // HEADS]), constant("join", [0, 0, WIDTH])
    for layer in range(2):
        heads = {}
        for n in ("q", "k", "v"):
            flat = node("MatMul", x, f"{n}{layer}", out=f"{n}{layer}.flat")
            parts = node("Reshape", flat, split, out=f"{n}{layer}.split")
            heads[n] = node("Transpose", parts, out=f"{n}{layer}.heads", perm=[0, 2, 1, 3])
        for n, kind in (("k", "key"), ("v", "value")):
            if cached:
                both = [f"past_key_values.{layer}.{kind}", heads[n]]
                heads[n] = node(
                    "Concat", *(both if order == "past first" else both[::-1]), out=f"present.{layer}.{kind}", axis=2
                )
        turned = node("Transpose", heads["k"], out=f"kt{layer}", perm=[0, 1, 3, 2])
        scores = node("Add", node("MatMul", heads["q"], turned, out=f"s{layer}"), bias, out=f"b{layer}")
        mixed = node("MatMul", node("Softmax", scores, out=f"w{layer}", axis=-1), heads["v"], out=f"m{layer}")
        mixed = node("Reshape", node("Transpose", mixed, out=f"t{layer}", perm=[0, 2, 1, 3]), join, out=f"j{layer}")
        x = node(
            "Tanh", node("Add", node("MatMul", mixed, f"o{layer}", out=f"o{layer}.out"), x, out=f"y{layer}"), out=f"x{layer}"
        )
    node("MatMul", _among_all(nodes, x) if coupled else x, "head", out="logits")
    return _model(nodes, _weights(np.random.default_rng(11)) | constants, cached, positions)


def _model(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], cached: bool, positions: bool) -> onnx.ModelProto:
    whole = "total" if cached else "sequence"
    ins = {"input_ids": ["batch", "sequence"], "attention_mask": ["batch", whole]}
    ins |= {"position_ids": ["batch", "sequence"]} if positions else {}
    info = [helper.make_tensor_value_info(n, T.INT64, s) for n, s in ins.items()]
    outs = [helper.make_tensor_value_info("logits", T.FLOAT, ["batch", "sequence", VOCABULARY])]
    for layer in range(2 if cached else 0):
        for kind in ("key", "value"):
            size = WIDTH // HEADS
            info.append(
                helper.make_tensor_value_info(f"past_key_values.{layer}.{kind}", T.FLOAT, ["batch", HEADS, "past", size])
            )
            outs.append(helper.make_tensor_value_info(f"present.{layer}.{kind}", T.FLOAT, ["batch", HEADS, "total", size]))
    graph = helper.make_graph(nodes, "decoder", info, outs, [numpy_helper.from_array(a, n) for n, a in weights.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def sizes(batch: int, new: int, capacity: int) -> dict[str, int]:
    """Sizes of a cached build's symbols."""
    return {"batch": batch, "sequence": new, "past": capacity, "total": capacity + new}
