"""Tokens one after another from a decoder with caches: ``python examples/decode.py``.

What a step gives as ``present_…`` the next one takes as ``past_…``. One build has all lengths of the past; its weights stay
loaded. The decoder has one layer and random weights, and is written to ``decoder.onnx``.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

import tapestry

VOCABULARY, WIDTH, TOKENS = 40, 32, 12
TEXT = f"""<ir_version: 9, opset_import: ["": 18]>
decoder (int64[1, 1] token, float[1, past, {WIDTH}] past_key, float[1, past, {WIDTH}] past_value)
    => (float[1, 1, {VOCABULARY}] scores, float[1, total, {WIDTH}] present_key, float[1, total, {WIDTH}] present_value) {{
  x = Gather(table, token)
  query = MatMul(x, q)
  new_key = MatMul(x, k)
  new_value = MatMul(x, v)
  present_key = Concat <axis = 1> (past_key, new_key)
  present_value = Concat <axis = 1> (past_value, new_value)
  turned = Transpose <perm = [0, 2, 1]> (present_key)
  products = MatMul(query, turned)
  weights = Softmax <axis = -1> (products)
  mixed = MatMul(weights, present_value)
  seen = Add(x, mixed)
  scores = MatMul(seen, head)
}}"""


def model(path: str) -> str:
    """Write the decoder."""
    rng, out = np.random.default_rng(0), onnx.parser.parse_model(TEXT)
    sizes = {"table": (VOCABULARY, WIDTH), **dict.fromkeys("qkv", (WIDTH, WIDTH)), "head": (WIDTH, VOCABULARY)}
    weights = {n: (rng.standard_normal(s) / np.sqrt(s[0] if s[0] == WIDTH else 1)).astype(np.float32) for n, s in sizes.items()}
    out.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    onnx.save(out, path)
    return path


def main(path: str) -> list[int]:
    """The likeliest tokens, each behind those before it."""
    plan, tokens = tapestry.compile(path, devices=1, topology="cpu", shapes={"past": f"1..{TOKENS}"}), [0]
    caches = {n: np.zeros((1, 1, WIDTH), np.float32) for n in plan.inputs if n.startswith("past")}  # of a first token
    with tapestry.Session(plan) as session:
        for _ in range(TOKENS):
            out = session.run({"token": np.array([tokens[-1:]]), **caches})
            tokens.append(int(out["scores"].argmax()))
            caches = {n: out[n.replace("past", "present")] for n in caches}
    return tokens[1:]


if __name__ == "__main__":
    print(*main(model("decoder.onnx")))
