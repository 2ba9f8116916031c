"""What a target needs: five members are enough to run a program, and what is optional is asked for by its own protocol."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tapestry.codegen.torch_cpu import TorchCpu
from tapestry.codegen.torch_cpu.kernels import from_numpy, to_numpy
from tapestry.codegen.triton.run.device_target import TritonTarget
from tapestry.plan.lower import lower
from tapestry.runtime.one_process.logical_devices import LocalExecutor
from tapestry.runtime.target_protocol import RecordingTarget
from tests.support.small_models import assert_same, case, mesh_of, peak, planned_transfers, random_plan


class Smallest:
    """A target with the members of `Target` and nothing else; its kernels are plain functions."""

    device = torch.device("cpu")

    def kernel(self, graph, kernel):
        run = TorchCpu().kernel(graph, kernel)
        return lambda ins, states: run(ins, states)

    def merge(self, monoid, states):
        return TorchCpu().merge(monoid, states)

    def from_numpy(self, array):
        return from_numpy(array)

    def to_numpy(self, array, dtype):
        return to_numpy(array, dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["conv_chain", "attention", "norms", "opaques"])
@pytest.mark.parametrize("mesh", ["1", "3", "2x2"])
def test_five_members_are_enough(name, mesh):
    c = case(name)
    program = lower(random_plan(c.graph, mesh_of(mesh), random.Random(f"{name} {mesh}")))

    def source(arrays):
        return lambda t, box: from_numpy(np.array(arrays[t][tuple(slice(lo, hi) for lo, hi in box)]))

    executor = LocalExecutor(c.graph, program, Smallest(), source(c.weights))
    for _ in range(2):
        outs, measured = executor.run(source(c.feeds))
        assert_same({t: np.array(to_numpy(a)) for t, a in outs.items()}, c.expected, c.graph, (name, mesh))
        assert measured.peak == peak(program) and measured.transfers == planned_transfers(program)
        assert not any(executor.held.arrays), "what a run computed stays beyond it"


def test_recorded_calls_are_optional():
    assert isinstance(TorchCpu(), RecordingTarget)
    assert not isinstance(Smallest(), RecordingTarget) and not isinstance(TritonTarget(), RecordingTarget)
