"""What lies between kernels and torch.distributed: nothing is copied to the host, waited for there or allocated anew."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from tapestry.codegen.torch_cpu.base.scalars import TORCH_DTYPES
from tapestry.ir.collective_calls import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, CALLS, EXCHANGE, REDUCE_SCATTER
from tapestry.ir.kernel import shape
from tapestry.ir.program import Reduce, Transfer, reads, transfer_bytes
from tapestry.plan.lower import lower
from tapestry.runtime.processes.distributed import RankExecutor
from tapestry.runtime.processes.heartbeat import Heartbeat, shared
from tapestry.runtime.processes.wire import Wire
from tests.support.messages.pretended_device import META, OnDevice, pretended_ranks
from tests.support.messages.recorded_wire import Shapes
from tests.support.small_models import case, mesh_of, random_plan

WATCH = OnDevice()


def watched(machine: RankExecutor) -> None:
    """Let what starts and finishes what travels run under the eyes of `OnDevice`."""
    work = {f for m in machine.moves.values() for f in (m.start, m.finish)}

    def under(function):
        def run() -> None:
            with WATCH:
                function()

        return run

    machine.actions = [tuple(under(f) if f in work else f for f in actions) for actions in machine.actions]


class Merges(Shapes):
    """Merges by a monoid are kernels, and may allocate."""

    def merge(self, monoid, states):
        with torch.utils._python_dispatch._disable_current_modes():
            return super().merge(monoid, states)


def span(a: torch.Tensor) -> tuple[int, int]:
    """Where an array lies in its memory, in bytes."""
    first = a.storage_offset() * a.element_size()
    return first, first + a.nbytes


def held_long_enough(machine: RankExecutor) -> None:
    """No other buffer lies where something is while it may still be sent from there, or is expected."""
    begin = {name: m.since for m in machine.moves.values() for _, name, _ in m.into}
    steps = machine.program.steps
    for at, m in machine.moves.items():
        for d, name in (x for x in machine.placed if x[1] in reads(steps[at])):
            lo, hi = span(machine.placed[d, name])
            for (e, other), a in machine.placed.items():
                if (e, other) != (d, name) and at < begin[other] <= m.until:
                    first, last = span(a)
                    assert not (first < hi and lo < last), (name, other)


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
def test_messages_stay_on_the_device(monkeypatch):
    monkeypatch.setattr(Wire, "shake_hands", lambda self, calls: None)  # it is before the first step, and compares on the host
    made, payload, planned = Counter(), 0, 0
    for name in ("attention", "norms", "reductions", "branches", "conv_chain", "integers"):
        for mesh in ("4", "2x2"):
            for seed in range(1):
                graph = case(name).graph
                program = lower(random_plan(graph, mesh_of(mesh), random.Random(f"{name} {mesh} {seed}")))
                source = lambda t, box, g=graph: torch.empty(shape(box), dtype=TORCH_DTYPES[g.tensors[t].dtype], device=META)  # noqa: E731
                planned += sum(2 * transfer_bytes(s, program) for s in program.steps if isinstance(s, Transfer | Reduce))
                for rank in range(4):
                    with pretended_ranks(rank, 4):
                        wire = Wire(rank, 4, bytes(16), Heartbeat(shared(4), rank), device=META, checking=False)
                        machine = RankExecutor(graph, program, Merges(), source, wire=wire)
                        machine.connect([int(n) for n in mesh.split("x")])
                        watched(machine)
                        machine.run(source)
                        held_long_enough(machine)
                        places = {k: a.storage_offset() for k, a in machine.placed.items()}
                        machine.run(source)
                        assert places == {k: a.storage_offset() for k, a in machine.placed.items()}
                        made.update(machine.backend_calls)
                        payload += wire.payload
    assert payload == planned  # on the backend of GPUs as well
    assert set(made) >= {ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, EXCHANGE} and set(made) <= set(CALLS), made
    assert {ALL_TO_ALL, BROADCAST} & set(made), made
    assert any(n.startswith("aten.copy_") for n in WATCH.seen)


@pytest.mark.parametrize(
    "bad", [lambda x: x.cpu(), lambda x: x.sum().item(), lambda x: x.copy_(torch.ones(3)), lambda x: x.clone()]
)
def test_what_the_watch_refuses(bad):
    x = torch.empty(3, device=META)
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), OnDevice():
        bad(x)
