"""Seconds of a probe's kernel, run as the processes of a run do: step by step, on arrays that are there, and after another
kernel, which leaves caches full of other things: its own weights, and its own instructions and ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np

from tapestry.ir.kernel import Box, shape
from tapestry.ir.plan import MeshAxis, Plan, Strategy
from tapestry.ir.program import Launch, Load
from tapestry.ir.types import FLOATS, numpy_dtype
from tapestry.plan.cost import compute
from tapestry.plan.lower import lower
from tapestry.plan.strategy import op_boxes, reads_once
from tapestry.runtime.calibration.probes import Probe
from tapestry.runtime.calibration.rate_fit import KernelPoint, kernel_point
from tapestry.runtime.one_process.logical_devices import LocalExecutor
from tapestry.runtime.one_process.static_schedule import Schedule
from tapestry.runtime.target_protocol import Target

ONE = (MeshAxis("d0", 1),)
WHOLE = Strategy((None,), (None,))


class _StepByStep(LocalExecutor):
    """As a rank runs it."""

    folds = False  # what is timed may read weights alone

    def scheduled(self) -> Schedule | None:
        """Nothing is bound to a position."""
        return None


class KernelClock:
    """A probe, bound to its arrays."""

    def __init__(self, probe: Probe, target: Target) -> None:
        graph = probe.graph
        plan = Plan(graph=graph, mesh=ONE, strategies=(WHOLE,) * len(graph.ops))
        rng = np.random.default_rng(0)
        normal = rng.standard_normal(99991, dtype=np.float32) * np.float32(0.1)

        def data(tensor: str, box: Box) -> Any:
            t = graph.tensors[tensor]
            if t.dtype in FLOATS:
                return target.from_numpy(np.resize(normal, shape(box)).astype(numpy_dtype(t.dtype)))
            top = graph.tensors["t"].shape[0] if tensor == "ids" else 2
            return target.from_numpy(rng.integers(1, top, shape(box)).astype(numpy_dtype(t.dtype)))

        self.probe, self.executor = probe, _StepByStep(graph, lower(plan), target, data)
        self.executor.room = [1 << 40]
        self.executor.bind()
        self.executor.begin(data)
        steps = self.executor.program.steps
        for at, step in enumerate(steps):
            if isinstance(step, Load):
                self.executor.step(at)
        self.launches = [at for at, step in enumerate(steps) if isinstance(step, Launch)]
        self._turns = cycle(self.launches)
        self.run()

    def run(self) -> None:
        """Every copy once."""
        for at in self.launches:
            self.executor.step(at)

    def next(self) -> None:
        """One copy: of all in turns."""
        self.executor.step(next(self._turns))

    def seconds(self, window: float, between: Callable[[], object] = lambda: None) -> float:
        """Seconds of one kernel: the mean over a time long enough that others on the same core have had their turns.

        Args:
            between: what runs before each kernel, and does not count.
        """
        count, spent, start = 0, 0.0, time.perf_counter()
        while count == 0 or time.perf_counter() - start < window:
            between()
            begun = time.perf_counter()
            self.next()
            spent += time.perf_counter() - begun
            count += 1
        return spent / count

    def point(self, seconds: float) -> KernelPoint:
        """The measurement, with FLOPs and bytes as the cost model counts them."""
        op, graph = self.probe.graph.ops[0], self.probe.graph
        block = op_boxes(op, WHOLE.dims, ONE)
        final = block[:, : len(op.dims)]
        heavy, light, moved = compute.quantities(op, graph, block, final, reads_once(op, graph, WHOLE, ONE))
        return kernel_point(self.probe.kind, float(heavy[0]), float(light[0]), float(moved[0]), seconds, self.probe.dtype)
