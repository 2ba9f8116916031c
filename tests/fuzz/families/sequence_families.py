"""Families of sequences: recurrences, attention, rotary embeddings, with all that these operators can say."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.fuzz.generate.draw import Draw, Value
from tests.fuzz.generate.evaluate import need

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FUNCTIONS = {"LSTM": 3, "GRU": 2, "RNN": 1}  # activations of a direction
PLAIN = ("Tanh", "Sigmoid", "Relu", "Softsign", "Softplus")
SLOPED = {"LeakyRelu": 1, "Elu": 1, "ScaledTanh": 2, "HardSigmoid": 2, "Affine": 2}  # and how many parameters each has


def recurrent(d: Draw) -> None:
    """LSTM, GRU, RNN: directions, initial states, lengths, peepholes, activations, clip, either layout, any of the outputs."""
    s, b, n, h = d.rng.randint(1, 4), d.rng.randint(1, 4), d.rng.randint(1, 3), d.rng.randint(1, 3)
    op = d.rng.choice(["LSTM", "GRU", "RNN"])
    direction = d.rng.choice(["forward", "reverse", "bidirectional"])
    dirs, gates = 2 if direction == "bidirectional" else 1, GATES[op]
    first = int(d.opset >= 14 and d.chance(0.25))
    state = (b, dirs, h) if first else (dirs, b, h)
    x = d.mate(d.fresh((1,)), (b, s, n) if first else (s, b, n))
    ins: list[Value | None] = [x, d.weight(d.data((dirs, gates * h, n))), d.weight(d.data((dirs, gates * h, h)))]
    ins.append(d.weight(d.data((dirs, 2 * gates * h))) if d.chance(0.5) else None)
    ins.append(d.fresh((b,), "int32", lo=1, hi=s) if d.chance(0.3) else None)
    ins.append(d.fresh(state) if d.chance(0.4) else None)
    if op == "LSTM":
        ins.append(d.fresh(state) if d.chance(0.4) else None)
        ins.append(d.weight(d.data((dirs, 3 * h))) if d.chance(0.3) else None)
    while ins[-1] is None:
        ins.pop()
    attrs: dict[str, Any] = {"hidden_size": h, "direction": direction, "layout": first or None}
    attrs["clip"] = d.rng.choice([0.25, 1.0]) if d.chance(0.15) else None
    if op == "LSTM" and d.chance(0.2):
        attrs["input_forget"] = 1
    if op == "GRU" and d.chance(0.5):
        attrs["linear_before_reset"] = 1
    if d.chance(0.4):
        attrs |= _activations(d, FUNCTIONS[op] * dirs)
    wanted = [d.chance(0.6) for _ in range(3 if op == "LSTM" else 2)]
    d.add(op, ins, wanted if any(wanted) else 1, **attrs)


def _activations(d: Draw, count: int) -> dict[str, Any]:
    names: list[str] = []
    alpha: list[float] = []
    beta: list[float] = []
    sloped = d.chance(0.4)
    for _ in range(count):
        name = d.rng.choice(tuple(SLOPED) if sloped and d.chance(0.6) else PLAIN[:3] if d.chance(0.7) else PLAIN)
        names.append(name)
        if SLOPED.get(name, 0) >= 1:
            alpha.append(d.rng.choice([0.25, 0.5]))
        if SLOPED.get(name, 0) >= 2:
            beta.append(d.rng.choice([0.25, 0.5]))
    return {"activations": names, "activation_alpha": alpha or None, "activation_beta": beta or None}


def attention(d: Draw) -> None:
    """Heads split off and merged again around a masked softmax; or the Attention operator itself, with all that it has."""
    b, s, heads, e = d.rng.choice([1, 2]), d.size(5), d.rng.choice([1, 2, 3, 4]), d.rng.choice([2, 3, 4])
    if d.opset >= 23 and d.chance(0.7):
        _attention_node(d, b, s, heads, e)
        return
    x = d.mate(d.fresh((1,)), (b, s, heads * e))
    sides: list[Value] = []
    for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
        (p,) = d.add("MatMul", [x, d.weight(d.data((heads * e, heads * e)) / np.float32(4))])
        (p,) = d.add("Reshape", [p, d.ints(0, 0, heads, e)], exact=True)
        sides += d.add("Transpose", [p], exact=True, perm=perm)
    (scores,) = d.add("MatMul", sides[:2])
    (scores,) = d.add("Mul", [scores, d.weight(np.float32(0.5))])
    if d.chance(0.6):
        (scores,) = d.add("Add", [scores, d.fresh((s, s))])
    (p,) = d.add("Softmax", [scores], axis=-1)
    (o,) = d.add("MatMul", [p, sides[2]])
    (o,) = d.add("Transpose", [o], exact=True, perm=[0, 2, 1, 3])
    (o,) = d.add("Reshape", [o, d.ints(0, 0, heads * e)], exact=True)
    d.add("Add", [o, x])


def _attention_node(d: Draw, b: int, s: int, heads: int, e: int) -> None:
    """Heads shared or not, values of a width of their own, a cache, masks of every rank, and what else attributes say."""
    kv, wide = d.rng.choice([h for h in range(1, heads + 1) if heads % h == 0]), d.rng.choice([e, e, 1, 3])
    t, before = d.size(5), d.size(3) if d.chance(0.4) else 0
    flat = d.chance(0.4)
    dtype = d.rng.choice(["float32"] * 5 + ["float16"])
    q, k, v = (
        d.fresh((b, n, h * w) if flat else (b, h, n, w), dtype) for n, h, w in ((s, heads, e), (t, kv, e), (t, kv, wide))
    )
    past = [d.fresh((b, kv, before, w), dtype) for w in (e, wide)] if before else []
    mask = _mask(d, (b, heads, s, t + before), dtype) if d.chance(0.5) else None
    ins: list[Value | None] = [q, k, v, mask, *(past or (None, None))]
    attrs: dict[str, Any] = {"is_causal": int(d.chance(0.4)), "scale": d.rng.choice([None, None, 0.5])}
    if flat:
        attrs |= {"q_num_heads": heads, "kv_num_heads": kv}
    if d.opset >= 24 and not past and d.chance(0.3):
        ins.append(d.fresh((b,), "int64", lo=s if attrs["is_causal"] else 1, hi=t))
    while ins[-1] is None:
        ins.pop()
    attrs["softcap"] = d.rng.choice([0.5, 2.0]) if d.chance(0.3) else None
    attrs["softmax_precision"] = 1 if d.chance(0.2) else None
    if d.opset >= 25 and d.chance(0.3):
        attrs |= {f"{side}_window_size": d.rng.randrange(4) for side in ("left", "right") if d.chance(0.6)}
    wanted = [True, *([d.chance(0.7)] * 2 if past else [False, False]), d.chance(0.35)]
    attrs["qk_matmul_output_mode"] = d.rng.randrange(4) if wanted[3] else None
    d.add("Attention", ins, wanted, **attrs)


def _mask(d: Draw, shape: tuple[int, int, int, int], dtype: str) -> Value:
    """A mask of two to four axes, some of one cell; of booleans no row is empty."""
    kept = shape[d.rng.choice([0, 1, 2, 2]) :]
    kept = (*(1 if d.chance(0.3) else n for n in kept[:-1]), kept[-1])
    if d.chance(0.5):
        return d.fresh(kept, dtype)
    a = d.data(kept, "bool")
    a[..., 0] = True
    return d.weight(a) if d.chance(0.5) else d.input(a)


def rotary(d: Draw) -> None:
    """RotaryEmbedding: pairs side by side or in halves, of a part of the features, by position or by positions given."""
    b, s, heads, half = d.rng.choice([1, 2, 3]), d.size(5), d.rng.choice([1, 2, 3]), d.rng.choice([1, 2, 3])
    width = 2 * half + (d.rng.choice([1, 2, 4]) if d.chance(0.4) else 0)
    flat = d.chance(0.5)
    x = d.mate(d.fresh((1,)), (b, s, heads * width) if flat else (b, heads, s, width))
    ids: list[Value] = []
    table: tuple[int, ...] = (b, s)
    if d.chance(0.5):
        table = (d.rng.randint(s, s + 3),)
        a = d.data((b, s), "int64", lo=0, hi=table[0] - 1)
        if d.chance(0.3):
            a = np.broadcast_to(np.arange(s, dtype=np.int64), (b, s)).copy()
        ids = [d.weight(a) if d.chance(0.5) else d.input(a)]
    need(s, "no positions")
    d.add(
        "RotaryEmbedding", [x, d.fresh((*table, half)), d.fresh((*table, half)), *ids], interleaved=d.rng.randrange(2),
        num_heads=heads if flat else None, rotary_embedding_dim=2 * half if width > 2 * half else d.rng.choice([None, width]),
    )  # fmt: skip


FAMILIES = {f.__name__: f for f in (recurrent, attention, rotary)}
