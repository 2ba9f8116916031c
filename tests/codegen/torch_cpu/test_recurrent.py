"""Recurrences in C beside the operators' formulas in double precision: gates, directions, peepholes, initial states, NaN."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

import tapestry
from tapestry import api
from tapestry.runtime.one_process.logical_devices import LocalExecutor
from tests.support.small_models import N, net

pytestmark = [pytest.mark.usefixtures("c_compiler", "threads")]
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
Arrays = Mapping[str, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def one_way(kind: str, a: Arrays, after: bool, backwards: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(states of all steps, the last one, the last cell) of one direction, in float64."""
    gates, (hidden, cell), x = GATES[kind], (a["h"], a["c"]), a["x"]
    w, r, wb, rb, holes = (np.split(a[k], n) for k, n in (("W", gates), ("R", gates), ("wb", gates), ("rb", gates), ("P", 3)))
    shown = np.zeros((len(x), *hidden.shape))
    for t in range(len(x))[:: -1 if backwards else 1]:
        given = [x[t] @ w[g].T + wb[g] for g in range(gates)]
        own = [hidden @ r[g].T + rb[g] for g in range(gates)]
        if kind == "RNN":
            hidden = np.tanh(given[0] + own[0])
        elif kind == "LSTM":
            i, f = sigmoid(given[0] + own[0] + holes[0] * cell), sigmoid(given[2] + own[2] + holes[2] * cell)
            cell = f * cell + i * np.tanh(given[3] + own[3])
            hidden = sigmoid(given[1] + own[1] + holes[1] * cell) * np.tanh(cell)
        else:
            z, reset = sigmoid(given[0] + own[0]), sigmoid(given[1] + own[1])
            inner = reset * own[2] if after else (reset * hidden) @ r[2].T + rb[2]
            hidden = (1 - z) * np.tanh(given[2] + inner) + z * hidden
        shown[t] = hidden
    return shown, hidden, cell


def sequences(
    kind: str, sizes: tuple[int, int, int, int], direction: str, more: str, outs: str
) -> tuple[onnx.ModelProto, Arrays, list[np.ndarray]]:
    """A model of one node, its input, and what it gives; ``more``: biases, initial states, peepholes, a reset after."""
    steps, batch, width, hidden = sizes
    rng, ways, gates = np.random.default_rng(0), 1 + (direction == "bidirectional"), GATES[kind]
    shapes = {"W": (gates * hidden, width), "R": (gates * hidden, hidden), "B": (2 * gates * hidden,), "P": (3 * hidden,)}
    arrays = {k: (rng.standard_normal((ways, *s)) * 0.4).astype(np.float32) for k, s in shapes.items()}
    arrays |= {k: rng.standard_normal((ways, batch, hidden)).astype(np.float32) for k in "hc"}
    x = rng.standard_normal((steps, batch, width)).astype(np.float32)
    x[steps // 2, 0, 0] = np.nan if "n" in more else x[steps // 2, 0, 0]
    used = {"B": "b" in more, "P": "p" in more, "h": "i" in more, "c": "i" in more and kind == "LSTM"}
    for k, there in used.items():
        arrays[k] *= there
    names = ["x", "W", "R", "B" * used["B"], "", "h" * used["h"], "c" * used["c"], "P" * used["P"]]
    names = names if kind == "LSTM" else names[:6]
    results = [n * (n in outs) for n in "yhc"[: 3 if kind == "LSTM" else 2]]
    results = [n and f"out {n}" for n in results]
    attributes: dict[str, Any] = {"layout": 0} if "y" in outs else {}  # as exporters write it
    attributes |= {"linear_before_reset": int("a" in more)} if kind == "GRU" else {}
    node = N(kind, names, results, hidden_size=hidden, direction=direction, **attributes)
    given = {"x": x, **{k: arrays[k] for k in "hc" if used[k]}}
    weights = {k: arrays[k] for k in ("W", "R", *(k for k in "BP" if used[k]))}
    ins = {k: (T.FLOAT, a.shape) for k, a in given.items()}
    model = net([node], ins, {n: T.FLOAT for n in results if n}, weights)
    wide = {k: a.astype(np.float64) for k, a in (arrays | {"x": x}).items()}
    found = []
    for way in range(ways):
        own = {k: a if k == "x" else a[way] for k, a in wide.items()}
        own["wb"], own["rb"] = np.split(own["B"], 2)
        found.append(one_way(kind, own, "a" in more, way == 1 or direction == "reverse"))
    shown, last, cell = (np.stack(a) for a in zip(*found, strict=True))
    want = {"y": shown.swapaxes(0, 1), "h": last, "c": cell}
    return model, given, [want[n[-1]] for n in results if n]


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("more", "outs"), [("bi", "yhc"), ("", "y"), ("bp", "hc"), ("bian", "yhc"), ("a", "h")])
def test_steps_give_what_the_formulas_give(kind: str, direction: str, more: str, outs: str) -> None:
    if kind != "LSTM" and "p" in more:
        pytest.skip("it has no peepholes")
    for sizes in ((1, 1, 1, 1), (7, 3, 5, 19), (4, 2, 33, 40)):
        model, given, want = sequences(kind, sizes, direction, more, outs)
        made = api.compile(model, mesh="1")
        for _, repeated in itertools.product(range(2), [made.run(given)]):
            for got, wanted in zip(repeated.values(), want, strict=True):
                np.testing.assert_allclose(np.asarray(got), wanted, rtol=2e-5, atol=2e-6)


def test_a_run_is_calls_in_c_alone() -> None:
    model, given, _ = sequences("GRU", (3, 1, 4, 8), "forward", "b", "y")
    with tapestry.Session(api.compile(model, mesh="1")) as s:
        s.run(given)
        executor = s._engine.session.executor  # type: ignore[union-attr]
        assert isinstance(executor, LocalExecutor) and executor.schedule and executor.schedule.at_once


@pytest.mark.parametrize("room", [0, 1 << 9, 1 << 11, 1 << 20])
def test_all_weights_are_packed_or_none(room: int) -> None:
    model, given, want = sequences("LSTM", (3, 2, 5, 8), "bidirectional", "bi", "yhc")
    with tapestry.Session(api.compile(model, mesh="1")) as s:
        executor = s._engine.session.executor  # type: ignore[union-attr]
        executor.room = [room]
        for _ in range(2):
            for got, wanted in zip(s.run(given).values(), want, strict=True):
                np.testing.assert_allclose(np.asarray(got), wanted, rtol=2e-5, atol=2e-6)
