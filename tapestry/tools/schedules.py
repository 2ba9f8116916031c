"""Runs a program's blocks in any legal order, more than once: each is a function of what it reads.

Weights are read and packed as everything else is. The kernels are those of a plain run, so that results must be the same
bits; what each block makes is compared by its hash whenever it is made again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tapestry.api import Compiled, open_session
from tapestry.ir.graph import Graph
from tapestry.ir.kernel import Box, intersect, shape, size
from tapestry.ir.program import Launch, Load, Program, Reduce, Transfer
from tapestry.onnx_eval.opaque_node import HostValue
from tapestry.onnx_eval.value_kinds import is_array, is_map, is_sequence
from tapestry.runtime import arrays
from tapestry.runtime.block_tasks import Task, Value, tasks_of
from tapestry.runtime.block_walk import BlockWalk, Told
from tapestry.runtime.executor import Held, present, silent
from tapestry.runtime.one_process.logical_devices import LocalExecutor
from tapestry.runtime.one_process.static_schedule import Schedule
from tapestry.runtime.session import Result, Session
from tapestry.runtime.target_protocol import Array, Measured, PackableKernel, Progress, Recorder, Source, Target

Values = Mapping[Value, Array]


class AnyOrderExecutor(LocalExecutor):
    """Runs one Program as tasks.

    Attributes:
        seed: of the order of the next run.
        told: what happened in the last one.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        target: Target,
        weights: Source,
        streamed: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(graph, program, target, weights, streamed)
        self.tasks = tasks_of(program)
        self.seed, self.told = 0, Told()
        self.recorders: Mapping[int, Recorder] = {}
        self._packs: dict[tuple[int, Hashable], tuple[Array, Array]] = {}

    def scheduled(self) -> Schedule | None:
        """Nothing has a position, but kernels are those of a plain run, which on one device are bound to theirs."""
        found = super().scheduled()
        self.recorders = {} if found is None else found.recorders
        return None

    def run(
        self, feeds: Source, progress: Progress = silent, wanted: Collection[str] | None = None
    ) -> tuple[dict[str, Array], Measured]:
        """Outputs by name (those that are wanted, by default all), and what the run used."""
        self.bind()
        with self.busy:
            self.feeds, self.held = feeds, Held.nothing(self.program.devices)
            self._packs.clear()
            ends = [(d, n) for n in self.program.outputs.values() for d in self.devices if self._has(d, n)]
            walk = BlockWalk(self.tasks, ends, self.program.devices, self.seed, self._computed_by, digest, arrays.nbytes)
            walk.run(progress)
            self.told = walk.told
            for d, name in ends:
                self.held.arrays[d][name] = walk.held[d, name]
            try:
                return self.outputs(wanted), Measured(walk.told.peak)
            finally:
                self.held, self.feeds = Held.nothing(self.program.devices), self.weights
                self._packs.clear()

    def _has(self, device: int, name: str) -> bool:
        return self.program.buffers[name].boxes[device] is not None

    def _computed_by(self, at: int, values: Values) -> Sequence[Array]:
        """What a task makes."""
        task = self.tasks[at]
        step, d = self.program.steps[task.step], task.device
        match step:
            case Load():
                tensor = self.program.buffers[step.buffer].tensor
                source = self.weights if tensor in self.graph.weights else self.feeds
                return [source(tensor, self.box(d, step.buffer))]
            case Launch():
                return self._launched(task, step, values)
            case Transfer():
                return [self._received(step, d, values)]
            case Reduce():
                return self._merged(step, d, values)
            case _:
                raise AssertionError(step)

    def _launched(self, task: Task, step: Launch, values: Values) -> list[Array]:
        d, kernel = task.device, self.kernels[task.step, task.device]
        ins = [values.get((d, n)) if n else None for n in step.ins]
        names = self.packing[d].names.get(task.step)
        run = kernel
        if names and isinstance(kernel, PackableKernel):
            run = kernel.packed
            for k in names:
                ins[k] = self._packed_as(kernel, k, ins[k])
        recorder = self.recorders.get(task.step)
        if recorder is None:
            return run(ins, [values[d, n] for n in step.states])
        memory = [self._memory(d, n) for n in step.outs]
        recorder.bind(ins, memory).run()
        return [view(m) for view, m in zip(recorder.arrays, memory, strict=True)]

    def _memory(self, device: int, name: str) -> Array:
        """New memory for a buffer, flat."""
        count, dtype = size(self.box(device, name)), arrays.torch_dtype(self.program.buffers[name].dtype)
        return torch.empty(count, dtype=dtype, device=self.target.device)

    def _packed_as(self, kernel: PackableKernel, k: int, plain: Array) -> Array:
        """A weight as a kernel likes it, made again where the weight has been read again."""
        how = kernel.packs[k]
        key = (id(plain), how.key)
        if key not in self._packs:
            self._packs[key] = (how.run(plain), plain)  # what it was made of stays, so that its id does
        return self._packs[key][0]

    def _received(self, step: Transfer, device: int, values: Values) -> Array:
        buffer, box = self.program.buffers[step.dst], self.box(device, step.dst)
        parts = [(m.src, m.box) for m in step.messages if m.dst == device]
        held = self.program.buffers[step.src].boxes[device]
        own = None if held is None else intersect(held, box)
        parts += [] if own is None else [(device, own)]
        pieces = [(b, self._part(values, src, step.src, b)) for src, b in parts]
        return arrays.assemble(box, buffer.dtype, pieces, self.target.device)

    def _merged(self, step: Reduce, device: int, values: Values) -> list[Array]:
        group = next(g for g in step.groups if device in g)
        boxes = [self.box(device, n) for n in step.dsts]
        states = [[self._state(step, k, e, box, values) for k, box in enumerate(boxes)] for e in group]
        merged = self.merged_as_sent(self.monoid(step.op), states, step.sent_as)
        dtypes = [self.program.buffers[n].dtype for n in step.dsts]
        there = zip(boxes, dtypes, merged, strict=True)
        return [arrays.assemble(box, dtype, [(box, a)], self.target.device) for box, dtype, a in there]

    def _state(self, step: Reduce, k: int, device: int, box: Box, values: Values) -> Array:
        if step.known and step.known[k]:
            return self.count(step, k, device, shape(box))
        return self._part(values, device, step.srcs[k], box)

    def _part(self, values: Values, device: int, name: str, box: Box) -> Array:
        return arrays.part(values[device, name], box, present(self.program.buffers[name].boxes[device]))


