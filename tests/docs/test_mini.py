"""The small compiler of docs/mini: right results, the known best plans, and a checker that refuses what is broken."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from types import ModuleType

import numpy as np
import pytest

from tests.support.paths import ROOT


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mini", ROOT / "docs" / "mini" / "mini.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["mini"] = module
    spec.loader.exec_module(module)
    return module


mini = _load()


def every_plan(graph, devices):
    choices = [[None, *op.dims, *op.reduce] for op in graph.ops]
    for cut in itertools.product(*choices):
        yield mini.plan_for(graph, devices, dict(zip((op.out for op in graph.ops), cut)))


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_every_plan_of_an_mlp_is_right_and_passes(devices):
    graph, rng = mini.mlp(3, 4, 5), np.random.default_rng(1)
    x, w, v = (rng.standard_normal(s) for s in graph.inputs.values())
    want = np.maximum(x @ w, 0) @ v
    for plan in every_plan(graph, devices):
        np.testing.assert_allclose(mini.run(plan, {"x": x, "w": w, "v": v})["y"], want)
        assert mini.check(plan) == 2 * (3 * 5 * 4 + 3 * 4 * 5) * _copies(plan)


def _copies(plan) -> float:
    """How often a point is computed on average: on every device where an operation is not cut."""
    return sum(plan.devices if d is None else 1 for d in plan.cut.values()) / len(plan.cut)


@pytest.mark.parametrize("devices", [2, 3])
def test_every_plan_of_a_stencil_is_right_and_passes(devices):
    graph, rng = mini.stencil(12), np.random.default_rng(2)
    x, f = (rng.standard_normal(s) for s in graph.inputs.values())
    want = np.correlate(np.correlate(x, f), f)
    for plan in every_plan(graph, devices):
        np.testing.assert_allclose(mini.run(plan, {"x": x, "f": f})["b"], want)
        mini.check(plan)


def test_brute_force_finds_the_known_best_plans():
    megatron = mini.best(mini.mlp(4, 32, 256), 4)
    assert megatron.cut == {"h": "n", "y": "m"}, "weights are dear: columns, then rows, one all-reduce"
    assert sum(map(len, megatron.messages.values())) == 0
    assert mini.best(mini.mlp(256, 8, 16), 4).cut == {"h": "i", "y": "i"}, "weights are cheap: the batch"
    assert mini.best(mini.stencil(4004), 4).cut == {"a": "i", "b": "i"}, "a halo costs less than anything else"


def test_only_the_halo_is_sent():
    plan = mini.plan_for(mini.stencil(12, window=3), 2, {"a": "i", "b": "i"})
    assert plan.messages["b"] == [(1, 0, "a", (range(5, 6),)), (0, 1, "a", (range(4, 5),))]


def broken_plans():
    good = mini.plan_for(mini.stencil(20), 4, {"a": "i", "b": "i"})
    first, *rest = good.messages["b"]
    source, target, tensor, (cells,) = first
    yield "a message less", {**good.messages, "b": rest}, good.cut
    yield "a cell less", {**good.messages, "b": [(source, target, tensor, (cells[1:],)), *rest]}, good.cut
    yield "to another device", {**good.messages, "b": [(source, (target + 2) % 4, tensor, (cells,)), *rest]}, good.cut
    yield "from a device that has not", {**good.messages, "b": [((source + 2) % 4, target, tensor, (cells,)), *rest]}, good.cut
    yield "before it is there", {"a": good.messages["b"], "b": []}, good.cut
    yield "another cut", good.messages, {"a": "i", "b": "r"}


@pytest.mark.parametrize(("what", "messages", "cut"), list(broken_plans()), ids=lambda x: x if isinstance(x, str) else "")
def test_the_checker_refuses(what, messages, cut):
    good = mini.plan_for(mini.stencil(20), 4, {"a": "i", "b": "i"})
    mini.check(good)
    with pytest.raises(mini.Broken):
        mini.check(dataclasses.replace(good, messages=messages, cut=cut))


def test_the_checker_refuses_a_read_outside():
    graph = mini.stencil(12)
    with pytest.raises(mini.Broken, match="outside"):
        mini.check(mini.plan_for(dataclasses.replace(graph, inputs={**graph.inputs, "x": (11,)}), 2, {"a": None, "b": None}))


def test_it_is_small():
    assert len((ROOT / "docs" / "mini" / "mini.py").read_text().splitlines()) <= 310
