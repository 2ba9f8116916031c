"""Checks of the GPU runtime, each in a process of its own: Triton decides when it is imported whether it interprets.

    python tests/gpu_checks.py NAME [cpu|cuda]

On the CPU (``TRITON_INTERPRET=1``) the same code runs as on a GPU, but for capture and the compiled launcher.
"""

from __future__ import annotations

import os
import random
import sys

if __name__ == "__main__" and sys.argv[2:] != ["cuda"]:
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from small_models import Case, assert_same, case, mesh_of, peak, planned_transfers, random_plan

from tapestry.codegen.torch_cpu.kernels import from_numpy, to_numpy
from tapestry.codegen.triton.device import DeviceTarget, find_device
from tapestry.ir.plan import Plan
from tapestry.ir.program import Program
from tapestry.plan.lower import lower
from tapestry.runtime.device import DeviceMachine

HERE = find_device()
MODELS = (
    "conv_chain",
    "mlp",
    "norms",
    "attention",
    "views",
    "halves",
    "bfloats",
    "integers",
    "opaques",
    "reductions",
    "branches",
    "noise",
    "gathers",
)


def machine(c: Case, plan: Plan, program: Program) -> DeviceMachine:
    return DeviceMachine(plan.graph, program, DeviceTarget(HERE), source(c.weights), plan.streamed)


def source(arrays: dict[str, np.ndarray]):
    return lambda t, box: from_numpy(np.array(arrays[t][tuple(slice(lo, hi) for lo, hi in box)]))


def outputs(found: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {t: np.array(to_numpy(a)) for t, a in found.items()}


def check_models() -> None:
    """Random plans of small models: results, peak and transfers; three runs, of which the last ones are replayed on a GPU."""
    for name in MODELS:
        for mesh in ("1", "3", "2x2"):
            c = case(name)
            plan = random_plan(c.graph, mesh_of(mesh), random.Random(f"{name} {mesh}"))
            program = lower(plan)
            m = machine(c, plan, program)
            nothing = {t: np.zeros_like(a) for t, a in c.feeds.items()}
            for feeds in (c.feeds, nothing, c.feeds):
                found, measured = m.run(source(feeds))
            assert_same(outputs(found), c.expected, c.graph, (name, mesh))
            assert measured.peak == peak(program), (name, mesh)
            assert measured.transfers == planned_transfers(program), (name, mesh)
            assert all(a >= p for a, p in zip(m.arena_bytes, measured.peak, strict=True))
            if HERE.type == "cuda" and name != "opaques":
                assert m.described()["graphs"] and not any("capture failed" in r for r in m.reasons), (name, m.reasons)


def check_streamed() -> None:
    """Streamed weights are read at every use, and say so."""
    c = case("mlp")
    big = frozenset(t for t, a in c.weights.items() if a.size > 8)
    plan = random_plan(c.graph, mesh_of("2"), random.Random(0), layouts=0.0)
    plan = Plan(graph=plan.graph, mesh=plan.mesh, strategies=plan.strategies, inputs={}, outputs={}, streamed=big)
    m = machine(c, plan, lower(plan))
    for _ in range(3):
        found, measured = m.run(source(c.feeds))
    assert_same(outputs(found), c.expected, c.graph)
    assert measured.peak == peak(lower(plan))
    assert any("streamed" in reason for reason in m.reasons)


if __name__ == "__main__":
    globals()[f"check_{sys.argv[1]}"]()
    print("passed")
