"""What judges does not share the evaluators of what is judged: opaque nodes and random numbers have two implementations each."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tapestry.ir import philox
from tapestry.ir.syntax.parser import parse
from tapestry.onnx_eval import opaque_node
from tapestry.plan.lower import lower
from tapestry.verify import interp, plain_philox
from tests.support.small_models import case, execute, mesh_of, random_plan

WORDS = [  # Random123's kat_vectors
    ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("key", "counter", "words"), WORDS)
def test_known_answers_of_the_interpreters_philox(key, counter, words):
    expected = [int(w, 16) for w in words.split()]
    assert list(plain_philox.block(counter, key)) == expected
    index, long_key = np.uint64(counter[0] | counter[1] << 32), np.uint64(key[0] | key[1] << 32)
    found = interp.NUMPY["philox"](long_key, counter[3], counter[2], np.arange(4), index)
    assert found.dtype == np.int64 and found.tolist() == expected


def test_both_philox_agree_on_signed_arguments():
    key, index = np.array([[-1], [5], [-(2**63)]]), np.array([0, 1, 2**32, -1, 2**62 + 3])
    for word in range(4):
        ours = interp.philox(key, -3, 7, word, index)
        assert np.array_equal(ours, philox.philox(key, np.int64(-3) & 0xFFFFFFFF, 7, word, index))


def test_a_defect_of_the_targets_random_numbers_shows(monkeypatch):
    graph = parse("graph g\n y: i64[4] = op [i: 4] body philox(1, 2, 3, 0, index(i))\n output y")
    right = interp.run(graph, {})["y"]
    monkeypatch.setattr(philox, "philox", lambda *a: np.zeros(4, np.int64))
    assert np.array_equal(interp.run(graph, {})["y"], right)


def test_a_defect_of_an_evaluator_shows(monkeypatch):
    """onnxruntime gives wrong values: the target's results differ from the interpreter's."""
    make = opaque_node._onnxruntime.__wrapped__

    def wrong(*args):
        evaluate = make(*args)
        return lambda given: [a + 1 if a.dtype.kind == "f" else a for a in evaluate(given)]

    wrong.__wrapped__ = wrong
    c = case("opaques")
    program = lower(random_plan(c.graph, mesh_of("2"), random.Random(0)))
    assert all(np.allclose(a, c.expected[t], 1e-4, 1e-5) for t, a in execute(c.graph, program, c)[0].items())
    monkeypatch.setattr(opaque_node, "_onnxruntime", wrong)
    judged = interp.run(c.graph, {**c.feeds, **c.weights})
    assert all(np.allclose(a, c.expected[t], 1e-4, 1e-5) for t, a in judged.items())
    found = execute(c.graph, program, c)[0]
    assert any(not np.allclose(a, judged[t], 1e-3, 1e-3) for t, a in found.items())
