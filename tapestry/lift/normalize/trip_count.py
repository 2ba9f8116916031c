"""How many steps a Loop takes whose condition hangs on numbers that are known before the run: it is tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import GraphProto, NodeProto, helper, numpy_helper

from tapestry.lift.file.protos import is_standard
from tapestry.onnx_eval.reference_evaluator import reference_evaluator

MOST = 1 << 10  # steps that are tried, at most
COUNTING = frozenset(
    {  # of one number each: they give one number
        "Add",
        "Sub",
        "Mul",
        "Neg",
        "Min",
        "Max",
        "Cast",
        "Identity",
        "Less",
        "LessOrEqual",
        "Greater",
        "GreaterOrEqual",
        "Equal",
        "Not",
        "And",
        "Or",
        "Xor",
        "Where",
        "Squeeze",
        "Unsqueeze",
        "Constant",
    }
)

Values = dict[str, np.ndarray]


def trip_count(
    body: GraphProto, states: Sequence[np.ndarray | None], outside: Callable[[str], np.ndarray | None], most: int, version: int
) -> int | None:
    """Steps until the condition that the body computes is false, given that it is true before the first; `most` at most.

    Args:
        states: the first values of what is carried, where they are known.
        outside: a value of the graph around.
    """
    counter = _condition_nodes(body, states, outside)
    if counter is None:
        return None
    nodes, known, used = counter
    first = {body.input[2 + k].name: v for k in used if (v := states[k]) is not None}
    ends = [body.output[0].name, *(body.output[1 + k].name for k in used)]
    return _tried(body, nodes, known, first, ends, most, version)


def _condition_nodes(
    body: GraphProto, states: Sequence[np.ndarray | None], outside: Callable[[str], np.ndarray | None]
) -> tuple[list[NodeProto], Values, list[int]] | None:
    """The nodes that the condition hangs on, through as many steps as there are; the constants and the states among them."""
    makers = {o: n for n in body.node for o in n.output}
    places = {i.name: k for k, i in enumerate(body.input)}
    inside = {t.name: t for t in body.initializer}
    known: Values = {}
    used: list[int] = []
    seen: set[str] = set()
    pending = [body.output[0].name]
    while pending:
        name = pending.pop()
        if not name or name in seen:
            continue
        seen.add(name)
        if name in places:
            k = places[name] - 2
            if k >= 0:
                if k >= len(states) or (start := states[k]) is None or start.size != 1:
                    return None
                used.append(k)
                pending.append(body.output[1 + k].name)
        elif name in makers:
            if not is_standard(makers[name], *COUNTING):
                return None
            pending.extend(makers[name].input)
        else:
            value = numpy_helper.to_array(inside[name]) if name in inside else outside(name)
            if value is None or value.size != 1:
                return None
            known[name] = value
    return [n for n in body.node if seen.intersection(n.output)], known, used


def _tried(
    body: GraphProto, nodes: list[NodeProto], known: Values, first: Values, ends: list[str], most: int, version: int
) -> int | None:
    step, go = body.input[0].name, body.input[1].name
    feeds = {step: np.array(0, np.int64), go: np.array(True), **first}
    ins = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in feeds.items()]
    names = list(dict.fromkeys(ends))
    outs = [helper.make_tensor_value_info(n, 0, None) for n in names]
    constants = [numpy_helper.from_array(v, n) for n, v in known.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "step", ins, outs, constants), opset_imports=[helper.make_opsetid("", version)]
    )
    try:
        evaluator = reference_evaluator(model)
        for t in range(min(most, MOST)):
            results = dict(zip(names, evaluator.run(None, {**feeds, step: np.array(t, np.int64)}), strict=True))
            if any(np.size(v) != 1 for v in results.values()):
                return None
            if not np.reshape(results[ends[0]], -1)[0]:
                return t + 1
            feeds |= {n: np.asarray(results[e]) for n, e in zip(first, ends[1:], strict=True)}
    except Exception:  # whatever the evaluator cannot do: the loop stays a loop
        return None
    return most if most <= MOST else None
