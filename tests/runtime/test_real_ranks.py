"""Builds of every sort on forked ranks: staged and micro-batched, streamed weights, states of a streaming softmax, uneven
shares, outputs that no device holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tapestry.errors import TapestryError
from tapestry.runtime.processes import host_values
from tests.support.paths import ROOT

ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.support.programs.real_ranks", folder / "cases"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_stages_and_micro_batches(found):
    assert found["staged"]["wrong"] == []
    assert found["staged"]["stages"] == 2 and found["staged"]["micro_batches"] == 4 and found["staged"]["transfers"] >= 4


@pytest.mark.slow
def test_streamed_weights(found):
    assert found["streamed"]["wrong"] == [] and found["streamed"]["streamed"] > 0


@pytest.mark.slow
def test_states_of_a_streaming_softmax(found):
    assert found["attention"]["wrong"] == []
    assert {m.split()[0] for m in found["attention"]["merges"]} == {"2", "3", "4"}
    assert all(m.endswith("softsum") for m in found["attention"]["merges"])


@pytest.mark.slow
def test_uneven_shares(found):
    assert found["uneven"]["wrong"] == [] and len({tuple(s) for s in found["uneven"]["shares"]}) > 1


@pytest.mark.slow
def test_outputs_that_no_device_holds(found):
    assert found["hosted"]["wrong"] == []
    assert found["hosted"]["files"] == ["at.npy", "kept.npy", "y.npy"] and "kept" in found["hosted"]["hosted"]


@pytest.mark.slow
def test_values_of_the_host_travel_as_bytes():
    array, text = np.arange(6, dtype=np.int16).reshape(2, 3), np.array([["a", "ü"], ["", "c"]], object)
    for value in (array, np.float64(3.5), np.empty((0, 4), np.float32), np.array([True, False])):
        back = host_values.decode(host_values.encode(value))
        assert back.dtype == np.asarray(value).dtype and np.array_equal(back, value) and back.shape == np.shape(value)
    assert host_values.decode(host_values.encode(text)).tolist() == text.tolist()
    assert host_values.decode(host_values.encode(None)) is None
    sequence = host_values.decode(host_values.encode([array, text]))
    assert np.array_equal(sequence[0], array) and sequence[1].shape == (2, 2)
    for bad in (
        b"",
        b"[1]",
        b'{"shape": [2], "dtype": "int8", "data": "AAAA"}',
        b'{"shape": [1], "dtype": "nothing", "data": ""}',
    ):
        with pytest.raises(TapestryError, match="does not read"):
            host_values.decode(bad)


@pytest.mark.slow
def test_messages_are_on_their_way_beside_kernels(found):
    """What is sent early arrives while every rank computes what does not need it, and the results are the same bits."""
    case = found["overlapped"]
    assert case["wrong"] == [] and case["launches_between"] >= 3
    assert case["messages"] >= 2 and max(case["kernels_beside"]) >= 2