def digest(array: Array) -> bytes:
    """A hash of all the bits of an array; of a value of the host, of its arrays, keys and order."""
    h = hashlib.blake2b(digest_size=16)
    if isinstance(array, HostValue):
        _add(h, array.value)
    else:
        flat = array.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        h.update(memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b"")
    return h.digest()


def _add(h: Any, value: Any) -> None:
    if is_array(value):
        h.update(f"{value.dtype}{value.shape}".encode())
        h.update(repr(value.tolist()).encode() if value.dtype == object else np.ascontiguousarray(value).tobytes())
    elif is_sequence(value):
        h.update(f"[{len(value)}".encode())
        for x in value:
            _add(h, x)
    elif is_map(value):
        for k, x in value.items():
            h.update(repr(k).encode())
            _add(h, x)
    else:
        h.update(repr(value).encode())


def run_in_any_order(
    compiled: Compiled, feeds: Mapping[str, Any], seed: int, progress: Progress = silent
) -> tuple[Result, dict[str, Any]]:
    """Run a build block by block in a random order, beside a run in the plan's."""
    other = open_session(compiled.build, b"".join(compiled.constants.values()), make=AnyOrderExecutor)
    return run_beside(compiled.session, other, feeds, seed, progress)


def run_beside(
    plain: Session, other: Session, feeds: Mapping[str, Any], seed: int, progress: Progress = silent
) -> tuple[Result, dict[str, Any]]:
    """Run a session of an `AnyOrderExecutor` beside one that keeps the plan's order: the results must have the same bits.

    Returns:
        The second one's result, and what was computed.
    """
    executor = other.executor
    assert isinstance(executor, AnyOrderExecutor)
    executor.seed = seed
    expected, result = plain.run(feeds).outputs, other.run(feeds, progress)
    found = result.outputs
    differ = [n for n, a in expected.items() if digest(HostValue(a)) != digest(HostValue(found[n]))]
    told = executor.told.document()
    same = not differ and not told["differ"]
    return result, {"order": "random", "seed": seed, "same_bits": same, "other_outputs": differ, **told}
